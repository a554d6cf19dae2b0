"""Recompute activations in backward instead of keeping them.

Saves   the activations inside each recomputed block; keeps its input (sqrt: the input of each segment).
Costs   one more forward of each recomputed block, 20 to 30 % of the time; selective: of its cheap operations only.
When    activations are what does not fit. selective first, then every-2, full; sqrt for very many thin blocks.
Order   wraps blocks; before compile, so that the recomputation is compiled too.
Source  Chen et al. 2016, arXiv:1604.06174 (sqrt); selective: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.methods.run import Run
from tightfit.models import find_blocks
from tightfit.plan import Plan

Forward = Callable[..., Any]


VARIANTS = ({"recompute": "full"}, {"recompute": "selective"}, {"recompute": "every-2"}, {"recompute": "sqrt"})


def wanted(plan: Plan) -> bool:
    return plan.recompute != "none"


def apply(run: Run, plan: Plan) -> Run:
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = [block for _, block in find_blocks(run.model, name)]
    if not blocks:
        raise InputError(
            f"plan: recompute={plan.recompute}",
            f"{type(run.model).__name__} has no repeated blocks to recompute",
            "name its list of blocks in the job (model: {..., blocks: encoder.layers}), or use recompute: none",
        )
    if plan.recompute == "sqrt":
        length = round(math.sqrt(len(blocks)))
        for start in range(0, len(blocks), length):
            recompute_segment(blocks[start : start + length])
        return run
    every = int(plan.recompute.removeprefix("every-")) if plan.recompute.startswith("every-") else 1
    for block in blocks[::every]:
        block.forward = recomputed(block.forward, [block], selective=plan.recompute == "selective")
    return run


def recomputed(forward: Forward, modules: list[nn.Module], selective: bool = False) -> Forward:
    """`forward` of `modules`, keeping its inputs only (selective: and its products).

    The second forward draws dropout's numbers again, and begins from the buffers that the first began from and leaves
    them as it found them: running statistics are updated once, and a buffer that the output depends on is the same.
    """
    buffers = ChangingBuffers([buffer for module in modules for buffer in module.buffers()])

    def forward_again_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes operations, and changes a buffer once
            contexts: dict[str, Any] = (
                {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)} if selective else {}
            )
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
        before = buffers.values()
        output = checkpoint(
            forward, *args, use_reentrant=False, context_fn=partial(contexts_of, buffers, before, selective), **kwargs
        )
        buffers.notice(before)
        return output

    return forward_again_in_backward


class ChangingBuffers:
    """The buffers of a block that its forward changes, found in the first forward (batch_norm moves no version counter)."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers, self.known = buffers, False

    def values(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, copy) of each buffer that may change."""
        return [(buffer, buffer.clone()) for buffer in self.buffers]

    def notice(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """After the first forward: keep the buffers that it changed, and no others."""
        if not self.known:
            self.buffers, self.known = [buffer for buffer, copy in before if not torch.equal(buffer, copy)], True

    @contextmanager
    def rewound(self, before: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within, the buffers are as they were before the forward; afterwards as they were on entering."""
        changed = [(buffer, copy) for buffer, copy in before if any(buffer is one for one in self.buffers)]
        now = [buffer.clone() for buffer, _ in changed]
        with torch.no_grad():
            for buffer, copy in changed:
                buffer.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for (buffer, _), value in zip(changed, now, strict=True):
                    buffer.copy_(value)


def contexts_of(
    buffers: ChangingBuffers, before: list[tuple[Tensor, Tensor]], selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds the first forward and the second."""
    first, second = create_selective_checkpoint_contexts(keep_products) if selective else (nullcontext(), nullcontext())

    @contextmanager
    def again() -> Iterator[None]:
        with buffers.rewound(before), second:
            yield

    return first, again()


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_attention_math_for_mps.default,
    }
)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matrix products, convolutions and attention are kept; what is cheap to compute again is not."""
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_segment(blocks: list[nn.Module]) -> None:
    """Make the first block run the whole segment, recomputed as one, and the others hand its output on.

    The model keeps calling its blocks in a row and need not know. That only works where each block's output is the
    next one's first argument and the other arguments are shared; a model that does otherwise is refused when it runs.
    """
    forwards = [block.forward for block in blocks]

    def chain(first: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            first = forward(first, *args, **kwargs)
        return first

    whole = recomputed(chain, blocks)
    last_call: dict[str, Any] = {}

    def head(first: Any, *args: Any, **kwargs: Any) -> Any:
        output = whole(first, *args, **kwargs)
        last_call.update(output=output, args=args, kwargs=kwargs)
        return output

    def hand_on(position: int, first: Any, *args: Any, **kwargs: Any) -> Any:
        shared = len(args) == len(last_call["args"]) and kwargs.keys() == last_call["kwargs"].keys()
        shared = shared and all(a is b for a, b in zip(args, last_call["args"], strict=True))
        shared = shared and all(kwargs[name] is last_call["kwargs"][name] for name in kwargs)
        if first is not last_call["output"] or not shared:
            raise InputError(
                "plan: recompute=sqrt",
                "the model does more between its blocks than hand one's output to the next",
                "use recompute: full, which needs no such order",
            )
        if position == len(forwards) - 1:
            last_call.clear()
        return first

    blocks[0].forward = head
    for position, block in enumerate(blocks[1:], start=1):
        block.forward = partial(hand_on, position)
