"""Make the device mesh of a run: the parallel axes, their process groups, and this process's ranks.

There is one process for each device. The axes are, outermost first: pp (the stages of a pipeline),
dp_replicate (replicas of the model), dp_shard (over which ZeRO shards) and tp (tensor parallelism).
The axis that communicates most is innermost, so that its devices are closest to each other. With
context parallelism, cp neighbouring devices share the same samples. They are neighbours along
dp_shard or, without ZeRO, along dp_replicate.

`build` calls `make_mesh` once for a plan. `links.py` predicts the time of the communication along
an axis.

Source  PyTorch's DeviceMesh; the order of the axes is that of Narayanan et al. 2021,
        arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tightfit._torch.dispatch import without_dispatch_modes
from tightfit._torch.distributed import group_timeout, set_group_timeout
from tightfit.distributed.processes import BACKENDS, check_world, join, local_device
from tightfit.plan import Plan
from tightfit.target_device import has_own_memory

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA = ("dp_replicate", "dp_shard")  # the axes along which samples are sharded


@dataclass(frozen=True)
class Mesh:
    """The devices of a run, and this process's position among them.

    axes        maps the name of each axis to its DeviceMesh, and a tuple of names to the DeviceMesh
                of these axes together
    other_groups
                maps a name to a process group that is not the group of an axis. "forward" and
                "backward": the devices of this process's pipeline, for messages in that direction.
                "forward around" and "backward around": the same devices, for messages between the
                last and the first. "ends": the first and the last device of the pipeline. "server":
                a parameter server and its workers. "context": the devices that share the same
                samples. "layers": the devices that hold the same layers' parameters, or shards of
                them
    servers     how many of the first processes along dp_replicate are parameter servers, which have
                no samples
    cp          how many devices share the same samples, each with its own part of the sequences

    Example: pp=2, dp_replicate=1, dp_shard=2, tp=2 is eight processes. Ranks 0 to 3 hold the first
    stage and ranks 4 to 7 the second. Rank 5 has coordinates (1, 0, 0, 1): its tp group is {4, 5},
    its dp_shard group {5, 7}, and it exchanges activations with rank 1.
    """

    axes: dict[str | tuple[str, ...], DeviceMesh]
    other_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    servers: int = 0
    cp: int = 1

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis."""
        return self.axes[axis].size()

    def rank(self, axis: str) -> int:
        """Return this process's rank along an axis, counted from 0."""
        return self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the devices along an axis, to which this process belongs."""
        return self.axes[axis].get_group()

    @property
    def data_rank_and_size(self) -> tuple[int, int]:
        """Return (rank, size) in data parallelism. A step's samples are divided into `size` equal
        shares, and this device trains on share number `rank`, counted from 0. The `cp` devices that
        share samples have the same rank.
        """
        number, count = self._data_position
        return number // self.cp, count // self.cp

    @property
    def cp_rank(self) -> int:
        """Return the rank in context parallelism, from 0 to `cp` - 1. It selects the chunks of each
        sequence that this device has.
        """
        return self._data_position[0] % self.cp

    @property
    def rng_rank(self) -> int:
        """Return a number that selects this device's random numbers, such as its dropout masks.

        The tp devices of a group have the same number, because they work on the same activations
        and have to draw the same masks. Devices of different tp groups have different numbers.
        """
        return self._data_position[0] * self.size("pp") + self.rank("pp")

    @property
    def _data_position(self) -> tuple[int, int]:
        """Return (rank, size) along both axes of DATA together, without the servers. A server has
        rank 0.
        """
        replica, replicas = self.rank("dp_replicate") - self.servers, self.size("dp_replicate") - self.servers
        return max(replica, 0) * self.size("dp_shard") + self.rank("dp_shard"), replicas * self.size("dp_shard")

    def all_reduce(
        self, values: Tensor, axes: tuple[str, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """All-reduce `values` in place over the devices along all of `axes`, and return `values`.

        values  a tensor of any shape, on any device
        axes    names of axes
        op      the reduction; by default a sum
        """
        for axis in axes:
            if self.size(axis) > 1:
                self.all_reduce_in_group(values, self.group(axis), op)
        return values

    def all_reduce_in_group(
        self, values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """All-reduce `values` in place over the devices of `group`, and return `values`.

        NCCL needs contiguous tensors on the GPU. So if `values` is offloaded or not contiguous, it
        is copied to the device, reduced there and copied back.

        op  the reduction; by default a sum
        """
        on_device = self.to_device(values)
        dist.all_reduce(on_device, op, group=group)
        return values if on_device is values else values.copy_(on_device)

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return local_device(self.axes["pp"].device_type)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in a form that collectives accept: contiguous, and on this process's
        device. It is copied only if necessary.
        """
        off_device = tensor.device.type != self.device.type
        return (tensor.to(self.device) if off_device else tensor).contiguous()

    def begin_all_reduce(self, values: Tensor, axes: tuple[str, ...]) -> PendingSum:
        """Begin to all-reduce (sum) `values` in place over the devices along `axes`. Return a
        `PendingSum`, whose `wait` completes the sum; the caller can compute until then.

        Only the sum along the first axis begins at once. The sum along a second axis needs its
        result, so it runs in `wait`.
        """
        several = [axis for axis in axes if self.size(axis) > 1]
        if not several:
            return PendingSum(values)
        work = dist.all_reduce(values, group=self.group(several[0]), async_op=True)
        return PendingSum(values, work, partial(self.all_reduce, axes=tuple(several[1:])))


