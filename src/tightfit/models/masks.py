"""Skip transformers' checks for attention masks, which make the host wait for the device, or a compiled model
build masks that hide nothing.

In each forward, transformers reads the results of both checks on the host, which waits until the
device has finished all its work. Both results are known beforehand. So `engine/build.py` wraps the
loss of a model on a GPU in `without_mask_checks`, unless the whole model is compiled.

Packed sequences: if a batch has no attention mask, transformers checks whether the position ids
restart within a row, as they do if several sequences are packed into one row. If the model numbers
the positions itself, from 0 on, they never restart, and the check is not needed. Example: position
ids 0 1 2 0 1 in a row mean two packed sequences of 3 and 2 tokens; 0 1 2 3 4 mean one sequence.

Padding: if a batch has an attention mask, transformers checks whether the mask hides anything. The
host looks at each batch before it copies the batch to the device, and leaves out a mask that hides
nothing. A mask that is still in the batch therefore hides something, and the check is not needed.
Example: of two rows with the masks 1 1 1 1 and 1 1 1 0, the second ends in padding, so the batch
keeps its mask. If both were 1 1 1 1, the batch would have no mask.

Compiled models: torch's compiler cannot read the results of the checks. So a model that is compiled as a
whole masks each pair of tokens in every batch, even if nothing is packed or padded. Attention then
computes the pairs that a causal kernel would skip. A batch without a mask and without position ids
needs no mask, so `methods/compile.py` wraps the compiled loss in `without_needless_masks`.

With the package flash-attn, transformers unpads each batch on the host, with or without a mask.
This module does not avoid that.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from tightfit._torch.fake import is_fake
from tightfit.errors import InputError
from tightfit.models.batches import Batch

# functions that compute position ids from the content of a batch
POSITIONS_FROM_TOKENS = ("cumsum", "get_rope_index", "create_position_ids")
GROUP_IDS = "group_ids"  # a cumsum numbers the images of a row: not positions
MASKING_MODULE = "transformers.masking_utils"
# a call of transformers' mask functions that passes position ids, from which they tell packed
# sequences apart
_MASKS_BY_POSITIONS = re.compile(r"create_causal_mask\([^()]*position_ids|[\"']position_ids[\"']: position_ids")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# the keys of a batch under which it has masks that hide padding
PADDING = ("attention_mask", "decoder_attention_mask")
# functions of transformers that check whether a mask hides nothing
MASK_CHECKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "fast_all")


def has_sequential_positions(model: nn.Module) -> bool:
    """Return whether a transformers model always numbers the positions of a row 0, 1, 2, ...,
    whatever the tokens are.

    True if the source files of the model's classes do not contain any of POSITIONS_FROM_TOKENS, the
    names of functions that compute positions from a batch. False if some classes are from packages
    other than torch, transformers and tightfit, because their code is not known.
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


def check_separates_sequences(model: nn.Module, asked: str) -> None:
    """Raise InputError if a model cannot keep several sequences in one row apart by position ids
    that start at 0 in each sequence.

    Transformers' mask functions mask attention between the sequences if the model passes position
    ids to them. Layers that mix neighbouring tokens without attention (convolutions, recurrences,
    linear attention) mix the sequences.

    asked: the setting of the job that puts several sequences in a row, for the message
    """
    takes = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    named = "position_ids" in takes or any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    mixing = next((type(module).__name__ for module in model.modules() if _mixes_tokens(module)), None)
    others = [kind for kind in getattr(config, "layer_types", None) or [] if kind not in _ATTENTION_LAYERS]
    if mixing or others:
        found = f"has {mixing or others[0]} layers, through which tokens of one sequence reach the next one"
    elif not named or not any(_passes_positions(kind) for kind in {type(module) for module in model.modules()}):
        found = "does not pass position_ids to transformers' mask functions, which keep the sequences of a row apart"
    else:
        return
    raise InputError(asked, f"{type(model).__name__} {found}", "use data.packing: padded, or another model")


def _mixes_tokens(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.RNNBase)


