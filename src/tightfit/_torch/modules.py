"""The dicts of an nn.Module, its hooks and its call, and base classes of layers.

torch's public functions read a module's parameters and buffers. These dicts also allow to replace
them, without hooks that torch runs on an assignment and without the check that a parameter stays
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.loss import _Loss as Loss

Conversion = Callable[..., nn.Module]  # nn.Module._apply


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters, without those of its children. Changes to it
    change the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that holds a module's own buffers. Changes to it change the module."""
    return module._buffers


def set_own_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Give a module another dict of buffers. A copy of a module made by copy.copy shares its dict
    with the original."""
    module._buffers = buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict that holds a module's direct children. Changes to it change the module."""
    return module._modules


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes, except parameters, buffers, children, hooks and the training flag."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules", "training") and not name.endswith("_hooks"):
            yield name, value


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """A module's forward pre-hooks, each with whether it takes keyword arguments."""
    return [(hook, key in module._forward_pre_hooks_with_kwargs) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """A module's forward hooks, each with whether it takes keyword arguments."""
    return [(hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its forward or its backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or `replace_call`."""
    return module._compiled_call_impl is not None


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of a module runs: the compiled one if there is one. It runs the
    module's hooks too."""
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    return call


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make each call of a module run `call`. Copies of the module do not get it."""
    module._compiled_call_impl = call


def forward_attribute(module: nn.Module) -> str:
    """The name of the attribute to replace so that a call of a module runs another function, and
    its hooks where they are not compiled with it."""
    return "_compiled_call_impl" if compiled_in_place(module) else "forward"


def wrap_conversion(module: nn.Module, wrap: Callable[[Conversion], Conversion]) -> None:
    """Replace the function `module._apply(fn, recurse)`, which applies a conversion such as
    `.to(dtype)` to a module, by `wrap` of it."""
    module._apply = wrap(module._apply)  # type: ignore[method-assign]


__all__ = [
    "BatchNorm",
    "Conversion",
    "Convolution",
    "Loss",
    "RunningNorm",
    "call_of",
    "compiled_in_place",
    "forward_attribute",
    "forward_hooks",
    "forward_pre_hooks",
    "has_hooks",
    "own_buffers",
    "own_children",
    "own_parameters",
    "plain_attributes",
    "replace_call",
    "set_own_buffers",
    "wrap_conversion",
]
