"""Draws the random factors of dropout from 16 random bits per element.

PyTorch's CPU kernel draws a random number of its own for each element. Here, one 64-bit random
number decides about four elements, which is about five times as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES, STEPS = 4, 2**16  # 16-bit numbers in a 64-bit one; how many values a 16-bit number has
SLICE = 2**18  # elements that a CPU draws at a time, so that their random numbers stay in the cache


def rounded(probability: float) -> float:
    """Return the multiple of 1 / 65,536 with which elements are dropped in place of `probability`.

    Example: 0.1 becomes 6554 / 65536 = 0.100006.
    """
    return round(probability * STEPS) / STEPS


@torch.library.custom_op("tightfit::dropout_noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def dropout_noise(like: Tensor, size: list[int], probability: float) -> Tensor:
    """Return a tensor of random factors: each is 0 with the probability `rounded(probability)`, and
    1 / (1 - rounded(probability)) otherwise. The random numbers come from the device's default
    generator of torch.

    like         the result has its dtype and device; its values are not used
    size         shape of the result
    probability  from 0 to 1
    """
    noise = like.new_empty(size)
    flat, dropped = noise.view(-1), round(probability * STEPS)
    if dropped == STEPS:
        return noise.zero_()
    for part in flat.split(SLICE if like.device.type == "cpu" else max(len(flat), 1)):
        bits = torch.empty(-(-len(part) // LANES), dtype=torch.int64, device=like.device)
        # each lane is uniform over -32,768 to 32,767; the comparison replaces it by 0 or 1
        part.copy_(bits.random_(-(2**63), None).view(torch.int16)[: len(part)].ge_(dropped - STEPS // 2))
    return noise.mul_(STEPS / (STEPS - dropped))


@dropout_noise.register_fake
def _(like: Tensor, size: list[int], probability: float) -> Tensor:
    return like.new_empty(size)
