"""The dicts of an nn.Module, its hooks and its call, and base classes of layers.

With torch's public functions, code can read a module's parameters and buffers. With these dicts, it
can also replace them. Then torch runs no hooks as for an assignment, and does not check that a
parameter is replaced by a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.loss import _Loss as Loss

Conversion = Callable[..., nn.Module]  # nn.Module._apply


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict name -> parameter of a module, without the parameters of its children. It is
    the module's own dict, so a change to it changes the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict name -> buffer of a module, without the buffers of its children. It is the
    module's own dict, so a change to it changes the module."""
    return module._buffers


def buffer_names(module: nn.Module) -> list[str]:
    """Return the names of a module's buffers, without the buffers of its children. The buffers of a
    scripted module (torch.jit.script) are no dict, and have only the method `keys`."""
    return list(module._buffers.keys())


def set_own_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Replace the dict name -> buffer of a module. This is needed for a module that copy.copy has
    made, because it shares its dict with the original."""
    module._buffers = buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict name -> direct child of a module. It is the module's own dict, so a change to
    it changes the module."""
    return module._modules


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each attribute of a module that is not a parameter, buffer, child
    module, hook or the training flag."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules", "training") and not name.endswith("_hooks"):
            yield name, value


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """Return a list of (hook, whether it takes keyword arguments) for the forward pre-hooks of a
    module."""
    return [(hook, key in module._forward_pre_hooks_with_kwargs) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """Return a list of (hook, whether it takes keyword arguments) for the forward hooks of a
    module."""
    return [(hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its forward or its backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` or `replace_call` was called for this module."""
    return module._compiled_call_impl is not None


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that runs when `module` is called: its compiled function, or the one that
    `replace_call` has set, or else torch's own. torch's own function also runs the module's hooks.
    """
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    return call


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but without the function that `replace_call` has set."""
    return module._call_impl(*args, **kwargs)


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make `call` run whenever `module` is called. Copies of the module are not affected."""
    module._compiled_call_impl = call


def forward_attribute(module: nn.Module) -> str:
    """Return the name of the module's attribute that has to be replaced so that a call of the
    module runs another function. It is "forward", or "_compiled_call_impl" if the module was
    compiled in place. With "forward", torch still runs the module's hooks around the function."""
    return "_compiled_call_impl" if compiled_in_place(module) else "forward"


def wrap_conversion(module: nn.Module, wrap: Callable[[Conversion], Conversion]) -> None:
    """Replace the method `module._apply`, which conversions such as `module.to(dtype)` call, by
    `wrap(module._apply)`."""
    module._apply = wrap(module._apply)  # type: ignore[method-assign]


__all__ = [
    "BatchNorm",
    "Conversion",
    "Convolution",
    "Dropout",
    "Loss",
    "RunningNorm",
    "call_of",
    "call_uncompiled",
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
