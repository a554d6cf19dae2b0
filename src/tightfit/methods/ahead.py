"""Ahead: parameters that lie in another memory come over while the block before theirs is at work.

Of several devices fully_shard begins to gather a block ahead of time, and what lies on the host goes over with it. One device
alone has nobody to gather from, and would copy a block when it begins. Here that copy begins where the gathering would, on a
stream of its own; into which memory, and what is freed when, stays fully_shard's.

Source  Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 6.2 (overlap by prefetching).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def bring_ahead(model: nn.Module, blocks: Sequence[nn.Module], groups: Iterable[Any], device: torch.device) -> None:
    """Let each block's parameters come while the one before it runs, in forward and in backward.

    groups  fully_shard's of the whole model. Their order in backward is fully_shard's own: that of forward, reversed.
    """
    stream = torch.get_device_module(device).Stream()
    for group in groups:
        _Ahead(group, device, stream)
    before = model
    for block in blocks:
        assert isinstance(before, FSDPModule)
        before.set_modules_to_forward_prefetch([module for module in block.modules() if isinstance(module, FSDPModule)])
        before = block


class _Ahead:
    """Stands before `unshard` and `wait_for_unshard` of one of fully_shard's groups of parameters: the first begins the copy,
    the second is given it in place of what lies elsewhere."""

    def __init__(self, group: Any, device: torch.device, stream: Any) -> None:
        self.group, self.device, self.stream = group, device, stream
        self.streams = torch.get_device_module(device)
        self.unshard, self.wait_for_unshard = group.unshard, group.wait_for_unshard
        self.coming: dict[Any, Tensor] = {}
        group.unshard, group.wait_for_unshard = self.begin, self.end

    def begin(self, async_op: bool = False) -> None:
        self.unshard(async_op)
        if self.group._all_gather_result is None or self.coming:
            return
        self.stream.wait_stream(self.streams.current_stream())  # an update may be on its way to the host
        with self.streams.stream(self.stream):
            for held in self.group.fsdp_params:
                there = held._sharded_param_data
                here = torch.empty_like(there, device=self.device, pin_memory=False)
                self.coming[held] = here.copy_(there, non_blocking=True)

    def end(self) -> None:
        current = self.streams.current_stream()
        current.wait_stream(self.stream)
        there = {held: held._sharded_param_data for held in self.coming}
        for held, here in self.coming.items():
            held._sharded_param_data = here
            if self.device.type != "cpu":
                here.record_stream(current)
        try:
            self.wait_for_unshard()
        finally:
            for held, rows in there.items():
                held._sharded_param_data = rows
            self.coming.clear()
