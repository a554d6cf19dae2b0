"""A frozen linear layer whose weight is stored in 4 bits (NF4), as in QLoRA.

A weight is divided into blocks of 64 elements. Each block has a scale in fp32, its largest
magnitude, and each element the number of the nearest of 16 values between -1 and 1, which are the
quantiles of a normal distribution. That takes 4.5 bits an element. The weight is dequantized for
each product, and once more for the gradient of the layer's input, so no full weight is kept.

Example: a 4096 x 4096 weight takes 64 MiB in fp32 and 9 MiB here.

The parts of a weight are plain buffers, so that a layer can be traced, moved and saved like any
other. torchao and bitsandbytes have subclasses of Tensor for them, which fake tensors and
fully_shard do not take.

Source  Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64  # elements with one scale
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
CODES = "nf4_codes"  # name of the buffer with the codes; two in each byte


def can_quantize(layer: nn.Linear) -> bool:
    """Return whether the layer's weight can be divided into blocks."""
    return layer.weight.numel() % BLOCK == 0


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8, two elements in each byte, the first in its upper half) and the
    scales (fp32, one for each block) of a weight."""
    blocks = weight.detach().reshape(-1, BLOCK).float()
    scales = blocks.abs().amax(1).clamp(min=1e-12)
    values = torch.tensor(VALUES, device=weight.device)
    codes = torch.bucketize(blocks / scales[:, None], (values[1:] + values[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).flatten()
    return (codes[::2] << 4) | codes[1::2], scales


def dequantize(codes: Tensor, scales: Tensor, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weight, of this shape and dtype. values: the 16 values, in fp32."""
    numbers = torch.stack([codes >> 4, codes & 15], dim=1).flatten().int()
    weight = values.index_select(0, numbers).view(-1, BLOCK)
    return weight.mul_(scales[:, None]).view(shape).to(dtype)


class _Product(torch.autograd.Function):
    """input @ weight.T, with a weight that is dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(codes, scales, values)
        ctx.shape = shape
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return functional.linear(x.to(dtype), dequantize(codes, scales, values, shape, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        weight = dequantize(*ctx.saved_tensors, ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None


class Nf4Linear(nn.Module):
    """A linear layer with a frozen weight in 4 bits. Its bias, if it has one, is not quantized.

    in_features, out_features  sizes of its input and output
    bias                       a frozen parameter, or None
    """

    nf4_codes: Tensor
    nf4_scales: Tensor
    nf4_values: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer(CODES, codes)
        self.register_buffer("nf4_scales", scales)
        self.register_buffer("nf4_values", torch.tensor(VALUES, device=codes.device), persistent=False)
        self.bias = bias

    @classmethod
    def of(cls, layer: nn.Linear) -> Nf4Linear:
        """Quantize a layer. The layer's bias is shared with the result."""
        return cls(*quantize(layer.weight), (layer.out_features, layer.in_features), layer.bias)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias. x: shape (..., in_features); the result: (..., out_features)."""
        product = _Product.apply(x, self.nf4_codes, self.nf4_scales, self.nf4_values, self.shape)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def dequantized(self) -> nn.Linear:
        """Return an nn.Linear with the dequantized weight in fp32, frozen."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = dequantize(self.nf4_codes, self.nf4_scales.float(), self.nf4_values.float(), self.shape, torch.float32)
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return layer


def unquantized_bytes(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes in fp32 of the weight whose codes are the buffer `name` of this shape. None
    for all other buffers and parameters."""
    return 8 * math.prod(shape) if name.rpartition(".")[2] == CODES else None


__all__ = ["BLOCK", "Nf4Linear", "can_quantize", "dequantize", "quantize", "unquantized_bytes"]
