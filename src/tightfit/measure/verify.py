"""Verifies a plan: trains a few steps with the plan and with the reference plan, and compares
losses, gradients and weights.

The reference plan trains in fp32 on one device, without any method. Both runs start from the same
seed and train on the same samples, without dropout: plans may drop other elements than the
reference does, and their results would differ for this reason alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tightfit.distributed.processes import check_world, is_rank_zero, join
from tightfit.engine.build import build
from tightfit.engine.clipping import shard_of
from tightfit.engine.loop import train
from tightfit.engine.pipeline_check import check_split
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine, machine_of
from tightfit.models.dropout import switch_off_dropout
from tightfit.plan import Plan, plan_of
from tightfit.runtime.run import Reduction, Run, unshard

ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""precision -> unit roundoff u, the largest relative error of one rounding: half the relative
distance between two neighbouring numbers. Example: bf16 keeps 8 significant bits, so u = 2^-8."""

FLOAT8 = {"none": 0.0, "tensorwise": 2.0**-3, "rowwise": 2.0**-4}
"""Unit roundoff of the 8-bit factors of matrix products, by the plan's `float8`. Numbers of the type
e4m3 have a mantissa of 3 bits, so u = 2^-4. `tensorwise` stores gradients in e5m2, whose mantissa
has 2 bits, so u = 2^-3."""

STATES = {"fp32": 0.0, "bf16": 2e-2, "8-bit": 1e-1, "4-bit": 5e-1}
"""The largest relative error of an update, by the type of the optimizer states: the relative
distance between neighbouring values that this type can store. Measured errors relative to the
distance that the weights travelled in 3 and in 10 steps: up to 0.7 % (bf16), 2 % (8-bit) and 28 %
(4-bit)."""


@dataclass(frozen=True)
class Tolerances:
    """The largest relative errors, of gradients, loss and weights, that rounding alone can cause. u
    is the unit roundoff of the plan's precision, such as 2^-8 for bf16.

    The tolerances of loss and weights depend on the distance d that the reference's weights
    travelled: the norm of the change of all weights during the compared steps, divided by the norm
    of the weights. That of the loss also depends on c, the largest relative change of the
    reference's loss between the first step and another one.

    gradients      sqrt(u). In a smooth network, the error of a gradient is a few u, and grows with
                   depth. In a network with ReLUs, about a fraction u of the units is so near zero
                   that rounding switches them on or off. The error of such a unit is 0 or 1, so the
                   relative norm of these errors is sqrt(u). Measured: up to 4 u on transformers of
                   4 to 16 layers, up to 0.5 sqrt(u) on convolutional networks with BatchNorm, and
                   up to 0.8 u in float8, emulated on a tiny Llama and a tiny ViT
    weights        sqrt(u) + (2 u^(1/4) + STATES) d, where STATES is the error of an update that
                   comes from storing optimizer states in fewer bits. Adam and sign-based optimizers
                   take steps of the same length for small and for large gradients. If gradients
                   have a relative error e, then about a fraction e of the weights, those with the
                   smallest gradients, steps in an arbitrary direction. The relative error of the
                   whole step is then sqrt(e), and e is about sqrt(u). Measured: up to 1.1 u^(1/4) d
    loss           sqrt(u) + 2 u^(1/4) d + STATES max(c, d). To first order, updates with a relative
                   error e change the loss by up to e times the change that exact updates cause.
                   A loss can change much more than the weights: in three steps of a ViT, c was 1.0
                   with d = 4 %, and the loss of 4-bit states was 4 % away

    Example: bf16 has u = 2^-8, so gradients may differ by 2^-4 = 6.25 %. With fp32 states and
    d = 1 %, loss and weights may differ by 6.25 % + 2 x 0.25 x 1 % = 6.75 %.
    """

    gradients: float
    loss: float
    weights: float

    @classmethod
    def of(cls, plan: Plan, travelled: float, loss_change: float = 0.0) -> Tolerances:
        """travelled: d; loss_change: c (see the class)."""
        gradients = math.sqrt(max(ROUNDOFF[plan.precision.split("-")[0]], FLOAT8[plan.float8]))
        drift = gradients + 2 * math.sqrt(gradients) * travelled
        narrow = STATES[plan.states]
        return cls(gradients, drift + narrow * max(travelled, loss_change), drift + narrow * travelled)


@dataclass(frozen=True)
class Verification:
    """The result of a verification: the largest relative differences between a plan and the
    reference plan, and how large they may be.

    loss        |a - b| / |b| of the losses a and b in the worst step
    gradients   norm of the difference of the gradients, divided by the norm of the reference's
                gradient: over all parameters together, in the first step
    weights     norm of the difference of the weights, divided by the norm of the reference's
                weights: over all parameters together, after the last step
    tolerances  how large these three numbers may be
    """

    loss: float
    gradients: float
    weights: float
    tolerances: Tolerances

    @property
    def passed(self) -> bool:
        return all(error <= allowed for error, allowed in self.compared().values())  # NaN: False

    @property
    def tolerance(self) -> float:
        """The largest of the three tolerances: of the loss, the gradients and the weights."""
        return max(allowed for _, allowed in self.compared().values())

    def compared(self) -> dict[str, tuple[float, float]]:
        """Return a dict with the keys "loss", "gradients" and "weights". Each value is (relative
        difference, its tolerance)."""
        allowed = self.tolerances
        return {
            "loss": (self.loss, allowed.loss),
            "gradients": (self.gradients, allowed.gradients),
            "weights": (self.weights, allowed.weights),
        }

    def content(self) -> dict[str, object]:
        return {
            "max_relative_error": {name: error for name, (error, _) in self.compared().items()},
            "tolerance": self.tolerance,
            "tolerances": {name: allowed for name, (_, allowed) in self.compared().items()},
            "passed": self.passed,
        }


