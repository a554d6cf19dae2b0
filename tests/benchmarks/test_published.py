"""What benchmarks/published.py knows of other frameworks' loops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tightfit
from benchmarks import published
from tests.planner import cases
from tightfit.distributed.collectives import all_reduced
from tightfit.machine import Machine
from tightfit.parallel.tensor import sharder
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing import profiler

GPUS = Machine.named("h100-sxm:8")


def estimate(plan: Plan, machine: Machine = GPUS) -> Estimate:
    job = cases.job("llama").replace(allow=["bf16", "8-bit-states"])
    return Estimator(job, machine).estimate(plan)


def test_attention_with_a_fused_softmax_is_attention() -> None:
    """Without a mask, and with the module's scaling."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    found, _ = published.fused_softmax_attention(
        nn.Identity().eval(), query, key, value, None, scaling=0.3, dropout=0.5
    )
    expected = nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("model", "loop", "kernel"),
    [
        ({"attn_implementation": "eager"}, {"megatron_blocks": True}, published.FUSED_SOFTMAX),
        ({"attn_implementation": "eager"}, {}, "eager"),
        ({"attn_implementation": "sdpa"}, {"megatron_blocks": True}, "sdpa"),
    ],
)
def test_only_saved_scores_have_a_fused_softmax(model: dict[str, Any], loop: dict[str, Any], kernel: str) -> None:
    row = {"model": {**cases.SPECS["llama"], **model}, "data": {"synthetic": "tokens", "sequence_length": 16}}
    job = published.job_of({**row, "optimizer": "adamw", "batch": 4, "loop": loop})
    assert job.model.content()["attn_implementation"] == kernel


def test_a_fused_softmax_moves_fewer_bytes() -> None:
    seconds = []
    for loop in ({}, {"megatron_blocks": True}):
        model = {**cases.SPECS["llama"], "attn_implementation": "eager"}
        row = {"model": model, "data": {"synthetic": "tokens", "sequence_length": 64}, "optimizer": "adamw", "batch": 8}
        seconds.append(Estimator(published.job_of({**row, "loop": loop}), GPUS).estimate(Plan()).time.memory_s)
    assert seconds[1] < seconds[0]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-mixed", 2)])
def test_unlimited_gathers_hold_weights_twice_and_gradients(precision: Any, width: int) -> None:
    sharded = estimate(Plan(dp_shard=8, zero=3, precision=precision))
    count = sum(one.count for one in sharded.ledger.parameters)
    assert published.blocks_of_gathers({"loop": {"unlimited_gathers": True}}, sharded) == 3 * width * count
    assert published.blocks_of_gathers({"loop": {}}, sharded) == 0
    whole = estimate(Plan(dp_replicate=8, precision=precision))
    assert published.blocks_of_gathers({"loop": {"unlimited_gathers": True}}, whole) == 0


def test_overlapped_tensor_parallelism_hides_communication() -> None:
    parallel, model = estimate(Plan(tp=2, dp_replicate=4)), TimeModel(GPUS)
    assert published.saved_by_their_loop(parallel, parallel, {}, model) == 0
    saved = published.saved_by_their_loop(parallel, parallel, {"tp_overlap": True}, model)
    assert 0 < saved < parallel.time.communication_s


@pytest.mark.slow
def test_a_fused_update_of_narrow_states_is_faster() -> None:
    job = cases.job("llama").replace(allow=["bf16", "8-bit-states"])
    wide = {**cases.SPECS["llama"], "hidden_size": 128, "intermediate_size": 256}  # large enough to be in 8 bits
    machine = Machine.named("h100-sxm")
    narrow = Estimator(job.replace(model=wide), machine).estimate(tightfit.Plan(states="8-bit"))
    saved = published.saved_by_their_loop(narrow, narrow, {"fused_low_bit": True}, TimeModel(machine))
    assert 0.5 * narrow.time.optimizer_s < saved < narrow.time.optimizer_s
    same = Estimator(job, machine).estimate(tightfit.Plan())
    assert published.saved_by_their_loop(same, same, {"fused_low_bit": True}, TimeModel(machine)) == 0


