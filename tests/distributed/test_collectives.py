"""Collectives by row give the results of torch's own reduce-scatter and all-gather."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.distributed.collectives import all_gather, begin_reduce_scatter, reduce_scatter
from tightfit.distributed.mesh import make_mesh
from tightfit.distributed.processes import world_size
from tightfit.engine.step import take_step

HERE = "tests.distributed.test_collectives:"
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def everyone() -> dist.ProcessGroup:
    mesh = make_mesh(tightfit.Plan(dp_shard=world_size(), zero=1), torch.device("cpu"))
    assert mesh is not None
    return mesh.group("dp_shard")


def exchanged(kind: str) -> tuple[Tensor, ...]:
    """(this process's rows, the sum that it found begun and waited for, at once, all rows gathered) of whole numbers, which 16 bits
    hold exactly."""
    dtype, group = getattr(torch, kind), everyone()
    count, place = dist.get_world_size(), dist.get_rank()
    rows = torch.arange(count * 5).view(count, 5).add(10 * place).to(dtype)
    begun, at_once, everyones = torch.empty(5, dtype=dtype), torch.empty(5, dtype=dtype), torch.zeros_like(rows)
    work = begin_reduce_scatter(begun, rows.clone(), group)
    work.wait()
    reduce_scatter(at_once, rows.clone(), group)
    everyones[place] = rows[place]
    all_gather(everyones, group)
    return rows, begun, at_once, everyones


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_equal_reduce_scatter_and_all_gather(dtype: torch.dtype, count: int) -> None:
    found = together(count, HERE + "exchanged", str(dtype).removeprefix("torch."))
    whole = sum(rows for rows, *_ in found)
    for place, (_, begun, at_once, everyones) in enumerate(found):
        assert torch.equal(begun, whole[place])
        assert torch.equal(at_once, whole[place])
        assert torch.equal(everyones, torch.stack([found[other][0][other] for other in range(count)]))


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if str(func).startswith("c10d."):
            self.seen.append(func.overloadpacket._qualified_op_name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def said() -> list[str]:
    group = everyone()
    rows = torch.zeros(dist.get_world_size(), 4)
    with _Names() as names:
        reduce_scatter(torch.empty(4), rows, group)
        all_gather(rows, group)
    return names.seen


def test_gloo_reduces_each_row_to_one_device_only() -> None:
    for seen in together(2, HERE + "said"):
        assert seen == ["reduce_", "reduce_", "broadcast_", "broadcast_"]


def said_by_a_step() -> set[str]:
    plan = tightfit.Plan(dp_shard=world_size(), zero=3)
    run = tightfit.build(tiny.job(), plan)
    batches = next(run.data.steps(0, None))
    take_step(run, batches, 0)
    with _Names() as names:
        take_step(run, batches, 1)
    return set(names.seen)


def test_fully_shard_uses_the_row_collectives() -> None:
    for seen in together(2, HERE + "said_by_a_step"):
        # Sums are of counts and losses; what is gathered is three numbers of each rank (agreed.py), no row of a weight.
        assert seen == {"reduce_", "broadcast_", "allreduce_", "allgather_"}
