"""Gradient hooks that do not keep the object they call, and so the model, in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def on_gradient_ready(parameters: Iterable[Tensor], method: Callable[..., None], *more: Any) -> None:
    """From now on, backward calls `method(parameter, *more)` when it has completed a parameter's
    gradient.

    method  a bound method. Its object is held by a weak reference: Python's garbage collector does
            not look into the hooks of a tensor, so a hook that held an object which holds the
            parameters would keep the model in memory forever.
    """
    reference = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(parameter, *more)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(call)


__all__ = ["on_gradient_ready"]
