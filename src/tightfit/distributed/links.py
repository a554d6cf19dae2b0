"""What the communication along a mesh axis costs: bandwidth, latency, and the ledger's messages.

The cost functions of the methods call `message`. It needs no process group.

Example: 16 GPUs in 2 nodes of 8, dp_shard=8 and dp_replicate=2. The devices of a dp_shard group are
in one node, so they communicate at the rate of the link inside it. The devices of a dp_replicate
group are in two nodes, so they communicate over the network.
"""

from __future__ import annotations

import math

from tightfit.cost.entries import Message
from tightfit.machine import Machine
from tightfit.plan import Plan

DEFAULT_BYTES_PER_S = 1e9  # bytes/s; used until the machine has been calibrated


def _stride(plan: Plan, axes: tuple[str, ...]) -> tuple[int, int]:
    """(stride, size) of `axes`: how many ranks are between neighbours along them, and their size.

    axes  axes of AXES, or ("cp",)
    """
    sizes = {"tp": plan.tp, "dp_shard": plan.shards, "dp_replicate": plan.replicas, "pp": plan.pp}
    if axes == ("cp",):
        sizes = {"tp": plan.tp, "cp": plan.cp}
    stride = 1
    for axis, size in sizes.items():
        if axis == axes[0]:
            break
        stride *= size
    return stride, sizes[axes[0]]


def bandwidth(plan: Plan, machine: Machine, axes: tuple[str, ...]) -> float:
    """The bandwidth in bytes/s with which one device sends along `axes`.

    It is that of the link inside a node if all devices along the axes are in one node, and that of
    the network otherwise.

    The rings of a collective leave a node through the links of all its devices that take part, each
    with its share of the bytes. A point-to-point message (pp, cp, or to and from a server) leaves
    through its own device's link only.

    axes  axes of AXES, or ("cp",)
    """
    inside = machine.process_bytes_per_s
    between = machine.network_bytes_per_s or inside
    if inside is None or between is None:
        return DEFAULT_BYTES_PER_S
    stride, size = _stride(plan, axes)
    if stride * size <= machine.devices_per_node:
        return inside.value
    alone = axes[0] in ("pp", "cp") or plan.servers
    taking_part = 1 if alone else max(machine.devices_per_node // stride, 1)
    return min(between.value * taking_part, max(inside.value, between.value))


def latency(plan: Plan, machine: Machine, axes: tuple[str, ...], rounds: int) -> float:
    """The seconds that one call along `axes` takes however few bytes it sends.

    rounds  how many times a collective passes the ring: once for an all-gather or reduce-scatter,
            twice for an all-reduce. Point-to-point messages (pp, cp, or to and from a server) pass
            one link
    """
    inside = machine.process_latency_s.value if machine.process_latency_s else 0.0
    between = machine.network_latency_s.value if machine.network_latency_s else inside
    start = machine.call_s.value if machine.call_s else 0.0
    stride, size = _stride(plan, axes)
    # how many devices along the axis are in one node
    within = max(machine.devices_per_node // stride, 1)
    if axes[0] in ("pp", "cp") or plan.servers:
        return start + (inside if stride * size <= machine.devices_per_node else between)
    nodes = math.ceil(size / within)
    return start + rounds * ((size - nodes) * inside + (nodes - 1) * between)


def message(
    name: str, size: float, plan: Plan, machine: Machine, axes: tuple[str, ...], calls: float = 1, rounds: int = 1
) -> Message:
    """The cost of communication along `axes` in a step, as the ledger records it.

    It overlaps with computation on a GPU. On a CPU it does not, because the CPU itself has to do
    it.

    size    the bytes that each device sends in a step
    calls   into how many calls they are divided
    rounds  as for `latency`
    """
    waits = calls * latency(plan, machine, axes, rounds)
    return Message(name, size, bandwidth(plan, machine, axes), overlaps=machine.device == "cuda", latency_s=waits)