class PendingSum:
    """An all-reduce (sum) that has begun. `wait` completes it and returns the sum.

    values  this device's summand, which the sum replaces in place
    work    the handle of the all-reduce in flight; None if `values` already is the sum
    finish  called with `values` after the all-reduce to complete the sum, such as an all-reduce
            along a second axis; None: nothing is left to do
    """

    def __init__(self, values: Tensor, work: Any = None, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        self._values, self._work, self._finish = values, work, finish

    def wait(self) -> Tensor:
        """Wait for the sum and return it. On a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._finish is not None:
                self._finish(self._values)
        return self._values


def make_mesh(plan: Plan, device: torch.device) -> Mesh | None:
    """Return the mesh of a plan, or None if the plan needs no mesh.

    A plan for one device needs a mesh only if its parameters are offloaded from a GPU, because
    torch's fully_shard asks for one. If a mesh is needed, this function also initializes the
    default process group, unless that has been done.

    device  this process's device

    Raises InputError if the number of processes is not the plan's number of devices.
    """
    check_world(plan)
    if plan.devices == 1 and not ("parameters" in plan.offload and has_own_memory(device)):
        return None
    join(device.type)
    return _mesh(device.type, (plan.pp, plan.replicas + plan.servers, plan.shards, plan.tp), plan.servers, plan.cp)


_meshes: dict[tuple[str, tuple[int, ...], int, int], Mesh] = {}
_world: dist.ProcessGroup | None = None  # the default group that the meshes of `_meshes` belong to


def _mesh(kind: str, sizes: tuple[int, ...], servers: int, cp: int) -> Mesh:
    """Return the mesh with these sizes. All runs of this process share it, because the process
    groups of a mesh keep threads and connections.

    kind     the kind of device: "cpu" or "cuda"
    sizes    the number of devices along each axis, in the order of AXES
    servers  the number of parameter servers
    cp       how many devices share the same samples
    """
    global _world
    if dist.group.WORLD is not _world:
        forget_meshes()
        _world = dist.group.WORLD
    known = kind, sizes, servers, cp
    if known not in _meshes:
        with without_dispatch_modes():  # the groups are real, also under FakeTensorMode
            devices = init_device_mesh(kind, sizes, mesh_dim_names=AXES)
            axes: dict[str | tuple[str, ...], DeviceMesh] = {
                **{axis: devices[axis] for axis in AXES},
                DATA: devices[DATA],
            }
            lines = _pipeline_groups(devices) if sizes[0] > 1 else {}
            # messages are in host memory, and the server receives from any worker (gloo)
            if servers:
                lines["server"] = dist.new_group(backend=None if dist.get_backend() == "fake" else "gloo")
            # parameters may be sharded or offloaded
            if sizes[2] > 1 or (sizes[1] > 1 and kind != "cpu"):
                lines["layers"] = _same_layers_group(devices)
            if cp > 1:
                lines["context"] = _context_group(devices, cp)
            _meshes[known] = Mesh(axes, lines, servers, cp)
            _set_timeouts([*(axes[axis].get_group() for axis in AXES), *lines.values()])
    return _meshes[known]


def _set_timeouts(groups: list[dist.ProcessGroup]) -> None:
    """Give `groups` the time-out of the default process group, because torch creates a new group
    with torch's own default.
    """
    if dist.get_backend() not in BACKENDS.values():
        return
    device = torch.device({backend: kind for kind, backend in BACKENDS.items()}[dist.get_backend()])
    timeout = group_timeout(_world_group(), device)
    for group in groups:
        set_group_timeout(timeout, group)


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


PIPELINE_GROUPS = ("forward", "backward", "forward around", "backward around", "ends")


def forget_meshes() -> None:
    """Drop the cached meshes, so that their process groups can be freed."""
    global _world
    _meshes.clear()
    _world = None


def _pipeline_groups(devices: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Create the point-to-point process groups of all pipelines. Return those of this process's
    pipeline, by name (see PIPELINE_GROUPS).

    Each direction has its own group, so that a send in one direction never waits for a receive in
    the other.

    devices  the mesh of all axes
    """
    groups = {}
    # every process must create all groups, in the same order
    for row in devices.mesh.flatten(1).t().tolist():
        for name in PIPELINE_GROUPS:
            members = [row[0], row[-1]] if name == "ends" else row
            group = dist.new_group(members)
            if dist.get_rank() in members:
                groups[name] = group
    return groups


def _context_group(devices: DeviceMesh, cp: int) -> dist.ProcessGroup:
    """Create the groups of context parallelism, and return the group of this process: the `cp`
    neighbours along the data axes that share the same samples.

    devices  the mesh of all axes
    """
    rows = devices.mesh.flatten(1, 2).transpose(1, 2).reshape(-1, cp).tolist()
    groups = [
        (members, dist.new_group(members)) for members in rows
    ]  # every process must create all, in the same order
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine


def _same_layers_group(devices: DeviceMesh) -> dist.ProcessGroup:
    """Create one group for each pipeline stage, and return the group of this process: all devices
    that have the same layers. Its collectives take tensors in host memory.

    devices  the mesh of all axes
    """
    backend = None if dist.get_backend() == "fake" else "gloo"
    groups = [(members, dist.new_group(members, backend=backend)) for members in devices.mesh.flatten(1).tolist()]
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine
