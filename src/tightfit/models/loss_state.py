"""The state of losses, such as a count of calls by which a weight grows. Forwards that are no training
leave it as it is.

`objective_of` names each job's loss here, and `caches.isolated_model_caches`, inside which models run on
fake tensors, restores what they have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_LOSSES: list[weakref.ref[Any]] = []


class ObjectState:
    """The attributes of an object, and what is in those that are lists, dicts and sets; for a module, those of
    its parts, too. Values in tensors are not copied."""

    def __init__(self, owner: Any) -> None:
        parts = list(owner.modules()) if isinstance(owner, nn.Module) else [owner]
        dicts = [vars(part) for part in parts if hasattr(part, "__dict__")]
        inner = [value for mapping in dicts for value in mapping.values() if type(value) in (list, dict, set)]
        self._before = [(mapping, mapping.copy()) for mapping in (*dicts, *inner)]

    @property
    def has_changed(self) -> bool:
        return any(_differ(one, before) for one, before in self._before)

    def restore(self) -> None:
        for one, before in self._before:
            if _differ(one, before):
                one.clear()
                if isinstance(one, list):
                    one.extend(before)
                else:
                    one.update(before)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, set) or len(one) != len(other):
        return bool(one != other)
    if isinstance(one, list):
        return any(a is not b for a, b in zip(one, other, strict=True))
    return any(key not in other or other[key] is not value for key, value in one.items())


def note_loss(loss: Any) -> None:
    """Keep the state of `loss` in forwards that are no training. Functions have none that is known."""
    owner = getattr(loss, "__self__", loss)  # of a bound method
    if isinstance(owner, type) or not getattr(owner, "__dict__", None) or any(one() is owner for one in _LOSSES):
        return
    try:
        _LOSSES.append(weakref.ref(owner))
    except TypeError:  # has no weak references
        return
    _LOSSES[:] = [one for one in _LOSSES if one() is not None]


@contextmanager
def keeping_losses() -> Iterator[list[ObjectState]]:
    """A context in which calls of the jobs' losses change none of their attributes for good. It yields the
    states as they were."""
    states = [ObjectState(owner) for one in _LOSSES if (owner := one()) is not None]
    try:
        yield states
    finally:
        for state in states:
            state.restore()


__all__ = ["ObjectState", "keeping_losses", "note_loss"]
