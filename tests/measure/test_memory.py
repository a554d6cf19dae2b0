"""The memory of a run's real steps, by row; observing it changes nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import tightfit
from tests import tiny
from tests.contract.cases import make_case
from tightfit.engine.step import Step, take_step
from tightfit.measure.flops import forward_flops
from tightfit.measure.memory import process_peak_bytes, profiled, sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.tracing.live_storages import ROWS, Peak, state_tensors, track_peak
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.run import Run

PLANS: list[dict[str, Any]] = [
    {},
    {"micro_batch": 3},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"chunked_loss": 8},
    {"attention": "blocked"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "fp16-mixed"},
    {"states": "8-bit"},
    {"fused_optimizer": True},
    {"update_in_backward": True},
    {"update_in_backward": True, "states": "8-bit"},
]


def second_step(job: tightfit.Job, **plan: Any) -> tuple[Run, Peak]:
    """A run after its second step, whose memory was tracked."""
    run = tightfit.build(job, tightfit.Plan(**plan))
    batches = run.data.steps(0, None)
    take_step(run, next(batches), 0)
    return run, sample_step(run, next(batches), 1)[1]


def peak_of(name: str = "llama", train: dict[str, Any] | None = None, **plan: Any) -> Peak:
    return second_step(make_case(name, **(train or {})).job, **plan)[1]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_rows_add_up_and_contain_the_model_states(plan: dict[str, Any]) -> None:
    run, peak = second_step(make_case("llama").job, **plan)
    assert tuple(peak.rows) == ROWS
    assert min(peak.rows.values()) >= 0
    assert sum(peak.rows.values()) == peak.total == max(total for _, total in peak.timeline)
    assert peak.rows["parameters"] == tensor_bytes([*run.model.parameters(), *run.model.buffers()])
    assert peak.rows["activations"] > tensor_bytes(batch_of(run))
    states, largest = tensor_bytes(state_tensors(run.optimizer)), max(p.numel() for p in run.model.parameters())
    # narrow states are made anew, so those of the parameter under way may be there twice
    assert states <= peak.rows["optimizer"] <= states + (2 * largest if plan.get("states") else 0)


def batch_of(run: Run) -> list[torch.Tensor]:
    return list(next(run.data.steps(0, None))[0].values())


def test_adamw_has_two_moments_and_a_step_count() -> None:
    run, peak = second_step(make_case("llama").job)
    parameters = list(run.model.parameters())
    assert peak.rows["optimizer"] == sum(8 * p.numel() + 4 for p in parameters)


def test_the_saving_of_each_method_shows_in_its_row() -> None:
    plain = peak_of()
    recompute, micro = peak_of(recompute="full"), peak_of(micro_batch=2)
    assert recompute.rows["activations"] < 0.4 * plain.rows["activations"]
    assert recompute.total < plain.total
    assert 0.2 < micro.rows["activations"] / plain.rows["activations"] < 0.35
    assert peak_of(chunked_loss=8).rows["activations"] < plain.rows["activations"]
    assert peak_of(precision="bf16-true").rows["optimizer"] < 0.51 * plain.rows["optimizer"]
    assert peak_of(train={"optimizer": "sgd", "momentum": 0.0}).rows["optimizer"] == 0


def test_all_gradients_are_held_during_the_second_micro_batch() -> None:
    run, peak = second_step(make_case("llama").job, micro_batch=4)
    assert peak.phase in ("forward", "backward")
    assert peak.rows["gradients"] == tensor_bytes(run.model.parameters())


def test_update_in_backward_never_holds_all_gradients() -> None:
    small = {"batch": 1}  # so that weights, not activations, decide the peak
    plain, updated = peak_of(train=small), peak_of(train=small, update_in_backward=True)
    assert plain.phase == "optimizer"
    assert updated.phase == "backward"
    assert updated.rows["gradients"] < 0.3 * plain.rows["gradients"]
    assert updated.total < plain.total
    assert "optimizer" not in {phase for phase, total in updated.timeline if total > 0.99 * updated.total}


def test_buffers_count_as_the_model_s() -> None:
    run, peak = second_step(make_case("batchnorm").job)
    assert list(run.model.buffers())
    assert peak.rows["parameters"] == tensor_bytes(run.model.parameters()) + tensor_bytes(run.model.buffers())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("plan", [*PLANS, {"compile": "model"}], ids=str)
def test_an_observed_step_is_bit_for_bit_the_same(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    expected = trained(tightfit.Plan(**plan), track=False)
    found = trained(tightfit.Plan(**plan), track=True)
    assert [step.loss for step in found[1]] == [step.loss for step in expected[1]]
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one, other)


def trained(plan: tightfit.Plan, track: bool) -> tuple[list[torch.Tensor], list[Step]]:
    """Weights and steps of three steps of a job with dropout; the second one sampled, and its FLOPs counted, or not."""
    torch.manual_seed(1)
    run = tightfit.build(tiny.job(), plan)
    steps = []
    for step, batches in zip(range(3), run.data.steps(0, None), strict=False):
        if track and step == 1:
            steps.append(sample_step(run, batches, step)[0])
            assert forward_flops(run, batches[0])
        else:
            steps.append(take_step(run, batches, step))
    return list(run.model.parameters()), steps


@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.parametrize("plan", [{}, {"micro_batch": 2}, {"update_in_backward": True}], ids=str)
def test_the_allocator_agrees_with_the_storages(name: str, plan: dict[str, Any]) -> None:
    run = tightfit.build(make_case(name).job, tightfit.Plan(**plan))
    batches = run.data.steps(0, None)
    take_step(run, next(batches), 0)
    peaks = []
    for track in (track_peak, profiled):
        micro_batches = next(batches)
        peaks.append(track(run, micro_batches, lambda watched, batch=micro_batches: take_step(watched, batch, 1))[1])
    seen, allocated = peaks
    assert allocated.total == pytest.approx(seen.total, rel=0, abs=64)
    assert allocated.phase == seen.phase
    assert sum(allocated.rows.values()) == allocated.total
    assert allocated.rows["parameters"] == seen.rows["parameters"]
    assert allocated.rows["optimizer"] == seen.rows["optimizer"]
    if not plan:
        assert allocated.rows["gradients"] == 0  # of the first backward they are not told from what it frees


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks for one
@pytest.mark.parametrize("compile", ["block", "model"])
def test_the_allocator_counts_compiled_steps(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    plain, compiled = peak_of("vit"), peak_of("vit", compile=compile)
    assert compiled.total == pytest.approx(plain.total, rel=0.1)
    assert compiled.phase == plain.phase == "backward"
    assert sum(compiled.rows.values()) == compiled.total
    assert compiled.rows["gradients"] == 0
    pieces = peak_of("vit", compile=compile, micro_batch=4)
    assert pieces.rows["gradients"] == pieces.rows["parameters"]
    assert pieces.rows["activations"] < 0.8 * compiled.rows["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(("regions", "within"), [("block", 0.005), ("model", 0.04)])
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_compiled_step_with_dropout_needs_what_is_predicted(architecture: str, regions: str, within: float) -> None:
    """The probabilities of one layer are a tenth of the memory, and blocked attention works on more of that size. In a
    whole model, the code generator also keeps some buffers for later use."""
    kind = {"intermediate_size": 256, "task": "masked-lm"} if architecture == "bert" else {}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048}
    job = tightfit.Job(
        model={"architecture": architecture, **sizes, **kind},
        data={"synthetic": "tokens", "sequence_length": 128},
        train=tightfit.Train(batch=8, steps=10, trackers=[]),
    )
    plan = tightfit.Plan(compile=regions, attention="blocked", dropout="16-bit")
    measured = second_step(job, **plan.differences())[1]
    assert dry_run(job, plan).total == pytest.approx(measured.total, rel=within)


SILENT = """
import tightfit
from tests.measure.test_memory import make_case, profiled, take_step

run = tightfit.build(make_case("llama").job, tightfit.Plan())
batches = run.data.steps(0, None)
take_step(run, next(batches), 0)
_, peak = profiled(run, next(batches), lambda watched, batches=next(batches): take_step(watched, batches, 1))
print(peak.total)
"""


@pytest.mark.slow
def test_the_profiler_prints_nothing() -> None:
    """The test runs in a process of its own, because the first profile of a process decides what
    later ones print."""
    ran = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0
    assert "profiler" not in ran.stderr


def test_process_peak_includes_the_largest_allocation() -> None:
    held = torch.ones(2**24)
    del held
    assert process_peak_bytes() > 2**26


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "model"])
def test_on_cuda_the_allocator_s_count_is_used(compile: str) -> None:
    run, peak = second_step(make_case("llama").job, compile=compile)
    assert run.device.type == "cuda"
    assert sum(peak.rows.values()) == peak.total
    assert peak.total >= tensor_bytes(run.model.parameters()) + tensor_bytes(state_tensors(run.optimizer))
    assert peak.phase in ("forward", "backward", "optimizer")
