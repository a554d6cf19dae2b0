"""Emulate the target device for fake tensors, which are CPU tensors.

Inside `emulate_device("cuda")`, torch treats fake CPU tensors as it treats CUDA tensors. Six things
differ from a CPU:

- Autocast keeps other operations in fp32. Which of them have a rule on CUDA is looked up in torch:
  every build of torch contains these rules.
- Attention has other fused kernels.
- Dropout is one kernel, whose mask has one byte for each element.
- RMSNorm is one kernel, which saves its input.
- Recurrent layers (nn.LSTM, nn.GRU, nn.RNN) are one kernel of cuDNN.
- A softmax of fp16 tensors with an fp32 result makes no fp32 copy of its input.

`fake_process_group` lets a single process trace what one of several ranks does.
"""

from __future__ import annotations

import math
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
from tightfit._torch.operations import (
    EFFICIENT_ATTENTION,
    FUSED_RMS_NORM,
    LOG_SOFTMAX,
    SOFTMAX,
    attention_by_products,
    schema_of,
)
from tightfit._torch.pytree import tree_map
from tightfit.errors import InputError
from tightfit.planner.tracing.recurrent_layers import GRU, LSTM, RNN_RELU, RNN_TANH, on_cudnn
from tightfit.target_device import TARGET

# from torch/include/ATen/autocast_mode.h: operations that run in 16 bits (_LOW), and operations
# that run in the widest dtype of their inputs (_WIDEST); all others with a rule run in fp32
_LOW = {
    "_convolution", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot",
    "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "cudnn_convolution",
    "cudnn_convolution_transpose", "_cudnn_rnn", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
}  # fmt: skip
# operations that run in fp32 by their `dtype` argument, so that no fp32 copy of their input is made
_WITH_DTYPE = {"cumprod", "cumsum", "log_softmax", "softmax", "sum"}
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
}  # fmt: skip
EFFICIENT_ALIGNMENT = 16  # bytes; the memory-efficient attention kernel takes heads of a multiple of it


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
    aten = torch.ops.aten
    composites: dict[OpOverload, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: _attention_on_cuda,
        aten.dropout.default: _fused_dropout,
        aten.softmax.int: partial(_softmax_of_half, SOFTMAX.default),
        aten.log_softmax.int: partial(_softmax_of_half, LOG_SOFTMAX.default),
        aten.lstm.input: on_cudnn(LSTM),
        aten.gru.input: on_cudnn(GRU),
        aten.rnn_tanh.input: on_cudnn(RNN_TANH),
        aten.rnn_relu.input: on_cudnn(RNN_RELU),
    }
    norm, rules = FUSED_RMS_NORM.default, _cuda_autocast_overloads()
    try:
        for overload in rules:
            library.impl(overload, _autocast_rule(overload), "AutocastCPU")
        for overload, kernel in composites.items():
            library.impl(overload, partial(kernel, overload), "AutogradCPU")
        # an operation with a kernel of its device is not decomposed before autograd
        library.impl(norm, norm.decompose, "CPU")
        for overload in (*rules, *composites, norm):
            clear_dispatch_cache(overload)
        yield
    finally:
        remove_kernels(library)
        for overload in (*rules, *composites, norm):
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
    names = [argument.name for argument in schema_of(overload).arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in _LOW:
            dtype = torch.get_autocast_dtype("cpu")
        elif name in _WIDEST:
            wide = any(leaf.dtype is torch.float32 for leaf in args if isinstance(leaf, Tensor))
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        else:
            dtype = torch.float32
        with without_cpu_autocast_rules():
            if name in _WITH_DTYPE and _is_cast(args[0]):
                given = dict(zip(names, args, strict=False)) | kwargs
                return overload(given.pop("self"), **{**given, "dtype": given.get("dtype") or dtype})
            args, kwargs = tree_map(partial(_cast, dtype), (args, kwargs))
            return overload(*args, **kwargs)

    return run


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if _is_cast(value) else value


def _is_cast(value: Any) -> bool:
    """Return whether autocast changes the dtype of `value`: whether it is a tensor of floats of 16 or 32 bits."""
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)


def _attention_on_cuda(
    attention: OpOverload,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run `attention` (torch's scaled_dot_product_attention) with the kind of kernel that torch
    chooses on a GPU of compute capability 8.0 or higher, and return its output.

    Three cases differ from a CPU (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp):

    - In fp32, no fused kernel knows grouped queries: the scores are computed by products.
    - FlashAttention knows no masks, and its values are as wide as its keys. Otherwise, as in
      multi-head latent attention, it is the memory-efficient kernel, which also computes the
      gradient of a mask.
    - Fused kernels draw the dropout mask inside, so that it takes no memory. The CPU's is fused only
      without dropout, so it runs without.
    """
    if enable_gqa and query.shape[1] != key.shape[1] and query.dtype is torch.float32:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return attention_by_products(*given, scale=scale, enable_gqa=True)[0]
    widths = query.shape[-1], value.shape[-1]
    aligned = all(width * query.element_size() % EFFICIENT_ALIGNMENT == 0 for width in widths)
    if query.dim() == 4 and not enable_gqa and (attn_mask is not None or widths[0] != widths[1]) and aligned:
        pairs = (*query.shape[:-1], key.shape[-2])
        bias = None if attn_mask is None else _additive(attn_mask, query.dtype).expand(pairs)
        return EFFICIENT_ATTENTION.default(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return attention.decompose(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores of type `dtype`. A mask of booleans is True where a key is
    visible."""
    if mask.dtype is not torch.bool:
        return mask
    visible, hidden = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, -math.inf))
    return torch.where(mask, visible, hidden)


def _fused_dropout(dropout: OpOverload, value: Tensor, p: float, train: bool) -> Any:
    """Run `dropout` (torch's dropout) as CUDA's kernel does, and return its output. The kernel saves
    a mask of one byte for each element; a CPU saves a tensor of the input's type."""
    if train and 0 < p < 1 and value.numel() > 0:
        return torch.native_dropout(value, p, train)[0]
    return dropout.decompose(value, p, train)


def _softmax_of_half(
    kernel: OpOverload, softmax: OpOverload, value: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Any:
    """Run `softmax` (torch's softmax or log_softmax) as on CUDA, and return its output. On CUDA, `kernel`
    reads fp16 and writes fp32; on a CPU, the input is copied to fp32 first."""
    if value.dtype is torch.float16 and dtype is torch.float32:
        return kernel(value, dim, True)
    return softmax.decompose(value, dim, dtype)


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
