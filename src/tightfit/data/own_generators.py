"""Generators of random numbers that a dataset has among its attributes, such as
self.rng = numpy.random.default_rng(0), also in its transforms.

They are seeded before each sample, as the global generators are. So a sample does not depend on which
process reads it, or on how many samples were read before.
"""

from __future__ import annotations

import itertools
import random
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightfit.data.order import hash_numbers

DEEPEST = 10  # attributes of attributes that are looked through
MOST_OBJECTS = 10_000  # that are looked through in all
WIDEST = 100  # items of a list or a dict that are looked through: those of transforms are short, those of samples long
_LEAVES = (str, bytes, int, float, complex, type, np.ndarray, Tensor, type(None), ModuleType, FunctionType)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


def own_generators(dataset: Any) -> list[Generator]:
    """Return the generators among the attributes of a dataset, of its attributes and so on, each once."""
    visited: set[int] = set()
    level, found = [dataset], []
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, _LEAVES) or id(value) in visited or len(visited) >= MOST_OBJECTS:
                continue
            visited.add(id(value))
            if isinstance(value, _GENERATORS):
                found.append(value)
            elif isinstance(value, dict):
                below += itertools.islice(value.values(), WIDEST)
            elif isinstance(value, list | tuple):
                below += itertools.islice(value, WIDEST)
            else:
                below += getattr(value, "__dict__", {}).values()
        level = below
    return [one for one in found if one is not torch.default_generator]


def seed_own_generators(generators: list[Generator], seed: int) -> None:
    """Give each generator a seed of its own that follows from `seed`."""
    for number, generator in enumerate(generators):
        own = hash_numbers(seed, number)
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state  # type: ignore[call-arg]
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own % 2**63)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(own % 2**32)
        else:
            generator.seed(own)
