"""The rates of GPU kernels by shape follow published measurements of these kernels."""

from __future__ import annotations

import pytest

from tightfit.achieved_rates import achieved, achieved_by_shape, memory_bandwidth
from tightfit.machine import Machine
from tightfit.machines.shapes import product_share

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s on an H100, Shah et al. 2024, figures 5 and 6: (kernel, kind, width, causal) -> by length
H100 = {
    ("flash-2", "attention", 64, False): (282, 306, 318, 321, 322, 324),
    ("flash-2", "attention", 64, True): (180, 229, 262, 284, 295, 299),
    ("flash-2", "attention", 128, False): (309, 350, 362, 368, 370, 370),
    ("flash-2", "attention", 128, True): (191, 260, 298, 319, 333, 335),
    ("flash-2", "attention", 256, False): (275, 313, 321, 323, 324, 326),
    ("flash-2", "attention", 256, True): (208, 251, 278, 293, 297, 298),
    ("flash-2", "attention backward", 64, False): (198, 238, 264, 279, 287, 291),
    ("flash-2", "attention backward", 128, False): (214, 260, 291, 310, 318, 322),
    ("cudnn", "attention", 64, False): (335, 373, 395, 408, 412, 413),
    ("cudnn", "attention", 64, True): (225, 288, 334, 363, 379, 388),
    ("cudnn", "attention", 128, False): (497, 574, 617, 609, 600, 595),
    ("cudnn", "attention", 128, True): (315, 410, 484, 518, 529, 539),
    ("cudnn", "attention", 256, True): (308, 391, 450, 483, 497, 509),
    ("cudnn", "attention backward", 64, False): (266, 348, 395, 417, 432, 433),
    ("cudnn", "attention backward", 128, False): (305, 408, 465, 499, 518, 516),
}
# (machine, kind, width, causal, length) -> TFLOP/s
OTHERS = {
    ("rtx-4090", "attention", 64, False, 2048): 169,
    ("rtx-4090", "attention", 64, True, 2048): 142,
    ("rtx-4090", "attention backward", 64, False, 2048): 125,
    ("rtx-4090", "attention backward", 64, True, 2048): 97,
    ("b200", "attention", 128, True, 4096): 981,
    ("b200", "attention", 128, True, 32768): 1311,
    ("b200", "attention backward", 128, True, 4096): 820,
    ("b200", "attention backward", 128, True, 32768): 981,
    ("rtx-5090", "attention", 128, False, 8192): 187,
    ("a100-80gb", "attention", 64, False, 4096): 175,
    ("a100-80gb", "attention", 128, False, 4096): 200,
}


def attention_rate(machine: Machine, kind: str, width: int, causal: bool, length: int) -> float:
    return achieved_by_shape(machine, kind, "bfloat16", (64.0, length, length, width), causal) / 1e12


@pytest.mark.parametrize(("kernel", "kind", "width", "causal"), H100)
def test_attention_on_an_h100_follows_its_paper(kernel: str, kind: str, width: int, causal: bool) -> None:
    machine = Machine.named("h100-sxm").replace(attention_kernel=kernel)
    found = [attention_rate(machine, kind, width, causal, length) for length in LENGTHS]
    assert found == pytest.approx(H100[kernel, kind, width, causal], rel=0.13)


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_attention_elsewhere_follows_measurements(case: tuple[str, str, int, bool, int]) -> None:
    name, kind, width, causal, length = case
    assert attention_rate(Machine.named(name), kind, width, causal, length) == pytest.approx(OTHERS[case], rel=0.13)


def test_a_width_between_two_kernels_is_padded() -> None:
    machine = Machine.named("a100-80gb")
    wide, narrow = (attention_rate(machine, "attention", width, True, 4096) for width in (128, 112))
    assert narrow == pytest.approx(wide * 112 / 128)
    assert attention_rate(machine, "attention", 450, True, 4096) < 0.5 * wide  # no kernel but the efficient one


def test_torch_chooses_the_kernel_by_architecture_and_dtype() -> None:
    hopper = Machine.named("h100-sxm")
    assert attention_rate(hopper, "attention", 128, True, 4096) == pytest.approx(518, rel=0.1)  # cuDNN
    single = achieved_by_shape(hopper, "attention", "float32", (64.0, 4096, 4096, 128), True)
    assert single < achieved(hopper, "product", "float32", 4096)
    assert achieved_by_shape(hopper.replace(architecture=""), "attention", "bfloat16", (64.0, 512, 512, 64), False) > 0


def test_attention_without_flash_is_slower_unless_cudnn_runs() -> None:
    """A mask, or values that are not as wide as the keys, take another kernel: cuDNN's where torch prefers it."""
    for name, slower in (("a100-80gb", True), ("h100-sxm", False)):
        machine, sizes = Machine.named(name), (64.0, 4096.0, 4096.0, 128.0)
        fast, other = (
            achieved_by_shape(machine, "attention", "bfloat16", sizes, True, flash=flash) for flash in (True, False)
        )
        assert (other < 0.8 * fast) == slower


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((1, 8192, 8192, 8192), 1.0),
        ((1, 16384, 14336, 4096), 0.97),
        ((1, 4096, 4096, 16384), 0.97),  # a weight's gradient
        ((1, 1024, 1024, 1024), 0.65),
        ((1, 128, 128, 128), 0.01),
    ],
)
def test_products_by_shape(shape: tuple[int, int, int, int], share: float) -> None:
    assert product_share(*shape, processors=132) == pytest.approx(share, abs=0.12)


