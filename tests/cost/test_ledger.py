"""Estimates, dry runs and measurements of the same plan agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tests.sweeps import part, spread
from tightfit.cost.recorded_step import replay
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.profiler import Profiler
from tightfit.planner.tracing.recorder import Recorder

MACHINE = Machine.detect()
PLANS: list[dict[str, Any]] = [
    {},
    {"micro_batch": 2},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true", "rounding": "kahan", "micro_batch": 4},
    {"recompute": "full", "precision": "bf16-mixed"},
    {"recompute": "selective"},
    {"recompute": "selective-2", "precision": "bf16-mixed"},
    {"recompute": "every-2", "precision": "bf16-true"},
    {"update_in_backward": True},
    {"states": "8-bit"},
    {"fused_optimizer": True, "materialize": "device"},
]


@pytest.fixture(scope="module")
def profilers() -> dict[str, Profiler]:
    return {name: Profiler(cases.job(name), "cpu") for name in cases.NAMES}


def estimated(profilers: dict[str, Profiler], name: str, fields: dict[str, Any]) -> float:
    return estimated_ledger(profilers[name], tightfit.Plan(**fields), MACHINE).peak().total


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "fields"), spread(cases.NAMES, PLANS, 8))
def test_estimate_agrees_with_the_dry_run(name: str, fields: dict[str, Any], profilers: dict[str, Profiler]) -> None:
    if name == "convolutions" and "recompute" in fields:
        with pytest.raises(InputError, match="no repeated blocks"):
            dry_run(cases.job(name), tightfit.Plan(**fields))
        return
    dry = dry_run(cases.job(name), tightfit.Plan(**fields))
    assert estimated(profilers, name, fields) == pytest.approx(dry.total, rel=0.02)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("name", "fields"),
    spread(cases.NAMES, [{}, {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 4}], 4),
)
def test_dry_run_agrees_with_the_real_run(name: str, fields: dict[str, Any]) -> None:
    if name == "convolutions" and "recompute" in fields:
        return
    plan = tightfit.Plan(**fields)
    run = build(cases.job(name), plan)
    steps = run.data.steps(0, None)
    for number in range(2):
        take_step(run, next(steps), number)
    _, measured = sample_step(run, next(steps), 2)
    assert dry_run(cases.job(name), plan).total == pytest.approx(measured.total, rel=0.02)


@pytest.mark.slow
def test_sqrt_recomputation_estimate_agrees_with_the_run(profilers: dict[str, Profiler]) -> None:
    plan = tightfit.Plan(recompute="sqrt")
    dry = dry_run(cases.job("llama"), plan).total
    assert estimated(profilers, "llama", {"recompute": "sqrt"}) == pytest.approx(dry, rel=0.02)


@pytest.mark.parametrize("micro_batch", part([2, 4, 8, 1], 2))
def test_a_chunked_loss_is_estimated_below_and_above_one_chunk(
    micro_batch: int, profilers: dict[str, Profiler]
) -> None:
    fields = {"chunked_loss": 128, "micro_batch": micro_batch}  # a chunk is four sequences
    dry = dry_run(cases.job("llama"), tightfit.Plan(**fields)).total
    assert estimated(profilers, "llama", fields) == pytest.approx(dry, rel=0.02)


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tracing_one_of_equal_chunks_equals_tracing_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has 8 chunks; on a processor the softmax takes each in two parts."""
    plan = tightfit.Plan(chunked_loss=128)
    job = cases.job("llama").replace(train=tightfit.Train(batch=32))
    short, peak = Profiler(job, device).ledger(plan), dry_run(job, plan, device)
    taken: list[int] = []

    def take_all(recorder: Recorder, of: Sequence[int]) -> Iterator[int]:
        taken.append(len(of))
        return iter(of)

    monkeypatch.setattr(Recorder, "deduplicate_loop", take_all)
    monkeypatch.setattr("tightfit.planner.dry_run.representative_iterations", iter)
    monkeypatch.setattr("tightfit.planner.tracing.profiler.cached", lambda what, make: make())
    whole = Profiler(job, device).ledger(plan)
    assert taken[0] == 8
    for one, other in zip(short.training, whole.training, strict=True):
        assert one.timeline.operations == other.timeline.operations
        assert replay(one.timeline, 32) == replay(other.timeline, 32)
    assert peak.rows == dry_run(job, plan, device).rows


@pytest.mark.sweep(8)
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_compiled_blocks_estimate_agrees_with_the_dry_run(
    fields: dict[str, Any], profilers: dict[str, Profiler]
) -> None:
    compiled = {**fields, "compile": "block"}
    dry = dry_run(cases.job("llama"), tightfit.Plan(**compiled)).total
    assert estimated(profilers, "llama", compiled) == pytest.approx(dry, rel=0.02)
    assert dry < estimated(profilers, "llama", fields)  # fused operations leave fewer buffers


