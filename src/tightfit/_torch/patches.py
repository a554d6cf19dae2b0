"""Context managers that replace a function of torch, and restore it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn import init

Deepcopy = Callable[[nn.Parameter, dict[int, Any]], nn.Parameter]


@contextmanager
def without_truncated_normal() -> Iterator[None]:
    """Context manager in which `torch.nn.init.trunc_normal_` does nothing. It would read values
    from the tensor that it initializes, but fake tensors and meta tensors have no values."""
    drawn = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = drawn


@contextmanager
def formatting_as_numbers() -> Iterator[None]:
    """Context manager in which an f-string shows a fake tensor without dimensions as the number
    that its `item` returns. Real tensors are shown in this way, too, and some models put such a
    number into the name of a module. A fake tensor whose value is unknown is shown as usual."""
    before = FakeTensor.__format__

    def show(tensor: torch.Tensor, specification: str) -> str:
        try:
            return format(tensor.item(), specification) if tensor.dim() == 0 else before(tensor, specification)  # type: ignore[arg-type]
        except DataDependentOutputException:
            return before(tensor, specification)  # type: ignore[arg-type]

    FakeTensor.__format__ = show  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensor.__format__ = before  # type: ignore[method-assign]


@contextmanager
def after_resize(observe: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Context manager in which `observe` is called with each storage after the storage was resized.

    fully_shard frees gathered parameters by resizing their storages. A resize is no operation, so a
    dispatch mode does not see it.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_observe(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        observe(storage)

    torch.UntypedStorage.resize_ = resize_and_observe  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def after_deepcopy(observe: Callable[[nn.Parameter, nn.Parameter], None]) -> Iterator[None]:
    """Context manager in which `observe(parameter, copy)` is called after each deep copy of a
    parameter.

    torch's registration hooks do not see these copies. nn.TransformerEncoder, for example,
    deep-copies its first layer.
    """
    deepcopy: Deepcopy = nn.Parameter.__deepcopy__

    def deepcopy_and_observe(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copy = deepcopy(parameter, memo)
        observe(parameter, copy)
        return copy

    nn.Parameter.__deepcopy__ = deepcopy_and_observe  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]


@contextmanager
def convertible_fake_modules() -> Iterator[None]:
    """Context manager in which `Module.to`, `Module.half` and similar conversions also work for
    modules with fake parameters that are referenced elsewhere.

    torch would swap such a parameter with its converted version, and refuses to do this if, for
    example, the fake mode has a reference to the parameter. Inside this context, the parameter
    object stays and gets the converted data.
    """
    apply: Any = nn.Module._apply

    def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        fakes: dict[str, Any] = {
            name: parameter for name, parameter in module._parameters.items() if isinstance(parameter, FakeTensor)
        }
        if not fakes or any(fake.grad is not None for fake in fakes.values()):
            return apply(module, fn, recurse)  # type: ignore[no-any-return]
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, fake in fakes.items():
            with torch.no_grad():
                converted = fn(fake)
                if fake.device.type == converted.device.type:
                    fake.data = converted
                else:  # as with nn.utils.skip_init, from meta
                    module._parameters[name] = nn.Parameter(converted, fake.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = convert  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


@contextmanager
def copyable_fake_tensors() -> Iterator[None]:
    """Context manager in which `copy.deepcopy` of a fake tensor gives a fake tensor of the same mode.

    torch would copy the mode, too, and refuses to compute with tensors of two modes.
    nn.TransformerEncoder deep-copies its first layer, and a model with a teacher its student.
    """

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            with torch.no_grad():
                copied = tensor.detach().clone()
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if parameter else copied
        return memo[id(tensor)]  # type: ignore[no-any-return]

    before = FakeTensor.__deepcopy__
    FakeTensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__deepcopy__ = before  # type: ignore[method-assign]


__all__ = [
    "after_deepcopy",
    "after_resize",
    "convertible_fake_modules",
    "copyable_fake_tensors",
    "formatting_as_numbers",
    "without_truncated_normal",
]
