"""Describe each operation that a trace sees: its name, dtype, FLOPs, bytes, and what else decides how fast
it runs (sizes of matrix products, the format of images, alignment). `recorder.py` calls `describe_operation`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from tightfit._torch.operations import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    schema_of,
)
from tightfit.achieved_rates import FLOAT8
from tightfit.cost.recorded_step import BETWEEN_FORMATS, CHANNELS_LAST, OVERLAPPING, BatchLinear, Convolution, Operation
from tightfit.machines.shapes import ALIGNMENT
from tightfit.methods.attention import causal_pairs, probability_count
from tightfit.models.fake_kernels import GROUPED_MM, grouped_mm_flops, grouped_mm_sizes
from tightfit.models.tensors import bytes_accessed, tensors_in
from tightfit.planner.operation_kinds import BATCH_NORMS, LINEAR, NEAREST
from tightfit.planner.tracing.recurrent_layers import recurrent_sizes
from tightfit.runtime.fake_compiler import in_compiled_graph

_ATTENTION = {  # position of the query among the arguments; the key follows it
    "aten._scaled_dot_product_flash_attention_for_cpu": 0,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "aten._scaled_dot_product_flash_attention": 0,
    "aten._scaled_dot_product_flash_attention_backward": 1,
    "aten._scaled_dot_product_efficient_attention": 0,
    "aten._scaled_dot_product_efficient_attention_backward": 1,
    "tightfit.blocked_attention": 0,
    "tightfit.blocked_attention_backward": 1,
}
_CONVOLUTIONS = {"aten.convolution": 0, "aten.convolution_backward": 1}  # position of the image; the weight follows it
_AVERAGES = {"aten.avg_pool2d": 1, "aten.avg_pool2d_backward": 2}  # position of the window's size; its stride follows
# position of the image of all operations whose speed depends on the image's format
_IMAGES = {
    **_CONVOLUTIONS,
    "aten.max_pool2d_with_indices": 0,
    **dict.fromkeys(BATCH_NORMS, 0),
    "aten.avg_pool2d": 0,
    "aten.avg_pool2d_backward": 1,
    **dict.fromkeys((*NEAREST, *LINEAR), 0),
    **dict.fromkeys((f"{name}_backward" for name in (*NEAREST, *LINEAR)), 0),
}
_COPIES = ("aten.clone", "aten.copy_", "aten._to_copy")
_CACHE_LINE = 64  # bytes that a processor reads at once
_PRODUCTS = {
    "aten.mm": (0, 1),
    "aten._scaled_mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.baddbmm": (1, 2),
    "tightfit.add_product": (0, 1),
}
# recurrent kernels, and how many products they compute in place of each of the forward
_RECURRENT = {
    "aten.mkldnn_rnn_layer": 1,
    "aten.mkldnn_rnn_layer_backward": 2,
    "aten._cudnn_rnn": 1,
    "aten._cudnn_rnn_backward": 2,
}
# transformers' experts where torch has no grouped product, and how many grouped products they compute: compiled, with
# weights that are not bf16
_GROUPED_FALLBACK = {"transformers.grouped_mm_fallback": 1, "transformers.grouped_mm_fallback_backward": 2}
_SAME_FLOPS = {  # torch has no FLOP formula for its CPU kernels
    CPU_FLASH_ATTENTION: FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD: FLASH_ATTENTION_BACKWARD,
}


def _convolution_backward_flops(*args: Any, **_: Any) -> int:
    """Return the FLOPs of a convolution's backward. The gradients of the image and of the weight each
    take as many as the forward. torch's formula ignores the groups of the weight's gradient: it
    counts 96 times too many for a depthwise convolution of 96 channels."""
    gradient, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    spatial_shape = (image if transposed else gradient).shape[2:]
    return 2 * image.shape[0] * math.prod(spatial_shape) * weight.numel() * (wanted[0] + wanted[1])


_FLOPS = {
    GROUPED_MM: shape_wrapper(grouped_mm_flops),
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
}


def describe_operation(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], output: Any) -> Operation:
    """Return the operation that `func(*args, **kwargs)` has just run.

    func    the operator's overload, such as torch.ops.aten.mm.default
    name    its name without the overload, such as "aten.mm"
    inputs  all tensors among its arguments
    output  what it returned: a tensor, or a structure of tensors
    """
    outputs = tensors_in(output)
    packet = _SAME_FLOPS.get(func.overloadpacket, func.overloadpacket)
    formula = _FLOPS.get(packet) or flop_registry.get(packet)  # a user may have registered a formula
    flops = formula(*_with_heads_of_query(name, args), **kwargs, out_val=output) if formula else 0
    tensors = outputs or inputs
    floating = [tensor for tensor in [*tensors, *inputs] if tensor.is_floating_point()]
    dtype = str((floating or tensors)[0].dtype).removeprefix("torch.") if tensors else ""
    if name == "aten._scaled_mm":  # its rate depends on the dtype of its factors
        dtype = FLOAT8
    elif name in _RECURRENT:  # the gradients of narrow weights may be fp32
        dtype = str(args[0].dtype).removeprefix("torch.")
    sizes, convolution = _product_sizes(name, args), None
    if name in _CONVOLUTIONS:
        images, convolution = _convolution(name, args)
        sizes = (BatchLinear(float(images)),)
    if name in _IMAGES:
        image = args[_IMAGES[name]]
        name += (OVERLAPPING if _overlaps(name, args) else "") + (CHANNELS_LAST if _is_channels_last(image) else "")
    elif (name in _COPIES or torch.Tag.pointwise in func.tags) and _is_between_formats(inputs, outputs):
        name += BETWEEN_FORMATS
    moved = float(sum(map(bytes_accessed, inputs + outputs)))
    if name in _RECURRENT:
        return _recurrent_operation(name, dtype, args, moved)
    if name in _GROUPED_FALLBACK:
        return _grouped_operation(name, dtype, args, moved)
    computed = _computed_share(func, name, args, kwargs)
    aligned = ALIGNMENT
    if name in _PRODUCTS and not in_compiled_graph():  # the compiler pads rows that are not aligned
        aligned = _alignment([*(args[at] for at in _PRODUCTS[name]), *outputs])
    return Operation(
        name,
        dtype,
        BatchLinear(float(flops)),
        BatchLinear(moved),
        sizes,
        computed_share=computed,
        alignment=aligned,
        convolution=convolution,
    )


def _recurrent_operation(name: str, dtype: str, args: Any, moved: float) -> Operation:
    """Return the operation of a recurrent kernel: as many matrix products, one after the other, as there
    are layers x time steps.

    args   the arguments with which the kernel is called
    moved  bytes that it reads and writes
    """
    calls, rows, columns, depth = recurrent_sizes(name, args)
    sizes = tuple(map(BatchLinear, (1.0, float(rows), float(columns), float(depth))))
    flops = 2.0 * rows * columns * depth * _RECURRENT[name]
    return Operation(name, dtype, BatchLinear(flops), BatchLinear(moved / calls), sizes, BatchLinear(float(calls)))


def _grouped_operation(name: str, dtype: str, args: Any, moved: float) -> Operation:
    """Return the operation of transformers' own grouped product, whose experts are multiplied one after the
    other. Backward computes two such products: the gradients of the tokens and of the weights.

    args   the arguments with which it is called: tokens (S, in), weights (E, in, out), ends of the groups (E,)
    moved  bytes that it reads and writes
    """
    count = float(_GROUPED_FALLBACK[name])
    sizes = grouped_mm_sizes(args[0].shape, args[1].shape, len(args[2]))
    return Operation(
        name,
        dtype,
        BatchLinear(2 * math.prod(sizes)),
        BatchLinear(moved / count),
        tuple(map(BatchLinear, sizes)),
        BatchLinear(count),
    )


def _alignment(matrices: list[Tensor]) -> int:
    """Return the largest power of 2, at most 16, of which the beginnings of all rows of the matrices
    are multiples, in bytes. A row is what lies side by side in memory: a column of a transposed
    matrix. Batches of matrices have one more dimension, in front."""
    found = ALIGNMENT
    for matrix in matrices:
        steps = [step for size, step in zip(matrix.shape, matrix.stride(), strict=True) if size > 1]
        if 1 not in steps[-2:]:  # the product copies it first
            continue
        for step in (*steps, matrix.storage_offset()):
            found = math.gcd(found, step * matrix.element_size()) if step != 1 else found
    return found


def _is_channels_last(image: Tensor) -> bool:
    """Return whether the channels of each pixel of an image lie side by side in memory. Return
    False if both formats are the same, as with a single channel or a single pixel."""
    return image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()


def _overlaps(name: str, args: Any) -> bool:
    """Return whether an operation averages over windows that overlap. Without a stride, they do not."""
    if name not in _AVERAGES:
        return False
    window, stride = args[_AVERAGES[name]], args[_AVERAGES[name] + 1 : _AVERAGES[name] + 2]
    return bool(stride and stride[0]) and list(stride[0]) < list(window)


def _is_between_formats(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether numbers that lie side by side in the result of an operation on single numbers lie in
    different cache lines in one of its inputs. This is so for an image whose channels are moved to the
    last dimension, but not for heads of attention, whose own numbers stay together."""
    result = outputs[0] if outputs else None
    if result is None or result.layout is not torch.strided:
        return False
    sizes = list(zip(result.shape, result.stride(), strict=True))
    inner = next((at - result.dim() for at, (size, step) in enumerate(sizes) if size > 1 and step == 1), 0)
    return any(
        inner + tensor.dim() >= 0
        and tensor.shape[inner] > 1
        and tensor.stride(inner) * tensor.element_size() >= _CACHE_LINE
        for tensor in inputs
        if inner and tensor.layout is torch.strided
    )


