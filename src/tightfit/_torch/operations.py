"""Operations of torch that have no public name, and a function that returns the schema of an
operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATEN = torch.ops.aten

LOCAL_SCALAR_DENSE = _ATEN._local_scalar_dense  # what Tensor.item() dispatches
INDEX_PUT = _ATEN._index_put_impl_  # the backward of indexing
UNIQUE = _ATEN._unique2
GROUPED_MM = _ATEN._grouped_mm
SCALED_MM = _ATEN._scaled_mm
FLASH_ATTENTION = _ATEN._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward
CPU_FLASH_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
EFFICIENT_ATTENTION = _ATEN._scaled_dot_product_efficient_attention
EFFICIENT_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward
CUDNN_ATTENTION = _ATEN._scaled_dot_product_cudnn_attention
CUDNN_RNN = _ATEN._cudnn_rnn
CUDNN_RNN_BACKWARD = _ATEN._cudnn_rnn_backward
CTC_LOSS = _ATEN._ctc_loss
CTC_LOSS_BACKWARD = _ATEN._ctc_loss_backward
MKLDNN_RNN = _ATEN.mkldnn_rnn_layer
MKLDNN_RNN_BACKWARD = _ATEN.mkldnn_rnn_layer_backward
MPS_ATTENTION = _ATEN._scaled_dot_product_attention_math_for_mps
SOFTMAX = _ATEN._softmax
LOG_SOFTMAX = _ATEN._log_softmax
FUSED_RMS_NORM = _ATEN._fused_rms_norm
_SOFTMAX_BACKWARD = _ATEN._softmax_backward_data

# one call for many tensors
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
scaled_mm = torch._scaled_mm
# (condition, message): the kernel fails if the condition on the device is false; the host does not wait
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
attention_by_products: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._scaled_dot_product_attention_math


def softmax_backward_(gradient: torch.Tensor, output: torch.Tensor) -> None:
    """Replace the gradient of a softmax over the last dimension by that of its input, in place. Both
    tensors have the shape and the dtype of the softmax's `output`."""
    _SOFTMAX_BACKWARD(gradient, output, -1, output.dtype, grad_input=gradient)


def schema_of(operation: Any) -> torch.FunctionSchema:
    """Return the schema of an operation: its name, its arguments, and which of the arguments it
    writes to."""
    schema: torch.FunctionSchema = operation._schema
    return schema


__all__ = [
    "CPU_FLASH_ATTENTION",
    "CPU_FLASH_ATTENTION_BACKWARD",
    "CTC_LOSS",
    "CTC_LOSS_BACKWARD",
    "CUDNN_ATTENTION",
    "CUDNN_RNN",
    "CUDNN_RNN_BACKWARD",
    "EFFICIENT_ATTENTION",
    "EFFICIENT_ATTENTION_BACKWARD",
    "FLASH_ATTENTION",
    "FLASH_ATTENTION_BACKWARD",
    "FUSED_RMS_NORM",
    "GROUPED_MM",
    "INDEX_PUT",
    "LOCAL_SCALAR_DENSE",
    "LOG_SOFTMAX",
    "MKLDNN_RNN",
    "MKLDNN_RNN_BACKWARD",
    "MPS_ATTENTION",
    "SCALED_MM",
    "SOFTMAX",
    "UNIQUE",
    "assert_async",
    "attention_by_products",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "scaled_mm",
    "schema_of",
    "softmax_backward_",
]
