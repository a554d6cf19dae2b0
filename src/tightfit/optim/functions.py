"""Optimizers and schedules that a function of the user's creates.

`optimizer_by_function` calls the function and checks the optimizer. `kind_of_update` finds out by
a few updates of small weights what the optimizer reads for the update of a weight, which decides
whether it can update shards.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tightfit._torch.dispatch import without_dispatch_modes
from tightfit.errors import InputError
from tightfit.job import PythonSpec
from tightfit.models.python import as_input_error, load_python

# What the update of an element of a weight reads: this element of the gradient and of the states;
# the whole gradient and states of its parameter; or other parameters, too.
Kind = Literal["elementwise", "by parameter", "together"]

OPTIMIZER, SCHEDULE = "job: train.optimizer", "job: train.schedule"
_STEPS = 3  # updates of a trial
_HOW = "return a torch.optim.Optimizer: lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3)"


class ExistingOptimizer:
    """A function of the parameters that returns an optimizer which exists already. Of other
    parameters than its own, it returns a copy with the options of its first group.

    Raises InputError if the optimizer has states already: they would not be sharded.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.state:
            raise InputError(
                OPTIMIZER,
                f"{type(optimizer).__name__} has states already",
                "prepare the optimizer before its first step, or give a function that creates it",
            )
        self._optimizer = optimizer
        self._owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        if any(parameter in self._owned for parameter in parameters):
            return self._optimizer
        other: Optimizer = object.__new__(type(self._optimizer))
        other.__dict__.update(self._optimizer.__dict__)
        other.state, other.param_groups = defaultdict(dict), []
        options = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        other.add_param_group({**options, "params": parameters})
        return other


def function_of(given: Any) -> Callable[[Any], Any]:
    """Return a function of the user's: `given` itself, or the one that a job file names."""
    return cast(Callable[[Any], Any], load_python(given.python) if isinstance(given, PythonSpec) else given)


