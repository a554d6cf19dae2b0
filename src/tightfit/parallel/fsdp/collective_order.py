"""Check, before each collective of ZeRO-3, that all devices are about to run the same collective.

fully_shard's collectives match only if all devices call the same layers in the same order. A model
that drops layers at random, or that chooses layers by the samples, breaks this. Then a device waits
forever, or takes one layer's weights for those of another layer of equal size. So before each
all-gather and each reduce-scatter, all devices that share the layers exchange three integers in
host memory: the kind of the collective, the number of fully_shard's parameter group (usually a
layer), and a hash of which parameters are reduced. If the integers differ, all devices raise the
same error.

On CPUs each collective of the run is checked. On a GPU such a check makes the host wait for the
other devices, so that the queue of kernels runs empty. So on GPUs, each collective is checked only
in the first 16 backward passes. After those, each device keeps a checksum of its collectives, and
the checksums are compared once a step, before the update. `engine/watchdog.py` finds a device that
waits forever for another device.

Costs   one all-gather of three integers (a round trip between hosts) before each gather and each
        reduction; on GPUs, after the first 16 backward passes, one such all-gather a step
Source  our own. For what it checks: Zhao et al. 2023, arXiv:2304.11277, section 3.3 (the order of
        collectives).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.fsdp import ParameterGroup, modules_of, wrap_all_gather
from tightfit.errors import InputError
from tightfit.runtime.activity import note_activity

CHECKED_BACKWARDS = 16  # number of backward passes in which GPUs check each collective

_GATHER, _SUM, _FORWARD, _BACKWARD, _CHECKSUM = range(5)
_EVENTS = {
    _GATHER: "parameters of {} are gathered",
    _SUM: "gradients of {} are summed",
    _FORWARD: "the forward ends",
    _BACKWARD: "the backward ends",
    _CHECKSUM: "the step ends, after different layers",
}


class CollectiveOrder:
    """Checks that all devices run fully_shard's collectives in the same order.

    If they do not, all devices raise the same InputError. It names the layer at which they differ,
    unless only checksums are compared.

    model   the sharded model
    groups  fully_shard's parameter groups. The parameters of one group are gathered together
    group   the process group, for tensors in host memory, of all devices that share these
            parameters
    first   the number of backward passes during which each collective is compared with the other
            devices at once. After them, only a checksum is compared, once a step. None: compare
            each collective at once for the whole run
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[ParameterGroup], group: dist.ProcessGroup, first: int | None = None
    ) -> None:
        self.group = group
        self.first, self.passes, self.checksum = first, 0, 0
        names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.names: list[str] = []
        for number, sharded in enumerate(groups):
            found = [names[module] for module in modules_of(sharded)]
            self.names.append(" and ".join(name for name in found[:2] if name) or "parameters outside of all layers")
            wrap_all_gather(sharded, partial(_CheckedAllGather, agreement=self, number=number))
        model.register_forward_hook(lambda *_: self._check(_FORWARD))

    def end_backward(self, last: bool) -> None:
        """Check that all devices have ended a backward. Call this after each backward.

        last  whether this was the step's last backward before the update. If so, the checksum of
              this device's collectives is compared with those of the other devices, too

        Raises InputError, on all devices, if another device has not ended its backward or has
        another checksum.
        """
        self._check(_BACKWARD)
        self.passes += 1
        if last and self.checksum:
            checksum, self.checksum = self.checksum, 0
            self._compare(_CHECKSUM, which=checksum)

    def check_reduce(self, number: int, parameters_hash: int) -> None:
        """Check that all devices are about to reduce-scatter the gradients of the same parameters.

        number           the parameter group's number, counted from 0
        parameters_hash  a hash of which of the group's parameters have gradients

        Raises InputError, on all devices, if they are not. After the first `first` backward passes,
        `end_backward` raises it instead, once a step.
        """
        self._check(_SUM, number, parameters_hash)

    def check_gather(self, number: int) -> None:
        """Check that all devices are about to all-gather the same parameter group.

        number  the parameter group's number, counted from 0

        Raises InputError, on all devices, if they are not. After the first `first` backward passes,
        `end_backward` raises it instead, once a step.
        """
        self._check(_GATHER, number)

    def _check(self, kind: int, group_number: int = 0, which: int = 0) -> None:
        """Check one event of this device against the events of the other devices.

        In the first `first` backward passes, compare it at once. Later, add it to the checksum that
        `end_backward` compares.

        kind          _GATHER, _SUM, _FORWARD or _BACKWARD
        group_number  the number of the parameter group; 0 for an event without a group
        which         for _SUM, a hash of which of the group's parameters have gradients; otherwise
                      0
        """
        if active_fake_mode() is not None or dist.get_backend(self.group) == "fake":
            return
        if kind in (_GATHER, _SUM):
            note_activity(
                f"{'the gather' if kind == _GATHER else 'the gradients'} of {self.names[group_number]}, or what follows"
            )
        if self.first is None or self.passes < self.first:
            self._compare(kind, group_number, which)
        else:
            for number in (kind, group_number, which):
                self.checksum = (self.checksum * 1_000_003 + number + 1) % (2**61 - 1)

    def _compare(self, kind: int, group_number: int = 0, which: int = 0) -> None:
        """Send an event to all devices, and receive theirs. If the events differ, all devices raise
        InputError.

        kind          _GATHER, _SUM, _FORWARD, _BACKWARD or _CHECKSUM
        group_number  the number of the parameter group; 0 for an event without a group
        which         for _SUM, a hash of which of the group's parameters have gradients; for
                      _CHECKSUM, the checksum; otherwise 0
        """
        mine = torch.tensor([kind, group_number, which], device="cpu")
        events = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(events, mine, group=self.group)
        if not all(torch.equal(event, mine) for event in events):
            raise self._mismatch([event.tolist() for event in events])

    def _mismatch(self, events: Sequence[list[int]]) -> InputError:
        """Return the error that says what each rank is about to do, such as which layer it gathers.

        events  for each rank of the group, the event [kind, group_number, which] that it sent (see
                `_compare`)
        """
        ranks: dict[str, list[int]] = {}
        for number, (kind, group_number, *_) in enumerate(events):
            says = _EVENTS[kind].format(self.names[group_number])
            ranks.setdefault(says, []).append(dist.get_global_rank(self.group, number))
        told = "; ".join(
            f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who[:8]))}: {says}" for says, who in ranks.items()
        )
        group_numbers = [group_number for kind, group_number, *_ in events if kind in (_GATHER, _SUM)]
        if not group_numbers:
            where = f"they differ in this step ({told})"
        elif len(ranks) == 1:
            where = (
                f"they first differ at {self.names[min(group_numbers)]} "
                f"({told}, but of different parameters in that layer)"
            )
        else:
            where = f"they first differ at {self.names[min(group_numbers)]} ({told})"
        return InputError(
            "plan: zero=3",
            "each layer's parameters are gathered from all ranks, so all ranks must call the same layers in the same "
            f"order, and they do not: {where}",
            "use zero: 2, which keeps all layers on each rank",
        )


class _CheckedAllGather:
    """Replaces fully_shard's all-gather of one parameter group. It first checks that all devices
    are about to gather this group, and then runs the original all-gather.

    inner      the original all-gather, an object of fully_shard
    agreement  the object that does the check
    number     the number of the parameter group, counted from 0
    """

    def __init__(self, inner: Any, agreement: CollectiveOrder, number: int) -> None:
        self.inner, self.agreement, self.number = inner, agreement, number

    def allocate(self, *size: Any, **how: Any) -> Tensor:
        made: Tensor = self.inner.allocate(*size, **how)
        return made

    def __call__(self, *tensors: Any, **more: Any) -> Any:
        self.agreement.check_gather(self.number)
        return self.inner(*tensors, **more)


__all__ = ["CHECKED_BACKWARDS", "CollectiveOrder"]
