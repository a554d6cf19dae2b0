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


def turns(of: Sequence[int]) -> Iterator[int]:
    """The indices that a loop goes over: all of them, unless `iterations_chosen_by` is active.

    Use it only where every iteration but the last does the same, and where no iteration leaves
    behind a tensor that it made.
    """
    return _taker.get()(of)


@contextmanager
def taken_by(taker: Taker) -> Iterator[None]:
    """Within the context, `taker(indices)` decides which iterations `repeated_iterations` yields."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def few(of: Sequence[int]) -> Iterator[int]:
    """The first two iterations and the last. The second one represents all that are left out.

    For 8 iterations these are 0, 1 and 7. Iterations 2 to 6 find and leave the same memory as
    iteration 1 did. Three iterations or fewer are all run.
    """
    return iter(of if len(of) <= 3 else (of[0], of[1], of[-1]))


__all__ = ["few", "taken_by", "turns"]
