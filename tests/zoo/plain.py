"""The same training in plain PyTorch, with which a plan's losses and weights are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tightfit
from tests.zoo import ALLOW, find
from tests.zoo.entry import Entry
from tightfit.engine.rng import seed_all
from tightfit.errors import InputError
from tightfit.methods.microbatch import correct_running_norms
from tightfit.optim import make_optimizer

BATCH, STEPS = 8, 2
TYPES = {"true": torch.bfloat16, "half": torch.float16, "fp64": torch.float64}
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Losses of each step, weights before the first and after the last.

    negligible  where a gradient was nothing but rounding in some step: an optimizer that takes signs goes anywhere there
    error       why plain PyTorch cannot train the model so
    """

    losses: list[float]
    start: Weights
    weights: Weights
    negligible: Weights
    error: str | None = None


def make_job(entry: Entry, train: dict[str, Any]) -> tightfit.Job:
    """The entry's job. Adam's epsilon is 1e-3: some gradients are zero but for rounding (the bias of attention's keys), and with
    1e-8 Adam would scale that rounding up to a full step."""
    settings = {"batch": BATCH, "steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1, "epsilon": 1e-3, "seed": 5}
    return tightfit.Job(
        model=entry.model(),
        data=entry.samples(),
        loss=entry.loss,
        train=tightfit.Train(**{**settings, **train}),
        allow=list(ALLOW),
    )


def train_plainly(
    name: str,
    train: dict[str, Any],
    micro_batch: int | None,
    replicas: int,
    precision: str,
    loss_scale: float = 1.0,
) -> Trained:
    """By the loop that anyone would write.

    micro_batch, replicas  how the batch is cut, for models in which a sample's result depends on the others of its forward:
                           then buffers are the means of the replicas'
    precision              fp32; mixed and half-mixed are torch.autocast to bf16 and fp16, true and half a model and inputs cast
                           to these; fp64 says what fp32 rounds
    loss_scale             what the mean loss is multiplied by before its backward, in fp16
    """
    entry = find(name)
    try:
        run = tightfit.build(make_job(entry, train))  # for the weights it begins with and its batches, no more
    except InputError as error:
        return Trained([], {}, {}, {}, str(error))
    settings, model = run.job.train, run.model
    start = tensors(model)
    try:
        losses, negligible = _train(entry, run, settings, micro_batch, replicas, precision, loss_scale)
    except Exception as error:
        return Trained([], start, {}, {}, f"{type(error).__name__}: {error}")
    return Trained(losses, start, tensors(model), negligible)


def _train(
    entry: Entry,
    run: Any,
    settings: tightfit.Train,
    micro_batch: int | None,
    replicas: int,
    precision: str,
    loss_scale: float,
) -> tuple[list[float], Weights]:
    model, batches = run.model, run.data.steps(0, None)
    if precision in ("true", "half"):
        narrow(model, TYPES[precision])
    if precision == "fp64":
        model.double()
    share = settings.batch // replicas
    size = min(micro_batch or share, share)
    correct_running_norms(model, -(-share // size))
    optimizer = make_optimizer(model, settings)
    mixed = torch.float16 if precision == "half-mixed" else torch.bfloat16
    seed_all(settings.seed + 1)
    losses: list[float] = []
    negligible = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for _, (batch,) in zip(range(settings.steps or 0), batches, strict=False):
        pieces, total, count, scale = [split(part, size) for part in split(batch, share)], 0.0, 0, 0.0
        before, after = buffers(model), []
        for part in pieces:
            put(model, before)
            for piece in part:
                if precision in TYPES:
                    piece = cast(piece, TYPES[precision])
                with torch.autocast("cpu", mixed, enabled=precision.endswith("mixed")):
                    loss, counted = entry.plain(model, piece)
                # about what the mean of the whole batch would be scaled by: gradients vanish in fp16 below the same size
                scale = scale or loss_scale / max(1, counted * sum(map(len, pieces)))
                (loss * scale).backward()
                total, count = total + loss.item(), count + counted
            after.append(buffers(model))
        put(model, {name: mean([one[name] for one in after]) for name in before})
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            negligible[name] |= gradient.abs() <= max(1e-6 * largest, 1e-5 * float(gradient.abs().max()))
            gradient.div_(count * scale)
        losses.append(total / count)
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, negligible


def replay(name: str, train: dict[str, Any], log: list[tuple[int, int, int]], workers: int) -> Weights:
    """What an asynchronous server's weights are after the updates of its log: (worker, its step, version of the weights).

    Each update's gradient is the mean over the samples of its worker, taken at the weights of that version.
    """
    entry = find(name)
    run = tightfit.build(make_job(entry, train), alone=True)
    model, settings = run.model, run.job.train
    batches = [batch for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False)]
    optimizer, weights = make_optimizer(model, settings), list(model.parameters())
    versions = [[weight.detach().clone() for weight in weights]]
    for worker, step, version in log:
        share = split(batches[step], -(-BATCH // workers))[worker - 1]
        _put_weights(weights, versions[version])
        loss, counted = entry.plain(model, share)
        loss.backward()
        _put_weights(weights, versions[-1])
        for weight in weights:
            if weight.grad is not None:
                weight.grad.div_(counted)
        optimizer.step()
        optimizer.zero_grad()
        versions.append([weight.detach().clone() for weight in weights])
    return tensors(model)


@torch.no_grad()
def _put_weights(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in 16 bits, but for those of BatchNorm, which stay in the type of its statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    wide = {id(parameter) for module in norms for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in wide and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: cast(value, dtype) for name, value in batch.items()}
    return [cast(value, dtype) for value in batch]


def split(batch: Any, size: int) -> list[Any]:
    if isinstance(batch, dict):
        columns = {name: value.split(size) for name, value in batch.items()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [list(values) for values in zip(*(value.split(size) for value in batch), strict=True)]


def buffers(model: nn.Module) -> Weights:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def put(model: nn.Module, values: Weights) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]


def tensors(model: nn.Module) -> Weights:
    """Weights and buffers with values, in fp32; complex ones as pairs."""
    return {name: plain(value) for name, value in model.state_dict().items() if has_values(value)}


def has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def plain(value: Tensor) -> Tensor:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).float().clone()
