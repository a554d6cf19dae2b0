"""Keeps the weights in fp32 beside 16-bit ones: the model computes with the 16-bit weights, and the
optimizer updates the fp32 weights, the masters, with fp32 gradients. This is the mixed precision of
Megatron-LM and DeepSpeed, for training in 16 bits that loses no update.

Saves   over -mixed: the casts of the weights in each micro-batch, and half of the bytes of gathered
        weights in ZeRO stages 1 and 2. Over -true with nearest rounding, it saves nothing, but no
        small update is lost.
Costs   6 bytes per parameter more than -true with fp32 states: 4 for the master and 2 for the
        gradient, which is in fp32. With Adam, a parameter takes 18 bytes: 2 for the weight, and 4
        each for the gradient, the master and the two states. The rounding of the masters, once per
        step. Updates are separate, of one parameter or one batch of parameters after another.
When    many micro-batches per step, or ZeRO 1 or 2 over slow links; otherwise -mixed. If memory is
        short, bf16-true with `rounding: kahan` takes 8 bytes less.
Order   after all methods that create or replace parameters, and before the methods that hook
        gradients, which have to know their type. `optimizer_states` creates the masters, as one
        more state of each parameter: they are sharded, offloaded and saved with the states.
Source  Micikevicius et al. 2018, arXiv:1710.03740 (master weights); Megatron-LM (main_grad: gradients
        of micro-batches add up in fp32); Rajbhandari et al. 2020, arXiv:1910.02054 (their shards).

Example: 1 billion parameters with Adam on 8 devices. Each device holds 18 GB without ZeRO, 7.5 GB in
stage 1 (masters and states are sharded), 4 GB in stage 2 (gradients, too) and 2.25 GB in stage 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightfit.cost.entries import with_fp32_gradients
from tightfit.cost.ledger import Ledger
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.optim.gradient_dtype import widen_gradients
from tightfit.parallel.fsdp.planning import uses_fully_shard
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

FIELDS = ("master_weights",)
TRACED_FIELDS = ("master_weights",)
VARIANTS = (
    {"master_weights": True, "precision": "bf16-true"},
    {"master_weights": True, "precision": "fp16-true", "loss_scale": 128.0},
)


def enabled(plan: Plan) -> bool:
    return plan.master_weights


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values of `master_weights` that search tries: True only where it also tries
    bf16-true weights."""
    narrow = start.precision == "bf16-mixed" and not facts.is_complex and facts.narrow_pays()
    return {"master_weights": [False, True] if narrow or start.precision == "bf16-true" else [start.master_weights]}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the fp32 gradients of 16-bit
    weights: each takes twice the bytes of its parameter. The updates, which were traced with master
    weights, have the masters among their states already.
    """
    return replace(ledger, parameters=with_fp32_gradients(ledger.parameters))


def apply(run: Run, plan: Plan) -> Run:
    """Make backward accumulate the gradients of 16-bit weights in fp32, and return the run.

    fully_shard (ZeRO-3, parameters offloaded from a GPU) computes the gradients of a block in 16
    bits, reduces them in fp32, and accumulates the reduced shards in fp32.
    """
    if not uses_fully_shard(plan, kind_of(run.device)):
        widen_gradients(run.model.parameters())
    return run
