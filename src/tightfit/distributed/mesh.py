"""The device mesh of a run: the parallel axes, their process groups, and this process's rank in
them.

There is one process for each device. The axes are, outermost first: pp (the stages of `pipeline`),
dp_replicate (replicas of the model), dp_shard (what `zero` shards) and tp (what `tensor_parallel`
shards). The axis that communicates most is innermost, so that its devices are closest to each
other. The devices of `context_parallel` share the same samples. They are neighbours along dp_shard
or, without `zero`, along dp_replicate.

The methods call `make_mesh` once for a plan. The cost functions of the methods call `message`,
`bandwidth` and `latency`, which predict the time of the communication along an axis.

Source  PyTorch's DeviceMesh; the order of the axes is that of Narayanan et al. 2021,
        arXiv:2104.04473.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tightfit._torch.dispatch import without_dispatch_modes
from tightfit._torch.distributed import group_timeout, set_group_timeout, sharded_like
from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import BatchNorm, own_buffers, own_parameters
from tightfit._torch.tensors import version_of
from tightfit.cost.entries import Message
from tightfit.distributed.rendezvous import choose_interface, join_store
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.target_device import has_own_memory

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA = ("dp_replicate", "dp_shard")  # the axes along which samples are sharded
DEFAULT_BYTES_PER_S = 1e9  # bytes/s; used until the machine has been calibrated
_BufferRef = tuple[nn.Module, str]  # a module and the name of one of its buffers
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Mesh:
    """The devices of a run, and this process's position among them.

    axes        the DeviceMesh of each axis, by name, and of several axes, by the tuple of their
                names
    p2p_groups  process groups besides those of the axes, by name. "forward" and "backward": a
                pipeline's devices, for messages in that direction; "forward around" and "backward
                around": the same, for messages between its last and its first device; "ends": its
                first and last device. "server": a parameter server and its workers. "context": the
                devices that share the same samples. "layers": the devices that hold the same
                layers' parameters, or shards of them
    servers     how many of the first processes along dp_replicate are servers, which have no
                samples
    cp          how many devices share the same samples and shard their sequences

    Example: pp=2, dp_replicate=1, dp_shard=2, tp=2 is eight processes. Ranks 0 to 3 hold the first
    stage and ranks 4 to 7 the second. Rank 5 has coordinates (1, 0, 0, 1): its tp group is {4, 5},
    its dp_shard group {5, 7}, and it exchanges activations with rank 1.
    """

    axes: dict[str | tuple[str, ...], DeviceMesh]
    p2p_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    servers: int = 0
    cp: int = 1

    def size(self, axis: str) -> int:
        """The number of devices along an axis."""
        return self.axes[axis].size()

    def rank(self, axis: str) -> int:
        """This process's rank along an axis, from 0."""
        return self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis that contains this process."""
        return self.axes[axis].get_group()

    @property
    def data_rank_and_size(self) -> tuple[int, int]:
        """(rank, size) in data parallelism: which shard of a step's samples this device trains on,
        and the number of shards. The `cp` devices that share samples have the same rank.
        """
        number, count = self._data_position
        return number // self.cp, count // self.cp

    @property
    def cp_rank(self) -> int:
        """The rank in context parallelism, from 0 to `cp` - 1: which chunks of each sequence this
        device has.
        """
        return self._data_position[0] % self.cp

    @property
    def rng_rank(self) -> int:
        """A number that selects this device's random numbers. The tp devices share their
        activations, so they have the same number and draw the same dropout masks.
        """
        return self._data_position[0] * self.size("pp") + self.rank("pp")

    @property
    def _data_position(self) -> tuple[int, int]:
        """(rank, size) along both axes of DATA, without the servers. A server has rank 0."""
        replica, replicas = self.rank("dp_replicate") - self.servers, self.size("dp_replicate") - self.servers
        return max(replica, 0) * self.size("dp_shard") + self.rank("dp_shard"), replicas * self.size("dp_shard")

    def all_reduce(
        self, values: Tensor, axes: tuple[str, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """All-reduce `values` in place over the devices along `axes`, and return it.

        values  a tensor of any shape, on any device
        op      the reduction: a sum unless another one is given
        """
        for axis in axes:
            if self.size(axis) > 1:
                self.all_reduce_in_group(values, self.group(axis), op)
        return values

    def all_reduce_in_group(
        self, values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """All-reduce `values` in place over the devices of `group`, and return it.

        NCCL takes only contiguous tensors on the device. A tensor that is offloaded or not
        contiguous is copied to the device, reduced there and copied back.
        """
        there = self.to_device(values)
        dist.all_reduce(there, op, group=group)
        return values if there is values else values.copy_(there)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return local_device(self.axes["pp"].device_type)

    def to_device(self, tensor: Tensor) -> Tensor:
        """`tensor` as a collective can take it: contiguous and on this process's device."""
        elsewhere = tensor.device.type != self.device.type
        return (tensor.to(self.device) if elsewhere else tensor).contiguous()

    def begin_all_reduce(self, values: Tensor, axes: tuple[str, ...]) -> Callable[[], Tensor]:
        """Begin an all-reduce (sum) of `values`, in place.

        Returns a callable that waits for the result and returns it. The caller can compute
        meanwhile. Only the first axis is reduced asynchronously: a second one is reduced in the
        wait, because it needs the result of the first.
        """
        first, *others = [axis for axis in axes if self.size(axis) > 1] or [""]
        if not first:
            return lambda: values
        work = dist.all_reduce(values, group=self.group(first), async_op=True)

        def end() -> Tensor:
            work.wait()
            return self.all_reduce(values, tuple(others))

        return end


