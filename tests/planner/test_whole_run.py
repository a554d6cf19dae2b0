"""The whole training: its steps, hours, amount of data and cost, in text and in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tightfit
from tests import tiny
from tests.planner import cases
from tests.report.test_run_folder import command
from tightfit.methods.compile import pays_to_compile
from tightfit.planner.estimator import estimate
from tightfit.planner.whole_run import format_cost, whole_run
from tightfit.runtime.run_length import DEFAULT_STEPS, Length, length_of

PREDICTED = {
    "plan": tightfit.Plan(dp_replicate=4).content(),
    "time": {"step_s": 0.5, "compile_s": 40.0},
    "tokens_per_s": 2048.0,
    "samples_per_s": 8.0,
}


def test_hours_tokens_and_cost_cover_all_steps_and_devices() -> None:
    job = tiny.job(steps=7120)
    run = whole_run(job, PREDICTED, length_of(job), price=2.5)
    assert (run.steps, run.seconds, run.hours, run.device_hours) == (7120, 3600.0, 1.0, 4.0)
    assert (run.samples, run.tokens, run.cost) == (4 * 7120, 1024 * 7120, 10.0)
    assert "cost 10.00 at 2.5 per device hour" in str(run)
    assert "4 device hours" in str(run)
    free = whole_run(job, {**PREDICTED, "tokens_per_s": None}, length_of(job))
    assert (free.cost, free.tokens) == (None, None)
    assert "28,480 samples" in str(free)


def test_steps_follow_from_the_data() -> None:
    assert length_of(tiny.job()) == Length(8)
    epochs = length_of(tiny.job(steps=None, epochs=2))  # 50 samples, 5 of them held out, 4 in a step
    assert epochs == Length(23, "2 epochs of 45 samples")
    assert length_of(tiny.job(steps=None)).steps == 12
    mine = [(torch.zeros(3, 16, 16), 0) for _ in range(40)]
    assert length_of(cases.job("convolutions", steps=None).replace(data=mine)).steps == 5


def test_packed_text_is_measured_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 4096)
    text = {"text": str(tmp_path / "a.txt"), "sequence_length": 16, "held_out": 0.0}
    job = tightfit.Job.parse({**tiny.content(steps=None), "data": text})
    assert length_of(job) == Length(80, "1 epoch of about 320 samples")


@pytest.mark.parametrize(
    "data", [{"text": "nowhere.txt"}, {"text": "python-stdlib", "packing": "padded"}, {"parquet": "nowhere.parquet"}]
)
def test_steps_are_assumed_where_the_data_does_not_say(data: dict[str, str]) -> None:
    job = tightfit.Job.parse({**tiny.content(steps=None), "data": data})
    found = length_of(job)
    assert found.steps == DEFAULT_STEPS
    assert "assumed" in found.basis


def test_a_stream_has_no_end() -> None:
    stream = cases.job("convolutions", steps=None).replace(data=iter([(torch.zeros(3, 16, 16), 0)] * 9))
    assert length_of(stream).steps == DEFAULT_STEPS


@pytest.mark.parametrize(("cost", "text"), [(12345.6, "12,346"), (9.876, "9.88"), (0.0123, "0.012")])
def test_costs_have_as_many_digits_as_they_need(cost: float, text: str) -> None:
    assert format_cost(cost) == text


def test_explain_prints_the_whole_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(tiny.write(tmp_path))
    common = ("explain", job, "--machine", "l4", "--plan", "reference", "--price", "2.5")
    assert command(monkeypatch, *common) == 0
    shown = capsys.readouterr().out
    assert "run      8 steps, 512 tokens" in shown
    assert "at 2.5 per device hour" in shown
    assert command(monkeypatch, *common, "--json") == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    seconds = plan["time"]["compile_s"] + 8 * plan["time"]["step_s"]
    assert plan["run"]["seconds"] == pytest.approx(seconds)
    assert plan["run"]["cost"] == pytest.approx(2.5 * seconds / 3600)
    assert plan["run"]["tokens"] == pytest.approx(8 * 4 * 16)
    assert command(monkeypatch, *common, "--json", "--memory", "300MiB") == 3
    assert json.loads(capsys.readouterr().out)["plans"][0]["run"]["cost"] > 0


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_wrong_price_is_refused(
    price: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "explain", str(tiny.write(tmp_path)), "--price", price) == 2
    assert "is not a price" in capsys.readouterr().err


def test_the_steps_of_epochs_count_in_the_ranking() -> None:
    """A run of few epochs does not pay for compiling, and its plans are ranked by its own steps."""
    short = cases.job("llama", steps=None, epochs=1)
    steps = length_of(short).steps
    assert not pays_to_compile(short)
    assert pays_to_compile(short.replace(train=short.train.replace(epochs=1000.0)))
    one = estimate(short, tightfit.Plan(), "a100-80gb")
    assert one.total_s == pytest.approx(one.compile_s + steps * one.time.step_s)
