"""Programs: what a trace found, and the same as plain data: lists, numbers and strings, which a file can hold and anyone can check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from tightfit.entries import Parameter
from tightfit.program import TRACED, Buffer, Given, Linear, Operation, Passage, Timeline

PHASES = ("forward", "backward", "inference")

One = TypeVar("One")


@dataclass(frozen=True)
class Programs:
    """What a model does with a micro-batch, whatever its size: the passages of its training, or of an evaluation."""

    passages: tuple[Passage, ...]
    parameters: tuple[Parameter, ...]
    blocks: int


def to_content(programs: Programs) -> dict[str, Any]:
    """`programs` as plain data. Buffers and timelines that passages share are written once, and referred to by number."""
    buffers: dict[Buffer, int] = {}
    operations: dict[Operation, int] = {}
    timelines: dict[Timeline, int] = {}

    def number(table: dict[One, int], one: One) -> int:
        return table.setdefault(one, len(table))

    def buffer_number(buffer: Buffer) -> int:
        """After those that it refers to."""
        for source in (*buffer.operands, *buffer.terms):
            buffer_number(source)
        return number(buffers, buffer)

    def timeline(one: Timeline) -> dict[str, Any]:
        return {
            "events": [[buffer_number(buffer), sign] for buffer, sign in one.events],
            "operations": [number(operations, operation) for operation in one.operations],
            "needed": list(one.needed),
            "inputs": [buffer_number(buffer) for buffer in one.inputs],
            "kept": sorted(buffer_number(buffer) for buffer in one.kept),
            "given": [
                [
                    each.path,
                    _pair(each.size),
                    None if each.buffer is None else buffer_number(each.buffer),
                    each.has_gradient,
                ]
                for each in one.given
            ],
        }

    passages = [
        [one.part, one.phase, number(timelines, one.timeline), one.block, one.call] for one in programs.passages
    ]
    return {
        "timelines": [timeline(one) for one in timelines],
        "passages": passages,
        "buffers": [
            [
                _pair(one.size),
                one.row,
                one.maker,
                one.parameter,
                [buffers[source] for source in one.operands],
                [buffers[source] for source in one.terms],
            ]
            for one in buffers
        ],
        "operations": [
            [
                one.name,
                one.dtype,
                _pair(one.flops),
                _pair(one.moved),
                [_pair(size) for size in one.sizes],
                _pair(one.count),
                one.computed,
            ]
            for one in operations
        ],
        "parameters": [
            [one.name, list(one.shape), one.bytes, one.trainable, list(one.places)] for one in programs.parameters
        ],
        "blocks": programs.blocks,
    }


def from_content(content: Any) -> Programs:
    """The programs of `to_content`. Raises ValueError, TypeError, KeyError or IndexError for anything else."""
    buffers: list[Buffer] = []
    for size, row, maker, parameter, operands, terms in content["buffers"]:
        sources = (tuple(buffers[_whole(place)] for place in places) for places in (operands, terms))
        buffers.append(Buffer(_linear(size), _one_of(row, TRACED), _text(maker), _text(parameter), *sources))
    operations = [
        Operation(
            _text(name),
            _text(dtype),
            _linear(flops),
            _linear(moved),
            tuple(map(_linear, sizes)),
            _linear(count),
            _share(computed),
        )
        for name, dtype, flops, moved, sizes, count, computed in content["operations"]
    ]
    timelines = []
    for one in content["timelines"]:
        events = tuple((buffers[_whole(place)], _one_of(sign, (-1, 0, 1))) for place, sign in one["events"])
        first, second = one["needed"]
        timelines.append(
            Timeline(
                events,
                tuple(operations[_whole(place)] for place in one["operations"]),
                (_whole(first), _whole(second)),
                tuple(buffers[_whole(place)] for place in one["inputs"]),
                frozenset(buffers[_whole(place)] for place in one["kept"]),
                tuple(
                    Given(
                        _text(path),
                        _linear(size),
                        None if place is None else buffers[_whole(place)],
                        _one_of(has_gradient, (True, False)),
                    )
                    for path, size, place, has_gradient in one["given"]
                ),
            )
        )
    passages = tuple(
        Passage(
            _text(part),
            _one_of(phase, PHASES),
            timelines[_whole(place)],
            None if block is None else _whole(block),
            _whole(call),
        )
        for part, phase, place, block, call in content["passages"]
    )
    parameters = tuple(
        Parameter(
            _text(name),
            tuple(map(_whole, shape)),
            _whole(size),
            _one_of(trainable, (True, False)),
            tuple(map(_place, places)),
        )
        for name, shape, size, trainable, places in content["parameters"]
    )
    if not passages:
        raise ValueError("a program without passages")
    return Programs(passages, parameters, _whole(content["blocks"]))


def _pair(value: Linear) -> list[float]:
    return [value.fixed, value.per_sample]


def _linear(value: Any) -> Linear:
    fixed, per_sample = map(float, value)
    if not (math.isfinite(fixed) and math.isfinite(per_sample)):
        raise ValueError(f"{value} is no size")
    return Linear(fixed, per_sample)


def _share(value: Any) -> float:
    if type(value) is not float or not 0.0 < value <= 1.0:
        raise ValueError(f"{value} is no share")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no count")
    return value


def _place(value: Any) -> int:
    return -1 if value == -1 else _whole(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value} is no name")
    return value


def _one_of(value: One, known: tuple[One, ...]) -> One:
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        raise ValueError(f"{value} is none of {known}")
    return value


__all__ = ["Programs", "from_content", "to_content"]