@dataclass(frozen=True)
class ParameterSharding:
    """How a parameter is sharded along `dim` over the devices of the tp axis.

    mesh         the mesh, whose tp axis shards the parameter
    shape        the shape of the full parameter
    dim          the sharded dimension
    fused_count  how many matrices the parameter holds side by side along `dim`. Each of them is
                 sharded by itself

    Example: a fused query-key-value weight of shape (3 x 64, 64) has dim=0 and fused_count=3. With
    tp=2, rank 1 holds rows 32 to 63 of each of the three matrices. Its shard has shape (96, 64).
    """

    mesh: Mesh
    shape: torch.Size
    dim: int
    fused_count: int = 1

    def range(self, rank: int | None = None) -> tuple[int, int]:
        """(begin, end) along `dim` of a device's shard within one fused matrix; end is exclusive.

        rank  the rank along tp; None: this process's
        """
        size, count = self.shape[self.dim] // self.fused_count, self.mesh.size("tp")
        rank = self.mesh.rank("tp") if rank is None else rank
        each = -(-size // count)
        return min(rank * each, size), min((rank + 1) * each, size)

    def shard(self, full: Tensor) -> Tensor:
        """This device's shard of `full`, a tensor of the full parameter's shape."""
        first, last = self.range()
        if self.fused_count == 1:
            return full.narrow(self.dim, first, last - first)
        parts = [piece.narrow(self.dim, first, last - first) for piece in full.chunk(self.fused_count, self.dim)]
        return torch.cat(parts, self.dim)

    def unshard(self, shard: Tensor) -> Tensor:
        """All-gather the full tensor from each device's shard. All devices of the tp axis must call
        it.
        """
        count, shard = self.mesh.size("tp"), self.mesh.to_device(shard)
        most = (self.range(0)[1] - self.range(0)[0]) * self.fused_count
        missing = most - shard.shape[self.dim]
        padded = (
            torch.cat([shard, shard.new_zeros(*self._padding_shape(shard, missing))], self.dim) if missing else shard
        )
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(count)]
        dist.all_gather(parts, padded.contiguous(), group=self.mesh.group("tp"))
        lengths = [last - first for first, last in map(self.range, range(count))]
        found = []
        for piece in range(self.fused_count):
            for there, length in zip(parts, lengths, strict=True):
                found.append(there.narrow(self.dim, piece * length, length))
        return torch.cat(found, self.dim)

    def _padding_shape(self, part: Tensor, length: int) -> list[int]:
        return [length if dim == self.dim else size for dim, size in enumerate(part.shape)]


@torch.no_grad()
def shard_parameter(parameter: Tensor, mesh: Mesh, full: Tensor) -> None:
    """Replace a parameter's values by its ZeRO-3 shard on this device, stored in `parameter.rows`.

    The parameter keeps its full shape, but its data occupies no memory (one number, expanded).

    parameter  the parameter; changed in place
    full       the full values, of the parameter's shape. They are sharded along dimension 0 over
               dp_shard as torch's `chunk` does; a device beyond the last chunk has a shard of no
               rows
    """
    rows = (full if full.dim() else full.view(1)).chunk(mesh.size("dp_shard"))
    rank = mesh.rank("dp_shard")
    mine = rows[rank] if rank < len(rows) else rows[0][:0]
    parameter.rows = mine.clone()  # type: ignore[attr-defined]
    if not parameter.is_meta:
        parameter.data = torch.zeros((), dtype=full.dtype, device=full.device).expand(full.shape)


