"""Search finds the fastest plan that fits, says why the others lost, and names remedies if none
fits."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

import tightfit
from tests.planner import cases
from tightfit.achieved_rates import achieved
from tightfit.errors import DoesNotFit, InputError
from tightfit.job import ModelSpec
from tightfit.machine import Figure, Machine
from tightfit.models import model_config, with_fewer_blocks
from tightfit.planner import finalists, intervals
from tightfit.planner import search as searching
from tightfit.planner.candidates import candidates
from tightfit.planner.defaults import FEW_BLOCKS, complete
from tightfit.planner.dry_run import dry_run, dry_run_bytes
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import leanest
from tightfit.planner.search import search
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing import fake_inputs, fake_model
from tightfit.planner.waterfall import waterfall
from tightfit.report.commands import explain_command
from tightfit.report.explain import show
from tightfit.report.figures import draw_memory, draw_timeline
from tightfit.runtime import fake_compiler
from tightfit.units import format_bytes

GPU = Machine.named("a100-80gb")


@pytest.fixture(autouse=True)
def _samples_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long samples take to prepare is measured, and differs from search to search."""
    monkeypatch.setattr(fake_inputs, "_seconds_per_sample", lambda *arguments: 0.0)


def limited(memory: float, name: str = "llama") -> tightfit.Job:
    return cases.job(name).replace(limits=tightfit.Limits(memory=int(memory)))


@pytest.mark.slow
def test_search_says_which_option_it_could_not_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: str) -> tuple[int, int]:
        raise AttributeError("no such limit")

    monkeypatch.setattr(fake_compiler, "inductor_read_limits", fail)
    spec = {**cases.SPECS["llama"], "intermediate_size": 72}  # a model of its own, so that no trace of it is known
    job = cases.job("llama").replace(model=spec)
    job = job.replace(train=job.train.replace(steps=100_000))
    chosen, *others = search(job, GPU)
    assert chosen.plan.compile == "none"
    assert not any(one.untraceable for one in others)
    (said,) = (line for line in chosen.advice if line.startswith("compile: block: model fails on fake tensors: "))
    assert said.endswith("The search did not consider this option")
    show(Console(width=400), [chosen], [])
    assert "compile: block: model fails" in capsys.readouterr().out


def test_search_gives_the_fastest_plan_and_why_others_lost() -> None:
    first, *others = search(cases.job("llama"), GPU)
    assert first.fits
    assert first.dry_run_bytes is not None
    assert first.rejected_because == ""
    assert others
    assert all(one.rejected_because for one in others)
    assert all(one.total_s >= first.total_s for one in others if one.fits)


@pytest.mark.slow
def test_a_tight_limit_gives_a_leaner_plan_within_it() -> None:
    free = search(cases.job("llama"), GPU, {"states": "fp32"})[0]
    leaner = search(limited(free.peak_bytes - 2e6), GPU, {"states": "fp32"})[0]
    assert leaner.peak_bytes <= free.peak_bytes - 2e6
    assert leaner.plan != free.plan


@pytest.mark.parametrize(("kernel", "tried"), [("sdpa", False), ("eager", True)])
def test_attention_alone_is_recomputed_if_it_saves_scores(kernel: str, tried: bool) -> None:
    """A fused kernel saves none."""
    job = cases.job("llama")
    job = job.replace(model={**job.model.content(), "attn_implementation": kernel})
    plans = [plan for same in candidates(Estimator(job, GPU), tightfit.Plan(), {}) for plan in same]
    assert ("attention" in {plan.recompute for plan in plans}) is tried