@pytest.mark.parametrize(
    ("blocks", "width", "stages", "split"),
    [
        (16, 2048, 2, [11, 5]),  # the head costs as much as four blocks: 10 of 20 are no more than half
        (3, 64, 1, [3]),
        (24, 2048, 8, [4, 3, 3, 4, 3, 3, 3, 1]),  # its last stage has the head alone, which a plan cannot say
    ],
)
def test_nanotron_splits_blocks_by_cost(blocks: int, width: int, stages: int, split: list[int]) -> None:
    """build_model (nanotron/models/base.py) on the models of its published runs."""
    vocabulary, inner = (50272, 4096) if blocks == 24 else (131072, 8192)
    model = {
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    assert published.split_by_cost(model, stages) == split


def test_every_pipeline_of_nanotron_has_its_split() -> None:
    rows = [row for row in published.read_rows("nanotron") if row["plan"].get("pp", 1) > 1]
    assert rows
    for row in rows:
        assert len(row["plan"]["split"]) == row["plan"]["pp"]
        assert sum(row["plan"]["split"]) == row["model"]["num_hidden_layers"]


@pytest.mark.slow
def test_packed_attention_is_attention_that_saves_more() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found, _ = published.packed_attention(nn.Identity(), *tensors, None, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.3).transpose(1, 2)
    assert torch.allclose(found, expected)
    llama = {**cases.SPECS["llama"], "num_key_value_heads": 4}
    saved = []
    for loop in ({}, {"nanotron_blocks": True}):
        row = {"model": llama, "data": {"synthetic": "tokens", "sequence_length": 64}, "optimizer": "adamw", "batch": 8}
        saved.append(
            Estimator(published.job_of({**row, "loop": loop}), GPUS).estimate(Plan()).ledger.peaks()["forward"]
        )
    one = 4 * 8 * 64 * llama["hidden_size"]  # bytes of the queries of a block
    # keys, values and the output once more
    assert saved[1] - saved[0] == pytest.approx(3 * one * llama["num_hidden_layers"], rel=0.1)


@pytest.mark.slow
def test_copied_attention_saves_its_output_twice() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3)]
    found, _ = published.copied_attention(nn.Identity(), *tensors, None, scaling=0.3)
    assert torch.allclose(found, nn.functional.scaled_dot_product_attention(*tensors, scale=0.3).transpose(1, 2))
    saved = []
    for loop in ({}, {"copied_attention": True}):
        row = {"model": cases.SPECS["vit"], "data": {"synthetic": "images"}, "optimizer": "adamw", "batch": 64}
        saved.append(
            Estimator(published.job_of({**row, "loop": loop}), GPUS).estimate(Plan()).ledger.peaks()["forward"]
        )
    one = 4 * 64 * 17 * cases.SPECS["vit"]["hidden_size"]  # bytes of a block's output
    assert saved[1] - saved[0] == pytest.approx(one * cases.SPECS["vit"]["num_hidden_layers"], rel=0.1)


def test_llama_s_norms_are_nanotron_s_for_its_rows_alone() -> None:
    norm, values = LlamaRMSNorm(8), torch.randn(4, 8)
    expected = norm(values)
    for loop, calls in (({}, 0), ({"nanotron_blocks": True}, 1), ({}, 0)):
        fused = Mock(wraps=nn.functional.rms_norm)
        with published.their_blocks({"loop": loop}), patch.object(nn.functional, "rms_norm", fused):
            assert torch.allclose(norm(values), expected)
        assert fused.call_count == calls


def test_gathered_inputs_of_all_blocks_in_flight() -> None:
    row = {
        "model": {"hidden_size": 64, "num_hidden_layers": 5},
        "batch": 8,
        "data": {"sequence_length": 32},
        "loop": {"keeps_gathered_inputs": True},
    }
    plan = Plan(precision="bf16-true", master_weights=True, tp=2, sequence_parallel=True, micro_batch=2)
    settled = estimate(plan)
    found = {}
    for phase in ("backward", "optimizer"):
        at = replace(settled, peak=replace(settled.peak, phase=phase))
        found[phase] = published.gathered_inputs(row, at)
        assert published.gathered_inputs({**row, "loop": {}}, at) == 0
    # each block has two inputs: 2 x 32 tokens x 64 numbers of two bytes, half of which a device has anyway
    assert found == {"backward": 5 * 2 * 2 * 2 * 32 * 64 / 2, "optimizer": 0}


@pytest.mark.slow
def test_reduce_buffers_have_the_size_of_a_bucket() -> None:
    plan = Plan(precision="fp16-true", master_weights=True, zero=2, dp_shard=8, loss_scale=128.0)
    settled = Estimator(cases.job("llama"), GPUS).estimate(plan)
    count = settled.peak.rows["parameters"] / 2
    few, full = (
        published.blocks_of_update({"loop": {"bucket": 10**6, **more}}, settled) for more in ({}, {"reduce_buffers": 2})
    )
    assert (few, full) == (2 * count + 2 * count, 2 * 2 * 10**6 + 2 * count)


