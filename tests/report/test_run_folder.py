"""The files of a training in its folder, and how it ends when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from tests import tiny
from tightfit.__main__ import main
from tightfit.engine.best import Selection
from tightfit.engine.callbacks import CallbackCalls
from tightfit.engine.checkpoint.save import save
from tightfit.engine.step import Step
from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.plan import Plan
from tightfit.report import run_folder
from tightfit.report.command_inputs import check_out
from tightfit.report.run_folder import begin_files


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["tightfit", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def run_train(monkeypatch: pytest.MonkeyPatch, job: Path, out: Path, *options: str) -> int:
    """The exit code of `tightfit train`."""
    return command(monkeypatch, "train", str(job), "--out", str(out), *options)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


UNLABELLED = """
import torch

def data(samples=16):
    ids = torch.arange(samples * 8).view(samples, 8) % 300
    return [{"input_ids": row, "labels": torch.full_like(row, -100)} for row in ids]
"""


def test_steps_whose_labels_do_not_count_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unlabelled.py").write_text(UNLABELLED)
    content = tiny.content(steps=2, checkpoint_every="never")
    content["data"] = {"python": f"{tmp_path / 'unlabelled.py'}:data"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(content))
    assert run_train(monkeypatch, tmp_path / "job.yaml", tmp_path / "out", "--plan", "reference") == 0
    assert capsys.readouterr().out.count("none of its labels counts (all are -100)") == 1
    assert losses(tmp_path / "out") == [0, 0]


def test_a_run_writes_its_files_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, evaluate_every=4, checkpoint_every=3, trackers=["tensorboard"]), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
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
        ".lock",
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
    peaks = [json.loads(line)["peak_bytes"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert set(peaks) == {None, record["peak_bytes"]["measured"]}
    assert peaks[0] is None

    assert run_train(monkeypatch, job, out) == 2  # would overwrite
    assert "--resume" in capsys.readouterr().err
    assert run_train(monkeypatch, job, out, "--plan", "reference", "--resume", "--set", "train.steps=10") == 0
    assert len(losses(out)) == 10

    again = tmp_path / "again"
    assert run_train(monkeypatch, out / "job.yaml", again, "--plan", str(out / "plan.yaml")) == 0
    assert losses(again)[:8] == losses(out)[:8]


def test_a_nan_loss_ends_the_run_and_keeps_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, checkpoint_every=1, optimizer="sgd"), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference", "--set", "train.learning_rate=1e30") == 1
    message = capsys.readouterr().err
    assert "train.clip" in message
    assert "in the data" in message
    assert f"{out / 'checkpoints' / 'step-'}" in message
    assert "Traceback" not in message
    assert list((out / "checkpoints").glob("step-*/state.json"))


NAN = """
import torch

def model():
    return torch.nn.Linear(3, 2)

def data():
    return [(torch.full((3,), float("nan")), 1) for _ in range(8)]
"""


def test_a_loss_that_is_nan_from_the_start_blames_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(NAN)
    parts = {name: {"python": f"own.py:{name}"} for name in ("model", "data")}
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(yaml.safe_dump({**parts, "train": {"batch": 4, "steps": 3, "trackers": []}}))
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 1
    message = capsys.readouterr().err
    assert "no checkpoint was written before" in message
    assert "values in the data" in message
    assert "train.learning_rate" not in message


UNSHIFTED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(9, 9)

    def forward(self, input_ids):
        return self.table(input_ids)

def data():
    return [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
"""


@pytest.mark.filterwarnings("default::tightfit.errors.TightfitWarning")
def test_a_warning_is_printed_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(UNSHIFTED)
    job, train = tmp_path / "job.yaml", {"batch": 4, "steps": 1, "trackers": []}
    job.write_text(
        yaml.safe_dump({"model": {"python": "own.py:Model"}, "data": {"python": "own.py:data"}, "train": train})
    )
    assert run_train(monkeypatch, job, tmp_path / "out", "--plan", "reference") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines if "labels are not shifted" in line] == ["warning"]


UNIQUE = UNSHIFTED.replace(
    "self.table(input_ids)", "self.table(input_ids.unique())[input_ids.unique(return_inverse=True)[1]]"
)


