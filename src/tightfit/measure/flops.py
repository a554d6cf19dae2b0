"""Counts the model FLOPs of a step from the model's own operations, and computes the MFU (model
FLOPs utilization)."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tightfit._torch.fake import FakeTensorMode
from tightfit.machine import Machine
from tightfit.models import model_factory
from tightfit.models.batches import Batch, map_tensors
from tightfit.models.caches import isolated_model_caches
from tightfit.models.expert_routing import RoutedExperts
from tightfit.models.fake_kernels import GROUPED_MM, grouped_mm_flops, without_fake_tensor_logs
from tightfit.models.objective import objective_of_job
from tightfit.models.tracing import restoring_state
from tightfit.runtime.run import Run


def forward_flops(run: Run, batch: Batch) -> int | None:
    """Return the FLOPs of one forward of `batch`, or None if they are not known. A multiplication
    and its addition count as two.

    Only matrix products, convolutions and attention count. Attention counts all (query, key) pairs,
    although kernels skip the pairs that a causal mask hides. (Predicted times, in contrast, count
    only the pairs that are computed.) Recomputation does not count.

    Forward and backward together have three times these FLOPs. For a language model with P
    parameters, L layers of width h and sequence length s, that is 6 P + 12 L h s for each token:
    the model FLOPs of Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B. Example: P = 124
    million, L = 12, h = 768, s = 1,024 gives 6 P = 744 and 12 L h s = 113, together 857 MFLOPs for
    each token.

    The forward runs on fake tensors, so it computes nothing. The model and the random number generators
    are the same afterwards. A model whose operations depend on the values of tensors cannot run on
    fake tensors: the result is None.
    """

    sharded = (
        run.plan.tp > 1
        or run.plan.pp > 1
        or any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    )

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_factory(run.job.model)() if sharded else run.model  # the unsharded model

        def forward(self, inputs: Batch) -> Tensor:
            if sharded:
                return objective_of_job(run.job).total(self.model, inputs)
            return run.loss_sum(inputs)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    counter = FlopCounterMode(display=False, custom_mapping={GROUPED_MM: grouped_mm_flops})
    try:
        with isolated_model_caches(), fake if sharded else nullcontext():
            total = Total()
        state: dict[str, Tensor] = {
            name: tensor if sharded else fake.from_tensor(tensor.detach())
            for name, tensor in [*total.named_parameters(), *total.named_buffers()]
        }
        inputs = map_tensors(lambda tensor: fake.from_tensor(tensor.to(run.device)), batch)
        with (
            isolated_model_caches(),
            restoring_state(total),  # functional_call leaves the fake weights in a module that has two names
            without_fake_tensor_logs(),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            sdpa_kernel(SDPBackend.MATH),
            fake,
            RoutedExperts(),
            counter,
        ):
            functional_call(total, state, (inputs,))
    except Exception:  # a model may fail on fake tensors in any way, and the training must go on
        return None
    return counter.get_total_flops()


def mfu(
    flops_per_step: float | None, step_s: float | None, machine: Machine, precision: str, devices: int = 1
) -> float | None:
    """Return the model FLOPs utilization: the model FLOP/s that a step achieves, as a fraction of
    the published dense peak of all devices in the plan's precision.

    flops_per_step  model FLOPs of a step on all devices; None if they are not known
    step_s          seconds of the step; None if they are not known
    machine         the machine whose published peak is used; a CPU has none
    precision       the plan's precision, such as "bf16-mixed"
    devices         number of devices

    Returns None if one of these numbers is not known. Source: Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B.
    """
    return _share(flops_per_step, step_s, machine.peak(precision), devices)


def matrix_utilization(
    flops_per_step: float | None, step_s: float | None, machine: Machine, precision: str, devices: int = 1
) -> float | None:
    """Return the model FLOP/s that a step achieves, as a fraction of the rate that large matrix
    products achieve on all devices of this machine. Return None if the FLOPs, the seconds or the
    rate are not known. The arguments are the same as those of `mfu`."""
    return _share(flops_per_step, step_s, machine.rate(precision), devices)


def _share(flops: float | None, seconds: float | None, flops_per_s: float | None, devices: int) -> float | None:
    return flops / seconds / flops_per_s / devices if flops and seconds and flops_per_s else None
