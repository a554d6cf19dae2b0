"""What is minimised: a sum of losses over the items that count, and how many of them a batch has.

Keeping sum and count apart is what lets any split of a batch equal the whole of it: the step divides by the
count of the whole step, never by the number of micro-batches.
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
from tightfit.job import Task
from tightfit.models.losses import TorchLoss, explained, torch_loss

Batch = Any  # what the data yields: usually dict[str, Tensor], else what torch's default_collate makes of samples
IGNORED = -100  # the label of a position that does not count
LABELLED = "tightfit: labelled"  # under which a batch on its device may say how many of its labels count


class Labelled:
    """Of `of` labels `count` are not IGNORED, as the host knows it: a device would have to be waited for.

    A plain class, which torch's compiler passes on without a look at its numbers: other ones compile nothing again.
    """

    def __init__(self, count: int, of: int) -> None:
        self.count, self.of = count, of

    def among(self, labels: int) -> int:
        """How many of so many labels count, where they do in this proportion; rounded up."""
        return -(-labels * self.count // max(self.of, 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count}, {self.of})"


@dataclass(frozen=True)
class Objective:
    """A job's loss, in the two halves that any split of the batch needs.

    total    (model, batch) -> the sum of the losses of the items that count, a scalar tensor
    count    batch -> how many items count, an int; must not need the model
    unit     what an item is: "tokens" or "samples"
    logits   (model, batch) -> (..., classes), and targets: batch -> (...) with IGNORED where nothing counts,
             both for cross entropies only; the chunked loss is built from them
    """

    total: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    unit: str = "samples"
    logits: Callable[[nn.Module, Batch], Tensor] | None = None
    targets: Callable[[Batch], Tensor] | None = None


def sample_count(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor's first dim."""
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
    """What throughput counts: token positions (padding included) of a language batch, else samples."""
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return sample_count(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with `function` applied to each of its tensors."""
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
    """Cross entropy summed over the targets that are not IGNORED, computed in fp32 whatever the logits are."""

    def total(model: nn.Module, batch: Batch) -> Tensor:
        values, labels = logits(model, batch), targets(batch)
        if values.dim() < 2 or values.shape[:-1].numel() != labels.numel():
            raise InputError(
                "job: model",
                f"makes {tuple(values.shape)} of labels {tuple(labels.shape)}, where each label has logits of its own in the last dim",
                "let the model return logits (*labels, classes), or give the job its own loss",
            )
        try:
            return functional.cross_entropy(
                values.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        except IndexError as error:  # of a model of the user's own, whose classes nobody knew before
            raise InputError(
                "data",
                f"has labels that are none of the model's {values.shape[-1]} classes ({error})",
                f"number the classes from 0 to {values.shape[-1] - 1}, or give the model's last layer as many as there are",
            ) from error

    def count(batch: Batch) -> int:
        return int((targets(batch) != IGNORED).sum())

    return Objective(total, count, unit, logits, targets)


def next_token_targets(batch: Batch) -> Tensor:
    """(batch, sequence) labels, as transformers gives them, moved so that position t holds the label of t + 1."""
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _labels(batch: Batch) -> Tensor:
    return batch["labels"]


def _model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of a model called with everything in the batch but its labels."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", LABELLED)}
    return _logits_of(call_by_name(model, inputs))


def _logits_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise InputError(
            "job: model",
            f"returns {type(output).__name__}, which has no logits",
            "let it return them as a tensor or as `.logits`, or give the job its own loss",
        )
    return found


def _seq2seq_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of an encoder-decoder whose decoder reads the labels moved one to the right (teacher forcing)."""
    if "decoder_input_ids" not in batch:
        batch = {**batch, "decoder_input_ids": _moved_right(model, batch["labels"])}
    return _model_logits(model, batch)


def _moved_right(model: nn.Module, labels: Tensor) -> Tensor:
    """What the decoder reads to predict `labels`: as the model says, else the token that it starts with and then the labels, as
    transformers' models without a rule of their own do (M2M100, NLLB-MoE, Blenderbot). Raises InputError."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels=labels)
    config: Any = getattr(model, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise InputError(
            "job: model",
            f"{type(model).__name__} does not say which token its decoder starts with",
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
            "data", f"gives {_described(batch)} and no labels", "add the field labels, or give the job a loss"
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
    """The objective of a job: its own Objective, one of torch's losses, its callable `loss(output, batch)`, or that of the
    model's task.

    A callable returns the mean loss over the samples of `batch`, a micro-batch, and the model is called with
    batch["inputs"] or batch[0], or with everything but "labels" where the batch is a dict without "inputs". A mean over
    something else, such as the tokens that count, depends on how micro-batches cut the batch: that is an Objective's.
    """
    if isinstance(loss, Objective):
        return replace(loss, total=partial(_with_graph, loss.total))
    if loss is None:
        return TASKS[task or "classification"]
    standard = torch_loss(loss)
    if standard is not None:
        return _of_torch(standard)

    def total(model: nn.Module, batch: Batch) -> Tensor:
        output = _call(model, batch)
        value = explained(
            lambda: loss(output, batch),
            "job: loss",
            f"it is called as loss(output, batch), where batch is {_described(batch)}, as the data gives it",
        )
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(
                "loss",
                f"returned {type(value).__name__}{list(getattr(value, 'shape', []))}, not a scalar tensor",
                "return the mean over the batch's samples, or give a tightfit.Objective",
            )
        return value * sample_count(batch)

    return Objective(partial(_with_graph, total), sample_count, "samples")


def _with_graph(total: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """The loss, held to be one that gradients can be had of."""
    value = total(model, batch)
    if torch.is_grad_enabled() and isinstance(value, Tensor) and not value.requires_grad:
        raise InputError(
            "job: loss",
            "does not depend on the model's trainable weights: it has no graph",
            "compute it from the model's output without .item(), .detach(), numpy or no_grad, and let some weights require gradients",
        )
    return value


def _of_torch(loss: TorchLoss) -> Objective:
    def total(model: nn.Module, batch: Batch) -> Tensor:
        target = _target(batch)
        inputs = batch
        if isinstance(batch, dict):
            inputs = {name: value for name, value in batch.items() if value is not target}
        output = _logits_of(_call(model, inputs))
        fix = "let targets suit the model's output, or write def loss(output, batch)"
        return explained(lambda: loss.total(output, target), "job: loss", fix)

    return Objective(partial(_with_graph, total), lambda batch: loss.count(_target(batch)), "samples")


def _target(batch: Batch) -> Tensor:
    """What one of torch's losses compares the output with."""
    if isinstance(batch, dict):
        for name in ("labels", "targets", "target"):
            if isinstance(batch.get(name), Tensor):
                return batch[name]
    elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1]
    raise InputError(
        "data",
        f"gives {_described(batch)}, and the loss needs a target",
        "let samples be (input, target), or dicts with the field labels; or write def loss(output, batch)",
    )


def _described(batch: Batch) -> str:
    if isinstance(batch, dict):
        return f"a dict of {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def _call(model: nn.Module, batch: Batch) -> Any:
    if not isinstance(batch, dict):
        return model(batch[0] if isinstance(batch, list | tuple) else batch)
    if "inputs" in batch:
        return model(batch["inputs"])
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return call_by_name(model, inputs)


def call_by_name(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The model called with named inputs. Raises InputError where it does not take these."""
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
