"""The convolutions of a model are timed before its plans are predicted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from tightfit.calibration.convolutions import ModelConvolution
from tightfit.machine import Figure, Machine
from tightfit.planner import model_convolutions
from tightfit.planner.estimator import Estimator
from tightfit.planner.model_convolutions import measure_model
from tightfit.planner.search import search

FIRST, SECOND = "3x16x16 by 8x3x3x3", "8x14x14 by 8x1x5x5, stride 2x2, 8 groups"


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 5, stride=2, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).mean((2, 3))


def job(**fields: object) -> tightfit.Job:
    data = [(torch.zeros(3, 16, 16), 0)] * 8
    return tightfit.Job(model=Images, data=data, train=tightfit.Train(batch=4, steps=1), **fields)  # type: ignore[arg-type]


def calibrated() -> Machine:
    """This machine, with a calibration whose control took 10 ms."""
    return Machine.detect().replace(control_s=Figure(value=0.01, source="measured", detail="of a test"))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys of the rates that were measured, call by call. Each convolution reaches 1 MFLOP/s."""
    calls: list[list[str]] = []

    def measure(machine: Machine, wanted: Iterable[ModelConvolution]) -> tuple[Machine, float]:
        wanted = list(wanted)
        calls.append([one.rate_key for one in wanted])
        rates = {**machine.rates, **{one.rate_key: {one.samples: 1e6} for one in wanted}}
        return machine.replace(rates=rates), 2.0  # so slow that nothing is stored

    monkeypatch.setattr(model_convolutions, "measure_convolutions", measure)
    return calls


def test_each_convolution_is_timed_once_and_then_predicted(timed: list[list[str]]) -> None:
    estimator, plan = Estimator(job(allow=[]), calibrated()), tightfit.Plan()
    before = estimator.estimate(plan)
    measure_model(estimator, plan, plan.model_dump())
    assert set(timed[0]) == {
        f"convolution of {FIRST}/float32",
        f"convolution of {SECOND}/float32",
        f"convolution backward of {FIRST}, of the weight alone/float32",
        f"convolution backward of {SECOND}/float32",
    }
    after = estimator.estimate(plan)
    flops = sum(
        one.flops.at(4) for segment in after.ledger.training for one in segment.timeline.operations if one.convolution
    )
    assert after.time.compute_s == pytest.approx(flops / 1e6)
    assert before.time.compute_s < after.time.compute_s
    assert after.peak == before.peak
    measure_model(estimator, plan, plan.model_dump())
    assert len(timed) == 1


def test_every_precision_and_format_of_a_search_is_timed(timed: list[list[str]]) -> None:
    estimator = Estimator(job(allow=["bf16"]), calibrated())
    measure_model(estimator, tightfit.Plan(), {})
    narrow = ["bfloat16"] if model_convolutions.has_fast_bf16(estimator.machine) else []
    assert {key.rpartition("/")[2] for key in timed[0]} == {"float32", *narrow}
    assert len(timed[0]) == 4 * 2 * (1 + len(narrow))
    assert sum(key.startswith("channels-last") for key in timed[0]) == len(timed[0]) / 2


def test_a_search_times_the_model_first(timed: list[list[str]]) -> None:
    found = search(job(), calibrated(), {"precision": "fp32", "compile": "none"})
    assert len(timed) == 1
    assert f"convolution of {FIRST}/float32" in found[0].machine.rates


def test_only_this_calibrated_cpu_times_convolutions(timed: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(calibrated().to_json())
    for machine in (Machine.detect(), Machine.named("a100-80gb"), Machine.named(str(tmp_path / "other.json"))):
        measure_model(Estimator(job(), machine), tightfit.Plan(), {})
    assert not timed


def test_a_model_without_convolutions_starts_no_measurement(timed: list[list[str]]) -> None:
    plain = tightfit.Job(
        model=lambda: nn.Linear(3, 2), data=[(torch.zeros(3), 0)] * 4, train=tightfit.Train(batch=2, steps=1)
    )
    measure_model(Estimator(plain, calibrated()), tightfit.Plan(), {})
    assert not timed


def test_types_that_no_calibration_measures_are_left_out(timed: list[list[str]]) -> None:
    data = [(torch.zeros(3, 16, 16, dtype=torch.float64), 0)] * 8
    wide = tightfit.Job(model=lambda: Images().double(), data=data, allow=[], train=tightfit.Train(batch=4, steps=1))
    measure_model(Estimator(wide, calibrated()), tightfit.Plan(), {})
    assert not any(timed)
