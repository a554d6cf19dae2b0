"""Agreed: before ZeRO's third stage gathers a layer's parameters or sums its gradients, all devices say which layer that is.

fully_shard's collectives match only where all devices call the same layers in the same order. Where they do not, as with layers
that are dropped by chance or that the samples choose, a device waits for ever, or takes one layer's weights for another's of equal
size. So before each collective, all devices that share the layers exchange a few whole numbers in host memory. Where those differ, all
devices refuse alike.

Processors do this for the whole run. GPUs, whose queues would run empty, do it in the first backward passes only. After those, each
device keeps a checksum of what it called. The checksums are compared once in each step, before the update. The watch
(engine/watch.py) finds a device that waits for another.

Costs   each device's numbers go around before each gather and each sum, a round trip between hosts; later one round trip a step
Source  ours; of what it checks: Zhao et al. 2023, arXiv:2304.11277, section 3.3 (the order of collectives).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode

from tightfit.errors import InputError
from tightfit.methods.progress import doing

FIRST = 16  # backward passes in which GPUs agree before each collective

_GATHER, _SUM, _FORWARD, _BACKWARD, _CHECKSUM = range(5)
_SAYS = {
    _GATHER: "parameters of {} are gathered",
    _SUM: "gradients of {} are summed",
    _FORWARD: "the forward ends",
    _BACKWARD: "the backward ends",
    _CHECKSUM: "the step ends, after other layers",
}


class Agreement:
    """What the devices tell each other before each collective of fully_shard's.

    groups  fully_shard's, whose parameters are gathered together; group: of all devices that share them, in host memory
    first   in how many backward passes they agree before each collective; None: in all
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[Any], group: dist.ProcessGroup, first: int | None = None
    ) -> None:
        self.group = group
        self.first, self.passes, self.checksum = first, 0, 0
        names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.names: list[str] = []
        for number, sharded in enumerate(groups):
            found = [names[module] for module in sharded.modules]
            self.names.append(" and ".join(name for name in found[:2] if name) or "what is in no layer")
            sharded._all_gather_comm = _Gather(sharded._all_gather_comm, self, number)
        model.register_forward_hook(lambda *_: self._agree(_FORWARD))

    def end_backward(self, last: bool) -> None:
        """last: of the step, whose update comes next."""
        self._agree(_BACKWARD)
        self.passes += 1
        if last and self.checksum:
            checksum, self.checksum = self.checksum, 0
            self._compare(_CHECKSUM, which=checksum)

    def sum(self, number: int, which: int) -> None:
        """Before the gradients of a group are summed. which: a number that tells of which of its parameters there are some."""
        self._agree(_SUM, number, which)

    def gather(self, number: int) -> None:
        self._agree(_GATHER, number)

    def _agree(self, kind: int, place: int = 0, which: int = 0) -> None:
        if active_fake_mode() is not None or dist.get_backend(self.group) == "fake":
            return
        if kind in (_GATHER, _SUM):
            doing(f"{'the gather' if kind == _GATHER else 'the gradients'} of {self.names[place]}, or what follows")
        if self.first is None or self.passes < self.first:
            self._compare(kind, place, which)
        else:
            for number in (kind, place, which):
                self.checksum = (self.checksum * 1_000_003 + number + 1) % (2**61 - 1)

    def _compare(self, kind: int, place: int = 0, which: int = 0) -> None:
        """Raises InputError, on all devices, where they are not about to do the same."""
        mine = torch.tensor([kind, place, which], device="cpu")
        said = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(said, mine, group=self.group)
        if not all(torch.equal(one, mine) for one in said):
            raise self._refusal([one.tolist() for one in said])

    def _refusal(self, said: Sequence[list[int]]) -> InputError:
        ranks: dict[str, list[int]] = {}
        for number, (kind, place, *_) in enumerate(said):
            says = _SAYS[kind].format(self.names[place])
            ranks.setdefault(says, []).append(dist.get_global_rank(self.group, number))
        told = "; ".join(
            f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who[:8]))}: {says}" for says, who in ranks.items()
        )
        places = [place for kind, place, *_ in said if kind in (_GATHER, _SUM)]
        if not places:
            where = f"in this step ({told})"
        elif len(ranks) == 1:
            where = f"they first differ at {self.names[min(places)]} ({told}, and not of the same parameters in it)"
        else:
            where = f"they first differ at {self.names[min(places)]} ({told})"
        return InputError(
            "plan: zero=3",
            f"the ranks do not call the same layers, in the same order: {where}, and a layer's parameters are gathered "
            "from all ranks",
            "use zero: 2, which keeps all layers on each rank",
        )


class _Gather:
    """fully_shard's gather of a layer's parameters, once all devices agree that it is this one's."""

    def __init__(self, inner: Any, agreement: Agreement, number: int) -> None:
        self.inner, self.agreement, self.number = inner, agreement, number

    def allocate(self, *size: Any, **how: Any) -> Tensor:
        made: Tensor = self.inner.allocate(*size, **how)
        return made

    def __call__(self, *tensors: Any, **more: Any) -> Any:
        self.agreement.gather(self.number)
        return self.inner(*tensors, **more)


__all__ = ["FIRST", "Agreement"]
