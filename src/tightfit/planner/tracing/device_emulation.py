"""Emulate the target device for fake tensors, which are CPU tensors.

Inside `emulate_device("cuda")`, torch treats fake CPU tensors as it treats CUDA tensors. Two things
differ from a CPU: autocast keeps other operations in fp32, and the fused attention kernel supports
dropout. Which operations have an autocast rule on CUDA is looked up in torch: every build of torch
contains these rules.

`fake_process_group` lets a single process trace what one of several ranks does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit._torch.dispatch import (
    OpOverload,
    clear_dispatch_cache,
    has_kernel,
    operation_names,
    remove_kernels,
    without_cpu_autocast_rules,
)
from tightfit._torch.distributed import init_fake_process_group
from tightfit._torch.operations import schema_of
from tightfit._torch.pytree import tree_map
from tightfit.errors import InputError
from tightfit.target_device import TARGET

# from torch/include/ATen/autocast_mode.h: operations that run in 16 bits (_LOW), and operations
# that run in the widest dtype of their inputs (_WIDEST); all others with a rule run in fp32
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


@contextmanager
def emulate_device(device: str) -> Iterator[None]:
    """Return a context manager inside which torch treats fake CPU tensors like tensors on `device`
    ("cpu" or "cuda")."""
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
    overloads = _cuda_autocast_overloads()
    try:
        for overload in overloads:
            library.impl(overload, _autocast_rule(overload), "AutocastCPU")
        library.impl(attention, partial(_without_dropout, attention), "AutogradCPU")
        for overload in (*overloads, attention):
            clear_dispatch_cache(overload)
        yield
    finally:
        remove_kernels(library)
        for overload in (*overloads, attention):
            clear_dispatch_cache(overload)


@cache
def _cuda_autocast_overloads() -> tuple[OpOverload, ...]:
    """Return the operations of torch that have an autocast rule on CUDA and none on a CPU.

    Operations that have a rule only on a CPU are not looked for, because they are rare: reflection
    padding, 3-d pooling, Fourier transforms and matrix decompositions, which run in fp32 on a CPU.
    """
    found = []
    for name in operation_names():
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return tuple(found)


def _autocast_rule(overload: OpOverload) -> Callable[..., Any]:
    name = schema_of(overload).name.removeprefix("aten::")

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in _LOW:
            dtype = torch.get_autocast_dtype("cpu")
        elif name in _WIDEST:
            wide = any(leaf.dtype is torch.float32 for leaf in args if isinstance(leaf, Tensor))
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        else:
            dtype = torch.float32
        with without_cpu_autocast_rules():
            args, kwargs = tree_map(partial(_cast, dtype), (args, kwargs))
            return overload(*args, **kwargs)

    return run


def _cast(dtype: torch.dtype, value: Any) -> Any:
    narrow_or_single = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return value.to(dtype) if narrow_or_single else value


def _without_dropout(
    attention: OpOverload,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **named: Any,
) -> Any:
    """Run `attention` (torch's scaled_dot_product_attention) with the CPU kernel and without
    dropout, and return its output. The CPU kernel is fused only without dropout, while CUDA's fused
    kernel draws the dropout mask inside the kernel, so that no memory is needed for the mask."""
    return attention.decompose(query, key, value, attn_mask, 0.0, *rest, **named)


@contextmanager
def fake_process_group(count: int, rank: int = 0, group: bool = False) -> Iterator[None]:
    """Return a context manager inside which torch.distributed has a fake process group. Its
    collectives return at once and send nothing.

    count  world size. With 1, there is a group only if `group` is true
    rank   rank of this process
    group  whether a world of a single process gets a group, too

    Raises InputError if torch.distributed is initialised already.
    """
    if count == 1 and (not group or dist.is_initialized()):
        yield
        return
    if dist.is_initialized():
        raise InputError(
            "predict", "torch.distributed is initialised already", "predict before torch.distributed is initialised"
        )
    init_fake_process_group(rank, count)
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = ["emulate_device", "fake_process_group"]
