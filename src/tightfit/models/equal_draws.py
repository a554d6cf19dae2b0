"""Random numbers that are the same for each sample of a batch, and for each forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.dispatch import OpOverload, TorchDispatchMode
from tightfit._torch.operations import schema_of

STEP = 0.6180339887498949  # the multiples of the golden ratio, without their whole parts, are spread evenly over [0, 1)


class EqualDraws(TorchDispatchMode):
    """A mode in which torch's random operations draw numbers that depend only on the place in a sample. The
    first dimension of a tensor is taken for that of the samples.

    Example: torch.rand(4, 3) gives four times the row 0.62, 0.24, 0.85. Operations that this mode does not
    know, such as multinomial, draw as always.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        values = _VALUES.get(func.overloadpacket.__name__) if isinstance(func, OpOverload) else None
        if values is not None and isinstance(made, Tensor) and made.numel() > 0:
            with torch.no_grad():
                made.copy_(values(_spread(made), _named(func, args, kwargs)))
        return made


def _named(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name. Those that are left out have their defaults."""
    known = schema_of(func).arguments
    defaults = {one.name: one.default_value for one in known if one.has_default_value()}
    return {**defaults, **dict(zip((one.name for one in known), args, strict=False)), **kwargs}


def _spread(like: Tensor) -> Tensor:
    """Return numbers in (0, 1), in fp64, of the shape of `like`: the same for each index of its first
    dimension."""
    count = like[0].numel() if like.dim() > 0 else 1
    row = (torch.arange(1, count + 1, dtype=torch.float64) * STEP).frac()
    return (row.view(like.shape[1:]) if like.dim() > 0 else row.view(())).expand(like.shape)


def _uniform(spread: Tensor, named: dict[str, Any]) -> Tensor:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return low + (high - low) * spread


def _normal(spread: Tensor, named: dict[str, Any]) -> Tensor:
    return named.get("mean", 0.0) + named.get("std", 1.0) * torch.special.ndtri(spread)  # type: ignore[no-any-return]


def _integers(spread: Tensor, named: dict[str, Any]) -> Tensor:
    low = named.get("low", named.get("from", 0)) or 0
    high = named.get("high", named.get("to"))
    return (low + ((2 if high is None else high) - low) * spread).floor()


def _chances(spread: Tensor, named: dict[str, Any]) -> Tensor:
    chance = named.get("p")
    return spread < (named["self"] if chance is None else chance)


_VALUES: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {  # operation -> what it gives
    "rand": _uniform,
    "rand_like": _uniform,
    "uniform_": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "normal": _normal,
    "normal_": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "bernoulli": _chances,
    "bernoulli_": _chances,
    "randperm": lambda spread, named: torch.arange(named["n"]),
}


__all__ = ["EqualDraws"]
