"""How the shape of a matrix product or of attention changes the rate that a GPU achieves.

The device table and a calibration give a rate for large square products and for attention with
heads of width 128. This module says which fraction of it another shape reaches, from how the
kernels divide the work and from published measurements of them. It imports neither torch nor the
device table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

# A matrix product of cuBLAS divides its result into tiles. Each processor computes one tile at a
# time. (rows, columns) of a tile -> the rate within the tile, as a fraction of the largest tile's:
# a tile of r x c loads (r + c) numbers for r * c multiplications, so a small tile waits for memory.
# The fractions are assumptions of about the size that NVIDIA's "Matrix Multiplication Background"
# describes. They agree with the 4,900 products that EleutherAI measured on an A100
# (EleutherAI/cookbook, sizing/results); tests/machines/test_shapes.py has some of them.
TILES = {(256, 128): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 64): 0.55}
# A tile's start and its write of the result take as long as this many steps along the depth. Those
# of batched products, from the cookbook's products of queries and keys
TILE_START, TILE_START_BATCHED = 96, 200
SPLITS = (1, 2, 4, 8, 16)  # into how many parts a kernel may split the depth of a product
LARGE = 8192  # width of the square product for which the device table gives a rate
MAX_SHARE = 1.02  # no shape is faster than this multiple of the large square product
ALIGNMENT = 16  # bytes: tensor cores are fastest if the rows of all matrices begin at multiples of this
IN_TENSOR_CORES = ("bfloat16", "float16", "tf32", "float8")
# Rate of products whose rows are not aligned, as a fraction of that of aligned products. By
# architecture: (rows begin at multiples of 4 or 8 bytes, of 1 or 2 bytes). V100 and A100: the
# cookbook's products of about 50,000 columns. H100: the head of GPT-2 with 50,257 classes
# (records/gpu.json) gave the second figure. A processor of an A100 does 2,048 FLOPs in a clock cycle,
# one of an H100 4,096 and one of a V100 1,024: all three measurements agree with kernels that load so
# many numbers in a cycle, and reach 1,170 or 570 FLOPs, however fast the tensor cores are. The second
# figure of a V100, and both of other devices with its 1,024 FLOPs, follow from that; GeForce cards,
# with 512 FLOPs, lose less. The first figure of an H100 is assumed. Newer data centre devices are
# assumed to be like it
_UNALIGNED_OF_1024 = (0.95, 0.56)
UNALIGNED = {
    **dict.fromkeys(("sm_70", "sm_72", "sm_75", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121"), _UNALIGNED_OF_1024),
    "sm_80": (0.57, 0.28),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), (0.33, 0.16)),
}


def unaligned_share(alignment: int, architecture: str) -> float:
    """Return the rate of a product whose rows begin at multiples of `alignment` bytes, as a fraction
    of that of aligned products.

    architecture  such as sm_90. Without one that is known, nothing is lost
    """
    if alignment >= ALIGNMENT or architecture not in UNALIGNED:
        return 1.0
    even, odd = UNALIGNED[architecture]
    return even if alignment >= 4 else odd


@lru_cache(maxsize=65536)
def product_share(batches: float, rows: float, columns: float, depth: float, processors: int) -> float:
    """Return the rate of `batches` matrix products (rows, depth) x (depth, columns) on a GPU, as a
    fraction of the rate of one product of 8192 x 8192 x 8192.

    processors  number of the GPU's streaming multiprocessors

    A product is slower if its tiles do not fill the processors (wave quantization) or exceed the
    result (tile quantization), or if its depth is small, so that the start of each tile counts.

    Example: (1024, 1024) x (1024, 1024) on 132 processors has 32 tiles of 256 x 128, which keep 32
    processors busy. Its 128 tiles of 128 x 64 keep 128 processors busy at 0.75 of the rate.

    Source of the method: NVIDIA, "Matrix Multiplication Background User's Guide", sections 3 to 5.
    """
    return _fastest(1.0, LARGE, LARGE, LARGE, processors) / _fastest(batches, rows, columns, depth, processors)


def _fastest(batches: float, rows: float, columns: float, depth: float, processors: int) -> float:
    """Return the time of a batch of products per multiplication, in units of the time that all
    processors together need for one multiplication in the largest tile. It is 1 at best."""
    times = []
    one_start = TILE_START if batches == 1 else TILE_START_BATCHED
    for (height, width), speed in TILES.items():
        for high, wide in {(height, width), (width, height)}:
            tiles = batches * math.ceil(rows / high) * math.ceil(columns / wide)
            for parts in SPLITS:
                steps = depth / parts
                if parts > 1 and steps < LARGE / SPLITS[-1]:
                    break
                waves = math.ceil(tiles * parts / processors)
                # the parts of a split product are added: each tile is written and read once more
                start = one_start * (1 if parts == 1 else 2)
                times.append(waves * processors * high * wide * (steps + start) / speed)
    return min(times) / (batches * rows * columns * depth)


# Bandwidth of cuDNN's transposes between the two layouts of an image, as a fraction of that of other
# operations: in 32 bits, in 16 bits. In the convolutions that were measured on an H100
# (records/gpu.json), these transposes are the difference between the layouts, within 30 %
TRANSPOSES = (1.0, 0.7)


def convolution_products(
    sizes: tuple[float, float, float, float, float], gradients: int
) -> list[tuple[float, float, float]]:
    """Return the matrix products (rows, columns, depth) that cuDNN computes for a convolution, as
    implicit products: it reads each pixel under the kernel in its place, and copies none.

    sizes      (groups, positions, channels, depth, window): pixels of the output of all samples, output
               and input channels of a group, pixels of the kernel
    gradients  0 for a forward; for a backward 1 if only the weight has a gradient, 2 if the image has
               one, too

    The products of all groups are side by side: they have as many tiles as one with more rows.

    Source: NVIDIA, "Convolutional Layers User's Guide": implicit GEMM, and its table of the dimensions
    of equivalent products in forward and backward.
    """
    groups, positions, channels, depth, window = sizes
    if not gradients:
        return [(groups * positions, channels, depth * window)]
    of_weight, of_image = (groups * channels, depth * window, positions), (groups * positions, depth, channels * window)
    return [of_weight, of_image][:gradients]


def transposed_bytes(bytes_accessed: float, gradients: int) -> float:
    """Return the bytes that cuDNN accesses to transpose the images of a convolution whose channels are
    not side by side (NCHW). Its kernels for tensor cores need images of the other layout (NHWC), so it
    transposes what each of them reads, and what it writes.

    bytes_accessed  of the convolution itself: of its input and output, and in a backward, of the
                    gradients of both, almost all of which is images
    gradients       see `convolution_products`

    Example: a forward reads and writes one image each, and transposes both, for twice the bytes. A
    backward reads the image and the output's gradient for the weight's gradient, and reads the
    output's gradient again for that of the image: four transposes, for three images.
    """
    return 2 * bytes_accessed * (4 / 3 if gradients == 2 else 1)


# by architecture: bytes of the L2 cache, and its bandwidth as a multiple of that of device memory.
# Sizes: NVIDIA's whitepapers. The bandwidths are
# assumptions of the size of published microbenchmarks: about 5.5 TB/s on an H100, 4 on an A100 and 5
# on an RTX 4090
CACHES = {
    "sm_80": (40e6, 2.2),
    "sm_89": (64e6, 4.0),
    "sm_90": (50e6, 1.7),
    "sm_100": (126e6, 1.5),
    "sm_103": (126e6, 1.5),
    "sm_120": (96e6, 3.0),
}


def cache_speedup(architecture: str, bytes_accessed: float) -> float:
    """Return the factor by which the L2 cache makes an operation faster that accesses
    `bytes_accessed` bytes, of which the operation before it has just written or read some.

    An operation that accesses at most half of the cache's size finds its inputs there. One that
    accesses twice the size finds nothing. Between them, the factor falls with the logarithm.

    architecture  such as sm_90
    """
    size, ratio = CACHES.get(architecture, (0.0, 1.0))
    if bytes_accessed >= 2 * size:
        return 1.0
    share = min(math.log(2 * size / max(bytes_accessed, 1.0)) / math.log(4), 1.0)
    return float(ratio**share)


@dataclass(frozen=True)
class AttentionKernel:
    """Published rates of a fused attention kernel on one architecture.

    products           rate of large matrix products on the measured device, as a fraction of its
                       published peak
    forward, backward  width of a head -> FLOP/s of long sequences without a mask, as a fraction of
                       the published peak. Heads are computed at the next width of this table
    start_forward, start_backward  a query tile's start takes as long as this many tiles of 128 keys
    causal             with a causal mask: rate for the pairs that are not masked, as a fraction of
                       the rate without a mask, for long sequences
    diagonal           tiles of keys that a query tile computes beyond its visible pairs under a
                       causal mask: half of its own queries' tiles
    """

    products: float
    forward: Mapping[int, float]
    backward: Mapping[int, float]
    start_forward: float
    start_backward: float
    causal: float
    diagonal: float = 0.5

    def share(self, queries: float, keys: float, width: float, causal: bool, backward: bool) -> float:
        """Return the rate for the pairs that are not masked, as a fraction of the rate of large
        matrix products.

        queries, keys  lengths of the sequences
        width          of a head

        A causal mask hides half of the pairs, but a kernel computes whole tiles on the diagonal.

        Example: 512 queries and keys are 4 tiles of 128. With a start of 0.6 tiles, a forward
        reaches 4 / 4.6 of its rate for long sequences. With a causal mask, a query tile computes
        2.5 tiles of keys for pairs that fill 2 tiles: it reaches 2 / 3.1.
        """
        by_width = self.backward if backward else self.forward
        known = next((known for known in sorted(by_width) if known >= width), None)
        # heads wider than the kernel's widest take several passes
        rate = by_width[max(by_width)] / 2 if known is None else by_width[known] * width / known
        rate /= self.products
        tiles = max(keys / KEY_TILE, 1 / KEY_TILE)
        start = self.start_backward if backward else self.start_forward
        if not causal:
            return rate * tiles / (max(tiles, 1.0) + start)
        visible = tiles / 2 if queries >= keys else tiles - queries / keys * tiles / 2
        return rate * self.causal * visible / (max(visible + self.diagonal, 1.0) + start)


KEY_TILE = 128  # keys of one tile of a fused kernel
# Rates as fractions of the published dense peak. Shah et al. 2024 (arXiv:2407.08608, figures 5 and
# 6) measured FlashAttention-2 and cuDNN on an H100 (989 TFLOP/s), for widths 64, 128 and 256 and
# lengths 512 to 16,384, without and with a causal mask. The starts and the causal fraction are
# those that reproduce its lengths within 13 %, most within 6 %. The charts have no widths but these
# three and no backward of width 256: all other entries are assumptions between them.
_FLASH_2_SM90 = AttentionKernel(
    products=0.8,
    forward={32: 0.27, 64: 0.328, 96: 0.35, 128: 0.375, 192: 0.35, 256: 0.33},
    backward={32: 0.25, 64: 0.30, 96: 0.31, 128: 0.332, 192: 0.30, 256: 0.28},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
_CUDNN_SM90 = AttentionKernel(
    products=0.8,
    forward={64: 0.42, 128: 0.615, 256: 0.59},
    backward={64: 0.447, 128: 0.536, 256: 0.48},
    start_forward=0.9,
    start_backward=2.5,
    causal=0.92,
)
# A100 (312 TFLOP/s): between the best of Dao 2023 (arXiv:2307.08691: 73 % of the peak forward, 63 %
# backward) and runs at the power limit (175 and 187 TFLOP/s forward for widths 64 and 128,
# pytorch/pytorch pull request 126122). Which point between them, and other widths, is assumed.
_FLASH_2_SM80 = AttentionKernel(
    products=0.827,
    forward={32: 0.50, 64: 0.585, 96: 0.62, 128: 0.66, 192: 0.62, 256: 0.60},
    backward={32: 0.44, 64: 0.52, 96: 0.54, 128: 0.575, 192: 0.50, 256: 0.47},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.95,
)
# RTX A5000 (111 TFLOP/s; gpu-mode/ring-attention issue 10): 82 TFLOP/s forward, and 53, 63, 70, 75
# and 77 backward for 512 to 8,192 keys, width 64
_FLASH_2_SM86 = AttentionKernel(
    products=0.8,
    forward={32: 0.70, 64: 0.75, 128: 0.75, 256: 0.70},
    backward={32: 0.64, 64: 0.71, 128: 0.71, 256: 0.60},
    start_forward=0.1,
    start_backward=2.0,
    causal=0.93,
)
# RTX 4090 (165 TFLOP/s; apache/tvm, tl_doc/flash_perf.md) at 2,048 keys: forward 169 without and
# 142 to 151 with a causal mask, backward 125 and 97; products
# reach 165. Lengths are assumed to matter as on an H100
_FLASH_2_SM89 = AttentionKernel(
    products=1.0,
    forward={32: 0.96, 64: 1.0, 128: 1.0, 256: 0.92},
    backward={32: 0.79, 64: 0.85, 128: 0.85, 256: 0.70},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
# B200 (2,250 TFLOP/s): cuDNN at the power limit, by SimuMax (b200_bf16_ceperm.json): with a causal mask and
# width 128, forward 981 and 1,311 TFLOP/s at 4,096 and 32,768 keys, backward 820 and 981. One call alone
# reaches 1,428 without a mask (Dao-AILab/flash-attention pull request 2605, whose other lengths and
# width 64 give the starts and the ratio of widths). FlashAttention-2 by its issue 1589, width 64; width
# 128 is assumed
_CUDNN_SM100 = AttentionKernel(
    products=0.49,
    forward={64: 0.40, 128: 0.57, 256: 0.46},
    backward={64: 0.355, 128: 0.47, 256: 0.355},
    start_forward=1.4,
    start_backward=2.5,
    causal=0.97,
    diagonal=1.5,
)
_FLASH_2_SM100 = AttentionKernel(
    products=0.49,
    forward={64: 0.17, 128: 0.20, 256: 0.17},
    backward={64: 0.15, 128: 0.165, 256: 0.14},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
# RTX 5090 (209.5 TFLOP/s): 187 TFLOP/s forward by FlashAttention-2 in torch, at 8,192 keys. The rest is
# assumed
_FLASH_2_SM120 = AttentionKernel(
    products=1.13,
    forward={64: 0.88, 128: 0.91, 256: 0.80},
    backward={64: 0.68, 128: 0.70, 256: 0.60},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
# The memory-efficient kernel (xFormers), which torch takes for heads wider than 256, for masks, and
# on Volta and Turing. An assumption: somewhat slower than FlashAttention 1
_EFFICIENT = AttentionKernel(
    products=0.827,
    forward={64: 0.33, 128: 0.35, 256: 0.28, 512: 0.20},
    backward={64: 0.22, 128: 0.24, 256: 0.18, 512: 0.12},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
# FlashAttention 1 on an A100: 30 to 50 % of the peak forward, 25 to 35 % backward (Dao 2023,
# sections 1 and 4)
_FLASH_1 = AttentionKernel(
    products=0.827,
    forward={32: 0.30, 64: 0.36, 128: 0.40},
    backward={32: 0.24, 64: 0.29, 128: 0.30},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)

# any other device: an assumption
_UNKNOWN = AttentionKernel(
    products=1.0,
    forward={64: 0.6, 128: 0.6, 256: 0.6},
    backward={64: 0.5, 128: 0.5, 256: 0.5},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)
# FlashAttention 1 on an H100, by the same ratio to FlashAttention-2 as on an A100: an assumption
_FLASH_1_SM90 = AttentionKernel(
    products=0.80,
    forward={32: 0.16, 64: 0.20, 128: 0.22},
    backward={32: 0.14, 64: 0.165, 128: 0.17},
    start_forward=0.7,
    start_backward=2.0,
    causal=0.93,
)

FLASH_1, FLASH_2, CUDNN, EFFICIENT = "flash-1", "flash-2", "cudnn", "efficient"
KERNELS = {
    "sm_80": {FLASH_1: _FLASH_1, FLASH_2: _FLASH_2_SM80},
    "sm_86": {FLASH_2: _FLASH_2_SM86},
    "sm_87": {FLASH_2: _FLASH_2_SM86},
    "sm_89": {FLASH_2: _FLASH_2_SM89},
    "sm_90": {CUDNN: _CUDNN_SM90, FLASH_1: _FLASH_1_SM90, FLASH_2: _FLASH_2_SM90},
    "sm_100": {CUDNN: _CUDNN_SM100, FLASH_2: _FLASH_2_SM100},
    "sm_103": {CUDNN: _CUDNN_SM100, FLASH_2: _FLASH_2_SM100},
    "sm_120": {FLASH_2: _FLASH_2_SM120},
}
# torch >= 2.11 prefers cuDNN's kernel on these (ATen/native/transformers/cuda/sdp_utils.cpp)
PREFERS_CUDNN = ("sm_90", "sm_100", "sm_103")
WIDEST = {FLASH_2: 256, FLASH_1: 128, CUDNN: 256}  # head


def kernel_of(architecture: str, dtype: str, width: float, wanted: str = "", flash: bool = True) -> AttentionKernel:
    """Return the attention kernel that torch chooses.

    architecture  such as sm_90; empty for a device that is no GPU
    dtype         torch's name, such as bfloat16
    width         of a head
    wanted        a kernel that is taken where it exists, such as flash-2; empty for torch's choice
    flash         whether FlashAttention can compute it: it knows no masks but the causal one, and its
                  values are as wide as its keys
    """
    if not architecture.startswith("sm_"):
        return _UNKNOWN
    known = KERNELS.get(architecture, {})
    if dtype in ("bfloat16", "float16"):
        for name in (wanted or (CUDNN if architecture in PREFERS_CUDNN else FLASH_2), FLASH_2):
            if name in known and width <= WIDEST[name] and (flash or name == CUDNN):
                return known[name]
    return _EFFICIENT
