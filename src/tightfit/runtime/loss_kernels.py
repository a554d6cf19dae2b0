"""The kernels that compute one chunk of the loss: its products and its softmax, per kind of device.

`loss` uses them for the plan's `chunked_loss`. On a CUDA device, rows of 16-bit logits begin at
multiples of 128 bytes; the gradient of the head's weight is accumulated in fp32 within its
product; and the softmax, the loss and the gradient of the logits are one generated kernel. On a
CPU the operations are torch's own: there a generated kernel for the softmax is no faster.

Example: a vocabulary of 50257 classes in bf16 has rows of 100514 bytes. That is no multiple of 16,
and cuBLAS would use its slow kernels. The logits are made as a view of a tensor with 50304
columns, a multiple of 64 classes or 128 bytes. For a chunk of 1024 rows that adds 94 KiB.

Source  Hsu et al. 2024, arXiv:2410.10989 (loss and gradient in one kernel); NVIDIA, "Matrix
        Multiplication Background", on alignment. Liger's kernel does the same; compiling our own
        needs no other package, and its rows may be padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from tightfit._torch.compiler import is_compiler_error, may_be_dynamic
from tightfit._torch.fake import active_fake_mode
from tightfit.errors import InputError
from tightfit.models.objective import IGNORED
from tightfit.runtime.fake_compiler import can_generate_kernels, see_kernel

ROWS_IN_CACHE = 64
# Rows on a CUDA device without a fused kernel: bounds the memory of an evaluation's fp32 softmax.
MAX_ROWS = 1024
PADDED_TO = 64  # classes of 2 bytes each: a cache line of 128 bytes
ALIGNED_TO = 8  # classes of 2 bytes each: cuBLAS's fast kernels need rows of a multiple of 16 bytes
ROW_MULTIPLE = 128  # rows: the tile size of matrix products on a CUDA device
# (logits, labels) -> loss; overwrites the logits with their gradient
FusedLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossKernels:
    """How a chunk of the loss is computed.

    rows      rows whose softmax is in fp32 at a time, without a fused kernel; few on a CPU, so that
              they stay in the cache
    pads      whether rows of logits begin at multiples of PADDED_TO classes, where the number of
              classes is no multiple of ALIGNED_TO
    accumulates_fp32  whether the weight's gradient, a 16-bit product, is added to the fp32 sum
              as it is computed
    fused     loss and gradient of the logits as one kernel; None: one operation after another
    row_multiple  the number of rows that count is rounded up to a multiple of this, so that
              shapes repeat
    """

    rows: int = ROWS_IN_CACHE
    pads: bool = False
    accumulates_fp32: bool = False
    fused: FusedLoss | None = None
    row_multiple: int = 1


def kernels_for(kind: str, narrow: bool, chunk: int) -> LossKernels:
    """The kernels for a kind of device (cpu, cuda).

    narrow  whether products take 16-bit numbers
    chunk   rows of a chunk

    Call it when the run is built. On fake tensors it is for a prediction. That leaves out the
    rounding of rows, because shapes then grow in proportion to the batch.
    """
    if kind == "cpu":
        return LossKernels()
    predicted = active_fake_mode() is not None
    fused = None
    if can_generate_kernels():
        fused = predicted_loss if predicted else compiled_loss()
    return LossKernels(
        min(chunk, MAX_ROWS),
        pads=narrow,
        accumulates_fp32=narrow,
        fused=fused,
        row_multiple=1 if predicted else ROW_MULTIPLE,
    )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, pads: bool) -> Tensor:
    """rows (n, width) @ weight^T + bias -> (n, classes).

    pads: where a row of `classes` numbers is not aligned, the result is a view of a wider tensor.
    So no product receives unaligned rows, which it would have to read piecewise. The weight is not
    padded, and no product and no softmax reads the padding.
    """
    classes = len(weight)
    if not pads or classes % ALIGNED_TO == 0:
        return functional.linear(rows, weight, bias)
    logits = rows.new_empty(len(rows), -(-classes // PADDED_TO) * PADDED_TO)[:, :classes]
    if bias is None:
        return torch.mm(rows, weight.t(), out=logits)
    return torch.addmm(bias, rows, weight.t(), out=logits)


@torch.library.custom_op("tightfit::add_product", mutates_args=("total",))
def add_product(left: Tensor, right: Tensor, total: Tensor, first: bool) -> None:
    """total += left @ right; or total = left @ right where `first`: then `total` is not
    initialised.

    left (n, k) and right (k, m) in 16 bits, total (n, m) in fp32: no product is rounded to 16 bits.
    """
    if not left.is_cuda:  # a CPU has no such product: this path tests what CUDA devices run
        left, right = left.to(total.dtype), right.to(total.dtype)
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        torch.mm(left, right, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@add_product.register_fake
def _(left: Tensor, right: Tensor, total: Tensor, first: bool) -> None:
    return None


@register_flop_formula(torch.ops.tightfit.add_product)
def _flops(left: Any, right: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def loss_and_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy in fp32; overwrites the logits with their gradient.

    logits (rows, classes); labels (rows,). Rows whose label is IGNORED add no loss, and their
    gradient is zero. Returns a scalar in fp32.

    Written to be compiled: the kernel then reads the logits twice, writes them once, and makes no
    other tensor of their size.
    """
    counts = (labels != IGNORED).unsqueeze(1)
    safe = labels.unsqueeze(1).where(counts, 0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.gather(1, safe)
    largest = wide.amax(-1, keepdim=True)
    exponentials = (wide - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    losses = total.log() + largest - chosen
    here = torch.arange(logits.shape[1], device=logits.device) == safe
    gradient = exponentials / total - here.to(wide.dtype)
    logits.copy_(gradient.where(counts, 0.0))
    return losses.where(counts, 0.0).sum()


def compiled_loss(backend: str | Callable[..., Any] = "inductor") -> FusedLoss:
    """`loss_and_gradient` as generated kernels, which take any number of rows.

    The kernel raises InputError at its first call where it cannot be generated.
    """
    kernel = torch.compile(loss_and_gradient, backend=backend)

    def fused(logits: Tensor, labels: Tensor) -> Tensor:
        for tensor in (logits, labels):
            may_be_dynamic(tensor, 0)  # the last chunk is shorter
        try:
            return kernel(logits, labels)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            raise InputError(
                "plan: chunked_loss",
                f"torch.compile fails on its softmax ({str(error).strip().partition(chr(10))[0]})",
                "leave out chunked_loss, or install a working C compiler and Triton, which it needs",
            ) from error

    return fused


def predicted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What `compiled` allocates and accesses, on fake tensors: the logits are read twice, written
    once."""
    see_kernel(3 * logits.numel() * logits.element_size(), logits.dtype)
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
