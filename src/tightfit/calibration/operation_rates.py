"""Measures how fast this machine runs each kind of operation, at a few sizes each. Step times are
predicted from these rates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.achieved_rates import COMPILED_ARITHMETIC
from tightfit.calibration.cases import Case, in_turn, random_tensor, sizes_in_bytes
from tightfit.calibration.clock_drift import ClockDrift
from tightfit.calibration.convolutions import CONVOLUTIONS
from tightfit.calibration.orders_in_memory import OF_ONE_SPEED
from tightfit.calibration.single_operations import OPERATIONS, quick_cases, single_cases
from tightfit.calibration.timing import Pick, timed
from tightfit.capabilities import can_compile
from tightfit.machine import Machine
from tightfit.methods.allocator import keep_freed_memory
from tightfit.methods.attention import blocked_attention, causal_pairs, probability_count
from tightfit.runtime.dropout_noise import dropout_noise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRODUCT_SIZES = (64, 128, 256, 512, 1024, 2048)
# on a GPU, (rows, depth, columns): the products of a model of 8 billion parameters, the last by its
# vocabulary
LARGE_PRODUCTS = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (16384, 4096, 14336),
    (8192, 4096, 128256),
)
PATIENCE_S = 0.25  # the longest time that one run of a case may take
LEAST_S = 0.02  # each case is repeated for at least this many seconds
ALONE_S = 0.2  # the same for a kind that has only one case
# The same on a GPU, for products and attention. In the first tens of milliseconds a GPU takes more
# power than it may in the long run. Then it lowers its clock, and keeps it low in training.
SUSTAINED_S = 0.15
# quick calibration: least seconds of a case, and how many cases of each kind, beginning with the smallest
QUICK_S, QUICK_CASES = 0.003, 3
ROUNDS = 2  # of a calibration of a CPU


def measure_rates(
    device: torch.device, pace: ClockDrift, say: Callable[[str], None], quick: bool = False
) -> dict[str, dict[int, float]]:
    """Measure the rate of every kind of operation at several sizes. Return {"kind/dtype": {size:
    rate}}, such as {"product/float32": {102: ..., 203: ...}}.

    The size of a matrix product or of attention is the cube root of the product of its three
    dimensions. The size of a convolution is its number of channels, or of pixels of its window
    (`convolutions.py`), and that of all other kinds the bytes accessed.

    A rate is the number of FLOPs (or bytes accessed) that the operation achieves in the time of one
    run of the control, a fixed workload (see `calibration/clock_drift.py`). To get FLOPs or bytes per
    second, the caller divides it by the control's usual seconds.

    pace   times the control around each measurement
    say    called with a line of text before each measurement
    quick  if True, leave out large sizes and compiled kernels. This takes about eight seconds;
           otherwise it takes four to five minutes on two cores
    """
    rates: dict[str, dict[int, float]] = {}
    if device.type == "cpu":
        fetched = _fetch_rate(device)
        rates["fetch/float32"] = {2**25: fetched * pace.control_around_s()}
        keep_freed_memory()  # page faults are measured separately, by "fetch"
    # as a plan in fp32 does; torch's default lets convolutions in fp32 use tf32
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        return rates | _rates_of_kinds(device, pace, say, quick)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _rates_of_kinds(
    device: torch.device, pace: ClockDrift, say: Callable[[str], None], quick: bool
) -> dict[str, dict[int, float]]:
    """Return the rates of all kinds of operations but "fetch". The arguments and the result are those
    of `measure_rates`.

    On a CPU, each kind is timed twice, half a minute apart, and the mean of both times counts. Other
    users of the machine take a share of its memory bandwidth that changes."""
    rounds: list[dict[str, dict[int, float]]] = []
    for again in range(1 if quick or device.type == "cuda" else ROUNDS):
        rounds.append({})
        for (name, dtype), (kind, cases) in itertools.product(DTYPES.items(), _KINDS.items()):
            if (quick or again) and kind in COMPILED_ARITHMETIC:
                continue
            say(f"{kind} in {name}{', again' if again else ''}")
            if quick:
                found = quick_cases(kind, dtype, device) if kind in _BY_NAME else cases(dtype, device)
                most = 1 if kind in OF_ONE_SPEED else QUICK_CASES
                table = _table(itertools.islice(found, most), device, QUICK_S, QUICK_S, min)
            elif device.type == "cuda" and kind in _LIMITED_BY_POWER:
                table = _table(cases(dtype, device), device, least_s=SUSTAINED_S, pick=_of_second_half)
            else:
                table = _table(
                    cases(dtype, device), device, least_s=ALONE_S if kind in COMPILED_ARITHMETIC else LEAST_S
                )
            control_s = pace.control_around_s()
            if table:
                rounds[-1][f"{kind}/{name}"] = {size: rate * control_s for size, rate in table.items()}
    return {
        key: {
            size: _mean_of_undisturbed([one[key][size] for one in rounds if size in one.get(key, {})]) for size in table
        }
        for key, table in rounds[0].items()
    }


def _mean_of_undisturbed(rates: list[float]) -> float:
    """Return the mean of the rates of both rounds. A round that was less than half as fast as the other was
    disturbed: a program that takes one core for a moment holds up all threads of an operation."""
    return statistics.harmonic_mean([rate for rate in rates if 2 * rate > max(rates)])


def _table(
    cases: Iterator[Case],
    device: torch.device,
    patience_s: float = PATIENCE_S,
    least_s: float = LEAST_S,
    pick: Pick = statistics.median,
) -> dict[int, float]:
    """Time each case, and return its size -> its rate in FLOPs or bytes per second.

    cases       (size, FLOPs or bytes accessed, function to time), smallest first
    patience_s  stop before a case that would take longer than this many seconds, such as a large
                product in a dtype for which the CPU has no instructions. For larger sizes,
                predictions use the rate of the last measured size
    least_s     repeat each case for at least this many seconds
    pick        computes the result from the seconds of all repetitions
    """
    rates: dict[int, float] = {}
    rate = math.inf
    with suppress(torch.OutOfMemoryError):  # a small GPU: larger sizes are assumed to have the last rate
        for size, amount, work in cases:
            if amount / rate > patience_s:
                break
            rate = rates[size] = amount / timed(work, device, least_s=least_s, pick=pick)
    return rates


def _of_second_half(seconds: list[float]) -> float:
    """Return the median of the second half of the runs. By then a GPU has lowered its clock."""
    return statistics.median(seconds[len(seconds) // 2 :])


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield matrix products to time, as cases (size, FLOPs, function). Each function computes the
    three products of a linear layer with input (4 s, s) and weight (s, s): the forward, the
    gradient of the input and the gradient of the weight. On a GPU, also yield the shapes of large
    layers."""
    square = [(4 * size, size, size) for size in PRODUCT_SIZES]
    for rows, depth, columns in (*square, *(LARGE_PRODUCTS if device.type == "cuda" else ())):

        def inputs(rows: int = rows, depth: int = depth, columns: int = columns) -> tuple[Tensor, ...]:
            shapes = (rows, depth), (columns, depth), (rows, columns)
            return tuple(random_tensor(shape, dtype, device) for shape in shapes)

        def make(rows: Tensor, weight: Tensor, gradient: Tensor) -> object:
            return torch.mm(rows, weight.t()), torch.mm(gradient, weight), torch.mm(gradient.t(), rows)

        one = rows * depth * columns
        yield round(one ** (1 / 3)), 3 * 2.0 * one, in_turn(make, inputs)


