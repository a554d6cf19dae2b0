"""Defines the logits and labels of each task, which its cross entropy compares."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.models.batches import IGNORED, LABEL_COUNT_KEY, Batch, describe_batch
from tightfit.models.call_model import call_by_name, run_model, shifted_right


def next_token_targets(batch: Batch) -> Tensor:
    """Return the labels of a batch, (batch, sequence), shifted left by one: position t gets the
    label of position t + 1, and the last position gets IGNORED (-100), which does not count in the
    loss. Example: [5, 6, 7] becomes [6, 7, IGNORED]."""
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def batch_labels(batch: Batch) -> Tensor:
    """Return the labels of a batch that is a dict."""
    return batch["labels"]


def model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model with every field of the batch except its labels, by name, and return the
    logits that it returns."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", LABEL_COUNT_KEY)}
    output = call_by_name(model, inputs)
    if getattr(output, "aux_loss", None) is not None:
        raise InputError(
            "job: model.output_router_logits",
            "the model returns a loss of its router (aux_loss), which the cross entropy does not contain",
            "set output_router_logits to false; or, in a model of your own, give the job a loss that adds it",
        )
    return logits_of(output)


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output: the output itself, or its attribute `logits`. Raises InputError
    if it has none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            "job: model",
            f"returns {type(output).__name__}, which has no logits",
            "let the model return logits, as a tensor or as the attribute .logits, or give the job its own loss",
        )
    return logits


def seq2seq_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of an encoder-decoder for a batch. Its decoder reads the labels shifted
    right by one position (teacher forcing), or the batch's decoder_input_ids if the batch has
    them."""
    if "decoder_input_ids" not in batch:
        batch = {**batch, "decoder_input_ids": shifted_right(model, batch["labels"])}
    return model_logits(model, batch)


def class_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a classifier for a batch: a dict, or a pair of which it gets the first item."""
    if isinstance(batch, dict):
        return model_logits(model, batch)
    return logits_of(run_model(model, batch[0]))


def class_targets(batch: Batch) -> Tensor:
    """Return the labels of a batch, which is a dict with the key labels, or a pair (input, label). Raises
    InputError for other batches."""
    if isinstance(batch, dict) and "labels" not in batch:
        raise InputError(
            "data",
            f"each batch is {describe_batch(batch)}, without labels",
            "add the key 'labels' to the samples, or give the job its own loss",
        )
    if not isinstance(batch, dict) and (isinstance(batch, Tensor) or len(batch) != 2):
        raise InputError(
            "data",
            f"each batch is {describe_batch(batch)}, so it is not known which of them are the labels",
            "let samples be (input, label), or dicts with the key 'labels'; or give the job its own loss",
        )
    return batch["labels"] if isinstance(batch, dict) else batch[1]
