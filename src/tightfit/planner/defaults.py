"""Complete a plan: choose defaults for the fields that the user did not fix ("pin"), each with a
reason.

Choosing the defaults needs no prediction of memory or time. The defaults use nothing that the job
forbids, and they keep the RULES. `search` starts from the completed plan; `tightfit train` without
a search uses it directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

from tightfit.job import Job
from tightfit.machine import Machine, machine_of
from tightfit.models import task_of
from tightfit.plan import Plan
from tightfit.rules import RULES, check

FEW_BLOCKS = 3  # number of blocks of the model with which `model_supports` tries a plan


# the default of the plan field `allocator`. It is here because a process must know it when it
# starts, before torch is imported
ALLOCATOR: Literal["tuned"] = "tuned"


def complete(job: Job, machine: Machine | str, pins: dict[str, Any]) -> tuple[Plan, dict[str, str]]:
    """Return (plan, reasons): the plan with the user's values and with defaults for the other
    fields, and the reason for each default, as a dict from field name to text.

    machine  the devices, or their name, such as "h100-sxm:8"
    pins     plan fields that the user fixed, with their values. The job's own `plan` is not read

    Raises InputError if a value is invalid or the completed plan breaks a rule of RULES.
    """
    machine = machine_of(machine)
    from tightfit.methods import METHODS, loss
    from tightfit.runtime.method import defaults

    reasons: dict[str, str] = {}
    if pins.get("chunked_loss") is True:
        pins = {**pins, "chunked_loss": loss.chunk_of(job, machine)}
    if pins.get("master_weights") and "precision" not in pins and "bf16" in job.allowed:
        pins = {**pins, "precision": "bf16-true"}
        reasons["precision"] = "master_weights are fp32 weights beside 16-bit ones"
    plan = Plan.parse({**pins, **data_parallel_degrees(machine, pins)}, "plan")
    for field in ("dp_replicate", "dp_shard", "zero"):
        if field not in pins and getattr(plan, field) != getattr(Plan(), field):
            reasons[field] = f"there are {machine.devices_per_node * machine.nodes} devices"
    for field, value, reason in defaults(METHODS, job, machine):
        if field in pins:
            continue
        candidate = plan.replace(**{field: value})
        admitted = all(  # a later default may mend a rule that is broken already: bf16 for pinned float8
            rule.holds(candidate, job, machine.device) or not rule.holds(plan, job, machine.device) for rule in RULES
        )
        if admitted and _model_supports_field(job, field, candidate):
            plan, reasons[field] = candidate, reason
    check(plan, job, machine.device)
    return plan, reasons


def data_parallel_degrees(machine: Machine, pins: dict[str, Any]) -> dict[str, Any]:
    """Return the data-parallel fields (dp_replicate, dp_shard, zero) with which a plan uses all
    devices of a machine. Return {} for a single device.

    Values that the user fixed in `pins` (field -> value) are kept. The plan has replicas, unless
    `zero` or `dp_shard` is pinned.

    Example: 8 devices with pins {"tp": 2, "zero": 2} give zero=2, dp_shard=4, dp_replicate=1.
    """
    count = machine.devices_per_node * machine.nodes
    if count == 1:
        return {}
    fixed = Plan.parse(pins, "plan")
    count = max((count - fixed.servers) // (fixed.tp * fixed.pp * fixed.cp), 1)
    names = ("dp_replicate", "dp_shard", "zero")
    fields: dict[str, Any] = {name: getattr(fixed, name) for name in names if name in pins}
    if fields.get("dp_shard", 1) > 1:
        fields.setdefault("zero", 3)
    if fields.get("zero"):
        fields.setdefault("dp_shard", max(count // fields.get("dp_replicate", 1), 1))
    fields.setdefault("dp_replicate", max(count // fields.get("dp_shard", 1), 1))
    return fields


def _model_supports_field(job: Job, field: str, plan: Plan) -> bool:
    """Return whether the job's model supports the value that `plan` has for `field`, the name of a
    plan field. Only attention and chunked_loss are checked, because every model supports the
    defaults of the other fields."""
    return field not in ("chunked_loss", "attention") or model_supports(job, plan)


def model_supports(job: Job, plan: Plan) -> bool:
    """Return whether the job's transformers model supports the plan's attention and loss. To find
    out, run a forward of two tokens on fake tensors.

    If the forward fails with the reference plan `Plan()` too, the failure has another cause, and
    True is returned. Raises InputError if the model cannot be created.
    """
    return _runs_with(job, plan) or not _runs_with(job, Plan())


def _runs_with(job: Job, plan: Plan) -> bool:
    """Return whether a forward of two tokens on fake tensors succeeds with the plan's attention and
    loss. Return False, too, if the model ignores the plan's attention."""
    import torch

    from tightfit._torch.fake import FakeTensorMode
    from tightfit._torch.loggers import FAKE_TENSORS
    from tightfit.methods import attention, loss
    from tightfit.models import find_blocks, model_factory, with_fewer_blocks
    from tightfit.models.caches import isolated_model_caches
    from tightfit.models.expert_routing import RoutedExperts
    from tightfit.models.objective import objective_of
    from tightfit.planner.tracing.repeated_blocks import skip_repeated_blocks
    from tightfit.runtime.run import Run

    with (
        _quiet(FAKE_TENSORS, "transformers"),
        isolated_model_caches(),
        FakeTensorMode(allow_non_fake_inputs=True),
        RoutedExperts(),
    ):
        model = model_factory(with_fewer_blocks(job.model, FEW_BLOCKS) or job.model)()
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        objective, unset = objective_of(None, task_of(job.model)), cast(Any, None)
        run = Run(job, plan, tokens.device, objective, model, partial(objective.total, model), unset, unset, unset)
        try:
            for method in (attention, loss):  # in the order of METHODS
                if method.enabled(plan):
                    run = method.apply(run, plan)
            blocks = find_blocks(model, job.blocks_name)
            with skip_repeated_blocks([block for _, block in blocks]):
                run.loss_sum({"input_ids": tokens, "labels": tokens})
        except (ValueError, RuntimeError, TypeError, AttributeError, LookupError):
            return False
    config: Any = model.config
    return (
        plan.attention == "sdpa" or config._attn_implementation == attention.NAME
    )  # some models ignore the chosen attention and only log a warning


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Return a context manager that silences the loggers with these names, for a forward that is
    expected to fail with some models."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
