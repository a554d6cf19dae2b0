"""Record what one micro-batch does on fake tensors: its allocations, frees and operations, in
segments (parts of the step, such as the forward of one block).

The profiler calls `record_step` and builds a ledger from the result. `Recorder` is a torch dispatch mode:
it sees every operation, the storages that the operation allocates, and when these are freed.

Of each kind of repeated block, only the first two and the last run. A block between them returns
its input, and the recorder uses the segments of the second block in its place. A deep model
therefore costs no more to trace than a shallow one.

Example: a model of 32 equal blocks runs blocks 0, 1 and 31. The recorded step still has 32 forward
and 32 backward segments of blocks: those of blocks 2 to 30 are copies of block 1's.
"""

from __future__ import annotations

import bisect
import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry, shape_wrapper

from tightfit._torch.operations import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    LOCAL_SCALAR_DENSE,
    schema_of,
)
from tightfit._torch.pytree import tree_flatten_with_path
from tightfit._torch.tensors import in_backward, next_sequence_number
from tightfit.cost.recorded_step import (
    CHANNELS_LAST,
    BatchLinear,
    BlockInput,
    Buffer,
    Convolution,
    Operation,
    Segment,
    Timeline,
)
from tightfit.errors import Untraceable
from tightfit.machine import FLOAT8
from tightfit.machines.shapes import ALIGNMENT
from tightfit.methods.attention import causal_pairs, probability_count
from tightfit.models.dataflow import path_of
from tightfit.models.fake_kernels import GROUPED_MM, grouped_mm_flops, grouped_mm_sizes
from tightfit.models.tensors import tensors_in
from tightfit.planner.tracing.recurrent_layers import recurrent_sizes
from tightfit.planner.tracing.repeated_blocks import record_blocks
from tightfit.planner.tracing.storages import ACCUMULATES, StorageMode, backward_node, keys_of, storages_of
from tightfit.runtime.fake_compiler import in_compiled_graph
from tightfit.runtime.repeated_iterations import iterations_chosen_by

_READ_VALUES = (LOCAL_SCALAR_DENSE.default, torch.ops.aten.equal.default)
_NO_COST = frozenset({"aten.detach.default", "aten.sym_size.int", "prim.layout.default"})
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
# the same of all operations whose speed depends on the image's format
_IMAGES = {**_CONVOLUTIONS, "aten.max_pool2d_with_indices": 0}
_PRODUCT, _CAST, _SUM = "aten.mm", "aten._to_copy", "aten.add"  # operations that produce a weight's gradient
_GRADIENTS = frozenset((_PRODUCT, _CAST, _SUM))
_PRODUCTS = {
    "aten.mm": (0, 1),
    "aten._scaled_mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.baddbmm": (1, 2),
    "tightfit.add_product": (0, 1),
}


def _convolution_backward_flops(*args: Any, **_: Any) -> int:
    """Return the FLOPs of a convolution's backward. The gradients of the image and of the weight each
    take as many as the forward. torch's formula ignores the groups of the weight's gradient: it
    counts 96 times too many for a depthwise convolution of 96 channels."""
    gradient, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    places = (image if transposed else gradient).shape[2:]
    return 2 * image.shape[0] * math.prod(places) * weight.numel() * (wanted[0] + wanted[1])


# recurrent kernels, and how many products they compute in place of each of the forward
_RECURRENT = {
    "aten.mkldnn_rnn_layer": 1,
    "aten.mkldnn_rnn_layer_backward": 2,
    "aten._cudnn_rnn": 1,
    "aten._cudnn_rnn_backward": 2,
}
_FLOPS = {
    GROUPED_MM: shape_wrapper(grouped_mm_flops),
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
}
# transformers' experts where torch has no grouped product, and how many grouped products they compute: compiled, with
# weights that are not bf16
_GROUPED_FALLBACK = {"transformers.grouped_mm_fallback": 1, "transformers.grouped_mm_fallback_backward": 2}
_SAME_FLOPS = {  # torch has no FLOP formula for its CPU kernels
    CPU_FLASH_ATTENTION: FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD: FLASH_ATTENTION_BACKWARD,
}