def optimizer_by_function(given: Any, parameters: list[nn.Parameter] | list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that the user's function creates of `parameters`.

    given       a function of the parameters, or the place of one in a file
    parameters  the parameters, or groups of them as torch's optimizers take them

    Raises InputError if the function fails or returns no optimizer of exactly these parameters, if
    the optimizer has no learning rate, or if its step needs a closure.
    """
    function = function_of(given)
    with as_input_error(OPTIMIZER, "correct the function that creates the optimizer"):
        optimizer = function(parameters)
    if not isinstance(optimizer, Optimizer):
        raise InputError(OPTIMIZER, f"the function returned {type(optimizer).__name__}", _HOW)
    name = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups) or "lr" not in optimizer.defaults:
        raise InputError(
            OPTIMIZER, f"{name} has no lr, which the schedule sets", "use an optimizer with a learning rate"
        )
    if not float(optimizer.defaults["lr"]) > 0:
        raise InputError(OPTIMIZER, f"{name} has lr={optimizer.defaults['lr']}", "set lr to more than 0")
    step = inspect.signature(optimizer.step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise InputError(
            OPTIMIZER, f"{name} computes the loss several times in a step", "use an optimizer without a closure"
        )
    asked = [one for each in parameters for one in (each["params"] if isinstance(each, dict) else [each])]
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(one) for one in owned} != {id(one) for one in asked}:
        raise InputError(
            OPTIMIZER,
            f"the function gives {name} {len(owned)} of {len(asked)} trainable parameters",
            "give it all of them; freeze the others with requires_grad_(False)",
        )
    return optimizer


def kind_of_update(given: Any) -> Kind:
    """Return what an update by the user's optimizer reads, found out on two small weights.

    A matrix and a vector are updated together, each alone, and the matrix in four pieces. Raises
    InputError if the optimizer keeps state in its parameter groups, which a checkpoint would lose.
    """
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        starts = [torch.randn(shape, generator=generator) for shape in ((4, 6), (5,))]
        gradients = [[torch.randn(one.shape, generator=generator) for one in starts] for _ in range(_STEPS)]

        def ended(where: Callable[[Tensor], Tensor], numbers: tuple[int, ...]) -> list[Tensor]:
            weights = [nn.Parameter(where(starts[number]).clone()) for number in numbers]
            optimizer = optimizer_by_function(given, weights)
            before = _options(optimizer)
            for step in gradients:
                for number, weight in zip(numbers, weights, strict=True):
                    weight.grad = where(step[number]).clone()
                with as_input_error(OPTIMIZER, "correct the optimizer"):
                    optimizer.step()
            _check_options(optimizer, before)
            return [weight.detach() for weight in weights]

        def whole(tensor: Tensor) -> Tensor:
            return tensor

        together = ended(whole, (0, 1))
        alone = [ended(whole, (number,))[0] for number in (0, 1)]
        if not all(map(_are_close, alone, together)):
            return "together"
        top, bottom = (
            torch.cat([ended(lambda one, part=part: _part(one, *part), (0,))[0] for part in parts], 1)  # type: ignore[misc]
            for parts in (((0, 2, 0, 3), (0, 2, 3, 6)), ((2, 4, 0, 3), (2, 4, 3, 6)))
        )
        return "elementwise" if _are_close(torch.cat([top, bottom]), together[0]) else "by parameter"


def _part(matrix: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
    return matrix[top:bottom, left:right]


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _check_options(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    changed = [
        key
        for group, old in zip(_options(optimizer), before, strict=True)
        for key, value in group.items()
        if not (key in old and (value is old[key] or bool(value == old[key])))
    ]
    if changed:
        raise InputError(
            OPTIMIZER,
            f"{type(optimizer).__name__} changes {changed[0]} of its parameter groups in a step, and checkpoints hold only "
            "the states of parameters",
            "use an optimizer that keeps its states in `state`",
        )


def rate_by_function(given: Any, full: float) -> Callable[[int], float]:
    """Return the function from the step to the learning rate that a schedule of the user's makes.

    given  a function of the step that returns a factor of the full rate; a function of an optimizer
           that returns one of torch's learning-rate schedulers; or the place of one of both
    full   the full learning rate

    Raises InputError for a function that is neither, and for a scheduler that needs a metric.
    """
    function = function_of(given)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=full)
    try:
        made = function(optimizer)
    except Exception:  # it is a function of the step, or wrong: the call below tells
        made = None
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            SCHEDULE,
            "ReduceLROnPlateau needs a metric of your loop",
            "use schedule: constant, and change lr of run.optimizer.param_groups in your loop",
        )
    if isinstance(made, LRScheduler):
        return _SchedulerRates(optimizer, made)

    def rate(step: int) -> float:
        return full * factor(step)

    def factor(step: int) -> float:
        with as_input_error(f"{SCHEDULE} (step {step})", "correct the schedule's function"):
            found = float(function(step))
        if not 0 <= found < float("inf"):
            raise InputError(f"{SCHEDULE} (step {step})", f"the factor is {found}", "return a factor of 0 or more")
        return found

    factor(0)
    return rate


class _SchedulerRates:
    """The learning rates of a torch scheduler by step. It runs ahead on an optimizer of its own, so
    a resumed run has no scheduler state to restore."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._rates = [float(optimizer.param_groups[0]["lr"])]

    def __call__(self, step: int) -> float:
        while len(self._rates) <= step:
            self._optimizer.step()  # without a gradient; a scheduler warns if it is not called
            with as_input_error(f"{SCHEDULE} (step {step})", "let the scheduler cover all steps of the training"):
                self._scheduler.step()
            self._rates.append(float(self._optimizer.param_groups[0]["lr"]))
        return self._rates[step]


__all__ = ["ExistingOptimizer", "Kind", "function_of", "kind_of_update", "optimizer_by_function", "rate_by_function"]
