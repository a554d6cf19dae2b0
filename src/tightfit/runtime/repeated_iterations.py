"""Loops whose iterations are all alike, so that a trace on fake tensors runs only some of them.

A method that repeats the same work, such as the chunks of a loss, writes its loop as
`for n in repeated_iterations(range(chunks))`. In training the loop runs in full. The dry run and
the recorder enter `iterations_chosen_by`, which decides how many iterations they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Taker = Callable[[Sequence[int]], Iterator[int]]

_taker: ContextVar[Taker] = ContextVar("taker", default=iter)


def repeated_iterations(indices: Sequence[int]) -> Iterator[int]:
    """Return an iterator over a loop's indices: all of them, unless `iterations_chosen_by` is
    active.

    Use it only if every iteration but the last does the same work, and if no tensor that an
    iteration makes exists after that iteration.
    """
    return _taker.get()(indices)


@contextmanager
def iterations_chosen_by(taker: Taker) -> Iterator[None]:
    """Within the context, `repeated_iterations(indices)` returns `taker(indices)`, so that `taker`
    chooses the iterations that run."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def representative_iterations(indices: Sequence[int]) -> Iterator[int]:
    """Return the first two of a loop's indices and the last. The second iteration represents those
    that are left out.

    Example: of 8 iterations, 0, 1 and 7 run. Iterations 2 to 6 would begin and end with as much
    memory in use as iteration 1. With three or fewer iterations, all run.
    """
    return iter(indices if len(indices) <= 3 else (indices[0], indices[1], indices[-1]))


__all__ = ["iterations_chosen_by", "repeated_iterations", "representative_iterations"]
