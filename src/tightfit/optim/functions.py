"""Call the user's own functions that create an optimizer or a learning-rate schedule, and check
what they return.

`optimizer_by_function` creates the optimizer and checks it. `kind_of_update` updates small weights
a few times, to find out whether the update of an element depends on other elements of its parameter
or on other parameters. This decides whether the optimizer can update shards. `rate_by_function`
creates the schedule.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tightfit._torch.dispatch import without_dispatch_modes
from tightfit.errors import InputError
from tightfit.job import PythonSpec
from tightfit.models.python import as_input_error, load_python
from tightfit.optim.nested_states import is_nested

# What the update of an element of a weight reads: this element of the gradient and of the states;
# the whole gradient and states of its parameter; or other parameters, too.
Kind = Literal["elementwise", "by parameter", "together"]

OPTIMIZER, SCHEDULE = "job: train.optimizer", "job: train.schedule"
# updates of a trial. A rule may begin late, such as after 10 updates, or only for large matrices, such as
# from 128 x 128 on: (shape, updates) of the matrices that are updated whole and in pieces
_STEPS = 24
_MATRICES = (((4, 6), _STEPS), ((160, 144), 12), ((1040, 1032), 3))
_HOW = "return a torch.optim.Optimizer: lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3)"


class ExistingOptimizer:
    """Wraps an optimizer that the user has already created, so that it can be used in place of a
    function that creates one from a list of parameters.

    Called with the optimizer's own parameters, it returns this optimizer. Called with other
    parameters, such as small weights for a trial, it returns a copy of the optimizer for them, with
    the options of the optimizer's first parameter group.

    The constructor raises InputError if the optimizer has states already, because these would not
    be sharded.
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
    """Return the user's function: `given` itself, or, if `given` is a PythonSpec from a job file
    such as {python: "file.py:function"}, the function that it names. Raises InputError if that
    function cannot be loaded."""
    return cast(Callable[[Any], Any], load_python(given.python) if isinstance(given, PythonSpec) else given)


def optimizer_by_function(given: Any, parameters: list[nn.Parameter] | list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that the user's function creates for `parameters`.

    given       a function that takes `parameters` and returns a torch optimizer; or a PythonSpec
                that names such a function in a file
    parameters  the parameters, or groups of them as torch's optimizers take them

    Raises InputError if the function cannot be loaded or fails; if it does not return an optimizer
    of exactly these parameters; if the optimizer has no learning rate above 0; or if its step needs
    a closure.
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
    if not full_rate_of(optimizer) > 0:
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
            f"the function gives {name} other parameters than the trainable ones, or not all of them",
            "give it all of them; freeze the others with requires_grad_(False)",
        )
    return optimizer


def full_rate_of(optimizer: Optimizer) -> float:
    """Return the learning rate to which the user's schedule of an optimizer refers: its default, or, if that is
    not above 0, the largest of its parameter groups."""
    default = float(optimizer.defaults["lr"])
    return default if default > 0 else max(float(group["lr"]) for group in optimizer.param_groups)


def kind_of_update(given: Any) -> Kind:
    """Return on which values the user's optimizer bases the update of one element of a weight.

    "elementwise"   only on this element of the gradient and of the states, as in Adam: such an
                    optimizer can update shards
    "by parameter"  also on other elements of the same parameter, as in Adafactor
    "together"      also on other parameters

    given  a function of the parameters that returns an optimizer, or a PythonSpec that names one

    To find out, a small matrix and a small vector (or another matrix) are updated together, then each alone. Then the matrix
    is updated in four pieces, and so are larger ones as long as that makes no difference.

    Raises InputError if the optimizer fails, or if it keeps state in its parameter groups, which a
    checkpoint would lose.
    """
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        small, vector = (_trial((shape, _STEPS)) for shape in ((4, 6), _vector_shape(given)))
        together = _ended(given, [small, vector])
        alone = [_ended(given, [one])[0] for one in (small, vector)]
        if not all(map(_are_close, alone, together)):
            return "together"
        return "elementwise" if all(_updates_pieces_alike(given, _trial(one)) for one in _MATRICES) else "by parameter"


def _vector_shape(given: Any) -> tuple[int, ...]:
    """Return the shape of a small vector, or of a small matrix if the user's optimizer takes no vectors, as Muon."""
    try:
        optimizer_by_function(given, [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(5))])
    except InputError:
        return 5, 3
    return (5,)


def nested_state(given: Any) -> str:
    """Return the name of a state of the user's optimizer that is a list, tuple or dict; "" if all are tensors
    and numbers.

    given  see `kind_of_update`
    """
    return next((name for name, value in _first_states(given) if is_nested(value)), "")


def subclassed_state(given: Any) -> tuple[str, str]:
    """Return (name, class) of a state of the user's optimizer that is a tensor of a class of its own, such as
    torchao's quantized ones; ("", "") if there is none.

    given  see `kind_of_update`
    """
    found = ((name, type(one)) for name, one in _first_states(given) if isinstance(one, Tensor))
    return next(((name, kind.__name__) for name, kind in found if kind not in (Tensor, nn.Parameter)), ("", ""))


