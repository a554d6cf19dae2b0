"""Make hooks on a model's blocks run however the model calls its blocks.

A method's hooks on a block must also run if the model calls `block.forward(...)` directly. The
model's own hooks on a block must also run if the pipeline replaces the block by a stub.
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
    """A block's own forward pre-hooks and forward hooks, such as those that collect hidden states.

    They also run if a stub stands in for the block, because the block is on another pipeline stage.
    """

    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()

    def run_pre_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the pre-hooks on a call of the stub, for their side effects only.

        Their return values are ignored. These are changed arguments for the block, and a stub runs
        no block.
        """
        for hook, with_kwargs in self.pre_hooks:
            hook(block, args, kwargs) if with_kwargs else hook(block, args)

    def run_post_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run the forward hooks on the stub's output, for their side effects only.

        Their return values are ignored. `output` already has the structure that these hooks gave to
        the block's output when the model was traced.
        """
        for hook, with_kwargs in self.post_hooks:
            hook(block, args, kwargs, output) if with_kwargs else hook(block, args, output)


def hooks_of(block: nn.Module) -> Hooks:
    """Return the forward pre-hooks and forward hooks that are registered on a block now."""
    return Hooks(tuple(forward_pre_hooks(block)), tuple(forward_hooks(block)))


def run_hooks_on_direct_calls(module: nn.Module, running: Callable[[], bool]) -> None:
    """Make direct calls `module.forward(...)` run the module's hooks, from now on.

    Some models call `block.forward(...)` directly, which would skip the hooks of a method.

    running  returns True while the module is in a call that has run its hooks. A call of forward
             then runs the original forward only
    """
    forward = module.forward

    def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if running() else module(*args, **kwargs)

    module.forward = forward_with_hooks


__all__ = ["Hooks", "hooks_of", "run_hooks_on_direct_calls"]
