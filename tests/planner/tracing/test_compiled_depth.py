"""The trace of a whole compiled model of four blocks, extended to its depth, is that of the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import tightfit
from tests.planner.tracing.test_repeated_blocks import job
from tightfit.cost.recorded_step import BatchLinear, Buffer, Operation, Segment, Timeline, replay
from tightfit.planner.tracing.compiled_depth import NothingRepeats, with_more_blocks
from tightfit.planner.tracing.plain_data import RecordedStep
from tightfit.planner.tracing.profiler import Profiler


def traced(name: str, plan: tightfit.Plan, few: bool) -> tuple[RecordedStep, bool]:
    """The recorded step of a training, and whether it was made of one of few blocks."""
    profiler = Profiler(job(name), "cuda")
    profiler.model.extends_compiled = few
    return profiler._trace(plan, 2, True), profiler.model.extends_compiled


def told(step: RecordedStep) -> list[Any]:
    """What the planner reads of a step: the bytes at the peak and at the end of each segment, its buffers and
    operations, and the parameters' gradients. Small buffers may be freed in another order."""
    found: list[Any] = [step.parameters, step.blocks, step.unused, step.experts]
    for segment in step.segments:
        timeline, played = segment.timeline, replay(segment.timeline, 1)
        buffers = Counter((one.size, one.row, one.maker, sign) for one, sign in timeline.events)
        gradients = sorted(one.parameter for one, sign in timeline.events if sign == 0)
        peaks = [round(sum(played.at_peak.values()), -3), played.at_end, played.largest_gradient]
        found.append((segment.key, peaks, buffers, Counter(timeline.operations), gradients, len(timeline.saved)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"precision": "bf16-mixed"}, {"recompute": "full"}, {"recompute": "selective"}, {"chunked_loss": 8}],
)
def test_few_blocks_show_what_all_do(name: str, fields: dict[str, Any]) -> None:
    plan = tightfit.Plan(compile="model", **fields)
    found, extended = traced(name, plan, True)
    assert extended
    assert told(found) == told(traced(name, plan, False)[0])


def test_a_deep_compiled_model_is_traced_with_few_blocks() -> None:
    plan = tightfit.Plan(compile="model", precision="bf16-mixed", chunked_loss=8)
    found, extended = traced("gpt2", plan, True)
    assert extended
    assert told(found) == told(traced("gpt2", plan, False)[0])


@pytest.mark.parametrize("recompute", ["sqrt", "every-2", "first-2"])
def test_blocks_that_are_recomputed_otherwise_are_all_traced(recompute: str) -> None:
    profiler = Profiler(job("llama"), "cuda")
    with profiler.model.mode, profiler.model.values(False):
        block_map = profiler.model.build_traced(tightfit.Plan(compile="model", recompute=recompute))[1]
    assert not block_map.removed


def buffer(size: float, row: str = "activations", parameter: str = "") -> Buffer:
    return Buffer(BatchLinear(size), row, "aten.mm", parameter)


def operation(flops: float) -> Operation:
    return Operation("aten.mm", "float32", BatchLinear(flops), BatchLinear(1.0))


def step(blocks: Sequence[int], kept: int | None = None) -> tuple[Segment, ...]:
    """A step like the example in the module's docstring: the forward of each block saves one buffer and drops another, and
    its backward frees the saved one and makes a gradient.

    blocks  the numbers of the blocks, which their parameters have in their names
    kept    number of a block whose backward does not free what forward has saved
    """
    start, saved = buffer(64), {block: buffer(4096) for block in blocks}
    gradients = {block: buffer(512, "gradients", f"blocks.{block}.weight") for block in blocks}
    forward, backward = [(start, 1)], []
    for block in blocks:
        dropped = buffer(2048, "temporaries")
        forward += [(saved[block], 1), (dropped, 1), (dropped, -1)]
    for block in reversed(blocks):
        backward += [(gradients[block], 1), *([(saved[block], -1)] if block != kept else [])]
    backward += [(start, -1), *((one, 0) for one in gradients.values())]
    products = (operation(1), *(operation(flops) for _ in blocks for flops in (2, 3)))
    return (
        Segment("start", "forward", Timeline(tuple(forward), products, saved=frozenset(saved.values()))),
        Segment("start", "backward", Timeline(tuple(backward), products)),
    )


FEW = (0, 1, 2, 5)  # of 6 blocks


def numbered(name: str, number: int | None) -> str:
    return "*.weight" if number is None else f"blocks.{3 + number}.weight"


def test_inserted_blocks_have_their_own_buffers() -> None:
    extended, expected = with_more_blocks(step(FEW), 2, numbered), step(range(6))
    for found, whole in zip(extended, expected, strict=True):
        assert [(one.size, one.row, sign) for one, sign in found.timeline.events if sign] == [
            (one.size, one.row, sign) for one, sign in whole.timeline.events if sign
        ]
        assert found.timeline.operations == whole.timeline.operations
        assert len(found.timeline.saved) == len(whole.timeline.saved)
    events = [event for segment in extended for event in segment.timeline.events]
    made, freed = ([one for one, sign in events if sign == each] for each in (1, -1))
    assert len(set(made)) == len(made)
    assert len(set(freed)) == len(freed)
    assert set(freed) == {one for one in made if one.row != "gradients"}
    assert sorted(one.parameter for one, sign in events if sign == 0) == [
        f"blocks.{block}.weight" for block in range(6)
    ]


@pytest.mark.parametrize(
    "segments",
    [step(FEW, kept=1), step([0]), step(FEW)[:1], step(FEW)[::-1]],
    ids=["one block is different", "one block", "no backward", "backward first"],
)
def test_a_step_without_equal_blocks_is_not_extended(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(NothingRepeats):
        with_more_blocks(segments, 2, numbered)
