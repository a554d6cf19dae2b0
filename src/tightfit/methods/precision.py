"""Sets the number format of the arithmetic: fp32, tf32, bf16 or fp16, with fp32 weights (-mixed) or
16-bit weights (-true). Formats of 16 bits save time and memory. Autocast, loss scaling and the
rounding of updates prevent that small numbers are lost.

Saves   -mixed: half of the activations, but no model states. With Adam, a parameter takes 16 bytes:
        4 for the weight, 4 for the gradient and 8 for the states, all in fp32. Autocast's 16-bit
        copy of a weight takes 2 more while it is used. -true: half of activations and model states.
Costs   -mixed: casts of the weights. -true: small updates are lost in rounding, unless `rounding`
        prevents it.
When    always if the hardware multiplies 16-bit numbers faster. fp16 needs loss scaling, because
        small gradients become zero and numbers beyond 65,504 overflow; bf16 does not. tf32 stores
        fp32 numbers and rounds the factors of products to 10 mantissa bits.
Order   after `compile`: autocast wraps the compiled function, so that the compiler sees one type
        per operation.
Source  Micikevicius et al. 2018, arXiv:1710.03740 (mixed precision, loss scaling); Kalamkar et al.
        2019, arXiv:1905.12322 (bf16). torch's documentation of autocast lists the operations that
        run in fp32: on CUDA sums, softmax and norms, on a CPU fewer. The cross entropy of a
        language model or a classifier always runs in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tightfit._torch.fake import FakeTensor
from tightfit._torch.operations import foreach_mul_, foreach_norm
from tightfit.capabilities import has_fast_bf16, has_fast_fp16, has_fast_tf32
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Operation, Segment, Timeline
from tightfit.errors import TightfitWarning
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models.batches import Batch
from tightfit.models.call_model import forward_parameters, map_inputs
from tightfit.plan import Plan
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

MOST_LOOKED_AT = 10**7  # elements of a buffer that is searched for numbers that 16 bits round


# the operations that use tf32; the kernels of fused attention do not
_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
)
FIELDS = ("precision", "loss_scale", "rounding")
TRACED_FIELDS = ("precision",)
VARIANTS = (
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "bf16-true", "rounding": "stochastic"},
    {"precision": "fp16-mixed"},
    {"precision": "fp16-mixed", "loss_scale": 128.0},
    {"precision": "fp16-true", "loss_scale": 128.0},
)


def enabled(plan: Plan) -> bool:
    # always enabled: tf32 is a global setting of torch, which has to be reset for the next run
    return True


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Yield the default precision: the first of bf16-mixed, fp16-mixed and tf32 that the job allows
    and that the machine multiplies faster than fp32. Yield nothing if there is none.
    """
    if "bf16" in job.allowed and has_fast_bf16(machine):
        yield Default("precision", "bf16-mixed", "this machine multiplies bf16 faster, and the job allows it")
    elif "fp16" in job.allowed and has_fast_fp16(machine):
        yield Default("precision", "fp16-mixed", "this machine multiplies fp16 faster, and the job allows it")
    elif "tf32" in job.allowed and has_fast_tf32(machine):
        yield Default("precision", "tf32", "this machine multiplies tf32 faster, and the job allows it")


