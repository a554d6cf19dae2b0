"""Defines batches, and what is read from one without a model: its samples, and how many of its labels count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tightfit.errors import InputError

# One batch as the data yields it: usually dict[str, Tensor], else what torch's default_collate
# returns.
Batch = Any
IGNORED = -100  # the label of a position that does not count in the loss
LABEL_COUNT_KEY = "tightfit: labelled"  # the key of a batch's LabelCount, once it is on the device


class LabelCount:
    """Holds how many labels of a batch count in the loss: `count` of `total` labels are not IGNORED
    (-100). The argument `of` becomes the attribute `total`.

    The host counts the labels before it copies the batch to the device, because reading the count
    from the device would make the host wait.

    This is a plain class, so torch.compile treats it as an opaque object and does not look at its
    numbers. A new count therefore causes no recompilation.
    """

    def __init__(self, count: int, of: int) -> None:
        self.count, self.total = count, of

    def scaled_to(self, labels: int) -> int:
        """Return how many of `labels` labels would count if their share were the same as in this
        batch, rounded up.

        Example: if 3 of 4 labels count, scaled_to(10) is 8.
        """
        return -(-labels * self.count // max(self.total, 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count}, {self.total})"


def sample_count(batch: Batch) -> int:
    """Return how many samples a batch has: the size of dim 0 of its first tensor.

    Raises InputError if the batch contains no tensor.
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
    """Return what a batch adds to the throughput: the number of its token positions, padding
    included, if it has `input_ids`; else the number of its samples."""
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return sample_count(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with `function` applied to each tensor in its nested dicts, lists and tuples.
    Other values do not change."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def describe_batch(batch: Batch) -> str:
    """Return what a batch is, for a message: "a dict with the keys a, b"."""
    if isinstance(batch, dict):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"
