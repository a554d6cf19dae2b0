"""Pipeline: devices in a row, each with some of the model's blocks; micro-batches go through them, and gradients back.

Saves   a device's parameters, their states and its activations, by the number of devices. Only the hidden states between
        two blocks travel, so the link may be slow.
Costs   waiting: with p devices and m micro-batches a share of (p-1)/(m+p-1) of the step (the bubble); interleaved divides it
        by the pieces on each device, zero-bubble fills most of it with weights' gradients; naive waits (p-1)/p. GPipe holds
        all m micro-batches' activations, 1F1B those of at most p.
When    the model does not fit a device, and links between devices (nodes) are too slow for zero or tp. Many micro-batches.
Order   after all that changes blocks, which it then divides; before what watches gradients.
Source  GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B with flush: Narayanan et al. 2020, arXiv:2006.09503; interleaved:
        Narayanan et al. 2021, arXiv:2104.04473; zero bubble: Qi et al. 2023, arXiv:2401.10241.

Every device runs the model's own forward. In the place of blocks that it does not have are stubs: those before its own return
something of the right shape, the first one after them ends the forward. When the first own block is called, what the device before
sends takes the place of what it is called with: `boundaries` says which of its arguments these are. What is used before the blocks
(embeddings) belongs to the first device, what is used after them to the last one; a weight that both use is on both, and its
gradients are summed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.boundaries import crossing, moved, overwritten_elsewhere, placed
from tightfit.methods.hollow import Elsewhere, Passage, hollow
from tightfit.methods.pipedream import PipeDream
from tightfit.methods.row import Pipeline
from tightfit.methods.run import Run
from tightfit.methods.sequences import dividing
from tightfit.methods.stages import pieces_of, pieces_with, refuse_idle_devices, staged
from tightfit.models import find_blocks, places_of
from tightfit.plan import Plan

FIELDS = ("pp", "schedule", "virtual_stages", "split", "vertical_sync")
VARIANTS = (
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"},
    {"pp": 2, "schedule": "naive"},
)


def wanted(plan: Plan) -> bool:
    return plan.pp > 1


SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "interleaved", "virtual_stages": 4},
    {"schedule": "interleaved", "virtual_stages": 2},
    {},
)  # that search tries, the fastest first: more stages on a device wait less and hold more


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """What one device of the row holds and does: the ledger's `stage` says which one."""
    ledger, crosses = moved(ledger, plan)
    return staged(ledger, crosses, plan, machine)


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = find_blocks(run.model, name)
    pieces = pieces_of(plan, len(blocks))
    own = [number for number in range(plan.stages) if number % plan.pp == run.mesh.rank("pp")]
    assert run.dataflow is not None
    flow = run.dataflow
    places = placed(places_of(run.model, blocks), flow)
    trained = [places[name] for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    refuse_idle_devices(plan, pieces, trained)
    ends = {
        name for name, where in places.items() if len(pieces_with(where, pieces)) > 1
    }  # on the first device and on the last
    passage = Passage(flow.returns, crossing(flow, plan, pieces), flow.shapes)
    divided = [dividing(block) for _, block in blocks]
    stubs = [
        Elsewhere(number, passage, block, one.elsewhere if one else None, hooks)
        for number, ((_, block), one, hooks) in enumerate(zip(blocks, divided, flow.hooks, strict=True))
    ]
    kept = {number: block for piece in own for number, (_, block) in enumerate(blocks) if number in pieces[piece]}
    names = [name for name, _ in blocks]
    parents = [run.model.get_submodule(name.rpartition(".")[0]) for name in names]
    slots = [(parent, name.rpartition(".")[2]) for parent, name in zip(parents, names, strict=True)]
    parameters = dict(run.model.named_parameters())
    mine = {name for name, where in places.items() if pieces_with(where, pieces) & set(own)}
    foreign = {parameter for name, parameter in parameters.items() if name not in mine}
    hollow(run.model, foreign)
    for number, (parent, child) in enumerate(slots):
        if number not in kept:
            parent._modules[child] = stubs[number]
    kind = PipeDream if plan.schedule == "pipedream" else Pipeline
    shared, stale = frozenset(ends & mine), overwritten_elsewhere(flow, pieces, own)
    stages = kind(run.mesh, plan, pieces, own, passage, slots, kept, stubs, shared, stale)
    slices = {name: cut for name, cut in run.slices.items() if name in mine}
    if stages.deferred is not None:
        stages.deferred.attach(run.model)
    return replace(run, stages=stages, blocks=tuple(kept.values()), slices=slices)