def _passes_positions(kind: type[nn.Module]) -> bool:
    return any(_file_passes_positions(base.__module__) for base in kind.__mro__ if issubclass(base, nn.Module))


@lru_cache(256)
def _file_passes_positions(name: str) -> bool:
    if not name.startswith("transformers.models."):
        return False
    try:
        return _MASKS_BY_POSITIONS.search(inspect.getsource(sys.modules[name])) is not None
    except (OSError, TypeError, KeyError):
        return False


def without_mask_checks(
    loss_sum: Callable[[Batch], Tensor], model: nn.Module, without_full: bool = False
) -> Callable[[Batch], Tensor]:
    """Return a function that computes the same as `loss_sum`, but skips two checks of transformers:
    whether a row holds packed sequences, and whether a mask hides nothing.

    loss_sum      batch -> the sum of the batch's losses
    model         the model that `loss_sum` calls
    without_full  True if the batches contain no mask that hides nothing, because the host has left
                  such masks out

    The first check is skipped only for batches without position_ids, and only if the model always
    numbers the positions 0, 1, 2, ... The second check is skipped only if `without_full` is True.
    If neither check can be skipped, `loss_sum` itself is returned.
    """
    in_order = has_sequential_positions(model)
    if MASKING_MODULE not in sys.modules or not (in_order or without_full):
        return loss_sum
    masks = importlib.import_module(MASKING_MODULE)

    def without_checks(batch: Batch) -> Tensor:
        with ExitStack() as replacements:
            if isinstance(batch, dict) and in_order and "position_ids" not in batch:
                replacements.enter_context(_replaced(masks, "find_packed_sequence_indices", _no_packed_sequences))
            if isinstance(batch, dict) and without_full and any(name in batch for name in PADDING):
                for name in MASK_CHECKS:
                    replacements.enter_context(_replaced(masks, name, partial(_hides_nothing, vars(masks).get(name))))
            return loss_sum(batch)

    return without_checks


def without_needless_masks(loss_sum: Callable[[Batch], Tensor], model: nn.Module) -> Callable[[Batch], Tensor]:
    """Return a function that computes the same as `loss_sum`, the loss of a model that is compiled as a
    whole, without the masks of packed and padded sequences for batches that have neither.

    loss_sum  batch -> the sum of the batch's losses
    model     the model that `loss_sum` calls

    A batch with a mask or with position ids is computed as before. So is every batch if the model does not
    always number the positions 0, 1, 2, ...
    """
    if not has_sequential_positions(model):
        return loss_sum
    masks = importlib.import_module(MASKING_MODULE)

    def without_masks(batch: Batch) -> Tensor:
        if not isinstance(batch, dict) or any(name in batch for name in (*PADDING, "position_ids")):
            return loss_sum(batch)
        with (
            _replaced(masks, "find_packed_sequence_indices", _no_packed_sequences),
            # torch before 2.14 answers True while it compiles, and transformers then builds each mask
            _replaced(masks, "is_torchdynamo_exporting", _is_not_exporting),
        ):
            return loss_sum(batch)

    return without_masks


def _is_not_exporting() -> bool:
    return False


def _hides_nothing(check: Any, padding_mask: Tensor | None, *more: Any, **named: Any) -> Any:
    """Stand in for a function of transformers that checks whether a mask hides nothing.

    Return False without reading the mask, because every mask in the batches hides something. If
    there is no mask, or if it is a fake tensor, return the result of the original check instead.

    check         the original check, a function of transformers
    padding_mask  the mask, or None; this and all other arguments are those of `check`
    """
    known = padding_mask is not None and not is_fake(padding_mask)
    return False if known else check(padding_mask, *more, **named)


def _no_packed_sequences(position_ids: Tensor) -> None:
    return None


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name, None)
    if before is None:  # this version of transformers does not have the check
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


__all__ = [
    "PADDING",
    "check_separates_sequences",
    "has_sequential_positions",
    "without_mask_checks",
    "without_needless_masks",
]
