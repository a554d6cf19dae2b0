"""Seed, save and restore the random number generators, and run code that must not change their
states.

`evaluating` runs code with a model in evaluation mode and restores the mode afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch. torch's include those of all
    CUDA devices."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of this process's random number generators: Python's, NumPy's, and torch's
    on the CPU and on the current CUDA device. The dict contains only values that JSON can store."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "torch": _as_text(torch.get_rng_state()),
        "cuda": [_as_text(torch.cuda.get_rng_state())] if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, numpy.asarray(keys).tolist(), position, has_gauss, gauss),
    }


def _as_text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_text(state: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8)


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states of the random number generators.

    states  what `random_states` returned, perhaps in another process whose CUDA device had another
            index
    """
    torch.set_rng_state(_from_text(states["torch"]))
    saved = states["cuda"]
    if saved and torch.cuda.is_available():
        number = torch.cuda.current_device()
        # older checkpoints have the states of all devices that were visible to the process
        torch.cuda.set_rng_state(_from_text(saved[number] if number < len(saved) else saved[0]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), *rest))


@contextmanager
def rng_preserved() -> Iterator[None]:
    """Context manager for code that draws random numbers. At the end, the generators get back the
    states that they had at the beginning."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager in which `model` is in evaluation mode. At the end, each of its modules gets
    back its previous mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
