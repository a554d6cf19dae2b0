"""The check of a user's own model that tensor or context parallelism divides: before the first training step,
its loss and its gradients are compared with those of the undivided model.

Each device has a part of a layer's features, or of a sequence. A softmax, a norm or a chunk over all features
is then another one, and so is a convolution over positions. The models of transformers, and tightfit's tables
for them, have no such place; a model of the user's own, or one with a module of the user's own in it, may.

Both models compute in fp32, in which only the order of sums differs. Small random numbers are added to their
initial weights: a weight that begins at zero would hide what stands before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.distributed.mesh import AXES, DATA
from tightfit.engine.checkpoint.contents import unsharded_shape
from tightfit.engine.pipeline_check import memory_of
from tightfit.engine.rng import evaluating, rng_preserved, seed_all
from tightfit.errors import InputError, TightfitWarning
from tightfit.methods import context_parallel, loss, tensor_parallel
from tightfit.methods.materialize import create_on_host
from tightfit.models.batches import Batch
from tightfit.models.objective import Objective, objective_of_job
from tightfit.models.unchanged import has_table, is_unchanged
from tightfit.parallel.context.sequence_chunks import SequenceChunks
from tightfit.plan import Plan
from tightfit.runtime.run import Run, to_device
from tightfit.units import format_bytes

# relative differences in fp32, of a loss and of a parameter's gradient, at which two results still agree
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
SMALL_SHARE = 1e-4  # a gradient of less than this share of the gradient of all parameters may be rounding errors
NOISE = 0.02  # standard deviation of the numbers that are added to the weights
SAMPLES, TOKENS = 2, 256  # of the compared batch, at most
AUTO_SHARE = 0.05  # of a device's memory that the check may take with check_split: auto
BYTES = 16  # of the check for each parameter: two models in fp32, with gradients


@dataclass(frozen=True)
class DividedComparison:
    """The results of one micro-batch, once from the divided model and once from the undivided one.

    loss           mean loss of the divided model
    expected_loss  mean loss of the undivided model
    gradients      relative differences of gradients: name of a parameter -> the norm of the difference,
                   divided by the norm of the undivided model's gradient. Only those above GRADIENT_TOLERANCE
    """

    loss: float
    expected_loss: float
    gradients: dict[str, float]

    @property
    def agrees(self) -> bool:
        same = abs(self.loss - self.expected_loss) <= LOSS_TOLERANCE * max(abs(self.expected_loss), 1e-6)
        return same and not self.gradients


def wants_divided_check(run: Run) -> bool:
    """Return whether `check_divided` should run before the first training step.

    The plan divides layers or sequences of a model that may then compute something else, and the job's
    `check_split` is "always" or "auto". With "auto", the check runs if it takes at most 5 % of a device's memory;
    otherwise a TightfitWarning says that it does not.
    """
    asked, job = run.job.train.check_split, run.job
    if asked == "never" or (run.plan.tp == 1 and run.plan.cp == 1) or (is_unchanged(job) and not has_table(job)):
        return False
    return asked == "always" or _fits(run)


def _fits(run: Run) -> bool:
    if run.dataflow is not None:
        count = run.dataflow.parameter_count
    else:
        count = sum(unsharded_shape(run, name, parameter).numel() for name, parameter in run.model.named_parameters())
    if count * BYTES <= AUTO_SHARE * memory_of(run):
        return True
    warnings.warn(
        f"plan.{_field(run.plan)} divides a model of your own, which was not compared with the undivided model, because that "
        f"takes {format_bytes(count * BYTES)}; compare them once with train.check_split: always, or make the model smaller "
        "for a first run",
        TightfitWarning,
        stacklevel=3,
    )
    return False


def check_divided(run: Run) -> DividedComparison | None:
    """Compare the divided model with the undivided one on a few samples, and return both results. Raise
    InputError on all devices if they differ by more than the tolerances.

    Returns None if the two cannot be compared, because the model's loss is random even in evaluation mode, or
    is not a number with the changed weights.
    The run is not changed. All devices must call this function.
    """
    comparison = _compare(run)
    if comparison is None or comparison.agrees:
        return comparison
    differing = "".join(
        f", and the gradient of {name} by {share:.0%}" for name, share in list(comparison.gradients.items())[:1]
    )
    reason = (
        "between a product by columns and one by rows, each device has a part of the features, so a softmax, a norm, a chunk or "
        "a topk over all of them is another one"
        if run.plan.tp > 1
        else "each device has a part of the positions, so a shift, a convolution or a mean over positions, or a count of them, is "
        "another one"
    )
    own_table = has_table(run.job) and run.plan.tp > 1
    raise InputError(
        "job: model.tensor_parallel" if own_table else f"plan: {_field(run.plan)}",
        "the divided model computes something else than the undivided model: the loss of a few samples is "
        f"{comparison.loss:.6g} and not {comparison.expected_loss:.6g}{differing} ({reason})",
        "leave such modules out of the table, or use tp: 1"
        if own_table
        else f"use {'tp: 1' if run.plan.tp > 1 else 'cp: 1'}, and divide the model with zero: 3 instead"
        + (", or give a table of the modules to shard (model.tensor_parallel)" if run.plan.tp > 1 else ""),
    )


def _field(plan: Plan) -> str:
    return f"tp={plan.tp}" if plan.tp > 1 else f"cp={plan.cp}"


def _compare(run: Run) -> DividedComparison | None:
    assert run.mesh is not None
    mesh, objective = run.mesh, objective_of_job(run.job)
    data = run.data.data if isinstance(run.data, SequenceChunks) else run.data
    batch = _few(data.example(), 2 * run.plan.cp)
    with rng_preserved(), _without_tf32():
        whole = _new_model(run)
        count = max(objective.count(batch), 1)
        with evaluating(whole):
            if _is_random(whole, objective, batch, run):
                return None
            expected = objective.total(whole, to_device(batch, run)) / count
            expected.backward()  # type: ignore[no-untyped-call]
        divided = _divided(run, objective, whole)
        with evaluating(divided.model):
            own = divided.data.cut(batch) if isinstance(divided.data, SequenceChunks) else batch
            parts = mesh.data_rank_and_size[1]
            with _naming_divided_shapes(run):
                loss_sum = divided.loss_sum(to_device(own, run)) / (count * parts)
            loss_sum.backward()  # type: ignore[no-untyped-call]
    gradients = _differences(divided, dict(whole.named_parameters()))
    total = mesh.all_reduce(loss_sum.detach().double(), DATA)
    return DividedComparison(float(total), float(expected.detach()), gradients)


@contextmanager
def _naming_divided_shapes(run: Run) -> Iterator[None]:
    """Return a context manager that explains a divided model whose tensors do not fit together, although those of the
    undivided model do."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        if not any(words in message for words in ("must match", "shape", "size")):
            raise
        raise InputError(
            f"plan: tp={run.plan.tp}, cp={run.plan.cp}",
            f"the model fails when it is divided, and not as a whole ({message})",
            "divide layers whose outputs are combined in the same way, such as gate and up: see model.tensor_parallel; or "
            "use tp: 1 and cp: 1",
        ) from error


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Inside this context, products in fp32 have the precision of fp32, also on a GPU."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def _few(batch: Batch, multiple: int) -> Batch:
    """Return the first samples of a batch of token sequences, with their first tokens, a multiple of `multiple`.
    Return other batches as they are."""
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    if tokens is None or any(isinstance(one, Tensor) and one.shape != tokens.shape for one in batch.values()):
        return batch
    length = min(tokens.shape[1], -(-TOKENS // multiple) * multiple)
    return {key: one[:SAMPLES, :length] if isinstance(one, Tensor) else one for key, one in batch.items()}


def _new_model(run: Run) -> nn.Module:
    """Return a new undivided model in fp32, with its initial weights and a little noise."""
    seed_all(run.job.train.seed)
    model = create_on_host(run.job.model, run.device, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def _divided(run: Run, objective: Objective, whole: nn.Module) -> Run:
    """Return a run in fp32 with the weights of `whole`, of which only the model, its loss and its data are set.
    Its model is divided as that of `run`; nothing else of the plan counts."""
    plan = run.plan
    plan = Plan(
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        cp=plan.cp,
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        chunked_loss=plan.chunked_loss,
    )
    unset = cast(Any, None)
    seed_all(run.job.train.seed)
    model = create_on_host(run.job.model, run.device, torch.float32)
    data = run.data.data if isinstance(run.data, SequenceChunks) else run.data
    divided = Run(
        job=run.job,
        plan=plan,
        device=run.device,
        objective=objective,
        model=model,
        loss_sum=partial(objective.total, model),
        data=data,
        optimizer=unset,
        learning_rate=unset,
        mesh=run.mesh,
    )
    for method in (context_parallel, tensor_parallel, loss):
        if method.enabled(plan):
            divided = method.apply(divided, plan)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in divided.model.named_parameters():
            parameter.copy_(_own_part(divided, name, values[name]))
    return divided


def _own_part(run: Run, name: str, full: Tensor) -> Tensor:
    """Return what this device has of a parameter, or of its gradient."""
    return run.tp_shards[name].shard(full) if name in run.tp_shards else full


def _differences(divided: Run, whole: dict[str, nn.Parameter]) -> dict[str, float]:
    """Return the relative differences of the gradients that exceed GRADIENT_TOLERANCE on any device, the largest
    first. All devices must call this function."""
    assert divided.mesh is not None
    squares = [one.grad.double().square().sum() for one in whole.values() if one.grad is not None]
    least = SMALL_SHARE * float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    names, shares = [], []
    for name, parameter in divided.model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        divided.mesh.all_reduce(gradient, (*DATA, *(("tp",) if name in divided.tp_replicated else ())))
        full = whole[name].grad
        wanted = torch.zeros_like(gradient) if full is None else _own_part(divided, name, full)
        wanted_norm = max(float(wanted.norm()), least, 1e-12)
        names.append(name)
        shares.append(float((gradient - wanted).norm()) / wanted_norm)
    worst = divided.mesh.all_reduce(torch.tensor(shares, device=divided.device), AXES, dist.ReduceOp.MAX).tolist()
    found = {name: share for name, share in zip(names, worst, strict=True) if not share <= GRADIENT_TOLERANCE}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


@torch.no_grad()
def _is_random(model: nn.Module, objective: Objective, batch: Batch, run: Run) -> bool:
    """Return whether the loss of `batch` changes if the random number generators get another seed, or is not a
    number, which differs from itself."""
    losses = []
    for seed in range(2):
        seed_all(seed)
        losses.append(float(objective.total(model, to_device(batch, run))))
    return losses[0] != losses[1]


__all__ = ["DividedComparison", "check_divided", "wants_divided_check"]
