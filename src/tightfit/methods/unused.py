"""Unused: parameters that only some devices use, such as those of an expert without tokens, in ZeRO's third stage.

fully_shard sums the gradients of a block after its backward: of those parameters that have one. Where devices used different
experts these are different ones, and what they send each other does not match. So all send all of them, zeros included.

Source  find_unused_parameters of Li et al. 2020, arXiv:2006.15704, for what is gathered by blocks: Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.methods.agreed import Agreement
from tightfit.methods.buckets import absent
from tightfit.methods.mesh import on_device


class Made:
    """Gives zeros to the parameters of a module that has been through backward and got no gradient, for all devices have to send the
    same; and notes which gradients of a step are real.

    groups     fully_shard's, whose parameters are gathered together
    agreement  by which devices tell each other whose gradients come next
    """

    def __init__(self, groups: Iterable[Any], agreement: Agreement) -> None:
        self.made: set[Tensor] = set()
        self.agreement = agreement
        for number, group in enumerate(groups):
            group.post_backward = partial(self._after_backward, number, group, group.post_backward)

    def _after_backward(self, number: int, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        which = 0
        for place, held in enumerate(group.fsdp_params):
            if not held.sharded_param.requires_grad or not hasattr(held, "_unsharded_param"):
                continue
            if held.unsharded_param.grad is not None or held.unsharded_accumulated_grad is not None:
                self.made.add(held.sharded_param)
            elif group.is_unsharded:
                held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
            else:
                continue
            which = (31 * which + place + 1) % 2**31
        if which and group.reduce_grads:
            self.agreement.sum(number, which)
        post_backward(*unused)

    def missing(
        self, parameters: list[nn.Parameter], total: Callable[[Tensor], object], device: torch.device
    ) -> list[int]:
        """Places of the parameters that no device made a gradient of in this step. total: sums over the devices, in place."""
        counts = on_device([float(parameter in self.made) for parameter in parameters], device)
        missed = [place for place, parameter in enumerate(parameters) if parameter not in self.made]
        self.made.clear()
        total(counts)
        return absent(counts, missed)


__all__ = ["Made"]
