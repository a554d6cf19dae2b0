"""Defines the training objective: the sum of the losses of a batch, and the number of items in that
sum.

The engine, the loss methods and the dry run all read a job's loss through `Objective`. Sum and
count are kept apart so that the gradients do not depend on how a batch is split into micro-batches.
The step divides the sum by the count of the whole step, never by the number of micro-batches.

Example: a step has two micro-batches with 10 and 30 labels that count. The mean of the two
micro-batch means weights the first ten labels too much. (sum_1 + sum_2) / 40 is the mean over all
40 labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.fake import FakeTensor
from tightfit.errors import InputError
from tightfit.job import Job, LossSpec
from tightfit.job_sections.model import Task
from tightfit.models.batches import IGNORED, Batch, describe_batch, sample_count
from tightfit.models.call_model import TARGETS, call_model, is_of_transformers, refused_by_hooks
from tightfit.models.loss_state import note_loss
from tightfit.models.losses import TorchLoss, class_numbers, explain_errors, torch_loss
from tightfit.models.python import load_python
from tightfit.models.task_logits import (
    batch_labels,
    class_logits,
    class_targets,
    logits_of,
    model_logits,
    next_token_targets,
    seq2seq_logits,
)
from tightfit.models.tasks import task_of


@dataclass(frozen=True)
class Objective:
    """Defines a job's loss by two functions, a sum and a count, whose results can be added up over
    micro-batches and data ranks. The loss is the sum divided by the count: a mean over items, which
    are tokens or samples.

    total    (model, batch) -> the sum of the losses of all items that count, a scalar tensor
    count    batch -> how many items count, an int; it must not need the model
    unit     what an item is, in messages and logs: "tokens" or "samples"
    logits   (model, batch) -> logits of shape (..., classes); None if the loss is not a cross
             entropy
    targets  batch -> labels of shape (...), IGNORED (-100) where a position does not count; None if
             `logits` is None
    calls_model_itself  whether `total` may give the model any tensor of a batch; False: it calls the
             model as `call_model` does
    compile  compiles the part of `total` that torch.compile can compile, in place; its arguments are
             options of torch.compile. None: all of `total` can be compiled

    The method that computes the loss in chunks needs `logits` and `targets`; it does not use
    `total`.
    """

    total: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    unit: str = "samples"
    logits: Callable[[nn.Module, Batch], Tensor] | None = None
    targets: Callable[[Batch], Tensor] | None = None
    calls_model_itself: bool = True
    compile: Callable[..., None] | None = None


def cross_entropy_objective(
    logits: Callable[[nn.Module, Batch], Tensor], targets: Callable[[Batch], Tensor], unit: str
) -> Objective:
    """Return the objective of a cross entropy. Its sum and its count are over the labels that are
    not IGNORED (-100).

    logits   (model, batch) -> logits of shape (..., classes)
    targets  batch -> labels of shape (...), of any integer type or bool
    unit     what a label is for: "tokens" or "samples"

    The loss is computed in fp32, whatever the type of the logits. The objective's `total` raises
    InputError if the model does not return logits for each label, if they may be those of images
    with the classes in dim 1, or if a label is not one of the model's classes.
    """

    def numbers(batch: Batch) -> Tensor:
        return class_numbers(targets(batch))

    def total(model: nn.Module, batch: Batch) -> Tensor:
        values, labels = logits(model, batch), numbers(batch)
        if values.dim() < 2 or values.shape[:-1].numel() != labels.numel() or _has_two_readings(values, labels):
            raise InputError(
                "job: model",
                f"returns logits of shape {tuple(values.shape)} for labels of shape {tuple(labels.shape)}",
                "let the model return logits of shape (*labels.shape, classes), or give the job its own loss, "
                "such as nn.CrossEntropyLoss() for classes in dim 1",
            )
        try:
            return functional.cross_entropy(
                values.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        except IndexError as error:  # only now is the number of classes of a user's model known
            raise InputError(
                "data",
                f"has labels outside of the model's {values.shape[-1]} classes ({error})",
                f"number the classes from 0 to {values.shape[-1] - 1}, or give the model's last layer one output per class",
            ) from error

    def count(batch: Batch) -> int:
        return int((numbers(batch) != IGNORED).sum())

    return Objective(total, count, unit, logits, numbers, calls_model_itself=False)


def _has_two_readings(logits: Tensor, labels: Tensor) -> bool:
    """Return whether logits of images may have their classes in the last dimension, as this module
    expects, or in dim 1, as torch does: there are as many classes as the images are wide."""
    rest = (logits.shape[0], *logits.shape[2:])
    return logits.dim() >= 4 and labels.shape == logits.shape[:-1] and labels.shape == rest


TASKS: dict[str, Objective] = {
    "causal-lm": cross_entropy_objective(model_logits, next_token_targets, "tokens"),
    "masked-lm": cross_entropy_objective(model_logits, batch_labels, "tokens"),
    "seq2seq-lm": cross_entropy_objective(seq2seq_logits, batch_labels, "tokens"),
    "classification": cross_entropy_objective(class_logits, class_targets, "samples"),
}
assert set(TASKS) == set(get_args(Task))


def objective_of_job(job: Job) -> Objective:
    """Return the objective for a job's loss and its model's task, without any method of a plan. Raises
    InputError as `objective_of` does."""
    loss = load_python(job.loss.python) if isinstance(job.loss, LossSpec) else job.loss
    return objective_of(loss, task_of(job.model))


def objective_of(loss: Any, task: str | None) -> Objective:
    """Return the objective for a job's loss and its model's task.

    loss  an Objective; one of torch's losses (a class, an instance or a function); a callable
          loss(output, batch); or None, which selects the objective of `task`
    task  the model's task (a key of TASKS); None means classification

    A callable must return the mean loss over the samples of `batch`, which is one micro-batch. Its
    `output` is what the model returns for batch[0], or for a batch that is a dict as `call_model`
    calls it. For a mean over anything but samples, such as the tokens that count, give an Objective:
    the mean of the micro-batches' means would depend on how a batch is split.

    Raises InputError for one of torch's losses that cannot be split into a sum and a count, and for a
    loss with trainable parameters. The objective's `total` raises InputError if the loss is not a
    scalar tensor or does not require gradients.
    """
    note_loss(loss.total if isinstance(loss, Objective) else loss)
    if isinstance(loss, Objective):
        return replace(loss, total=partial(_require_graph, loss.total), count=partial(_whole_count, loss.count))
    if loss is None:
        return TASKS[task or "classification"]
    if isinstance(loss, nn.Module) and any(weight.requires_grad for weight in loss.parameters()):
        raise InputError(
            f"job: loss={type(loss).__name__}",
            "has trainable parameters, which only the model's optimizer would train",
            "put the module into the model, and let forward return what the loss needs",
        )
    standard = torch_loss(loss)
    if standard is not None:
        return _torch_objective(standard)

    def total(model: nn.Module, batch: Batch) -> Tensor:
        output = call_model(model, batch)
        value = explain_errors(
            lambda: loss(output, batch),
            "job: loss",
            f"correct the loss; it is called as loss(output, batch), and the data gives {describe_batch(batch)} as batch",
        )
        if value is None and is_of_transformers(model):
            raise InputError(
                "loss",
                "returned None: a model of transformers gets no labels, so its output has no loss",
                "leave out the loss to train with the model's own; or compute one from output.logits and batch['labels']",
            )
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(
                "loss",
                f"returned {_kind_of(value)}, not a scalar tensor",
                "return the mean over the batch's samples, or give a tightfit.Objective",
            )
        return value * sample_count(batch)

    return Objective(partial(_require_graph, total), sample_count, "samples", calls_model_itself=False)


def _whole_count(count: Callable[[Batch], Any], batch: Batch) -> int:
    """Return what an objective's `count` returns for a batch, as an int. Raise InputError if it is no whole
    number: devices add their counts up as integers."""
    value = count(batch)
    if isinstance(value, FakeTensor):
        return value  # type: ignore[return-value]
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Integral) or (isinstance(number, float) and number.is_integer()):
        return int(number)
    raise InputError(
        "job: loss",
        f"its count returned {_kind_of(value) if isinstance(number, Tensor) else number}, and items are whole numbers",
        "count samples or tokens, and multiply each item's loss by its weight in total; for a mean over weights, let those of "
        "the data have a mean of 1",
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _require_graph(total: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss, total(model, batch). Raises InputError if it is a complex number; if gradients are enabled,
    but the loss has no autograd graph, so that backward is not possible; or if it computes gradients of its own that
    recomputed or offloaded activations do not allow."""
    if torch.compiler.is_compiling():
        value = total(model, batch)
    else:
        try:
            value = total(model, batch)
        except RuntimeError as error:
            if (explained := refused_by_hooks(error, "loss")) is None:
                raise
            raise explained from error
    if isinstance(value, Tensor) and value.is_complex():
        raise InputError("job: loss", "is a complex number", "return its real part, its absolute value or its square")
    if torch.is_grad_enabled() and isinstance(value, Tensor) and not value.requires_grad:
        raise InputError(
            "job: loss",
            "has no graph for backward, so it does not depend on the model's trainable weights",
            "compute it from the model's output without .item(), .detach(), numpy or no_grad, and let some weights require gradients",
        )
    return value


