"""Links between two processes are measured or reported as unmeasured, and nothing waits forever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightfit.calibration import calibrate
from tightfit.errors import TightfitError, TightfitWarning
from tightfit.machine import Figure, Machine

H100 = Machine.named("h100-sxm:2").replace(memory_bytes=Figure(value=2**36, source="system"))


def answers(rank: int, folder: str, backend: str, sender: Any) -> None:
    if rank == 0:
        time.sleep(0.5)  # the other process has ended by then
        sender.send({calibrate.LARGE: 0.5, calibrate.SMALL: 0.25})


def dies(rank: int, folder: str, backend: str, sender: Any) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def hangs(rank: int, folder: str, backend: str, sender: Any) -> None:
    time.sleep(600)


def says_nothing(rank: int, folder: str, backend: str, sender: Any) -> None:
    return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sums", "limit_s", "said"),
    [
        pytest.param(dies, 60.0, "a process ended with code 7", marks=pytest.mark.slow),
        (hangs, 0.2, "did not finish their all-reduces within 0.2 s"),
        (says_nothing, 60.0, "ended without an answer"),
    ],
)
def test_processes_that_hang_are_given_up(sums: Callable[..., None], limit_s: float, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(TightfitError, match=said):
        calibrate._all_reduces_s("gloo", sums, limit_s)
    assert time.monotonic() - began < 300


@pytest.mark.slow
def test_the_first_process_s_answer_counts_if_the_other_ended() -> None:
    assert calibrate._all_reduces_s("gloo", answers) == {calibrate.LARGE: 0.5, calibrate.SMALL: 0.25}


@pytest.mark.slow
def test_two_cpu_processes_are_timed() -> None:
    found = calibrate._all_reduces_s()
    assert found.keys() == {calibrate.LARGE, calibrate.SMALL}
    assert 0 < found[calibrate.SMALL] < found[calibrate.LARGE]


def test_figures_are_kept_if_nothing_could_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[int, float]:
        raise TightfitError("a process ended with code 7")

    monkeypatch.setattr(calibrate, "_all_reduces_s", fails)
    with pytest.warns(TightfitWarning, match=r"its figures stay unchanged: a process ended with code 7"):
        found = calibrate._all_reduces_here_s(H100, print)
    assert calibrate._links(H100, found, 1.0) == {}


def test_one_gpu_keeps_its_published_link_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(calibrate, "_all_reduces_s", lambda *_: pytest.fail("two processes were started"))
    assert calibrate._all_reduces_here_s(H100.replace(devices_per_node=1), said.append) is None
    assert "published figures" in said[0]


def test_two_gpus_are_timed_with_nccl_and_keep_its_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    sums = {calibrate.LARGE: 1e-3, calibrate.SMALL: 4e-5}
    monkeypatch.setattr(calibrate, "_all_reduces_s", lambda *given: asked.append(given) or sums)
    found = calibrate._links(H100, calibrate._all_reduces_here_s(H100, print), 1.0)
    assert asked == [("nccl",)]
    assert found.keys() == {"process_bytes_per_s"}
    assert found["process_bytes_per_s"].value == pytest.approx(calibrate.LARGE / 1e-3)
    assert "NCCL" in found["process_bytes_per_s"].detail
    unknown = H100.replace(process_latency_s=None)
    assert calibrate._links(unknown, sums, 1.0)["process_latency_s"].value == pytest.approx(2e-5)


def test_of_different_gpus_the_machine_s_own_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Properties:
        def __init__(self, name: str) -> None:
            self.name = name

    names = ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(names[index]))
    assert calibrate.device_of(H100.replace(name="NVIDIA L4")) == torch.device("cuda", 1)
    assert calibrate.device_of(Machine.detect().replace(device="cpu")) == torch.device("cpu")
