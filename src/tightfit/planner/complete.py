"""The plan that completes what the user pinned, from facts known before anything runs; each choice says why.

These are the choices that need no prediction. They stay within what the job allows and what RULES admit.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from tightfit.job import DataSpec, Job, ModelSpec
from tightfit.machine import FLOAT8, Machine
from tightfit.machines.gpus import GENERATIONS, multiplies_float8
from tightfit.models import has_complex, task_of
from tightfit.plan import Plan
from tightfit.rules import RULES, check

COMPILE_PAYS_AFTER_STEPS = 200
FEW_BLOCKS = 3
LARGE = 4096  # rows, columns and depth of a large product


ALLOCATOR: Literal["tuned"] = "tuned"  # known before torch is imported, as a process has to start with it


def complete(job: Job, machine: Machine, pins: dict[str, Any]) -> tuple[Plan, dict[str, str]]:
    """The plan with every field of `pins` kept, and the reason for each field chosen here. Raises InputError."""
    reasons: dict[str, str] = {}
    if pins.get("chunked_loss") is True:
        pins = {**pins, "chunked_loss": chosen_chunk(job, machine)}
    plan = Plan.parse({**pins, **over_devices(machine, pins)}, "plan")
    for field in ("dp_replicate", "dp_shard", "zero"):
        if field not in pins and getattr(plan, field) != getattr(Plan(), field):
            reasons[field] = f"there are {machine.devices_per_node * machine.nodes} devices"
    for field, value, reason in _choices(job, machine):
        if field in pins:
            continue
        candidate = plan.replace(**{field: value})
        admitted = all(  # a rule that is broken by now may be for a later choice to keep: bf16, with float8
            rule.holds(candidate, job, machine.device) or not rule.holds(plan, job, machine.device) for rule in RULES
        )
        if admitted and _model_admits(job, field, candidate):
            plan, reasons[field] = candidate, reason
    check(plan, job, machine.device)
    return plan, reasons


def over_devices(machine: Machine, pins: dict[str, Any]) -> dict[str, Any]:
    """The fields that spread a plan over all of a machine's devices, beside those that are pinned: replicas, unless `zero` or
    `dp_shard` is asked for."""
    count = machine.devices_per_node * machine.nodes
    if count == 1:
        return {}
    count = count if pins.get("parameter_server", "none") == "none" else count - 1
    count = max(count // (pins.get("tp", 1) * pins.get("pp", 1) * pins.get("cp", 1)), 1)
    fields: dict[str, Any] = {name: pins[name] for name in ("dp_replicate", "dp_shard", "zero") if name in pins}
    if fields.get("dp_shard", 1) > 1:
        fields.setdefault("zero", 3)
    if fields.get("zero"):
        fields.setdefault("dp_shard", max(count // fields.get("dp_replicate", 1), 1))
    fields.setdefault("dp_replicate", max(count // fields.get("dp_shard", 1), 1))
    return fields


def _choices(job: Job, machine: Machine) -> Iterator[tuple[str, Any, str]]:
    """(field, value, reason), in the order in which they are tried."""
    task, of_transformers = task_of(job.model), _is_of_transformers(job)
    sequence = job.data.sequence_length if isinstance(job.data, DataSpec) else 0
    yield "allocator", ALLOCATOR, "freed memory is kept and reused"
    yield "materialize", "device", "the model is created where and as it is used"
    if "bf16" in job.allowed and has_fast_bf16(machine):
        yield "precision", "bf16-mixed", "this machine multiplies bf16 faster, and the job allows it"
    elif "fp16" in job.allowed and has_fast_fp16(machine):
        yield "precision", "fp16-mixed", "this machine multiplies fp16 faster, and the job allows it"
    elif "tf32" in job.allowed and has_fast_tf32(machine):
        yield "precision", "tf32", "this machine multiplies tf32 faster, and the job allows it"
    if of_transformers and task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        yield "chunked_loss", chosen_chunk(job, machine), "logits are never all there at once"
    if machine.device == "cpu" and of_transformers and task == "causal-lm" and sequence <= 1024:
        yield "attention", "blocked", "plain products are faster here than the fused attention kernel"
    yield "fused_optimizer", True, "one pass over the states in place of several"
    if pays_to_compile(job):
        lacking = lacking_to_compile(machine)
        regions = "none" if lacking else "block" if of_transformers else "model"
        why = "fused kernels: fewer of them, and less memory traffic"
        yield "compile", regions, f"torch.compile needs {lacking}" if lacking else why
    if machine.device == "cuda":
        yield "pin_memory", True, "page-locked buffers copy about twice as fast"
        yield "non_blocking", True, "copies overlap the device's work"


def chosen_chunk(job: Job, machine: Machine) -> int:
    """Tokens of a chunk of the loss, where nobody says it: see `default_chunk`."""
    from tightfit.data import model_input
    from tightfit.methods.loss import default_chunk

    return default_chunk(model_input(job).vocabulary, machine.device, machine.memory_bytes.value)


def _model_admits(job: Job, field: str, plan: Plan) -> bool:
    """Whether the model takes what works with some, and with others is refused."""
    if field == "fused_optimizer":
        return not has_complex(job.model)
    return field not in ("chunked_loss", "attention") or model_takes(job, plan)


def _is_of_transformers(job: Job) -> bool:
    return isinstance(job.model, ModelSpec) and job.model.python is None


def model_takes(job: Job, plan: Plan) -> bool:
    """Whether a transformers model takes the plan's attention and loss: tried on two tokens, and tensors without values.

    A model that cannot be tried like that, whatever the plan, is trusted to. Raises InputError for one that cannot be
    created.
    """
    return _is_taken(job, plan) or not _is_taken(job, Plan())


def _is_taken(job: Job, plan: Plan) -> bool:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tightfit.methods import attention, loss
    from tightfit.methods.run import Run
    from tightfit.models import find_blocks, model_factory, shallow
    from tightfit.models.answers import GroupedProducts
    from tightfit.models.caches import tensors_kept_out
    from tightfit.models.objective import objective_of
    from tightfit.planner.passing import shortened

    with (
        _quiet("torch._subclasses.fake_tensor", "transformers"),
        tensors_kept_out(),
        FakeTensorMode(),
        GroupedProducts(),
    ):
        model = model_factory(shallow(job.model, FEW_BLOCKS) or job.model)()
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        objective, unset = objective_of(None, task_of(job.model)), cast(Any, None)
        run = Run(job, plan, tokens.device, objective, model, partial(objective.total, model), unset, unset, unset)
        try:
            for room in (attention, loss):  # in the order of METHODS
                if room.wanted(plan):
                    run = room.apply(run, plan)
            blocks = find_blocks(model, job.model.blocks if isinstance(job.model, ModelSpec) else None)
            with shortened([block for _, block in blocks]):
                run.loss_sum({"input_ids": tokens, "labels": tokens})
        except (ValueError, RuntimeError, TypeError, AttributeError, LookupError):
            return False
    config: Any = model.config
    return plan.attention == "sdpa" or config._attn_implementation == attention.NAME  # some models only warn


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Without what these loggers say of a trial that fails."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def has_fast_fp16(machine: Machine) -> bool:
    """Whether fp16 products are faster than fp32: on every CUDA device since Volta, and on no processor."""
    if machine.device != "cuda":
        return False
    known = machine.matrix_flops_per_s
    return "fp16" not in known or "fp32" not in known or known["fp16"].value > 1.2 * known["fp32"].value


def has_fast_tf32(machine: Machine) -> bool:
    """Whether fp32 products are faster with factors in tf32, as the table has it, or a calibration."""
    known = machine.matrix_flops_per_s
    return "tf32" in known and "fp32" in known and known["tf32"].value > 1.2 * known["fp32"].value


def has_fast_bf16(machine: Machine) -> bool:
    """Whether bf16 products are faster than fp32 here: as measured, else by the processor's instructions or the GPU's age."""
    measured = machine.matrix_flops_per_s
    glanced = any(figure.source == "glance" for figure in measured.values())
    if "fp32" in measured and not glanced:  # the table, or a calibration, has every type that the device multiplies
        return "bf16" in measured and measured["bf16"].value > 1.2 * measured["fp32"].value
    if machine.device == "cuda":
        generation = GENERATIONS.get(machine.architecture)
        return generation is not None and "bf16" in generation.flops
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def has_fast_float8(machine: Machine, recipe: str) -> bool:
    """Whether products of factors in 8 bits, scaled as the recipe says (tensorwise, rowwise), are faster than bf16 ones."""
    if machine.device != "cuda" or not multiplies_float8(machine.architecture, recipe == "rowwise"):
        return False
    return machine.achieved("product", FLOAT8, LARGE) > machine.achieved("product", "bfloat16", LARGE)


def pays_to_compile(job: Job) -> bool:
    """Whether a run is so long that compiling may ever pay."""
    return (job.train.steps or COMPILE_PAYS_AFTER_STEPS) >= COMPILE_PAYS_AFTER_STEPS


def can_compile(machine: Machine) -> bool:
    return not lacking_to_compile(machine)


def lacking_to_compile(machine: Machine) -> str:
    """What torch.compile needs and does not find here, in words; empty for a machine of the table, which is taken to have it.

    For processors it writes C++. For CUDA devices it brings Triton, which compiles a stub in C for each kernel.
    """
    if machine.device == "cuda" and not machine.is_here:
        return ""
    compilers, named = _COMPILERS[machine.device]
    chosen = os.environ.get(named, "")  # as torch and Triton read it
    lacks = []
    if not any(shutil.which(name) for name in (*chosen.split()[:1], *compilers)):
        lacks.append(f"a compiler ({', '.join(compilers)})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks.append("Python's headers (python3-dev, or python3-devel)")
    return " and ".join(lacks)


_COMPILERS = {"cpu": (("g++", "clang++", "c++"), "CXX"), "cuda": (("gcc", "clang", "cc"), "CC")}