def verify(
    job: Job,
    plan: Plan | Mapping[str, Any] | None = None,
    machine: Machine | str | None = None,
    steps: int = 3,
) -> Verification:
    """Train `steps` optimizer steps of `job` with the reference plan and then with `plan`, and
    return how much their losses, gradients and weights differ.

    plan     the plan, or a mapping of its fields; None: the reference plan `Plan()`, with the fields
             that the job's `plan` sets
    machine  a machine or its name, of which only the kind of device is used; None: detect this host

    A plan for several devices needs as many processes. All of them must call `verify`, and all get
    the same result; rank 0 also runs the reference plan. Raises InputError if the plan updates
    weights asynchronously.

    Neither run drops anything (see `switch_off_dropout`), because a plan that compiles the model,
    splits the batch or has `dropout: 16-bit` drops other elements than the reference does.

    Some models depend on how the batch is split: BatchNorm computes statistics of each micro-batch,
    and NLLB-MoE's experts drop tokens of each micro-batch. A plan that splits the batch of such a
    model computes another result, and does not pass. If a plan has a dynamic loss scale, its run is
    repeated until no step is skipped because of the scale.
    """
    plan, machine = plan_of(plan, job), machine_of(machine)
    if job.train.steps is None or job.train.steps < steps:
        job = job.replace(train=job.train.replace(steps=steps, epochs=None, warmup=min(job.train.warmup, steps)))
    if plan.devices > 1:
        return _verify_together(job, plan, machine, steps)
    expected = observe(build(job, Plan(), machine), steps)
    return compare(plan, observe_settled(job, plan, machine, steps), expected)


def compare(plan: Plan, found: Observed, expected: Observed) -> Verification:
    losses = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found.losses, expected.losses, strict=True)]
    return Verification(
        math.nan if any(map(math.isnan, losses)) else max(losses),
        difference(found.gradients, expected.gradients),
        difference(found.weights, expected.weights),
        Tolerances.of(plan, difference(expected.start, expected.weights), _loss_change(expected.losses)),
    )


def _verify_together(job: Job, plan: Plan, machine: Machine, steps: int) -> Verification:
    """Run `verify` for a plan of several devices. It compares the gradients that the optimizer
    gets: summed over devices, and clipped if the job clips gradients. Raises InputError if the plan
    updates weights asynchronously."""
    for late, instead in (
        ("schedule=pipedream", "schedule: 1f1b"),
        ("parameter_server=async", "parameter_server: sync"),
    ):
        name, _, value = late.partition("=")
        if getattr(plan, name) == value:
            raise InputError(
                f"plan: {late}",
                "updates weights with gradients of older weights, and the reference plan does not",
                f"verify the plan with {instead}",
            )
    check_world(plan)
    join(machine.device)
    expected = observe_sharded(build(job, Plan(), machine, alone=True), steps) if is_rank_zero() else None
    found = observe_settled(job, plan, machine, steps, observe_sharded)
    answer = [compare(plan, found, expected) if expected is not None else None]
    dist.broadcast_object_list(answer, src=0)
    return cast(Verification, answer[0])


def _loss_change(losses: list[float]) -> float:
    """Return the largest relative change of the loss between the first step and another one."""
    smallest = max(min(map(abs, losses)), 1e-12)
    return max(abs(loss - losses[0]) for loss in losses) / smallest


