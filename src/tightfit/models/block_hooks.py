"""Make the hooks on a model's blocks run in two cases in which torch does not run them.

First, some models call `block.forward(...)` directly, which skips the hooks that a method, such as
recompute, has put on the block. Second, a pipeline stage replaces the blocks of other stages by
stubs. The model's own hooks on these blocks must also run there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from tightfit._torch.modules import forward_hooks, forward_pre_hooks
from tightfit.models.replaced_forward import replace_forward

Hook = tuple[Callable[..., Any], bool]  # the hook, and whether it takes keyword arguments


@dataclass(frozen=True)
class Hooks:
    """The forward pre-hooks and forward hooks that a model has put on one of its blocks, such as
    hooks that collect hidden states.

    If the block is on another pipeline stage, a stub takes its place in the model. The two methods
    then run these hooks on each call of the stub.
    """

    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()

    def run_pre_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the pre-hooks with the arguments of a call of the stub, for their side effects only.

        The changed arguments that a hook may return are ignored: a stub does not run a block, so it
        has no use for them.
        """
        for hook, with_kwargs in self.pre_hooks:
            hook(block, args, kwargs) if with_kwargs else hook(block, args)

    def run_post_hooks(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run the forward hooks with the arguments and the output of a call of the stub, for their
        side effects only.

        The changed output that a hook may return is ignored: the stub's output already has the
        structure that these hooks gave to the block's output when the model was traced.
        """
        for hook, with_kwargs in self.post_hooks:
            hook(block, args, kwargs, output) if with_kwargs else hook(block, args, output)


def hooks_of(block: nn.Module) -> Hooks:
    """Return the forward pre-hooks and forward hooks that a block has at this moment."""
    return Hooks(tuple(forward_pre_hooks(block)), tuple(forward_hooks(block)))


def run_hooks_on_direct_calls(module: nn.Module, running: Callable[[], bool]) -> None:
    """Replace `module.forward` by a function that also runs the module's hooks, so that models
    which call `block.forward(...)` directly do not skip them.

    running  returns True if the module's hooks have already run for the present call, as they have
             in a usual call `module(...)`. The new forward then runs only the original forward
    """
    forward = module.forward

    @wraps(forward)
    def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if running() else module(*args, **kwargs)

    replace_forward(module, forward_with_hooks)


__all__ = ["Hooks", "hooks_of", "run_hooks_on_direct_calls"]
