"""Efficiencies fitted to runs explain what was measured, and nothing more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests import tiny
from tests.report.test_run_folder import command
from tightfit.cost.entries import Message
from tightfit.cost.ledger import Ledger
from tightfit.machine import Figure, Machine
from tightfit.planner.estimator import Estimator, estimated_ledger
from tightfit.planner.fit_machine import TimedRun, fit_efficiencies, fit_machine
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing import fake_inputs
from tightfit.planner.tracing.profiler import Profiler
from tightfit.record import PeakBytes, Record

L4 = Machine.named("l4")
RECORD: dict[str, Any] = {
    "code": {}, "tokens_per_s": None, "samples_per_s": None, "peak_bytes": PeakBytes(), "mfu": None, "compile_s": None,
    "loss": [],
}  # fmt: skip


def ledgers() -> list[Ledger]:
    jobs = [tightfit.Job(
        model={"preset": preset}, data={"synthetic": "tokens", "sequence_length": 512}, train=tightfit.Train(batch=4, steps=1)
    ) for preset in ("gpt2", "bert-base")]  # fmt: skip
    plans = [tightfit.Plan(), tightfit.Plan(precision="bf16-mixed"), tightfit.Plan(recompute="full")]
    return [estimated_ledger(Profiler(job, "cuda"), plan, L4) for job in jobs for plan in plans]


@pytest.fixture(scope="module")
def estimated() -> list[Ledger]:
    return ledgers()


@pytest.mark.slow
def test_runs_as_fast_as_predicted_change_nothing(estimated: list[Ledger]) -> None:
    refined = fit_efficiencies(
        L4, [TimedRun(ledger, TimeModel(L4).step_time(ledger).step_s, L4) for ledger in estimated]
    )
    assert all(figure.value == pytest.approx(1.0) for figure in refined.efficiency.values())


@pytest.mark.slow
def test_a_machine_slower_than_its_figures_is_detected(estimated: list[Ledger]) -> None:
    true = L4.replace(
        efficiency={name: Figure(value=value, source="measured") for name, value in
                    (("compute", 0.8), ("memory", 0.6), ("launch", 1.0))}
    )  # fmt: skip
    seen = [TimedRun(ledger, TimeModel(true).step_time(ledger).step_s, L4) for ledger in estimated]
    refined = fit_efficiencies(L4, seen)
    before, after = (
        max(abs(TimeModel(machine).step_time(one.ledger).step_s / one.seconds - 1) for one in seen)
        for machine in (L4, refined)
    )
    assert before > 0.2
    assert after < 0.06
    assert refined.efficiency["memory"].value < 0.75


@pytest.mark.slow
def test_links_at_half_of_their_figures_are_detected(estimated: list[Ledger]) -> None:
    """Some runs send much and others nothing; messages that overlap with work say nothing about
    links."""
    sends = Message("activations", bytes=2e9, bytes_per_s=2e10, overlaps=False, latency_s=1e-3)
    seen_by = [replace(ledger, messages=(sends.times(share),)) for ledger in estimated for share in (0.0, 0.3, 1.0)]
    true = L4.replace(efficiency={"link": Figure(value=0.5, source="measured")})
    refined = fit_efficiencies(
        L4, [TimedRun(ledger, TimeModel(true).step_time(ledger).step_s, L4) for ledger in seen_by]
    )
    assert refined.efficiency["link"].value == pytest.approx(0.5, rel=0.15)
    assert all(refined.efficiency[name].value == pytest.approx(1.0, rel=0.1) for name in ("compute", "memory"))


@pytest.mark.slow
def test_one_slow_run_changes_efficiencies_within_bounds(estimated: list[Ledger]) -> None:
    seconds = TimeModel(L4).step_time(estimated[0]).step_s
    refined = fit_efficiencies(L4, [TimedRun(estimated[0], 100 * seconds, L4)])
    assert all(0.2 < figure.value < 5 for figure in refined.efficiency.values())


def test_a_record_of_processes_is_fitted_to_their_machine_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one processor have half of its rates each: a run that takes the predicted
    time changes nothing. Waits of a pipeline are ignored."""
    monkeypatch.setattr(fake_inputs, "_seconds_per_sample", lambda job, source: 0.0)  # which is timed anew for each
    machine = Machine.detect().replace(process_bytes_per_s=Figure(value=1e9, source="measured"))
    job = tightfit.Job(
        model={"architecture": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 256},
        data={"synthetic": "tokens", "sequence_length": 64},
        train=tightfit.Train(batch=4, steps=3),
    )
    two, plan = machine.per_process(2), tightfit.Plan(dp_replicate=2)
    seconds = Estimator(job, two).estimate(plan).time.step_s

    def record(plan: tightfit.Plan, seconds: float) -> Record:
        return Record(job=job.content(), plan=plan, machine=two, step_s=[seconds] * 3, **RECORD)

    for records in ([record(plan, seconds)], [record(plan, seconds), record(tightfit.Plan(pp=2, micro_batch=1), 9.0)]):
        found = fit_machine(machine, records).efficiency
        assert all(figure.value == pytest.approx(1.0) for figure in found.values())


@pytest.mark.slow
def test_records_are_read_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert command(monkeypatch, "train", str(tiny.write(tmp_path)), "--plan", "reference", "--out", str(out)) == 0
    capsys.readouterr()
    assert command(monkeypatch, "machine", "--record", str(out / "record.json"), "--json") == 0
    efficiency = json.loads(capsys.readouterr().out)["efficiency"]
    assert efficiency.keys() == {"compute", "memory", "launch", "link"}
    assert Machine.detect().efficiency.keys() == efficiency.keys()  # kept
    for arguments in (
        ("machine", "--record", str(tmp_path / "none.json")),
        ("machine", "l4", "--record", str(out / "record.json")),
    ):
        assert command(monkeypatch, *arguments) == 2
