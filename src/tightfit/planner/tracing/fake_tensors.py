"""Run a model on fake tensors, which have no values. Operations that read values get a result, and
failures become errors that say what to do.

The profiler and the dry run enter `FakeValues` inside FakeTensorMode.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    device_of,
    known_value,
    set_known_value,
)
from tightfit._torch.operations import LOCAL_SCALAR_DENSE
from tightfit._torch.patches import formatting_as_numbers
from tightfit.errors import InputError, Untraceable
from tightfit.models.caches import isolated_model_caches
from tightfit.models.dataflow import innermost_model_line
from tightfit.models.expert_routing import ExpertRouting, forget_values
from tightfit.models.fake_kernels import group_norm_gradients, without_fake_tensor_logs
from tightfit.models.known_values import UNKNOWN, note_known, read_known
from tightfit.models.value_reads import ValueReads
from tightfit.planner.tracing.ctc import ctc_output
from tightfit.planner.tracing.recurrent_layers import recurrent_output

_FILLS = frozenset(  # initialisation: changes values only
    {
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
    }
)


class FakeValues(TorchDispatchMode):
    """A dispatch mode that gives a result to operations which read the values of fake tensors.

    An unknown value is 1 or True, so a whole step runs without values; a `while` on such a value runs
    once, and checks of the data pass (`models/value_reads.py`). Known are integers that the model writes as
    constants and, inside `computing`, the values that it computes from numbers.

    Two frequent operations return at once, because a deep model calls them thousands of times:
    initialisation does nothing, and the device of a tensor is read directly.

    transformers does not read the values of an attention mask that is a fake tensor, and then
    builds masks that training would not build. Inside this mode transformers does read the mask,
    unless `padded` is true, or code is compiled.

    The tokens of a mixture of experts are spread over its experts: see `models/expert_routing.py`.

    padded            whether the batch has padding, so that its attention mask hides some positions
    expert_imbalance  tokens of the busiest expert divided by the mean over all experts
    """

    def __init__(self, padded: bool = False, expert_imbalance: float = 1.0) -> None:
        super().__init__()
        self.padded, self.routing, self.reads = padded, ExpertRouting(expert_imbalance), ValueReads()
        self._computes = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context manager in which the values of small tensors that the model computes from numbers are
        known (`models/known_values.py`). The zeros of a batch are made outside of it: they stand for any values."""
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    def __enter__(self) -> Self:
        self._around = ExitStack()
        self._around.enter_context(isolated_model_caches())
        self._around.enter_context(without_fake_tensor_logs())
        self._around.enter_context(formatting_as_numbers())
        used = "transformers" in sys.modules and not self.padded
        self._masks: Any = importlib.import_module("transformers.masking_utils") if used else None
        if self._masks is not None:
            self._is_tracing = self._masks.is_tracing
            self._masks.is_tracing = partial(_is_compiling, self._is_tracing)  # type: ignore[attr-defined, unused-ignore]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._masks is not None:
            self._masks.is_tracing = self._is_tracing
        self._around.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._computes:
            return self._run(func, args, kwargs)
        result = read_known(func, args, kwargs or {})
        if result is not UNKNOWN:
            return result
        made = self._run(func, args, kwargs)
        note_known(func, args, kwargs or {}, made)
        return made

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _FILLS and isinstance(args[0], FakeTensor):
            set_known_value(args[0], None)
            return forget_values(args[0])
        if (
            func is torch.ops.aten.lift_fresh.default
        ):  # called by `torch.tensor(1.0)`: a parameter may be created like this and cast later
            made = func(*args)
            if isinstance(made, FakeTensor) and made.is_floating_point():
                set_known_value(made, None)  # torch would otherwise keep the constant's dtype after a cast
            return made
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return device_of(args[0])
        if func is LOCAL_SCALAR_DENSE.default:
            return func(*args) if known_value(args[0]) is not None else self._unknown(args[0])
        if func is torch.ops.aten.equal.default:
            return self.reads.value(True)
        if (made := recurrent_output(func, args)) is not None or (made := ctc_output(func, args)) is not None:
            return made
        if (made := group_norm_gradients(func, args)) is not None:
            return made
        return self.routing.run(func, args, kwargs or {})

    def _unknown(self, tensor: Tensor) -> bool | int | float:
        """Return the value that is taken for that of a tensor with one element. A loop that continues
        while it is True runs once."""
        value = self.routing.scalar(tensor)
        if self.routing.knows(tensor):
            return value
        return self.reads.value(True) if value is True else self.reads.number(value)


def _is_compiling(is_tracing: Callable[[], bool], tensor: Any = None) -> bool:
    """Stand in for transformers' `is_tracing`, which answers True for a fake tensor, too."""
    return is_tracing()


@contextmanager
def untraceable_errors() -> Iterator[None]:
    """Return a context manager that turns errors of a model on fake tensors into Untraceable, an
    error with the reason and a remedy. An InputError passes unchanged."""
    try:
        yield
    except InputError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise _untraceable(f"has shapes or branches that depend on the data ({error.func})") from error
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError) as error:
        message = str(error).strip().partition("\n")[0]
        raise _untraceable(f"fails on fake tensors: {type(error).__name__}: {message} ({_place(error)})") from error


def _place(error: Exception) -> str:
    """Return the file and line where the error occurred, such as "model.py, line 12". It is the
    last stack frame outside of torch and tightfit; if there is none, the last of all."""
    line = innermost_model_line(error)
    if line is None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = last.filename, last.lineno or 0
    return f"{Path(line[0]).name}, line {line[1]}"


def _untraceable(found: str) -> Untraceable:
    return Untraceable(
        "job: model", found, "run the job without a prediction: tightfit train measures what it cannot predict"
    )


__all__ = ["FakeValues", "untraceable_errors"]
