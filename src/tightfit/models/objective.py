"""The training objective: the sum of the losses of a batch, and the number of items in that sum.

The engine, the loss methods and the dry run all read a job's loss through `Objective`. Sum and
count are kept apart so that any split of a batch gives the gradients of the whole batch. The step
divides by the count of the whole step, never by the number of micro-batches.

Example: a step has two micro-batches with 10 and 30 labels that count. The mean of the two
micro-batch means weights the first ten labels too much. (sum_1 + sum_2) / 40 is the mean over all
40 labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.job_sections.model import Task
from tightfit.models.losses import TorchLoss, explain_errors, torch_loss

# One batch as the data yields it: usually dict[str, Tensor], else what torch's default_collate
# returns.
Batch = Any
IGNORED = -100  # the label of a position that does not count in the loss
LABEL_COUNT_KEY = "tightfit: labelled"  # the key of a batch's LabelCount, once it is on the device


class LabelCount:
    """How many of a batch's labels count: `count` of `total` are not IGNORED.

    The host counts the labels before it copies the batch to the device, because reading the count
    from the device would make the host wait.

    This is a plain class, so torch.compile treats it as an opaque object and does not look at its
    numbers. A new count therefore causes no recompilation.
    """

    def __init__(self, count: int, of: int) -> None:
        self.count, self.total = count, of

    def scaled_to(self, labels: int) -> int:
        """Return how many of `labels` labels count if the proportion is the same, rounded up.

        Example: if 3 of 4 labels count, scaled_to(10) is 8.
        """
        return -(-labels * self.count // max(self.total, 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count}, {self.total})"


@dataclass(frozen=True)
class Objective:
    """A job's loss as a sum and a count, which can be added up over micro-batches and data ranks.

    total    (model, batch) -> the sum of the losses of the items that count, a scalar tensor
    count    batch -> how many items count, an int; it must not need the model
    unit     what an item is: "tokens" or "samples"
    logits   (model, batch) -> logits of shape (..., classes); None if the loss is not a cross
             entropy
    targets  batch -> labels of shape (...), IGNORED where a position does not count; None if
             `logits` is None

    The chunked loss is built from `logits` and `targets`.
    """

    total: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    unit: str = "samples"
    logits: Callable[[nn.Module, Batch], Tensor] | None = None
    targets: Callable[[Batch], Tensor] | None = None


def sample_count(batch: Batch) -> int:
    """Return how many samples a batch has: the size of dim 0 of its first tensor.

    Raises InputError for a batch without tensors.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    for value in values:
        if isinstance(value, Tensor | dict | list | tuple):
            return sample_count(value)
    raise InputError(
        "data", f"a batch of {type(batch).__name__} holds no tensor", "yield tensors, or dicts or tuples of tensors"
    )


def processed_count(batch: Batch) -> int:
    """Return the number of items that throughput counts: token positions, padding included, if the
    batch has `input_ids`, else samples."""
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return sample_count(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the batch with `function` applied to each of its tensors. Other leaves do not
    change."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def cross_entropy_objective(
    logits: Callable[[nn.Module, Batch], Tensor], targets: Callable[[Batch], Tensor], unit: str
) -> Objective:
    """Return the objective of a cross entropy: the sum over the targets that are not IGNORED.

    logits, targets, unit  as in `Objective`

    The loss is computed in fp32, whatever the type of the logits. The objective's `total` raises
    InputError if the model does not return logits for each label, or if a label is not one of the
    model's classes.
    """

    def total(model: nn.Module, batch: Batch) -> Tensor:
        values, labels = logits(model, batch), targets(batch)
        if values.dim() < 2 or values.shape[:-1].numel() != labels.numel():
            raise InputError(
                "job: model",
                f"returns logits of shape {tuple(values.shape)} for labels of shape {tuple(labels.shape)}",
                "let the model return logits of shape (*labels.shape, classes), or give the job its own loss",
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
        return int((targets(batch) != IGNORED).sum())

    return Objective(total, count, unit, logits, targets)


def next_token_targets(batch: Batch) -> Tensor:
    """Return the labels of a batch, (batch, sequence), shifted left by one: position t gets the
    label of position t + 1. Example: [5, 6, 7] becomes [6, 7, IGNORED]."""
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _labels(batch: Batch) -> Tensor:
    return batch["labels"]


def _model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a model that is called with every field of the batch except its
    labels."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", LABEL_COUNT_KEY)}
    return _logits_of(call_by_name(model, inputs))


def _logits_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise InputError(
            "job: model",
            f"returns {type(output).__name__}, which has no logits",
            "let the model return logits, as a tensor or as the attribute .logits, or give the job its own loss",
        )
    return found


def _seq2seq_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of an encoder-decoder whose decoder reads the labels shifted right by one
    (teacher forcing), or the batch's own decoder_input_ids."""
    if "decoder_input_ids" not in batch:
        batch = {**batch, "decoder_input_ids": _shifted_right(model, batch["labels"])}
    return _model_logits(model, batch)


