"""Processes of `tightfit train --nproc`: where they listen, and how they end after signals, stops,
kills and refusals."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests import tiny

ENDLESS = "train.steps=100000"
LIMIT_S = 280  # for a busy machine; what is tested takes seconds
COMMAND = ("-m", "tightfit")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "tightfit")


def write(folder: Path, **content: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**tiny.content(), **content}))
    return path


class Training:
    """A `tightfit train` that runs, and what it has said so far."""

    def __init__(self, job: Path, out: Path, *options: str, start: tuple[str, ...] = COMMAND) -> None:
        self.out, self.shown = out, ""
        self.process = subprocess.Popen(
            [sys.executable, *start, "train", str(job), "--plan", "reference", "--out", str(out), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_steps(self) -> None:
        """Until the first step is done. The watchdog's first, long limit still holds then."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.shown += line
            if line.startswith("step "):
                return
        raise AssertionError(self.process.communicate()[1])

    def wait_for_third_step(self) -> None:
        """Until the third step is done. From the second on, an operation may only take --timeout."""
        self.wait_for_steps()
        while self.steps < 3:
            assert self.process.poll() is None
            time.sleep(0.05)

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        all_of_them = psutil.Process(self.process.pid).children(recursive=True)
        named = {int(one.environ()["RANK"]): one for one in all_of_them if "RANK" in one.environ()}
        return [named[rank] for rank in sorted(named)]

    def end(self) -> tuple[int, str]:
        """(exit code, what it said on stderr)."""
        shown, said = self.process.communicate(timeout=LIMIT_S)
        self.shown += shown
        return self.process.returncode, said

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.out / "checkpoints").glob("step-*"))

    @property
    def steps(self) -> int:
        return len((self.out / "metrics.jsonl").read_text().splitlines())


@contextmanager
def training(job: Path, out: Path, *options: str, start: tuple[str, ...] = COMMAND) -> Iterator[Training]:
    run = Training(job, out, *options, start=start)
    try:
        yield run
    finally:
        for process in [*run.ranks, run.process] if run.process.poll() is None else []:
            process.kill()


def listening(process: psutil.Process) -> set[str]:
    """The addresses that a process listens on: by /proc/net/tcp and tcp6, as psutil reads them."""
    return {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_a_local_run_listens_on_loopback_and_saves_on_sigterm(tmp_path: Path) -> None:
    """With tensor parallelism no rank can generate the sample at the end alone."""
    text = {"text": "python-stdlib", "sequence_length": 16, "held_out": 0.01}
    job, plan = write(tmp_path, data=text), ("--nproc", "2", "--set", "plan.tp=2")
    with training(job, tmp_path / "out", *plan, "--set", ENDLESS) as run:
        run.wait_for_steps()
        for process in [psutil.Process(run.process.pid), *run.ranks]:
            found = listening(process)
            assert found
            assert all(ipaddress.ip_address(address).is_loopback for address in found), found
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
    assert code == 143, said
    assert "by SIGTERM; continue with --resume" in run.shown
    assert said == ""
    done = run.steps
    assert run.saved == [done]
    with training(job, tmp_path / "out", *plan, "--resume", "--set", f"train.steps={done + 2}") as again:
        code, said = again.end()
    assert code == 0, said
    assert again.steps == done + 2
    assert "sample\n  def " in again.shown


def test_a_stopped_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    job, several = tiny.write(tmp_path, checkpoint_every=1), ("--nproc", "2", "--set", "plan.dp_replicate=2")
    with training(job, tmp_path / "out", *several, "--timeout", "0.05", "--set", ENDLESS) as run:
        run.wait_for_third_step()
        while not run.saved:
            time.sleep(0.05)
        second = run.ranks[1]
        second.suspend()
        code, said = run.end()
    assert code == 1
    assert said.count("tightfit:") == 1
    assert "rank 1 has not answered" in said
    assert "rank 0 waits in step " in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert not second.is_running()
    assert run.saved


REFUSING = """
import os
import torch
from tightfit.errors import InputError

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        if os.environ.get("RANK") == "1":
            raise InputError("job: model", "is refused by one", "use another")

def data():
    return [(torch.ones(3), 1)] * 8
"""


@pytest.mark.slow
def test_a_refusal_of_one_rank_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REFUSING)
    parts = {"model": {"python": "own.py:Model"}, "data": {"python": "own.py:data"}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**parts, "train": {"batch": 4, "steps": 3, "trackers": []}}))
    with training(job, tmp_path / "out", "--nproc", "2", "--set", "plan.dp_replicate=2") as run:
        code, said = run.end()
    assert code == 2
    assert said.splitlines() == ["tightfit: InputError: job: model: is refused by one", "  fix: use another"]


