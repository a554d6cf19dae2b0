"""Block-wise quantization of optimizer states to 8 or 4 bits per element.

Each block is divided by its largest magnitude, its scale. Each element is then stored as the code
of the nearest value of a fixed map. The maps, block sizes and smallest tensor are torchao's, with
one exception: no map for second moments contains zero, in 8 bits either. Adam divides by the root
of the second moment, so the next update would throw away a weight whose second moment was rounded
to zero.

torchao's code is not used for two more reasons: it cannot start on fake tensors, and its search for
the nearest value holds several int64 tensors of the state's size.

Example: an exp_avg of 1M fp32 elements (4 MiB) in 8 bits becomes 1 MiB of codes and 4096 fp32
scales (16 KiB), one for each block of 256 elements.

Source  8 bits, dynamic map: Dettmers et al. 2022, arXiv:2110.02861. 4 bits, dynamic for signed
        states and linear for unsigned ones, and why these need a map without zero: Li et al. 2023,
        arXiv:2309.01507.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Elements. Smaller states save little, and those of norms and biases are the most sensitive to rounding.
MIN_ELEMENTS = 4096
_UNSIGNED = frozenset(["exp_avg_sq", "max_exp_avg_sq"])  # second moments are never negative

Bits = Literal[8, 4]
# "codes": flat uint8, in 4 bits two codes to a byte, the first in the upper half; "scale": fp32, one per block
QuantizedState = dict[str, Tensor]


def block_size(bits: Bits) -> int:
    """How many elements a block has."""
    return {8: 256, 4: 128}[bits]


def is_packed(elements: int, bits: Bits) -> bool:
    """Whether a state of so many elements is kept in blocks: not a small one, nor one that is not a whole number of them."""
    return elements >= MIN_ELEMENTS and elements % block_size(bits) == 0


class BlockQuantizer:
    """Quantizes and dequantizes states on one device.

    bits  8 (blocks of 256 elements) or 4 (blocks of 128)

    The methods' `name` is that of the state: exp_avg_sq and max_exp_avg_sq are unsigned, others
    signed.
    """

    def __init__(self, bits: Bits, device: torch.device) -> None:
        self.bits, self.size = bits, block_size(bits)
        self._values = {
            signed: torch.tensor(quantization_map(bits, signed), dtype=torch.float32, device=device)
            for signed in (True, False)
        }
        self._midpoints = {signed: (values[1:] + values[:-1]) / 2 for signed, values in self._values.items()}

    def can_quantize(self, values: Tensor) -> bool:
        """Whether `values` can be quantized: it has at least 4096 elements and a whole number of
        blocks."""
        return is_packed(values.numel(), self.bits)

    def quantize(self, name: str, values: Tensor) -> QuantizedState:
        """Floating-point values of any shape -> their codes and scales."""
        blocks = values.reshape(-1, self.size).float()
        scale = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        midpoints = self._midpoints[name not in _UNSIGNED]
        codes = torch.bucketize(blocks / scale, midpoints, out_int32=True, right=True).to(torch.uint8).flatten()
        return {"codes": codes if self.bits == 8 else (codes[::2] << 4) | codes[1::2], "scale": scale.flatten()}

    def dequantize(self, name: str, packed: QuantizedState, like: Tensor) -> Tensor:
        """The dequantized values, with the type, shape and memory layout of `like`."""
        values = self.dequantize_flat(name, packed["codes"], packed["scale"]).view(like.shape).to(like.dtype)
        return values if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(values)

    def dequantize_flat(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """The values of codes and scales, as a flat fp32 tensor."""
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
        codes = codes.int()
        # index_select takes int32; indexing would make an int64 copy first
        values = self._values[name not in _UNSIGNED].index_select(0, codes).view(-1, self.size)
        del codes
        return values.mul_(scale[:, None]).view(-1)


def bits_of(packed: QuantizedState, parameter: Tensor) -> Bits:
    """The bits per element of a quantized state of `parameter`."""
    return 8 if packed["codes"].numel() == parameter.numel() else 4


def quantization_map(bits: Bits, signed: bool) -> list[float]:
    """The quantization map: the 2**bits values in [-1, 1], ascending; a code is the index of its
    value.

    A dynamic map has `bits - 1` decades below 1, each with half as many values as the one above. It
    also has the value 1 and, if signed, 0, or if unsigned, the lower end of the lowest decade. The
    unsigned 4-bit map is linear: 1/16, 2/16, ..., 1.
    """
    if bits == 4 and not signed:
        return [(code + 1) / 16 for code in range(16)]
    values = [0.0 if signed else 10.0 ** (1 - bits), 1.0]
    for decade in range(bits - 1):
        count = 2 ** (decade if signed else decade + 1)
        middles = [10.0 ** (decade - bits + 2) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
        values += middles + [-value for value in middles if signed]
    return sorted(values)
