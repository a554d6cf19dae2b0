"""Assigns blocks to pipeline stages, and reduces the whole model's ledger to one pipeline rank's.

`pipeline` calls `rank_ledger` when it estimates a plan, and `stage_ranges` when it builds a run.

Example: `split_evenly` divides 10 blocks over pp: 4 as 2, 3, 3, 2, because the first and the last
stage also have the embedding and the head. The stages are range(0, 2), range(2, 5), range(5, 8)
and range(8, 10). With virtual_stages: 2 there are 8 stages, and rank r has the stages r and r + 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tightfit.cost.entries import RankProgram, StageBoundary, StageProgram
from tightfit.cost.ledger import Ledger
from tightfit.cost.pipeline_schedule import coming, late, make_schedule, sent, split_evenly
from tightfit.cost.pipeline_stage import Sections, StageInput, sections_of, stage_program
from tightfit.cost.recorded_step import BatchLinear, BlockInput, Segment
from tightfit.distributed.links import bandwidth, latency
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.models.dataflow import PathTo
from tightfit.parallel.pipeline.pruned_model import blocks_out_of_order
from tightfit.plan import Plan


def stage_ranges(plan: Plan, blocks: int) -> list[range]:
    """The range of blocks of each stage of the model, first to last.

    Raises InputError where there are fewer blocks than stages, or where `split` does not add up to
    the number of blocks.
    """
    split = plan.split or split_evenly(blocks, plan.stages)
    if sum(split) != blocks or min(split) < 1:
        fewer = f"use a pipeline of at most {blocks} stages" if blocks > 1 else "use pp: 1"
        if plan.split:
            said = f"the model has {blocks} blocks, not {sum(split)}"
            raise InputError(
                f"plan: split={list(plan.split)}",
                said,
                f"use a split that adds up to {blocks}, or leave it out",
            )
        what = f"has {blocks} blocks" if blocks else "has no repeated blocks"
        raise InputError(f"plan: pp={plan.pp}, {plan.stages} stages", f"the model {what}", fewer)
    ends = [sum(split[: number + 1]) for number in range(len(split))]
    return [range(end - length, end) for end, length in zip(ends, split, strict=True)]


def stages_using(places: Iterable[int], stages: list[range]) -> set[int]:
    """The numbers of the stages that use a parameter. places: where it is used (see
    `parameter_uses`)."""
    ends = [piece.stop for piece in stages]
    return {min(bisect_right(ends, max(place, 0)), len(stages) - 1) for place in places}


def refuse_idle_ranks(plan: Plan, stages: list[range], trained: list[tuple[int, ...]]) -> None:
    """Raise InputError, on every rank, where some rank would have no trainable parameter.

    trained: for each trainable parameter, where it is used (see `parameter_uses`).
    """
    for device in range(plan.pp):
        own = set(range(device, plan.stages, plan.pp))
        if not any(stages_using(places, stages) & own for places in trained):
            raise InputError(
                f"plan: pp={plan.pp}",
                f"device {device} of the pipeline would have no trainable parameter",
                "use pp: 1, or a split that gives each device some trainable parameters",
            )


def rank_ledger(
    ledger: Ledger, boundary_inputs: Mapping[int, tuple[PathTo, ...]], plan: Plan, machine: Machine
) -> Ledger:
    """The ledger of one rank: its stages' segments, parameters and updates, and its schedule.

    crosses: by the first block of each stage but the first, the paths of the arguments that are
    sent to it. Raises InputError where the model does not call its blocks in order, where there are
    too few blocks, or where a rank has nothing to train.
    """
    pieces = stage_ranges(plan, ledger.blocks)
    called = [segment.block for segment in ledger.training if segment.phase == "forward" and segment.block is not None]
    if called != sorted(set(called)):
        raise blocks_out_of_order()
    refuse_idle_ranks(plan, pieces, [parameter.places for parameter in ledger.parameters if parameter.trainable])
    number = ledger.device
    own = [piece for piece in range(plan.stages) if piece % plan.pp == number]
    mine = {p.name for p in ledger.parameters if stages_using(p.places, pieces) & set(own)}
    sections = sections_of(ledger.training, ledger.blocks, plan.schedule == "zero-bubble")
    given = [_block_inputs(ledger.training, piece.start, boundary_inputs.get(piece.start, ())) for piece in pieces]
    crossings = {
        piece: StageBoundary(
            tuple(one.size for one in tensors),
            tuple(one.size for one in tensors if one.has_gradient),
            _sum(one.size for one in tensors if sections.saves_output(pieces[piece - 1], one.buffer)),
        )
        for piece, tensors in enumerate(given)
        if piece
    }
    parts = {}
    for piece in own:
        comes = _stage_input(sections, pieces[piece], given[piece])
        gradients = crossings[piece + 1].backward if piece + 1 in crossings else ()
        parts[piece] = stage_program(sections, pieces[piece], comes, _sum(gradients))
    said = {
        name: _communicated_bytes(segments)
        for name, segments in (("all", ledger.training), ("own", _segments_of(parts)))
    }
    share = said["own"] / said["all"] if said["all"] else 1.0  # of the tp communication volume
    shape = plan.schedule, plan.pp, plan.virtual_stages, ledger.micro_batches
    table, stops = make_schedule(*shape), machine.device != "cpu"
    ahead = coming(*shape, number, stops)
    stays = ((),) * len(ahead) if stops else sent(table, number)  # a GPU frees what has arrived
    return replace(
        ledger,
        training=_segments_of(parts),
        messages=tuple(message.times(share) for message in ledger.messages),
        parameters=tuple(p for p in ledger.parameters if p.name in mine),
        updates={name: update for name, update in ledger.updates.items() if name in mine},
        rank_program=RankProgram(
            stage_programs=parts,
            schedule=table,
            pipeline_rank=number,
            boundaries=crossings,
            bytes_per_s=bandwidth(plan, machine, ("pp",)),
            latency_s=latency(plan, machine, ("pp",), 1),
            messages=tuple((there, () if one is None else (one,)) for there, one in zip(stays, ahead, strict=True)),
            versions=_weight_versions(plan, number),
            late=late(*shape) if stops else frozenset(),
            continuous=plan.schedule == "pipedream",
        ),
    )


def _block_inputs(training: Iterable[Segment], block: int, paths: tuple[PathTo, ...]) -> list[BlockInput]:
    """Those arguments of a block, at these paths, that are tensors; each storage once."""
    called = next((one for one in training if one.phase == "forward" and one.block == block), None)
    known = {one.path: one for one in called.timeline.block_inputs} if called is not None else {}
    return [known[str(path)] for path in paths if str(path) in known]


def _stage_input(sections: Sections, piece: range, given: list[BlockInput]) -> StageInput:
    """What a stage receives: bytes that its backward needs, other bytes, and the buffers they
    replace."""
    kept = sections.saved(piece)
    return StageInput(
        _sum(one.size for one in given if one.buffer in kept),
        _sum(one.size for one in given if one.buffer not in kept),
        frozenset(one.buffer for one in given if one.buffer is not None),
    )


def _sum(sizes: Iterable[BatchLinear]) -> BatchLinear:
    return sum(sizes, BatchLinear())


def _segments_of(parts: dict[int, StageProgram]) -> tuple[Segment, ...]:
    return tuple(segment for one in parts.values() for segment in one.segments)


def _communicated_bytes(segments: Iterable[Segment]) -> float:
    """Bytes that the recorded operations communicate, for one sample."""
    return sum(
        operation.bytes_accessed.at(1) * operation.count.at(1)
        for segment in segments
        for operation in segment.timeline.operations
        if operation.name.startswith(("c10d.", "_c10d_functional."))  # the latter in compiled blocks
    )


def _weight_versions(plan: Plan, device: int) -> int:
    """How many versions of the weights a rank keeps beside the newest: one per micro-batch in
    flight."""
    if plan.schedule != "pipedream":
        return 0
    return plan.pp - 1 - (0 if plan.vertical_sync else device)


__all__ = ["rank_ledger", "stage_ranges", "stages_using"]