def test_sigusr1_saves_and_exits_with_the_requeue_code(tmp_path: Path) -> None:
    with training(tiny.write(tmp_path), tmp_path / "out", "--set", ENDLESS) as run:
        run.wait_for_steps()
        run.process.send_signal(signal.SIGUSR1)
        assert run.end()[0] == 128 + signal.SIGUSR1
    done = run.steps
    assert run.saved == [done]
    with training(
        tmp_path / "job.yaml", tmp_path / "out", "--resume", "--requeue-code", "85", "--set", ENDLESS
    ) as again:
        again.wait_for_steps()
        again.process.send_signal(signal.SIGTERM)
        assert again.end()[0] == 85
    assert again.saved[-1] == again.steps > done
    assert (
        len({json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()})
        == again.steps
    )


SLOW = """
import time
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, inputs):
        print("forward", flush=True)
        time.sleep(300)

def data():
    return [(torch.ones(3), 1)] * 8
"""


@pytest.mark.slow
@pytest.mark.parametrize("several", [(), ("--nproc", "2", "--set", "plan.dp_replicate=2")], ids=["one", "two"])
def test_a_second_signal_ends_at_once(several: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW)
    parts = {"model": {"python": "own.py:Model"}, "data": {"python": "own.py:data"}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**parts, "train": {"batch": 4, "steps": 3, "trackers": []}}))
    with training(job, tmp_path / "out", *several) as run:
        assert run.process.stdout is not None
        for line in run.process.stdout:
            if line.startswith("forward"):
                break
        for _ in range(2):
            run.process.send_signal(signal.SIGTERM)
            time.sleep(2)
        run.process.communicate(timeout=60)
    assert run.process.returncode in (143, -signal.SIGTERM)
    assert not run.saved


@pytest.mark.slow
def test_workers_of_torchrun_save_on_its_sigterm(tmp_path: Path) -> None:
    several = ("--set", "plan.zero=3", "--set", "plan.dp_shard=2")
    with training(tiny.write(tmp_path), tmp_path / "out", *several, "--set", ENDLESS, start=TORCHRUN) as run:
        run.wait_for_steps()
        assert all(ipaddress.ip_address(address).is_loopback for process in run.ranks for address in listening(process))
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] != 0
    assert run.saved == [run.steps]


@pytest.mark.slow
def test_launched_processes_report_a_wrong_job_once(tmp_path: Path) -> None:
    job = tiny.write(tmp_path)
    job.write_text(job.read_text().replace("learning_rate", "learning_rat"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tightfit", "train", str(job), "--out", str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = "".join(process.communicate(timeout=LIMIT_S)[1] for process in started)
    assert [process.returncode for process in started] == [2, 2]
    assert said.count("unknown field") == 1, said
    assert said.count("tightfit:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_gives_one_message(rank: int, tmp_path: Path) -> None:
    several = ("--nproc", "2", "--set", "plan.zero=3", "--set", "plan.dp_shard=2")
    with training(tiny.write(tmp_path), tmp_path / "out", *several, "--set", ENDLESS) as run:
        run.wait_for_steps()
        run.ranks[rank].kill()
        code, said = run.end()
    assert code == 1
    assert said.count("tightfit:") == 1
    assert f"process {rank} was ended by SIGKILL" in said


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """Nobody reads their output then."""
    several = ("--nproc", "2", "--set", "plan.dp_replicate=2")
    with training(tiny.write(tmp_path), tmp_path / "out", *several, "--timeout", "0.05", "--set", ENDLESS) as run:
        run.wait_for_steps()
        ranks = run.ranks
        run.process.kill()
        for end in (run.process.stdout, run.process.stderr):
            assert end is not None
            end.close()
        assert psutil.wait_procs(ranks, timeout=90)[1] == []
