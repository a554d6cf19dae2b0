"""The split check: compare a pipeline's stages with the model that is not split.

Before the first training step, this check runs one micro-batch through the stages and through the
undivided model, and compares the losses and the gradient norms. To split the model,
`parallel/pipeline/boundaries.py` has traced it on fake tensors. Such a trace cannot see state that
the model keeps outside of tensors, nor code that depends on the values in the data. A stage that
lacks such state computes a wrong result, which this check finds.

A user's own model that tp or cp divides is compared by `divided_check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.distributed.mesh import DATA
from tightfit.engine.checkpoint.contents import model_of
from tightfit.engine.clipping import gradient_norm
from tightfit.engine.rng import evaluating, rng_preserved, seed_all
from tightfit.engine.step import all_reduce_replicated
from tightfit.errors import InputError
from tightfit.methods import float8, precision
from tightfit.methods.materialize import create_on_host, weights_dtype
from tightfit.models import model_factory
from tightfit.models.fake_forward import branch_on_values
from tightfit.models.objective import objective_of_job
from tightfit.parallel.context.sequence_chunks import SequenceChunks
from tightfit.parallel.pipeline.executor import PipelineRank
from tightfit.runtime.run import Run, to_device

# With check_split: auto, the check runs if it takes at most this share of the run's time and of a
# device's memory.
AUTO_CHECK_SHARE = 0.02
TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class SplitComparison:
    """The results of one micro-batch, once from the pipeline's stages and once from the undivided
    model.

    loss           mean loss that the stages compute
    expected_loss  mean loss that the undivided model computes
    norm           gradient norm from the stages. None if the plan compresses gradients: the check
                   then computes no gradients, because compressing them would change the error
                   feedback of the training
    expected_norm  gradient norm from the undivided model; None if `norm` is None
    tolerance      the largest relative difference at which two results still agree
    """

    loss: float
    expected_loss: float
    norm: float | None
    expected_norm: float | None
    tolerance: float

    @property
    def agrees(self) -> bool:
        pairs = [(self.loss, self.expected_loss)]
        if self.norm is not None and self.expected_norm is not None:
            pairs.append((self.norm, self.expected_norm))
        return all(abs(found - wanted) <= self.tolerance * max(abs(wanted), 1e-6) for found, wanted in pairs)


def wants_check(run: Run, steps: int) -> bool:
    """Return whether `check_split` should run before the first training step.

    run    the run. Its job's `check_split` is "always", "never" or "auto". With "auto", the check
           runs if it takes at most 2 % of a device's memory and of the run's time. The time does not
           matter for a model of the user's own that branches on its data. A run without a pipeline is
           never checked
    steps  number of training steps that the run still takes
    """
    asked = run.job.train.check_split
    if asked == "never" or run.dataflow is None:
        return False
    if asked == "always":
        return True
    plan, settings = run.plan, run.job.train
    micro_batches = -(-plan.share_of(settings.batch) // plan.micro_batch_of(settings.batch))
    whole = run.dataflow.parameter_count
    memory = memory_of(run)
    # The unit of time is one stage on one micro-batch. The undivided model takes as long as all
    # stages one after another, and so does a pipeline with one micro-batch: 2 * stages together.
    if 3 * 4 * whole > AUTO_CHECK_SHARE * memory:
        return False
    return 2 * plan.stages <= AUTO_CHECK_SHARE * steps * micro_batches or _branches_on_data(run)


def _branches_on_data(run: Run) -> bool:
    """Return whether a model of the user's own reads values of its data in Python, by which it may use other layers
    than those that the stages were made for."""
    job = run.job
    if job.of_transformers:
        return False
    return bool(branch_on_values(model_factory(job.model), objective_of_job(job).total, run.data.example()))


def memory_of(run: Run) -> int:
    """Return the bytes of memory of this process's device."""
    if run.device.type == "cuda":
        return torch.cuda.get_device_properties(run.device).total_memory
    return psutil.virtual_memory().total


def check_split(run: Run) -> SplitComparison | None:
    """Compare the pipeline's stages with the undivided model on one micro-batch, and return both
    results. Raise InputError on all devices if they differ by more than the tolerance.

    Returns None if the two cannot be compared, because the model's loss is random even in
    evaluation mode. The run is not changed. All devices must call this function.
    """
    comparison = compare_split(run)
    if comparison is not None and not comparison.agrees:
        norm = (
            ""
            if comparison.norm is None
            else f", gradient norm {comparison.norm:.6g} and not {comparison.expected_norm:.6g}"
        )
        raise InputError(
            f"plan: pp={run.plan.pp}",
            "the stages compute something else than the undivided model (the stages do not share state that the model keeps "
            "outside of tensors, or decisions that depend on the data): the loss of one micro-batch is "
            f"{comparison.loss:.6g} and not {comparison.expected_loss:.6g}{norm}",
            "use pp: 1, and divide the model with zero: 3 or tp instead",
        )
    return comparison


