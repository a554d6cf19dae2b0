"""The examples do what examples/README.md says: its very commands run, with smaller sizes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.__main__ import main

ROOT = Path(__file__).parent.parent
README = ROOT / "examples" / "README.md"
SMALL_MODEL = (
    "--set",
    "model={architecture: gpt2, vocab_size: 64, n_positions: 32, n_embd: 16, n_layer: 2, n_head: 2}",
)
SMALL = (
    *SMALL_MODEL,
    "--set",
    "data={synthetic: tokens, sequence_length: 16, samples: 64, held_out: 0.1}",
    *("--set", "train.batch=4", "--set", "train.warmup=0", "--set", "train.trackers=[]"),
    *("--set", "plan.compile=none", "--set", "plan.precision=fp32", "--set", "plan.micro_batch=2"),
)
LIMIT_S = 280  # for a busy machine; what is tested takes seconds


def commands(title: str) -> list[list[str]]:
    """The words of each command in a section of the README."""
    section = re.split(r"^## ", README.read_text(), flags=re.M)
    (text,) = [part for part in section if part.startswith(f"{title}\n")]
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    return [shlex.split(line) for line in lines]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the examples in the folder where the test runs."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("model", "__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_here(monkeypatch: pytest.MonkeyPatch, words: list[str], *more: str) -> int:
    """The exit code of a command of tightfit or python, in this process."""
    program, *arguments = words
    monkeypatch.setattr(sys, "argv", ["tightfit", *arguments, *more] if program == "tightfit" else [*arguments, *more])
    try:
        if program == "tightfit":
            main()
        else:
            assert program == "python"
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def start(words: list[str], *more: str, **variables: str) -> subprocess.Popen[str]:
    """A command in a process of its own, which finds the programs beside this Python."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [*words, *more],
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def succeed(*started: subprocess.Popen[str]) -> None:
    """Wait for processes. Raises AssertionError with the output of the first that failed."""
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # torchrun and tightfit end their own processes, too
                process.communicate()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]


def metrics(out: str | Path, name: str = "loss") -> list[float]:
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_the_readme_names_each_example() -> None:
    folders = sorted(path.name for path in README.parent.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\)", README.read_text(), re.M)) == folders


def test_own_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    explain, train, verify = commands("Own model")
    small = ["--set", "train.steps=6", "--set", "train.warmup=2", "--set", "plan.compile=none"]
    assert run_here(monkeypatch, explain, *small) == 0
    assert "fits" in capsys.readouterr().out
    assert run_here(monkeypatch, train, *small, "--set", "train.evaluate_every=3", "--set", "train.trackers=[]") == 0
    losses = metrics("runs/own_model")
    assert losses[-1] < losses[0]
    assert len(metrics("runs/own_model", "evaluation_loss")) == 2
    assert run_here(monkeypatch, verify, "--steps", "2", "--set", "plan.micro_batch=24") == 0


def test_own_model_has_a_loss_that_no_micro_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    import tightfit

    job = tightfit.Job.load("examples/own_model/job.yaml", ["allow=[]", "train.steps=3", "train.warmup=0"])
    whole, parts = (
        [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan(micro_batch=size)))]
        for size in (None, 10)
    )
    assert parts == pytest.approx(whole, rel=1e-5)


def test_fine_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make, train, generate, train_yours = commands("Fine-tuning")
    small = ["--set", "train.steps=8", "--set", "train.warmup=2", "--set", "train.evaluate_every=4"]
    small += ["--set", "plan.compile=none", "--set", "train.trackers=[]"]
    assert run_here(monkeypatch, make) == 0
    assert run_here(monkeypatch, train, *small) == 0
    losses = metrics("runs/fine_tuning", "evaluation_loss")
    assert losses[-1] < losses[0]
    capsys.readouterr()
    assert run_here(monkeypatch, generate, "--tokens", "4") == 0
    assert capsys.readouterr().out.startswith("Question: Which command lists files?")

    # a model, its tokenizer and data from elsewhere: the checkpoint and two lines of the data
    checkpoint = max((folder / "runs/fine_tuning/checkpoints").glob("step-*"))
    lines = (folder / "examples/fine_tuning/questions.jsonl").read_text().splitlines(keepends=True)
    (folder / "data.jsonl").write_text("".join(lines[:4]))
    yours = " ".join(train_yours).replace("FOLDER", str(checkpoint)).replace("FILE", str(folder / "data.jsonl")).split()
    few = ["--set", "train.steps=1", "--set", "train.warmup=0", "--set", "train.batch=2", "--set", "data.held_out=0"]
    assert run_here(monkeypatch, yours, *small[:-4], *few, "--set", "train.evaluate_every=null", "--out", "yours") == 0
    assert metrics("yours")[0] < losses[0]


FEW = (*SMALL, "--set", "train.steps=3", "--set", "train.checkpoint_every=never")


