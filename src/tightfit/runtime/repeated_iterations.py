"""Loops whose iterations are all alike, so that a trace on fake tensors runs only some of them.

A method that repeats the same work, such as the chunks of a loss, writes its loop as `for n in
repeated_iterations(range(chunks))`. In training the loop runs in full. The dry run and the recorder
use the context `iterations_chosen_by` to run only some of the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Taker = Callable[[Sequence[int]], Iterator[int]]

_taker: ContextVar[Taker] = ContextVar("taker", default=iter)


def repeated_iterations(indices: Sequence[int]) -> Iterator[int]:
    """Return an iterator over the indices of a loop: all of `indices`, or, inside the context
    `iterations_chosen_by`, only those that it chooses.

    Use it only if every iteration but the last does the same work, and if no tensor that an
    iteration creates is alive after that iteration.
    """
    return _taker.get()(indices)


@contextmanager
def iterations_chosen_by(taker: Taker) -> Iterator[None]:
    """Context manager in which `repeated_iterations(indices)` returns `taker(indices)`. So `taker`
    chooses which iterations of a loop run."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def representative_iterations(indices: Sequence[int]) -> Iterator[int]:
    """Return the first two indices of a loop and the last one; all indices if there are at most
    three. The second iteration represents those that are left out.

    Example: of 8 iterations, 0, 1 and 7 run. Iterations 2 to 6 would begin and end with as much
    memory in use as iteration 1.
    """
    return iter(indices if len(indices) <= 3 else (indices[0], indices[1], indices[-1]))


__all__ = ["iterations_chosen_by", "repeated_iterations", "representative_iterations"]
