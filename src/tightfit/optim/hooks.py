"""Hooks on gradients that do not keep what they call in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def when_complete(parameters: Iterable[Tensor], method: Callable[..., None], *more: Any) -> None:
    """From now on `method(parameter, *more)` is called when backward has completed a parameter's gradient.

    method  bound to what takes the gradients. It is held weakly: Python's collector does not look into the hooks of a
            tensor, so one that held an object which holds the parameters would keep the model in memory for good.
    """
    held = weakref.WeakMethod(method)

    def see(parameter: Tensor) -> None:
        alive = held()
        if alive is not None:
            alive(parameter, *more)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(see)


__all__ = ["when_complete"]