def _shifted_right(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the decoder's input for the prediction of `labels`.

    If the model has prepare_decoder_input_ids_from_labels, return what this function makes.
    Otherwise return the decoder's start token followed by the labels, which is what transformers
    does for models without that function (M2M100, NLLB-MoE, Blenderbot). Raises InputError if the
    model names no start token.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels=labels)
    config: Any = getattr(model, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise InputError(
            "job: model",
            f"{type(model).__name__} has no config.decoder_start_token_id, the first token of the decoder's input",
            "add the field decoder_input_ids to the samples, or give the model a config with decoder_start_token_id",
        )
    padding = getattr(config, "pad_token_id", None) or 0
    moved = functional.pad(labels[:, :-1], (1, 0), value=start)
    return moved.masked_fill(moved == IGNORED, padding)


def _class_logits(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, dict):
        return _model_logits(model, batch)
    return _logits_of(model(batch[0]))


def _class_targets(batch: Batch) -> Tensor:
    if isinstance(batch, dict) and "labels" not in batch:
        raise InputError(
            "data",
            f"each batch is {_describe(batch)}, without labels",
            "add the key 'labels' to the samples, or give the job its own loss",
        )
    return batch["labels"] if isinstance(batch, dict) else batch[1]


TASKS: dict[str, Objective] = {
    "causal-lm": cross_entropy_objective(_model_logits, next_token_targets, "tokens"),
    "masked-lm": cross_entropy_objective(_model_logits, _labels, "tokens"),
    "seq2seq-lm": cross_entropy_objective(_seq2seq_logits, _labels, "tokens"),
    "classification": cross_entropy_objective(_class_logits, _class_targets, "samples"),
}
assert set(TASKS) == set(get_args(Task))


def objective_of(loss: Any, task: str | None) -> Objective:
    """Return the objective of a job.

    loss  an Objective; a loss of torch's (a class, an instance or a function); a callable
          `loss(output, batch)`; or None, which takes the objective of `task`
    task  the model's task (a key of TASKS); None means classification

    A callable returns the mean loss over the samples of `batch`, which is one micro-batch. To get
    its `output`, the model is called with batch["inputs"] or batch[0]. If the batch is a dict
    without "inputs", the model is called with every field except "labels". A mean over anything
    else than samples, such as the tokens that count, would depend on how the batch is split into
    micro-batches: give an Objective instead.

    Raises InputError for a loss of torch's that cannot be split into a sum and a count. The
    objective's `total` raises InputError if the loss is not a scalar tensor or does not require
    gradients.
    """
    if isinstance(loss, Objective):
        return replace(loss, total=partial(_require_graph, loss.total))
    if loss is None:
        return TASKS[task or "classification"]
    standard = torch_loss(loss)
    if standard is not None:
        return _torch_objective(standard)

    def total(model: nn.Module, batch: Batch) -> Tensor:
        output = _call(model, batch)
        value = explain_errors(
            lambda: loss(output, batch),
            "job: loss",
            f"correct the loss; it is called as loss(output, batch), and the data gives {_describe(batch)} as batch",
        )
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(
                "loss",
                f"returned {type(value).__name__}{list(getattr(value, 'shape', []))}, not a scalar tensor",
                "return the mean over the batch's samples, or give a tightfit.Objective",
            )
        return value * sample_count(batch)

    return Objective(partial(_require_graph, total), sample_count, "samples")


def _require_graph(total: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss. Raises InputError if gradients are enabled and the loss has no autograd
    graph."""
    value = total(model, batch)
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
        output = _logits_of(_call(model, inputs))
        fix = "give targets that this loss accepts for the model's output, or write your own loss: def loss(output, batch)"
        return explain_errors(lambda: loss.total(output, target), "job: loss", fix)

    return Objective(partial(_require_graph, total), lambda batch: loss.count(_target(batch)), "samples")


def _target(batch: Batch) -> Tensor:
    """Return the target in a batch for one of torch's losses. Raises InputError if the batch has no
    target."""
    if isinstance(batch, dict):
        for name in ("labels", "targets", "target"):
            if isinstance(batch.get(name), Tensor):
                return batch[name]
    elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1]
    raise InputError(
        "data",
        f"each batch is {_describe(batch)}, without a target, which the loss or the metric needs",
        "let samples be (input, target), or dicts with a 'labels' key; or write your own loss: def loss(output, batch)",
    )


def predictions_and_targets(objective: Objective, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return what the job's loss compares, for metrics with the signature (predictions, targets).

    outputs  what the model returned for `batch`

    If the loss is the cross entropy of a task, the result is (logits, labels) of the items that
    count: shapes (items, classes) and (items,). Else it is the output, or its `logits`, and the
    target of the batch. 16-bit predictions become fp32. Raises InputError if the batch has no
    target.
    """
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor) and found.is_floating_point():
        found = found.float()
    if objective.targets is None:
        return found, _target(batch)
    logits, labels = _logits_of(found).flatten(0, -2), objective.targets(batch).flatten()
    counts = labels != IGNORED
    return logits[counts], labels[counts]


def _describe(batch: Batch) -> str:
    if isinstance(batch, dict):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"


def _call(model: nn.Module, batch: Batch) -> Any:
    if not isinstance(batch, dict):
        return model(batch[0] if isinstance(batch, list | tuple) else batch)
    if "inputs" in batch:
        return model(batch["inputs"])
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return call_by_name(model, inputs)


def call_by_name(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model with named inputs and return its output. Raises InputError if the model's
    forward does not accept these names."""
    if torch.compiler.is_compiling():
        return model(**inputs)
    try:
        return model(**inputs)
    except TypeError as error:
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as wrong:
            raise InputError(
                "data",
                f"samples have the fields {', '.join(inputs)}, and the model's forward does not take these ({wrong})",
                "name the fields as forward names its arguments, or let samples be (input, target)",
            ) from error
        raise
