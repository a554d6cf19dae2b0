"""Makes batches of the user's own samples: converts samples to tensors, checks them against the
model, pads them, and stacks them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from tightfit.data.samples import ModelInput
from tightfit.errors import InputError, TightfitWarning
from tightfit.models.batches import IGNORED, Batch

_UNCHANGED = Tensor, bool, int, float, np.number, np.bool_


def as_tensors(sample: Any) -> Any:
    """Return a sample with its NumPy arrays and its lists of numbers converted to tensors.

    The values in dicts, tuples and other lists are converted one by one; these lists become tuples.
    Tensors and single numbers do not change. Example: {"x": [1, 2], "y": 3} becomes
    {"x": tensor([1, 2]), "y": 3}.

    Raises InputError if the sample contains anything else, such as a string.
    """
    if isinstance(sample, _UNCHANGED):
        return sample
    if type(sample) is tuple and all(type(value) is Tensor for value in sample):
        return sample  # the usual case, which needs no copy
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "biufc":
        return torch.from_numpy(sample.copy())  # copied: the dataset's array may be read-only
    if isinstance(sample, dict):
        return {name: as_tensors(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        values = [as_tensors(value) for value in sample]
        return type(sample)(*values) if hasattr(sample, "_fields") else tuple(values)
    if isinstance(sample, list):
        array = _array_of(sample)
        return tuple(as_tensors(value) for value in sample) if array is None else torch.from_numpy(array)
    raise InputError(
        "data",
        f"a sample holds a {type(sample).__name__}, not a tensor or number",
        "let the dataset turn this value into a tensor, or remove the value from the sample; for graphs, boxes and other batches "
        "of your own, write the loop with tightfit.prepare",
    )


def _array_of(values: list[Any]) -> NDArray[Any] | None:
    """Return nested lists of numbers as an array. Return None if the lists contain anything but
    numbers, or if inner lists differ in length, so that they form no array."""
    innermost: Any = values
    while isinstance(innermost, list) and innermost:
        innermost = innermost[0]
    if not isinstance(innermost, int | float | np.number):
        return None
    try:
        array = np.array(values)
    except ValueError:
        return None
    return array if array.dtype.kind in "biuf" else None


def tensors_in(sample: Any) -> list[Tensor]:
    """Return all tensors in a sample of nested dicts and tuples."""
    if isinstance(sample, Tensor):
        return [sample]
    values = sample.values() if isinstance(sample, dict) else sample if isinstance(sample, tuple) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def items_in(sample: Any) -> int:
    """Return the number of tokens of a sample if it is a dict with `input_ids`. Return 1 for any
    other sample."""
    return sample["input_ids"].numel() if isinstance(sample, dict) and "input_ids" in sample else 1


_LABELS_FIX = {
    "causal-lm": "add a field named labels, a copy of input_ids, which the task shifts by one",
    None: "add a field named labels (to predict the next token, a copy of input_ids, with model.task: causal-lm, which shifts the "
    "copy by one)",
}


def warn_unshifted(sample: Any, model: ModelInput) -> None:
    """Issue a TightfitWarning if the labels of a sample are probably meant to be shifted by one
    position. They will not be shifted, because the job gives the model no task.

    A sample is taken for one of a causal language model if it has input_ids and labels of the same
    shape. Jobs with their own loss get no warning, nor do token classifiers of transformers.
    """
    if model.task is not None or model.own_loss or model.is_token_classifier or not isinstance(sample, dict):
        return
    ids, labels = sample.get("input_ids"), sample.get("labels")
    if isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.dim() and ids.shape == labels.shape:
        warnings.warn(
            "samples have input_ids and labels of the same shape, and the model has no task, so labels are not shifted: "
            'with model: {python: "file.py:function", task: causal-lm} they are shifted by one, to predict the next token; '
            "with task: classification they are used unshifted, without this warning",
            TightfitWarning,
            stacklevel=2,
        )


def check_labelled(sample: Any, model: ModelInput) -> None:
    """Raise InputError if a sample has no labels, or not in the form that the loss of the model's
    task needs: a dict with "labels" or, for classification and models without a task, a tuple
    (input, label). Jobs with their own loss are not checked."""
    if model.own_loss:
        return
    if isinstance(sample, dict):
        if "labels" not in sample:
            raise InputError(
                "data",
                f"samples have the fields {', '.join(map(str, sample))} and no labels",
                f"{_LABELS_FIX.get(model.task, 'add a field named labels')}, or give the job a loss",
            )
    elif model.task not in (None, "classification"):
        raise InputError(
            "data",
            f"samples are a {type(sample).__name__}, and a {model.task} model takes named fields",
            "let samples be dicts with input_ids and labels, or, for (input, target) samples, give the job a loss",
        )
    elif not isinstance(sample, tuple) or len(sample) != 2:
        items = f" of {len(sample)} items" if isinstance(sample, tuple) else ""
        raise InputError(
            "data",
            f"samples are a {type(sample).__name__}{items}, and the default loss needs an input and a label",
            "let samples be (input, label), or dicts with a field named labels, or give the job a loss",
        )


def warn_unmasked(samples: list[Any]) -> None:
    """Issue a TightfitWarning if samples are dicts whose rows (1-D tensors) differ in length, and they
    have neither an attention mask nor input_ids, for which one is made. The model then cannot tell
    the padding from the samples, and a row's padding depends on the other samples of its
    micro-batch."""
    if not isinstance(samples[0], dict) or {"attention_mask", "input_ids"} & samples[0].keys():
        return
    rows = {name for name, value in samples[0].items() if isinstance(value, Tensor) and value.dim() == 1}
    uneven = sorted(name for name in rows if len({len(sample[name]) for sample in samples if name in sample}) > 1)
    if uneven:
        warnings.warn(
            f"samples differ in the length of {', '.join(uneven)}, and have no attention_mask. Shorter ones are padded with "
            "zeros to the longest of their micro-batch, so losses depend on the size of a micro-batch unless the model ignores "
            "the padding. Pad the samples to one length, or add a mask that the model uses",
            TightfitWarning,
            stacklevel=2,
        )


def collate(samples: list[Any], model: ModelInput) -> Batch:
    """Return a batch of samples, stacked by torch's default_collate. If the samples are dicts,
    their 1-D tensors are first padded to the longest of the batch.

    samples: the results of `as_tensors`. Raises InputError if the samples differ in fields or
    shapes, or if a token id or a class label is out of the model's range.
    """
    if isinstance(samples[0], dict):
        samples = _pad(samples, model)
    try:
        batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise InputError(
            "data",
            f"samples cannot be stacked ({str(error).splitlines()[0]})",
            "let all samples have the same fields and shapes (rows of numbers in dicts are padded); for graphs, boxes and other "
            "batches of your own, write the loop with tightfit.prepare",
        ) from None
    _check_ids(batch, model)
    return batch


def _pad(samples: list[dict[str, Any]], model: ModelInput) -> list[dict[str, Any]]:
    """Return the samples with their rows (1-D tensors) padded on the right to the longest row of
    the same field: labels with IGNORED (-100), other fields with 0. Raises InputError for labels that
    are no class numbers, of which none can mean "does not count".

    If input_ids were padded and the samples have no attention mask, each sample gets one, except
    for causal-lm, which needs none. Example: input_ids of 3 and 5 tokens both become 5 long; the
    masks are 1 1 1 0 0 and 1 1 1 1 1.
    """
    rows = [name for name, value in samples[0].items() if isinstance(value, Tensor) and value.dim() == 1]
    shared = [name for name in rows if all(name in sample for sample in samples)]
    longest = {name: max(len(sample[name]) for sample in samples) for name in shared}
    if all(len(sample[name]) == length for sample in samples for name, length in longest.items()):
        return samples
    if "input_ids" in longest and "attention_mask" not in samples[0] and model.task != "causal-lm":
        longest["attention_mask"] = longest["input_ids"]
        samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples]
    if "labels" in longest and any(len(sample["labels"]) < longest["labels"] for sample in samples):
        _refuse_padded_numbers(samples[0]["labels"])
    fills = {name: IGNORED if name == "labels" else 0 for name in longest}
    return [
        sample
        | {
            name: pad(sample[name], (0, length - len(sample[name])), value=fills[name])
            for name, length in longest.items()
        }
        for sample in samples
    ]


def _refuse_padded_numbers(labels: Tensor) -> None:
    if labels.is_floating_point():
        raise InputError(
            "data",
            "labels are real numbers of different lengths, and their padding would be trained on",
            "pad them in the dataset, add a field with a mask, and give the job a loss that reads it",
        )


def _check_ids(batch: Batch, model: ModelInput) -> None:
    """Raise InputError if a token id of a batch has no embedding in the model, or, for
    classification, if a label is not one of the model's classes. On a GPU such ids would abort the
    process without a clear error."""
    if isinstance(batch, dict) and "input_ids" in batch:
        model.check_ids(batch["input_ids"])
    if model.task == "classification" and not model.own_loss:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            model.check_labels("data", labels[labels != IGNORED].numpy())
