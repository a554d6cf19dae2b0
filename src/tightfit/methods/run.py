"""Run: what a build leaves behind, a handful of fields and no behaviour. Each method's `apply` returns it edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightfit.job import Job
from tightfit.models.objective import Batch, Objective
from tightfit.plan import Plan

TARGET: ContextVar[str | None] = ContextVar("target", default=None)


def kind_of(device: torch.device) -> str:
    """The kind of device (cpu, cuda) that a run is meant for: where fake tensors stand in, not the one they lie on."""
    return TARGET.get() or device.type


class Data(Protocol):
    """Samples in an order that is a function of the seed and of how many were consumed.

    samples       how many there are in one epoch; None for an endless stream
    sample_items  tokens in a full sample (1 for images): what throughput counts
    ragged        whether micro-batches differ in shape beyond the number of samples
    steps         the micro-batches (on the host) of each optimizer step, from the sample `consumed` on; ends after
                  the sample `until` (the last step may be short)
    held_out      the micro-batches of the evaluation samples
    """

    @property
    def samples(self) -> int | None: ...

    @property
    def sample_items(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    @property
    def damaged(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]: ...

    def held_out(self, samples: int) -> Iterator[Batch]: ...


class LossScale(Protocol):
    """What keeps small fp16 gradients from vanishing: the loss is multiplied by `value`, the gradients divided by it."""

    value: float
    skipped: int

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by `value`; whether all of them are finite."""

    def update(self, finite: bool) -> None:
        """Adapt `value` after a step that was finite or not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Run:
    """A job fitted to a device by a plan, ready to be trained.

    model          set by `materialize`; its parameters keep their plain names whatever wraps its blocks
    objective      the job's loss; `loss_sum` is how it is computed here: a micro-batch on the device -> sum of losses
    data           set by `loader`
    optimizer      set by `optimizer_states`
    learning_rate  step -> learning rate
    loss_scale     fp16 only
    """

    job: Job
    plan: Plan
    device: torch.device
    objective: Objective
    model: nn.Module
    loss_sum: Callable[[Batch], Tensor]
    data: Data
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    loss_scale: LossScale | None = None
