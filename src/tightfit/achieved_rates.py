"""The rates that a machine achieves: FLOP/s for matrix products, convolutions and attention, bytes
accessed per second for all other operations.

A rate comes from a measurement of the calibration if there is one for the operation's kind and
dtype. Otherwise it comes from a similar kind that was measured, and without a calibration from the
published rates of the device.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from functools import partial

from tightfit.machine import Machine
from tightfit.machines.shapes import (
    ALIGNMENT,
    IN_TENSOR_CORES,
    cache_speedup,
    kernel_of,
    product_share,
    unaligned_share,
)

FLOAT8 = "float8"  # the 8-bit types, whose products are equally fast
_UNKNOWN_FLOPS = {"cpu": 5e10, "cuda": 1e13}  # fp32, of one core or one GPU, if nothing is known
_UNKNOWN_BANDWIDTH = {"cpu": 1e10, "cuda": 5e11}
_CONVOLUTIONS = (
    "convolution",
    "convolution backward",
    "channels-last convolution",
    "channels-last convolution backward",
)
_ARITHMETIC = (
    "product",
    "batched product",
    *_CONVOLUTIONS,
    *(which + kind for which in ("pointwise ", "depthwise ", "transposed ") for kind in _CONVOLUTIONS),
    "attention",
    "attention backward",
    "causal attention",
    "causal attention backward",
    "blocked attention",
    "blocked attention backward",
)
_NEAREST = {
    "causal attention": "attention",
    "causal attention backward": "attention backward",
    "blocked attention": "batched product",
    "blocked attention backward": "batched product",
    **{
        f"{which}{kind}": f"{which}{other}"
        for which in ("", "pointwise ", "depthwise ", "transposed ")
        for kind, other in zip(_CONVOLUTIONS[1:], ("convolution", "convolution", "convolution backward"), strict=True)
    },
    "channels-last pooling": "pooling",
    **{
        f"{layout}{which}average pooling{way}": "reduction"
        for layout in ("", "channels-last ")
        for which in ("", "overlapping ")
        for way in ("", " backward")
    },
    **{
        f"{layout}{which} interpolation{way}": "elementwise"
        for layout in ("", "channels-last ")
        for which in ("nearest", "linear")
        for way in ("", " backward")
    },
    "index": "gather",
    "index select": "gather",
    "element gather": "gather",
    "element scatter": "scatter",
    "index add": "scatter",
    "copy between formats": "copy",
    "elementwise between formats": "elementwise",
    "batch norm": "reduction",
    "channels-last batch norm": "batch norm",
    "grid sample backward": "grid sample",
    "indexed sum": "scatter",
    "gelu backward": "gelu",
    "16-bit dropout": "random",
}
# arithmetic inside compiled kernels, beside their memory access -> the nearest eager operation on a
# CPU
_COMPUTED = {
    "compiled random": "random",
    "compiled exp": "transcendental",
    "compiled tanh": "tanh",
    "compiled erf": "gelu",
    "compiled pooling": "pooling",
    "compiled mask": "elementwise",
    "compiled mask read": "elementwise",
}
COMPILED_ARITHMETIC = tuple(_COMPUTED)
_SHARE_OF_PRODUCTS = {
    "attention": 0.6,
    "attention backward": 0.5,
    "batched product": 0.7,
    **dict.fromkeys(_CONVOLUTIONS, 0.6),
    **{f"{which} {kind}": 0.6 for which in ("pointwise", "transposed") for kind in _CONVOLUTIONS},
    # a depthwise convolution has few FLOPs for each byte: about the median of what a Zen 4 processor reached
    **{f"depthwise {kind}": 0.05 if "backward" in kind else 0.2 for kind in _CONVOLUTIONS},
}
# Rates of kernels on a GPU that was not calibrated, as fractions of its memory bandwidth: in 32 bits
# and in 16 bits. They were measured on an H100 at the largest size of the calibration
# (records/gpu.json). The bytes are those that `calibration/operation_rates.py` counts; an update, for
# example, counts 4 of the 7 tensors that it reads or writes. Kinds whose rate depends on the length of
# a row (reductions, softmax, transposed copies) are left out: the calibration's rows are shorter
# than those of large models
_SHARE_OF_BANDWIDTH = {
    "cast": (0.69, 1.0),
    "scatter": (0.49, 0.31),
    "indexed sum": (0.49, 0.31),  # not measured there: as a scatter
    "search": (0.33, 0.33),
    "pooling": (0.77, 0.51),
    "channels-last pooling": (0.61, 0.5),
    "batch norm": (0.39, 0.25),
    "update": (0.52, 0.43),
    "16-bit dropout": (0.17, 0.11),
}
_TYPE_OF = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "tf32": "tf32"}
CALIBRATED_WIDTH = 128  # of a head, in the calibration of attention on a GPU
_USUAL_PROCESSORS = 108
# the largest factor by which a shape's rate may exceed the measured one: the measured sizes end at a
# large product, whose rate is near the device's best
_MOST_RATIO = 1.25


def achieved(machine: Machine, kind: str, dtype: str, size: float) -> float:
    """Return the rate that a kind of operation achieves at a size: FLOP/s for matrix products,
    convolutions and attention, bytes accessed per second for all other kinds.

    kind   a name in `calibration/operation_rates.py`, such as "product" or "causal attention
           backward"
    dtype  torch's name, such as bfloat16, or tf32
    size   of products and attention, the cube root of rows x columns x depth of one product; of
           convolutions, the geometric mean of the channels of input and output, or for depthwise
           ones the pixels of the window; of what is counted in bytes, the bytes accessed

    The rate comes from a measurement of this kind and dtype. If there is none, it comes from a
    similar kind that was measured, else from the device's matrix rate or bandwidth. Arithmetic
    inside compiled kernels that was not measured takes no time (infinite rate), because a GPU's
    kernels wait for memory.
    """
    if dtype.startswith(FLOAT8) and f"{kind}/{dtype}" not in machine.rates:
        return _in_float8(machine, kind, size)
    dtype = {"bool": "float32", "int64": "float32", "float64": "float32"}.get(dtype, dtype)
    if dtype == "tf32" and f"{kind}/tf32" not in machine.rates and "tf32" in machine.matrix_flops_per_s:
        return _matrix_rate(machine, dtype) * _share_of_products(kind)
    if dtype == "float16" and f"{kind}/float16" not in machine.rates:
        return _in_fp16(machine, kind, size)
    for key in (f"{kind}/{dtype}", f"{_NEAREST.get(kind, kind)}/{dtype}", f"{kind}/float32"):
        if key in machine.rates:
            return _interpolated(machine.rates[key], size)
    if kind in COMPILED_ARITHMETIC and machine.device == "cpu" and f"{_COMPUTED[kind]}/float32" in machine.rates:
        return _interpolated(machine.rates[f"{_COMPUTED[kind]}/float32"], size)
    if kind in COMPILED_ARITHMETIC:
        return math.inf
    if kind in _ARITHMETIC:
        return _matrix_rate(machine, dtype) * _share_of_products(kind)
    if machine.device == "cuda" and kind in _SHARE_OF_BANDWIDTH and "elementwise/float32" not in machine.rates:
        return memory_bandwidth(machine, size) * _SHARE_OF_BANDWIDTH[kind][dtype in ("bfloat16", "float16")]
    return memory_bandwidth(machine, size)


def achieved_by_shape(
    machine: Machine,
    kind: str,
    dtype: str,
    sizes: tuple[float, float, float, float],
    causal: bool,
    alignment: int = ALIGNMENT,
    flash: bool = True,
) -> float:
    """Return the rate, in FLOP/s, that a GPU achieves in a matrix product or in attention of one
    shape. Attention counts only the pairs of queries and keys that are not masked.

    kind    product, batched product, attention or attention backward
    dtype   torch's name, such as bfloat16, or tf32
    sizes   (batches, rows, columns, depth) of the product; for attention those of query x key:
            (samples x heads, queries, keys, width of a head)
    causal  whether a causal mask hides half of the pairs
    alignment  of a product: the rows of its matrices begin at multiples of this number of bytes
    flash   of attention: whether FlashAttention can compute it (see `machines/shapes.py`)

    A measured rate is that of the calibration's shape with the same size, times the ratio of
    the two shapes' rates by `machines/shapes.py`. Without a measurement, it is the rate of
    large products times the shape's share of that rate.
    """
    if kind.startswith("attention"):
        return _attention_rate(machine, kind, dtype, sizes, causal, flash)
    return _product_rate(machine, dtype, sizes, alignment)


def memory_bandwidth(machine: Machine, bytes_accessed: float) -> float:
    """Return the bandwidth (bytes/s) for an operation that accesses `bytes_accessed` bytes: that
    of device memory, or of a GPU's L2 cache for few bytes."""
    if "elementwise/float32" in machine.rates:
        return _interpolated(machine.rates["elementwise/float32"], bytes_accessed)
    known = machine.memory_bytes_per_s.value if machine.memory_bytes_per_s else _UNKNOWN_BANDWIDTH[machine.device]
    return known * cache_speedup(machine.architecture, bytes_accessed)