@dataclass(frozen=True)
class Observed:
    """The losses, gradients and weights of one run, for a comparison with another run.

    losses     the loss of each step
    gradients  the gradients of the first step
    start      the weights before the first step
    weights    the weights after the last step
    skipped    whether a step was skipped because a gradient overflowed in fp16

    `gradients`, `start` and `weights` are dicts: parameter name -> full (unsharded) tensor, in fp32
    on the host.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    skipped: bool


def observe_settled(
    job: Job, plan: Plan, machine: Machine | None, steps: int, observing: Callable[[Run, int], Observed] | None = None
) -> Observed:
    """Build a run of the plan, train `steps` steps, and return their losses, gradients and weights.
    The stages of a pipeline are first compared with the undivided model; raises InputError if they
    differ.

    The dynamic loss scale of fp16 may begin too high, so that steps are skipped. The run is then
    built again, and begins with the scale that the last attempt ended with.

    observing  the function that trains and observes: `observe` for one device, `observe_sharded`
               for several; None: `observe`
    """
    job = job.replace(train=job.train.replace(check_split="never"))  # its backward would call the gradient hooks
    scale: float | None = None
    while True:
        run = build(job, plan, machine)
        if run.loss_scale is not None and scale is not None:
            run.loss_scale.value = scale
        if run.dataflow is not None:
            check_split(run)
        observed = (observing or observe)(run, steps)
        if not observed.skipped or run.loss_scale is None or run.loss_scale.value == scale or scale == 1.0:
            return observed
        scale = run.loss_scale.value


def observe(run: Run, steps: int) -> Observed:
    """Train `steps` steps on one device without dropout, and return their losses, gradients and
    weights. Hooks on the parameters record the gradients of the first step, also for a plan that
    updates weights during backward and keeps no gradients."""
    switch_off_dropout(run.model)
    gradients: dict[str, Tensor] = {}
    trained = {name: parameter for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    if run.reduction is not None and any(isinstance(parameter, DTensor) for parameter in trained.values()):
        weights = {name: run.optimizer_weights[parameter] for name, parameter in trained.items()}
        run = replace(run, reduction=cast(Reduction, _GradientRecorder(run.reduction, weights, gradients)))
    hooks = [parameter.register_hook(_gradient_hook(gradients, name)) for name, parameter in trained.items()]
    scale = run.loss_scale.value if run.loss_scale else 1.0
    start, losses, skipped = weights_of(run.model), [], False
    for result in itertools.islice(train(run), steps):
        losses.append(result.loss)
        skipped = skipped or result.skipped
        for hook in hooks:
            hook.remove()
    gradients = {name: gradient / scale for name, gradient in gradients.items()}
    return Observed(losses, gradients, start, weights_of(run.model), skipped)


def observe_sharded(run: Run, steps: int) -> Observed:
    """Like `observe`, for a run on several devices, whose parameters may be sharded. All ranks must
    call this function, and all get the full tensors. Gradients are recorded just before the first
    update."""
    switch_off_dropout(run.model)
    gradients: dict[str, Tensor] = {}
    trained = {name: run.optimizer_weights.get(p, p) for name, p in run.model.named_parameters() if p.requires_grad}

    def see() -> None:
        if not gradients:
            found = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in trained.items()}
            gradients.update(_gather_full(run, trained, found))

    def weights() -> dict[str, Tensor]:
        return _gather_full(run, trained, {name: weight.detach() for name, weight in trained.items()})

    start, losses, skipped = weights(), [], False
    watched = replace(run, optimizer=cast(torch.optim.Optimizer, _OptimizerWithHook(run.optimizer, see)))
    for result in itertools.islice(train(watched), steps):
        losses.append(result.loss)
        skipped = skipped or result.skipped
    return Observed(losses, gradients, start, weights(), skipped)


def _gather_full(run: Run, weights: dict[str, nn.Parameter], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameter name -> full tensor of the whole model, in fp32 on the host. All ranks must
    call this function.

    weights  parameter name -> the tensor that the optimizer updates, which determines how the
             parameter is sharded
    values   parameter name -> this device's shard of the weight or of its gradient
    """
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        one = unshard(run, weights[name], shard_of(value)).detach()
        found[name] = (one.full_tensor() if isinstance(one, DTensor) else one).float().cpu().clone()
    if run.executor is not None and run.plan.pp > 1:
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
        found = {name: value for everyone in everyones for name, value in everyone.items()}
    return found


class _OptimizerWithHook:
    """An optimizer that calls `before()` and then does its usual step."""

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None]) -> None:
        self.optimizer, self.before = optimizer, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.before()
        self.optimizer.step()


class _GradientRecorder:
    """A `Reduction` that also records the gradients of the first step: it copies them into `gradients`
    when they are complete.

    ZeRO's gathered parameters hand their gradients over to the reduction, so hooks on the
    parameters would not see them.

    weights    parameter name -> the tensor whose `grad` is recorded
    gradients  parameter name -> gradient, in fp32 on the host; filled by this object
    """

    def __init__(self, reduction: Reduction, weights: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
        self.reduction, self.weights, self.gradients = reduction, weights, gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reduction, name)

    def end(self, last: bool) -> None:
        self.reduction.end(last)
        if last and not self.gradients:
            for name, weight in self.weights.items():
                if weight.grad is not None:
                    self.gradients[name] = weight.grad.detach().float().cpu().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    whole = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: parameter.detach().float().cpu().clone() for name, parameter in whole.items()}


def _gradient_hook(gradients: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    def add(gradient: Tensor) -> None:
        part = gradient.detach().float().cpu()
        gradients[name] = gradients[name] + part if name in gradients else part.clone()

    return add


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative difference of two sets of tensors: the norm of `found` - `expected`,
    divided by the norm of `expected`, over all tensors together. The keys are parameter names."""
    distance = torch.stack([(found[name] - value).double().square().sum() for name, value in expected.items()]).sum()
    size = torch.stack([value.double().square().sum() for value in expected.values()]).sum()
    return float((distance / size.clamp_min(1e-30)).sqrt())