def _batched(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield batched matrix products to time, as cases (size, FLOPs, function). Each function
    multiplies a batch of 64 pairs of matrices (length, 64) x (64, length), as attention does."""
    for length in (64, 128, 256, 512, *((1024,) if device.type == "cuda" else ())):

        def inputs(length: int = length) -> tuple[Tensor, ...]:
            return random_tensor((64, length, 64), dtype, device), random_tensor((64, 64, length), dtype, device)

        size = round((length * length * 64) ** (1 / 3))
        yield size, 2.0 * 64 * 64 * length**2, in_turn(torch.bmm, inputs)


LENGTHS = (64, 128, 256, 1024)
GPU_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GPU_TOKENS = 2**14  # in all samples together, the usual size for comparing attention kernels


def _heads(length: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return the shape of queries, keys and values for a sequence length: (samples, heads, length,
    width of a head)."""
    return (8, 8, length, 64) if device.type == "cpu" else (GPU_TOKENS // length, 16, length, 128)


def _lengths(device: torch.device) -> tuple[int, ...]:
    return LENGTHS if device.type == "cpu" else GPU_LENGTHS


def _attention_inputs(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [random_tensor(_heads(length, device), dtype, device).requires_grad_() for _ in range(3)]


def _attention_size(length: int, device: torch.device) -> int:
    """Return the size under which the rate of attention is stored: the cube root of length x length
    x width of a head. A matrix product of one head's queries and keys has the same size."""
    return round((length * length * _heads(length, device)[-1]) ** (1 / 3))


def _pair_flops(length: int, device: torch.device, pairs: int) -> float:
    """Return the FLOPs of one of attention's matrix products, over all samples and heads.

    length  sequence length
    pairs   number of (query, key) pairs of one head that are computed
    """
    samples, heads, _, width = _heads(length, device)
    return 2.0 * samples * heads * width * pairs


def _attention(dtype: torch.dtype, device: torch.device, causal: bool = False) -> Iterator[Case]:
    """Yield forwards of attention to time, as cases (size, FLOPs, function). Each computes two
    matrix products over all (query, key) pairs; if `causal`, only over the pairs that a causal mask
    does not hide."""
    for length in _lengths(device):
        query, key, value = (tensor.detach() for tensor in _attention_inputs(length, dtype, device))
        pairs = causal_pairs(length, length) if causal else length**2

        def work(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

        yield _attention_size(length, device), 2 * _pair_flops(length, device, pairs), work


def _attention_backward(dtype: torch.dtype, device: torch.device, causal: bool = False) -> Iterator[Case]:
    """Yield backwards of attention to time, as cases (size, FLOPs, function). Each computes five
    matrix products, one of which recomputes a product of the forward, over all (query, key) pairs;
    if `causal`, only over the pairs that a causal mask does not hide."""
    for length in _lengths(device):
        inputs = _attention_inputs(length, dtype, device)
        query, key, value = inputs
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        pairs = causal_pairs(length, length) if causal else length**2

        def work(inputs: list[Tensor] = inputs, output: Tensor = output) -> object:
            return torch.autograd.grad(output, inputs, output.detach(), retain_graph=True)

        yield _attention_size(length, device), 5 * _pair_flops(length, device, pairs), work


def _blocked(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield forwards of blocked attention, tightfit's own kernel for CPUs, to time, as cases (size,
    FLOPs, function). Each computes two matrix products over the (query, key) pairs that the kernel
    computes under a causal mask. Yield nothing on a GPU."""
    for length in LENGTHS if device.type == "cpu" else ():
        query, key, value = (tensor.detach() for tensor in _attention_inputs(length, dtype, device))
        pairs = probability_count(length, causal=True)

        def work(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> object:
            return blocked_attention(query, key, value, None, True)

        yield _attention_size(length, device), 2 * _pair_flops(length, device, pairs), work


def _blocked_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield backwards of blocked attention, tightfit's own kernel for CPUs, to time, as cases
    (size, FLOPs, function). Each computes four matrix products over the (query, key) pairs that the
    forward computes. Yield nothing on a GPU."""
    for length in LENGTHS if device.type == "cpu" else ():
        inputs = _attention_inputs(length, dtype, device)
        output, _ = blocked_attention(*inputs, None, True)
        pairs = probability_count(length, causal=True)

        def work(inputs: list[Tensor] = inputs, output: Tensor = output) -> object:
            return torch.autograd.grad(output, inputs, output.detach(), retain_graph=True)

        yield _attention_size(length, device), 4 * _pair_flops(length, device, pairs), work


def _of_bytes(make: Callable[..., Tensor], touched: int, inputs: int = 1) -> Callable[..., Iterator[Case]]:
    """Return a function (dtype, device) -> the cases of an operation on tensors of one shape, at
    several sizes. A case is (size, bytes accessed, function to time).

    make     the operation
    touched  bytes that the operation accesses, divided by the bytes of a tensor: 2 if it reads one
             tensor and writes a result of the same size
    inputs   number of tensors that it takes
    """

    def cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
        for moved in sizes_in_bytes(device):
            shape = (max(moved // touched // dtype.itemsize // 512, 1), 512)

            def tensors(shape: tuple[int, int] = shape) -> tuple[Tensor, ...]:
                return tuple(random_tensor(shape, dtype, device) for _ in range(inputs))

            exact = float(touched * shape[0] * shape[1] * dtype.itemsize)
            yield moved, exact, in_turn(make, tensors)

    return cases


def _cast(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield casts between fp32 and bf16 to time, as cases (size, bytes accessed, function). `dtype`
    is the dtype of the result."""
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    for moved in sizes_in_bytes(device):
        count = moved // 6

        def inputs(count: int = count) -> tuple[Tensor, ...]:
            return (random_tensor((count,), other, device),)

        yield moved, 6.0 * count, in_turn(lambda values: values.to(dtype), inputs)


def _softmax(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for moved in sizes_in_bytes(device)[1:]:
        rows = max(moved // 2 // dtype.itemsize // 4096, 1)

        def inputs(rows: int = rows) -> tuple[Tensor, ...]:
            return (random_tensor((rows, 4096), dtype, device),)

        yield moved, 2.0 * rows * 4096 * dtype.itemsize, in_turn(lambda values: torch.log_softmax(values, -1), inputs)


def _gather(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for table_rows, width, rows in _embeddings(device):
        table = random_tensor((table_rows, width), dtype, device)
        index = torch.randint(0, table_rows, (rows,), device=device)
        moved = table.nbytes + rows * (width * dtype.itemsize + 8)
        yield moved, float(moved), partial(functional.embedding, index, table)


def _scatter(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for table_rows, width, rows in _embeddings(device):
        gradient = random_tensor((rows, width), dtype, device)
        index = torch.randint(0, table_rows, (rows,), device=device)
        moved = gradient.nbytes + table_rows * width * dtype.itemsize + 8 * rows

        def work(gradient: Tensor = gradient, index: Tensor = index, table_rows: int = table_rows) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(gradient, index, table_rows, -1, False)

        yield moved, float(moved), work


def _indexed_sum(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield the backward of rows that an index selects to time, as cases (size, bytes accessed, function)."""
    for table_rows, width, rows in _embeddings(device):
        gradient = random_tensor((rows, width), dtype, device)
        index = torch.randint(0, table_rows, (rows,), device=device)
        total = torch.zeros((table_rows, width), dtype=dtype, device=device)
        moved = gradient.nbytes + 2 * total.nbytes + 8 * rows

        def work(gradient: Tensor = gradient, index: Tensor = index, total: Tensor = total) -> Tensor:
            return total.index_put((index,), gradient, accumulate=True)

        yield moved, float(moved), work


def _embeddings(device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Yield (number of rows of an embedding table, width of a row, number of lookups). On a GPU,
    this includes sizes of large models."""
    yield from ((8192, 256, rows) for rows in (256, 2048, 16384))
    if device.type == "cuda":
        yield from ((32000, 2048, 16384), (128256, 4096, 16384))


def _search(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield searches to time, as cases (size, bytes accessed, function). Each finds the place of
    every fp32 value in a sorted table of 256 values, as an optimizer does when it quantizes its
    states to 8 bits. The result is an int32 index for each value. Yield nothing for a `dtype` other
    than fp32."""
    table = torch.linspace(-1, 1, 256, device=device)
    for moved in sizes_in_bytes(device)[:-1] if dtype is torch.float32 else ():
        values = torch.rand(moved // 8, device=device)

        def work(values: Tensor = values) -> Tensor:
            return torch.bucketize(values, table, out_int32=True)

        yield moved, 8.0 * values.numel(), work


def _pooling(
    dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
) -> Iterator[Case]:
    """Yield forwards of max pooling over 2 x 2 pixels to time, as cases (size, bytes accessed,
    function). The output has a quarter of the input's elements, and there is an int64 index for
    each of them."""
    for moved in sizes_in_bytes(device)[1:-1]:
        channels = max(moved // (64 * 64) // (dtype.itemsize + 3), 1)
        elements = channels * 64 * 64
        exact = elements * dtype.itemsize + elements // 4 * (dtype.itemsize + 8)
        make = partial(functional.max_pool2d, kernel_size=2, return_indices=True)

        def inputs(channels: int = channels) -> tuple[Tensor, ...]:
            return (random_tensor((1, channels, 64, 64), dtype, device).contiguous(memory_format=memory_format),)

        yield moved, float(exact), in_turn(make, inputs)


def _batch_norm(
    dtype: torch.dtype, device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
) -> Iterator[Case]:
    for moved in sizes_in_bytes(device)[1:-1]:
        channels = max(moved // 2 // dtype.itemsize // (64 * 64), 1)
        image = random_tensor((1, channels, 64, 64), dtype, device).contiguous(memory_format=memory_format)

        def work(image: Tensor = image, channels: int = channels) -> Tensor:
            mean, variance = torch.zeros(channels, device=device), torch.ones(channels, device=device)
            return functional.batch_norm(image, mean, variance, training=True)

        yield moved, 2.0 * image.nbytes, work


def _sort(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield sorts of rows of 512 values to time, as cases (size, bytes accessed, function). There is an int64
    index for each value."""
    for moved in sizes_in_bytes(device)[:-2]:
        rows = max(moved // (2 * dtype.itemsize + 8) // 512, 1)
        exact = rows * 512 * (2 * dtype.itemsize + 8)
        yield moved, float(exact), in_turn(torch.sort, partial(_one, (rows, 512), dtype, device))


def _fourier(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield Fourier transforms of images of 64 x 64 pixels to time, as cases (size, bytes accessed, function).
    Yield nothing for a `dtype` other than fp32."""
    for moved in sizes_in_bytes(device)[1:-1] if dtype is torch.float32 else ():
        shape = (moved // 8 // (64 * 64), 64, 64)  # the result has half as many values, which are complex
        yield moved, 8.0 * math.prod(shape), in_turn(torch.fft.rfft2, partial(_one, shape, dtype, device))


def _one(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (random_tensor(shape, dtype, device),)


def _grid_sample(dtype: torch.dtype, device: torch.device, backward: bool) -> Iterator[Case]:
    """Yield samples of images at the points of a grid to time, as cases (size, bytes accessed, function).

    backward  time the gradients with respect to the images and the grid
    """
    sample = partial(functional.grid_sample, align_corners=False)
    for moved in sizes_in_bytes(device)[1:-1]:
        count = max(moved // (2 * 16 * 64 * 64 * dtype.itemsize), 1)

        def inputs(count: int = count) -> tuple[Tensor, Tensor]:
            grid = torch.rand((count, 64, 64, 2), device=device).to(dtype) * 2 - 1
            return random_tensor((count, 16, 64, 64), dtype, device), grid

        def run(inputs: Any = inputs) -> tuple[Tensor, ...]:
            images, grid = inputs()
            output = sample(images.requires_grad_(), grid.requires_grad_())
            return images, grid, output, torch.ones_like(output)

        def make(images: Tensor, grid: Tensor, output: Tensor, gradient: Tensor) -> object:
            return torch.autograd.grad(output, (images, grid), gradient, retain_graph=True)

        images, points = count * 16 * 64 * 64 * dtype.itemsize, count * 64 * 64 * 2 * dtype.itemsize
        if backward:
            yield moved, 3.0 * images + 2 * points, in_turn(make, run)
        else:
            yield moved, 2.0 * images + points, in_turn(sample, inputs)


def _within_kernels(
    make: Callable[[Tensor], Tensor], shape: tuple[int, ...], times: int = 1
) -> Callable[..., Iterator[Case]]:
    """Return a function (dtype, device) -> one case, which measures how fast a compiled kernel
    evaluates a function such as exp. The rate is in bytes per second, where each evaluation counts
    as the 4 bytes of its fp32 result.

    make   the function to compile; it takes a tensor of fp32 values
    shape  shape of that tensor
    times  how many evaluations `make` does for each element of the tensor. If it is 1, the kernel
           also saves what backward needs

    Only fp32 on a CPU with a compiler has a case; otherwise the returned function yields nothing. A
    GPU has none, because its kernels are limited by memory and not by arithmetic.
    """

    def cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
        if not _measures_kernels(dtype, device):
            return
        values = torch.rand(shape, device=device, requires_grad=times == 1)
        compiled = torch.compile(make, dynamic=False)
        yield values.nbytes, float(times * values.nbytes), lambda: compiled(values)

    return cases


def _measures_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the arithmetic of compiled kernels is measured in this dtype on this device."""
    return dtype is torch.float32 and device.type == "cpu" and can_compile(Machine.detect())


def _masks_read(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield a compiled kernel to time, as a case: it multiplies values by eight masks of booleans. Each
    element of a mask counts as 4 bytes, like the results in `_within_kernels`."""
    if not _measures_kernels(dtype, device):
        return
    values = torch.rand(2**18, device=device)
    masks = [torch.rand_like(values) > 0.5 for _ in range(8)]

    def make(values: Tensor, masks: list[Tensor]) -> Tensor:
        for mask in masks:
            values = values * mask
        return values

    compiled = torch.compile(make, dynamic=False)
    yield values.nbytes, float(len(masks) * values.nbytes), lambda: compiled(values, masks)


def _eight(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that evaluates `function` eight times for each element, with shifted
    inputs, and adds up the results. A kernel compiled from it spends most of its time on arithmetic
    and not on memory access."""

    def make(values: Tensor) -> Tensor:
        return cast(Tensor, sum(function(values + shift) for shift in range(8)))

    return make


def _update(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for count in (2**14, 2**18, 2**22, *((2**26,) if device.type == "cuda" else ())):
        weight = random_tensor((count,), dtype, device).requires_grad_()
        weight.grad = random_tensor((count,), dtype, device)
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()
        moved = 4 * weight.nbytes + 4
        yield moved, float(moved), optimizer.step


def _fetch_rate(device: torch.device) -> float:
    """Return how many bytes per second of new memory the system can supply. It is computed from the
    time to write a newly allocated block, minus the time to write a block whose memory pages exist
    already."""
    count = 2**26
    block = torch.empty(count, dtype=torch.uint8)
    reused_s = timed(lambda: block.fill_(1), device)
    new_s = timed(lambda: torch.empty(count, dtype=torch.uint8).fill_(1), device)
    return count / max(new_s - reused_s, 1e-9)


_BY_NAME = {f"aten.{name}": partial(single_cases, name) for name in OPERATIONS}
_KINDS: dict[str, Callable[[torch.dtype, torch.device], Iterator[Case]]] = {
    "product": _products,
    "batched product": _batched,
    **CONVOLUTIONS,
    "attention": _attention,
    "attention backward": _attention_backward,
    "causal attention": partial(_attention, causal=True),
    "causal attention backward": partial(_attention_backward, causal=True),
    "blocked attention": _blocked,
    "blocked attention backward": _blocked_backward,
    "elementwise": _of_bytes(lambda values: values * 2.0, 2),
    "transcendental": _of_bytes(functional.silu, 2),
    "gelu": _of_bytes(functional.gelu, 2),
    "gelu backward": _of_bytes(torch.ops.aten.gelu_backward, 3, inputs=2),
    "tanh": _of_bytes(torch.tanh, 2),
    "random": _of_bytes(lambda values: values.bernoulli_(0.9), 2),
    "16-bit dropout": _of_bytes(lambda values: dropout_noise(values[:0], list(values.shape), 0.1), 1),
    "cast": _cast,
    # the transpose of heads and positions in attention
    "copy": _of_bytes(lambda values: values.view(-1, 8, 8, 64).transpose(1, 2).contiguous(), 2),
    **OF_ONE_SPEED,
    "reduction": _of_bytes(lambda values: functional.layer_norm(values, (512,)), 2),
    "softmax": _softmax,
    "gather": _gather,
    "scatter": _scatter,
    "indexed sum": _indexed_sum,
    "search": _search,
    "pooling": _pooling,
    "channels-last pooling": partial(_pooling, memory_format=torch.channels_last),
    "batch norm": _batch_norm,
    "channels-last batch norm": partial(_batch_norm, memory_format=torch.channels_last),
    "sort": _sort,
    "fourier transform": _fourier,
    "grid sample": partial(_grid_sample, backward=False),
    "grid sample backward": partial(_grid_sample, backward=True),
    "compiled random": _within_kernels(partial(functional.dropout, p=0.1), (2**21,)),
    "compiled exp": _within_kernels(_eight(torch.exp), (2**18,), 8),
    "compiled tanh": _within_kernels(_eight(torch.tanh), (2**18,), 8),
    "compiled erf": _within_kernels(_eight(torch.erf), (2**18,), 8),
    "compiled pooling": _within_kernels(partial(functional.max_pool2d, kernel_size=2), (16, 32, 64, 64)),
    "compiled mask": _within_kernels(lambda values: values > 0.5, (2**21,)),
    "compiled mask read": _masks_read,
    "update": _update,
    "compiled": _of_bytes(lambda values: values * 2.0, 2),
    **_BY_NAME,
}


_LIMITED_BY_POWER = (
    "product",
    "batched product",
    *(f"{mask}attention{way}" for mask in ("", "causal ") for way in ("", " backward")),
)
