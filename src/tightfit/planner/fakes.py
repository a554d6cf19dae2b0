"""Fakes: what tensors without values need to go through a model: answers to what asks for values, and errors that say what cannot."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.errors import InputError, Untraceable
from tightfit.models.answers import GROUPED_PRODUCT, failures_unlogged, grouped_product
from tightfit.models.caches import tensors_kept_out

_FILLS = frozenset(  # what an initialisation does, to values only
    {
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
    }
)
_PARTS = frozenset({torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.slice.Tensor})


class FakeValues(TorchDispatchMode):
    """Answers what asks fake tensors for their values: 1, or true, where they are not known. A step then runs without any.
    What only fills them is not done, and their device is said at once: both are asked of a deep model thousands of times.

    Known are whole numbers that a model writes out, and what it spaces evenly on a processor: each block's share of dropped
    paths, in many models of images, of which 0 makes blocks without any.

    transformers looks at an attention mask only where it is no fake tensor, and else builds masks that a training would
    not: within, it looks, unless `padded`, for then there is something to mask.
    """

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded

    def __enter__(self) -> Self:
        self._around = ExitStack()
        self._around.enter_context(tensors_kept_out())
        self._around.enter_context(failures_unlogged())
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
        self._around.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and isinstance(args[0], FakeTensor):
            args[0].constant = None
            return args[0]
        if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor(1.0)`, as a weight may be, which is cast later
            made = func(*args)
            if isinstance(made, FakeTensor) and made.is_floating_point():
                made.constant = None  # torch would go by its type for ever
            return made
        if func is torch.ops.aten.linspace.default or (func in _PARTS and _constant(args[0]) is not None):
            return _known(func, args, kwargs or {})
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args) if _constant(args[0]) is not None else _one(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        if func is GROUPED_PRODUCT.default:
            return grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` makes of constants, with its values where it is on a processor."""
    made = func(*args, **kwargs)
    fakes = tree_leaves(made)
    if all(fake.device.type == "cpu" for fake in fakes):
        with unset_fake_temporarily():
            real = tree_leaves(func(*(_constant(one) if isinstance(one, Tensor) else one for one in args), **kwargs))
        for fake, value in zip(fakes, real, strict=True):
            fake.constant = value
    return made


def _constant(value: Any) -> Tensor | None:
    """The value of a tensor without values, where it is known."""
    return value.constant if isinstance(value, FakeTensor) else None


def _never(tensor: Any = None) -> bool:
    return False


def _one(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@contextmanager
def traceable(model: nn.Module | None = None) -> Iterator[None]:
    """Within, what cannot be followed on tensors without values is an Untraceable that says so, with the way out."""
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
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError) as error:
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


def _untraceable(found: str) -> Untraceable:
    return Untraceable(
        "job: model", found, "run it without a prediction: tightfit train measures what it cannot foresee"
    )


__all__ = ["FakeValues", "traceable"]
