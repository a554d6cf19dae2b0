"""What a training leaves in its folder, and how it ends when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.__main__ import main

from .. import tiny


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tightfit", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_files_of_a_run_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, evaluate_every=4, checkpoint_every=3, trackers=["tensorboard"]), tmp_path / "out"
    assert command(monkeypatch, "train", str(job), "--plan", "reference", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    for words in ("loss", "lr", "tokens/s", "peak", "left", "evaluation loss", "record.json", "predicted"):
        assert words in shown
    assert {path.name for path in out.iterdir()} == {
        "job.yaml",
        "plan.yaml",
        "predicted.json",
        "metrics.jsonl",
        "record.json",
        "checkpoints",
        "tensorboard",
    }
    record = json.loads((out / "record.json").read_text())
    assert {
        "plan",
        "machine",
        "code",
        "step_s",
        "tokens_per_s",
        "peak_bytes",
        "mfu",
        "compile_s",
        "loss",
    } <= record.keys()
    assert {"predicted", "measured"} <= record["peak_bytes"].keys()
    assert len(record["loss"]) == 8
    assert len(record["step_s"]) == 5
    assert sum(record["peak_bytes"]["rows"].values()) == record["peak_bytes"]["measured"]

    assert command(monkeypatch, "train", str(job), "--out", str(out)) == 2  # would overwrite
    assert "--resume" in capsys.readouterr().err
    assert (
        command(
            monkeypatch,
            "train",
            str(job),
            "--plan",
            "reference",
            "--out",
            str(out),
            "--resume",
            "--set",
            "train.steps=10",
        )
        == 0
    )
    assert len(losses(out)) == 10

    again = tmp_path / "again"
    assert (
        command(monkeypatch, "train", str(out / "job.yaml"), "--plan", str(out / "plan.yaml"), "--out", str(again)) == 0
    )
    assert losses(again)[:8] == losses(out)[:8]


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, checkpoint_every=1, optimizer="sgd"), tmp_path / "out"
    assert (
        command(
            monkeypatch,
            "train",
            str(job),
            "--plan",
            "reference",
            "--out",
            str(out),
            "--set",
            "train.learning_rate=1e30",
        )
        == 1
    )
    message = capsys.readouterr().err
    assert "train.clip" in message
    assert "Traceback" not in message
    assert list((out / "checkpoints").glob("step-*/state.pt"))


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tightfit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_signal_stops_after_the_step_and_saves(tmp_path: Path) -> None:
    job, out = tiny.write(tmp_path, steps=100_000), tmp_path / "out"
    process = start("train", str(job), "--plan", "reference", "--out", str(out))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--resume" in shown
    (saved,) = (out / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(losses(out))


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2_500_000_000, 2_500_000_000))
sys.argv = ["tightfit", "train", *sys.argv[1:]]
from tightfit.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a Linux process's memory")
def test_out_of_memory_is_exit_code_3_with_what_takes_less(tmp_path: Path) -> None:
    job = tiny.write(tmp_path, batch=512)
    size = ["--set", "model.vocab_size=40000", "--set", "model.hidden_size=256", "--set", "data.samples=600"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(job), "--plan", "reference", "--out", str(tmp_path / "out"), *size],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for change in ("micro_batch: 256", "chunked_loss", "recompute: full", "bf16-mixed"):
        assert change in done.stderr
