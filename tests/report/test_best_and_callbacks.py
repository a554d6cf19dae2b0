"""`tightfit train` keeps the best checkpoint, stops early, and calls the job's callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import tightfit
from tests import tiny
from tests.pool import together
from tests.report.test_run_folder import losses, run_train
from tightfit.engine.callbacks import CallbackCalls
from tightfit.errors import InputError
from tightfit.report.run_folder import train_in_folder

HERE = "tests.report.test_best_and_callbacks:"

METRICS = """
import tightfit

RISES = iter([5, 3, 4, 2, 6, 7, 8, 9])

def scripted(outputs, batch):  # once per evaluation: one micro-batch
    return next(RISES)

def label(outputs, batch):
    return batch["labels"].double().mean()

class Log(tightfit.Callback):
    def __init__(self):
        self.steps, self.metrics = [], []

    def on_step(self, result):
        self.steps.append(result.step)

    def on_evaluation(self, metrics):
        self.metrics.append((self.steps[-1], sorted(metrics)))

    def on_end(self, record):
        print("LOG", len(self.steps), self.metrics, len(record.loss), record.stopped_early)

class Stop(tightfit.Callback):
    def on_step(self, result):
        return result.step == 3

class Fails(tightfit.Callback):
    def on_step(self, result):
        import os
        if result.step == 3 and os.environ.get("RANK", "1") == "1":
            raise ValueError("no disk")
"""


def write(folder: Path, callbacks: tuple[str, ...] = (), metric: str = "scripted", **train: Any) -> Path:
    """A job with 5 held-out samples, which one micro-batch of the reference plan holds."""
    (folder / "own.py").write_text(METRICS)
    content = tiny.content(batch=5, evaluate_every=1, **train)
    content["evaluate"] = {"metrics": {"own": {"python": f"own.py:{metric}"}}}
    content["callbacks"] = [{"python": f"own.py:{name}"} for name in callbacks]
    (folder / "job.yaml").write_text(yaml.safe_dump(content))
    return folder / "job.yaml"


def steps_of(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "record.json").read_text())
    return found


def test_the_best_checkpoint_survives_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path, keep_best={"metric": "own", "mode": "min"}, keep_checkpoints=1, checkpoint_every=3)
    out = tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
    assert steps_of(out) == [4, 8]
    path = str(out / "checkpoints" / "step-00000004")
    assert record_of(out)["best"] == {"step": 4, "metric": "own", "value": 2.0, "checkpoint": path}
    assert [values["own"] for _, values in record_of(out)["evaluations"]] == [5, 3, 4, 2, 6, 7, 8, 9]
    shown = capsys.readouterr().out
    assert f"own 2.0000 at step 4, kept in {path}" in shown
    assert "step 1  evaluation loss" in shown
    assert ", own 5.0000" in shown
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["evaluation_own"] for line in lines] == [5, 3, 4, 2, 6, 7, 8, 9]
    run = tightfit.build(tightfit.Job.load(out / "job.yaml"))
    (out / "checkpoints" / "step-00000008").rename(tmp_path / "elsewhere")
    assert tightfit.resume(run, out / "checkpoints") == 4


@pytest.mark.slow
def test_a_stopped_training_continues_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = {"keep_best": {}, "early_stopping": {"patience": 5, "min_delta": 0.02}, "steps": 30}
    job, whole, parts = write(tmp_path, metric="label", **rules), tmp_path / "whole", tmp_path / "parts"
    assert run_train(monkeypatch, job, whole, "--plan", "reference") == 0
    expected = record_of(whole)
    done = len(expected["loss"])
    assert "stopped early after step" in capsys.readouterr().out
    assert 5 < done < 30
    assert expected["stopped_early"].startswith("loss has not improved for 5 evaluations, up to step")

    first = ("--set", f"train.steps={done - 2}")
    assert run_train(monkeypatch, job, parts, "--plan", "reference", *first) == 0
    assert record_of(parts)["stopped_early"] is None
    assert run_train(monkeypatch, job, parts, "--plan", "reference", "--resume") == 0
    found = record_of(parts)
    for name in ("loss", "evaluations", "stopped_early"):
        assert found[name] == expected[name]
    assert found["best"]["step"] == expected["best"]["step"]
    assert (parts / "checkpoints" / Path(expected["best"]["checkpoint"]).name / "state.json").exists()

    capsys.readouterr()
    assert run_train(monkeypatch, job, parts, "--resume") == 0
    assert "nothing left to train: loss has not improved" in capsys.readouterr().out
    changed = ("--set", "train.early_stopping=null", "--set", f"train.steps={done + 1}")
    assert run_train(monkeypatch, job, parts, "--resume", *changed) == 0
    assert len(losses(parts)) == done + 1


def test_callbacks_are_called_and_may_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = write(tmp_path, callbacks=("Log", "Stop"), metric="label"), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
    shown = capsys.readouterr().out
    assert f"LOG 4 {[(step, ['loss', 'own']) for step in range(4)]} 4 None" in shown
    assert "stopped after step 4 by a callback; continue with --resume" in shown
    assert steps_of(out) == [4]


def test_a_failing_callback_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = write(tmp_path, callbacks=("Fails", "Log"), metric="label"), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 2
    error = capsys.readouterr().err
    assert "Fails.on_step: ValueError: no disk (line" in error or "Fails.on_step: ValueError: no disk" in error
    assert "continue with --resume" in error
    assert "Traceback" not in error
    assert steps_of(out) == [4]
    (tmp_path / "own.py").write_text(METRICS.replace("raise ValueError", "print"))


def end_of(path: str, folder: Path) -> str:
    """Train with a callback in this process, one of several; the message of the error."""
    job = tightfit.Job.load(path)
    plan = tightfit.Plan(dp_replicate=2, micro_batch=2)
    try:
        train_in_folder(job, plan, tightfit.Machine.detect(), folder / "out")
    except InputError as error:
        return f"{error.asked}: {error.found}"
    return ""


@pytest.mark.parametrize("name", ["Fails", "Stop"])
def test_processes_stop_together(tmp_path: Path, name: str) -> None:
    """A callback fails in the second of two processes, or stops both; both save the same step."""
    path = write(tmp_path, callbacks=(name,), metric="label")
    first, second = together(2, HERE + "end_of", str(path), tmp_path)
    assert steps_of(tmp_path / "out") == [4]
    assert first.replace(", on rank 1", "") == second
    assert ("Fails.on_step" in second and "no disk" in second) == (name == "Fails")


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(InputError, match=r"is a NoneType, not a callback(.|\n)*derive it from tightfit.Callback"):
        CallbackCalls([lambda: None])
    with pytest.raises(InputError, match="expected a list"):
        tightfit.Job.parse({**tiny.content(), "callbacks": {"python": "own.py:Log"}})
