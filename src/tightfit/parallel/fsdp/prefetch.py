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

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def prefetch_blocks(model: nn.Module, blocks: Sequence[nn.Module], groups: Iterable[Any], device: torch.device) -> None:
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

    def __init__(self, group: Any, device: torch.device, stream: Any) -> None:
        self.group, self.device, self.stream = group, device, stream
        self.streams = torch.get_device_module(device)
        self.unshard, self.wait_for_unshard = group.unshard, group.wait_for_unshard
        self.prefetched: dict[Any, Tensor] = {}
        group.unshard, group.wait_for_unshard = self.begin, self.end

    def begin(self, async_op: bool = False) -> None:
        """Replaces `unshard`."""
        self.unshard(async_op)
        if self.group._all_gather_result is None or self.prefetched:
            return
        # a copy of updated weights to the host may be in flight
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            for held in self.group.fsdp_params:
                there = held._sharded_param_data
                here = torch.empty_like(there, device=self.device, pin_memory=False)
                self.prefetched[held] = here.copy_(there, non_blocking=True)

    def end(self) -> None:
        """Replaces `wait_for_unshard`."""
        current = self.streams.current_stream()
        current.wait_stream(self.stream)
        there = {held: held._sharded_param_data for held in self.prefetched}
        for held, here in self.prefetched.items():
            held._sharded_param_data = here
            if self.device.type != "cpu":
                here.record_stream(current)
        try:
            self.wait_for_unshard()
        finally:
            for held, rows in there.items():
                held._sharded_param_data = rows
            self.prefetched.clear()