def test_pins_are_kept() -> None:
    chosen = search(cases.job("llama"), GPU, {"precision": "fp32", "micro_batch": 2, "compile": "none"})[0]
    assert (chosen.plan.precision, chosen.plan.micro_batch) == ("fp32", 2)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_tf32_units_save_time_and_no_memory(name: str) -> None:
    job, wide = cases.job(name).replace(allow=["tf32"]), tightfit.Plan()
    estimator = Estimator(job, GPU)
    single, narrow = estimator.estimate(wide), estimator.estimate(wide.replace(precision="tf32"))
    assert single.time.compute_s > 1.2 * narrow.time.compute_s
    assert single.peak.rows == narrow.peak.rows
    old = Estimator(job, Machine.named("v100-32gb"))
    assert old.estimate(wide).time.step_s == old.estimate(wide.replace(precision="tf32")).time.step_s


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "precision"), [("bert", "mixed"), ("llama", "true")])
def test_fp16_has_its_own_rate_without_bf16_units(name: str, precision: str) -> None:
    """A V100 multiplies fp16 eight times as fast as fp32, and bf16 as slowly."""
    job = cases.job(name).replace(allow=["fp16", "bf16"])
    plans = {kind: tightfit.Plan(precision=kind) for kind in ("fp32", f"fp16-{precision}", f"bf16-{precision}")}
    times = {}
    for device in ("v100-32gb", "a100-80gb"):
        estimator = Estimator(job, Machine.named(device))
        wide, half, brain = (estimator.estimate(plan) for plan in plans.values())
        assert half.peak.rows["activations"] == brain.peak.rows["activations"]
        times[device] = [one.time.compute_s for one in (wide, half, brain)]
    wide_s, half_s, brain_s = times["v100-32gb"]
    assert half_s < 0.5 * wide_s
    assert brain_s > 0.9 * wide_s
    assert times["a100-80gb"][1] == times["a100-80gb"][2]


def test_fp16_on_a_measured_cpu_has_its_measured_rate() -> None:
    figures = {
        name: Figure(value=value, source="measured") for name, value in (("fp32", 1e11), ("bf16", 4e11), ("fp16", 1e9))
    }
    rates = {"product/float32": {64: 1e11}, "product/bfloat16": {64: 3e11}, "elementwise/bfloat16": {64: 2e10}}
    machine = Machine.detect().replace(matrix_flops_per_s=figures, rates=rates)
    assert achieved(machine, "product", "float16", 64) == pytest.approx(3e11 / 400)
    assert achieved(machine, "elementwise", "float16", 64) == 2e10


@pytest.mark.parametrize(
    ("device", "allow", "precision"),
    [
        ("a100-80gb", ["tf32"], "tf32"),
        ("v100-32gb", ["tf32"], "fp32"),
        ("v100-32gb", ["bf16"], "fp32"),
        ("v100-32gb", ["fp16"], "fp16-mixed"),
        ("a100-80gb", [], "fp32"),
    ],
)
def test_search_starts_from_the_fastest_allowed_precision(device: str, allow: list[str], precision: str) -> None:
    assert complete(cases.job("bert").replace(allow=allow), Machine.named(device), {})[0].precision == precision


@pytest.mark.slow
def test_chunked_loss_is_chosen_for_speed_or_memory() -> None:
    job = cases.job("llama")
    pins = {"recompute": "none", "micro_batch": None, "update_in_backward": False, "states": "fp32"}
    estimator = Estimator(job, GPU)
    free = search(job, GPU, pins, estimator)[0]
    chunk = complete(job, GPU, {})[0].chunked_loss
    assert chunk is not None
    same = estimator.estimate(free.plan.replace(chunked_loss=chunk))
    assert free.plan.chunked_loss is None
    assert free.time.step_s < same.time.step_s
    assert same.peak_bytes < free.peak_bytes
    short = search(limited(same.peak_bytes + 1e6), GPU, pins)
    assert short[0].plan.chunked_loss == chunk
    assert any(one.plan == free.plan and one.rejected_because.startswith("needs") for one in short)
    assert search(job, GPU, {"chunked_loss": 1024})[0].plan.chunked_loss == 1024


