"""Block-wise quantization of optimizer states to 8 or 4 bits per element.

A state is divided into blocks of 256 elements (8 bits) or 128 elements (4 bits). Each block has a
scale, its largest magnitude, and is divided by this scale. Each element is then stored as the code
of the nearest value of a fixed map.

The maps, the block sizes and the smallest size of a quantized state are torchao's, with one
exception: no map for second moments contains zero, not even the 8-bit one. Adam divides by the root
of the second moment. If a second moment were rounded to zero, the next update would change the
weight by a huge amount.

torchao's code is not used for two more reasons: it cannot start on fake tensors, and its search for
the nearest value allocates several int64 tensors of the state's size.

On a CPU, a binary search for the code of each element takes most of an update's time. A CPU therefore
looks the code up in a table (`_first_codes`). It quantizes a state in parts that fit its caches.

Example: an exp_avg of 1M fp32 elements (4 MiB) in 8 bits becomes 1 MiB of codes and 4096 fp32
scales (16 KiB), one for each block of 256 elements.

Source  8 bits, dynamic map: Dettmers et al. 2022, arXiv:2110.02861. 4 bits, dynamic map for signed
        states, linear map without zero for unsigned ones: Li et al. 2023, arXiv:2309.01507.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tightfit.target_device import kind_of

# Elements of the smallest quantized state. Smaller states would save little memory, and many belong
# to norms and biases, whose states are the most sensitive to rounding.
MIN_ELEMENTS = 4096
# On a CPU, a state is quantized in parts of at least this many elements, in at most this many parts.
PART_ELEMENTS, MOST_PARTS = 3 * 2**14, 128
_UNSIGNED = frozenset(["exp_avg_sq", "max_exp_avg_sq"])  # second moments, which are never negative

Bits = Literal[8, 4]
# "codes": flat uint8; in 4 bits, a byte holds two codes, the first in its upper half.
# "scale": fp32, one for each block.
QuantizedState = dict[str, Tensor]


def block_size(bits: Bits) -> int:
    """Return the number of elements in a block, which have one scale: 256 in 8 bits, 128 in 4."""
    return {8: 256, 4: 128}[bits]


def is_packed(elements: int, bits: Bits) -> bool:
    """Return whether a state with this number of elements is quantized to `bits` bits. It must have
    at least MIN_ELEMENTS (4096) elements, and their number must be a multiple of the block size."""
    return elements >= MIN_ELEMENTS and elements % block_size(bits) == 0


class BlockQuantizer:
    """Quantizes and dequantizes states on one device.

    bits    8 (blocks of 256 elements) or 4 (blocks of 128)
    device  the device of the states

    The methods take the `name` of the state, such as exp_avg. exp_avg_sq and max_exp_avg_sq use the
    map for unsigned values, all other states the map for signed values.
    """

    def __init__(self, bits: Bits, device: torch.device) -> None:
        self.bits, self.size = bits, block_size(bits)
        self._values = {
            signed: torch.tensor(quantization_map(bits, signed), dtype=torch.float32, device=device)
            for signed in (True, False)
        }
        self._midpoints = {signed: (values[1:] + values[:-1]) / 2 for signed, values in self._values.items()}
        self._in_parts = kind_of(device) == "cpu"
        self._tables: dict[bool, tuple[Tensor, Tensor]] = {}

    def can_quantize(self, values: Tensor) -> bool:
        """Return whether `values` has at least 4096 elements and a number of elements that is a
        multiple of the block size."""
        return is_packed(values.numel(), self.bits)

    def quantize(self, name: str, values: Tensor) -> QuantizedState:
        """Return the quantized state {"codes": flat uint8, "scale": fp32, one for each block}.

        name    the state's name, such as exp_avg
        values  floating point, of any shape; `can_quantize(values)` must be True

        In 4 bits, each byte of "codes" holds two codes.
        """
        blocks, signed = values.reshape(-1, self.size), name not in _UNSIGNED
        parts = [self._quantize_part(blocks[part], signed) for part in self._parts(len(blocks))]
        codes, scale = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return {"codes": codes if self.bits == 8 else (codes[::2] << 4) | codes[1::2], "scale": scale}

    def _parts(self, blocks: int) -> list[slice]:
        """Return the parts in which a state is quantized, as slices of its blocks. A CPU's parts fit its
        caches. A GPU has one part, because each part would cost launches."""
        size = max(PART_ELEMENTS // self.size, -(-blocks // MOST_PARTS)) if self._in_parts else blocks
        return [slice(start, start + size) for start in range(0, blocks, size)]

    def _quantize_part(self, blocks: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of blocks, (number of blocks, block size), both flat."""
        blocks = blocks.float()
        scale = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        return self._codes((blocks / scale).view(-1), signed).to(torch.uint8), scale.flatten()

    def _codes(self, shares: Tensor, signed: bool) -> Tensor:
        """Return the codes, as integers, of the map's values that are nearest to `shares`, flat fp32
        values in [-1, 1]. `signed` chooses the map."""
        if not self._in_parts:
            return torch.bucketize(shares, self._midpoints[signed], out_int32=True, right=True)
        if signed not in self._tables:
            codes, following = _first_codes(self.bits, signed)
            self._tables[signed] = torch.tensor(codes, dtype=torch.uint8), torch.tensor(following, dtype=torch.float32)
        first, midpoints = self._tables[signed]
        upper = (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        return first.index_select(0, upper).add_(shares >= midpoints.index_select(0, upper))

    def dequantize(self, name: str, packed: QuantizedState, like: Tensor) -> Tensor:
        """Return the values of the quantized state `packed`, which `quantize` returned, with the
        type, shape and memory layout of `like`."""
        values = self.dequantize_flat(name, packed["codes"], packed["scale"]).view(like.shape).to(like.dtype)
        return values if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(values)

    def dequantize_flat(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the values of a quantized state as a flat fp32 tensor. `codes` and `scale` are the
        two tensors that `quantize` returned."""
        packed, values = codes.view(len(scale), -1), self._values[name not in _UNSIGNED]
        parts = self._parts(len(scale))
        if len(parts) == 1:
            return self._dequantize_part(packed, scale, values).view(-1)
        found = torch.empty(len(scale), self.size, dtype=torch.float32, device=codes.device)
        for part in parts:
            found[part] = self._dequantize_part(packed[part], scale[part], values)
        return found.view(-1)

    def _dequantize_part(self, codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        """Return the values of blocks, (number of blocks, block size).

        codes   (number of blocks, bytes of the codes of a block)
        scale   one for each block
        values  the map
        """
        codes = codes.flatten()
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
        codes = codes.int()
        # index_select takes int32; indexing would make an int64 copy first
        found = values.index_select(0, codes).view(-1, self.size)
        del codes
        return found.mul_(scale[:, None])


@cache
def _first_codes(bits: Bits, signed: bool) -> tuple[list[int], list[float]]:
    """Return the table from which the code of an fp32 value x in [-1, 1] follows without a search: two
    lists of 65,536 numbers, indexed by the upper 16 bits of x. The range of all x with the same upper
    bits is so small that it contains at most one midpoint between two values of the map.

    first list   the code of the smallest x of the range
    second list  the midpoint from which on the code is larger by 1; infinite, or outside of the range, if
                 the range contains none

    A not-a-number has the last code, as from torch.bucketize.
    """
    values = array("f", quantization_map(bits, signed))
    midpoints = array("f", [array("f", [low + high])[0] / 2 for low, high in pairwise(values)])
    edges = array("f", array("I", [upper << 16 for upper in range(1 << 16)]).tobytes())
    first, following = [], []
    for upper in range(1 << 16):
        if upper & 0x7F80 == 0x7F80:  # infinite or not a number
            code = len(midpoints)
        else:  # a negative number with the same upper bits has up to the next larger magnitude
            code = bisect_right(midpoints, edges[upper] if upper < 0x8000 else edges[upper + 1])
        first.append(code)
        following.append(midpoints[code] if code < len(midpoints) else float("inf"))
    return first, following


def bits_of(packed: QuantizedState, parameter: Tensor) -> Bits:
    """Return the bits per element, 8 or 4, of a quantized state of `parameter`."""
    return 8 if packed["codes"].numel() == parameter.numel() else 4


def quantization_map(bits: Bits, signed: bool) -> list[float]:
    """Return the quantization map: 2**bits values in [-1, 1], in ascending order. The code of an
    element is the index of its value in this list.

    signed  whether the map contains negative values

    The unsigned 4-bit map is linear: 1/16, 2/16, ..., 1. The other maps are dynamic: they divide
    the magnitudes below 1 into `bits - 1` decades. Each decade has half as many values as the
    decade above it. In addition, a dynamic map contains 1, and also 0 if it is signed. If it is
    unsigned, it contains the lower end of the lowest decade instead of 0.

    Example: the signed 4-bit map has 4 magnitudes between 0.1 and 1, 2 between 0.01 and 0.1, and 1
    between 0.001 and 0.01, each with both signs. With 0 and 1 these are 16 values.
    """
    if bits == 4 and not signed:
        return [(code + 1) / 16 for code in range(16)]
    values = [0.0 if signed else 10.0 ** (1 - bits), 1.0]
    for decade in range(bits - 1):
        count = 2 ** (decade if signed else decade + 1)
        middles = [10.0 ** (decade - bits + 2) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
        values += middles + [-value for value in middles if signed]
    return sorted(values)
