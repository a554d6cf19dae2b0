"""A training process starts with the environment that its plan needs, once, and only if it is the
command itself."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tightfit.engine import launch
from tightfit.engine.launch import GLIBC_TUNABLES, enter_environment, environment, first_host, read_launcher
from tightfit.plan import Plan

TUNED = Plan(allocator="tuned")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")


@linux
def test_the_environment_depends_on_the_device() -> None:
    assert environment(TUNED, "cpu", {}) == {"GLIBC_TUNABLES": GLIBC_TUNABLES}
    assert environment(TUNED, "cuda", {}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment(Plan(), "cpu", {}) == environment(Plan(), "cuda", {}) == {}


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "GLIBC_TUNABLES"), ("cuda", "PYTORCH_ALLOC_CONF"), ("cuda", "PYTORCH_CUDA_ALLOC_CONF")],
)
def test_variables_set_by_the_user_are_kept(device: str, name: str) -> None:
    assert environment(TUNED, device, {name: "mine"}) == {}


def test_glibc_settings_are_skipped_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment(TUNED, "cpu", {}) == {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """The processes started in this one's place."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], variables: Any) -> None:
        calls.append((path, arguments, dict(variables)))

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return calls


@linux
@pytest.mark.parametrize(
    "command",
    [
        ["/venv/bin/python", "/venv/bin/tightfit", "train", "job.yaml"],
        ["python", "-m", "tightfit", "train", "job.yaml"],
    ],
)
def test_the_command_restarts_with_its_own_arguments(
    command: list[str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setenv("KEPT", "yes")
    enter_environment(TUNED, "cpu")
    ((path, arguments, variables),) = started
    assert (path, arguments) == (sys.executable, [sys.executable, *command[1:]])
    assert variables["GLIBC_TUNABLES"] == GLIBC_TUNABLES
    assert variables["KEPT"] == "yes"
    monkeypatch.setenv("GLIBC_TUNABLES", variables["GLIBC_TUNABLES"])
    enter_environment(TUNED, "cpu")
    assert len(started) == 1


@pytest.mark.parametrize("command", [["python", "my_training.py"], ["python", "-m", "pytest", "tightfit"], ["python"]])
def test_a_program_that_imports_tightfit_is_not_restarted(
    command: list[str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", command)
    enter_environment(TUNED, "cpu")
    assert started == []


def test_the_command_is_not_restarted_without_changes(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "tightfit", "train", "job.yaml"])
    enter_environment(Plan(), "cpu")
    assert started == []


def test_the_rank_is_read_from_slurm() -> None:
    environ = {
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "gpu[03-04]",
        "SLURM_JOB_ID": "7",
    }
    assert read_launcher(environ) == (4, 8)
    assert environ["RANK"] == "5"
    assert environ["LOCAL_RANK"] == "1"
    assert environ["MASTER_ADDR"] == "gpu03"
    assert environ["MASTER_PORT"] == "20007"


def test_variables_of_torchrun_are_kept() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
    assert read_launcher(environ) == (2, 2)
    assert read_launcher({}) == (1, 1)


def test_a_pod_of_one_process_counts_as_a_host() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert read_launcher(environ) == (1, 4)
    assert environ["LOCAL_RANK"] == "0"
    placed = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    assert read_launcher(placed) == (4, 4)


@pytest.mark.parametrize(
    ("hosts", "first"), [("one", "one"), ("a1,a2", "a1"), ("n[3,7-9],m", "n3"), ("rack[01-04]-x,b", "rack01-x")]
)
def test_the_first_host_of_a_slurm_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_processes_get_the_command_and_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Ended:
        returncode, pid = 0, 0

        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            started.append((command, env))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(launch.subprocess, "Popen", Ended)
    monkeypatch.setattr(launch.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["tightfit", "train", "job.yaml", "--nproc", "2"])
    for asked in ([], ["--traceback"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "tightfit", *asked, *sys.argv[1:]])
        assert launch.start_processes(2) == 0
        for rank, (command, environ) in enumerate(started[-2:]):
            assert command[1:] == ["-m", "tightfit", *asked, "train", "job.yaml"]
            assert environ["RANK"] == environ["LOCAL_RANK"] == str(rank)
            assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "2"
            assert environ["MASTER_ADDR"] == "127.0.0.1"
