"""Sequences sharded over tensor-parallel devices, in tests that need no process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tightfit.parallel.tensor.sequence_parallel import local_shard
from tightfit.planner.tracing.device_emulation import fake_process_group


def test_a_shard_of_one_sample_does_not_keep_the_whole() -> None:
    """A shard of one sample is already contiguous: a view would keep all of it, and have other
    strides than the next block's input."""
    with fake_process_group(2):
        assert dist.group.WORLD is not None
        part = local_shard(torch.arange(32.0).view(1, 8, 4), dist.group.WORLD)
    assert part.untyped_storage().nbytes() == part.nbytes
    assert part.stride() == (16, 4, 1)
    assert part.flatten().tolist() == list(range(16))
