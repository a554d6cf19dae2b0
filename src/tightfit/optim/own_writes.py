"""Tells writes of the optimizer to a weight from those of others, such as load_state_dict, a clipping of weights
or an embedding's max_norm, which masters in fp32 have to follow."""

from __future__ import annotations

from torch import Tensor

from tightfit._torch.tensors import version_of

_VERSION = "_tightfit_own_version"  # attribute of a weight: its version counter after the last write of its own


def note_own_write(weight: Tensor) -> None:
    """Call after the optimizer has written to a weight, and after the weight was gathered."""
    setattr(weight, _VERSION, version_of(weight))


def is_noted(weight: Tensor) -> bool:
    """Return whether `note_own_write` was called for a weight."""
    return hasattr(weight, _VERSION)


def written_by_others(weight: Tensor) -> bool:
    """Return whether a weight was written since `note_own_write`, or was never noted. Writes to `weight.data`
    are not seen."""
    return getattr(weight, _VERSION, None) != version_of(weight)


__all__ = ["is_noted", "note_own_write", "written_by_others"]