@pytest.mark.slow
def test_tf32_is_chosen_if_casts_cost_more_than_they_save() -> None:
    job = cases.job("bert").replace(allow=["bf16"])
    estimator = Estimator(job, GPU)
    chosen = search(job, GPU, None, estimator)[0]
    mixed = estimator.estimate(chosen.plan.replace(precision="bf16-mixed"))
    assert chosen.plan.precision == "tf32"
    assert chosen.total_s < mixed.total_s
    assert search(job, GPU, {"precision": "bf16-mixed"})[0].plan.precision == "bf16-mixed"


@pytest.mark.slow
def test_a_refusal_names_the_largest_rows_and_remedies() -> None:
    with pytest.raises(DoesNotFit, match="largest: runtime") as error:
        search(limited(2**21), GPU)
    assert "kept free as a safety margin, 2 MiB are available" in str(error.value)
    assert "which this machine has" in str(error.value)


@pytest.mark.parametrize("machine", [GPU, Machine.detect()], ids=["cuda", "here"])
def test_the_waterfall_ends_at_the_plan(machine: Machine) -> None:
    estimator = Estimator(cases.job("llama"), machine)
    plan = tightfit.Plan(precision="bf16-mixed", micro_batch=2, recompute="full")
    stages = waterfall(estimator, plan)
    assert [stage.method for stage in stages[1:]] == ["+ microbatch", "+ recompute", "+ precision"]
    assert stages[-1].peak_bytes == estimator.include_allocator(estimator.estimate(plan)).peak_bytes
    assert stages[-1].peak_bytes < stages[0].peak_bytes


