"""Lets the recomputation of a block draw the same numbers from Python's and NumPy's global random
number generators as its original forward did. For torch's generators, torch's checkpoint does this.

Most blocks draw no such numbers, so the check whether one did has to be cheap: about 0.03 ms for
each call of a block. `random.getstate` takes 0.01 ms. NumPy's `get_state` takes 0.03 ms, so it is
called only if the memory of the state has changed, or if the state holds a stored normal number.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
import torch

_MT19937_BYTES = 2500  # state of a Mersenne Twister: 624 numbers of 32 bits, and a position


class _Generator(Protocol):
    def state(self) -> Any:
        """Return the state. As long as it does not change, this is the same object."""

    def restore(self, state: Any) -> None:
        """Set the state to one that `state` has returned."""


class _PythonGenerator:
    """The generator of Python's module `random`."""

    def __init__(self) -> None:
        self.last: Any = None

    def state(self) -> Any:
        now = random.getstate()
        if self.last is None or _end(now) != _end(self.last):
            self.last = now
        return self.last

    def restore(self, state: Any) -> None:
        random.setstate(state)
        self.last = state


def _end(state: Any) -> tuple[Any, ...]:
    """Return the part of a state of Python's generator that tells whether the state has changed: the
    last four of its 624 numbers of 32 bits, the position, and the stored normal number. A draw
    advances the position. At the end of the 624 numbers, it replaces all of them."""
    return state[1][-5:], state[2]


class _NumPyGenerator:
    """The generator of the functions in `numpy.random`, such as numpy.random.rand.

    Its state has two parts: that of its bit generator, and possibly a normal number. It draws
    normal numbers in pairs, and stores the second one for the next call.
    """

    def __init__(self) -> None:
        self.last: tuple[bytes | None, dict[str, Any]] = (None, {})

    def state(self) -> Any:
        memory, last = self.last
        now = _memory_of_bits()
        if now is not None and now == memory:
            if not last["has_gauss"]:
                return self.last
            # a draw of the stored number does not change the bits
            copy = _numpy_state()
            if copy["has_gauss"]:  # the stored number is still there
                return self.last
        else:
            copy = _numpy_state()
        self.last = now, copy
        return self.last

    def restore(self, state: Any) -> None:
        numpy.random.set_state(state[1])
        self.last = state


def _memory_of_bits() -> bytes | None:
    """Return the memory of the bit generator's state. Return None if the user has replaced the bit
    generator by one of another type, with numpy.random.set_bit_generator."""
    bits = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, numpy.random.MT19937):
        return None
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _numpy_state() -> dict[str, Any]:
    state: Any = numpy.random.get_state(legacy=False)
    return state


class GlobalGenerators:
    """Python's and NumPy's global random number generators. The recomputed blocks of a model share
    one such object, because it copies a state only once if several blocks start with it."""

    def __init__(self) -> None:
        self.each: tuple[_Generator, ...] = (_PythonGenerator(), _NumPyGenerator())


class SameDraws:
    """One call of a forward that is recomputed later. Each recomputation draws the same numbers from
    the global generators as the original forward.

    forward     the forward of a block or of several blocks
    generators  the generators
    """

    def __init__(self, forward: Callable[..., Any], generators: GlobalGenerators) -> None:
        self.forward, self.generators = forward, generators
        self.before: list[tuple[_Generator, Any]] | None = None  # the generators to rewind, and their states

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. The first call is the original forward, each later one a recomputation:
        after it, the generators have the states that they had before it.

        torch.compile traces only the forward. It runs this whole method uncompiled where it cannot
        trace the forward, as with Python's random numbers.
        """
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        if self.before is not None:
            with _rewound(self.before):
                return self.forward(*args, **kwargs)
        self.before = [(generator, generator.state()) for generator in self.generators.each]
        output = self.forward(*args, **kwargs)
        # a generator from which the forward drew nothing need not be rewound
        self.before = [(generator, state) for generator, state in self.before if generator.state() is not state]
        return output


@contextmanager
def _rewound(before: list[tuple[_Generator, Any]]) -> Iterator[None]:
    """Context manager that sets generators to given states, and on exit to the states that they had
    on entry."""
    now = [(generator, generator.state()) for generator, _ in before]
    for generator, state in before:
        generator.restore(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.restore(state)