@pytest.mark.slow
def test_gradients_that_are_kept_count_once() -> None:
    """Those of earlier micro-batches are in memory in any case."""
    row = {"memory": {"allocated": "1 GB"}, "loop": {"zeroes_before_backward": True}}
    machine = Machine.named("a100-80gb")
    for micro_batch, more in ((8, True), (2, False)):
        settled = estimate(Plan(micro_batch=micro_batch), machine)
        late, early = (
            published.compare_memory({**row, "loop": loop}, settled)["predicted_bytes"] for loop in (row["loop"], {})
        )
        assert 0 <= late - early <= settled.ledger.gradient_bytes()
        assert (late > early) == more


@pytest.mark.slow
def test_megatron_reduces_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """tightfit reduces a copy of each product."""
    monkeypatch.setattr(profiler, "cached", lambda key, make: make())
    copies = []
    for loop in ({}, {"megatron_blocks": True}):
        row = {"model": {**cases.SPECS["llama"], "attn_implementation": "sdpa"}, "optimizer": "adamw", "batch": 8}
        asked = {**row, "data": {"synthetic": "tokens", "sequence_length": 32}, "loop": loop}
        with published.their_blocks(asked):
            ledger = Estimator(published.job_of(asked), GPUS).estimate(Plan(tp=2)).ledger
        made = [one for segment in ledger.training for one in segment.timeline.operations if one.name == "aten.clone"]
        copies.append(sum(one.count.at(1) for one in made))
    # for each block two products are reduced in forward, and two gradients in backward
    assert copies[0] - copies[1] >= 4 * cases.SPECS["llama"]["num_hidden_layers"]
    assert sharder.all_reduced is all_reduced


@pytest.mark.slow
def test_a_late_reduction_overlaps_with_nothing() -> None:
    model = TimeModel(GPUS)
    for plan in (Plan(dp_replicate=8), Plan(dp_shard=8, zero=1)):
        parallel = estimate(plan)
        sent = sum(one.bytes / (one.bytes_per_s * model.link_share) + one.latency_s for one in parallel.ledger.messages)
        lost = -published.saved_by_their_loop(parallel, parallel, {"late_reduction": True}, model)
        assert lost > 0
        assert parallel.time.communication_s + lost == pytest.approx(sent)
    alone = estimate(Plan(), Machine.named("h100-sxm"))
    assert published.saved_by_their_loop(alone, alone, {"late_reduction": True}, model) == 0
    gathered = estimate(Plan(dp_shard=8, zero=3))  # whose gathers overlap as before
    messages = [one for one in gathered.ledger.messages if one.name == "parameters"]
    assert messages
    assert [published.as_they_send(one, {"late_reduction": True}) for one in messages] == messages


def test_narrow_reductions_send_half_of_the_gradients() -> None:
    sharded = estimate(Plan(dp_shard=8, zero=1))
    sent = {one.name: one for one in sharded.ledger.messages}
    loop = {"narrow_reduction": True, "overlapped_gathers": True}
    theirs = {name: published.as_they_send(one, loop) for name, one in sent.items()}
    assert theirs["gradients"].bytes == sent["gradients"].bytes / 2
    assert theirs["parameters"] == replace(sent["parameters"], overlaps=True)
    late = published.as_they_send(sent["gradients"], {**loop, "late_reduction": True})
    assert (late.bytes, late.overlaps) == (sent["gradients"].bytes / 2, False)


@pytest.mark.slow
def test_each_rank_broadcasts_its_weights() -> None:
    """The latency grows with the square of the ranks, and nothing overlaps."""
    model, sharded = TimeModel(GPUS), estimate(Plan(dp_shard=8, zero=1))
    (sent,) = [one for one in sharded.ledger.messages if one.name == "parameters"]
    theirs = published.as_they_send(sent, {"broadcasts": True}, 8 * sent.latency_s)
    assert theirs == replace(sent, overlaps=False, latency_s=8 * sent.latency_s)
    assert published.saved_by_their_loop(sharded, sharded, {"broadcasts": True}, model) < 0
    gathered = [one for one in estimate(Plan(dp_shard=8, zero=3)).ledger.messages if one.name == "parameters"]
    assert [published.as_they_send(one, {"broadcasts": True}, 1.0) for one in gathered] == gathered


def test_samples_on_the_device_are_not_waited_for() -> None:
    one = estimate(Plan(), Machine.named("h100-sxm"))
    assert one.time.input_s > 0
    saved = published.saved_by_their_loop(one, one, {"inputs_on_device": True}, TimeModel(GPUS))
    assert saved == one.time.input_s


