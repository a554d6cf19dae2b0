"""Let ZeRO-3 train parameters that only some devices use, such as those of an expert without
tokens.

After a block's backward, fully_shard reduce-scatters the gradients that this device has computed.
If the devices used different experts, they have computed the gradients of different parameters, and
the tensors that they send do not match. So with this module every device sends the gradients of all
of a block's parameters, with zeros for gradients that it has not computed.

Example: a block has experts A and B. Rank 0 routed tokens to A only, rank 1 to B only. Rank 0 sends
(gradient of A, zeros) and rank 1 sends (zeros, gradient of B).

Source  find_unused_parameters of Li et al. 2020, arXiv:2006.15704, applied to parameters that are
        gathered block by block: Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from tightfit._torch.fsdp import (
    ParameterGroup,
    before_reduction,
    gathered_parameter,
    has_gradient,
    has_new_gradient,
    is_gathered_once,
    is_unsharded,
    records,
    reduces_gradients,
    sharded_parameter,
)
from tightfit.distributed.processes import copy_to_device
from tightfit.parallel.fsdp.collective_order import CollectiveOrder
from tightfit.parallel.gradient_buckets import completed_twice, missing_everywhere


class UsedParameters:
    """Remembers which parameters got a computed gradient in this step. It also gives a zero
    gradient to each other parameter of a block after the block's backward, because all devices must
    send the same tensors.

    groups     fully_shard's parameter groups
    agreement  the check that all devices reduce the same parameters
    """

    def __init__(self, groups: Iterable[ParameterGroup], agreement: CollectiveOrder) -> None:
        self.with_gradient: set[Tensor] = set()
        self.agreement = agreement
        self.groups = list(groups)
        for number, group in enumerate(self.groups):
            before_reduction(group, partial(self._after_backward, number, group))

    def _after_backward(self, number: int, group: ParameterGroup) -> None:
        """Give a zero gradient to each parameter of the group that has no gradient. Then check that
        all devices are about to reduce the same parameters.

        fully_shard calls this before it reduces the group's gradients.

        number  the number of the group, counted from 0

        Raises InputError if the check fails.
        """
        which = 0
        for index, record in enumerate(records(group)):
            parameter = sharded_parameter(record)
            if not parameter.requires_grad or not is_gathered_once(record):
                continue
            if has_gradient(record):
                self.with_gradient.add(parameter)
            elif is_unsharded(group) and reduces_gradients(group):  # a zero kept for later would count as made
                gathered = gathered_parameter(record)
                gathered.grad = torch.zeros_like(gathered)
            else:
                continue
            which = (31 * which + index + 1) % 2**31
        if which and reduces_gradients(group):
            self.agreement.check_reduce(number, which)

    def refuse_unreduced(self) -> None:
        """Raise InputError if the backward that has ended has completed a gradient after the gradients of its
        block were reduced, so that it would be lost."""
        for group in filter(reduces_gradients, self.groups):  # others keep the gradient until they reduce it
            for record in records(group):
                if is_gathered_once(record) and has_new_gradient(record):
                    raise completed_twice(sharded_parameter(record))

    def missing_everywhere(
        self, parameters: list[nn.Parameter], all_reduce: Callable[[Tensor], object], device: torch.device
    ) -> list[int]:
        """Return the indices of the parameters for which no device computed a gradient in this
        step. All devices must call this.

        parameters  the parameters, in the same order on all devices
        all_reduce  a function that all-reduces (sums) a tensor over the devices, in place
        device      this process's device
        """
        counts = copy_to_device([float(parameter in self.with_gradient) for parameter in parameters], device)
        missed = [index for index, parameter in enumerate(parameters) if parameter not in self.with_gradient]
        self.with_gradient.clear()
        all_reduce(counts)
        return missing_everywhere(counts, missed)


__all__ = ["UsedParameters"]
