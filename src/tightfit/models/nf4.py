"""Frozen linear layers whose weights are stored in 4 bits (NF4), for QLoRA.

torchao quantizes. A weight is divided into blocks of 64 elements. Each block has a scale, its
largest magnitude, and each element has the number of the nearest of 16 values between -1 and 1,
which are quantiles of a normal distribution. The scales are quantized, too: to 8 bits, in groups of
up to 256 scales. That takes 4.13 bits an element.

The parts of torchao's NF4Tensor are kept as plain tensors of a module, so that a layer is traced,
moved, sharded and saved as any other frozen layer: the codes and scales are frozen parameters, and
the small rest are buffers. docs/decisions/0017 says why. The weight is dequantized for each forward,
and again for the gradient of the layer's input, so no full weight is kept.

Example: a 4096 x 4096 weight takes 64 MiB in fp32 and 8.3 MiB here.

Source  Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.fake import is_fake
from tightfit._torch.loggers import quiet_import
from tightfit.errors import InputError

BLOCK = 64  # elements with one scale
GROUP = 256  # scales with one factor, if their number can be divided by it
CODES, SCALES = "nf4_codes", "nf4_scales"  # names of the parameters of a layer
PARTS = (CODES, SCALES, "nf4_factors", "nf4_mean", "nf4_pairs")


def can_quantize(layer: nn.Linear) -> bool:
    """Return whether the layer's weight is frozen and can be divided into blocks."""
    return not layer.weight.requires_grad and layer.weight.numel() > 0 and layer.weight.numel() % BLOCK == 0


class Nf4Linear(nn.Module):
    """A linear layer with a frozen weight in 4 bits. Its bias, if it has one, is not quantized.

    layer  the frozen nn.Linear whose weight is quantized. Its bias is shared with the new layer

    Raises InputError if torchao is not installed.

    Parameters and buffers for a weight of n elements:

    nf4_codes    uint8, shape (n / 2,): the codes, two in each byte, the first in its upper half
    nf4_scales   int8, shape (n / 64,): the quantized scales. A scale is scales / factors + mean
    nf4_factors  fp32, shape (number of groups,)
    nf4_mean     fp32, a single number
    nf4_pairs    fp32, shape (256, 2): the two values of each byte of the codes; not in checkpoints
    """

    nf4_codes: Tensor
    nf4_scales: Tensor
    nf4_factors: Tensor
    nf4_mean: Tensor
    nf4_pairs: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        codes, scales, factors, mean, values = _quantize(layer.weight.detach())
        self.nf4_codes = nn.Parameter(codes, requires_grad=False)
        self.nf4_scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("nf4_factors", factors)
        self.register_buffer("nf4_mean", mean)
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
        self.register_buffer("nf4_pairs", pairs, persistent=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias. x: shape (..., in_features); the result: (..., out_features).

        Under autocast, the product is computed in autocast's type, as that of nn.Linear.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        parts = (self.nf4_codes, self.nf4_scales, self.nf4_factors, self.nf4_mean, self.nf4_pairs)
        product: Tensor = _Product.apply(x, (self.out_features, self.in_features), *parts)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def dequantized(self) -> nn.Linear:
        """Return a frozen nn.Linear with the dequantized weight, in fp32."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        shape = (self.out_features, self.in_features)
        parts = (self.nf4_codes, self.nf4_scales, self.nf4_factors, self.nf4_mean, self.nf4_pairs)
        layer.weight = nn.Parameter(dequantize(shape, torch.float32, *parts), requires_grad=False)
        layer.bias = self.bias
        return layer

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """x @ weight.T, with a frozen weight that is dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.shape = shape
        return functional.linear(x, dequantize(shape, x.dtype, *parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        weight = dequantize(ctx.shape, gradient.dtype, *ctx.saved_tensors)
        return gradient @ weight, None, *(None for _ in PARTS)


def dequantize(
    shape: tuple[int, int],
    dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    mean: Tensor,
    pairs: Tensor,
) -> Tensor:
    """Return the weight of this shape, computed in fp32 and cast to `dtype`.

    The other arguments are the parts of a weight: see `Nf4Linear`. The values are those of torchao's
    `NF4Tensor.get_original_weight`, which needs 16 bytes an element for its intermediate results.
    Here they are 6 bytes.
    """
    restored = (scales.view(len(factors), -1) / factors.unsqueeze(1)).view(-1, 1).add_(mean)
    weight = functional.embedding(codes.int(), pairs).view(-1, BLOCK)
    return weight.mul_(restored).view(shape).to(dtype)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the codes, scales, factors and mean of a weight, as `Nf4Linear` keeps them, and the 16
    values of NF4. For a weight without values (fake, or on the meta device), return tensors of the
    same shapes.
    """
    count = weight.numel() // BLOCK
    group = math.gcd(count, GROUP)
    if weight.is_meta or is_fake(weight):
        sizes = ((weight.numel() // 2, torch.uint8), (count, torch.int8), (count // group, torch.float32))
        codes, scales, factors = (torch.empty(size, dtype=dtype, device=weight.device) for size, dtype in sizes)
        return codes, scales, factors, torch.empty((), device=weight.device), torch.empty(16, device=weight.device)
    made = _nf4_tensor_class().from_tensor(weight.float(), BLOCK, group)
    factors = made.quantization_factor.clone()  # of one group, it is a view of a larger tensor
    return made.quantized_data, made.quantized_scalers, factors, made.scaler_mean, made.nf4


def _nf4_tensor_class() -> Any:
    """Return torchao's class NF4Tensor. Raises InputError if torchao does not have it."""
    try:
        return quiet_import("torchao.quantization").NF4Tensor
    except (ImportError, AttributeError) as error:
        raise InputError(
            "job: model.lora.quantize",
            f"needs NF4Tensor of the library torchao, which cannot be imported ({error})",
            'install it: pip install "tightfit[qlora]"',
        ) from None


def is_quantized_part(name: str) -> bool:
    """Return whether a parameter or buffer with this name is part of a weight in 4 bits."""
    return name.rpartition(".")[2] in PARTS


def element_count(name: str, shape: tuple[int, ...]) -> int:
    """Return how many elements of the model a parameter or buffer stands for: two for each byte of
    codes, none for the other parts of a weight in 4 bits, and its own number of elements for any
    other tensor.

    name   its full name
    shape  its shape
    """
    if name.rpartition(".")[2] == CODES:
        return 2 * math.prod(shape)
    return 0 if is_quantized_part(name) else math.prod(shape)


def quantizing_bytes(elements: int) -> int:
    """Return how many bytes torchao needs, beside a weight of so many elements in fp32 and the
    result, to quantize it: the scaled weight in fp32, and for up to 2**20 elements at once their
    distances to the 16 values, twice.
    """
    return 5 * elements + min(elements, 2**20) * (2 * 16 * 4 + 12)


__all__ = ["Nf4Linear", "can_quantize", "dequantize", "element_count", "is_quantized_part", "quantizing_bytes"]
