"""Rates of operations: the sizes that one calibration measures, and where it stops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.calibration import convolutions, operation_rates
from tightfit.calibration.cases import BYTES, sizes_in_bytes
from tightfit.calibration.clock_drift import ClockDrift


def test_measurements_that_would_take_too_long_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without instructions runs at 1 MFLOP/s, so the largest case would take ten seconds."""
    amounts = {64: 1e4, 128: 1e5, 256: 2e5, 512: 1e6, 1024: 1e7}
    run: list[int] = []

    def timed(work: object, device: torch.device, **named: object) -> float:
        assert callable(work)
        work()
        return amounts[run[-1]] / 1e6

    monkeypatch.setattr(operation_rates, "timed", timed)
    cases = ((size, amount, lambda size=size: run.append(size)) for size, amount in amounts.items())
    found = operation_rates._table(cases, torch.device("cpu"))  # type: ignore[arg-type]
    assert run == [64, 128, 256]
    assert found == dict.fromkeys(run, pytest.approx(1e6))


def test_every_size_is_measured_on_a_fast_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_rates, "timed", lambda work, device, **named: 1e-3)
    cases = ((size, float(size), lambda: None) for size in (1, 10, 100))
    assert operation_rates._table(cases, torch.device("cpu")) == {1: 1e3, 10: 1e4, 100: 1e5}


def test_a_case_too_large_for_the_gpu_ends_the_rate_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_rates, "timed", lambda work, device, **named: 1e-3)

    def cases() -> Iterator[operation_rates.Case]:
        yield 1, 1.0, lambda: None
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert operation_rates._table(cases(), torch.device("cpu")) == {1: 1e3}


def sizes(kind: str, dtype: torch.dtype, device: str) -> dict[int, float]:
    """Amount of work by size of the cases of a kind, on tensors without values."""
    with FakeTensorMode():
        found = {}
        for size, amount, work in operation_rates._KINDS[kind](dtype, torch.device(device)):
            work()
            found[size] = amount
    return found


@pytest.mark.parametrize("kind", ["attention", "attention backward"])
def test_causal_attention_is_rated_by_its_computed_pairs(kind: str) -> None:
    full, causal = sizes(kind, torch.float32, "cpu"), sizes(f"causal {kind}", torch.float32, "cpu")
    assert full.keys() == causal.keys()
    for (size, all_pairs), length in zip(full.items(), operation_rates.LENGTHS, strict=True):
        assert size == round((length * length * 64) ** (1 / 3))
        assert causal[size] / all_pairs == pytest.approx((length + 1) / (2 * length))


def test_a_cpu_is_measured_at_the_small_sizes() -> None:
    """A GPU is also measured at the sizes of models with billions of parameters."""
    processor, gpu = torch.device("cpu"), torch.device("cuda")
    assert list(sizes("product", torch.float32, "cpu")) == [
        round((4 * size**3) ** (1 / 3)) for size in operation_rates.PRODUCT_SIZES
    ]
    assert sizes_in_bytes(processor) == BYTES
    channels = tuple(size for size, *_ in convolutions.calibration_shapes("", processor))
    assert channels == convolutions.CHANNELS
    assert max(sizes_in_bytes(gpu)) > 2 * 126 * 2**20  # of the largest second-level cache, B200's
    assert operation_rates._lengths(gpu)[-1] == 8192
    assert {operation_rates._heads(length, gpu)[0] * length for length in operation_rates.GPU_LENGTHS} == {
        operation_rates.GPU_TOKENS
    }
    products = [rows * depth * columns for rows, depth, columns in operation_rates.LARGE_PRODUCTS]
    assert products == sorted(products)
    assert products[0] > 4 * operation_rates.PRODUCT_SIZES[-1] ** 3


def test_convolutions_in_fp32_are_measured_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in fp32 trains without it, although it is torch's default for convolutions."""
    seen: list[bool] = []

    def cases(dtype: torch.dtype, device: torch.device) -> Iterator[operation_rates.Case]:
        yield 1, 1.0, lambda: seen.append(torch.backends.cudnn.allow_tf32)

    monkeypatch.setattr(operation_rates, "_KINDS", {"convolution": cases})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    device = torch.device("cpu")
    operation_rates.measure_rates(device, ClockDrift(device, watched=False), lambda line: None, quick=True)
    assert set(seen) == {False}
    assert torch.backends.cudnn.allow_tf32


def test_products_on_a_gpu_are_rated_at_its_power_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, float] = {}

    def table(cases: Iterator[operation_rates.Case], device: torch.device, **how: object) -> dict[int, float]:
        at_first, settled = [1.0] * 3, [2.0] * 4  # seconds of a run, before and after the clock is lowered
        asked.update({name: (how["least_s"], how.get("pick", min)(at_first + settled)) for name in kinds})  # type: ignore[operator]
        kinds.clear()
        return {}

    kinds: list[str] = []
    monkeypatch.setattr(operation_rates, "_table", table)
    monkeypatch.setattr(operation_rates, "DTYPES", {"bfloat16": torch.bfloat16})
    pace = ClockDrift(torch.device("cpu"))
    monkeypatch.setattr(pace, "control_around_s", lambda: 1.0)
    operation_rates._rates_of_kinds(
        torch.device("cuda"), pace, lambda line: kinds.append(line.removesuffix(" in bfloat16")), quick=False
    )
    sustained = (operation_rates.SUSTAINED_S, 2.0)
    for kind in ("product", "batched product", "attention", "causal attention backward"):
        assert asked[kind] == sustained, kind
    assert asked["elementwise"] == (operation_rates.LEAST_S, 1.0)
    assert {kind for kind, how in asked.items() if how == sustained} == set(operation_rates._LIMITED_BY_POWER)


def test_a_disturbed_round_does_not_count() -> None:
    assert operation_rates._mean_of_undisturbed([4.0, 0.1]) == 4.0
    assert operation_rates._mean_of_undisturbed([2.0, 3.0]) == pytest.approx(2.4)
    assert operation_rates._mean_of_undisturbed([2.0]) == 2.0
