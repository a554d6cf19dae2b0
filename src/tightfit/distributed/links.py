"""Predict what communication along a mesh axis costs: its bandwidth, its latency and its ledger
entry.

The cost functions of the methods call `message`. No process group is needed.

Example: 16 GPUs in 2 nodes of 8, dp_shard=8 and dp_replicate=2. The devices of a dp_shard group are
in one node, so they communicate at the rate of the link inside the node. The devices of a
dp_replicate group are in two nodes, so they communicate over the network.
"""

from __future__ import annotations

import math

from tightfit.cost.entries import Message
from tightfit.machine import Machine
from tightfit.plan import Plan

DEFAULT_BYTES_PER_S = 1e9  # bytes/s; used until the machine has been calibrated


def group_shape(plan: Plan, axes: tuple[str, ...]) -> tuple[int, int]:
    """Return (stride, size) of a mesh axis.

    The stride is the difference between the ranks of two neighbours along the axis. The size is the
    number of devices along the axis. Example: tp=2 and dp_shard=4 give (2, 4) for ("dp_shard",).

    axes  the name of the axis in a tuple of one element: one of AXES, or "cp"
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
    """Return the bandwidth, in bytes/s, with which one device sends along a mesh axis.

    If all devices along the axis are in one node, this is the bandwidth of the link inside a node.
    Otherwise it is that of the network. Before the machine has been calibrated, it is
    DEFAULT_BYTES_PER_S.

    Each device of a node has its own link to the network. A collective uses the links of all its
    devices in the node, so their bandwidths add up, to at most the bandwidth inside the node. A
    point-to-point message (pp, cp, or to and from a server) uses its own device's link only.

    axes  the name of the axis in a tuple of one element: one of AXES, or "cp"
    """
    inside = machine.process_bytes_per_s
    between = machine.network_bytes_per_s or inside
    if inside is None or between is None:
        return DEFAULT_BYTES_PER_S
    stride, size = group_shape(plan, axes)
    if stride * size <= machine.devices_per_node:
        return inside.value
    alone = axes[0] in ("pp", "cp") or plan.servers
    taking_part = 1 if alone else max(machine.devices_per_node // stride, 1)
    return min(between.value * taking_part, max(inside.value, between.value))


def latency(plan: Plan, machine: Machine, axes: tuple[str, ...], rounds: int) -> float:
    """Return the latency, in seconds, of one call along a mesh axis: the time that does not depend
    on the number of bytes.

    axes    the name of the axis in a tuple of one element: one of AXES, or "cp"
    rounds  how many times a collective passes around the ring: once for an all-gather or a
            reduce-scatter, twice for an all-reduce. A point-to-point message (pp, cp, or to and
            from a server) passes one link, whatever `rounds` is
    """
    inside = machine.process_latency_s.value if machine.process_latency_s else 0.0
    between = machine.network_latency_s.value if machine.network_latency_s else inside
    start = machine.call_s.value if machine.call_s else 0.0
    stride, size = group_shape(plan, axes)
    # how many devices along the axis are in one node
    within = max(machine.devices_per_node // stride, 1)
    if axes[0] in ("pp", "cp") or plan.servers:
        return start + (inside if stride * size <= machine.devices_per_node else between)
    nodes = math.ceil(size / within)
    return start + rounds * ((size - nodes) * inside + (nodes - 1) * between)


def message(
    name: str, size: float, plan: Plan, machine: Machine, axes: tuple[str, ...], calls: float = 1, rounds: int = 1
) -> Message:
    """Return the ledger's entry for the communication of one step along a mesh axis.

    The entry holds the bytes, the bandwidth and the total latency. On a GPU the communication
    overlaps with computation. On a CPU it does not, because the CPU itself does the work.

    name    the name under which the ledger lists the communication, such as "gradients"
    size    the bytes that each device sends in a step
    axes    the name of the axis in a tuple of one element: one of AXES, or "cp"
    calls   the number of calls in a step among which the bytes are divided
    rounds  how many times each call passes around the ring: 1 for an all-gather or a
            reduce-scatter, 2 for an all-reduce
    """
    waits = calls * latency(plan, machine, axes, rounds)
    return Message(name, size, bandwidth(plan, machine, axes), overlaps=machine.device == "cuda", latency_s=waits)
