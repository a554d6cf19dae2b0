"""Masks: skip transformers' check for packed sequences, which makes the host wait for the device.

If a batch has no attention mask, transformers checks in each forward whether the position ids
restart within a row, as they do if several sequences are packed into one row. It reads the answer
on the host, which waits until the device has finished all its work. If the model numbers the
positions itself, from 0 on, they never restart, and the check is not needed.

Example: position ids 0 1 2 0 1 in a row mean two packed sequences of 3 and 2 tokens; 0 1 2 3 4 mean
one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from tightfit.models.objective import Batch

# functions that compute position ids from the content of a batch
POSITIONS_FROM_TOKENS = ("cumsum", "get_rope_index", "create_position_ids")
GROUP_IDS = "group_ids"  # numbers the images of a row; these are no positions
MASKING_MODULE = "transformers.masking_utils"


def numbers_in_order(model: nn.Module) -> bool:
    """Whether a transformers model numbers the positions of a row 0, 1, 2, ..., whatever the tokens
    are.

    It does if the source files of its classes call none of the functions that compute positions
    from tokens. False for models with classes from elsewhere, because their code is not known.
    """
    files = {
        kind.__module__ for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)
    }
    return MASKING_MODULE in sys.modules and all(
        _file_has_sequential_positions(name) for name in files if not name.startswith("torch.")
    )


@lru_cache(64)
def _file_has_sequential_positions(name: str) -> bool:
    if not name.startswith(("transformers.", "tightfit.")):
        return False
    try:
        source = inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return False
    lines = [line for line in source.splitlines() if GROUP_IDS not in line]
    return not any(word in line for line in lines for word in POSITIONS_FROM_TOKENS)


def positions_unread(loss_sum: Callable[[Batch], Tensor], model: nn.Module) -> Callable[[Batch], Tensor]:
    """`loss_sum` (batch -> the sum of its losses) without transformers' check for packed sequences.

    The check is skipped only for batches without position_ids, and only if the model numbers
    positions in order. For other models, `loss_sum` itself is returned.
    """
    if not numbers_in_order(model):
        return loss_sum
    masks = importlib.import_module(MASKING_MODULE)

    def without_check(batch: Batch) -> Tensor:
        if not isinstance(batch, dict) or "position_ids" in batch:
            return loss_sum(batch)
        with _replaced(masks, "find_packed_sequence_indices", _no_packed_sequences):
            return loss_sum(batch)

    return without_check


def _no_packed_sequences(position_ids: Tensor) -> None:
    return None


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name, None)
    if before is None:  # a version of transformers without the check
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


__all__ = ["numbers_in_order", "positions_unread"]
