"""Lets the user's datasets draw random numbers from Python, NumPy and torch without changing the
random numbers of the training.

The states of the global generators are replaced before a dataset is called, and restored
afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

States = tuple[Any, Any, Tensor]


class GeneratorStates:
    """Holds a state of Python's, NumPy's and torch's random generators, separate from the state of
    the global generators. At first it is the state after seeding all three with `seed`."""

    def __init__(self, seed: int) -> None:
        outside = _states()
        seed_generators(seed)
        self.inside = _states()
        _restore(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside this context, the global generators of Python, NumPy and torch continue from this
        object's state. On exit, their state is saved in this object, and they get back the state
        that they had on entry."""
        outside = _states()
        _restore(self.inside)
        try:
            yield
        finally:
            self.inside = _states()
            _restore(outside)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Context manager: on exit, the global generators of Python, NumPy and torch get back the state
    that they had on entry."""
    outside = _states()
    try:
        yield
    finally:
        _restore(outside)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


def numbers_drawn() -> tuple[Any, ...]:
    """Return what says how many numbers were drawn from the global generators of Python and NumPy since they got a seed."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


def _states() -> States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
