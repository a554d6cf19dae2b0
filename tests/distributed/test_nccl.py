"""The memory of NCCL's communicators, compared with what others measured."""

from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tightfit.distributed.nccl import communicator_bytes
from tightfit.machine import Figure, Machine
from tightfit.planner.estimator import Estimator

CPUS = Machine(
    name="two processes",
    device="cpu",
    devices_per_node=2,
    memory_bytes=Figure(value=2**34, source="system"),
    host_memory_bytes=Figure(value=2**34, source="system"),
)
MIB = 2**20


def bytes_of(machine: str, **plan: Any) -> float:
    return communicator_bytes(tightfit.Plan(**plan), Machine.named(machine)) / MIB


@pytest.mark.parametrize(("devices", "measured"), [(2, 544), (4, 688)])
def test_communicators_of_an_a100_take_what_was_measured(devices: int, measured: float) -> None:
    """NVIDIA/nccl issue 964. The plan has two groups of these devices: that of the axis, and that of all processes."""
    found = bytes_of(f"a100-80gb:{devices}", zero=2, dp_shard=devices)
    assert found / 2 == pytest.approx(measured, rel=0.02)


def test_one_device_and_cpus_have_no_communicators() -> None:
    assert bytes_of("a100-80gb:8") == 0
    assert communicator_bytes(tightfit.Plan(dp_replicate=2), CPUS) == 0


def test_faster_links_and_more_groups_take_more() -> None:
    pcie, v100, a100 = (bytes_of(f"{name}:2", dp_replicate=2) for name in ("rtx-4090", "v100-32gb", "a100-80gb"))
    assert 0 < pcie < v100 < a100
    one, two = bytes_of("a100-80gb:8", tp=8), bytes_of("a100-80gb:8", tp=4, dp_replicate=2)
    assert one < two < bytes_of("a100-80gb:8", tp=2, dp_replicate=2, dp_shard=2, zero=2)


def test_groups_between_nodes_take_less_than_those_within() -> None:
    inside, between = bytes_of("h100-sxm:8", pp=8), bytes_of("h100-sxm:8x8", pp=8, tp=8) - bytes_of("h100-sxm:8", tp=8)
    assert 0 < between < inside


def test_the_runtime_row_includes_communicators() -> None:
    machine = Machine.named("a100-80gb:8")
    estimator = Estimator(cases.job("llama"), machine)
    plan = tightfit.Plan(dp_replicate=8, micro_batch=1)
    row = estimator.estimate(plan).peak.rows["runtime"]
    assert row == estimator.runtime_bytes + communicator_bytes(plan, machine)
    assert estimator.memory_lower_bound(plan) >= row