@pytest.mark.slow
def test_a_host_that_skips_steps_keeps_no_copies() -> None:
    """Of weights and states: without them, the update is as long as in bf16."""
    model, machine = TimeModel(GPUS), Machine.named("h100-sxm")
    job = cases.job("llama").replace(allow=["bf16", "fp16"])
    narrow, plain = (
        Estimator(job, machine).estimate(Plan(precision=precision)) for precision in ("fp16-mixed", "bf16-mixed")
    )
    assert published.choices_of_update_s(plain.ledger, model) == 0
    spent, least = (
        sum(seconds for seconds, _ in model._rows_of_updates(one.ledger.updates).values()) for one in (narrow, plain)
    )
    assert spent - published.choices_of_update_s(narrow.ledger, model) == pytest.approx(least, rel=0.05)
    saved = published.saved_by_their_loop(narrow, narrow, {"skips_on_host": True}, model)
    assert 0 < saved <= narrow.time.optimizer_s


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_gradients_are_sharded_once(zero: Any) -> None:
    """The gradients' row of ZeRO-3 has the bytes of a shard already."""
    settled = estimate(Plan(precision="bf16-true", master_weights=True, dp_shard=8, zero=zero))
    rows, peaks = settled.peak.rows, []
    for copies in (10**6, 2 * 10**6):  # with which the update exceeds all else
        loop = {"gradients": {"bf16-true": {"before_update": 2, "copies_in_update": copies}}}
        peaks.append(published.their_peak({"loop": loop}, settled))
    shard = rows["gradients"] / 4 / (8 if zero == 1 else 1)
    assert peaks[1] - peaks[0] == pytest.approx(10**6 * shard)


@pytest.mark.slow
def test_transformer_engine_saves_a_part_of_the_casts() -> None:
    fields = {"precision": "bf16-mixed", "compile": "block"}
    wide, narrow = (
        estimate(Plan(**fields, float8=recipe), Machine.named("h100-sxm")) for recipe in ("none", "tensorwise")
    )
    model = TimeModel(GPUS)
    saved = published.saved_by_their_loop(narrow, wide, {"te_float8": True}, model)
    assert saved == pytest.approx((1 - published.TE_CASTS) * (narrow.time.memory_s - wide.time.memory_s))
    assert published.saved_by_their_loop(wide, wide, {"te_float8": True}, model) == 0


def test_the_fp32_copy_of_an_embedding_s_gradient_is_left_out() -> None:
    """Where the peak is in backward and holds the copy. Another peak is as high without it."""
    instants = [
        ("forward", 0, {"activations": 450.0, "temporaries": 0.0}),
        ("backward", 0, {"activations": 200.0, "temporaries": 600.0}),
        ("optimizer", 0, {"activations": 0.0, "temporaries": 500.0}),
    ]
    parameters = (SimpleNamespace(count=3), SimpleNamespace(count=100))
    for shown, saved in ((instants, 300), (instants[:2], 350), (instants[1:2], 400), (instants[::2], 0)):
        ledger = SimpleNamespace(parameters=parameters, instants=lambda shown=shown: shown)
        assert published.largest_cast(ledger) == saved  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_first_rank_of_a_pipeline_has_no_logits() -> None:
    job = cases.job("llama", optimizer="sgd").replace(
        model={**cases.SPECS["llama"], "vocab_size": 32000, "tie_word_embeddings": False},
        data={"synthetic": "tokens", "sequence_length": 256},
    )
    profiled = profiler.Profiler(job, "cuda")
    busiest = Estimator(job, GPUS, profiled).estimate(Plan(pp=2, micro_batch=2, dp_replicate=4))
    first = published.on_first_rank(busiest, profiled)
    assert busiest.ledger.rank_program.pipeline_rank == 1  # type: ignore[union-attr]
    assert first.ledger.rank_program.pipeline_rank == 0  # type: ignore[union-attr]
    assert first.peak_bytes < busiest.peak_bytes


@pytest.mark.slow
def test_the_loop_s_logits_are_in_memory_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cases.job("llama").replace(model={**cases.SPECS["llama"], "vocab_size": 32000}, loss=published.NARROW_LOSS)
    peaks = []
    for kept in (published.Kept, SimpleNamespace(apply=lambda values: values)):
        monkeypatch.setattr(published, "Kept", kept)
        peaks.append(Estimator(job, Machine.named("h100-sxm")).estimate(Plan()).ledger.peaks()["backward"])
    assert peaks[0] - peaks[1] == pytest.approx(4 * 8 * 32 * 32000, rel=0.05)  # bytes of the logits
