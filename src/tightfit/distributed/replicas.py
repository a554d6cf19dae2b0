"""Keep the replicas of a model equal: they start from the same weights, and average their buffers.

The buffers are those that a forward writes, such as BatchNorm's running statistics. Gradients are
reduced in `parallel/gradient_buckets.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import BatchNorm, own_buffers
from tightfit._torch.tensors import version_of
from tightfit.distributed.mesh import DATA, Mesh

_BufferRef = tuple[nn.Module, str]  # a module and the name of one of its buffers


@torch.no_grad()
def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast the parameters and buffers of the first replica to all other replicas, in place.

    This is necessary if the model is initialized at random, which may differ between processes.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        for axis in DATA:
            if mesh.size(axis) > 1:
                dist.broadcast(tensor, group=mesh.group(axis), group_src=0)


class ReplicatedBuffers:
    """Averages, over the replicas of a model, the floating-point buffers that a forward writes,
    such as BatchNorm's running statistics.

    Each replica computes these buffers from its own samples. After `average`, all replicas have the
    mean. BatchNorm's buffers are always averaged. The first call of `average` in training mode finds the
    other buffers that a forward has written.

    A parameter server runs no forward, so with one, buffers of integers, such as a count of steps,
    are copied from the first worker to all.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh, self._model = mesh, model
        self._written: list[_BufferRef] = []
        self._candidates: list[tuple[_BufferRef, Tensor, int]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if not buffer.is_floating_point() and not mesh.servers:
                    continue
                if isinstance(module, BatchNorm) and module.track_running_stats:
                    self._written.append((module, name))
                else:
                    self._candidates.append(((module, name), buffer, version_of(buffer)))

    @property
    def buffers(self) -> list[Tensor]:
        """Return the buffers that `average` averages or copies."""
        found = [own_buffers(module)[name] for module, name in self._written]
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def average(self, counts: bool = True) -> None:
        """Replace each buffer that a forward writes by its mean over the replicas. All replicas
        must call this.

        counts  whether this replica's values are part of the mean. False for a parameter server,
                which has no samples
        """
        self._find_written()
        for buffer in self.buffers:
            if not buffer.is_floating_point() and active_fake_mode() is None:
                dist.broadcast(buffer, group=self.mesh.group("dp_replicate"), group_src=self.mesh.servers)
        for dtype in sorted({buffer.dtype for buffer in self.buffers if buffer.is_floating_point()}, key=str):
            buffers = [buffer for buffer in self.buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if not counts:
                flat.zero_()
            self.mesh.all_reduce(flat, DATA).div_(self.mesh.data_rank_and_size[1] * self.mesh.cp)
            for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                # safe: no later backward reads these buffers
                buffer.data.copy_(mean.view(buffer.shape))

    def _find_written(self) -> None:
        """Find the buffers that any replica has written since this object was made, and add them to
        the buffers that `average` averages.

        The replicas all-reduce their findings, so that all of them average the same buffers. Only
        the first call in training mode does anything: a forward in evaluation mode may write nothing.
        """
        if not self._candidates or not self._model.training:
            return
        written = [
            own_buffers(module)[name] is not buffer or version_of(buffer) != version
            for (module, name), buffer, version in self._candidates
        ]
        if active_fake_mode() is None:
            flags = torch.tensor(written, dtype=torch.int32, device=self._candidates[0][1].device)
            written = [bool(flag) for flag in self.mesh.all_reduce(flags, DATA, dist.ReduceOp.MAX)]
        self._written += [owner for (owner, _, _), changed in zip(self._candidates, written, strict=True) if changed]
        self._candidates = []
