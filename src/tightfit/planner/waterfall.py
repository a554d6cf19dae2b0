"""The way from one device, fp32, everything kept, to a plan: method by method, in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.plan import Plan
from tightfit.planner.estimate import Estimator

# which fields of a plan are whose, in the order in which people decide them
METHOD_FIELDS = {
    "data_parallel": ("dp_replicate", "compressed_gradients", "powersgd_rank"),
    "parameter_server": ("parameter_server", "staleness"),
    "context_parallel": ("cp",),
    "zero": ("dp_shard", "zero"),
    "tensor_parallel": ("tp", "sequence_parallel"),
    "precision": ("precision", "loss_scale", "rounding"),
    "float8": ("float8",),
    "microbatch": ("micro_batch",),
    "attention": ("attention",),
    "loss": ("chunked_loss",),
    "recompute": ("recompute",),
    "pipeline": ("pp", "schedule", "virtual_stages", "split", "vertical_sync"),
    "offload": ("offload", "offload_to", "offload_folder"),
    "optimizer states": ("states", "fused_optimizer", "update_in_backward"),
    "compile": ("compile", "compile_mode"),
    "materialize": ("materialize",),
    "allocator": ("allocator",),
    "loader": ("loader_workers", "prefetch", "pin_memory", "non_blocking"),
}


@dataclass(frozen=True)
class Stage:
    """One method more: what it sets, and the peak bytes and seconds of a step with it and all above."""

    method: str
    said: str
    peak_bytes: float
    step_s: float


def waterfall(estimator: Estimator, plan: Plan) -> list[Stage]:
    """From the reference plan to `plan`; methods that it does not use are left out."""
    whole, differences = Plan(), plan.differences()
    first = estimator.settle(estimator.estimate(whole))
    stages = [Stage("one device, fp32, keep everything", "", first.peak_bytes, first.time.step_s)]
    for method, fields in METHOD_FIELDS.items():
        changed = {name: differences[name] for name in fields if name in differences}
        if changed:
            whole = whole.replace(**changed)
            one = estimator.settle(estimator.estimate(whole))
            said = ", ".join(f"{name}={value}" for name, value in changed.items())
            stages.append(Stage(f"+ {method}", said, one.peak_bytes, one.time.step_s))
    return stages
