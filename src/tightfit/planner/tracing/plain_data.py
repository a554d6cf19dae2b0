"""Define the result of a trace, and convert it to and from plain data (lists, numbers, strings).

The cache writes the plain data to a JSON file. `from_content` checks every value that it reads, so
a damaged file is an error and never a wrong trace.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from tightfit.cost.entries import Parameter
from tightfit.cost.recorded_step import (
    TRACED_ROWS,
    BatchLinear,
    BlockInput,
    Buffer,
    Convolution,
    Operation,
    Segment,
    Timeline,
)

PHASES = ("forward", "backward", "inference")

Item = TypeVar("Item")


@dataclass(frozen=True)
class RecordedStep:
    """The result of a trace: what a model does with one micro-batch.

    segments    the recorded parts of a training micro-batch (forward and backward) or of an
                evaluation, in the order in which they ran
    parameters  the model's parameters and buffers
    blocks      number of the model's blocks; 0 if the whole model is one compiled region
    experts     for each kind of mixture of experts: (number of experts, number that a token
                chooses)
    unused      names of trainable parameters that get no gradient in a training micro-batch. Empty if the model
                reads values that are unknown or random, with which it may choose the parameters
    """

    segments: tuple[Segment, ...]
    parameters: tuple[Parameter, ...]
    blocks: int
    experts: tuple[tuple[int, int], ...] = ()
    unused: tuple[str, ...] = ()


def to_content(step: RecordedStep) -> dict[str, Any]:
    """Convert a recorded step to plain data: lists, numbers and strings, in a dict. Each buffer,
    operation and timeline is written only once; all uses refer to it by its number."""
    buffers: dict[Buffer, int] = {}
    operations: dict[Operation, int] = {}
    timelines: dict[Timeline, int] = {}

    def number(table: dict[Item, int], one: Item) -> int:
        return table.setdefault(one, len(table))

    def buffer_number(buffer: Buffer) -> int:
        """Return the number of a buffer, after numbering all buffers that it refers to. These
        therefore have smaller numbers."""
        for source in (*buffer.operands, *buffer.terms):
            buffer_number(source)
        return number(buffers, buffer)

    def timeline(one: Timeline) -> dict[str, Any]:
        return {
            "events": [[buffer_number(buffer), sign] for buffer, sign in one.events],
            "operations": [number(operations, operation) for operation in one.operations],
            "recompute_end": list(one.recompute_end),
            "inputs": [buffer_number(buffer) for buffer in one.inputs],
            "saved": sorted(buffer_number(buffer) for buffer in one.saved),
            "block_inputs": [
                [
                    each.path,
                    _pair(each.size),
                    None if each.buffer is None else buffer_number(each.buffer),
                    each.has_gradient,
                ]
                for each in one.block_inputs
            ],
        }

    segments = [
        [segment.part, segment.phase, number(timelines, segment.timeline), segment.block, segment.call]
        for segment in step.segments
    ]
    return {
        "unused": list(step.unused),
        "timelines": [timeline(one) for one in timelines],
        "segments": segments,
        "buffers": [
            [
                _pair(buffer.size),
                buffer.row,
                buffer.maker,
                buffer.parameter,
                [buffers[source] for source in buffer.operands],
                [buffers[source] for source in buffer.terms],
                buffer.retained,
            ]
            for buffer in buffers
        ],
        "operations": [
            [
                operation.name,
                operation.dtype,
                _pair(operation.flops),
                _pair(operation.bytes_accessed),
                [_pair(size) for size in operation.sizes],
                _pair(operation.count),
                operation.computed_share,
                operation.alignment,
                None if operation.convolution is None else list(astuple(operation.convolution)),
            ]
            for operation in operations
        ],
        "parameters": [
            [
                parameter.name,
                list(parameter.shape),
                parameter.bytes,
                parameter.trainable,
                list(parameter.used_by_blocks),
                parameter.buffer,
            ]
            for parameter in step.parameters
        ],
        "blocks": step.blocks,
        "experts": [list(expert) for expert in step.experts],
    }


def from_content(content: Any) -> RecordedStep:
    """Convert plain data, which `to_content` returned, back to the recorded step. Raises
    ValueError, TypeError, KeyError or IndexError for any other content."""
    buffers: list[Buffer] = []
    for size, row, maker, parameter, operands, terms, retained in content["buffers"]:
        first, second = (tuple(buffers[_read_count(index)] for index in indices) for indices in (operands, terms))
        buffers.append(
            Buffer(
                _read_linear(size),
                _one_of(row, TRACED_ROWS),
                _read_text(maker),
                _read_text(parameter),
                first,
                second,
                _one_of(retained, (True, False)),
            )
        )
    operations = [
        Operation(
            _read_text(name),
            _read_text(dtype),
            _read_linear(flops),
            _read_linear(moved),
            tuple(map(_read_linear, sizes)),
            _read_linear(count),
            _read_share(computed),
            _read_count(aligned),
            None if convolution is None else _read_convolution(*convolution),
        )
        for name, dtype, flops, moved, sizes, count, computed, aligned, convolution in content["operations"]
    ]
    timelines = []
    for timeline in content["timelines"]:
        events = tuple((buffers[_read_count(index)], _one_of(sign, (-1, 0, 1))) for index, sign in timeline["events"])
        first, second = timeline["recompute_end"]
        timelines.append(
            Timeline(
                events,
                tuple(operations[_read_count(index)] for index in timeline["operations"]),
                (_read_count(first), _read_count(second)),
                tuple(buffers[_read_count(index)] for index in timeline["inputs"]),
                frozenset(buffers[_read_count(index)] for index in timeline["saved"]),
                tuple(
                    BlockInput(
                        _read_text(path),
                        _read_linear(size),
                        None if index is None else buffers[_read_count(index)],
                        _one_of(has_gradient, (True, False)),
                    )
                    for path, size, index, has_gradient in timeline["block_inputs"]
                ),
            )
        )
    segments = tuple(
        Segment(
            _read_text(part),
            _one_of(phase, PHASES),
            timelines[_read_count(index)],
            None if block is None else _read_count(block),
            _read_count(call),
        )
        for part, phase, index, block, call in content["segments"]
    )
    parameters = tuple(
        Parameter(
            _read_text(name),
            tuple(map(_read_count, shape)),
            _read_count(size),
            _one_of(trainable, (True, False)),
            tuple(map(_read_block, used_by)),
            _one_of(buffer, (True, False)),
        )
        for name, shape, size, trainable, used_by, buffer in content["parameters"]
    )
    if not segments:
        raise ValueError("a recorded step without segments")
    experts = tuple((_read_count(count), _read_count(chosen)) for count, chosen in content["experts"])
    unused = tuple(map(_read_text, content["unused"]))
    return RecordedStep(segments, parameters, _read_count(content["blocks"]), experts, unused)


def _pair(value: BatchLinear) -> list[float]:
    return [value.fixed, value.per_sample]


def _read_linear(value: Any) -> BatchLinear:
    fixed, per_sample = map(float, value)
    if not (math.isfinite(fixed) and math.isfinite(per_sample)):
        raise ValueError(f"{value} is not a finite size")
    return BatchLinear(fixed, per_sample)


def _read_convolution(*values: Any) -> Convolution:
    *sizes, groups, transposed, gradients = values
    tuples = [tuple(map(_read_count, size)) for size in sizes]
    dimensions = len(tuples[0]) - 1
    if [len(one) for one in tuples[1:]] != [dimensions + 2, *[dimensions] * 4] or not _read_count(groups):
        raise ValueError(f"{values} is not a convolution")
    return Convolution.of(tuples, groups, _one_of(transposed, (True, False)), _one_of(gradients, (0, 1, 2)))


def _read_share(value: Any) -> float:
    if type(value) is not float or not 0.0 < value <= 1.0:
        raise ValueError(f"{value} is not a share: a float above 0, at most 1")
    return value


def _read_count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is not a count: an integer of at least 0")
    return value


def _read_block(value: Any) -> int:
    return -1 if value == -1 else _read_count(value)


def _read_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value} is not a string")
    return value


def _one_of(value: Item, known: tuple[Item, ...]) -> Item:
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        raise ValueError(f"{value} is not one of {known}")
    return value


__all__ = ["RecordedStep", "from_content", "to_content"]
