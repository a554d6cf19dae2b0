"""Tensors in nested containers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tightfit._torch.pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested containers: in a batch, or in an operation's arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


__all__ = ["tensors_in"]