def move_shards_to_meta(model: nn.Module) -> None:
    """Move the parameters that `shard_parameter` has sharded to the meta device: fully_shard
    accepts only full parameters or parameters on the meta device.
    """
    put: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is None or not hasattr(parameter, "rows"):
                continue
            if parameter not in put:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                put[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                put[parameter].rows = parameter.rows  # type: ignore[attr-defined]
            own_parameters(module)[name] = put[parameter]


@torch.no_grad()
def unshard_parameter(parameter: Tensor, mesh: Mesh) -> Tensor:
    """The full values of a parameter. If `shard_parameter` has sharded it, its shards are
    all-gathered, and all devices along dp_shard must call this.
    """
    rows: Tensor | None = getattr(parameter, "rows", None)
    if rows is None:
        return parameter.detach()
    shape = parameter.shape or torch.Size([1])
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        rows, mesh.axes["dp_shard"], [Shard(0)], run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole.view(parameter.shape)


def on_mesh_device(tensor: DTensor) -> DTensor:
    """`tensor` with its local shard on the device of its mesh, so that a collective can send it.
    The shard of an offloaded tensor is in another memory, from which it is copied.
    """
    local, kind = tensor.to_local(), tensor.device_mesh.device_type
    if local.device.type == kind:
        return tensor
    return sharded_like(local.to(local_device(kind)), tensor)


def world_size() -> int:
    """The number of processes of the run, as the process group or the launcher (torchrun, srun,
    `tightfit train --nproc`) gives it.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process among all processes of the run, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_rank_zero() -> bool:
    """Whether this process has rank 0: it writes files and prints for all processes."""
    return rank() == 0


def join(kind: str, store: dist.Store | None = None, timeout: timedelta | None = None) -> None:
    """Initialize the default process group, unless that has been done.

    kind     the kind of the processes' devices ("cpu" or "cuda"), which selects gloo or NCCL
    store    the store through which the processes find each other; None: one is made
    timeout  the time-out of each collective; None: torch's default

    Raises InputError when this process has no GPU of its own.
    """
    if not dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(local_device(kind))
        choose_interface(None)
        count = world_size()
        store = dist.HashStore() if count == 1 else dist.PrefixStore("groups", store or join_store())
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank(), world_size=count, timeout=timeout)


def check_world(plan: Plan) -> None:
    """Check that there is one process for each device of the plan. Raises InputError otherwise."""
    there = world_size()
    if plan.devices != there:
        named = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        sizes = " x ".join(f"{axis}={getattr(plan, axis)}" for axis in named if getattr(plan, axis) > 1)
        sizes += " + a server" if plan.servers else ""
        asked = f"plan: {plan.devices} devices ({sizes})" if sizes else "plan: one device"
        raise InputError(
            asked,
            f"{there} {'process trains' if there == 1 else 'processes train'}",
            f"start it with --nproc {plan.devices} (or torchrun --nproc-per-node {plan.devices}), or use dp_replicate: {there} "
            "and zero: 0",
        )


def make_mesh(plan: Plan, device: torch.device) -> Mesh | None:
    """The mesh of a plan, or None when one device needs none.

    A plan for one device needs a mesh only if its parameters are offloaded from a GPU, because
    torch's fully_shard asks for one. Initializes the process group, unless that has been done.

    Raises InputError when the number of processes is not the plan's number of devices.
    """
    check_world(plan)
    if plan.devices == 1 and not ("parameters" in plan.offload and has_own_memory(device)):
        return None
    join(device.type)
    return _mesh(device.type, (plan.pp, plan.replicas + plan.servers, plan.shards, plan.tp), plan.servers, plan.cp)


_meshes: dict[tuple[str, tuple[int, ...], int, int], Mesh] = {}
_world: dist.ProcessGroup | None = None  # the default group that the meshes of `_meshes` belong to


def _mesh(kind: str, sizes: tuple[int, ...], servers: int, cp: int) -> Mesh:
    """The mesh with these sizes. It is cached for all runs of this process, because the groups of a
    mesh keep threads and connections.
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
            lines = _p2p_groups(devices) if sizes[0] > 1 else {}
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
    """Give `groups` the time-out of the default process group: torch gives a new group its own
    default.
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


P2P_GROUPS = ("forward", "backward", "forward around", "backward around", "ends")


def forget_meshes() -> None:
    """Drop the cached meshes, so that their process groups can be freed."""
    global _world
    _meshes.clear()
    _world = None


def _p2p_groups(devices: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of this process's pipeline, by name. Each direction has its own group, so
    that a send in one direction never waits for a receive in the other.
    """
    found = {}
    # every process must create all groups, in the same order
    for row in devices.mesh.flatten(1).t().tolist():
        for name in P2P_GROUPS:
            members = [row[0], row[-1]] if name == "ends" else row
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found[name] = group
    return found


def _context_group(devices: DeviceMesh, cp: int) -> dist.ProcessGroup:
    """The group of the `cp` devices, neighbours along the data axes, that share samples with this
    one.
    """
    rows = devices.mesh.flatten(1, 2).transpose(1, 2).reshape(-1, cp).tolist()
    groups = [
        (members, dist.new_group(members)) for members in rows
    ]  # every process must create all, in the same order
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine


def _same_layers_group(devices: DeviceMesh) -> dist.ProcessGroup:
    """The group, for tensors in host memory, of the devices that have the same layers as this one."""
    backend = None if dist.get_backend() == "fake" else "gloo"
    groups = [(members, dist.new_group(members, backend=backend)) for members in devices.mesh.flatten(1).tolist()]
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine


def local_device(kind: str) -> torch.device:
    """The device of this process on its host. A launcher may show each process only its own GPU,
    which is then GPU 0.

    Raises InputError when more than one GPU is visible, but fewer than there are processes.
    """
    if kind != "cuda":
        return torch.device(kind)
    number, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= visible > 1:
        raise InputError(
            f"process {number} of this host",
            f"{visible} CUDA devices are visible to it",
            "start as many processes on a host as it has GPUs, and show each either all of them or its own",
        )
    return torch.device(kind, 0 if visible == 1 else number)


def copy_to_device(numbers: list[float], device: torch.device) -> Tensor:
    """An fp32 tensor of `numbers` on `device`, without waiting: a copy from pageable memory would
    wait for the device's other work.
    """
    there = torch.tensor(numbers, dtype=torch.float32)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


@torch.no_grad()
def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast the parameters and buffers of the first replica to all others, in place. Models
    that are initialized at random may differ between processes.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        for axis in DATA:
            if mesh.size(axis) > 1:
                dist.broadcast(tensor, group=mesh.group(axis), group_src=0)


class ReplicatedBuffers:
    """Averages over the replicas the buffers that a forward writes, such as BatchNorm's running
    statistics.

    Each replica computed them from its own samples. After `average`, all have the mean. BatchNorm's
    buffers are known in advance; the other buffers that a forward writes are found in the first
    step.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self._written: list[_BufferRef] = []
        self._candidates: list[tuple[_BufferRef, Tensor, int]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if not buffer.is_floating_point():
                    continue
                if isinstance(module, BatchNorm) and module.track_running_stats:
                    self._written.append((module, name))
                else:
                    self._candidates.append(((module, name), buffer, version_of(buffer)))

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers that are averaged."""
        found = [own_buffers(module)[name] for module, name in self._written]
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def average(self, counts: bool = True) -> None:
        """Set each written buffer to its mean over the replicas.

        counts  whether this replica had samples; False for a server, whose values are left out
        """
        self._find_written()
        for dtype in sorted({buffer.dtype for buffer in self.buffers}, key=str):
            buffers = [buffer for buffer in self.buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if not counts:
                flat.zero_()
            self.mesh.all_reduce(flat, DATA).div_(self.mesh.data_rank_and_size[1] * self.mesh.cp)
            for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                # safe: no later backward reads these buffers
                buffer.data.copy_(mean.view(buffer.shape))

    def _find_written(self) -> None:
        """Add the buffers that any replica has written since this object was made. The replicas
        agree on them by an all-reduce.
        """
        if not self._candidates:
            return
        written = [
            own_buffers(module)[name] is not buffer or version_of(buffer) != version
            for (module, name), buffer, version in self._candidates
        ]
        if active_fake_mode() is None:
            flags = torch.tensor(written, dtype=torch.int32, device=self._candidates[0][1].device)
            written = [bool(flag) for flag in self.mesh.all_reduce(flags, DATA, dist.ReduceOp.MAX)]
        self._written += [place for (place, _, _), changed in zip(self._candidates, written, strict=True) if changed]
        self._candidates = []


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
