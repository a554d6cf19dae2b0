"""Mesh: where this process stands among those that train together, one for each device.

The axes, outermost first, so that what talks most lies closest: pp (the stages of `pipeline`), dp_replicate (replicas of
everything), dp_shard (what `zero` divides), tp (what `tensor_parallel` divides). Those of `context_parallel`, which share
samples, are neighbours within dp_shard, or without `zero` within dp_replicate.
Source  PyTorch's DeviceMesh; the order is that of Narayanan et al. 2021, arXiv:2104.04473.
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
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.entries import Message
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.methods.rendezvous import choose_interface, meet
from tightfit.plan import Plan
from tightfit.target_device import is_apart

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA = ("dp_replicate", "dp_shard")  # along these the samples are divided
UNKNOWN_LINK = 1e9  # bytes/s, until somebody calibrates
_Place = tuple[nn.Module, str]  # a module, and the name of a buffer of it
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Mesh:
    """The devices of a run, and this process's place among them.

    axes   the mesh along one axis, or several, by name
    lines  groups of their own of the devices in a pipeline, for what travels through it: "forward" and "backward", each also
           "around" from the last to the first; and of its two "ends". Of a parameter server and its workers: "server".
           Of those that divide sequences: "context". Of those that divide the same layers' parameters: "layers"
    servers  processes along dp_replicate, the first ones, that have no samples
    cp       how many devices share the same samples, and divide their sequences
    """

    axes: dict[str | tuple[str, ...], DeviceMesh]
    lines: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    servers: int = 0
    cp: int = 1

    def size(self, axis: str) -> int:
        return self.axes[axis].size()

    def rank(self, axis: str) -> int:
        return self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a step's samples is this device's, and of how many."""
        number, count = self._place
        return number // self.cp, count // self.cp

    @property
    def piece(self) -> int:
        """Which piece of its samples' sequences is this device's, of `cp`."""
        return self._place[0] % self.cp

    @property
    def draws(self) -> int:
        """A number of the devices that have the same dropout: the tp devices, which share their activations."""
        return self._place[0] * self.size("pp") + self.rank("pp")

    @property
    def _place(self) -> tuple[int, int]:
        """Which of the devices along DATA this is, servers apart, and of how many."""
        replica, replicas = self.rank("dp_replicate") - self.servers, self.size("dp_replicate") - self.servers
        return max(replica, 0) * self.size("dp_shard") + self.rank("dp_shard"), replicas * self.size("dp_shard")

    def sum(self, values: Tensor, axes: tuple[str, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`values`, in place, summed over the devices along `axes`."""
        for axis in axes:
            if self.size(axis) > 1:
                self.sum_in(values, self.group(axis), op)
        return values

    def sum_in(
        self, values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """`values`, in place, summed over the devices of a group. NCCL takes only what lies on the device, in one piece: what is
        offloaded, or is not contiguous, goes there and back."""
        there = self.here(values)
        dist.all_reduce(there, op, group=group)
        return values if there is values else values.copy_(there)

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return local_device(self.axes["pp"].device_type)

    def here(self, tensor: Tensor) -> Tensor:
        """A tensor as the devices can send it to each other: on this process's device, and contiguous."""
        elsewhere = tensor.device.type != self.device.type
        return (tensor.to(self.device) if elsewhere else tensor).contiguous()

    def begin_sum(self, values: Tensor, axes: tuple[str, ...]) -> Callable[[], Tensor]:
        """As `sum`, under way while the caller goes on; what it returns waits for it."""
        first, *others = [axis for axis in axes if self.size(axis) > 1] or [""]
        if not first:
            return lambda: values
        work = dist.all_reduce(values, group=self.group(first), async_op=True)

        def end() -> Tensor:
            work.wait()
            return self.sum(values, tuple(others))

        return end


@dataclass(frozen=True)
class Slice:
    """How a parameter is cut along `dim` among the devices of the mesh's tp axis; pieces: as many matrices side by side, each
    cut by itself."""

    mesh: Mesh
    shape: torch.Size
    dim: int
    pieces: int = 1

    def range(self, rank: int | None = None) -> tuple[int, int]:
        """First and last place along `dim` of a device's part of one piece."""
        size, count = self.shape[self.dim] // self.pieces, self.mesh.size("tp")
        rank = self.mesh.rank("tp") if rank is None else rank
        each = -(-size // count)
        return min(rank * each, size), min((rank + 1) * each, size)

    def part(self, whole: Tensor) -> Tensor:
        """This device's part of a tensor of the whole parameter's shape."""
        first, last = self.range()
        if self.pieces == 1:
            return whole.narrow(self.dim, first, last - first)
        parts = [piece.narrow(self.dim, first, last - first) for piece in whole.chunk(self.pieces, self.dim)]
        return torch.cat(parts, self.dim)

    def whole(self, part: Tensor) -> Tensor:
        """The whole of a tensor whose part each device has. All devices of the axis take part."""
        count, part = self.mesh.size("tp"), self.mesh.here(part)
        most = (self.range(0)[1] - self.range(0)[0]) * self.pieces
        missing = most - part.shape[self.dim]
        padded = torch.cat([part, part.new_zeros(*self._sized(part, missing))], self.dim) if missing else part
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(count)]
        dist.all_gather(parts, padded.contiguous(), group=self.mesh.group("tp"))
        lengths = [last - first for first, last in map(self.range, range(count))]
        found = []
        for piece in range(self.pieces):
            for there, length in zip(parts, lengths, strict=True):
                found.append(there.narrow(self.dim, piece * length, length))
        return torch.cat(found, self.dim)

    def _sized(self, part: Tensor, length: int) -> list[int]:
        return [length if dim == self.dim else size for dim, size in enumerate(part.shape)]


@torch.no_grad()
def shrink(parameter: Tensor, mesh: Mesh, whole: Tensor) -> None:
    """Keep of `whole`, a parameter's values, only the rows that ZeRO's third stage gives this device, in `parameter.rows`. Its
    data is then of the same shape, and takes no memory."""
    rows = (whole if whole.dim() else whole.view(1)).chunk(mesh.size("dp_shard"))
    rank = mesh.rank("dp_shard")
    mine = rows[rank] if rank < len(rows) else rows[0][:0]
    parameter.rows = mine.clone()  # type: ignore[attr-defined]
    if not parameter.is_meta:
        parameter.data = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)


def onto_meta(model: nn.Module) -> None:
    """Put shrunk parameters on the meta device, for fully_shard asks for whole ones, or those."""
    put: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not hasattr(parameter, "rows"):
                continue
            if parameter not in put:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                put[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                put[parameter].rows = parameter.rows  # type: ignore[attr-defined]
            module._parameters[name] = put[parameter]


@torch.no_grad()
def grown(parameter: Tensor, mesh: Mesh) -> Tensor:
    """The values of a parameter, brought together from all devices where it was shrunk. All of them take part."""
    rows: Tensor | None = getattr(parameter, "rows", None)
    if rows is None:
        return parameter.detach()
    shape = parameter.shape or torch.Size([1])
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        rows, mesh.axes["dp_shard"], [Shard(0)], run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole.view(parameter.shape)


def on_mesh(tensor: DTensor) -> DTensor:
    """A tensor whose part lies in another memory than the devices' that share it, where they can send each other theirs."""
    local, kind = tensor.to_local(), tensor.device_mesh.device_type
    if local.device.type == kind:
        return tensor
    return DTensor(local.to(local_device(kind)), tensor._spec, requires_grad=False)


def world_size() -> int:
    """How many processes train together: as the launcher (torchrun, srun, `tightfit train --nproc`) says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of the processes that train together this one is, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def leads() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return rank() == 0


def join(kind: str, store: dist.Store | None = None, timeout: timedelta | None = None) -> None:
    """Join the processes that train together, where that has not been done.

    kind     of their devices (cpu, cuda)
    store    in which they leave each other notes; left out, made here
    timeout  of each operation of theirs; left out, torch's own
    """
    if not dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(local_device(kind))
        choose_interface(None)
        count = world_size()
        store = dist.HashStore() if count == 1 else dist.PrefixStore("groups", store or meet())
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank(), world_size=count, timeout=timeout)


def check_world(plan: Plan) -> None:
    """Refuse a plan that has not as many devices as processes train. Raises InputError."""
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
    """The mesh of a plan for several devices; None for one, but where its parameters come and go, as torch's fully_shard asks for
    one. Joins the process group where that has not been done.

    Raises InputError where there are not as many processes as the plan has devices.
    """
    check_world(plan)
    if plan.devices == 1 and not ("parameters" in plan.offload and is_apart(device)):
        return None
    join(device.type)
    return _mesh(device.type, (plan.pp, plan.replicas + plan.servers, plan.shards, plan.tp), plan.servers, plan.cp)


_known: dict[tuple[str, tuple[int, ...], int, int], Mesh] = {}
_world: dist.ProcessGroup | None = None  # whose meshes are known


def _mesh(kind: str, sizes: tuple[int, ...], servers: int, cp: int) -> Mesh:
    """The mesh of these sizes; one for all runs of this process, as the groups of a mesh keep threads and connections."""
    global _world
    if dist.group.WORLD is not _world:
        forget()
        _world = dist.group.WORLD
    known = kind, sizes, servers, cp
    if known not in _known:
        with _disable_current_modes():  # which process is where is real, also where tensors are fake
            devices = init_device_mesh(kind, sizes, mesh_dim_names=AXES)
            axes: dict[str | tuple[str, ...], DeviceMesh] = {
                **{axis: devices[axis] for axis in AXES},
                DATA: devices[DATA],
            }
            lines = _lines(devices) if sizes[0] > 1 else {}
            if servers:  # what travels lies in host memory, and comes from whoever is first
                lines["server"] = dist.new_group(backend=None if dist.get_backend() == "fake" else "gloo")
            if sizes[2] > 1 or (sizes[1] > 1 and kind != "cpu"):  # where parameters may be divided or offloaded
                lines["layers"] = _same_stage(devices)
            if cp > 1:
                lines["context"] = _neighbours(devices, cp)
            _known[known] = Mesh(axes, lines, servers, cp)
            _wait_as_the_world([*(axes[axis].get_group() for axis in AXES), *lines.values()])
    return _known[known]


def _wait_as_the_world(groups: list[dist.ProcessGroup]) -> None:
    """Give groups the time-out of the group of all processes: torch gives a new group its default."""
    if dist.get_backend() not in BACKENDS.values():
        return
    device = torch.device({backend: kind for kind, backend in BACKENDS.items()}[dist.get_backend()])
    timeout = _world_group()._get_backend(device).options._timeout
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


LINES = ("forward", "backward", "forward around", "backward around", "ends")


def forget() -> None:
    """Hold no mesh of this process any more, so that its groups can go."""
    global _world
    _known.clear()
    _world = None


def _lines(devices: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """A group for each direction: what is sent one way never waits for what is received the other."""
    found = {}
    for row in devices.mesh.flatten(1).t().tolist():  # every process makes all groups, in the same order
        for name in LINES:
            members = [row[0], row[-1]] if name == "ends" else row
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found[name] = group
    return found


def _neighbours(devices: DeviceMesh, cp: int) -> dist.ProcessGroup:
    """The group of the `cp` devices, next to each other along the data's axes, that this one shares samples with."""
    rows = devices.mesh.flatten(1, 2).transpose(1, 2).reshape(-1, cp).tolist()
    groups = [(members, dist.new_group(members)) for members in rows]  # every process makes all, in the same order
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine


def _same_stage(devices: DeviceMesh) -> dist.ProcessGroup:
    """The group, in host memory, of the devices that have the same layers as this one."""
    backend = None if dist.get_backend() == "fake" else "gloo"
    groups = [(members, dist.new_group(members, backend=backend)) for members in devices.mesh.flatten(1).tolist()]
    (mine,) = [group for members, group in groups if dist.get_rank() in members]
    return mine


def local_device(kind: str) -> torch.device:
    """The device of this process among those of its host. A launcher may show each process its own GPU only, which is then the
    first. Raises InputError where there are some, and fewer than processes."""
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


def on_device(numbers: list[float], device: torch.device) -> Tensor:
    """Numbers of the host in fp32, without waiting: a copy from pageable memory would wait for the device's other work."""
    there = torch.tensor(numbers, dtype=torch.float32)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


@torch.no_grad()
def same_everywhere(model: nn.Module, mesh: Mesh) -> None:
    """All replicas begin as the first one: a model that is made by chance may differ."""
    for tensor in (*model.parameters(), *model.buffers()):
        for axis in DATA:
            if mesh.size(axis) > 1:
                dist.broadcast(tensor, group=mesh.group(axis), group_src=0)


class Statistics:
    """Buffers that a forward writes, such as the running statistics of BatchNorm: each replica saw its own samples; all keep the
    mean of what they wrote. Which others than BatchNorm's are written is seen in the first step.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self._places: list[_Place] = []
        self._unknown: list[tuple[_Place, Tensor, int]] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                    self._places.append((module, name))
                else:
                    self._unknown.append(((module, name), buffer, buffer._version))

    @property
    def buffers(self) -> list[Tensor]:
        found = [module._buffers[name] for module, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def average(self, counts: bool = True) -> None:
        """counts: whether this replica saw samples."""
        self._find_written()
        for dtype in sorted({buffer.dtype for buffer in self.buffers}, key=str):
            buffers = [buffer for buffer in self.buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if not counts:
                flat.zero_()
            self.mesh.sum(flat, DATA).div_(self.mesh.part[1] * self.mesh.cp)
            for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.data.copy_(mean.view(buffer.shape))  # a backward that is still to come reads none of them

    def _find_written(self) -> None:
        """Those that any replica has written since it was made: all of them agree."""
        if not self._unknown:
            return
        written = [
            module._buffers[name] is not buffer or buffer._version != version
            for (module, name), buffer, version in self._unknown
        ]
        if active_fake_mode() is None:
            flags = torch.tensor(written, dtype=torch.int32, device=self._unknown[0][1].device)
            written = [bool(flag) for flag in self.mesh.sum(flags, DATA, dist.ReduceOp.MAX)]
        self._places += [place for (place, _, _), changed in zip(self._unknown, written, strict=True) if changed]
        self._unknown = []


def _stride(plan: Plan, axes: tuple[str, ...]) -> tuple[int, int]:
    """Devices between neighbours along `axes` (of AXES, or cp), and how many there are along them."""
    sizes = {"tp": plan.tp, "dp_shard": plan.shards, "dp_replicate": plan.replicas, "pp": plan.pp}
    if axes == ("cp",):
        sizes = {"tp": plan.tp, "cp": plan.cp}
    stride = 1
    for axis, size in sizes.items():
        if axis == axes[0]:
            break
        stride *= size
    return stride, sizes[axes[0]]


def link(plan: Plan, machine: Machine, axes: tuple[str, ...]) -> float:
    """Bytes/s at which a device sends along `axes` (of AXES, or cp): inside a node where all of them lie in one, else between
    nodes.

    A collective's rings leave a node by the links of all its devices that take part, each with a part of what is sent; what
    goes from one device to the next (pp, cp), or to a server, by its own alone.
    """
    inside = machine.process_bytes_per_s
    between = machine.network_bytes_per_s or inside
    if inside is None or between is None:
        return UNKNOWN_LINK
    stride, size = _stride(plan, axes)
    if stride * size <= machine.devices_per_node:
        return inside.value
    alone = axes[0] in ("pp", "cp") or plan.servers
    taking_part = 1 if alone else max(machine.devices_per_node // stride, 1)
    return min(between.value * taking_part, max(inside.value, between.value))


def latency(plan: Plan, machine: Machine, axes: tuple[str, ...], rounds: int) -> float:
    """Seconds of one call along `axes` however little is sent: it goes around the ring `rounds` times (a gather or a scatter
    once, a sum twice), or from one device to the next (pp, cp), or to a server."""
    inside = machine.process_latency_s.value if machine.process_latency_s else 0.0
    between = machine.network_latency_s.value if machine.network_latency_s else inside
    start = machine.call_s.value if machine.call_s else 0.0
    stride, size = _stride(plan, axes)
    within = max(machine.devices_per_node // stride, 1)  # neighbours along the axis that share a node
    if axes[0] in ("pp", "cp") or plan.servers:
        return start + (inside if stride * size <= machine.devices_per_node else between)
    nodes = math.ceil(size / within)
    return start + rounds * ((size - nodes) * inside + (nodes - 1) * between)


def message(
    name: str, size: float, plan: Plan, machine: Machine, axes: tuple[str, ...], calls: float = 1, rounds: int = 1
) -> Message:
    """`size` bytes that each device sends along `axes` in a step, in so many calls. Beside a GPU's work; a processor has to do
    it itself."""
    waits = calls * latency(plan, machine, axes, rounds)
    return Message(name, size, link(plan, machine, axes), hides=machine.device == "cuda", latency_s=waits)
