"""Answers for a model that reads values of fake tensors, so that its forward goes on.

Used to find out what a forward does with the model's parameters and state, where it matters which operations
run, and hardly which values they have. Predictions need more: see `planner/tracing/fake_tensors.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import FakeTensor, known_value
from tightfit._torch.operations import INDEX_PUT, LOCAL_SCALAR_DENSE, UNIQUE
from tightfit.models.known_values import UNKNOWN, compute_known
from tightfit.models.value_reads import ValueReads

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, INDEX_PUT.default)
_UNIQUE = (UNIQUE.default, _aten.unique_dim.default, _aten.unique_consecutive.default)


MOST_GUESSES = 2000  # by one line of the model: a loop may wait for a value that never comes


class GuessedValues(TorchDispatchMode):
    """A mode for fake tensors in which unknown values are guessed: bools are `answer`, and numbers are 1 or
    0. Checks of the data pass (`models/value_reads.py`). A mask of bools chooses all elements, or one.

    asked  whether a value was guessed
    """

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self.answer, self.asked, self._reads = answer, False, ValueReads(MOST_GUESSES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (result := compute_known(func, args, kwargs)) is not UNKNOWN:
            return result
        if not (args and isinstance(args[0], FakeTensor)):
            return func(*args, **kwargs)
        if func is LOCAL_SCALAR_DENSE.default and known_value(args[0]) is None:
            self.asked = True
            if args[0].dtype is torch.bool:
                return self._reads.value(self.answer)
            return self._reads.number((float if args[0].is_floating_point() else int)(self.answer))
        if func is _aten.equal.default:
            self.asked = True
            return self._reads.value(self.answer)
        if func in _INDEXING and any(map(_is_mask, args[1])):
            self.asked = True
            return func(args[0], self._without_masks(args[1]), *args[2:], **kwargs)
        found = self._with_known_shape(func, args, kwargs)
        self.asked = self.asked or found is not None
        return func(*args, **kwargs) if found is None else found

    def _count(self, elements: int) -> int:
        """Return how many of some elements are chosen."""
        return elements if self.answer else min(elements, 1)

    def _without_masks(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Return the indices with one of integers for each dimension of a mask."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and _is_mask(index):
                found += [torch.zeros(self._count(index.numel()), dtype=torch.int64, device=index.device)] * index.dim()
            else:
                found.append(index)
        return found

    def _with_known_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation whose shape depends on values; None for any other operation."""
        given = args[0]
        if func is _aten.nonzero.default:
            return given.new_empty((self._count(given.numel()), given.dim()), dtype=torch.int64)
        if func is _aten.masked_select.default:
            size = torch.broadcast_shapes(given.shape, args[1].shape).numel()
            return given.new_empty(self._count(size))
        if func in _UNIQUE:
            along = args[1] if func is _aten.unique_dim.default else None
            if along is None:
                values, length, inverse = given.new_empty(given.numel()), given.numel(), tuple(given.shape)
            else:
                values, length, inverse = given.new_empty(given.shape), given.shape[along], (given.shape[along],)
            return (
                values,
                given.new_empty(inverse, dtype=torch.int64),
                given.new_empty(length, dtype=torch.int64),
            )
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            return given.new_empty(given.numel(), dtype=torch.int64)
        if func is _aten.bincount.default:
            weights = args[1] if len(args) > 1 else kwargs.get("weights")
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return given.new_empty(max(least, 1), dtype=torch.int64 if weights is None else weights.dtype)
        return None


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


__all__ = ["GuessedValues"]
