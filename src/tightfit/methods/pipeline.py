"""Splits the model's blocks into stages on different devices. Micro-batches flow forward through
the stages and their gradients flow back, so that a model can be larger than one device.

Saves   parameters, optimizer states and activations: each device holds those of its own stages
        only. Only the hidden states between two stages are sent, so the link may be slow.
Costs   idle time (the bubble): (p-1)/(m+p-1) of the step with p devices and m micro-batches.
        `interleaved` divides the bubble by the number of stages on each device, and `zero-bubble`
        fills most of it with the computation of weight gradients. With `naive`, devices are idle
        for (p-1)/p of the step. GPipe holds the activations of all m micro-batches, 1F1B those of
        at most p.
When    the model does not fit a device, and the links between devices or nodes are too slow for
        zero or tp. Use many micro-batches.
Order   after all methods that change blocks, because it distributes the changed blocks; before the
        methods that hook gradients.
Source  GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B with flush: Narayanan et al. 2020,
        arXiv:2006.09503; interleaved: Narayanan et al. 2021, arXiv:2104.04473; zero bubble: Qi et
        al. 2023, arXiv:2401.10241.

Every device runs the model's own forward, in which stubs replace the blocks of other devices. Stubs
before the device's first block return a tensor of the right shape. When the first block is called,
tensors received from the previous device replace its arguments (`parallel/pipeline/boundaries.py`
finds out which ones). The first stub after the device's last block ends the forward. Modules that
are used before the blocks (embeddings) are on the first device, modules that are used after the
blocks on the last device. A weight that both devices use is on both, and its gradients are summed.

Example: with 4 devices and 8 micro-batches, the bubble is 3/11 of the step, 27 %, and GPipe holds
the activations of 8 micro-batches. With 32 micro-batches, the bubble is 3/35, 9 %, and GPipe holds
the activations of 32. With 1F1B, the first device holds those of 4 in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tightfit._torch.modules import own_children
from tightfit.cost.ledger import Ledger
from tightfit.machine import Machine
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.block_hooks import Hooks
from tightfit.parallel.pipeline.boundaries import (
    boundary_inputs,
    buffers_updated_elsewhere,
    place_parameters,
    resolve_parameter_uses,
)
from tightfit.parallel.pipeline.executor import PipelineRank, RankBlocks
from tightfit.parallel.pipeline.pipedream import PipeDream
from tightfit.parallel.pipeline.pruned_model import ForwardState, StubBlock, prune
from tightfit.parallel.pipeline.stages import rank_ledger, refuse_idle_ranks, stage_ranges, stages_using
from tightfit.parallel.tensor.sequence_parallel import sequence_parallel_of
from tightfit.plan import Plan
from tightfit.runtime.run import Run

FIELDS = ("pp", "schedule", "virtual_stages", "split", "vertical_sync")
VARIANTS = (
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"},
    {"pp": 2, "schedule": "naive"},
)


def enabled(plan: Plan) -> bool:
    return plan.pp > 1


# the schedules that search tries, the fastest first; {} is the default schedule. More stages per
# device mean less idle time and more memory.
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "interleaved", "virtual_stages": 4},
    {"schedule": "interleaved", "virtual_stages": 2},
    {},
)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) of one pipeline rank.

    ledger  that of the full model; its field `pipeline_rank` is the number of the rank
    """
    ledger, crosses = place_parameters(ledger, plan)
    return rank_ledger(ledger, crosses, plan, machine)


def apply(run: Run, plan: Plan) -> Run:
    """Return the run of this pipeline rank. In its model, stubs replace the blocks of other ranks,
    whose parameters are removed. Its executor runs this rank's part of each step.
    """
    assert run.mesh is not None
    blocks = find_blocks(run.model, run.job.blocks_name)
    stages = stage_ranges(plan, len(blocks))
    own = [number for number in range(plan.stages) if number % plan.pp == run.mesh.rank("pp")]
    assert run.dataflow is not None
    flow = run.dataflow
    uses = resolve_parameter_uses(parameter_uses(run.model, blocks), flow)
    trained = [uses[name] for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    refuse_idle_ranks(plan, stages, trained)
    state = ForwardState(flow.block_outputs, boundary_inputs(flow, plan, stages), flow.shapes)
    part = _rank_blocks(run.model, blocks, stages, own, state, flow.hooks)
    mine = {name for name, where in uses.items() if stages_using(where, stages) & set(own)}
    prune(run.model, {parameter for name, parameter in run.model.named_parameters() if name not in mine})
    for number, (parent, child) in enumerate(part.slots):
        if number not in part.own_blocks:
            own_children(parent)[child] = part.stubs[number]
    # parameters that are used in more than one stage
    shared = frozenset(name for name in mine if len(stages_using(uses[name], stages)) > 1)
    kind = PipeDream if plan.schedule == "pipedream" else PipelineRank
    executor = kind(run.mesh, plan, part, shared, buffers_updated_elsewhere(flow, stages, own))
    if executor.deferred is not None:
        executor.deferred.attach(run.model)
    tp_shards = {name: shard for name, shard in run.tp_shards.items() if name in mine}
    return replace(run, executor=executor, blocks=tuple(part.own_blocks.values()), tp_shards=tp_shards)


def _rank_blocks(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    stages: list[range],
    own: list[int],
    state: ForwardState,
    hooks: Sequence[Hooks],
) -> RankBlocks:
    """Return the RankBlocks of this rank: the blocks that it keeps, a stub for each block of the
    model, and the parent module and name of each block. A stub stands in for a block while the
    block does not run.

    blocks  (name, block) of all blocks of the model
    stages  for each stage, the range of its blocks' numbers
    own     numbers of this rank's stages
    state   tells the stubs which stage is being run
    hooks   for each block, the hooks that the model itself has registered on it
    """
    slots = []
    for name, _ in blocks:
        parent, _, child = name.rpartition(".")
        slots.append((model.get_submodule(parent), child))
    stubs = []
    for number, (_, block) in enumerate(blocks):
        sharding = sequence_parallel_of(block)
        stubs.append(StubBlock(number, state, block, sharding.stub_input if sharding else None, hooks[number]))
    kept = {number: blocks[number][1] for stage in own for number in stages[stage]}
    return RankBlocks(stages, own, slots, kept, stubs, state)
