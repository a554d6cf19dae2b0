"""Prefetch of offloaded parameters: the next block's are copied to the device while the block
before it computes.

With several devices, fully_shard begins the all-gather of the next block early, and the copy from
host memory is part of it. One device has nothing to gather, so fully_shard would begin the copy
only when the block begins. This module begins the copy where the all-gather would begin, on a
stream of its own. fully_shard still decides which memory is used and when it is freed.

Source  Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 6.2 (overlap by
        prefetching).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tightfit._torch.fsdp import (
    ParameterGroup,
    ParameterRecord,
    has_pending_gather,
    padded_shard,
    records,
    set_padded_shard,
    wrap_unshard,
)


def prefetch_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], groups: Iterable[ParameterGroup], device: torch.device
) -> None:
    """Prefetch each block's parameters while the block before it computes, in forward and in
    backward.

    blocks  the model's blocks in forward order
    groups  fully_shard's parameter groups of the whole model. Their order in backward is
            fully_shard's own, the reverse of forward
    device  the device that they are copied to
    """
    stream = torch.get_device_module(device).Stream()
    for group in groups:
        _Prefetch(group, device, stream)
    before = model
    for block in blocks:
        assert isinstance(before, FSDPModule)
        before.set_modules_to_forward_prefetch([module for module in block.modules() if isinstance(module, FSDPModule)])
        before = block


class _Prefetch:
    """Wraps `unshard` and `wait_for_unshard` of one of fully_shard's parameter groups. `unshard`
    begins the copy. `wait_for_unshard` then uses the copy in place of the shard in host memory.
    """

    def __init__(self, group: ParameterGroup, device: torch.device, stream: Any) -> None:
        self.group, self.device, self.stream = group, device, stream
        self.streams = torch.get_device_module(device)
        self.prefetched: dict[ParameterRecord, Tensor] = {}
        wrap_unshard(group, partial(partial, self.begin), partial(partial, self.end))

    def begin(self, unshard: Callable[..., None], async_op: bool = False) -> None:
        """Replaces `unshard`."""
        unshard(async_op)
        if not has_pending_gather(self.group) or self.prefetched:
            return
        # a copy of updated weights to the host may be in flight
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            for held in records(self.group):
                there = padded_shard(held)
                here = torch.empty_like(there, device=self.device, pin_memory=False)
                self.prefetched[held] = here.copy_(there, non_blocking=True)

    def end(self, wait_for_unshard: Callable[..., None]) -> None:
        """Replaces `wait_for_unshard`."""
        current = self.streams.current_stream()
        current.wait_stream(self.stream)
        there = {held: padded_shard(held) for held in self.prefetched}
        for held, here in self.prefetched.items():
            set_padded_shard(held, here)
            if self.device.type != "cpu":
                here.record_stream(current)
        try:
            wait_for_unshard()
        finally:
            for held, rows in there.items():
                set_padded_shard(held, rows)
            self.prefetched.clear()
