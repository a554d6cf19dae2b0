"""What a chunk of the loss is computed with: its products and its softmax, as suits a kind of device.

On a CUDA device rows of 16-bit logits begin at multiples of 128 bytes, the gradient of the head's weight is added up in fp32
within its product, and the softmax, the loss and the gradient of the logits are one generated kernel. On a processor the
operations are torch's own: there a generated kernel for the softmax is no faster.

Source  Hsu et al. 2024, arXiv:2410.10989 (loss and gradient in one kernel); NVIDIA, "Matrix Multiplication Background", on
        alignment. Liger's kernel does the same; compiling ours needs no other package, and its rows may be padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from tightfit.errors import InputError
from tightfit.methods.compiler import generates_kernels, see_kernel
from tightfit.models.objective import IGNORED

ROWS_IN_CACHE = 64
MOST_ROWS = (
    1024  # on a CUDA device, where no kernel is fused: an evaluation's softmax in fp32 takes no more than these do
)
PADDED_TO = 64  # classes of 2 bytes: a cache line of 128
NEEDED = 8  # classes of 2 bytes: what the fast kernels of cuBLAS ask of a row's length, 16 bytes
REPEATED = 128  # rows: of so many a CUDA device's products make a tile
Fused = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> loss; the gradient is written over the logits


@dataclass(frozen=True)
class Kernels:
    """How a chunk is computed.

    rows      rows whose softmax is in fp32 at once, where it is no fused kernel: on a processor few, so that it stays in the cache
    pads      whether rows of logits begin at multiples of PADDED_TO classes, where their number is none of NEEDED
    adds      whether the 16-bit product that is the weight's gradient is added to the fp32 sum as it is computed
    fused     loss and gradient of logits as one kernel; None: one operation after another
    multiple  rows that count are rounded up to a multiple of this, so that shapes repeat
    """

    rows: int = ROWS_IN_CACHE
    pads: bool = False
    adds: bool = False
    fused: Fused | None = None
    multiple: int = 1


def kernels_for(kind: str, narrow: bool, chunk: int) -> Kernels:
    """The kernels on a kind of device (cpu, cuda). narrow: whether products take 16-bit numbers.

    Call it where the run is built: on tensors without values it is for a prediction, which leaves the rounding of rows out,
    as shapes then grow in proportion to the batch.
    """
    if kind == "cpu":
        return Kernels()
    predicted = active_fake_mode() is not None
    fused = None
    if generates_kernels():
        fused = foreseen if predicted else compiled()
    return Kernels(min(chunk, MOST_ROWS), pads=narrow, adds=narrow, fused=fused, multiple=1 if predicted else REPEATED)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, pads: bool) -> Tensor:
    """rows @ weight^T + bias: (rows, classes).

    pads: the result is a view of a wider tensor where rows of `classes` numbers are not aligned: no product then gets rows
    that it has to read piece by piece. The weight stays as it is, and the padding is in no product and in no softmax.
    """
    classes = len(weight)
    if not pads or classes % NEEDED == 0:
        return functional.linear(rows, weight, bias)
    logits = rows.new_empty(len(rows), -(-classes // PADDED_TO) * PADDED_TO)[:, :classes]
    if bias is None:
        return torch.mm(rows, weight.t(), out=logits)
    return torch.addmm(bias, rows, weight.t(), out=logits)


@torch.library.custom_op("tightfit::add_product", mutates_args=("total",))
def add_product(left: Tensor, right: Tensor, total: Tensor, first: bool) -> None:
    """total += left @ right, or total = left @ right where it is the first and `total` holds nothing yet.

    left (n, k) and right (k, m) in 16 bits, total (n, m) in fp32: no product is rounded to 16 bits.
    """
    if not left.is_cuda:  # processors have no such product: what is predicted for a CUDA device is tested with this
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
    """Summed cross entropy in fp32 of (rows, classes) logits, whose gradient is written over them: zero in rows that are IGNORED.

    Written to be compiled: then it reads the logits twice and writes them once, and nothing of their size is made.
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


def compiled(backend: str | Callable[..., Any] = "inductor") -> Fused:
    """`loss_and_gradient` as generated kernels: one for any number of rows. Raises InputError where they cannot be made."""
    kernel = torch.compile(loss_and_gradient, backend=backend)

    def fused(logits: Tensor, labels: Tensor) -> Tensor:
        for tensor in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the last chunk is shorter
        try:
            return kernel(logits, labels)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                "plan: chunked_loss",
                f"torch.compile fails on its softmax ({str(error).strip().partition(chr(10))[0]})",
                "leave out chunked_loss, or mend the C compiler or Triton that it needs",
            ) from error

    return fused


def foreseen(logits: Tensor, labels: Tensor) -> Tensor:
    """What `compiled` leaves and moves, for tensors without values: the logits are read twice and written once."""
    see_kernel(3 * logits.numel() * logits.element_size(), logits.dtype)
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
