"""Masks: what transformers asks a device about each batch, and knows already.

Where a batch has no attention mask, transformers looks in each forward whether the positions of its tokens begin anew within a
row, as they do where several sequences are packed into one. It reads the answer on the host, which waits until the device has
done all it was given. Positions that a model numbers itself, from 0 on, never begin anew.

Where a batch has one, transformers looks in each forward whether it hides something. The host has looked at the batch before it
was copied, and has left out a mask that hides nothing: one that is still there hides something, and the device is not asked.
With FlashAttention's own package transformers unpads each batch on the host, mask or not: nothing here spares it that.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from tightfit.models.objective import Batch

BY_THE_TOKENS = ("cumsum", "get_rope_index", "create_position_ids")  # what numbers positions by what a batch holds
GROUPS = "group_ids"  # numbers the images of a row, which is no position
MASKS = "transformers.masking_utils"
PADDING = ("attention_mask", "decoder_attention_mask")  # what a batch calls masks that hide its padding
LOOK_AT_MASKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "fast_all")  # whether they hide nothing


def numbers_in_order(model: nn.Module) -> bool:
    """Whether a model of transformers numbers the positions of a row one after another, whatever the tokens are: nothing in the
    files that its classes come from looks at them for it. Of other code nobody knows."""
    files = {
        kind.__module__ for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)
    }
    return MASKS in sys.modules and all(_in_order(name) for name in files if not name.startswith("torch."))


@lru_cache(64)
def _in_order(name: str) -> bool:
    if not name.startswith(("transformers.", "tightfit.")):
        return False
    try:
        source = inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return False
    lines = [line for line in source.splitlines() if GROUPS not in line]
    return not any(word in line for line in lines for word in BY_THE_TOKENS)


def masks_unread(
    loss_sum: Callable[[Batch], Tensor], model: nn.Module, without_full: bool = False
) -> Callable[[Batch], Tensor]:
    """`loss_sum` that does not look at positions on the device, where the batch brings none and the model numbers them in order,
    nor at masks; the same function where there is nothing to spare.

    without_full  whether masks of a batch that hide nothing are left out on the host: those that it has hide something
    """
    in_order = numbers_in_order(model)
    if MASKS not in sys.modules or not (in_order or without_full):
        return loss_sum
    masks = importlib.import_module(MASKS)

    def unread(batch: Batch) -> Tensor:
        with ExitStack() as replacements:
            if isinstance(batch, dict) and in_order and "position_ids" not in batch:
                replacements.enter_context(_replaced(masks, "find_packed_sequence_indices", _one_sequence_each))
            if isinstance(batch, dict) and without_full and any(name in batch for name in PADDING):
                for name in LOOK_AT_MASKS:
                    replacements.enter_context(_replaced(masks, name, partial(_hides, vars(masks).get(name))))
            return loss_sum(batch)

    return unread


def _hides(looks: Any, padding_mask: Tensor | None, *more: Any, **named: Any) -> Any:
    """Whether a mask is needless, as `looks` says: one that is there is not. Of a fake one nobody has looked at the values."""
    known = padding_mask is not None and not is_fake(padding_mask)
    return False if known else looks(padding_mask, *more, **named)


def _one_sequence_each(position_ids: Tensor) -> None:
    return None


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name, None)
    if before is None:  # a version of transformers that does not ask
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


__all__ = ["PADDING", "masks_unread", "numbers_in_order"]
