"""What is minimised: a sum of losses over the items that count, and how many of them a batch has.

Keeping sum and count apart is what lets any split of a batch equal the whole of it: the step divides by the
count of the whole step, never by the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.job import Task

Batch = Any  # what the data yields: usually dict[str, Tensor], else what torch's default_collate makes of samples
IGNORED = -100  # the label of a position that does not count


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
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return _logits_of(model(**inputs))


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
    return batch["labels"] if isinstance(batch, dict) else batch[1]


TASKS: dict[str, Objective] = {
    "causal-lm": cross_entropy_objective(_model_logits, next_token_targets, "tokens"),
    "masked-lm": cross_entropy_objective(_model_logits, _labels, "tokens"),
    "seq2seq-lm": cross_entropy_objective(_seq2seq_logits, _labels, "tokens"),
    "classification": cross_entropy_objective(_class_logits, _class_targets, "samples"),
}
assert set(TASKS) == set(get_args(Task))


def objective_of(loss: Any, task: str | None) -> Objective:
    """The objective of a job: its own Objective, its callable `loss(output, batch)`, or that of the model's task.

    A callable returns the mean loss over the samples of `batch`, a micro-batch, and the model is called with
    batch["inputs"] or batch[0], or with everything but "labels" where the batch is a dict without "inputs". A mean over
    something else, such as the tokens that count, depends on how micro-batches cut the batch: that is an Objective's.
    """
    if isinstance(loss, Objective):
        return loss
    if loss is None:
        return TASKS[task or "classification"]

    def total(model: nn.Module, batch: Batch) -> Tensor:
        value = loss(_call(model, batch), batch)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(
                "loss",
                f"returned {type(value).__name__}{list(getattr(value, 'shape', []))}, not a scalar tensor",
                "return the mean over the batch's samples, or give a tightfit.Objective",
            )
        return value * sample_count(batch)

    return Objective(total, sample_count, "samples")


def _call(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, dict):
        if "inputs" in batch:
            return model(batch["inputs"])
        return model(**{name: value for name, value in batch.items() if name != "labels"})
    if isinstance(batch, list | tuple):
        return model(batch[0])
    return model(batch)