def _computed_share(func: Any, name: str, args: Any, kwargs: Any) -> float:
    """Return which share of its model FLOPs an operation really computes. It is 1, except for
    attention with a causal mask, whose kernels skip the masked pairs of queries and keys.

    name          the operation's name, such as "aten.mm"
    args, kwargs  the arguments with which it is called
    """
    if name not in _ATTENTION:
        return 1.0
    names = [argument.name for argument in schema_of(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not (given.get("is_causal") or given.get("causal")):
        return 1.0
    query, key = args[_ATTENTION[name] : _ATTENTION[name] + 2]
    rows, columns = query.shape[2], key.shape[2]
    if name.startswith("tightfit.blocked"):
        return probability_count(rows, causal=True) / (rows * columns)
    return causal_pairs(rows, columns) / (rows * columns)


def _with_heads_of_query(name: str, args: Any) -> Any:
    """Return the arguments `args` of an attention operation with the shapes of its keys and values
    in place of these tensors. The shapes have as many heads as the query. Return the arguments of
    other operations (`name`) unchanged.

    torch 2.11's FLOP formulas read only shapes, and refuse fewer key and value heads than query
    heads (grouped-query attention).
    """
    if not name.startswith("aten._scaled_dot_product_"):
        return args
    at = name.endswith("_backward")
    heads = args[at].shape[1]
    others = (torch.Size((argument.shape[0], heads, *argument.shape[2:])) for argument in args[at + 1 : at + 3])
    return (*args[: at + 1], *others, *args[at + 3 :])


def _product_sizes(name: str, args: Any) -> tuple[BatchLinear, ...]:
    """Return (batches, rows, columns, depth) of an operation that is a matrix product: `batches`
    products of (rows, depth) x (depth, columns). For attention, they are the sizes of query x key.
    For other operations, the tuple is empty.

    name  the operation's name, such as "aten.mm"
    args  the arguments with which it is called
    """
    if name in _ATTENTION:
        query, key = args[_ATTENTION[name] : _ATTENTION[name] + 2]
        found = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])
        return tuple(BatchLinear(float(size)) for size in found)
    if name == "aten._grouped_mm":
        left, right, offsets = args[0], args[1], args[2] if len(args) > 2 else None
        groups = len(offsets) if offsets is not None else left.shape[0]
        return tuple(map(BatchLinear, grouped_mm_sizes(left.shape, right.shape, groups)))
    if name not in _PRODUCTS:
        return ()
    left, right = (args[position] for position in _PRODUCTS[name])
    batches = left.shape[0] if left.dim() == 3 else 1
    return tuple(BatchLinear(float(size)) for size in (batches, left.shape[-2], right.shape[-1], left.shape[-1]))


def _convolution(name: str, args: Any) -> tuple[int, Convolution]:
    """Return (number of images, shape) of a convolution, forward or backward.

    name  the operation's name, such as "aten.convolution"
    args  the arguments with which it is called
    """
    at = _CONVOLUTIONS[name]
    image, weight = args[at], args[at + 1]
    stride, padding, dilation, transposed, output_padding, groups = args[at + 3 : at + 9]
    each = [_of_each(value, image.dim() - 2) for value in (stride, padding, dilation, output_padding)]
    gradients = sum(args[10][:2]) if at else 0
    return image.shape[0], Convolution.of(
        [tuple(image.shape[1:]), tuple(weight.shape), *each], groups, transposed, gradients
    )


def _of_each(values: list[int], dimensions: int) -> tuple[int, ...]:
    """Return one value for each dimension. torch takes a single value for all of them, too."""
    return tuple(values) if len(values) == dimensions else (values[0],) * dimensions