# TFLOP/s in fp16 on an A100 with 40 GB (EleutherAI/cookbook, sizing/results): (batches, rows, columns, depth), alignment
A100 = {
    ((1, 8192, 51136, 14336), 16): 255,
    ((1, 8192, 51138, 14336), 4): 137,
    ((1, 8192, 51137, 14336), 2): 76,
    ((1, 8192, 51200, 14282), 4): 173,
    ((1, 8192, 51200, 14281), 2): 72,
    ((1, 2304, 4096, 2048), 16): 210,
    ((1, 2304, 4096, 3072), 16): 235,
    ((512, 2048, 2048, 128), 16): 113,  # queries x keys
    ((512, 2048, 2048, 150), 4): 81,
    ((512, 2048, 2048, 152), 16): 107,
    ((512, 2048, 2048, 99), 2): 31,
    ((512, 2048, 192, 2048), 16): 178,  # probabilities x values
    ((512, 2048, 150, 2048), 4): 99,
}


@pytest.mark.parametrize("case", A100, ids=str)
def test_products_on_an_a100_follow_measurements(case: tuple[tuple[int, int, int, int], int]) -> None:
    """Within 30 %: cuBLAS chooses among kernels, and shapes that hardly differ may get others."""
    (batches, *shape), alignment = case
    machine = Machine.named("a100-40gb")
    sizes = (float(batches), *map(float, shape))
    rate = achieved_by_shape(machine, "batched product", "float16", sizes, False, alignment) / 1e12
    assert rate == pytest.approx(A100[case], rel=0.3)


def test_unaligned_rows_slow_only_some_kernels() -> None:
    volta, other = Machine.named("v100-32gb"), Machine.named("mi300x")
    sizes = (1.0, 8192.0, 50257.0, 4096.0)

    def share(machine: Machine, dtype: str) -> float:
        slow, fast = (achieved_by_shape(machine, "product", dtype, sizes, False, alignment) for alignment in (4, 16))
        return slow / fast

    assert share(volta, "float16") == pytest.approx(0.95)
    assert share(Machine.named("h100-sxm"), "bfloat16") < 0.5
    assert share(Machine.named("h100-sxm"), "float32") == share(other, "bfloat16") == 1


def test_waves_of_tiles() -> None:
    """One tile more than the processors hold takes a second wave."""
    full = product_share(1, 256 * 12, 128 * 11, 8192, processors=132)
    over = product_share(1, 256 * 12, 128 * 11 + 8, 8192, processors=132)
    assert over < full
    assert full > 0.95


def test_measured_rates_are_scaled_by_shape() -> None:
    """A calibration measured heads of width 128: narrower heads are slower, by the kernel's ratio."""
    plain = Machine.named("a100-80gb")
    size = round((4096 * 4096 * 128) ** (1 / 3))
    measured = plain.replace(rates={"causal attention/bfloat16": {size: 1.5e14}, "product/bfloat16": {4096: 2.4e14}})
    assert attention_rate(measured, "attention", 128, True, 4096) == pytest.approx(150, rel=0.02)
    ratio = attention_rate(plain, "attention", 64, True, 4096) / attention_rate(plain, "attention", 128, True, 4096)
    assert attention_rate(measured, "attention", 64, True, 4096) == pytest.approx(150 * ratio, rel=0.05)
    square = achieved_by_shape(measured, "product", "bfloat16", (1.0, 4096, 4096, 4096), False)
    assert square == pytest.approx(2.4e14, rel=0.1)
    narrow = achieved_by_shape(measured, "product", "bfloat16", (1.0, 2.0**15, 2.0**15, 64), False)
    assert narrow < 0.6 * square


def test_few_bytes_come_from_the_cache() -> None:
    machine = Machine.named("rtx-4090")
    large = memory_bandwidth(machine, 1e9)
    assert machine.memory_bytes_per_s is not None
    assert large == machine.memory_bytes_per_s.value
    assert memory_bandwidth(machine, 1e7) == pytest.approx(4 * large)
    assert large < memory_bandwidth(machine, 8e7) < 4 * large
    assert memory_bandwidth(Machine.named("t4"), 1e6) == memory_bandwidth(Machine.named("t4"), 1e9)  # not known


def test_slow_memory_kernels_are_rated_by_their_kind() -> None:
    """An update of AdamW counts 4 of the 7 tensors that it accesses. A calibration replaces the assumed shares."""
    table, size = Machine.named("h100-sxm"), 2.0**29
    copied = achieved(table, "elementwise", "float32", size)
    assert achieved(table, "update", "float32", size) == pytest.approx(0.52 * copied)
    assert achieved(table, "update", "bfloat16", size) == pytest.approx(0.43 * copied)
    assert achieved(table, "cast", "bfloat16", size) == copied
    measured = table.replace(rates={"elementwise/float32": {2**29: 2e12}, "update/float32": {2**29: 1e12}})
    assert achieved(measured, "update", "float32", size) == 1e12
    assert achieved(measured, "cast", "bfloat16", size) == 2e12
