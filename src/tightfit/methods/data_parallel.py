"""Trains a replica of the model on each device, each with its share of every step's samples, and
all-reduces the gradients. It is the simplest way to train faster on several devices.

Saves   time: a step of the same batch takes about 1/N of the time on N devices. Each device holds
        1/N of the activations.
Costs   every device holds the full model and all its states. The gradients are all-reduced once per
        step, overlapped with backward: each device sends 2 (N-1)/N of their bytes. Compressed
        gradients send half of that (bf16), or only the low-rank factors P and Q of each matrix
        (powersgd). Only powersgd adds the error of the compression to the next step's gradients.
When    the model and its states fit one device.
Order   hooks the gradients of the final parameters; before the optimizer, which needs the reduced
        gradients.
Source  Li et al. 2020, arXiv:2006.15704; ring all-reduce: Patarasuk & Yuan 2009,
        doi:10.1016/j.jpdc.2008.09.002; PowerSGD: Vogels et al. 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.cost.entries import BucketedReduction
from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import message
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.replicas import ReplicatedBuffers, broadcast_parameters
from tightfit.machine import Machine
from tightfit.parallel.gradient_buckets import AllReducedGradients, bucket_bytes, gradients_filled
from tightfit.plan import Plan
from tightfit.runtime.run import Run, UnshardedReduction

FIELDS = ("dp_replicate", "compressed_gradients", "powersgd_rank")
VARIANTS = ({"dp_replicate": 2}, {"dp_replicate": 2, "compressed_gradients": "bf16"})


def enabled(plan: Plan) -> bool:
    return plan.replicas > 1 and plan.zero == 0 and plan.parameter_server == "none"


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the all-reduce of the
    gradients: its bytes, its calls, and the memory of its buckets or of compression.

    Nothing else changes: every device has the full model states, and the ledger already has this
    device's share of the samples.
    """
    if plan.compressed_gradients == "powersgd":
        ledger = _with_low_rank(ledger, plan)
    size, bucket = ledger.gradient_bytes(), bucket_bytes(plan.replicas)
    shrunk = size * _share_sent(ledger, plan)
    ring = 2 * (plan.replicas - 1) / plan.replicas * shrunk
    sums = message("gradients", ring, plan, machine, ("dp_replicate",), math.ceil(size / bucket), rounds=2)
    sent = (
        None
        if plan.compressed_gradients == "powersgd"
        else BucketedReduction(1, min(bucket, size), each_micro_batch=False)
    )
    # the bf16 copy of each bucket exists until all reductions are done
    if plan.compressed_gradients == "bf16":
        ledger = replace(ledger, replica_sum_bytes=shrunk)
    return replace(ledger, bucketed_reduction=sent, messages=(*ledger.messages, sums))


def _with_low_rank(ledger: Ledger, plan: Plan) -> Ledger:
    """Return the ledger with the memory of PowerSGD.

    Each matrix's error buffer and its factor Q are kept between steps, as optimizer states are.
    During the reduction, all P, all new Q, and the product P Q' of the largest matrix exist, too.
    """
    left = rows = columns = vectors = largest = 0.0
    for parameter in ledger.parameters:
        if parameter.trainable:
            size = parameter.gradient_bytes
            each = size / max(parameter.count, 1)
            if is_compressible(parameter.shape, plan.powersgd_rank):
                left, largest = left + size, max(largest, size)
                rows += plan.powersgd_rank * parameter.shape[0] * each
                columns += plan.powersgd_rank * parameter.count / parameter.shape[0] * each
            else:
                vectors += size
    summed = max(vectors, 2 * rows, rows + columns + max(columns, largest))
    return replace(
        ledger,
        fixed={**ledger.fixed, "optimizer": ledger.fixed.get("optimizer", 0.0) + left + columns},
        replica_sum_bytes=summed,
    )