def _first_states(given: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the states of the user's optimizer after one update of two matrices and a
    vector. Small matrices may have other states than large ones."""
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        weights = [nn.Parameter(torch.ones(shape)) for shape in ((4, 6), _vector_shape(given), (64, 128))]
        optimizer = optimizer_by_function(given, weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with as_input_error(OPTIMIZER, "correct the optimizer"):
            optimizer.step()
        return [(str(name), value) for state in optimizer.state.values() for name, value in state.items()]


_Trial = list[Tensor]  # the first weight, then the gradient of each update


def _trial(shape_and_updates: tuple[tuple[int, ...], int]) -> _Trial:
    shape, updates = shape_and_updates
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator) for _ in range(updates + 1)]


def _ended(given: Any, trials: list[_Trial]) -> list[Tensor]:
    """Return the weights after the updates of an optimizer of all of them.

    given  see `kind_of_update`
    """
    weights = [nn.Parameter(start.clone()) for start, *_ in trials]
    optimizer = optimizer_by_function(given, weights)
    before = _options(optimizer)
    for gradients in zip(*(trial[1:] for trial in trials), strict=True):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        with as_input_error(OPTIMIZER, "correct the optimizer"):
            optimizer.step()
    _check_options(optimizer, before)
    return [weight.detach() for weight in weights]


def _updates_pieces_alike(given: Any, trial: _Trial) -> bool:
    """Return whether a matrix gets the same updates in four pieces as in one.

    given  see `kind_of_update`
    """
    quarters = zip(
        *([piece for half in tensor.chunk(2) for piece in half.chunk(2, 1)] for tensor in trial), strict=True
    )
    first, second, third, fourth = (_ended(given, [list(quarter)])[0] for quarter in quarters)
    pieces = torch.cat([torch.cat([first, second], 1), torch.cat([third, fourth], 1)])
    return _are_close(pieces, _ended(given, [trial])[0])


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
            f"a step of {type(optimizer).__name__} changes the value {changed[0]!r} of its parameter groups, and checkpoints "
            "hold only the states of parameters",
            "use an optimizer that keeps its states in `state`",
        )


def rate_by_function(given: Any, full: float, groups: Sequence[float] = ()) -> Callable[[int], float]:
    """Return a function from the step (counted from 0) to the learning rate, made from the user's
    own schedule.

    given  the schedule: a function of the step that returns a factor, by which `full` is
           multiplied; or a function of an optimizer that returns one of torch's learning-rate
           schedulers; or a PythonSpec that names one of these functions in a file
    full   the full learning rate
    groups  the full learning rates of the optimizer's parameter groups, with which a scheduler of torch
           computes; empty: one group with `full`

    A scheduler makes a `SchedulerRates`, which also returns the rate of each group.

    Raises InputError if `given` is neither kind of function, if the scheduler needs a metric
    (ReduceLROnPlateau), or if it changes more than the learning rate, as OneCycleLR does with the
    momentum. The returned function raises InputError if the user's function fails at a
    step or returns a factor that is negative or not finite.
    """
    function = function_of(given)
    members = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in groups or (full,)]
    optimizer = torch.optim.SGD(members, lr=full)
    before = _options(optimizer)
    failure: Exception | None = None
    try:
        made = function(optimizer)
    except Exception as error:  # it is a function of the step, or wrong: the call below tells
        made, failure = None, error
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            SCHEDULE,
            "ReduceLROnPlateau needs a metric of your loop",
            "use schedule: constant, and change lr of run.optimizer.param_groups in your loop",
        )
    if isinstance(made, LRScheduler):
        return SchedulerRates(optimizer, made, before)

    def rate(step: int) -> float:
        return full * factor(step)

    def factor(step: int) -> float:
        with as_input_error(f"{SCHEDULE} (step {step})", "correct the schedule's function"):
            found = float(function(step))
        if not 0 <= found < float("inf"):
            raise InputError(f"{SCHEDULE} (step {step})", f"the factor is {found}", "return a factor of 0 or more")
        return found

    try:
        factor(0)
    except InputError as error:
        if failure is None:
            raise
        raise InputError(
            SCHEDULE,
            f"fails as a function of an optimizer, which returns a scheduler ({type(failure).__name__}: {failure}), and as a "
            f"function of the step, which returns a factor ({error.found})",
            "correct the schedule's function",
        ) from failure
    return rate


class SchedulerRates:
    """A function from the step (counted from 0) to the learning rate that a torch scheduler gives the first
    parameter group.

    A call with step n runs the scheduler up to step n and remembers all rates. The scheduler acts
    on the given optimizer, which is a dummy and trains nothing. A resumed run therefore has no
    scheduler state to restore.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler, before: list[dict[str, Any]]) -> None:
        self._optimizer, self._scheduler, self._before = optimizer, scheduler, before
        self._rates = [self._rates_now()]

    def _rates_now(self) -> list[float]:
        groups = self._optimizer.param_groups
        changed = [
            key
            for group, before in zip(groups, self._before, strict=True)
            for key, value in before.items()
            if key != "lr" and group[key] != value
        ]
        if changed:
            raise InputError(
                SCHEDULE,
                f"{type(self._scheduler).__name__} also changes {changed[0]}, and a schedule is one of the learning rate",
                "use cycle_momentum=False"
                if changed[0] == "momentum"
                else "use a scheduler of the learning rate alone",
            )
        return [float(group["lr"]) for group in groups]

    def __call__(self, step: int) -> float:
        return self.of_groups(step)[0]

    def of_groups(self, step: int) -> list[float]:
        """Return the learning rate of each parameter group."""
        while len(self._rates) <= step:
            self._optimizer.step()  # without a gradient; a scheduler warns if it is not called
            with as_input_error(f"{SCHEDULE} (step {step})", "let the scheduler cover all steps of the training"):
                self._scheduler.step()
            self._rates.append(self._rates_now())
        return self._rates[step]


__all__ = [
    "ExistingOptimizer",
    "Kind",
    "SchedulerRates",
    "full_rate_of",
    "function_of",
    "kind_of_update",
    "nested_state",
    "optimizer_by_function",
    "rate_by_function",
    "subclassed_state",
]
