"""Shard parameters: along any dimension over tp, or along dimension 0 over dp_shard (ZeRO-3).

Tensor parallelism uses `ParameterSharding`. ZeRO-3 uses `shard_parameter` while the model is
created, so that a device never holds the full model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tightfit._torch.distributed import sharded_like
from tightfit._torch.modules import own_parameters
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.processes import local_device


@dataclass(frozen=True)
class ParameterSharding:
    """Describes how a parameter is sharded along `dim` over the devices of the tp axis.

    mesh         the mesh with the tp axis
    shape        the shape of the full parameter
    dim          the sharded dimension
    fused_count  how many matrices the parameter holds side by side along `dim`. Each matrix is
                 sharded separately

    Example: a fused query-key-value weight of shape (3 x 64, 64) has dim=0 and fused_count=3. With
    tp=2, rank 1 holds rows 32 to 63 of each of the three matrices. Its shard has shape (96, 64).
    """

    mesh: Mesh
    shape: torch.Size
    dim: int
    fused_count: int = 1

    def range(self, rank: int | None = None) -> tuple[int, int]:
        """Return (begin, end): the indices along `dim`, within one of the fused matrices, that a
        device's shard holds. `end` is exclusive.

        rank  the device's rank along tp; None: this process's rank
        """
        size, count = self.shape[self.dim] // self.fused_count, self.mesh.size("tp")
        rank = self.mesh.rank("tp") if rank is None else rank
        each = -(-size // count)
        return min(rank * each, size), min((rank + 1) * each, size)

    def shard(self, full: Tensor) -> Tensor:
        """Return this device's shard of `full`, a tensor with the full parameter's shape."""
        first, last = self.range()
        if self.fused_count == 1:
            return full.narrow(self.dim, first, last - first)
        parts = [piece.narrow(self.dim, first, last - first) for piece in full.chunk(self.fused_count, self.dim)]
        return torch.cat(parts, self.dim)

    def unshard(self, shard: Tensor) -> Tensor:
        """All-gather the shards of all tp devices, and return the full tensor. All tp devices must
        call this.

        shard  this device's shard of the tensor
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
            for part, length in zip(parts, lengths, strict=True):
                found.append(part.narrow(self.dim, piece * length, length))
        return torch.cat(found, self.dim)

    def _padding_shape(self, part: Tensor, length: int) -> list[int]:
        return [length if dim == self.dim else size for dim, size in enumerate(part.shape)]


_ROWS = "_tightfit_rows"  # attribute of a parameter


def rows_of(parameter: Tensor) -> Tensor | None:
    """Return this device's ZeRO-3 shard of a parameter, which `shard_parameter` has stored with it until
    fully_shard takes it. Return None if the parameter is not sharded."""
    return getattr(parameter, _ROWS, None)


@torch.no_grad()
def shard_parameter(parameter: Tensor, mesh: Mesh, full: Tensor) -> None:
    """Store this device's ZeRO-3 shard of `full` with the parameter, where `rows_of` finds it, and free the
    parameter's own memory.

    The parameter keeps its full shape, but its data is a single zero, expanded to this shape.

    parameter  the parameter, which is changed in place
    full       the full values. They are sharded along dimension 0 over dp_shard as torch's `chunk`
               does. If there are fewer chunks than devices, the last devices get shards without
               rows
    """
    rows = (full if full.dim() else full.view(1)).chunk(mesh.size("dp_shard"))
    rank = mesh.rank("dp_shard")
    mine = rows[rank] if rank < len(rows) else rows[0][:0]
    setattr(parameter, _ROWS, mine.clone())
    if not parameter.is_meta:
        parameter.data = torch.zeros((), dtype=full.dtype, device=full.device).expand(full.shape)


def move_shards_to_meta(model: nn.Module) -> None:
    """Replace each parameter that `shard_parameter` has sharded by a parameter of the same shape on
    the meta device. The new parameter has the same shard.

    fully_shard accepts only parameters that are full or on the meta device.
    """
    put: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            rows = None if parameter is None else rows_of(parameter)
            if parameter is None or rows is None:
                continue
            if parameter not in put:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                put[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(put[parameter], _ROWS, rows.contiguous())
            own_parameters(module)[name] = put[parameter]


@torch.no_grad()
def unshard_parameter(parameter: Tensor, mesh: Mesh) -> Tensor:
    """Return the full values of a parameter.

    If `shard_parameter` has sharded the parameter, this all-gathers its shards, so all devices
    along dp_shard must call it.
    """
    rows = rows_of(parameter)
    if rows is None:
        return parameter.detach()
    shape = parameter.shape or torch.Size([1])
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        rows, mesh.axes["dp_shard"], [Shard(0)], run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole.view(parameter.shape)


def on_mesh_device(tensor: DTensor) -> DTensor:
    """Return `tensor` with its local shard on the device of its mesh, as collectives require. The
    shard of an offloaded tensor is copied there from host memory.
    """
    local, kind = tensor.to_local(), tensor.device_mesh.device_type
    if local.device.type == kind:
        return tensor
    return sharded_like(local.to(local_device(kind)), tensor)
