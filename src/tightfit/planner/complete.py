"""The plan that completes what the user pinned, from facts known before anything runs; each choice says why.

These are the choices that need no prediction. They stay within what the job allows and what RULES admit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.job import DataSpec, Job, ModelSpec
from tightfit.machine import Machine
from tightfit.models import task_of
from tightfit.plan import RULES, Plan, check

COMPILE_PAYS_AFTER_STEPS = 200


def complete(job: Job, machine: Machine, pins: dict[str, Any]) -> tuple[Plan, dict[str, str]]:
    """The plan with every field of `pins` kept, and the reason for each field chosen here. Raises InputError."""
    plan, reasons = Plan.parse(pins, "plan"), {}
    for field, value, reason in _choices(job, machine):
        if field in pins:
            continue
        candidate = plan.replace(**{field: value})
        if all(rule.holds(candidate, job, machine.device) for rule in RULES):
            plan, reasons[field] = candidate, reason
    check(plan, job, machine.device)
    return plan, reasons


def _choices(job: Job, machine: Machine) -> Iterator[tuple[str, Any, str]]:
    """(field, value, reason), in the order in which they are tried."""
    task, of_transformers = task_of(job.model), isinstance(job.model, ModelSpec) and job.model.python is None
    sequence = job.data.sequence_length if isinstance(job.data, DataSpec) else 0
    yield "allocator", "tuned", "freed memory is kept and reused"
    yield "materialize", "device", "the model is created where and as it is used"
    if "bf16" in job.allowed and has_fast_bf16(machine):
        yield "precision", "bf16-mixed", "this machine multiplies bf16 faster, and the job allows it"
    if task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        yield "chunked_loss", 1024, "all logits at once are the largest activation of a small language model"
    if machine.device == "cpu" and of_transformers and task == "causal-lm" and sequence <= 1024:
        yield "attention", "blocked", "plain products are faster here than the fused attention kernel"
    yield "fused_optimizer", True, "one pass over the states in place of several"
    if (job.train.steps or COMPILE_PAYS_AFTER_STEPS) >= COMPILE_PAYS_AFTER_STEPS and can_compile(machine):
        yield (
            "compile",
            "block" if of_transformers else "model",
            f"pays for itself within about {COMPILE_PAYS_AFTER_STEPS} steps",
        )
    if machine.device == "cuda":
        yield "pin_memory", True, "page-locked buffers copy about twice as fast"
        yield "non_blocking", True, "copies overlap the device's work"


def has_fast_bf16(machine: Machine) -> bool:
    """Whether bf16 products are faster than fp32 here: as measured, else by the processor's instructions or the GPU's age."""
    measured = machine.matrix_flops_per_s
    if "bf16" in measured and "fp32" in measured:
        return measured["bf16"].value > 1.2 * measured["fp32"].value
    if machine.device == "cuda":
        import torch

        return torch.cuda.get_device_capability() >= (8, 0)
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def can_compile(machine: Machine) -> bool:
    """torch.compile needs a C++ compiler for processors; for CUDA devices it brings Triton."""
    return machine.device == "cuda" or any(shutil.which(name) for name in ("g++", "clang++", "c++"))