@pytest.mark.slow
def test_a_refusal_describes_the_leanest_plan() -> None:
    """The weights alone exceed the memory: the stated need is that of full recomputation."""
    job = cases.job("llama").replace(
        limits=tightfit.Limits(memory=int(Estimator(cases.job("llama"), GPU).runtime_bytes))
    )
    with pytest.raises(DoesNotFit, match="needs") as refused:
        search(job, GPU, {"compile": "none", "update_in_backward": False})
    assert "recompute=full" in str(refused.value)
    assert f"micro_batch={1}" in str(refused.value)


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize(("steps", "worth"), [(3, False), (100_000_000, True)])
def test_compiling_is_tried_only_for_long_runs(steps: int, worth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cases.job("llama").replace(train=tightfit.Train(batch=4, steps=steps))
    looked_at: list[str] = []
    estimate = Estimator.estimate
    monkeypatch.setattr(
        Estimator, "estimate", lambda self, plan: looked_at.append(plan.compile) or estimate(self, plan)
    )
    chosen = search(job, GPU)[0]
    assert ("block" in looked_at) is worth
    assert (chosen.plan.compile == "block") is worth


def test_a_search_delays_and_restores_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    before, within = gc.get_threshold(), []
    monkeypatch.setattr(
        finalists, "dry_run_bytes", lambda *arguments: within.append(gc.get_threshold()) or dry_run_bytes(*arguments)
    )
    search(cases.job("llama"), GPU, {"compile": "none"})
    assert within == [searching.GC_THRESHOLDS]
    assert gc.get_threshold() == before


@pytest.mark.slow
@pytest.mark.sweep(12)
@pytest.mark.parametrize(("off", "asked"), [(0.0, [6]), (0.002, [6]), (0.01, [6, 8, 9])])
def test_a_deep_model_is_dry_run_whole_if_a_few_blocks_differ(
    off: float, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a model of a few blocks is compared with its estimate."""
    job = cases.job("llama")
    job = job.replace(model={**job.model.content(), "num_hidden_layers": 9})
    depths: list[int] = []

    def noted(job: tightfit.Job, *arguments: Any) -> Any:
        depths.append(model_config(job.model).num_hidden_layers)
        return dry_run_bytes(job, *arguments)

    estimated = Estimator.peak_with_blocks
    monkeypatch.setattr(finalists, "dry_run_bytes", noted)
    monkeypatch.setattr(Estimator, "peak_with_blocks", lambda *arguments: (1 + off) * estimated(*arguments))
    best = search(job, GPU, {"compile": "none"})[0]
    assert depths == asked
    share = 1 / (1 + off) if len(asked) == 1 else 1.0  # of the estimate, that of six blocks
    runtime = best.peak.rows["runtime"]
    assert best.dry_run_bytes is not None
    assert best.dry_run_bytes - runtime == pytest.approx((best.peak.total - runtime) * share, rel=1e-3)


@pytest.mark.slow
def test_few_blocks_show_the_excess_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run of every depth exceeds its estimate by the same bytes."""
    job, more, depths = cases.job("llama"), 2**30, list[int]()
    job = job.replace(model={**job.model.content(), "num_hidden_layers": 9})

    def noted(job: tightfit.Job, *arguments: Any) -> Any:
        depths.append(model_config(job.model).num_hidden_layers)
        return dry_run_bytes(job, *arguments) + more

    monkeypatch.setattr(finalists, "dry_run_bytes", noted)
    best = search(job, GPU, {"compile": "none"})[0]
    assert depths == [6, 8]
    assert best.dry_run_bytes == pytest.approx(best.peak.total + more, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "asked"), [(0, [4, 6]), (2**24, [4, 6, 14])])
def test_a_deep_compiled_model_is_dry_run_at_two_depths(
    more: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They show the peak of all blocks, unless they contradict the estimate."""
    depths: list[int] = []
    job = tightfit.Job(
        model={"architecture": "gpt2", "n_layer": 14, "n_embd": 64, "n_head": 2, "vocab_size": 512},
        data={"synthetic": "tokens", "sequence_length": 64},
        train=tightfit.Train(batch=8, steps=10),
    )

    def noted(job: tightfit.Job, *arguments: Any) -> Any:
        depths.append(model_config(job.model).num_hidden_layers)
        return dry_run_bytes(job, *arguments) + more * (depths[-1] < 14)

    monkeypatch.setattr(finalists, "dry_run_bytes", noted)
    best = search(job, GPU, {"compile": "model", "micro_batch": 8, "recompute": "none"})[0]
    assert depths == asked
    beside = best.peak.rows["runtime"] + best.peak.rows.get("allocator", 0.0)
    assert best.dry_run_bytes == pytest.approx(dry_run_bytes(job, best.plan, "cuda") + beside, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3-70b", "qwen2.5-1.5b", "t5-3b"])
def test_a_deep_model_is_dry_run_with_few_blocks(name: str) -> None:
    config = model_config(with_fewer_blocks(ModelSpec(preset=name), FEW_BLOCKS))
    assert config.num_hidden_layers == FEW_BLOCKS
    assert config.hidden_size == model_config(ModelSpec(preset=name)).hidden_size


@pytest.mark.slow
def test_recomputation_and_slower_machines_take_longer() -> None:
    job = tightfit.Job(
        model={"preset": "gpt2"},
        data={"synthetic": "tokens", "sequence_length": 512},
        train=tightfit.Train(batch=8, steps=4),
    )
    plain, again = (
        Estimator(job, GPU).estimate(tightfit.Plan(recompute=kind)).time.step_s for kind in ("none", "full")
    )
    assert 1.1 * plain < again < 1.6 * plain
    slower = Estimator(job, Machine.named("t4")).estimate(tightfit.Plan())
    assert slower.time.step_s > plain
    assert isinstance(TimeModel(GPU).step_time(slower.ledger).step_s, float)


def test_the_picture_has_a_layer_for_each_row(tmp_path: Path) -> None:
    estimate = Estimator(cases.job("llama"), GPU).estimate(tightfit.Plan())
    draw_memory(estimate, tmp_path / "memory.svg")
    shown = {row for _, _, rows in estimate.ledger.instants() for row, size in rows.items() if size}
    shown |= {row for row, size in estimate.peak.rows.items() if size}  # also what the allocator reserves
    assert (tmp_path / "memory.svg").read_text().count('id="FillBetweenPolyCollection_') == len(shown)
    draw_memory(estimate, tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 900


def test_pictures_name_the_plan_the_peak_and_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    job = cases.job("llama")
    plan = tightfit.Plan(micro_batch=1, recompute="full", fused_optimizer=True, materialize="device", allocator="tuned")
    estimate = Estimator(job, GPU).estimate(plan)
    draw_memory(estimate, tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert "allocator=tuned)" in text
    assert f"peak {format_bytes(estimate.peak.total)} in {estimate.peak.phase}" in text
    assert f"{job.train.batch - 2} micro-batches not drawn" in text
    stages = Estimator(job, Machine.named("h100-sxm:2")).estimate(tightfit.Plan(pp=2, micro_batch=1))
    draw_timeline(stages.schedule, str(stages.plan), tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert "bubble: " in text
    assert text.count("% busy") == 2


def test_named_machines_are_found() -> None:
    machine = Machine.named("h100-sxm:8x4")
    assert (machine.devices_per_node, machine.nodes) == (8, 4)
    assert machine.rate("bf16-mixed") == pytest.approx(989e12 * 0.8)
    for name in ("h100-sxn", "h100-sxm:0", "h100-sxm:8by4"):
        with pytest.raises(InputError):
            Machine.named(name)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(cases.job("llama").to_yaml())
    return path


def explain(path: Path, plan: str | None, machine: str, memory: str | None, as_json: bool = False) -> None:
    explain_command(path, plan, machine, memory, 3, False, None, [], as_json)


def test_explain_says_after_how_many_steps_compiling_pays_off(capsys: pytest.CaptureFixture[str]) -> None:
    estimator = Estimator(cases.job("llama"), GPU)
    compiled = estimator.estimate(tightfit.Plan(compile="block"))
    stages = waterfall(estimator, compiled.plan)
    saved = stages[0].step_s - stages[1].step_s
    assert stages[1].method == "+ compile"
    show(Console(width=200), [compiled], stages)
    steps = f"{int(compiled.compile_s / saved) + 1:,}"
    assert f"to compile (made up for in {steps} steps)" in capsys.readouterr().out
    slower = replace(stages[1], step_s=2 * stages[0].step_s)
    show(Console(width=200), [compiled], [stages[0], slower])
    assert "made up" not in capsys.readouterr().out


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, (4, 4, 8)),
        ({"precision": "bf16-mixed"}, (4, 4, 8)),
        ({"precision": "bf16-true"}, (2, 2, 4)),
        ({"precision": "bf16-true", "rounding": "kahan"}, (2, 2, 10)),
        ({"micro_batch": 2}, (4, 4, 8)),
    ],
    ids=str,
)
def test_explain_shows_the_state_bytes_per_parameter(
    plan: dict[str, Any], expected: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    estimator = Estimator(cases.job("llama"), GPU)
    one = estimator.estimate(tightfit.Plan(**plan))
    assert tuple(one.bytes_per_parameter.values()) == pytest.approx(expected, abs=0.01)
    show(Console(width=200), [one], waterfall(estimator, one.plan))
    shown = capsys.readouterr().out
    assert f"{sum(expected)} bytes a parameter: parameters {expected[0]}, gradients {expected[1]}" in shown
    assert ("16-bit copy" in shown) == (one.plan.precision == "bf16-mixed")
    freed = estimator.estimate(tightfit.Plan(update_in_backward=True)).bytes_per_parameter
    assert freed["gradients"] < 2


def test_explain_prints_what_scripts_read(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain(job_file, None, "a100-80gb", None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    plan = said["plans"][said["chosen"]]
    assert plan["fits"]
    assert {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "temporaries",
        "communication",
        "runtime",
        "peak",
    } <= set(plan["memory"])
    assert {"compute_s", "memory_s", "communication_s", "bubble_s", "input_s", "step_s"} <= set(plan["time"])
    assert {"plan", "changes_math", "tokens_per_s", "mfu", "rejected_because"} <= set(plan)


def test_explain_reports_a_given_plan_that_does_not_fit(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DoesNotFit) as error:
        explain(job_file, "reference", "t4", "1MiB")
    assert error.value.exit_code == 3
    assert "does not fit" in capsys.readouterr().out


def test_explain_refuses_bad_picture_names_and_remote_analysis(job_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mem\.svg"):
        explain_command(job_file, None, None, None, 1, False, tmp_path / "mem.gif", [], False)
    with pytest.raises(InputError, match="runs on this machine"):
        explain_command(job_file, None, "t4", None, 1, True, None, [], False)


def test_plans_that_the_engine_refuses_are_skipped_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = search(cases.job("llama"), GPU)[0].plan

    def refusing(job: tightfit.Job, plan: tightfit.Plan, *arguments: Any) -> Any:
        if plan == fastest:
            raise InputError("plan: x", "this model is too odd", "another")
        return dry_run_bytes(job, plan, *arguments)

    monkeypatch.setattr(finalists, "dry_run_bytes", refusing)
    chosen, *others = search(cases.job("llama"), GPU)
    assert chosen.plan != fastest
    assert {one.plan: one.rejected_because for one in others}[fastest] == "the engine refuses it: this model is too odd"


@pytest.mark.slow
def test_the_engine_s_reason_is_given_if_it_refuses_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise InputError("plan: x", "this model is too odd", "another")

    monkeypatch.setattr(finalists, "dry_run_bytes", refuse)
    with pytest.raises(InputError, match="too odd"):
        search(cases.job("llama"), GPU)


@pytest.mark.slow
def test_a_plan_too_large_in_its_dry_run_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = search(cases.job("llama"), GPU)[0].plan

    def larger(job: tightfit.Job, plan: tightfit.Plan, *arguments: Any) -> Any:
        return dry_run_bytes(job, plan, *arguments) + (90e9 if plan == fastest else 0)

    monkeypatch.setattr(finalists, "dry_run_bytes", larger)
    chosen, *others = search(cases.job("llama"), GPU)
    assert chosen.plan != fastest
    reason = {one.plan: one.rejected_because for one in others}[fastest]
    assert reason.startswith("needs 84.")
    assert reason.endswith(", 78.8 GiB are available")


@pytest.mark.slow
def test_results_list_faster_plans_that_do_not_fit() -> None:
    free = search(cases.job("llama"), GPU, {"states": "fp32"})[0]
    chosen, *others = search(limited(free.peak_bytes - 2e6), GPU, {"states": "fp32"})
    assert others[0].fits
    assert not others[1].fits
    assert others[1].total_s < chosen.total_s


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize("worth", [100.0, 0.0])
def test_a_plan_that_surely_fits_is_preferred(worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plan fits, and runs like it need up to three times the memory that is predicted."""
    monkeypatch.setattr(
        intervals, "_table", lambda: {"memory": {"gpu": {"low": 0.9, "high": 3.0, "runs": 20}}, "time": {}}
    )
    monkeypatch.setattr("tightfit.planner.certainty.WORTH_OF_CERTAINTY", worth)
    job = cases.job("llama")
    runtime = Estimator(job, GPU).estimate(tightfit.Plan()).peak.rows["runtime"]
    whole, small = (search(job, GPU, choices=[tightfit.Plan(micro_batch=size)])[0] for size in (None, 1))
    limit = runtime + 3 * (small.peak_bytes - runtime)
    assert whole.peak_bytes + whole.margin_bytes < limit < whole.peak_range[1]
    limits = tightfit.Limits(memory=int(limit))
    pins = tightfit.Plan().content()
    assert search(job.replace(limits=limits), GPU, pins)[0].plan == tightfit.Plan()  # with a fixed micro-batch
    chosen, *others = search(job.replace(limits=limits), GPU, {k: v for k, v in pins.items() if k != "micro_batch"})
    if worth:
        assert chosen.fits_surely
        assert chosen.plan.micro_batch_of(job.train.batch) < job.train.batch
        assert "faster, but may not fit" in {one.plan: one.rejected_because for one in others}[tightfit.Plan()]
    else:
        assert chosen.fits
        assert not chosen.fits_surely
        assert chosen.plan == tightfit.Plan()


class Spectrum(nn.Module):
    """A model whose weight is complex, followed by a layer of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.view_as_real(torch.fft.fft(x) @ self.weight).flatten(1))


@pytest.mark.slow
def test_a_complex_model_gets_no_real_only_methods() -> None:
    job = tightfit.Job(
        model=Spectrum,
        data=[(torch.zeros(8), 1)] * 8,
        train=tightfit.Train(batch=4, steps=10),
        allow=["bf16", "8-bit-states"],
    )
    found = search(job, Machine.named("l4"))
    assert found[0].plan.precision == "tf32"
    assert {(one.plan.fused_optimizer, one.plan.precision, one.plan.states) for one in found} == {
        (False, "tf32", "fp32")
    }
    with pytest.raises(InputError, match="fused_optimizer: false"):
        search(job, Machine.named("l4"), {"fused_optimizer": True})


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("allow", "pins", "rounding"),
    [
        ([], {}, "kahan"),
        (["nearest-rounding"], {}, "nearest"),
        ([], {"rounding": "nearest"}, "nearest"),
        (["nearest-rounding"], {"rounding": "kahan"}, "kahan"),
    ],
)
@pytest.mark.parametrize("memory", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_nearest_rounding_is_used_only_if_asked_for(
    allow: list[str], pins: dict[str, Any], rounding: str, memory: float | None
) -> None:
    job, pins = cases.job("llama").replace(allow=["bf16", *allow]), {"precision": "bf16-true", **pins}
    if memory is None:
        seen = [one.plan for one in search(job, GPU, pins)]
    else:  # where nothing fits, the search for the leanest plan tries others
        seen = [leanest(Estimator(job, GPU), tightfit.Plan(**pins), pins).plan]  # type: ignore[union-attr]
    assert {plan.rounding for plan in seen if not plan.master_weights} == {rounding}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_follows_the_rules_of_the_target_device(device: str) -> None:
    """Fused SGD updates weights in bf16 on a GPU, and not on a processor, on which dry runs for both are made."""
    job = cases.job("llama", optimizer="sgd")
    plan = tightfit.Plan(precision="bf16-true", fused_optimizer=True)
    if device == "cuda":
        assert dry_run(job, plan, device).total > 0
        return
    with pytest.raises(InputError, match="fused SGD"):
        dry_run(job, plan, device)


def test_a_refused_plan_keeps_what_was_compiled(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(fake_model, "forget_compilations", forgotten.append)
    estimator = Estimator(cases.job("llama"), Machine.named("h100-sxm:8"))
    with pytest.raises(InputError, match="num_attention_heads"):
        estimator.estimate(tightfit.Plan(tp=8, compile="block"))
    assert not forgotten
    estimator.estimate(tightfit.Plan(compile="block"))
    assert forgotten


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize(("saving", "chosen"), [(0.9, 4096), (-9.0, None)])
def test_the_loss_is_chosen_for_the_chosen_precision(
    saving: float, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that saved time with bf16-mixed has to save it with bf16-true, too."""

    def choose(
        estimator: Estimator, start: tightfit.Plan, pins: dict[str, Any]
    ) -> tuple[tightfit.Plan, dict[str, Any]]:
        return start.replace(precision="bf16-mixed", chunked_loss=None), {"chunked_loss": 4096}

    monkeypatch.setattr(searching, "with_best_kernels", choose)
    monkeypatch.setattr("tightfit.planner.variants.MIN_KERNEL_SAVING", saving)
    train = tightfit.Train(batch=4, steps=100_000_000)  # the kernels of a chunked loss are compiled
    job = cases.job("llama").replace(allow=["bf16", "nearest-rounding"], train=train)
    plan = search(job, Machine.named("a100-80gb"), {"compile": "none"})[0].plan
    assert (plan.precision, plan.chunked_loss) == ("bf16-true", chosen)
