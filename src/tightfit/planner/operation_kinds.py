"""Kinds of operations, by which a machine's rates are looked up.

An operation that is in no list is elementwise: memory bandwidth limits it. To give an operation a rate of its
own, add its name to a kind here; a new kind needs cases in `calibration/operation_rates.py` as well.
"""

from __future__ import annotations

from tightfit.achieved_rates import COMPILED_ARITHMETIC
from tightfit.cost.recorded_step import BETWEEN_FORMATS, CHANNELS_LAST, OVERLAPPING, Operation

PRODUCT, BATCHED = "product", "batched product"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
BLOCKED = ("blocked attention", "blocked attention backward")
IN_CHANNELS_LAST = ("channels-last convolution", "channels-last convolution backward")
CONVOLUTIONS = (CONVOLUTION, CONVOLUTION_BACKWARD, *IN_CHANNELS_LAST)
ARITHMETIC = (PRODUCT, BATCHED, *CONVOLUTIONS, ATTENTION, ATTENTION_BACKWARD, *BLOCKED)
BY_SHAPE = (PRODUCT, BATCHED, ATTENTION, ATTENTION_BACKWARD)  # a GPU's rates for these depend on the shape
RECURRENT = (  # many small products
    "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward", "aten._cudnn_rnn", "aten._cudnn_rnn_backward",
)  # fmt: skip
# interpolations of images: by the nearest pixel, and from several pixels
NEAREST = ("aten.upsample_nearest2d", "aten._upsample_nearest_exact2d")
LINEAR = ("aten.upsample_bilinear2d", "aten.upsample_bicubic2d")
BATCH_NORMS = ("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._batch_norm_with_update")
_IN_FORMATS = {  # kinds of operations on images, whose speed depends on the format of the image
    "average pooling": ("aten.avg_pool2d",),
    "average pooling backward": ("aten.avg_pool2d_backward",),
    "overlapping average pooling": (f"aten.avg_pool2d{OVERLAPPING}",),
    "overlapping average pooling backward": (f"aten.avg_pool2d_backward{OVERLAPPING}",),
    "nearest interpolation": NEAREST,
    "nearest interpolation backward": tuple(f"{name}_backward" for name in NEAREST),
    "linear interpolation": LINEAR,
    "linear interpolation backward": tuple(f"{name}_backward" for name in LINEAR),
}
_KINDS = {
    PRODUCT: ("aten.mm", "aten._scaled_mm", "aten.addmm", "aten.addmm_", "tightfit.add_product", *RECURRENT),
    BATCHED: (
        "aten.bmm", "aten.baddbmm", "aten.baddbmm_", "aten._grouped_mm", "transformers.grouped_mm_fallback",
        "transformers.grouped_mm_fallback_backward",
    ),
    CONVOLUTION: ("aten.convolution",),
    CONVOLUTION_BACKWARD: ("aten.convolution_backward",),
    "channels-last convolution": (f"aten.convolution{CHANNELS_LAST}",),
    "channels-last convolution backward": (f"aten.convolution_backward{CHANNELS_LAST}",),
    ATTENTION: (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
    ),
    ATTENTION_BACKWARD: (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_efficient_attention_backward",
    ),
    "blocked attention": ("tightfit.blocked_attention",),
    "blocked attention backward": ("tightfit.blocked_attention_backward",),
    "transcendental": (
        "aten.silu", "aten.silu_backward", "aten.exp", "aten.sigmoid", "aten.sigmoid_backward", "aten.cos", "aten.sin", "aten.erf",
        "aten.log",
    ),
    "tanh": ("aten.tanh",),
    "gelu": ("aten.gelu",),
    "gelu backward": ("aten.gelu_backward",),
    "random": ("aten.native_dropout", "aten.bernoulli_", "aten.bernoulli", "aten.rand", "aten.rand_like"),
    "16-bit dropout": ("tightfit.dropout_noise",),
    "cast": ("aten._to_copy",),
    "copy": (
        "aten.clone", "aten.copy_", "aten.cat", "aten.slice_backward", "aten.select_backward",
        "aten.constant_pad_nd", "aten.stack", "aten.repeat", "aten.as_strided_scatter",
    ),
    "reduction": (
        "aten.sum", "aten.mean", "aten.amax", "aten.max", "aten.var", "aten.var_mean", "aten.any", "aten.all", "aten.cumsum",
        "aten.native_layer_norm", "aten.native_layer_norm_backward", "aten._fused_rms_norm", "aten._fused_rms_norm_backward",
        "aten.native_batch_norm_backward",
        "aten.batch_norm_backward", "aten.native_group_norm",
        "aten.native_group_norm_backward", "aten.max_pool2d_with_indices_backward",
        "aten.mean_backward", "aten._foreach_norm",
    ),
    "softmax": (
        "aten._softmax", "aten._safe_softmax", "aten._softmax_backward_data", "aten._log_softmax", "aten._log_softmax_backward_data",
    ),
    "gather": ("aten.embedding",),
    "index": ("aten.index",),
    "index select": ("aten.index_select",),
    "element gather": ("aten.gather",),
    "scatter": ("aten.embedding_dense_backward", "aten.scatter", "aten.scatter_"),
    "element scatter": ("aten.scatter_add", "aten.scatter_add_", "aten.scatter_reduce"),
    "index add": ("aten.index_add", "aten.index_add_"),
    "indexed sum": ("aten.index_put", "aten.index_put_", "aten._index_put_impl_"),
    "search": ("aten.bucketize", "aten.searchsorted"),
    "sort": ("aten.sort", "aten.topk", "aten.argsort", "aten.kthvalue", "aten.median", "aten.unique_consecutive"),
    "fourier transform": ("aten._fft_r2c", "aten._fft_c2c", "aten._fft_c2r"),
    "grid sample": ("aten.grid_sampler_2d", "aten.grid_sampler_3d"),
    "grid sample backward": ("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward"),
    "pooling": ("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices"),
    "channels-last pooling": (f"aten.max_pool2d_with_indices{CHANNELS_LAST}",),
    **_IN_FORMATS,
    **{f"channels-last {kind}": tuple(f"{name}{CHANNELS_LAST}" for name in names) for kind, names in _IN_FORMATS.items()},
    "update": ("aten._fused_adamw_", "aten._fused_sgd_"),
    "compiled": ("compiled",),
    **{kind: (kind,) for kind in COMPILED_ARITHMETIC},
    "batch norm": BATCH_NORMS,
    "channels-last batch norm": tuple(f"{name}{CHANNELS_LAST}" for name in BATCH_NORMS),
    "nothing": ("aten.nll_loss_forward", "aten.empty_strided", "aten.empty", "aten.empty_like", "aten.new_empty",
        "aten.new_empty_strided", "aten.empty_permuted",
        "c10d.allreduce_", "c10d.send", "c10d.recv_", "c10d._allgather_base_",
        "c10d._reduce_scatter_base_", "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor",
        "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"),  # collectives are counted as messages
}  # fmt: skip
KIND = {name: kind for kind, names in _KINDS.items() for name in names}


def kind_of(operation: Operation) -> str:
    """Return the kind of an operation. One that is not listed is a product if its FLOPs are known, as those of
    a user's own operation with a formula are, else it is elementwise."""
    name, between, _ = operation.name.partition(BETWEEN_FORMATS)
    if between:
        return f"{'copy' if KIND.get(name) in ('copy', 'cast') else 'elementwise'}{BETWEEN_FORMATS}"
    return KIND.get(operation.name) or (PRODUCT if operation.flops.at(1) else "elementwise")


# namespaces of operations that compute little for each byte, if no other kind is listed for them
_OF_TORCH = (
    "aten",
    "prims",
    "prim",
    "tightfit",
    "c10d",
    "_c10d_functional",
    "torchvision",
    "torchao",
    "inductor",
    "rngprims",
)


def is_of_unknown_arithmetic(operation: Operation) -> bool:
    """Return whether an operation is one of the user's own, or of a library, for whose FLOPs there is no formula."""
    namespace, dot, _ = operation.name.partition(".")
    return bool(dot) and namespace not in _OF_TORCH and operation.name not in KIND and not operation.flops.at(1)
