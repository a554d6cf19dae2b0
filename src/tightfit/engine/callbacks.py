"""Callbacks: the user's code that `tightfit train` calls after each step, after each evaluation and
at the end.

A loop that the user writes (`for result in tightfit.train(run)`) needs no callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tightfit.engine.checkpoint.save import all_gather_values
from tightfit.engine.step import Step
from tightfit.errors import InputError
from tightfit.job import PythonSpec
from tightfit.models import load_python
from tightfit.models.python import as_input_error
from tightfit.record import Record
from tightfit.runtime.run import Run

STOP, FAILED = 1001, 1002  # what a device asks the others for, beside the numbers of signals


class Callback:
    """Base class of callbacks. A subclass overrides the methods that it needs.

    Every process creates its own callbacks and calls them with the same values. A method that
    returns True asks all processes to stop after the current step; a checkpoint is then saved as
    usual. If a method raises an exception, all processes stop in the same way, and the training
    fails.
    """

    def on_step(self, result: Step) -> bool | None:
        """Called after each step. Return True to stop the training. On CUDA the next step may be
        running already, except after steps with an evaluation or a checkpoint.

        result  the step's results, such as its loss
        """
        return None

    def on_evaluation(self, metrics: dict[str, float]) -> bool | None:
        """Called after each evaluation, after `on_step` of the same step. Return True to stop the
        training.

        metrics  metric name -> value: "loss" and the job's metrics
        """
        return None

    def on_end(self, record: Record) -> None:
        """Called once, after the last checkpoint and the record were written. Not called if the
        training failed.

        record  the record of the training: its job, plan, machine and measurements
        """


class CallbackCalls:
    """Calls all callbacks of a job. If a callback fails, its error is stored for `raise_failure`,
    and no callback is called after further steps and evaluations.

    asks  what the callbacks of this process ask all processes to do: 0 (continue), STOP, or FAILED
          (stop because a callback failed)
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = [_made(callback) for callback in callbacks]
        self._failure: InputError | None = None
        self.asks = 0

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_step(self, result: Step) -> None:
        self._call("on_step", lambda callback: callback.on_step(result))

    def on_evaluation(self, metrics: dict[str, float]) -> None:
        self._call("on_evaluation", lambda callback: callback.on_evaluation(dict(metrics)))

    def on_end(self, record: Record) -> None:
        """Call `on_end` of all callbacks. Raises InputError if one of them raises an exception."""
        for callback in self._callbacks:
            with _failures_named(callback, "on_end"):
                callback.on_end(record)

    def raise_failure(self, run: Run) -> None:
        """Raise InputError on all devices if a callback has failed on one of them. The error of
        another device names its rank. All devices must call this method."""
        failure = self._failure
        said = None if failure is None else (failure.asked, failure.found, failure.fix)
        for number, refusal in enumerate(all_gather_values(run, said) if self else []):
            if failure is not None:
                raise failure
            if refusal is not None:
                raise InputError(f"{refusal[0]}, on rank {number}", *refusal[1:])

    def _call(self, method: str, call: Callable[[Callback], Any]) -> None:
        if self._failure is not None:
            return
        for callback in self._callbacks:
            try:
                with _failures_named(callback, method):
                    if call(callback) is True:
                        self.asks = max(self.asks, STOP)
            except InputError as failure:
                self._failure, self.asks = failure, FAILED
                return


def _failures_named(callback: Any, method: str) -> Any:
    return as_input_error(
        f"job: callbacks: {type(callback).__name__}.{method}", "correct the callback, and continue with --resume"
    )


def _made(given: Any) -> Callback:
    """Return the callback that `given` describes.

    given  a callback, a class or function that creates one, or the Python name of one of these

    Raises InputError if the result is not a `Callback`.
    """
    name = given.python if isinstance(given, PythonSpec) else getattr(given, "__qualname__", type(given).__name__)
    found = load_python(given.python) if isinstance(given, PythonSpec) else given
    if not isinstance(found, Callback) and callable(found):
        with as_input_error(f"job: callbacks: {name}", "let it be created without arguments"):
            found = found()
    if not isinstance(found, Callback):
        raise InputError(
            f"job: callbacks: {name}",
            f"is a {type(found).__name__}, not a callback",
            "derive it from tightfit.Callback",
        )
    return found


__all__ = ["FAILED", "STOP", "Callback", "CallbackCalls"]