@dataclass
class _OpenSegment:
    """A segment (a part of the step, such as the forward of one block) that is still being
    recorded. `_closed_segments` converts it to a `Segment`."""

    part: str
    phase: str
    block: int | None = None  # number of the block; between blocks, number of the block before
    call: int = 0  # number of this call of the block
    first: int = 0  # sequence number of its first autograd node
    copy_of: int | None = None  # for a skipped block: number of the block whose segments are copied
    events: list[tuple[_Storage, int]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    recompute_end: tuple[int, int] = (0, 0)
    inputs: list[_Storage] = field(default_factory=list)
    saved: set[_Storage] = field(default_factory=set)
    block_inputs: list[_BlockInput] = field(default_factory=list)


@dataclass(eq=False)
class _Storage:
    """A storage while the step is recorded. `_buffer` converts it to a `Buffer`, whose fields have
    the same meaning.

    sources  if a matrix product, cast or sum in backward allocated the storage: the storages of its
             inputs
    """

    size: int
    maker: str
    row: str = "temporaries"
    parameter: str = ""
    operands: tuple[_Storage, ...] = ()
    terms: tuple[_Storage, ...] = ()
    sources: tuple[_Storage, ...] = ()
    retained: bool = False
    buffer: Buffer | None = None


@dataclass(eq=False)
class _BlockInput:
    """A tensor argument of a block while the step is recorded. `_to_given` converts it to a
    `BlockInput`.

    path          position among the block's arguments
    size          bytes of the tensor
    storage       the argument's storage if this step allocated it, else None
    has_gradient  whether backward has computed a gradient of the argument
    """

    path: str
    size: int
    storage: _Storage | None
    has_gradient: bool = False

    def note_gradient(self, gradient: Tensor) -> None:
        self.has_gradient = True


class Recorder(StorageMode[_Storage]):
    """A dispatch mode that records operations, allocations and frees, segment by segment. Each call
    of a block is a segment, and so is what runs between two blocks.

    Enter the mode inside FakeTensorMode. Call `begin_segment` for each segment of the forward, then
    `end_forward`, `begin_backward` and `end_backward`.

    parameters  the model's parameters, by name
    segments    segments of the forward, in order
    program     all segments, in the order in which they ran
    phase       forward, backward or inference
    differentiates  whether the forward itself has computed gradients, as by torch.autograd.grad
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.differentiates = False
        self._has_ended = False
        self.parameters = parameters
        self.segments: list[_OpenSegment] = []
        self.program: list[_OpenSegment] = []
        self._calls: Counter[tuple[str, int | None]] = Counter()  # by (part, block)
        self.phase = "forward"
        self._made_in_forward: list[int] = []
        self._existing: set[int] = set()
        self._weights = {key: name for name, weight in parameters.items() for key in keys_of([weight])}
        self._hooks: list[Any] = []

    def see_kernel(self, bytes_accessed: int, dtype: torch.dtype, kind: str = "compiled") -> None:
        """Record one operation: a kernel that the compiler generated. Its FLOPs are not counted.

        bytes_accessed  bytes that the kernel reads and writes
        dtype           dtype that it computes in
        kind            name of the recorded operation
        """
        name = str(dtype).removeprefix("torch.")
        self.program[-1].operations.append(Operation(kind, name, BatchLinear(), BatchLinear(float(bytes_accessed))))

    def mark_existing(self, tensors: Any) -> None:
        """Mark tensors that exist before the step, such as parameters. Their storages are not
        recorded, because the ledger counts them in rows of their own.

        tensors  tensors in any nested structure of lists and dicts
        """
        self._existing.update(keys_of(tensors_in(tensors)))

    def begin_segment(self, part: str, block: int | None = None, copy_of: int | None = None) -> None:
        """Begin a segment of the forward: operations, allocations and frees are recorded in it
        until the next segment begins.

        part     "block", "between" (after a block) or another name
        block    number of the block; for part "between", number of the block that ran before
        copy_of  for a skipped block: number of the block whose segments are copied; None for a
                 block that runs
        """
        first = next_sequence_number()
        opened = _OpenSegment(part, self.phase, block, self._calls[part, block], first, copy_of)
        self._calls[part, block] += 1
        self.segments.append(opened)
        self.program.append(opened)

    def note_inputs(self, arguments: Any) -> None:
        """Record the tensors among `arguments`, with which a block is called, in the current
        segment. Also record their storages if this step allocated them."""
        segment = self.program[-1]
        leaves = tree_flatten_with_path(arguments)[0]
        tensors = [(path_of(keys), leaf) for keys, leaf in leaves if isinstance(leaf, Tensor)]
        segment.inputs += self.notes_of(keys_of(tensor for _, tensor in tensors))
        for path, tensor in tensors:
            made = self.notes_of(keys_of([tensor]))
            given = _BlockInput(str(path), tensor.numel() * tensor.element_size(), made[0] if made else None)
            segment.block_inputs.append(given)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(given.note_gradient)

    def end_forward(self) -> None:
        """End the forward. Storages that the forward allocated and that are still alive are counted
        as activations, because they are saved for backward."""
        for seen in self.notes_of(self._made_in_forward):
            seen.row = "activations"
        self._made_in_forward.clear()

    def begin_backward(self) -> None:
        self.phase, self._lowest = "backward", len(self.segments)
        self._starts = [segment.first for segment in self.segments]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        self._enter_backward(len(self.segments) - 1)

    def end_backward(self) -> None:
        self._enter_backward(-1)

    def mark_saved(self, tensor: Tensor) -> Tensor:
        """Record in the current segment that autograd saves `tensor` for backward, and return the
        tensor without its graph. This is the pack hook that is passed to `saved_tensors_hooks`."""
        segment = self.program[-1]
        segment.recompute_end = len(segment.events), len(segment.operations)
        segment.saved.update(self.notes_of(keys_of([tensor])))
        return tensor.detach()

    def deduplicate_loop(self, of: Sequence[int]) -> Iterator[int]:
        """Yield the indices for a loop of equal iterations, but only the first two and the last, to
        save time. For every iteration that is left out, the events and operations of the second
        iteration are recorded once more.

        Example: a loop of 10 iterations runs iterations 0, 1 and 9. What iteration 1 recorded is
        recorded another 7 times.

        All indices are yielded if the second iteration allocates a buffer that it does not free, or
        frees a buffer that it did not allocate.

        of  the indices of all iterations
        """
        if len(of) <= 3:
            yield from of
            return
        yield of[0]
        segment = self.program[-1]
        events, operations = len(segment.events), len(segment.operations)
        yield of[1]
        came, done = segment.events[events:], segment.operations[operations:]
        left: Counter[_Storage] = Counter()
        for seen, sign in came:
            left[seen] += sign
        if any(left.values()):
            yield from of[2:]
            return
        segment.events += came * (len(of) - 3)
        segment.operations += done * (len(of) - 3)
        yield of[-1]

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for seen in self.notes_of(keys_of([parameter.grad])):
            seen.row = "gradients"
            _describe_gradient(seen, name)
            self.program[-1].events.append((seen, 0))

    def _enter_backward(self, position: int) -> None:
        """Begin to record a backward segment: the backward of the forward segment
        `segments[position]`. With -1, end the backward.

        Skipped blocks run no backward of their own. So first add the backward segments of the
        skipped blocks between this segment and the last one that was begun.
        """
        for between in range(self._lowest - 1, position, -1):
            passed = self.segments[between]
            if passed.copy_of is not None:
                again = _OpenSegment(passed.part, "backward", passed.block, passed.call, copy_of=passed.copy_of)
                self.program.append(again)
        self._position, self._lowest = position, min(self._lowest, position)
        if position >= 0:
            here = self.segments[position]
            self.program.append(_OpenSegment(here.part, "backward", here.block, here.call))

    def _find_segment(self) -> None:
        number = backward_node()
        if number >= ACCUMULATES:
            return
        position = bisect.bisect_right(self._starts, number) - 1
        if position >= 0 and position != self._position:
            self._enter_backward(position)

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func)
        if name in _NO_COST or func in _READ_VALUES:
            return func(*args, **kwargs)
        if self.phase == "backward":
            self._find_segment()
        elif not self.differentiates:
            self.differentiates = in_backward()
        output = func(*args, **kwargs)
        self._record_outputs(func, name.rsplit(".", 1)[0], args, kwargs, output)
        return output

    def _record_outputs(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        segment = self.program[-1]
        outputs, inputs = tensors_in(output), tensors_in((args, kwargs))
        fresh = False
        for tensor in outputs:
            for storage in storages_of(tensor):
                if id(storage) not in self._live and id(storage) not in self._existing:
                    fresh = True
                    self._record_allocation(storage, name, segment)
                    if name in _GRADIENTS:
                        self._note_sources(self._live[id(storage)][0], inputs)
        if not fresh and func.is_view:
            return
        mutates = schema_of(func).is_mutable
        # collectives (c10d) mutate their arguments, but their schemas do not say so
        if fresh or mutates or name.startswith("c10d."):
            segment.operations.append(_operation(func, name, args, kwargs, inputs, output))

    def _note_sources(self, seen: _Storage, inputs: list[Tensor]) -> None:
        keys = keys_of(inputs)
        if self.phase == "backward":
            seen.sources = tuple(self.notes_of(keys))
        elif seen.maker == _CAST:
            seen.parameter = next((self._weights[key] for key in keys if key in self._weights), "")

    def _record_allocation(self, storage: torch.UntypedStorage, name: str, segment: _OpenSegment) -> None:
        seen = _Storage(storage.nbytes(), name)
        self.follow(storage, seen)
        segment.events.append((seen, 1))
        if self.phase == "forward":
            self._made_in_forward.append(id(storage))

    def record_free(self, note: _Storage) -> None:
        if not self._has_ended:
            self.program[-1].events.append((note, -1))

    def mark_retained(self) -> None:
        """Mark the storages that the step has left, such as those of tensors that a module keeps in an
        attribute. Nothing is recorded afterwards."""
        self._has_ended = True
        left = [seen for seen, _ in self._live.values() if seen.row != "gradients"]
        if left:
            gc.collect()  # some are only in cycles of objects
        for seen, _ in self._live.values():
            seen.retained = seen.row != "gradients"

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._live.clear()
        for hook in self._hooks:
            hook.remove()


def _operation(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], output: Any) -> Operation:
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
    if name in _IMAGES and _is_channels_last(args[_IMAGES[name]]):
        name += CHANNELS_LAST
    moved = float(sum(map(_tensor_bytes_accessed, inputs + outputs)))
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
    others = (torch.Size((one.shape[0], heads, *one.shape[2:])) for one in args[at + 1 : at + 3])
    return (*args[: at + 1], *others, *args[at + 3 :])


def _tensor_bytes_accessed(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements occupy in memory. A dimension that was expanded
    (stride 0) counts as one element, because its elements are the same memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        count *= size if stride else 1
    return count * tensor.element_size()


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


def record_step(
    model: nn.Module,
    loss_sum: Callable[[Any], Tensor],
    batch: Any,
    blocks: list[nn.Module],
    training: bool = True,
    removed: Mapping[int, int] | None = None,
    run_all: bool = False,
    gradients: bool = False,
    finds_retained: bool = False,
) -> tuple[Segment, ...]:
    """Record what one micro-batch of fake tensors does, and return it as segments, in the order in
    which they ran.

    model     a model whose parameters and buffers are fake tensors
    loss_sum  function of a batch that returns its summed loss
    batch     the micro-batch
    blocks    the model's blocks, in order, without those that were removed
    training  True: forward and backward; False: the forward of an evaluation
    removed   number of each block that was removed from the model -> number of the block that it
              repeats
    run_all   whether to run all blocks; otherwise repeated blocks are skipped
    gradients  whether autograd is on in the forward of an evaluation. What it saves then lives until
              the loss is computed; without autograd, nothing is saved
    finds_retained  whether to find the storages that the step leaves until the next one replaces them

    Afterwards all gradients are None, and the model is otherwise unchanged.

    Raises Untraceable if the forward computes gradients itself while blocks are skipped: what their backward
    does in the forward is not known.
    """
    parameters = dict(model.named_parameters())
    recorder = Recorder(parameters)
    recorder.mark_existing([list(parameters.values()), list(model.buffers()), batch])
    if not training:
        recorder.phase = "inference"
    with (
        torch.set_grad_enabled(training or gradients),
        recorder,
        record_blocks(blocks, recorder, removed, run_all),
        iterations_chosen_by(recorder.deduplicate_loop),
        ExitStack() as stack,
    ):
        recorder.begin_segment("start")
        if training:
            stack.enter_context(saved_tensors_hooks(recorder.mark_saved, lambda tensor: tensor))
        loss = loss_sum(batch)
        if recorder.differentiates and any(segment.copy_of is not None for segment in recorder.segments):
            raise Untraceable("job: model", "computes gradients in its forward", "trace all blocks")
        if training:
            stack.close()
            recorder.end_forward()
            recorder.begin_backward()
            loss.detach()  # as the engine does for its sum of losses
            loss.backward(torch.full_like(loss, 1.0))
        del loss
        if training:
            recorder.end_backward()
        if finds_retained:
            recorder.mark_retained()
    for parameter in parameters.values():
        parameter.grad = None
    return recorded_segments(recorder)


def _closed_segments(program: list[_OpenSegment]) -> tuple[Segment, ...]:
    """Convert recorded segments to `Segment` objects, in the same order. A segment of a skipped
    block gets the timeline (allocations, frees and operations) of the block that it copies.
    Segments without events and operations are dropped."""
    whole: dict[tuple[str, int, str], dict[int, Timeline]] = defaultdict(dict)  # by call
    births = {seen: number for number, seen in enumerate(s for one in program for s, sign in one.events if sign > 0)}
    closed: list[tuple[_OpenSegment, Timeline]] = []
    for opened in program:
        replaced = sum(seen.retained and sign > 0 for seen, sign in opened.events[: opened.recompute_end[0]])
        timeline = Timeline(
            tuple((_buffer(seen), sign) for seen, sign in _with_retained(_with_ordered_casts(opened.events, births))),
            tuple(opened.operations),
            (opened.recompute_end[0] + replaced, opened.recompute_end[1]),
            tuple(_buffer(seen) for seen in opened.inputs),
            frozenset(_buffer(seen) for seen in opened.saved),
            tuple(_to_given(one) for one in opened.block_inputs),
        )
        closed.append((opened, timeline))
        if opened.block is not None and opened.copy_of is None:
            calls = whole[opened.part, opened.block, opened.phase]
            calls[opened.call] = calls[opened.call].then(timeline) if opened.call in calls else timeline
    segments = []
    for opened, timeline in closed:
        if opened.copy_of is not None:
            calls = whole[opened.part, opened.copy_of, opened.phase]
            timeline = calls.get(opened.call) or calls.get(max(calls, default=0), Timeline())
        if timeline.events or timeline.operations:
            block = opened.block if opened.part == "block" else None
            segments.append(Segment(opened.part, opened.phase, timeline, block, opened.call))
    return tuple(segments)


def _with_ordered_casts(events: list[tuple[_Storage, int]], births: dict[_Storage, int]) -> list[tuple[_Storage, int]]:
    """Return the events of a segment in which casts of parameters that are freed one after another
    are freed in the order of their allocation.

    At the end of a forward, autocast frees its casts in the order of their addresses, which differs
    from trace to trace.

    births  storage -> its number in the order of allocation
    """
    ordered: list[tuple[_Storage, int]] = []
    for is_cast, run in groupby(events, lambda event: event[1] < 0 and event[0].maker == _CAST):
        ordered += sorted(run, key=lambda event: births.get(event[0], -1) if is_cast else 0)
    return ordered


def _with_retained(events: list[tuple[_Storage, int]]) -> list[tuple[_Storage, int]]:
    """Return the events with a free after each allocation of a retained storage: that of the one that the step
    before has left, and that is replaced now. The ledger has their bytes for the whole step."""
    found: list[tuple[_Storage, int]] = []
    for seen, sign in events:
        found += [(seen, sign), (seen, -1)] if seen.retained and sign > 0 else [(seen, sign)]
    return found


def _describe_gradient(seen: _Storage, parameter: str) -> None:
    """Record in `seen` that this storage holds the gradient of `parameter` (a name), and from which
    storages the matrix product, cast or sum in backward computed it.

    Example: fp32 weights under bf16 autocast. The weight gradient is a cast of the bf16 product
    grad_output.T @ input, so its operands are the storages of grad_output and input.
    """
    seen.parameter = parameter
    if seen.maker == _PRODUCT:
        seen.operands = seen.sources
    elif seen.maker == _CAST:
        for source in seen.sources:
            _describe_gradient(source, parameter)
            seen.operands = source.operands
    elif seen.maker == _SUM and seen.row == "gradients":
        seen.terms = tuple(source for source in seen.sources if source.size == seen.size)
        for term in seen.terms:
            _describe_gradient(term, parameter)


def _buffer(seen: _Storage) -> Buffer:
    if seen.buffer is None:
        operands, terms = (tuple(map(_buffer, storages)) for storages in (seen.operands, seen.terms))
        size = BatchLinear(float(seen.size))
        seen.buffer = Buffer(size, seen.row, seen.maker, seen.parameter, operands, terms, seen.retained)
    return seen.buffer


def _to_given(one: _BlockInput) -> BlockInput:
    buffer = None if one.storage is None else _buffer(one.storage)
    return BlockInput(one.path, BatchLinear(float(one.size)), buffer, one.has_gradient)


def recorded_segments(recorder: Recorder) -> tuple[Segment, ...]:
    """Return the segments that `recorder` has recorded, in the order in which they ran."""
    return _closed_segments(recorder.program)


__all__ = ["Recorder", "record_step", "recorded_segments"]