def _product_rate(machine: Machine, dtype: str, sizes: tuple[float, float, float, float], alignment: int) -> float:
    """The rate of a matrix product; the arguments are those of `achieved_by_shape`."""
    batches, rows, columns, depth = sizes
    size = (rows * columns * depth) ** (1 / 3)
    share = partial(product_share, processors=machine.processors or _USUAL_PROCESSORS)
    rate, of_shape = achieved(machine, "product", dtype, size), share(batches, rows, columns, depth)
    computed_in = dtype if _TYPE_OF.get(dtype, "fp8") in machine.matrix_flops_per_s else "float32"
    if computed_in in IN_TENSOR_CORES:
        rate *= unaligned_share(alignment, machine.architecture)
    if f"product/{dtype}" not in machine.rates:
        return rate * of_shape
    # the calibration's products have 4 x side, side and side
    side = 64.0 * max(round(size / 4 ** (1 / 3) / 64), 1)
    timed = [share(1.0, *shape) for shape in ((4 * side, side, side), (side, side, 4 * side))]
    return rate * min(of_shape / (3 / (2 / timed[0] + 1 / timed[1])), _MOST_RATIO)


def _attention_rate(
    machine: Machine, kind: str, dtype: str, sizes: tuple[float, float, float, float], causal: bool, flash: bool
) -> float:
    """The rate of attention; the arguments are those of `achieved_by_shape`."""
    _, queries, keys, width = sizes
    kernel = kernel_of(machine.architecture, dtype, width, machine.attention_kernel, flash)
    backward = kind.endswith("backward")
    of_shape = kernel.share(queries, keys, width, causal, backward)
    name = f"causal {kind}" if causal else kind
    if f"{name}/{dtype}" not in machine.rates:
        return _matrix_rate(machine, dtype) * of_shape
    size = (queries * keys * width) ** (1 / 3)
    length = (size**3 / CALIBRATED_WIDTH) ** (1 / 2)
    timed_kernel = kernel_of(machine.architecture, dtype, CALIBRATED_WIDTH, machine.attention_kernel)
    timed = timed_kernel.share(length, length, CALIBRATED_WIDTH, causal, backward)
    return achieved(machine, name, dtype, size) * min(of_shape / timed, _MOST_RATIO)


