"""Hooks on a model's blocks.

A method's hooks on a block must run however the model calls the block. The model's own hooks must
run even if a method replaces the block by a stub.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tightfit._torch.modules import forward_hooks, forward_pre_hooks

Hook = tuple[Callable[..., Any], bool]  # the hook, and whether it takes keyword arguments


@dataclass(frozen=True)
class Hooks:
    """A block's own forward pre-hooks and forward hooks, such as those that collect hidden
    states."""

    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()

    def run_pre_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the pre-hooks on a call. Their results are dropped: only the block, which does not
        exist, needs them."""
        for hook, with_kwargs in self.pre_hooks:
            hook(block, args, kwargs) if with_kwargs else hook(block, args)

    def run_post_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run the hooks on the output. Their results are dropped: `output` already contains their
        changes."""
        for hook, with_kwargs in self.post_hooks:
            hook(block, args, kwargs, output) if with_kwargs else hook(block, args, output)


def hooks_of(block: nn.Module) -> Hooks:
    """The hooks that are registered on a block now."""
    return Hooks(tuple(forward_pre_hooks(block)), tuple(forward_hooks(block)))


def run_hooks_on_direct_calls(module: nn.Module, running: Callable[[], bool]) -> None:
    """From now on, a direct call `module.forward(...)` runs the module's hooks.

    Some models call `block.forward(...)` directly, which would skip the hooks of a method.

    running  returns whether the module was called with its hooks and its forward has not returned
             yet
    """
    forward = module.forward

    def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if running() else module(*args, **kwargs)

    module.forward = forward_with_hooks


__all__ = ["Hooks", "hooks_of", "run_hooks_on_direct_calls"]
