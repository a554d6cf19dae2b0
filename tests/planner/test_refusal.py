"""A search refuses only if no plan fits, and names remedies; a failed dry run is no refusal."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests.planner import cases
from tightfit.__main__ import main
from tightfit.errors import DoesNotFit, Untraceable
from tightfit.machine import Machine
from tightfit.planner import finalists
from tightfit.planner.candidates import is_legal
from tightfit.planner.defaults import complete
from tightfit.planner.dry_run import dry_run, dry_run_bytes
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import leanest
from tightfit.planner.search import search
from tightfit.report.commands import explain_command

GPU = Machine.named("a100-80gb")


@pytest.mark.slow
def test_a_failed_dry_run_does_not_count_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that compile cannot be confirmed: the fastest of the others is chosen, and the rest
    carry the reason."""

    def failing(job: tightfit.Job, plan: tightfit.Plan, *arguments: Any) -> Any:
        if plan.compile != "none":
            raise Untraceable("job: model", "fails on fake tensors", "run it")
        return dry_run_bytes(job, plan, *arguments)

    monkeypatch.setattr(finalists, "dry_run_bytes", failing)
    job = cases.job("llama").replace(train=tightfit.Train(batch=4, steps=100_000_000))
    chosen, *others = search(job, GPU)
    assert chosen.plan.compile == "none"
    assert chosen.fits
    assert not chosen.not_confirmed
    reasons = [one.rejected_because for one in others if one.plan.compile != "none" and one.fits]
    assert any("not confirmed" in reason for reason in reasons)


@pytest.mark.slow
def test_without_a_dry_run_the_estimate_is_marked_unconfirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> Any:
        raise Untraceable("job: model", "fails on fake tensors", "run it")

    monkeypatch.setattr(finalists, "dry_run_bytes", fail)
    path = tmp_path / "job.yaml"
    path.write_text(cases.job("llama").to_yaml())
    explain_command(path, None, "a100-80gb", None, 3, False, None, [], True)
    said = json.loads(capsys.readouterr().out)
    chosen = said["plans"][said["chosen"]]
    assert chosen["fits"]
    assert chosen["not_confirmed"] == "fails on fake tensors"
    explain_command(path, None, "a100-80gb", None, 3, False, None, [], False)
    assert "not confirmed, its dry run failed" in capsys.readouterr().out


QWEN: dict[str, Any] = {
    "architecture": "qwen2", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000,
}  # fmt: skip


def small(memory: float | None = None, **fields: Any) -> tightfit.Job:
    given: dict[str, Any] = {"allow": [], "train": tightfit.Train(batch=8, steps=10), **fields}
    data = {"synthetic": "tokens", "sequence_length": 256, "samples": 64}
    limits = {} if memory is None else {"memory": round(memory)}
    return tightfit.Job(model=QWEN, data=data, limits=limits, **given)


def needed(one: Estimate) -> float:
    return one.peak_bytes + one.margin_bytes