def _share_of_products(kind: str) -> float:
    """Return the assumed rate of a kind of arithmetic that was not measured, as a fraction of
    the rate of large matrix products. Example: 0.6 for the kind "convolution"."""
    return _SHARE_OF_PRODUCTS.get(kind.removeprefix("causal "), 1.0)


def _in_fp16(machine: Machine, kind: str, size: float) -> float:
    """Return the rate in fp16 of an operation that was not measured in fp16. It is the rate in
    bf16, which has as many bits, times the ratio of the two dtypes' known matrix rates. `kind`
    and `size` are those of `achieved`."""
    known = machine.matrix_flops_per_s
    if kind not in _ARITHMETIC or "fp16" not in known:
        return achieved(machine, kind, "bfloat16", size)
    if "bf16" not in known:  # no bf16 units
        return known["fp16"].value * _share_of_products(kind)
    return achieved(machine, kind, "bfloat16", size) * known["fp16"].value / known["bf16"].value


def _in_float8(machine: Machine, kind: str, size: float) -> float:
    """Return the rate in float8 of an operation that was not measured in float8. `kind` and
    `size` are those of `achieved`.

    It is the rate in bf16. For products it is multiplied by the ratio of the two dtypes'
    achieved matrix rates, or of their published peaks if an achieved rate is unknown.
    """
    bf16 = achieved(machine, kind, "bfloat16", size)
    if kind not in _ARITHMETIC:
        return bf16
    for known in (machine.matrix_flops_per_s, machine.matrix_peak_flops_per_s):
        if "fp8" in known and "bf16" in known:
            return bf16 * known["fp8"].value / known["bf16"].value
    return bf16


def _matrix_rate(machine: Machine, dtype: str) -> float:
    name = _TYPE_OF.get(dtype, "fp32")
    figure = machine.matrix_flops_per_s.get(name)
    if figure is None and name in ("bf16", "tf32"):  # without such units: fp32
        figure = machine.matrix_flops_per_s.get("fp32")
    if figure is not None:
        return figure.value
    return (
        _UNKNOWN_FLOPS[machine.device]
        * (2.0 if name != "fp32" else 1.0)
        * (machine.cores if machine.device == "cpu" else 1)
    )


def _interpolated(table: Mapping[int, float], size: float) -> float:
    """Return the rate at `size`, interpolated in the logarithms of size and rate. Outside the
    measured sizes, it is the rate of the nearest measured size.

    table  maps a measured size to its rate
    """
    sizes = sorted(table)
    index = bisect.bisect_left(sizes, size)
    if index in (0, len(sizes)):
        return table[sizes[min(index, len(sizes) - 1)]]
    below, above = sizes[index - 1], sizes[index]
    share = math.log(size / below) / math.log(above / below)
    return table[below] ** (1 - share) * table[above] ** share
