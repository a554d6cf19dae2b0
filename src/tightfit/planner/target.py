"""Target: fake tensors lie on the processor; within `as_on`, what torch decides by device is decided as on the target.

On a CUDA device autocast keeps other operations in fp32, and the fused attention kernel takes dropout. Which operations
autocast has rules for is asked of torch itself, whose builds all carry the list of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from tightfit.errors import InputError
from tightfit.target_device import TARGET

# torch/include/ATen/autocast_mode.h: what runs in 16 bits, and what in the widest type of its inputs; the rest in fp32
_LOW = {
    "_convolution", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot",
    "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "cudnn_convolution",
    "cudnn_convolution_transpose", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
}  # fmt: skip
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
}  # fmt: skip
_OWN = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Within, the processor's fake tensors are treated as a `device` (cpu, cuda) treats its own."""
    meant = TARGET.set(device)
    try:
        with _cuda_rules() if device == "cuda" else nullcontext():
            yield
    finally:
        TARGET.reset(meant)


@contextmanager
def _cuda_rules() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    attention = torch.ops.aten.scaled_dot_product_attention.default
    overloads = _added()
    try:
        for overload in overloads:
            library.impl(overload, _rule(overload), "AutocastCPU")
        library.impl(attention, partial(_without_dropout, attention), "AutogradCPU")
        _forget_dispatch([*overloads, attention])
        yield
    finally:
        library._destroy()
        _forget_dispatch([*overloads, attention])


def _forget_dispatch(overloads: list[torch._ops.OpOverload]) -> None:
    """What a compiler's trace resolved, torch keeps with the operation, and a library that goes does not clear it."""
    for overload in overloads:
        overload._dispatch_cache.clear()


@cache
def _added() -> tuple[torch._ops.OpOverload, ...]:
    """Operations that autocast has a rule for on CUDA, and none on a processor. The reverse are few and rare: padding by
    reflection, pooling in three dims, Fourier transforms and decompositions, in fp32 on a processor."""
    has, found = torch._C._dispatch_has_kernel_for_dispatch_key, []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, "AutocastCUDA") and not has(name, "AutocastCPU"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return tuple(found)


def _rule(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    name = overload._schema.name.removeprefix("aten::")

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in _LOW:
            dtype = torch.get_autocast_dtype("cpu")
        elif name in _WIDEST:
            wide = any(leaf.dtype is torch.float32 for leaf in args if isinstance(leaf, Tensor))
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        else:
            dtype = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_OWN):
            args, kwargs = tree_map(partial(_cast, dtype), (args, kwargs))
            return overload(*args, **kwargs)

    return run


def _cast(dtype: torch.dtype, value: Any) -> Any:
    narrow_or_single = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return value.to(dtype) if narrow_or_single else value


def _without_dropout(
    attention: torch._ops.OpOverload,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **named: Any,
) -> Any:
    """The processor's kernel, which is fused only without dropout, stands in for CUDA's, which draws it on the way."""
    return attention.decompose(query, key, value, attn_mask, 0.0, *rest, **named)


@contextmanager
def processes(count: int, rank: int = 0, group: bool = False) -> Iterator[None]:
    """As if this were one (the first) of so many processes: what they say to each other is taken as said. Raises InputError
    where the real ones have found each other already.

    group  whether one process, too, is a group
    """
    if count == 1 and (not group or dist.is_initialized()):
        yield
        return
    if dist.is_initialized():
        raise InputError(
            "predict", "processes train together here already", "predict before torch.distributed is initialised"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = ["as_on", "processes"]
