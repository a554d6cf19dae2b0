"""Divide a model's blocks into pipeline stages, and reduce the full model's ledger to one pipeline
rank.

`pipeline` calls `rank_ledger` when it estimates a plan, and `stage_ranges` when it builds a run.

Example: `split_evenly` divides 10 blocks over pp: 4 as 2, 3, 3, 2, because the first and the last
stage also have the embedding and the output head. The stages are range(0, 2), range(2, 5), range(5,
8) and range(8, 10). With virtual_stages: 2 there are 8 stages, and rank r has the stages r and r +
4.
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
    """Return the range of block numbers of each stage, from the first stage to the last.

    blocks  the number of blocks of the model

    Raises InputError if there are fewer blocks than stages, or if the plan's `split` does not add
    up to the number of blocks.
    """
    split = plan.split or split_evenly(blocks, plan.stages)
    if sum(split) != blocks or min(split) < 1:
        fewer = f"use a pipeline of at most {blocks} stages" if blocks > 1 else "use pp: 1"
        if plan.split:
            said = f"the model has {blocks} blocks, and split adds up to {sum(split)}"
            raise InputError(
                f"plan: split={list(plan.split)}",
                said,
                f"use a split that adds up to {blocks}, or leave out split",
            )
        what = f"has {blocks} blocks" if blocks else "has no repeated blocks"
        raise InputError(f"plan: pp={plan.pp}, {plan.stages} stages", f"the model {what}", fewer)
    ends = [sum(split[: number + 1]) for number in range(len(split))]
    return [range(end - length, end) for end, length in zip(ends, split, strict=True)]


def stages_using(block_numbers: Iterable[int], stages: list[range]) -> set[int]:
    """Return the numbers of the stages that use a parameter.

    block_numbers  the numbers of the blocks that use the parameter. -1 stands for the code before
                   the blocks, which is in the first stage. The number of blocks stands for the code
                   after them, which is in the last stage
    stages         the range of block numbers of each stage
    """
    ends = [stage.stop for stage in stages]
    return {min(bisect_right(ends, max(block, 0)), len(stages) - 1) for block in block_numbers}


def refuse_idle_ranks(plan: Plan, stages: list[range], trained: list[tuple[int, ...]]) -> None:
    """Raise InputError if any rank of the pipeline would have no trainable parameter.

    Every rank checks all ranks, so that all of them raise the error.

    stages   the range of block numbers of each stage
    trained  for each trainable parameter, the numbers of the blocks that use it, -1 before the
             blocks and the number of blocks after them
    """
    used = set().union(*(stages_using(block_numbers, stages) for block_numbers in set(trained)))
    for rank in range(plan.pp):
        if not used.intersection(range(rank, plan.stages, plan.pp)):
            raise InputError(
                f"plan: pp={plan.pp}",
                f"rank {rank} of the pipeline would have no trainable parameter",
                "use pp: 1, or a split that gives each rank some trainable parameters",
            )


def rank_ledger(
    ledger: Ledger, boundary_inputs: Mapping[int, tuple[PathTo, ...]], plan: Plan, machine: Machine
) -> Ledger:
    """Return the ledger of one pipeline rank. It has those segments, parameters and updates of the
    full model's ledger that belong to the rank's stages, and the rank's schedule.

    ledger           the ledger of the full model. Its `pipeline_rank` is the rank
    boundary_inputs  number of a stage's first block -> the paths of those arguments of this block
                     that the stage before sends. A path leads to a tensor within the arguments

    Raises InputError if the model does not call its blocks in order, if there are fewer blocks than
    stages, or if a rank has no trainable parameter.
    """
    stages, rank = stage_ranges(plan, ledger.blocks), ledger.pipeline_rank
    called = [segment.block for segment in ledger.training if segment.phase == "forward" and segment.block is not None]
    if called != sorted(set(called)):
        raise blocks_out_of_order()
    refuse_idle_ranks(
        plan, stages, [parameter.used_by_blocks for parameter in ledger.parameters if parameter.trainable]
    )
    own = range(rank, plan.stages, plan.pp)
    programs, boundaries = _stage_programs(ledger, stages, own, boundary_inputs, plan)
    training = tuple(segment for program in programs.values() for segment in program.segments)
    sent_here, sent_by_all = (
        sum(one.timeline.collective_bytes for one in some) for some in (training, ledger.training)
    )
    share = sent_here / sent_by_all if sent_by_all else 1.0  # of tp's bytes
    shape = plan.schedule, plan.pp, plan.virtual_stages, ledger.micro_batches
    schedule, on_gpu = make_schedule(*shape), machine.device != "cpu"
    arriving = coming(*shape, rank, on_gpu)
    leaving = ((),) * len(arriving) if on_gpu else sent(schedule, rank)  # a GPU frees what has arrived
    own_uses = {
        block_numbers
        for block_numbers in {p.used_by_blocks for p in ledger.parameters}
        if stages_using(block_numbers, stages) & set(own)
    }
    names = {p.name for p in ledger.parameters if p.used_by_blocks in own_uses}
    return replace(
        ledger,
        training=training,
        messages=tuple(message.times(share) for message in ledger.messages),
        parameters=tuple(p for p in ledger.parameters if p.name in names),
        updates={name: update for name, update in ledger.updates.items() if name in names},
        rank_program=RankProgram(
            stage_programs=programs,
            schedule=schedule,
            pipeline_rank=rank,
            boundaries=boundaries,
            bytes_per_s=bandwidth(plan, machine, ("pp",)),
            latency_s=latency(plan, machine, ("pp",), 1),
            messages=tuple(zip(leaving, arriving, strict=True)),
            versions=_weight_versions(plan, rank),
            late=late(*shape) if on_gpu else frozenset(),
            continuous=plan.schedule == "pipedream",
        ),
    )


def _stage_programs(
    ledger: Ledger, stages: list[range], own: range, boundary_inputs: Mapping[int, tuple[PathTo, ...]], plan: Plan
) -> tuple[dict[int, StageProgram], dict[int, StageBoundary]]:
    """Return two dicts. The first maps each of the rank's stages to its program: the recorded
    segments that it runs in one micro-batch. The second maps each stage of the model but the first
    to its boundary: the bytes of the tensors that pass between it and the stage before.

    stages           the range of block numbers of each stage of the model
    own              the numbers of the rank's stages
    boundary_inputs  number of a stage's first block -> the paths of those arguments of this block
                     that the stage before sends. A path leads to a value in (args, kwargs): (0, 2)
                     is args[2]
    """
    sections = sections_of(ledger.training, ledger.blocks, plan.schedule == "zero-bubble")
    inputs = [_block_inputs(ledger.training, blocks.start, boundary_inputs.get(blocks.start, ())) for blocks in stages]
    boundaries = {
        stage: StageBoundary(
            tuple(tensor.size for tensor in tensors),
            tuple(tensor.size for tensor in tensors if tensor.has_gradient),
            _sum(tensor.size for tensor in tensors if sections.saves_output(stages[stage - 1], tensor.buffer)),
        )
        for stage, tensors in enumerate(inputs)
        if stage
    }
    programs = {}
    for stage in own:
        received = _stage_input(sections, stages[stage], inputs[stage])
        gradients = boundaries[stage + 1].backward if stage + 1 in boundaries else ()
        programs[stage] = stage_program(sections, stages[stage], received, _sum(gradients))
    return programs, boundaries


def _block_inputs(training: Iterable[Segment], block: int, paths: tuple[PathTo, ...]) -> list[BlockInput]:
    """Return the tensors at `paths` in the arguments of a block, as the recorded step lists them. A
    path without a tensor in that list is left out.

    The recorded step lists only one of several arguments that share a storage, so the others are
    left out, too.

    training  the segments of the recorded step
    block     the number of the block
    paths     places in the block's arguments (args, kwargs): (0, 2) is args[2]
    """
    called = next((segment for segment in training if segment.phase == "forward" and segment.block == block), None)
    known = {one.path: one for one in called.timeline.block_inputs} if called is not None else {}
    return [known[str(path)] for path in paths if str(path) in known]


def _stage_input(sections: Sections, blocks: range, given: list[BlockInput]) -> StageInput:
    """Describe the tensors that a stage receives in one micro-batch.

    The result has the bytes of the tensors that the stage's backward needs, the bytes of the
    others, and the buffers of the recorded step that the tensors replace.

    sections  the recorded step, divided by blocks
    blocks    the range of the stage's block numbers
    given     the received tensors
    """
    kept = sections.saved(blocks)
    return StageInput(
        _sum(one.size for one in given if one.buffer in kept),
        _sum(one.size for one in given if one.buffer not in kept),
        frozenset(one.buffer for one in given if one.buffer is not None),
    )


def _sum(sizes: Iterable[BatchLinear]) -> BatchLinear:
    return sum(sizes, BatchLinear())


def _weight_versions(plan: Plan, pipeline_rank: int) -> int:
    """Return how many older versions of the weights a rank keeps beside the newest version.

    This is 0 unless the schedule is pipedream. Example for pp: 4: it is 3, 2, 1 and 0 on ranks 0 to
    3, or 3 on every rank with vertical_sync.

    """
    if plan.schedule != "pipedream":
        return 0
    return plan.pp - 1 - (0 if plan.vertical_sync else pipeline_rank)


__all__ = ["rank_ledger", "stage_ranges", "stages_using"]
