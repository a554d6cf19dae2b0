"""The ladder: its rungs follow from the methods, and each says what it does beside the plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

import tightfit
from tests import tiny
from tests.planner import cases
from tests.report.test_run_folder import command
from tightfit.machine import Machine
from tightfit.measure import rung
from tightfit.methods import METHODS, microbatch, optimizer_states, precision, recompute
from tightfit.planner import ladder
from tightfit.planner.estimator import Estimator
from tightfit.runtime.method import name_of

L4 = Machine.named("l4")
FEW = (microbatch, recompute, precision, optimizer_states)


@pytest.fixture
def few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods whose traces are quick."""
    monkeypatch.setattr(ladder, "METHODS", FEW)


@pytest.mark.parametrize(
    ("time_ratio", "memory_ratio", "word"),
    [
        (0.5, 1.0, "faster"),
        (1.3, 0.7, "smaller"),
        (0.9, 0.9, "both"),
        (1.0, 1.0, "neither"),
        (0.998, 0.999, "neither"),
        (1.2, 1.1, "neither"),
    ],
)
def test_a_change_has_a_word(time_ratio: float, memory_ratio: float, word: str) -> None:
    assert ladder.verdict(time_ratio, memory_ratio) == word


@pytest.mark.slow
@pytest.mark.usefixtures("few_methods")
def test_rungs_add_up_in_the_order_of_guides() -> None:
    found = ladder.climb(cases.job("llama", batch=1024), L4)
    plain, *rungs = found.rungs
    assert plain.option is None
    assert plain.estimate.plan == tightfit.Plan()
    assert (plain.memory_ratio, plain.time_ratio) == (1.0, 1.0)
    assert len(rungs) >= 3
    fields = {}
    for one in rungs:
        assert one.option is not None
        fields |= one.option.fields
        assert one.estimate.plan == tightfit.Plan(**fields)
        assert one.memory_ratio == pytest.approx(
            ladder.training_bytes(one.estimate) / ladder.training_bytes(plain.estimate)
        )
    places = [ladder.ORDER.index(one.option.field) for one in rungs if one.option is not None]
    assert places == sorted(places)
    assert min(one.memory_ratio for one in rungs) < 0.9
    for one in found.alone:
        assert one.option is not None
        assert one.estimate.plan == tightfit.Plan(**one.option.fields)
        assert one.verdict == ladder.verdict(one.time_ratio, one.memory_ratio)
    assert {one.option.field for one in found.alone if one.option} >= {
        "micro_batch",
        "precision",
        "recompute",
        "states",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("few_methods")
def test_what_the_job_does_not_allow_has_no_rung() -> None:
    found = ladder.climb(cases.job("llama").replace(allow=[]), L4)
    for one in (*found.rungs, *found.alone):
        assert one.estimate.plan.precision == "fp32"
        assert one.estimate.plan.states == "fp32"
    left_out = dict(found.left_out)
    assert "does not allow" in left_out["precision (precision)"]
    assert "does not allow" in left_out["optimizer_states (states)"]


def test_a_new_method_has_its_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    new = ModuleType("tightfit.methods.brand_new", "A method that nobody knows yet.")
    new.__dict__.update(FIELDS=("recompute",), VARIANTS=({"recompute": "full"}, {"recompute": "full", "tp": 2}))
    monkeypatch.setattr(ladder, "METHODS", (new,))
    found = ladder.climb(cases.job("llama"), L4)
    assert [str(one.option) for one in found.alone] == ["recompute=full"]
    assert found.alone[0].option is not None
    assert found.alone[0].option.method == "brand_new"


@pytest.mark.parametrize("machine", [L4, Machine.detect()], ids=["gpu", "cpu"])
def test_every_method_of_one_device_is_an_option(machine: Machine) -> None:
    job = cases.job("llama").replace(allow=[*cases.ALLOW, "offload", "float8"])
    groups = list(ladder.options_of(Estimator(job, machine)))
    options = [option for group in groups for option in group]
    assert all(tightfit.Plan(**option.fields).devices == 1 for option in options)
    expected = {
        name_of(method) for method in METHODS if any(tightfit.Plan(**fields).devices == 1 for fields in method.VARIANTS)
    }
    assert {option.method for option in options} == expected
    assert all(len({option.field for option in group}) == 1 for group in groups)
    chunks = {option.fields["chunked_loss"] for option in options if "chunked_loss" in option.fields}
    assert min(chunks) > 100  # not the number of the tests' variant
    places = {option.fields.get("offload_to", "host") for option in options if "offload" in option.fields}
    assert places == {"host" if machine.device == "cuda" else "disk"}


@pytest.mark.usefixtures("few_methods")
@pytest.mark.slow
def test_the_command_prints_tables_json_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    picture = tmp_path / "ladder.svg"
    job = str(tiny.write(tmp_path))
    assert command(monkeypatch, "ladder", job, "--machine", "l4:8", "--picture", str(picture)) == 0
    shown = capsys.readouterr().out
    for words in ("plain loop", "each method alone", "verdict", "left out", "of one device", "its process holds"):
        assert words in shown
    assert "<svg" in picture.read_text()
    assert command(monkeypatch, "ladder", job, "--machine", "l4", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rungs"][0]["method"] == "plain loop"
    assert told["rungs"][0]["memory_ratio"] == 1.0
    assert told["alone"]
    assert all(one["verdict"] in ("faster", "smaller", "both", "neither") for one in told["alone"])
    assert "measured" not in told["rungs"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--run", "--machine", "l4"), "leave out --run or --machine"),
        (("--picture", "ladder.gif"), "ladder.svg"),
        (("--machine", "l44"), "did you mean"),
        (("--set", "train.batch=none"), "batch: 'none' is not allowed"),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "ladder", str(tiny.write(tmp_path)), *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_measured_rungs_train_on_the_same_samples() -> None:
    machine = Machine.detect().per_process(1)
    job = tightfit.Job.parse({**tiny.content(), "model": {**tiny.MODEL, "attention_dropout": 0.0}})
    plain, smaller = tightfit.Plan(), tightfit.Plan(micro_batch=2)
    one, other = (rung.measure_rung(job, plan, machine, steps=2) for plan in (plain, smaller))
    for found in (one, other):
        assert not found.failed
        assert found.step_s is not None
        assert found.step_s > 0
        assert found.process_bytes is not None
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.tensor_bytes is not None
    assert other.tensor_bytes is not None
    assert other.tensor_bytes < one.tensor_bytes


@pytest.mark.slow
def test_a_rung_that_fails_says_why() -> None:
    machine = Machine.detect().per_process(1)
    found = rung.measure_rung(tiny.job(), tightfit.Plan(dp_shard=2, zero=2), machine, steps=2)
    assert found.step_s is None
    assert found.failed
