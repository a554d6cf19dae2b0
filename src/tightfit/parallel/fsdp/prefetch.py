"""Prefetch offloaded parameters: copy each block's parameters to the device while the block before
it computes.

With several devices, fully_shard begins the all-gather of the next block early, and this all-gather
includes the copy from host memory. One device gathers nothing, so fully_shard would begin the copy
only when the block begins. This module begins the copy at the moment when an all-gather would
begin, on a separate stream. fully_shard still decides which memory is used and when it is freed.

Source  Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 6.2 (overlap by
        prefetching).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tightfit._torch.fsdp import (
    ParameterGroup,
    ParameterRecord,
    add_to_gather,
    has_pending_gather,
    padded_shard,
    records,
    set_padded_shard,
)


def prefetch_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], groups: Iterable[ParameterGroup], device: torch.device
) -> None:
    """Prefetch each block's parameters while the block before it computes, in forward and in
    backward.

    model   the model, to which fully_shard has been applied
    blocks  the model's blocks in forward order
    groups  all of fully_shard's parameter groups of the model
    device  the device to which the parameters are copied

    Only the forward order is set here. In backward, fully_shard itself prefetches in the reverse
    order.
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
    """Makes fully_shard copy the parameters of one group to the device early.

    The copy from host memory to the device begins when fully_shard begins to gather the group. When
    fully_shard ends the gather, it reads this copy in place of the shard in host memory.

    group   fully_shard's parameter group
    device  the device to which the parameters are copied
    stream  the stream on which the copies run
    """

    def __init__(self, group: ParameterGroup, device: torch.device, stream: Any) -> None:
        self.group, self.device, self.stream = group, device, stream
        self.streams = torch.get_device_module(device)
        self.prefetched: dict[ParameterRecord, Tensor] = {}
        add_to_gather(group, self.begin, self.using_copies)

    def begin(self) -> None:
        """Begin the copy to the device. fully_shard calls this after it has begun the gather.

        Does nothing if no gather is in flight, or if the copy has begun already.
        """
        if not has_pending_gather(self.group) or self.prefetched:
            return
        # the current stream may still copy updated weights to the host
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            for held in records(self.group):
                on_host = padded_shard(held)
                on_device = torch.empty_like(on_host, device=self.device, pin_memory=False)
                self.prefetched[held] = on_device.copy_(on_host, non_blocking=True)

    @contextmanager
    def using_copies(self) -> Iterator[None]:
        """Inside this context, fully_shard reads the copies on the device in place of the shards in
        host memory. The copies are freed at the end of the context.
        """
        current = self.streams.current_stream()
        current.wait_stream(self.stream)
        on_host = {held: padded_shard(held) for held in self.prefetched}
        for held, on_device in self.prefetched.items():
            set_padded_shard(held, on_device)
            if self.device.type != "cpu":
                on_device.record_stream(current)
        try:
            yield
        finally:
            for held, rows in on_host.items():
                set_padded_shard(held, rows)
            self.prefetched.clear()
