"""Copies of a process that make traces ahead of a search."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tightfit
from tests.planner import cases
from tightfit._torch.compiler import keeping_compilations
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.planner import ahead
from tightfit.planner.search import _infrequent_gc, search
from tightfit.planner.tracing import cache, profiler, shared_work
from tightfit.planner.tracing.plain_data import to_content
from tightfit.planner.tracing.shared_work import MadeElsewhere, SharedWork, copy_count

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies processes")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[SharedWork]:
    shared = SharedWork(tmp_path)
    yield shared
    shared.stop()


def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true, at most a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "copy_count", lambda pieces: min(pieces, 1))


def test_a_name_is_claimed_once(work: SharedWork) -> None:
    assert work.claim("a")
    assert not work.claim("a")
    assert work.claim("b")


def test_copies_run_each_piece_once(work: SharedWork, tmp_path: Path) -> None:
    def fails() -> None:
        raise InputError("asked", "found", "change")

    pieces = [(tmp_path / "first").mkdir, fails, (tmp_path / "third").mkdir]
    work.start_copies(1, pieces)
    work.start_copies(1, pieces)
    until((tmp_path / "third").exists)
    assert (tmp_path / "first").exists()
    assert not work.is_copy


def test_the_process_waits_for_what_a_copy_makes(work: SharedWork, tmp_path: Path) -> None:
    made = tmp_path / "made"

    def make() -> str:
        if not made.exists():
            time.sleep(0.3)
            made.write_text(str(os.getpid()))
        return made.read_text()

    work.start_copies(1, [lambda: work.once("a", True, make)])
    until((tmp_path / "a.claim").exists)
    assert int(work.once("a", True, make)) != os.getpid()


def test_a_process_that_would_wait_makes_other_results(work: SharedWork, tmp_path: Path) -> None:
    wanted, made = tmp_path / "wanted", []

    def fails() -> None:
        made.append("refused")
        raise InputError("asked", "found", "change")

    def last() -> None:
        made.append("made")
        wanted.touch()
        until((tmp_path / "a.done").exists)

    work.start_copies(1, [lambda: work.once("a", True, lambda: until(wanted.exists))])
    until((tmp_path / "a.claim").exists)
    assert work.claim("claimed")
    others = {"claimed": fails, "refused": fails, "made": last, "not needed": fails}
    work.once("a", True, lambda: None, others.items())
    assert made == ["refused", "made"]  # and none after "a" was done
    assert work.claim("not needed")


def test_what_a_killed_copy_had_claimed_is_made_here(work: SharedWork, tmp_path: Path) -> None:
    work.start_copies(1, [lambda: work.once("a", True, lambda: time.sleep(600))])
    until(lambda: (tmp_path / "a.claim").exists() and (tmp_path / "a.claim").read_text() != "")
    os.kill(int((tmp_path / "a.claim").read_text()), signal.SIGKILL)
    assert work.once("a", True, os.getpid) == os.getpid()


def test_a_copy_does_not_wait_for_slow_work(work: SharedWork, tmp_path: Path) -> None:
    def other() -> None:
        try:
            work.once("slow", True, lambda: None)
        except MadeElsewhere:
            (tmp_path / "went on").touch()

    assert work.claim("slow")
    work.start_copies(1, [other])
    until((tmp_path / "went on").exists)


def test_a_copy_makes_other_results_before_it_goes_on(work: SharedWork, tmp_path: Path) -> None:
    def other() -> None:
        try:
            work.once("slow", True, lambda: None, [("other", (tmp_path / "other").touch)])
        except MadeElsewhere:
            (tmp_path / "went on").touch()

    assert work.claim("slow")
    work.start_copies(1, [other])
    until((tmp_path / "went on").exists)
    assert (tmp_path / "other").exists()


def test_other_copies_make_what_ended_ones_had_begun(work: SharedWork, tmp_path: Path) -> None:
    work.start_copies(1, [lambda: work.once("a", True, lambda: time.sleep(600))])
    until((tmp_path / "a.claim").exists)
    work.restart_copies([lambda: work.once("a", True, (tmp_path / "made").touch)])
    until((tmp_path / "made").exists)
    assert len(work._copies) == 1


def test_a_copy_ends_with_its_process(tmp_path: Path) -> None:
    work = SharedWork(tmp_path)
    work._start_copy([lambda: time.sleep(600)])
    (copy,) = work._copies
    work.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(copy, 0)


def test_a_copy_makes_nothing_after_its_process_was_killed(work: SharedWork, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()

    def piece(shared: SharedWork) -> None:
        (tmp_path / "began").write_text(str(os.getpid()))
        until(lambda: os.getppid() != shared._original)
        shared.once("a", False, (tmp_path / "made").touch)

    def start_and_end() -> None:
        shared = SharedWork(inner)
        shared._start_copy([lambda: piece(shared)])
        until((tmp_path / "began").exists)
        os.kill(os.getpid(), signal.SIGKILL)

    def has_ended() -> bool:
        stat = Path("/proc") / (tmp_path / "began").read_text() / "stat"
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    work._start_copy([start_and_end])
    until(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text() != "" and has_ended())
    assert not (tmp_path / "made").exists()


def test_a_process_that_somebody_waited_for_has_ended(tmp_path: Path) -> None:
    work = SharedWork(tmp_path)
    work._start_copy([])
    (copy,) = work._copies
    os.waitpid(copy, 0)
    work.stop()
    assert work._copies == set()


def test_without_a_folder_nothing_is_shared(tmp_path: Path) -> None:
    work = SharedWork(tmp_path / "missing")
    assert work.once("a", True, lambda: 1) == work.once("a", True, lambda: 1) == 1


def test_a_cache_that_is_a_file_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.is_writable()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not cache.is_writable()


def test_only_a_process_with_several_threads_is_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(shared_work, "COPY_BYTES", 2**20)
    for threads, pieces, copies in ((1, 9, 0), (2, 9, 1), (8, 9, 3), (8, 2, 2), (8, 0, 0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert copy_count(pieces) == copies
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for owner, name in ((torch.cuda, "is_initialized"), (torch.distributed, "is_initialized")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda: True)
            assert copy_count(9) == 0
    monkeypatch.setattr(shared_work, "host_memory", lambda: 2**20)  # of a container
    assert copy_count(9) == 0


@pytest.mark.slow
def test_traces_of_a_search_are_those_of_one_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search changes what Python and torch's compiler do with garbage, which may hold tensors."""
    monkeypatch.setattr(profiler, "cached", lambda key, make: make())
    job, plan = cases.job("llama"), tightfit.Plan(precision="bf16-mixed", compile="block", chunked_loss=32)

    def traces() -> list[object]:
        own = profiler.Profiler(job, "cuda")
        return [to_content(own.recorded_step(plan, size, sizes=(size, size))[0]) for size in (8, 1, 2)]

    alone = traces()
    with _infrequent_gc(), keeping_compilations():
        assert traces() == alone


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["rtx-4090", pytest.param("h100-sxm:8", marks=pytest.mark.slow)])
def test_a_helped_search_finds_the_same_plan(
    machine: str, one_copy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cases.job("llama").replace(train=tightfit.Train(batch=64, steps=100_000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "helped"))
    example = profiler.example_batch
    monkeypatch.setattr(profiler, "example_batch", lambda job: (example(job)[0], 0.0))  # in place of measured seconds
    made: list[int] = []
    trace = profiler.Profiler._trace
    monkeypatch.setattr(profiler.Profiler, "_trace", lambda *args: (made.append(1), trace(*args))[1])
    helped = search(job, Machine.named(machine))
    files = len(list((tmp_path / "helped").rglob("*.json")))
    assert len(made) < files  # a copy made the others
    monkeypatch.setattr(ahead, "copy_count", lambda pieces: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    alone = search(job, Machine.named(machine))
    assert [one.plan for one in helped] == [one.plan for one in alone]
    assert [one.time.step_s for one in helped] == [one.time.step_s for one in alone]
    assert [one.peak_bytes for one in helped] == [one.peak_bytes for one in alone]


def test_sizes_ahead_are_those_that_are_never_interpolated(tmp_path: Path) -> None:
    known = profiler.Profiler(cases.job("llama", batch=32), "cuda")
    mixed, narrow = tightfit.Plan(precision="bf16-mixed", micro_batch=8), tightfit.Plan(precision="bf16-true")
    assert known._sizes_ahead(mixed, 8, 2) == {}, "no other process traces"
    known.shared_work = SharedWork(tmp_path, any_micro_batch=False)
    assert known._sizes_ahead(mixed, 8, 2) == {}, "the user has chosen the size"
    known.shared_work = SharedWork(tmp_path, any_micro_batch=True)
    assert known._sizes_ahead(mixed, 8, 2) == {4: False, 2: False, 1: True}
    assert known._sizes_ahead(mixed, 4, 0) == {2: False, 1: False}, "the loss has no chunks"
    for plan, samples in ((mixed, 32), (mixed, 1), (narrow, 8)):
        assert known._sizes_ahead(plan, samples, 2) == {}
