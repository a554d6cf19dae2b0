"""The kernels that compute one chunk of the loss (its matrix products and its softmax), for each
kind of device.

The method `loss` uses them if the plan sets `chunked_loss`. On a CUDA device:

- In 16 bits, the number of classes is a multiple of 8: the weight of the output head gets rows of
  zeros, up to a multiple of 64 classes.
- The product that computes the gradient of the output head's weight accumulates it in fp32.
- One generated kernel computes the softmax, the loss and the gradient of the logits.

On a CPU the operations are torch's own, because a generated softmax kernel is no faster there.

Example: with 50257 classes in bf16, a row of logits has 100514 bytes. That is no multiple of 16, so
cuBLAS would use its slow kernels. The 16-bit copy of the weight therefore has 50304 rows, a multiple
of 64, and the logits have as many columns. The 47 columns of zeros change neither the loss nor a
gradient. For a chunk of 1024 rows, they take 94 KiB.

Source  Hsu et al. 2024, arXiv:2410.10989 (loss and gradient in one kernel); NVIDIA, "Matrix
        Multiplication Background", on alignment. Measured on an H100 (records/gpu.json): with aligned rows but 50257 columns,
        the products of the logits and of the hidden states' gradient ran at 95 and 127 TFLOP/s.
        Liger's kernel also computes the loss and the gradient in one kernel. A generated kernel
        needs no other package, and accepts padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tightfit._torch.compiler import is_compiler_error, may_be_dynamic
from tightfit._torch.fake import active_fake_mode
from tightfit.errors import InputError
from tightfit.models.batches import IGNORED
from tightfit.runtime.fake_compiler import can_generate_kernels, see_kernel

ROWS_IN_CACHE = 64  # rows whose fp32 softmax stays in a CPU's cache
# rows of the fp32 softmax on a CUDA device without a fused kernel: limits the memory of evaluations
MAX_ROWS = 1024
PADDED_TO = 64  # classes of 2 bytes each: a cache line of 128 bytes
ALIGNED_TO = 8  # classes of 2 bytes each: cuBLAS's fast kernels need dims of a multiple of 16 bytes
ROW_MULTIPLE = 128  # rows: the tile size of matrix products on a CUDA device
# (logits, labels) -> loss; overwrites the logits with their gradient
FusedLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossKernels:
    """Options of the computation of one chunk of the loss. A chunk is a number of tokens; the loss
    computes the logits of one chunk at a time. The logits of a token are a row.

    rows              without a fused kernel: how many rows of logits are cast to fp32 at a time for
                      the softmax. On a CPU the number is small, so that these rows stay in the
                      cache
    pads              whether the head's weight is padded with zeros to a multiple of PADDED_TO
                      classes if the number of classes is no multiple of ALIGNED_TO
    accumulates_fp32  whether one kernel multiplies the 16-bit matrices of the weight's gradient and
                      adds the product to a sum in fp32
    fused             a kernel that computes the loss and the gradient of the logits; None: separate
                      operations compute them
    row_multiple      the number of computed rows is rounded up to a multiple of this number, so
                      that shapes repeat. The additional rows have an ignored label
    """

    rows: int = ROWS_IN_CACHE
    pads: bool = False
    accumulates_fp32: bool = False
    fused: FusedLoss | None = None
    row_multiple: int = 1


def kernels_for(kind: str, narrow: bool, chunk: int) -> LossKernels:
    """Return the options with which chunks of the loss are computed on a kind of device.

    kind    the kind of device: "cpu" or "cuda"
    narrow  whether the inputs of the matrix products have 16 bits
    chunk   number of tokens (rows of logits) in a chunk

    Call it when the run is built. Under a fake tensor mode, it returns options for a prediction:
    they do not round up the number of rows, so that memory grows in proportion to the batch.
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


def padded(tensor: Tensor, dtype: torch.dtype, pads: bool) -> Tensor:
    """Return the head's weight or bias as a matrix product uses it: cast to `dtype`, and with rows of
    zeros at the end if its classes have to be padded.

    tensor  shape (classes, width) or (classes,)
    pads    whether the number of rows is rounded up to a multiple of PADDED_TO if it is no multiple
            of ALIGNED_TO. The logits of the additional classes are zero
    """
    classes = len(tensor)
    if not pads or classes % ALIGNED_TO == 0:
        return tensor.to(dtype)
    longer = tensor.new_empty((-(-classes // PADDED_TO) * PADDED_TO, *tensor.shape[1:]), dtype=dtype)
    longer[:classes].copy_(tensor)
    longer[classes:].zero_()
    return longer


@torch.library.custom_op("tightfit::add_product", mutates_args=("total",))
def add_product(left: Tensor, right: Tensor, total: Tensor, first: bool) -> None:
    """Add the matrix product left @ right to `total`, in place and without rounding the product to
    16 bits.

    left   shape (n, k), 16-bit
    right  shape (k, m), 16-bit
    total  shape (n, m), fp32
    first  if True, overwrite `total`, which may be uninitialized, instead of adding to it
    """
    if not left.is_cuda:  # a CPU has no such product; this replacement lets tests run on a CPU
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
    """Return the summed cross entropy, an fp32 scalar, and overwrite `logits` with its gradient
    with respect to the logits.

    logits  shape (rows, classes)
    labels  shape (rows,). Rows with the label IGNORED add no loss, and their gradient is zero

    torch.compile fuses the operations into one kernel, which reads the logits twice, writes them
    once, and allocates no other tensor of their size.
    """
    counts = (labels != IGNORED).unsqueeze(1)
    safe = labels.unsqueeze(1).where(counts, 0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_label = torch.arange(logits.shape[1], device=logits.device) == safe
    # On a CPU, a gather from logits that are overwritten does not compile with torch 2.11, or reads
    # the new values. And a generated kernel that computes each exponential twice is twice as fast as
    # one that keeps a row of them
    on_gpu = logits.is_cuda
    chosen = wide.gather(1, safe) if on_gpu else wide.where(is_label, 0.0).sum(-1, keepdim=True)
    largest = wide.amax(-1, keepdim=True)
    exponentials = (wide - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    losses = total.log() + largest - chosen
    gradient = (exponentials if on_gpu else (wide - largest).exp()) / total - is_label.to(wide.dtype)
    logits.copy_(gradient.where(counts, 0.0))
    return losses.where(counts, 0.0).sum()


def compiled_loss(backend: str | Callable[..., Any] = "inductor") -> FusedLoss:
    """Return `loss_and_gradient` compiled by torch.compile, for any number of rows. Its first call
    raises InputError if torch.compile cannot generate the kernel.

    backend  the backend of torch.compile
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
                f"torch.compile cannot compile the softmax of the chunked loss ({str(error).strip().partition(chr(10))[0]})",
                "install a working C compiler and Triton, which chunked_loss needs, or leave out chunked_loss",
            ) from error

    return fused


def predicted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Takes the place of `compiled_loss` when a run is predicted on fake tensors. Report the
    kernel's memory traffic (it reads the logits twice and writes them once) and its exponentials, and
    return zero, a scalar, as the loss."""
    see_kernel(3 * logits.numel() * logits.element_size(), logits.dtype)
    see_kernel(2 * 4 * logits.numel(), torch.float32, "compiled exp")
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