def advice(plan: Plan, job: Job, machine: Machine) -> list[str]:
    """Return a hint if the job allows bf16, which the machine does not multiply fast, and not fp16,
    which it does: older GPUs have only fp16. Else return an empty list."""
    if plan.precision not in ("fp32", "tf32") or "bf16" not in job.allowed or "fp16" in job.allowed:
        return []
    if has_fast_bf16(machine) or not has_fast_fp16(machine):
        return []
    rates = {kind: figure.value for kind, figure in machine.matrix_flops_per_s.items()}
    faster = ""
    if {"fp16", plan.precision} <= rates.keys():
        faster = f", whose matrix products are {rates['fp16'] / rates[plan.precision]:.1f} times as fast"
    return [f"precision is {plan.precision}: this device has no fast bf16; add fp16 to `allow` to use its fp16{faster}"]


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values of `precision` that search tries: that of the plan `start` and, in some
    cases, bf16-true.

    bf16-true is tried if three conditions hold: `start` has bf16-mixed; the model has no complex
    parameters; and 16-bit weights may be better, because the plan does not fit without them or
    because they are faster.
    """
    narrow = start.precision == "bf16-mixed" and not facts.is_complex and facts.narrow_pays()
    return {"precision": [start.precision, "bf16-true"] if narrow else [start.precision]}


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return all values of `precision` and `rounding` that may need the least memory. Search then
    drops the values that the job or the rules of plans do not permit."""
    precisions = [] if facts.is_complex else ["fp32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
    roundings = [start.rounding, rounding_of(job), "kahan", "stochastic"]
    return {
        "precision": list(dict.fromkeys([start.precision, *precisions])),
        "rounding": list(dict.fromkeys(roundings)),
    }


def rounding_of(job: Job) -> Literal["nearest", "kahan"]:
    """Return the rounding that search uses for updates of bf16 weights: "nearest" if the job allows
    nearest-rounding, else "kahan".

    kahan stores the part of each update that rounding cuts off and adds it to the next update, so
    that the job trains as with fp32 weights. nearest takes less memory and time, but loses small
    updates.
    """
    return "nearest" if "nearest-rounding" in job.allowed else "kahan"


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the types of the recorded
    operations changed, if the plan uses fp16 or tf32.

    With all other precisions, the operations already have the plan's types, because the model was
    traced with them. But fp16 is traced as bf16, which has the same size, and tf32 as fp32. tf32
    changes only the rate of matrix products.
    """
    if plan.precision == "tf32":
        convert = _in_tf32
    elif plan.precision.startswith("fp16"):
        convert = _in_fp16
    else:
        return ledger
    inference = ledger.inference
    return replace(ledger, training=convert(ledger.training), inference=lambda: convert(inference()))


@lru_cache(16)  # cached: a replay compares timelines by identity, so they must be the same objects
def _in_tf32(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return _retyped(segments, lambda one: one.name in _PRODUCTS and one.dtype == "float32", "tf32")


@lru_cache(16)
def _in_fp16(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return _retyped(segments, lambda one: one.dtype == "bfloat16", "float16")


def _retyped(segments: tuple[Segment, ...], which: Callable[[Operation], bool], dtype: str) -> tuple[Segment, ...]:
    """Return the segments of the recorded step with `dtype` as the type of each operation for which
    `which` returns True.
    """
    known: dict[Timeline, Timeline] = {}
    for timeline in dict.fromkeys(segment.timeline for segment in segments):
        done = (replace(operation, dtype=dtype) if which(operation) else operation for operation in timeline.operations)
        known[timeline] = replace(timeline, operations=tuple(done))
    return tuple(replace(segment, timeline=known[segment.timeline]) for segment in segments)


def apply(run: Run, plan: Plan) -> Run:
    if run.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
    if plan.precision in ("bf16-mixed", "fp16-mixed"):
        dtype = torch.bfloat16 if plan.precision == "bf16-mixed" else torch.float16
        run = replace(run, loss_sum=autocast(run.loss_sum, run.device.type, dtype))
    elif plan.has_16_bit_weights:
        dtype = torch.bfloat16 if plan.precision == "bf16-true" else torch.float16
        warn_of_rounded_buffers(run.model, dtype)
        run = replace(run, loss_sum=cast_inputs(run.loss_sum, dtype, run.model, run.objective.calls_model_itself))
    if plan.precision.startswith("fp16"):
        dynamic = plan.loss_scale == "dynamic"
        value = 2.0**16 if plan.loss_scale == "dynamic" else plan.loss_scale
        scaler = LossScaler(value, dynamic)
        if kind_of(run.device) == "cuda":
            scaler = LossScalerOnDevice(value, dynamic, run.device)
        run = replace(run, loss_scale=scaler)
    return run


def autocast(loss_sum: Callable[[Batch], Tensor], device: str, dtype: torch.dtype) -> Callable[[Batch], Tensor]:
    """Return a loss function that calls `loss_sum` (batch -> sum of the losses) under
    torch.autocast: matrix products run in `dtype`, and sensitive operations in fp32. The weights
    keep their type.

    device  the type of the device: "cpu" or "cuda"
    """

    def mixed(batch: Batch) -> Tensor:
        with torch.autocast(device, dtype):
            return loss_sum(batch)

    return mixed


def cast_inputs(
    loss_sum: Callable[[Batch], Tensor], dtype: torch.dtype, model: nn.Module, calls_model_itself: bool
) -> Callable[[Batch], Tensor]:
    """Return a loss function that casts the floating-point tensors of a batch to `dtype` and then
    calls `loss_sum` (batch -> sum of the losses). It is for a model whose weights are in `dtype`.
    Targets, which only the loss reads, are not cast.

    calls_model_itself  see `Objective`
    """
    forward_parameters(model)  # before it is compiled

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def true(batch: Batch) -> Tensor:
        return loss_sum(map_inputs(narrow, batch, model, calls_model_itself))

    return true


def warn_of_rounded_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Issue a TightfitWarning if a buffer that is stored in `dtype` has large whole numbers, as
    positions are. Example: from 256 on, bf16 has only every second whole number."""
    largest = 2 ** (8 if dtype == torch.bfloat16 else 11)
    for name, buffer in model.named_buffers():
        if (
            buffer.dtype != dtype
            or isinstance(buffer, FakeTensor)
            or buffer.is_meta
            or not 1 < buffer.numel() < MOST_LOOKED_AT
        ):
            continue
        if bool((buffer == buffer.round()).all()) and float(buffer.abs().max()) >= largest:
            warnings.warn(
                f"this plan stores the buffer {name} in {str(dtype).removeprefix('torch.')}, which rounds whole numbers above "
                f"{largest}. Register it as integers, compute it in forward in fp32, or use a -mixed precision",
                TightfitWarning,
                stacklevel=2,
            )


class LossScaler:
    """Scales the loss of fp16 training, so that small gradients do not become zero.

    value     the scale, or its first value if it is dynamic
    dynamic   whether the scale adapts to overflows
    patience  number of finite steps in a row after which a dynamic scale is doubled
    skipped   number of updates that were skipped so far

    The loss is multiplied by `value` before backward, and the gradients are divided by `value`
    before the update. fp16 gradients, which fp16-true has, are divided in the fp32 of the update: in
    fp16, small gradients would become zero after all. If a gradient is not finite, the update is
    skipped. A dynamic `value` is then halved.

    torch's GradScaler does the same, but it refuses fp16 gradients.
    """

    def __init__(self, value: float, dynamic: bool, patience: int = 2000) -> None:
        self.dynamic, self.patience = dynamic, patience
        self.value, self.skipped, self.finite_steps = float(value), 0, 0

    @property
    def factor(self) -> float | Tensor:
        return self.value

    def unscale(self, parameters: Iterable[Tensor]) -> tuple[bool | Tensor, float | Tensor | None]:
        wide, narrow = _gradients(parameters)
        if wide:
            foreach_mul_(wide, 1.0 / self.value)
        finite = bool(_are_finite(wide + narrow)) if wide or narrow else True
        return finite, 1.0 / self.value if narrow else None

    def update(self, finite: bool | Tensor) -> None:
        self.skipped += not finite
        if not self.dynamic:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.finite_steps == self.patience:
            self.value, self.finite_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "skipped": self.skipped, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.skipped, self.finite_steps = state["value"], state["skipped"], state["finite_steps"]


class LossScalerOnDevice(LossScaler):
    """A LossScaler that keeps its scale and its counts on the device, so that the host need not
    wait for the device to learn whether gradients are finite.

    Reading `value`, `skipped` or `finite_steps` makes the host wait for the device.
    """

    def __init__(self, value: float, dynamic: bool, device: torch.device, patience: int = 2000) -> None:
        # value, skipped, finite steps
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self._fixed = None if dynamic else float(value)
        super().__init__(value, dynamic, patience)

    @property
    def value(self) -> float:
        return float(self._numbers[0])

    @value.setter
    def value(self, value: float) -> None:
        self._set(0, value)
        self._fixed = None if self.dynamic else float(value)

    @property
    def skipped(self) -> int:
        return int(self._numbers[1])

    @skipped.setter
    def skipped(self, skipped: int) -> None:
        self._set(1, skipped)

    @property
    def finite_steps(self) -> int:
        return int(self._numbers[2])

    @finite_steps.setter
    def finite_steps(self, steps: int) -> None:
        self._set(2, steps)

    def _set(self, index: int, number: float) -> None:
        # a new tensor, because a step may still use the old one
        self._numbers = self._numbers.clone()
        self._numbers[index].fill_(number)

    @property
    def factor(self) -> float | Tensor:
        return self._numbers[0] if self._fixed is None else self._fixed

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> tuple[bool | Tensor, float | Tensor | None]:
        wide, narrow = _gradients(parameters)
        if not wide and not narrow:
            return torch.ones((), dtype=torch.bool, device=self._numbers.device), None
        factor: float | Tensor
        if self._fixed is None:
            factor = self._numbers[0].reciprocal().to((wide + narrow)[0].device, torch.float32)
        else:
            factor = 1.0 / self._fixed
        if wide:
            foreach_mul_(wide, factor)
        return _are_finite(wide + narrow), factor if narrow else None

    @torch.no_grad()
    def update(self, finite: bool | Tensor) -> None:
        value, skipped, steps = self._numbers.unbind()
        fine = torch.as_tensor(finite, device=value.device)
        skipped = skipped + ~fine
        if self.dynamic:
            steps = torch.where(fine, steps + 1, 0.0)
            doubled = steps == self.patience
            value = torch.where(fine, torch.where(doubled, value * 2, value), (value / 2).clamp(min=1.0))
            steps = torch.where(doubled, 0.0, steps)
        self._numbers = torch.stack([value, skipped, steps])


def _gradients(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of at least 32 bits, and those of 16 bits."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    wide, narrow = list[Tensor](), list[Tensor]()
    for gradient in gradients:
        if gradient.numel():  # a shard may be empty
            (wide if gradient.dtype.itemsize >= 4 else narrow).append(gradient)
    return wide, narrow


def _are_finite(gradients: list[Tensor]) -> Tensor:
    return torch.stack([norm.isfinite() for norm in foreach_norm(gradients, float("inf"))]).all()
