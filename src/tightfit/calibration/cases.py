"""Cases: operations to time. Their inputs and outputs are not in the cache, as in a training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

COLD = {  # bytes of other inputs that are read before an input is used again: about one block's
    "cpu": 2**24,
    "cuda": 2**28,
}
MOST_SETS = 256
BYTES = (2**16, 2**19, 2**22, 2**25, 2**27)
LARGE_BYTES = (2**29,)  # on a GPU, whose L2 cache holds 2**26 and more

Work = Callable[[], object]
Case = tuple[int, float, Work]  # size, FLOPs or bytes accessed, the function to time


def sizes_in_bytes(device: torch.device) -> tuple[int, ...]:
    """Return the sizes at which operations limited by memory bandwidth are timed, in bytes
    accessed."""
    return BYTES if device.type == "cpu" else BYTES + LARGE_BYTES


def in_turn(make: Callable[..., object], inputs: Callable[[], tuple[Tensor, ...]]) -> Work:
    """Return a function that calls `make` with other tensors each time, so that neither its inputs
    nor its output are in the cache, as in a training step.

    make    the operation to time
    inputs  creates the arguments of one call. It is called several times, and the function uses the
            created arguments in turn
    """
    first = inputs()
    cold = COLD[first[0].device.type] // max(sum(tensor.nbytes for tensor in first), 1)
    sets = [first, *(inputs() for _ in range(min(cold, MOST_SETS)))]
    outputs: list[object] = [None] * len(sets)
    indices = itertools.cycle(range(len(sets)))

    def work() -> None:
        index = next(indices)
        outputs[index] = make(*sets[index])

    return work


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of random values between -1 and 1."""
    return torch.empty(shape, device=device).uniform_(-1, 1).to(dtype)


__all__ = ["Case", "Work", "in_turn", "random_tensor", "sizes_in_bytes"]
