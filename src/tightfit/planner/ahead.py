"""What a search will probably estimate, in pieces for copies of its process.

See `tracing/shared_work.py`. The pieces are guesses: which plans a search estimates depends on the
estimates before. A piece that the search does not need costs only time of a processor that is idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tightfit.methods.precision import rounding_of
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import leanest, offloads
from tightfit.planner.parallel_plans import estimate_degrees
from tightfit.planner.parallelism import by_lower_bound, limited_to_batch
from tightfit.planner.tracing.cache import cache_key, is_writable
from tightfit.planner.tracing.shared_work import copy_count, shared_work
from tightfit.planner.variants import estimate_candidates

MOST_DEGREES = 6  # combinations of tp, pp and cp that are tried ahead


@contextmanager
def tracing_ahead(estimator: Estimator, pins: dict[str, Any]) -> Iterator[None]:
    """Return a context manager inside which copies of this process make the traces that a search will
    probably need.

    pins  plan fields that the user fixed

    There are no copies if the job's traces are not stored in the disk cache. Raises InputError if no plan
    with these pins is possible.
    """
    start, _ = complete(estimator.job, limited_to_batch(estimator.machine, estimator.job, pins), pins)
    pieces = _pieces(estimator, start, pins)
    count = copy_count(len(pieces)) if cache_key(estimator.job) is not None and is_writable() else 0
    if not count:
        yield
        return
    profiler = estimator.profiler
    with shared_work("micro_batch" not in pins) as profiler.shared_work:
        try:
            profiler.shared_work.start_copies(count, pieces)
            yield
        finally:
            profiler.shared_work = None


def _pieces(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[Callable[[], object]]:
    """Return the pieces of the search, those first that it will need first: the plan with the default
    kernels, the next degrees of parallelism, bf16 parameters, offload from its second combination on,
    and the leanest plan."""
    # a search with compile: model begins with `start` itself, else with `start` without compile
    pieces: list[Callable[[], object]] = [] if start.compile == "model" else [partial(estimator.estimate, start)]
    machine = estimator.machine
    if machine.devices_per_node * machine.nodes > 1:
        pieces += [partial(_degrees, estimator, start, pins, index) for index in range(1, MOST_DEGREES)]
    narrow = start.replace(precision="bf16-true", rounding=rounding_of(estimator.job))
    if "precision" not in pins and is_legal(narrow, estimator.job, machine.device):
        pieces.append(partial(_narrow, estimator, narrow, {**pins, "precision": "bf16-true"}))
    for where in offloads(estimator, pins)[2:]:  # the search itself begins with the first one
        pieces.append(partial(estimate_candidates, estimator, start.replace(**where), {**pins, **where}))
    return [*pieces, partial(leanest, estimator, start, pins)]


def _narrow(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> None:
    """Estimate the variants of `start`, which has bf16 parameters, and the same plan with master weights:
    its compiled regions are the same, and a process compiles them once."""
    estimate_candidates(estimator, start, pins)
    masters = start.replace(master_weights=True, rounding="nearest")
    if is_legal(masters, estimator.job, estimator.machine.device):
        estimator.estimate(masters)


def _degrees(estimator: Estimator, start: Plan, pins: dict[str, Any], index: int) -> None:
    """Estimate the plans with the degrees at `index` of those that the search tries, in its order."""
    in_order = by_lower_bound(estimator, start, pins)
    if index < len(in_order):
        estimate_degrees(estimator, start, pins, in_order[index][1], math.inf)


__all__ = ["tracing_ahead"]