@pytest.mark.filterwarnings("default::tightfit.errors.TightfitWarning")
def test_an_untraceable_model_trains_and_refusals_appear_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(UNSHIFTED)
    (tmp_path / "unique.py").write_text(UNIQUE)
    train, paths = {"batch": 4, "steps": 1, "trackers": []}, {}
    for name in ("own", "unique"):
        parts = {"model": {"python": f"{name}.py:Model"}, "data": {"python": f"{name}.py:data"}}
        paths[name] = tmp_path / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump({**parts, "train": train}))
    assert run_train(monkeypatch, paths["unique"], tmp_path / "out") == 0
    assert "predict  not possible: has shapes or branches that depend on the data" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "record.json").read_text()).get("predicted") is None
    asked = ("--plan", "reference", "--set", "plan.recompute=full")
    assert run_train(monkeypatch, paths["own"], tmp_path / "other", *asked) == 2
    said = capsys.readouterr()
    assert "recompute" in said.err
    assert "not possible" not in said.out


def full(*arguments: Any, **options: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_reported_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path), tmp_path / "out"
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 2
    shown = capsys.readouterr()
    assert "No space left" in shown.err
    assert "another folder with --out" in shown.err
    assert "plan" not in shown.out
    assert not out.exists()


def test_a_full_disk_at_the_start_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="free some disk space"):
        begin_files(tiny.job(), Plan(), None, tmp_path / "out", 0)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder that takes no files, whoever asks")
def test_a_folder_that_cannot_be_created_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be written to") as raised:
        check_out(Path("/proc/foo"), False)
    assert "another folder" in str(raised.value)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tightfit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def stopped(job: Path, out: Path, number: signal.Signals) -> tuple[int, str, str]:
    """A training that gets a signal after its first step: its exit code, and what it wrote to
    stdout and stderr."""
    process = start("train", str(job), "--plan", "reference", "--out", str(out))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(number)
    shown, said = process.communicate(timeout=60)
    return process.returncode, shown, said


def test_ctrl_c_stops_after_the_step_and_saves(tmp_path: Path) -> None:
    job, out = tiny.write(tmp_path, steps=100_000), tmp_path / "out"
    code, shown, said = stopped(job, out, signal.SIGINT)
    assert code == 130
    assert "--resume" in shown
    assert "Traceback" not in said
    (saved,) = (out / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(losses(out))


@pytest.mark.slow
def test_checkpoints_are_written_as_often_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {}
    for every in (None, "end", 3, "never"):
        job, out = tiny.write(tmp_path, checkpoint_every=every, keep_checkpoints=9), tmp_path / f"out-{every}"
        assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
        assert (out / "record.json").exists()
        saved[every] = [int(path.name.removeprefix("step-")) for path in sorted(out.glob("checkpoints/step-*"))]
    assert saved == {None: [8], "end": [8], 3: [3, 6, 8], "never": []}


def test_invalid_checkpoint_settings_are_refused() -> None:
    for wrong in (0, -1, "sometimes"):
        with pytest.raises(InputError, match="checkpoint_every"):
            tiny.job(checkpoint_every=wrong)


def test_resuming_a_run_without_checkpoints_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, checkpoint_every="never", steps=2), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
    capsys.readouterr()
    assert run_train(monkeypatch, job, out, "--plan", "reference", "--resume") == 2
    said = capsys.readouterr().err
    assert "has no checkpoint, because the run had train.checkpoint_every=never" in said
    assert "leave out --resume" in said


def test_a_signal_saves_unless_the_job_says_never(tmp_path: Path) -> None:
    for every, words in (("end", "continue with --resume"), ("never", "nothing was saved")):
        job, out = tiny.write(tmp_path, steps=100_000, checkpoint_every=every), tmp_path / f"out-{every}"
        code, shown, _ = stopped(job, out, signal.SIGTERM)
        assert code == 143
        assert words in shown
        assert len(list(out.glob("checkpoints/step-*"))) == (every == "end")


@dataclass
class Followed:
    """Replaces a run on CUDA and its observers: notes what happens, in order."""

    done: list[str]

    def step(self, number: int) -> Step:
        def read() -> Any:
            self.done.append(f"read {number}")
            return 1.0

        loss: Any = read
        return Step(number, loss, 0.1, None, 4, 60, 64, False, seconds=1.0)

    def steps(self, run: Any, start: int, take: Any, weights_at_yield: bool) -> Iterator[Step]:
        for number in range(start, 6):
            self.done.append(f"begin {number}")
            yield self.step(number)