@pytest.mark.parametrize(
    "fields",
    [
        {"compile": "block", "recompute": "full", "micro_batch": 2},
        {"compile": "block", "recompute": "sqrt"},
        pytest.param({"compile": "model", "recompute": "selective-2"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_compiled_recomputation_estimate_agrees_with_dry_run(fields: dict[str, Any]) -> None:
    """Every allocated buffer is freed once: no row is ever negative."""
    estimator = Estimator(small(), GPU)
    one = estimator.estimate(tightfit.Plan(**fields))
    found = dry_run(small(), one.plan, "cuda")
    assert one.peak.total - one.peak.rows["runtime"] == pytest.approx(found.total, rel=0.02)
    instants = [rows for _, _, rows in one.ledger.instants()]
    little = 128 * 1024  # a mask, and positions, which all blocks share; what a block is called with is larger
    assert min(min(rows.values()) for rows in instants) > -little
    assert instants[-1]["activations"] < little


@pytest.mark.slow
def test_a_slightly_too_large_estimate_gets_a_dry_run() -> None:
    pins = {"compile": "block", "recompute": "selective", "micro_batch": None}
    estimator = Estimator(small(), GPU)
    start, _ = complete(small(), GPU, pins)
    one = estimator.include_allocator(estimator.estimate(start))
    dry = dry_run(small(), start, "cuda").total + one.peak.rows["runtime"] + one.peak.rows["allocator"]
    confirmed = replace(one, dry_run_bytes=dry)
    assert dry < 0.999 * one.peak_bytes, "the estimate is as the dry run: nothing is shown"
    limit = (needed(one) + needed(confirmed)) / 2
    chosen, *_ = search(small(limit, plan=pins), GPU, {**pins, "update_in_backward": False})
    assert chosen.dry_run_bytes is not None
    assert chosen.fits


@pytest.mark.slow
def test_allocator_overhead_decides_between_similar_lean_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run is too short for compiling to pay, so the search starts from a plan without it."""
    job = small(memory=1.1e6)
    estimator = Estimator(job, GPU)
    start, _ = complete(job, GPU, {"compile": "none"})
    settle = estimator.include_allocator

    def settled(one: Estimate) -> Estimate:
        found = settle(one)
        more = 0.05 * found.peak.total if one.plan.compile == "none" else 0.0
        return (
            found if one.includes_allocator else replace(found, peak=replace(found.peak, total=found.peak.total + more))
        )

    monkeypatch.setattr(estimator, "include_allocator", settled)
    least = leanest(estimator, start, {"precision": "fp32"})
    assert least is not None
    assert least.plan.compile == "block"
    assert least.includes_allocator


def all_plans(estimator: Estimator, start: tightfit.Plan) -> list[Estimate]:
    """Estimates of all legal plans that differ from `start` in what trades memory for time, each as it will be."""
    options: dict[str, tuple[Any, ...]] = {
        "precision": ("fp32", "tf32", "bf16-mixed", "bf16-true"),
        "rounding": ("nearest", "kahan"),
        "states": ("fp32", "bf16", "8-bit"),
        "recompute": ("none", "selective", "selective-2", "every-2", "full", "sqrt"),
        "micro_batch": (None, 2, 1),
        "update_in_backward": (False, True),
        "chunked_loss": (start.chunked_loss, None),
    }
    plans = [
        start.replace(**dict(zip(options, values, strict=True))) for values in itertools.product(*options.values())
    ]
    return [
        estimator.estimate(plan)
        for plan in plans
        if is_legal(plan, estimator.job, "cuda") and (plan.precision, plan.rounding) != ("bf16-true", "nearest")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("allow", [[], ["bf16", "8-bit-states"]])
def test_a_refusal_is_checked_against_all_plans(allow: list[str]) -> None:
    """No plan of the whole list needs less than the refusal says; with as much as the leanest of them needs, search finds one."""
    job, pins = small(allow=allow), {"compile": "none"}
    estimator = Estimator(job, GPU)
    start, _ = complete(job, GPU, pins)
    least = min(map(needed, map(estimator.include_allocator, sorted(all_plans(estimator, start), key=needed)[:40])))
    fixed = estimator.runtime_bytes
    assert search(small(fixed + 1.001 * (least - fixed), allow=allow), GPU, pins)[0].fits
    with pytest.raises(DoesNotFit) as refused:
        search(small(fixed + 0.98 * (least - fixed), allow=allow), GPU, pins)
    assert refused.value.content is not None
    assert refused.value.content["plans"][0]["memory"]["peak"] <= 1.001 * least


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_each_remedy_does_what_it_says(every: bool) -> None:
    """The limit is too small for the saved activations: remedies that are said to fit do fit once
    the job allows them, and the others do not. A pinned field stays fixed until it is left open."""
    pins = {"compile": "none", "recompute": "none", "micro_batch": 4}
    estimator = Estimator(small(), GPU)
    start, _ = complete(small(), GPU, pins)
    limit = needed(estimator.include_allocator(estimator.estimate(start.replace(recompute="full")))) * 1.001
    with pytest.raises(DoesNotFit) as refused:
        search(small(limit), GPU, pins)
    content = refused.value.content
    assert content is not None
    remedies = {one["change"]: one for one in content["remedies"]}
    assert remedies["plan.recompute: full in place of none"]["fits"]
    assert {"allow bf16-states", "allow 8-bit-states"} & remedies.keys()
    for change, one in remedies.items():
        assert f"{change}: " in str(refused.value)
        if every and change.startswith("allow "):
            allowing = small(limit, allow=change.removeprefix("allow ").split(", "))
            try:
                assert search(allowing, GPU, pins)[0].fits == one["fits"]
            except DoesNotFit:
                assert not one["fits"]
    del pins["recompute"]
    assert search(small(limit), GPU, pins)[0].fits


@pytest.mark.slow
@pytest.mark.sweep(16)
@pytest.mark.parametrize("longest", [64, 128, 256, 512])
def test_a_refusal_names_the_longest_sequence_that_fits(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lengths are tried, and each is estimated as by a new estimator."""
    plan = tightfit.Plan(micro_batch=4)

    def job(length: int, memory: float | None = None) -> tightfit.Job:
        data = {"synthetic": "tokens", "sequence_length": length, "samples": 64}
        return small(memory).replace(data=tightfit.Job(model=QWEN, data=data).data)

    def bytes_with(length: int) -> float:
        estimator = Estimator(job(length), GPU)
        return needed(estimator.include_allocator(estimator.estimate(plan)))

    limit = (bytes_with(longest) + bytes_with(2 * longest)) / 2
    tried: list[int] = []
    made = Estimator.with_data

    def with_data(estimator: Estimator, **fields: Any) -> Estimator:
        tried.append(fields["sequence_length"])
        other = made(estimator, **fields)
        fresh = Estimator(other.job, GPU)
        one, alone = (each.estimate(plan) for each in (other, fresh))
        assert (one.peak, one.time.rows, one.host) == (alone.peak, alone.time.rows, alone.host)
        return other

    monkeypatch.setattr(Estimator, "with_data", with_data)
    with pytest.raises(DoesNotFit) as refused:
        search(job(1024, limit), GPU, plan.content())
    assert f"data.sequence_length: {longest}: " in str(refused.value)
    assert len(tried) <= 3
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("command", [["explain", "--machine", "a100-80gb"]])
def test_a_refusal_is_printed_as_json_and_ends_with_3(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(small(0.51 * 2**30).to_yaml())
    monkeypatch.setattr(
        sys, "argv", ["tightfit", command[0], str(path), *command[1:], "--set", "plan.compile=none", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["chosen"] is None
    assert said["margin_bytes"] > 0
    lacks = said["lacks"]["memory"]
    assert lacks["available_bytes"] == round(0.51 * 2**30)
    assert lacks["needed_bytes"] == said["plans"][0]["memory"]["peak"]
    assert lacks["needed_bytes"] + said["margin_bytes"] > lacks["available_bytes"]
    assert said["plans"][0]["plan"]["compile"] == "none"
    assert {"change", "needed", "fits", "plan"} == said["remedies"][0].keys()
    for words in ("DoesNotFit", "at least", "safety margin", "are available", "leanest plan", "what would help"):
        assert words in printed.err


@pytest.mark.slow
def test_the_leanest_plan_accepts_a_micro_batch_of_the_share() -> None:
    """With 8 samples on 8 devices a micro-batch of 1 is a device's whole share."""
    job = small(allow=["bf16", "8-bit-states", "stochastic-rounding"])
    machine = Machine.named("h100-sxm:8")
    estimator = Estimator(job, machine)
    for pins in ({"compile": "none", "micro_batch": 1}, {"compile": "none"}):
        start, _ = complete(job, machine, pins)
        found = leanest(estimator, start, pins)
        assert found is not None
        assert found.plan.recompute != "none"