def test_several_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, _, explain = commands("Several GPUs")
    assert run_here(monkeypatch, explain, *SMALL) == 0
    assert "zero=3" in capsys.readouterr().out
    succeed(start(train, *FEW))
    assert len(metrics("runs/several_gpus")) == 3


@pytest.mark.slow
def test_torchrun_trains_as_nproc_does() -> None:
    train, torchrun, _ = commands("Several GPUs")
    succeed(start(train, *FEW))
    succeed(start(torchrun, *FEW))
    losses = metrics("runs/several_gpus")
    assert len(losses) == 3
    assert metrics("runs/torchrun") == pytest.approx(losses, rel=1e-5)
    plan = yaml.safe_load(Path("runs/torchrun/plan.yaml").read_text())
    assert (plan["dp_shard"], plan["zero"]) == (2, 3)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


TWO_HOSTS = (*SMALL, "--set", "plan.dp_shard=1", "--set", "plan.zero=0", "--set", "train.checkpoint_every=null")
TWO_HOSTS += ("--interface", "lo")


SRUN = """#!/usr/bin/env bash
# Starts the command as two tasks, as Slurm would on two hosts.
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=0 "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Programs that this process and those that it starts find first."""
    (folder / "bin").mkdir()
    for name, text in texts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_several_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchruns, as on two hosts, find each other. Two tasks of Slurm then go on from their checkpoint."""
    slurm, (head, *torchrun) = commands("Several hosts")
    assert (head, slurm[0]) == ("HEAD=node1", "sbatch")
    host = {"HEAD": "127.0.0.1", "GPUS": "1", "PORT": str(free_port()), "PET_LOCAL_ADDR": "127.0.0.1"}
    succeed(*(start(torchrun, *TWO_HOSTS, "--set", "train.steps=2", **host) for _ in range(2)))
    losses = metrics("runs/several_hosts")
    assert len(losses) == 2

    programs(folder, monkeypatch, srun=SRUN)
    job = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NODELIST": "127.0.0.1"}
    succeed(start(["bash", *slurm[1:]], *TWO_HOSTS, "--set", "train.steps=3", **job))
    assert metrics("runs/several_hosts")[:2] == losses
    assert len(metrics("runs/several_hosts")) == 3


@pytest.mark.parametrize(("code", "ends", "queued"), [(85, 0, "requeue 7\n"), (1, 1, ""), (0, 0, "")])
def test_slurm_queues_a_job_again_whose_time_was_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, ends: int, queued: str
) -> None:
    asked = folder / "asked"
    asked.touch()
    said = f'#!/usr/bin/env bash\necho "$@" >> "{asked}"\n'
    programs(folder, monkeypatch, srun=f"#!/usr/bin/env bash\nexit {code}\n", scontrol=said)
    process = start(["bash", "examples/several_hosts/slurm.sh"], SLURM_JOB_ID="7")
    output = process.communicate(timeout=LIMIT_S)[0]
    assert (process.returncode, asked.read_text()) == (ends, queued), output


def test_own_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = commands("Own loop")
    every = ["--log-every", "1", "--evaluate-every", "2", "--save-every", "3"]
    every += ["--set", "train.schedule=constant"]  # so that a longer run begins as a shorter one

    def log(out: str, steps: int) -> list[dict[str, Any]]:
        words = [out if word == "runs/own_loop" else word for word in command]
        assert run_here(monkeypatch, words, *every, *SMALL, "--set", f"train.steps={steps}") == 0
        lines = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
        return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]

    whole = log("whole", 6)
    assert [line["step"] for line in whole if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in whole if "evaluation_loss" in line] == [2, 4, 6]
    assert Path("whole/best").exists()
    log("parts", 4)
    assert log("parts", 6) == whole
    assert "evaluation_loss" in capsys.readouterr().out


def test_own_loop_ends_when_evaluations_do_not_improve() -> None:
    is_stuck = runpy.run_path("examples/own_loop/own_loop.py")["is_stuck"]
    assert not is_stuck([3.0, 2.0, 2.5], patience=2)
    assert is_stuck([3.0, 2.0, 2.5, 2.0], patience=2)
    assert not is_stuck([3.0, 2.0, 2.5, 1.9], patience=2)
    assert not is_stuck([3.0], patience=2)


@pytest.mark.slow
def test_gan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, several = commands("GAN")
    assert run_here(monkeypatch, one, "--steps", "100") == 0
    explained, trained = capsys.readouterr().out.split("step 100: radius ")
    assert "optimizer " in explained
    assert "peak " in explained
    with start(several, "--steps", "100") as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "zero=2" in said
    for radius in (
        trained,
        said.split("step 100: radius ")[1],
    ):  # the weights begin at random; at first it is about 0.1
        assert 0.3 < float(radius.split()[0]) < 2.0
