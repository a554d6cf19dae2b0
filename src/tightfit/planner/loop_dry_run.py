"""Predict the peak memory of the user's own training loop: run its setup and two steps on fake
tensors.

`explain_loop` predicts the peak, and `measure_loop` measures it on real tensors. Both count all
storages from the beginning of the setup on. They therefore also count what the loop itself keeps,
such as a moving average of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.fake import FakeTensorMode
from tightfit.engine.custom_loop import WATCHED, Prepared
from tightfit.errors import InputError, Untraceable
from tightfit.plan import Plan, plan_of
from tightfit.planner.dry_run import without_device_options
from tightfit.planner.tracing.device_emulation import emulate_device, fake_process_group
from tightfit.planner.tracing.fake_tensors import FakeValues, untraceable_errors
from tightfit.planner.tracing.live_storages import OTHER_MEMORY, ROWS, Peak, StorageTracker, state_tensors
from tightfit.units import format_bytes

Setup = Callable[[Plan], Callable[..., Any]]


@dataclass(frozen=True)
class LoopPeak:
    """The peak memory of a step of the user's own training loop, predicted or measured. `str` gives
    a table of its rows.

    peak  live bytes, by row, at the instant with the most live bytes
    plan  the plan of the loop
    """

    peak: Peak
    plan: Plan

    @property
    def total(self) -> int:
        """The live bytes at the peak, summed over all rows."""
        return self.peak.total

    def __str__(self) -> str:
        lines = [f"plan        {', '.join(f'{n}={v}' for n, v in self.plan.differences().items()) or 'reference'}"]
        lines += [f"{row:12}{format_bytes(self.peak.rows[row]):>10}" for row in ROWS if self.peak.rows.get(row)]
        return "\n".join([*lines, f"{'peak':12}{format_bytes(self.total):>10}   in {self.peak.phase}"])


def explain_loop(
    setup: Setup, plan: Plan | Mapping[str, Any] | None = None, inputs: Sequence[Tensor] = (), device: str = "cpu"
) -> LoopPeak:
    """Predict the peak memory of the user's own training loop. Nothing is allocated.

    setup   a function that gets the plan, creates everything that the loop keeps, calls `prepare`
            for each model, and returns a function that runs one step of the loop
    plan    the plan of the loop, or a mapping of its fields; None: the reference plan `Plan()`
    inputs  the arguments for the step function, such as the batch of one process. Only their shapes
            and dtypes are used
    device  the kind of device that trains: "cpu" or "cuda"

    Returns the peak of the second step; the first one creates the optimizers' states. Raises
    Untraceable if the setup or the step needs the values of tensors, and InputError if `prepare`
    refuses the plan.
    """
    plan = plan_of(plan)
    if isinstance(inputs, Tensor):
        raise InputError("explain_loop: inputs", "is a tensor", "give a list of the step's arguments, such as [tensor]")
    values = FakeValues()
    with (
        fake_process_group(plan.devices),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        values,
        emulate_device(device),
    ):
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        try:
            with untraceable_errors(), values.computing():
                peak = _watched(setup, without_device_options(plan), fakes)
        except Untraceable as error:
            fix = "correct what it names, or run the loop and measure it (tightfit.measure_loop)"
            raise Untraceable("the loop", error.found, fix) from error
    return LoopPeak(peak, plan)


def measure_loop(setup: Setup, plan: Plan | Mapping[str, Any] | None = None, inputs: Sequence[Tensor] = ()) -> LoopPeak:
    """Measure the peak memory of the second step of the user's own training loop, which
    `explain_loop` predicts. With several processes, each measures its own memory.

    setup   a function that gets the plan, creates everything that the loop keeps, calls `prepare`
            for each model, and returns a function that runs one step of the loop
    plan    the plan of the loop, or a mapping of its fields; None: the reference plan `Plan()`
    inputs  the arguments for the step function

    Raises InputError for a plan that compiles, because the memory of a compiled region is not
    visible.
    """
    plan = plan_of(plan)
    if plan.compile != "none":
        raise InputError(
            f"plan: compile={plan.compile}", "hides the memory of a compiled region", "measure it with compile: none"
        )
    return LoopPeak(_watched(setup, plan, inputs), plan)


def _watched(setup: Setup, plan: Plan, inputs: Sequence[Tensor]) -> Peak:
    """Run the setup and two steps of the user's loop while all storages are tracked. Return the
    peak of the second step."""
    tracker = StorageTracker([])
    tracker.assign(inputs, "activations")
    with tracker, _models_watched() as models:
        step = setup(plan)
        for model in models:
            if model.run.store is not None:
                model.run.store.note = lambda tensor: tracker.assign([tensor], OTHER_MEMORY)
            tracker.add_parameters([*model.run.model.parameters(), *model.run.optimizer_weights.values()])
            tracker.assign(model.run.model.buffers(), "parameters")
            model.run = replace(model.run, loss_sum=tracker.forward(model.run.loss_sum))
        step(*inputs)
        tracker.assign(_states_of(models), "optimizer")
        begin = tracker.mark()
        step(*inputs)
        tracker.assign(_states_of(models), "optimizer")
    return tracker.peak(begin)


@contextmanager
def _models_watched() -> Iterator[list[Prepared]]:
    """Return a context manager that gives a list. Inside the context, each call of `prepare` adds
    its model to this list."""
    models: list[Prepared] = []
    token = WATCHED.set(models)
    try:
        yield models
    finally:
        WATCHED.reset(token)


def _states_of(models: list[Prepared]) -> list[torch.Tensor]:
    found = []
    for model in models:
        found += state_tensors(model.run.optimizer)
        found += model.run.reduction.states() if model.run.reduction is not None else []
    return found


__all__ = ["LoopPeak", "explain_loop", "measure_loop"]
