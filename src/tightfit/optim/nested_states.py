"""Optimizer states that are lists, tuples or dicts of tensors, as those of some users' optimizers are.

A checkpoint holds their tensors and, as plain data, how they are nested.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

PACKED = "codes"  # a key of the dict that holds a state in 8 or 4 bits (see `quantize.py`)
NESTED = "nested"  # key of the plain data that describes a nested state


def is_nested(value: Any) -> bool:
    """Return whether a state is a list, tuple or dict, other than one that tightfit has quantized."""
    return isinstance(value, list | tuple) or (isinstance(value, dict) and PACKED not in value)


def flatten_state(value: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Return (plain data that describes how a nested state is made of tensors, the tensors)."""
    tensors: list[Tensor] = []

    def described(one: Any) -> Any:
        if isinstance(one, Tensor):
            tensors.append(one)
            return {"tensor": len(tensors) - 1}
        if isinstance(one, dict):
            return {"dict": [[key, described(each)] for key, each in one.items()]}
        if isinstance(one, list | tuple):
            return {"list" if isinstance(one, list) else "tuple": [described(each) for each in one]}
        return {"value": one}

    return {NESTED: described(value)}, tensors


def rebuild_state(description: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Return the nested state that `flatten_state` has described.

    tensors  number of a tensor, as text -> the tensor
    """

    def made(one: dict[str, Any]) -> Any:
        (kind, content), *_ = one.items()
        if kind == "tensor":
            return tensors[str(content)]
        if kind == "dict":
            return {key: made(each) for key, each in content}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(made, content))
        return content

    return made(description[NESTED])


__all__ = ["NESTED", "flatten_state", "is_nested", "rebuild_state"]
