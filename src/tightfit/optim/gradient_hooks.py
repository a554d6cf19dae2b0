"""Register gradient hooks that do not keep the model in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def on_gradient_ready(parameters: Iterable[Tensor], method: Callable[..., None], *more: Any) -> None:
    """From now on, call `method(parameter, *more)` whenever backward has completed a parameter's
    gradient.

    method  a bound method. The hook keeps only a weak reference to the method's object. Python's
            garbage collector does not look into the hooks of a tensor. If a hook kept an object
            that holds the parameters, the model would therefore stay in memory forever
    more    further arguments for `method`
    """
    reference = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(parameter, *more)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(call)


__all__ = ["on_gradient_ready"]
