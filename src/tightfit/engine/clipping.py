"""The norm of the gradient over all parameters and devices, and clipping to a largest norm."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from tightfit._torch.operations import foreach_mul_, foreach_norm
from tightfit.distributed.mesh import Mesh
from tightfit.runtime.run import Run, optimizer_weights_named, tp_shards_of
from tightfit.target_device import kind_of


def clip(run: Run, limit: float, narrow_factor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Scale the gradients down so that their norm, over all parameters and devices, is at most
    `limit`.

    narrow_factor  the factor by which 16-bit gradients are multiplied in the update (fp16: 1 / loss
                   scale); their norm is that of the products. None: 1

    Returns the norm before scaling, a scalar tensor. Offloaded gradients are scaled later, when
    they are copied to the device for the update.
    """
    weights = [weight for weight in optimizer_weights(run) if weight.grad is not None]
    uploads = run.store is not None and run.plan.uploads_for_update(kind_of(run.device))
    if run.mesh is None and not uploads and narrow_factor is None:
        return torch.nn.utils.clip_grad_norm_(weights, limit)
    gradients = [shard_of(weight.grad) for weight in weights if weight.grad is not None]
    norm = _total_norm(gradients, narrow_factor) if run.mesh is None else gradient_norm(run, run.mesh, narrow_factor)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    if uploads:
        assert run.store is not None
        run.store.factor = factor
    elif gradients:
        foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _total_norm(gradients: list[torch.Tensor], narrow_factor: float | torch.Tensor | None) -> torch.Tensor:
    """Return the norm of all gradients, a scalar tensor. Those of 16 bits are first multiplied by
    `narrow_factor`, in fp32; None: by 1."""
    if narrow_factor is None:
        return torch.nn.utils.get_total_norm(gradients)
    narrow = [gradient for gradient in gradients if gradient.dtype.itemsize < 4]
    wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
    norms = [norm * narrow_factor for norm in foreach_norm(narrow, 2.0, torch.float32)]  # in fp16 they may overflow
    return torch.stack([*norms, torch.nn.utils.get_total_norm(wide)] if wide else norms).norm()


def gradient_norm(run: Run, mesh: Mesh, narrow_factor: float | torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of the gradient over all parameters and all devices, a scalar tensor. A
    parameter that several devices have is counted once. All devices must call this function.

    narrow_factor  the factor by which 16-bit gradients are multiplied in the update; None: 1
    """
    counted_elsewhere = (
        set(optimizer_weights_named(run, run.executor.copies_of_earlier_ranks)) if run.executor is not None else set()
    )
    squares = torch.zeros(2, device=run.device)  # of weights sharded over tp, and of all others
    cut = tp_shards_of(run)
    for weight in optimizer_weights(run):
        if weight.grad is None or weight in counted_elsewhere:
            continue
        gradient = shard_of(weight.grad)
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        norm = torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32))
        if narrow_factor is not None and real.dtype.itemsize < 4:
            norm = norm * narrow_factor
        squares[int(weight not in cut)] += norm.square()
    squares[1] /= mesh.size("tp")
    sharded_over = run.reduction.shard_axes if run.reduction is not None else ()
    if run.plan.servers:  # the server has all gradients, and the workers have none
        sharded_over = (*sharded_over, "dp_replicate")
    return mesh.all_reduce(squares, (*sharded_over, "tp", "pp")).sum().sqrt()


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this device's shard of a DTensor. Return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizer_weights(run: Run) -> list[torch.Tensor]:
    """Return all tensors that the optimizer updates."""
    return [weight for group in run.optimizer.param_groups for weight in group["params"]]