def compare_split(run: Run) -> SplitComparison | None:
    """Run one micro-batch through the pipeline's stages, and then through the undivided model with
    the same weights. Return both results, whether or not they agree.

    Returns None if the model's loss is random even in evaluation mode. All devices must call this
    function.
    """
    assert run.mesh is not None
    assert isinstance(run.executor, PipelineRank)
    whole = run.data.example()
    own = run.data.cut(whole) if isinstance(run.data, SequenceChunks) else whole
    parts, copies = run.mesh.data_rank_and_size[1], run.mesh.cp
    items = max(run.objective.count(own) if copies == 1 else _over_pieces(run, run.objective.count(own)), 1) * parts
    with_gradients = run.plan.compressed_gradients == "none"
    with rng_preserved(), _buffers_kept(run.model), _mode_of(run):
        seed_all(run.job.train.seed)
        total = (
            run.executor.run_micro_batch(run, own, 1.0 / items) if with_gradients else run.executor.evaluate(run, own)
        )
        loss = float(run.mesh.all_reduce(total.detach().double(), (*DATA, "pp"))) / items
        norm = None
        if with_gradients:
            all_reduce_replicated(run)
            norm = float(gradient_norm(run, run.mesh))
            run.optimizer.zero_grad(set_to_none=True)
    expected = _undivided(run, whole, with_gradients)
    if expected is None:
        return None
    expected_loss, expected_norm = expected
    tolerance = TOLERANCES[run.plan.precision.split("-")[0]]
    return SplitComparison(loss, expected_loss, norm, expected_norm if with_gradients else None, tolerance)


def _over_pieces(run: Run, count: int) -> int:
    """Return the sum of `count` over the context-parallel ranks. Each of these ranks has another
    part of the same sequences, and counts only the items in its part."""
    assert run.mesh is not None
    values = torch.tensor(count, device=run.device)
    dist.all_reduce(values, group=run.mesh.other_groups["context"])
    return int(values)


def _undivided(run: Run, batch: Any, with_gradients: bool) -> tuple[float, float] | None:
    """Create the undivided model with the weights of all stages, run `batch` through it, and return
    (mean loss, gradient norm).

    with_gradients  whether to run backward; if False, the returned norm is 0

    Returns None if the loss is random even in evaluation mode.
    """
    with rng_preserved():
        seed_all(run.job.train.seed)
        model = create_on_host(run.job.model, run.device, weights_dtype(run.plan))
    _gather_weights(run, model)
    objective = objective_of_job(run.job)
    undivided = replace(
        run, model=model, loss_sum=partial(objective.total, model), executor=None, mesh=None, objective=objective
    )
    for method in (float8, precision):
        if method.enabled(run.plan):
            undivided = method.apply(undivided, run.plan)
    items = max(objective.count(batch), 1)
    with rng_preserved(), _mode_of(undivided), torch.set_grad_enabled(with_gradients):
        if run.dataflow is not None and run.dataflow.is_random and _differs(undivided, batch):
            return None
        loss = undivided.loss_sum(to_device(batch, run)) / items
        if with_gradients:
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).double().square()
        for gradient in gradients
    ]
    norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    return float(loss.detach()), float(norm)


@torch.no_grad()
def _differs(run: Run, batch: Any) -> bool:
    """Return whether the loss of `batch` changes if the random number generators get another seed."""
    losses = []
    for seed in range(2):
        seed_all(seed)
        losses.append(float(run.loss_sum(to_device(batch, run))))
    return losses[0] != losses[1]


@torch.no_grad()
def _gather_weights(run: Run, model: nn.Module) -> None:
    """Copy the parameters and buffers of all pipeline stages into the undivided `model`, on every
    device. All devices must call this function."""
    assert run.mesh is not None
    saved = model_of(run)
    names: list[Any] = [None] * run.mesh.size("pp")
    group, mine = run.mesh.group("pp"), run.mesh.rank("pp")
    dist.all_gather_object(names, list(saved.sizes), group=group)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    done: set[str] = set()
    for stage, its in enumerate(cast(list[list[str]], names)):
        for name in its:
            if name in done or name not in tensors:
                continue
            done.add(name)
            target = tensors[name].detach()
            value = saved.fetch(name).to(target) if stage == mine else torch.empty_like(target)
            value = value.contiguous()
            dist.broadcast(value, group=group, group_src=stage)
            target.copy_(value)


@contextmanager
def _mode_of(run: Run) -> Iterator[None]:
    """Context manager that sets the mode of `run.model`: training mode, or evaluation mode if the
    model draws random numbers, such as for dropout, or may draw some. In training mode, the stages and the
    undivided model would draw different numbers."""
    if run.dataflow is None or run.dataflow.is_random:
        with evaluating(run.model):
            yield
        return
    run.model.train()
    yield


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):  # a copy counts as a write of the forward
                    buffer.copy_(value)
