"""Block-wise quantisation of optimizer states, 8 or 4 bits an element.

A block is divided by its largest magnitude, and each element coded by the nearest value of a fixed map. Maps, block
sizes and the smallest tensor are torchao's but for one value: no map for second moments has a zero, in 8 bits either.
Adam divides by their root, and a weight whose second moment was rounded to zero is thrown away by its next update.
torchao's code is not used for two more reasons: it cannot start on fake tensors, and its search for the nearest value
holds several int64 tensors of the state's size.

Source  8 bits, dynamic map: Dettmers et al. 2022, arXiv:2110.02861. 4 bits, dynamic for signed states and linear for
        unsigned ones, and why these need a map without zero: Li et al. 2023, arXiv:2309.01507.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

SMALLEST = 4096  # elements; smaller states are not worth it, and norms and biases are the sensitive ones
_UNSIGNED = frozenset(["exp_avg_sq", "max_exp_avg_sq"])  # second moments are never negative

Bits = Literal[8, 4]
Packed = dict[str, Tensor]  # "codes": uint8, flat, in 4 bits two to a byte; "scale": fp32, one for each block


def block_size(bits: Bits) -> int:
    """How many elements a block has."""
    return {8: 256, 4: 128}[bits]


def is_packed(elements: int, bits: Bits) -> bool:
    """Whether a state of so many elements is kept in blocks: not a small one, nor one that is not a whole number of them."""
    return elements >= SMALLEST and elements % block_size(bits) == 0


class Blocks:
    """Packs and unpacks states on one device. `name` is the state's name, which says whether it is signed."""

    def __init__(self, bits: Bits, device: torch.device) -> None:
        self.bits, self.size = bits, block_size(bits)
        self._values = {
            signed: torch.tensor(code_values(bits, signed), dtype=torch.float32, device=device)
            for signed in (True, False)
        }
        self._midpoints = {signed: (values[1:] + values[:-1]) / 2 for signed, values in self._values.items()}

    def divide(self, values: Tensor) -> bool:
        """Whether `values` is large enough and a whole number of blocks."""
        return is_packed(values.numel(), self.bits)

    def pack(self, name: str, values: Tensor) -> Packed:
        """Floating values of any shape -> codes and scales."""
        blocks = values.reshape(-1, self.size).float()
        scale = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        midpoints = self._midpoints[name not in _UNSIGNED]
        codes = torch.bucketize(blocks / scale, midpoints, out_int32=True, right=True).to(torch.uint8).flatten()
        return {"codes": codes if self.bits == 8 else (codes[::2] << 4) | codes[1::2], "scale": scale.flatten()}

    def unpack(self, name: str, packed: Packed, like: Tensor) -> Tensor:
        """What `packed` stands for, with the type, shape and layout of `like`."""
        values = self.decode(name, packed["codes"], packed["scale"]).view(like.shape).to(like.dtype)
        return values if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(values)

    def decode(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """What codes and scales stand for, flat, in fp32."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
        codes = codes.int()
        # index_select takes int32; indexing would make an int64 copy first
        values = self._values[name not in _UNSIGNED].index_select(0, codes).view(-1, self.size)
        del codes
        return values.mul_(scale[:, None]).view(-1)


def bits_of(packed: Packed, parameter: Tensor) -> Bits:
    """How wide the packed state of `parameter` is."""
    return 8 if packed["codes"].numel() == parameter.numel() else 4


def code_values(bits: Bits, signed: bool) -> list[float]:
    """The 2**bits values in [-1, 1] that codes stand for, ascending.

    Dynamic map: `bits - 1` decades down from 1, each lower one with half as many values; plus 1, and plus 0 or, where
    unsigned, the lower end of the lowest decade.
    """
    if bits == 4 and not signed:
        return [(code + 1) / 16 for code in range(16)]
    values = [0.0 if signed else 10.0 ** (1 - bits), 1.0]
    for decade in range(bits - 1):
        count = 2 ** (decade if signed else decade + 1)
        middles = [10.0 ** (decade - bits + 2) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
        values += middles + [-value for value in middles if signed]
    return sorted(values)