def test_cuda_step_figures_are_read_during_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed([])
    monkeypatch.setattr(run_folder, "train", followed.steps)
    monkeypatch.setattr(run_folder, "total_steps", lambda run: 6)
    monkeypatch.setattr(run_folder, "save", lambda run, folder, step, kept: followed.done.append(f"save {step}"))
    monkeypatch.setattr(run_folder, "_check_weights", lambda run, out, done: None)
    monkeypatch.setattr(run_folder, "metrics_line", lambda result, observer: {"items_per_s": 1.0, "peak_bytes": 0})
    observer: Any = SimpleNamespace(take=None, add=lambda step: None, step_s=lambda step: 1.0)
    view: Any = SimpleNamespace(show=lambda *figures: None, say=lambda line: None)
    settings = Train(checkpoint_every=3)
    for device, expected in (
        (
            "cuda",
            "begin 0, begin 1, read 0, begin 2, read 1, read 2, save 3, begin 3, begin 4, read 3, begin 5, read 4, read 5",
        ),
        (
            "cpu",
            "begin 0, read 0, begin 1, read 1, begin 2, read 2, save 3, begin 3, read 3, begin 4, read 4, begin 5, read 5",
        ),
    ):
        followed.done.clear()
        run: Any = SimpleNamespace(
            job=SimpleNamespace(train=settings, evaluate_every=None),
            device=SimpleNamespace(type=device),
            executor=None,
            mesh=None,
        )
        report = run_folder._StepReport(
            run, tmp_path, observer, view, None, None, Selection(settings), CallbackCalls(())
        )
        assert run_folder._train(run, 0, tmp_path, report) is None
        assert ", ".join(followed.done) == f"{expected}, save 6"


@pytest.mark.slow
def test_a_process_killed_by_the_system_is_reported(tmp_path: Path) -> None:
    job, out = tiny.write(tmp_path, steps=100_000, checkpoint_every=1), tmp_path / "out"
    process = start(
        "train", str(job), "--plan", "reference", "--out", str(out), "--nproc", "2", "--set", "plan.dp_replicate=2"
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    while not list((out / "checkpoints").glob("step-*")):
        time.sleep(0.02)
    _, second = sorted(psutil.Process(process.pid).children(), key=lambda child: int(child.environ()["RANK"]))
    second.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.splitlines()[-2:] == [
        "tightfit: TightfitError: process 1 was ended by SIGKILL, as the system does when memory runs out: "
        "a smaller plan.micro_batch, plan.recompute or fewer processes need less",
        "  the saved checkpoints are kept: --resume continues from the newest",
    ]
    assert "Traceback" not in said
    assert list((out / "checkpoints").glob("step-*"))


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2_500_000_000, 2_500_000_000))
sys.argv = ["tightfit", "train", *sys.argv[1:]]
from tightfit.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a Linux process's memory")
def test_out_of_memory_is_exit_code_3_with_remedies(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_resumed_plan_that_fails_is_named_as_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = tiny.write(tmp_path, checkpoint_every=3), tmp_path / "out"
    assert run_train(monkeypatch, job, out, "--plan", "reference") == 0
    plan = yaml.safe_load((out / "plan.yaml").read_text())
    (out / "plan.yaml").write_text(yaml.safe_dump({**plan, "pp": 2, "split": [1, 1]}))
    assert run_train(monkeypatch, job, out, "--resume", "--set", "train.steps=9") == 2
    assert "out/plan.yaml that --set does not change" in "".join(capsys.readouterr().err.split("\n"))
    assert run_train(monkeypatch, job, out, "--resume", "--set", "train.steps=9", "--set", "plan.pp=1") == 0


def test_the_best_step_is_saved_once_if_figures_are_read_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a step is reported after the next one has begun."""
    saved: list[int] = []

    def spy(run: Any, folder: Path, step: int, kept: frozenset[int] = frozenset()) -> Path:
        saved.append(step)
        return save(run, folder, step, kept)

    monkeypatch.setattr(run_folder, "save", spy)
    monkeypatch.setattr(run_folder, "_reads_late", lambda run: True)
    job = tiny.write(tmp_path, evaluate_every=3, keep_best={}, checkpoint_every="end")
    assert run_train(monkeypatch, job, tmp_path / "out", "--plan", "reference") == 0
    assert saved[0] == 3
    assert set(saved) <= {3, 6, 8}
