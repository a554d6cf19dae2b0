"""Replaces the forward of a module by a function of a method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import nn

from tightfit.errors import InputError

_COPIES = "_tightfit_copies"  # attribute of a module that must not be copied


class ReplacedForward:
    """The function that a method puts in the place of a module's forward.

    `copy.deepcopy` keeps functions as they are, so a copied module would compute with the weights of the
    module that it was copied from. The copy gets the forward that was replaced: it computes the same with
    weights of its own.

    function  the new forward
    original  the forward that it replaces
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        update_wrapper(self, function, updated=())
        self._function, self._original = function, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the forward of a module by `function`."""
    module.forward = ReplacedForward(function, module.forward)


class _Refused:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise InputError(
            "copy.deepcopy(model)",
            "the plan divides the model's layers over several devices",
            "use a plan with tp: 1, or copy the model's state_dict",
        )


def refuse_copies(module: nn.Module) -> None:
    """Let `copy.deepcopy` of a module raise InputError, because its weights are divided over devices: its
    forward, which is not copied, communicates."""
    setattr(module, _COPIES, _Refused())


__all__ = ["ReplacedForward", "refuse_copies", "replace_forward"]