@pytest.mark.slow
def test_a_deep_model_costs_one_line_per_block() -> None:
    shallow, deep = (
        Profiler(cases.job("llama").replace(model={**cases.SPECS["llama"], "num_hidden_layers": depth}), "cpu")
        for depth in (10, 20)
    )
    small, large = (estimated_ledger(one, tightfit.Plan(), MACHINE) for one in (shallow, deep))
    assert large.blocks == 20
    per_block = (large.peak().total - small.peak().total) / 10
    states = sum(p.bytes for p in large.parameters if ".layers.3." in p.name) * 3  # weights and two moments
    assert per_block > states
    dry = dry_run(deep.job, tightfit.Plan()).total
    assert large.peak().total == pytest.approx(dry, rel=0.005)


def test_mixed_precision_states_take_16_bytes_per_parameter(profilers: dict[str, Profiler]) -> None:
    ledger = estimated_ledger(profilers["llama"], tightfit.Plan(precision="bf16-mixed"), MACHINE)
    count = sum(parameter.count for parameter in ledger.parameters if parameter.trainable)
    rows = ledger.row_bytes()
    states = rows["parameters"] + rows["optimizer"] + ledger.gradient_bytes()
    assert states / count == pytest.approx(16, rel=0.01)  # 4 + 4 + 8: fp32 weights and gradients, two fp32 moments


@pytest.mark.slow
def test_llama_2_7b_has_the_published_weight_bytes() -> None:
    job = tightfit.Job(
        model={"preset": "llama-2-7b"},
        data={"synthetic": "tokens", "sequence_length": 128},
        train={"batch": 2, "steps": 1, "learning_rate": 1e-4},
    )
    profiler = Profiler(job, "cuda")
    half, single = (profiler.ledger(tightfit.Plan(precision=kind)) for kind in ("bf16-true", "fp32"))
    assert half.row_bytes()["parameters"] / 1e9 == pytest.approx(13.5, abs=0.1)
    assert single.row_bytes()["parameters"] / 1e9 == pytest.approx(27.0, abs=0.2)


def test_an_evaluation_takes_less_memory_than_a_step(profilers: dict[str, Profiler]) -> None:
    phases = estimated_ledger(profilers["gpt2"], tightfit.Plan(), MACHINE).peaks()
    assert phases["evaluation"] < phases["forward"] <= max(phases["forward"], phases["backward"])


def gradient_sum_bytes(profiler: Profiler, plan: tightfit.Plan, machine: Machine = MACHINE) -> float:
    """Bytes that a step reads and writes to sum the gradients of its micro-batches."""
    sums = estimated_ledger(profiler, plan, machine).gradient_sums()
    return sum(one.bytes_accessed.at(1) * one.count.at(1) for one in sums)


def test_each_later_micro_batch_adds_its_gradients(profilers: dict[str, Profiler]) -> None:
    profiler, batch = profilers["llama"], profilers["llama"].job.train.batch
    gradients = estimated_ledger(profiler, tightfit.Plan(), MACHINE).gradient_bytes()
    assert gradient_sum_bytes(profiler, tightfit.Plan()) == 0
    for count in (2, 4):  # both terms of a sum are read, and it is written
        assert gradient_sum_bytes(profiler, tightfit.Plan(micro_batch=batch // count)) == 3 * gradients * (count - 1)


def test_the_time_of_micro_batches_contains_the_sums(profilers: dict[str, Profiler]) -> None:
    ledger = estimated_ledger(profilers["llama"], tightfit.Plan(micro_batch=1), MACHINE)
    clock = TimeModel(MACHINE)
    without = clock.step_time(replace(ledger, offloads_gradients=True))
    sums_s = sum(clock.operation_s(one, 1) * one.count.at(1) for one in ledger.gradient_sums())
    assert clock.step_time(ledger).memory_s == pytest.approx(without.memory_s + sums_s, rel=1e-9)


def test_reduced_gradients_are_summed_as_shards(profilers: dict[str, Profiler]) -> None:
    profiler, several = profilers["llama"], MACHINE.replace(devices_per_node=2)
    full = gradient_sum_bytes(profiler, tightfit.Plan(micro_batch=1, dp_replicate=2), several)
    for zero, sync, share in ((2, "step", 1.0), (2, "micro-batch", 0.5), (3, "micro-batch", 0.5), (3, "step", 1.0)):
        plan = tightfit.Plan(micro_batch=1, dp_shard=2, zero=zero, gradient_sync=sync)
        assert gradient_sum_bytes(profiler, plan, several) == pytest.approx(share * full, rel=0.02), (zero, sync)
