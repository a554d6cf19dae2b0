"""Loops whose iterations are all alike: a trace on fake tensors need not run every one of them.

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
    """The indices that a loop goes over: all of them, unless `iterations_chosen_by` is active.

    Use it only where every iteration but the last does the same, and where no iteration leaves
    behind a tensor that it made.
    """
    return _taker.get()(indices)


@contextmanager
def iterations_chosen_by(taker: Taker) -> Iterator[None]:
    """Within the context, `taker(indices)` decides which iterations `repeated_iterations` yields."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def representative_iterations(indices: Sequence[int]) -> Iterator[int]:
    """The first two iterations and the last. The second one represents all that are left out.

    For 8 iterations these are 0, 1 and 7. Iterations 2 to 6 find and leave the same memory as
    iteration 1 did. Three iterations or fewer are all run.
    """
    return iter(indices if len(indices) <= 3 else (indices[0], indices[1], indices[-1]))


__all__ = ["iterations_chosen_by", "repeated_iterations", "representative_iterations"]
