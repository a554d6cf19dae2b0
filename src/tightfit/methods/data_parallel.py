"""Trains a replica of the model on each device, each with its share of every step's samples, and
all-reduces the gradients. It is the simplest way to train faster on several devices.

Saves   time: N devices take a step of the same batch in about 1/N of the time, and each holds 1/N
        of the activations.
Costs   the gradients are all-reduced once per step, 2 (N-1)/N of their bytes for each device,
        overlapped with backward; every device holds the full model and all its states. With
        compressed gradients, half of that is sent (bf16), or a few columns of each matrix
        (powersgd). Only powersgd carries the compression's error to the next step.
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
    """Add the all-reduce of the gradients. Full model states stay on every device; the ledger
    already has this device's share of the samples.
    """
    if plan.compressed_gradients == "powersgd":
        ledger = _with_low_rank(ledger, plan)
    size, bucket = ledger.gradient_bytes(), bucket_bytes(plan.replicas)
    shrunk = size * _share_sent(ledger, plan)
    ring = 2 * (plan.replicas - 1) / plan.replicas * shrunk
    sums = message("gradients", ring, plan, machine, ("dp_replicate",), math.ceil(size / bucket), rounds=2)
    sent = None if plan.compressed_gradients == "powersgd" else BucketedReduction(1, min(bucket, size), always=False)
    # each bucket's copy exists until all reductions are done
    if plan.compressed_gradients == "bf16":
        ledger = replace(ledger, summed_bytes=shrunk)
    return replace(ledger, bucketed_reduction=sent, messages=(*ledger.messages, sums))


def _with_low_rank(ledger: Ledger, plan: Plan) -> Ledger:
    """Add PowerSGD's memory.

    Each matrix's error and its columns stay from step to step. During the reduction there are also
    rows, new columns, and the largest matrix, multiplied out.
    """
    left = rows = columns = vectors = largest = 0.0
    for parameter in ledger.parameters:
        if parameter.trainable:
            each = parameter.bytes / max(parameter.count, 1)
            if is_compressible(parameter.shape, plan.powersgd_rank):
                left, largest = left + parameter.bytes, max(largest, parameter.bytes)
                rows += plan.powersgd_rank * parameter.shape[0] * each
                columns += plan.powersgd_rank * parameter.count / parameter.shape[0] * each
            else:
                vectors += parameter.bytes
    summed = max(vectors, 2 * rows, rows + columns + max(columns, largest))
    return replace(
        ledger,
        fixed={**ledger.fixed, "optimizer": ledger.fixed.get("optimizer", 0.0) + left + columns},
        summed_bytes=summed,
    )


def is_compressible(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a parameter's gradient is a matrix that has more numbers than its `rank` rows and
    columns.

    Example: a 1,024 x 4,096 matrix has 4.2 million numbers; with rank 4, its rows and columns have
    4 x (1,024 + 4,096) = 20,480.
    """
    if len(shape) < 2:
        return False
    height, count = shape[0], math.prod(shape)
    return rank * (height + count // max(height, 1)) < count


def _share_sent(ledger: Ledger, plan: Plan) -> float:
    """The share of the gradients' bytes that is sent."""
    if plan.compressed_gradients == "none":
        return 1.0
    found = 0.0
    for parameter in ledger.parameters:
        if parameter.trainable:
            height = parameter.shape[0] if parameter.shape else 1
            narrow = plan.powersgd_rank * (height + parameter.count // max(height, 1))
            if plan.compressed_gradients == "bf16":
                found += min(2.0 * parameter.count, parameter.bytes)
            elif is_compressible(parameter.shape, plan.powersgd_rank):
                found += narrow * parameter.bytes / parameter.count
            else:
                found += parameter.bytes
    return found / ledger.gradient_bytes()


def apply(run: Run, plan: Plan) -> Run:
    """Start all replicas from the same weights and reduce their gradients."""
    assert run.mesh is not None
    broadcast_parameters(run.model, run.mesh)
    return replace(run, reduction=ReplicaReduction(run.model, run.mesh, plan))


class ReplicaReduction(UnshardedReduction):
    """The `Reduction` of full replicas."""

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
    """PowerSGD: for each gradient matrix M, only P = M Q and Q = M'P are all-reduced, with `rank`
    columns each.

    The error of a step is added to the next step's gradients (error feedback). Vectors, and
    matrices that would not get smaller, are all-reduced in full. A parameter without a gradient on
    some device counts as zeros there; for one without a gradient on any device, the error stays as
    it is.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, rank: int) -> None:
        self.parameters, self.group, self.rank = parameters, group, rank
        self.errors: dict[nn.Parameter, Tensor] = {}
        self.columns: dict[nn.Parameter, Tensor] = {}

    def begin(self, last: bool) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        before = dict(self.errors), self.columns
        with gradients_filled(self.parameters, partial(dist.all_reduce, group=self.group)):
            self._exchange()
        for parameter in self.parameters:
            if parameter.grad is None:
                for kept, was in zip((self.errors, self.columns), before, strict=True):
                    kept.pop(parameter, None)
                    if parameter in was:
                        kept[parameter] = was[parameter]

    def _exchange(self) -> None:
        matrices = [parameter for parameter in self.parameters if self._shrinks(parameter)]
        self._all_reduce([p.grad for p in self.parameters if not self._shrinks(p) and p.grad is not None])
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
        self.columns = columns

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
        """The columns of the previous step, for the main directions change slowly; at first the
        same random ones on all devices.
        """
        if parameter in self.columns:
            return self.columns[parameter]
        generator = torch.Generator().manual_seed(error.shape[1])
        return torch.randn(error.shape[1], self.rank, generator=generator).to(error)

    def _all_reduce(self, tensors: list[Tensor]) -> None:
        for dtype in {tensor.dtype for tensor in tensors}:
            together = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in together])
            dist.all_reduce(flat, group=self.group)
            for tensor, summed in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(summed.view(tensor.shape))
