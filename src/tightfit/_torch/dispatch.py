"""Dispatch modes, which see each operation when it runs, and functions of torch's dispatcher."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def without_cpu_autocast_rules() -> AbstractContextManager[None]:
    """Return a context manager in which autocast does not cast the arguments of operations on CPU
    tensors. Autocast itself stays enabled."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)  # type: ignore[return-value]


def operation_names() -> list[str]:
    """Return the names of all operations that torch's dispatcher knows, such as "aten::add.Tensor"."""
    return torch._C._dispatch_get_all_op_names()


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Return whether an operation has a kernel of its own for a dispatch key.

    name          name of the operation, such as "aten::add.Tensor"
    dispatch_key  name of the key, such as "AutocastCUDA"
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)  # type: ignore[arg-type]


def remove_kernels(library: torch.library.Library) -> None:
    """Remove all kernels that `library` has registered."""
    library._destroy()


def clear_dispatch_cache(overload: OpOverload) -> None:
    """Make torch look up the kernels of an operation again at its next call. torch caches them, and
    does not clear the cache when a library's kernels are removed."""
    overload._dispatch_cache.clear()


__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "clear_dispatch_cache",
    "current_dispatch_modes",
    "has_kernel",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "operation_names",
    "remove_kernels",
    "without_cpu_autocast_rules",
    "without_dispatch_modes",
]
