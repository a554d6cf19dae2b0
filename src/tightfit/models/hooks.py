"""Hooks on a model's blocks: those that a method needs run however the model calls a block, and the model's own run where a method
puts something in the place of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Hook = tuple[Callable[..., Any], bool]  # and whether it takes keyword arguments


@dataclass(frozen=True)
class Hooks:
    """A block's own forward hooks, such as those with which a model collects hidden states."""

    before: tuple[Hook, ...] = ()
    after: tuple[Hook, ...] = ()

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run those that look at a call. What they return is for the block, which is not there."""
        for hook, with_kwargs in self.before:
            hook(block, args, kwargs) if with_kwargs else hook(block, args)

    def leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run those that look at the output, which is already what they have made of it."""
        for hook, with_kwargs in self.after:
            hook(block, args, kwargs, output) if with_kwargs else hook(block, args, output)


def hooks_of(block: nn.Module) -> Hooks:
    before = tuple(
        (hook, key in block._forward_pre_hooks_with_kwargs) for key, hook in block._forward_pre_hooks.items()
    )
    after = tuple((hook, key in block._forward_hooks_with_kwargs) for key, hook in block._forward_hooks.items())
    return Hooks(before, after)


def run_hooks_on_direct_calls(module: nn.Module, running: Callable[[], bool]) -> None:
    """Some models call `block.forward(...)`, which runs none of the hooks that a method puts on the block. From now on such a call
    runs them.

    running  whether the module was called with its hooks, and its forward has not returned
    """
    forward = module.forward

    def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if running() else module(*args, **kwargs)

    module.forward = forward_with_hooks


__all__ = ["Hooks", "hooks_of", "run_hooks_on_direct_calls"]
