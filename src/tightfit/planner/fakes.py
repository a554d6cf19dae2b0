"""Fakes: what tensors without values need to go through a model: answers to what asks for values, and errors that say what cannot."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.errors import InputError

_FILLS = frozenset(  # what an initialisation does, to values only
    {
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
    }
)


class FakeValues(TorchDispatchMode):
    """Answers what asks fake tensors for their values: 1, or true. A step then runs without any. What only fills them is not
    done, and their device is said at once: both are asked of a deep model thousands of times.

    transformers looks at an attention mask only where it is no fake tensor, and else builds masks that a training would
    not: within, it looks, unless `padded`, for then there is something to mask.
    """

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded

    def __enter__(self) -> Self:
        used = "transformers" in sys.modules and not self.padded
        self._masks: Any = importlib.import_module("transformers.masking_utils") if used else None
        if self._masks is not None:
            self._is_tracing = self._masks.is_tracing
            self._masks.is_tracing = _never  # type: ignore[attr-defined, unused-ignore]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._masks is not None:
            self._masks.is_tracing = self._is_tracing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and isinstance(args[0], FakeTensor):
            return args[0]
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return _one(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


def _never(tensor: Any = None) -> bool:
    return False


def _one(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@contextmanager
def traceable(model: nn.Module | None = None) -> Iterator[None]:
    """Within, what cannot be followed on tensors without values is an InputError that says so, with the way out."""
    recurrent = [type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)] if model else []
    if recurrent:
        raise _untraceable(
            f"has {recurrent[0]}, whose kernel keeps a workspace that tensors without values do not show"
        )
    try:
        yield
    except InputError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise _untraceable(f"has shapes or branches that depend on the data ({error.func})") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        said = str(error).strip().partition("\n")[0]
        raise _untraceable(
            f"fails on tensors without values: {type(error).__name__}: {said} ({_place(error)})"
        ) from error


def _place(error: Exception) -> str:
    """File and line of what raised it, or of what called torch to: of a user's model, or of tightfit where the fault is its own."""
    frames = traceback.extract_tb(error.__traceback__)
    library = str(Path(torch.__file__).parent)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(library)), frames[-1])
    return f"{Path(last.filename).name}, line {last.lineno}"


def _untraceable(found: str) -> InputError:
    return InputError(
        "job: model", found, "run it without a prediction: tightfit train measures what it cannot foresee"
    )


__all__ = ["FakeValues", "traceable"]