def _torch_objective(loss: TorchLoss) -> Objective:
    def total(model: nn.Module, batch: Batch) -> Tensor:
        target = _target(batch)
        inputs = batch
        if isinstance(batch, dict):
            inputs = {name: value for name, value in batch.items() if value is not target}
        output = logits_of(call_model(model, inputs))
        fix = "give targets that this loss accepts for the model's output, or write your own loss: def loss(output, batch)"
        return explain_errors(lambda: loss.total(output, target), "job: loss", fix)

    counted = partial(_require_graph, total)
    return Objective(counted, lambda batch: loss.count(_target(batch)), "samples", calls_model_itself=False)


def _target(batch: Batch) -> Tensor:
    """Return the target in a batch, which one of torch's losses needs: its field labels, targets or
    target if it is a dict, or its second element if it is a pair. Raises InputError if the batch
    has no such tensor."""
    if isinstance(batch, dict):
        named = [name for name in TARGETS if isinstance(batch.get(name), Tensor)]
        if len(named) > 1:
            raise InputError(
                "data",
                f"each batch has the fields {' and '.join(named)}, so it is not known which one is the target",
                "rename the others; or write your own loss: def loss(output, batch)",
            )
        if named:
            return batch[named[0]]
    elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1]
    raise InputError(
        "data",
        f"each batch is {describe_batch(batch)}, without a target, which the loss or the metric needs",
        "let samples be (input, target), or dicts with a 'labels' key; or write your own loss: def loss(output, batch)",
    )


def predictions_and_targets(objective: Objective, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return (predictions, targets) of a batch, the arguments of a metric.

    objective  the job's loss
    outputs    what the model returned for `batch`

    If the loss is a cross entropy with `targets`, as for every task, return the logits, (items,
    classes), and the labels, (items,). They are those of the items (tokens or samples) that count
    in the loss. Otherwise return the model's output, or its `logits` if it has them, and the target
    of the batch. 16-bit predictions become fp32. Raises InputError if the batch has no target.
    """
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor) and found.is_floating_point():
        found = found.float()
    if objective.targets is None:
        return found, _target(batch)
    logits, labels = logits_of(found).flatten(0, -2), objective.targets(batch).flatten()
    counts = labels != IGNORED
    return logits[counts], labels[counts]