def is_compressible(shape: tuple[int, ...], rank: int) -> bool:
    """Return whether PowerSGD compresses the gradient of a parameter of this shape. It does if the
    shape has two or more dimensions, and more elements than the factors P and Q together.

    rank  number of columns of P and of Q

    Example: a 1,024 x 4,096 matrix has 4.2 million elements. With rank 4, P is (1,024, 4) and Q is
    (4,096, 4): together 20,480 elements.
    """
    if len(shape) < 2:
        return False
    height, count = shape[0], math.prod(shape)
    return rank * (height + count // max(height, 1)) < count


def _share_sent(ledger: Ledger, plan: Plan) -> float:
    """Return the size of the gradients as they are sent, as a fraction of their full size: 1.0
    without compression, 0.5 for fp32 gradients that are sent in bf16, and less with PowerSGD.
    """
    if plan.compressed_gradients == "none":
        return 1.0
    sent_bytes = 0.0
    for parameter in ledger.parameters:
        if parameter.trainable:
            height = parameter.shape[0] if parameter.shape else 1
            narrow = plan.powersgd_rank * (height + parameter.count // max(height, 1))
            if plan.compressed_gradients == "bf16":
                sent_bytes += min(2.0 * parameter.count, parameter.gradient_bytes)
            elif is_compressible(parameter.shape, plan.powersgd_rank):
                sent_bytes += narrow * parameter.gradient_bytes / parameter.count
            else:
                sent_bytes += parameter.gradient_bytes
    return sent_bytes / ledger.gradient_bytes()


def apply(run: Run, plan: Plan) -> Run:
    """Broadcast the weights, so that all replicas start from the same ones, and return the run with
    a ReplicaReduction, which all-reduces the gradients.
    """
    assert run.mesh is not None
    broadcast_parameters(run.model, run.mesh)
    return replace(run, reduction=ReplicaReduction(run.model, run.mesh, plan))


class ReplicaReduction(UnshardedReduction):
    """All-reduces the gradients of the replicas of a model, compressed if the plan says so. At the
    end of a step, it also averages BatchNorm's statistics over the replicas.

    It implements the interface `Reduction` (see `runtime/run.py`): `begin` and `end` are called
    around each micro-batch.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, plan: Plan) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        group = mesh.group("dp_replicate")
        self._sent: AllReducedGradients | PowerSGD
        if plan.compressed_gradients == "powersgd":
            self._sent = PowerSGD(parameters, group, plan.powersgd_rank)
        else:
            self._sent = AllReducedGradients(
                parameters, group, torch.bfloat16 if plan.compressed_gradients == "bf16" else None
            )
        self._statistics = ReplicatedBuffers(model, mesh)

    def begin(self, last: bool) -> None:
        self._sent.begin(last)

    def end(self, last: bool) -> None:
        if last:
            self._sent.finish()
            self._statistics.average()

    def states(self) -> list[Tensor]:
        return self._sent.states() if isinstance(self._sent, PowerSGD) else []


class PowerSGD:
    """Reduces gradients by PowerSGD: for each gradient matrix M, only the factors P = M Q and
    Q = M'P are all-reduced, which have `rank` columns each. The result is P Q', where Q' is the
    transpose of Q.

    The error M - P Q' is added to the next step's gradient (error feedback). Vectors, and matrices
    that P and Q would not make smaller, are all-reduced in full.

    On a device where a parameter has no gradient, the gradient counts as zero. If no device has a
    gradient for a parameter, its error and its Q do not change.

    Checkpoints have neither the errors, which differ by device, nor Q.

    errors   maps a parameter to its error M - P Q' of the last step
    columns  maps a parameter to its Q of the last step
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, rank: int) -> None:
        self.parameters, self.group, self.rank = parameters, group, rank
        self.errors: dict[nn.Parameter, Tensor] = {}
        self.columns: dict[nn.Parameter, Tensor] = {}

    def begin(self, last: bool) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        with gradients_filled(self.parameters, partial(dist.all_reduce, group=self.group)) as absent:
            self._exchange([parameter for parameter in self.parameters if parameter not in absent])

    def _exchange(self, parameters: list[nn.Parameter]) -> None:
        matrices = [parameter for parameter in parameters if self._shrinks(parameter)]
        self._all_reduce([p.grad for p in parameters if not self._shrinks(p) and p.grad is not None])
        errors = {parameter: self._matrix(parameter) for parameter in matrices}
        rows = {parameter: error @ self._columns(parameter, error) for parameter, error in errors.items()}
        self._all_reduce(list(rows.values()))
        columns = {}
        for parameter, error in errors.items():
            rows[parameter] = torch.linalg.qr(rows[parameter].float())[0].to(error.dtype)
            columns[parameter] = error.t() @ rows[parameter]
            self.errors[parameter] = error.sub_(rows[parameter] @ columns[parameter].t())
        self._all_reduce(list(columns.values()))
        for parameter in matrices:
            assert parameter.grad is not None
            parameter.grad.copy_((rows[parameter] @ columns[parameter].t()).view(parameter.shape))
        self.columns |= columns

    def states(self) -> list[Tensor]:
        return [*self.errors.values(), *self.columns.values()]

    def _shrinks(self, parameter: Tensor) -> bool:
        return is_compressible(tuple(parameter.shape), self.rank)

    def _matrix(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        matrix = parameter.grad.reshape(parameter.shape[0], -1)
        left = self.errors.get(parameter)
        return matrix.clone() if left is None else left.add_(matrix)

    def _columns(self, parameter: nn.Parameter, error: Tensor) -> Tensor:
        """Return the Q with which this step's P = M Q is computed: the Q of the previous step,
        because the main directions of a gradient change slowly. In the first step, it is a random
        Q, the same on all devices.

        error  the gradient plus the previous step's error, as a matrix; it gives Q's size and type
        """
        if parameter in self.columns:
            return self.columns[parameter]
        generator = torch.Generator().manual_seed(error.shape[1])
        return torch.randn(error.shape[1], self.rank, generator=generator).to(error)

    def _all_reduce(self, tensors: list[Tensor]) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in the same order on all devices
            together = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in together])
            dist.all_reduce(flat, group=self.group)
            for tensor, summed in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(summed.view(tensor.shape))
