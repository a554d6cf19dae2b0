"""Predict the GPU memory of NCCL's communicators.

NCCL allocates the buffers of a process group's communicator outside of torch's allocator, when the
group is first used, and keeps them. A communicator sends through several channels at once, more of
them where links are faster. In each channel, every connection has a buffer for each of NCCL's three
protocols. A ring connects a device to one device on either side, and a tree connects it to its
parent and its children.

Source  NCCL: DEFAULT_BUFFSIZE and computeBuffSizes (src/init.cc), p2pRecvSetup (src/transport/
        p2p.cc), the buffers' memory (src/transport/net.cc) and ncclTopoPostset (src/graph/
        connect.cc). The total for groups of 2 and 4 devices is within 1 % of those measured on
        4 A100 (NVIDIA/nccl issue 964: 544 and 688 MiB).

Example: 8 A100 with NVLink and ZeRO-2. The group of dp_shard has 24 channels, and each device has
one ring and 2 x 7 / 8 tree connections in a channel: 24 x 2.75 x 11.33 MiB = 748 MiB. The group of
all processes, over which checkpoints agree, takes the same.
"""

from __future__ import annotations

from tightfit.distributed.links import group_shape
from tightfit.machine import Machine
from tightfit.plan import Plan

# Bytes of one connection, there and back. Within a node: 0.5 MiB for protocol LL, 4.7 for LL128 and
# 4 for Simple, in blocks of 2 MiB. The value is the measured 544 MiB of 24 channels with two
# connections each. Between nodes, LL128 and Simple of both directions are on the GPU.
INSIDE_BYTES, BETWEEN_BYTES = 544 * 2**20 // 48, 2 * 9110 * 2**10
CHANNELS_BETWEEN = 4  # of a communicator with one device per node
P2P_CHANNELS_BETWEEN = 2  # for messages between two devices of different nodes
LINK_BYTES_PER_CHANNEL = 9.7e9  # bytes/s that one direction of a link reaches
MOST_CHANNELS = 24


def communicator_bytes(plan: Plan, machine: Machine) -> int:
    """Return the bytes that NCCL allocates on each GPU for the process groups of `plan`; 0 for one
    device, and on a CPU, where gloo's buffers belong to the process.

    The groups are those of the mesh's axes, that of context parallelism, those of a pipeline's
    messages in both directions, and the group of all processes.
    """
    if machine.device == "cpu" or plan.devices == 1:
        return 0
    axes = ["tp", "dp_shard"] + ["dp_replicate"] * (not plan.servers)
    found = sum(_collective_bytes(machine, *group_shape(plan, (axis,))) for axis in axes)
    found += _collective_bytes(machine, 1, plan.devices)
    if plan.pp > 1:
        found += 2 * _message_bytes(machine, *group_shape(plan, ("pp",)))
    if plan.cp > 1:
        found += _message_bytes(machine, *group_shape(plan, ("cp",)))
    return round(found)


def _collective_bytes(machine: Machine, stride: int, size: int) -> float:
    """Return the bytes of a communicator for collectives: of a ring and of a tree.

    stride  the difference between the ranks of two neighbours of the group
    size    the number of devices of the group
    """
    if size == 1:
        return 0.0
    within = min(max(machine.devices_per_node // stride, 1), size)
    if within == 1:
        return CHANNELS_BETWEEN * 2 * BETWEEN_BYTES
    return _channels(machine) * (1 + 2 * (within - 1) / within) * INSIDE_BYTES


def _message_bytes(machine: Machine, stride: int, size: int) -> float:
    """Return the bytes of a communicator for messages from each device to the next one. The
    parameters are those of `_collective_bytes`."""
    if stride * size > machine.devices_per_node:
        return P2P_CHANNELS_BETWEEN * BETWEEN_BYTES
    return 2 ** (_channels(machine) - 1).bit_length() * INSIDE_BYTES


def _channels(machine: Machine) -> int:
    """Return the number of channels of a communicator within a node: 24 for the NVLink of an A100
    or a later GPU, 12 for that of a V100, 4 for PCIe."""
    link = machine.process_bytes_per_s
    return min(max(round((link.value if link else 0.0) / LINK_BYTES_PER_CHANNEL), 4), MOST_CHANNELS)
