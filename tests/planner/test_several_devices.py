"""Estimated memory and messages of several devices, compared with dry runs and the papers'
formulas."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import tightfit
from tests.sweeps import part, spread
from tightfit.distributed.links import latency
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.parallel.gradient_buckets import BUCKET_BYTES, MIN_BYTES_PER_DEVICE, bucket_bytes
from tightfit.planner.candidates import candidates
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator, estimated_ledger
from tightfit.planner.search import search, search_or_estimate
from tightfit.planner.variants import estimate_candidates

LLAMA = {
    "architecture": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
JOB = tightfit.Job(
    model=LLAMA,
    data={"synthetic": "tokens", "sequence_length": 128},
    train=tightfit.Train(batch=16, steps=1000),
    allow=["bf16", "asynchronous"],
)
PLANS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_replicate": 4, "micro_batch": 1},
    {"dp_shard": 4, "zero": 1, "micro_batch": 1},
    {"dp_shard": 2, "zero": 2, "micro_batch": 2},
    {"dp_shard": 8, "zero": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_shard": 8, "zero": 3, "micro_batch": 1},
    {"dp_shard": 2, "zero": 3, "precision": "bf16-mixed"},
    {"dp_shard": 8, "zero": 3, "precision": "bf16-mixed", "micro_batch": 1, "recompute": "full"},
    {"dp_shard": 4, "zero": 3, "precision": "bf16-mixed", "compile": "block", "chunked_loss": 512},
    {"tp": 2},
    {"tp": 4, "recompute": "full"},
    {"tp": 2, "dp_shard": 2, "zero": 1},
    {"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    {"tp": 2, "sequence_parallel": True, "precision": "bf16-mixed", "chunked_loss": 512},
    {"cp": 2},
    {"cp": 4, "zero": 3, "micro_batch": 2, "recompute": "full"},
    {"cp": 2, "dp_shard": 2, "zero": 2},
    {"cp": 2, "tp": 2, "dp_replicate": 2},
    {"cp": 2, "pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 2},
    {"pp": 3, "micro_batch": 1, "recompute": "full"},
    {"pp": 2, "micro_batch": 2, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 1, "schedule": "interleaved", "virtual_stages": 3},
    {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"},
    {"pp": 2, "micro_batch": 2, "schedule": "naive"},
    {"pp": 2, "tp": 2, "micro_batch": 1},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "micro_batch": 1},
    {"pp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 1},
    {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1},
    {"pp": 2, "dp_replicate": 2, "micro_batch": 1},
    {"parameter_server": "sync", "dp_replicate": 2},
    {"pp": 2, "schedule": "pipedream"},
    {"pp": 2, "schedule": "pipedream", "vertical_sync": True},
    {"tp": 2, "sequence_parallel": True, "recompute": "attention"},
    {"dp_shard": 2, "zero": 3, "recompute": "attention", "precision": "bf16-mixed"},
    {"pp": 2, "micro_batch": 2, "recompute": "attention"},
    {"pp": 2, "micro_batch": 2, "recompute": "first-1"},
    {"dp_shard": 2, "zero": 3, "recompute": "first-2", "compile": "block"},
    {"tp": 2, "chunked_loss": None},
    {"tp": 2, "chunked_loss": 512},
]


def named(fields: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(JOB, Machine.named("a100-80gb:8"))


QUICK = {4, 8, 13, 21, 26, 33, 36, 39}
"""Of PLANS: each axis and some schedules and stages of ZeRO. The slow suite has all."""


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=named(fields), marks=[] if number in QUICK else pytest.mark.slow)
        for number, fields in enumerate(PLANS)
    ],
)
def test_estimate_of_each_device_agrees_with_its_dry_run(estimator: Estimator, fields: dict[str, Any]) -> None:
    plan = tightfit.Plan(**fields, fused_optimizer=True)
    found = estimator.estimate(plan)
    estimated = found.peak.total - found.peak.rows["runtime"]
    assert estimated == pytest.approx(dry_run(JOB, plan, "cuda", found.ledger.pipeline_rank).total, rel=0.06)


@pytest.mark.slow
def test_gathered_logits_cost_more_than_sharded_ones() -> None:
    """Both are predicted: the logits of all classes on each device, and the all-gather that brings them there."""
    table = {
        "*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise",
        "*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise",
    }  # fmt: skip
    plan, found = tightfit.Plan(tp=2, fused_optimizer=True), {}
    for head in ("colwise", "colwise_gather_output"):
        job = JOB.replace(model={**LLAMA, "vocab_size": 16384, "tensor_parallel": {**table, "lm_head": head}})
        found[head] = Estimator(job, Machine.named("a100-80gb:2")).estimate(plan)
        estimated = found[head].peak.total - found[head].peak.rows["runtime"]
        assert estimated == pytest.approx(dry_run(job, plan, "cuda").total, rel=0.06)
    sharded, gathered = found["colwise"], found["colwise_gather_output"]
    logits = 16 * 128 * 16384 * 4
    assert gathered.peak_bytes - sharded.peak_bytes > logits
    sent = [sum(message.bytes for message in one.ledger.messages) for one in (sharded, gathered)]
    assert sent[1] - sent[0] > 0.4 * logits


@pytest.mark.slow
def test_split_none_is_balanced_by_predicted_time() -> None:
    """The last stage has a large output head. All other fields are pinned, as in a complete plan file."""
    job = JOB.replace(model={**LLAMA, "vocab_size": 32768})
    machine = Machine.named("a100-80gb:2")
    estimator = Estimator(job, machine)
    found = {}
    for split in (None, (3, 3)):
        plan = tightfit.Plan(pp=2, micro_batch=4, fused_optimizer=True, split=split)
        found[split] = search_or_estimate(estimator, plan.model_dump())[0]
    assert found[3, 3].plan.split == (3, 3)
    assert found[None].plan.split is not None
    assert found[None].plan.split[0] > found[None].plan.split[1]
    assert found[None].time.step_s < 0.95 * found[3, 3].time.step_s
    assert f"split={found[None].plan.split}" in tightfit.explain(job, tightfit.Plan(pp=2, micro_batch=4), machine)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_bytes_sent_match_ring_collectives(estimator: Estimator, devices: int) -> None:
    """Ring all-reduce sends 2 (n-1)/n of the gradients, ZeRO 1 and 2 as much, ZeRO 3 half as much again."""
    parameters = sum(p.bytes for p in estimator.profiler.model.parameters(tightfit.Plan()) if p.trainable)
    once = (devices - 1) / devices * parameters
    for fields, times in (
        ({"dp_replicate": devices}, 2),
        ({"dp_shard": devices, "zero": 1}, 2),
        ({"dp_shard": devices, "zero": 2}, 2),
        ({"dp_shard": devices, "zero": 3}, 3),
    ):
        ledger = estimator.estimate(tightfit.Plan(**fields)).ledger
        assert sum(message.bytes for message in ledger.messages) == pytest.approx(times * once, rel=0.01)


OFFLOADED = [
    ("cuda", ("states",)),
    ("cuda", ("states", "activations")),
    ("cuda", ("gradients",)),
    ("cuda", ("states", "gradients")),
    ("cuda", ("states", "gradients", "parameters")),
    ("cuda", ("states", "gradients", "parameters", "activations")),
    ("cpu", ("states", "gradients", "parameters")),
    ("cpu", ("activations",)),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("offloaded", "fields"), spread(OFFLOADED, [{}, {"micro_batch": 4}], 4))
def test_offloaded_tensors_take_no_device_memory(
    offloaded: tuple[str, tuple[str, ...]], fields: dict[str, Any]
) -> None:
    device, words = offloaded
    machine = Machine.named("a100-80gb") if device == "cuda" else Machine.detect()
    job = JOB.replace(allow=["bf16", "offload"])
    where = "host" if device == "cuda" else "disk"
    plan = tightfit.Plan(**fields, offload=words, offload_to=where, fused_optimizer=True)
    estimator = Estimator(job, machine)
    found, without = estimator.estimate(plan), estimator.estimate(plan.replace(offload=(), offload_to="host"))
    estimated = found.peak.total - found.peak.rows["runtime"]
    # what a forward saves leaves one by one, and is estimated as leaving at the end of its segment: where little else is left,
    # that shows
    bound = 0.08 if len(words) == 4 else 0.06
    assert estimated == pytest.approx(dry_run(job, plan, device).total, rel=bound)
    least = 1.0 if words == ("gradients",) else 0.8  # with one micro-batch they are all there at its end only
    assert estimated <= least * (without.peak.total - without.peak.rows["runtime"])
    assert found.time.communication_s > without.time.communication_s


def test_recomputed_activations_are_not_offloaded() -> None:
    job, words = JOB.replace(allow=["bf16", "offload"]), ("states", "activations")
    plan = tightfit.Plan(recompute="full", micro_batch=4, offload=words, fused_optimizer=True)
    found = Estimator(job, Machine.named("a100-80gb")).estimate(plan).peak
    assert found.total - found.rows["runtime"] == pytest.approx(dry_run(job, plan, "cuda").total, rel=0.03)


@pytest.mark.slow
def test_a_search_offloads_if_nothing_else_fits() -> None:
    machine = Machine.named("a100-80gb")
    least = Estimator(JOB, machine).estimate(tightfit.Plan(micro_batch=1, recompute="full", fused_optimizer=True))
    limit = int(least.peak_bytes - 100e6)
    job = JOB.replace(limits=tightfit.Limits(memory=limit), allow=["offload"])
    chosen = search(job, machine, {"compile": "none", "update_in_backward": False})[0]
    assert "states" in chosen.plan.offload
    assert chosen.fits


@pytest.mark.slow
def test_a_search_offloads_even_the_parameters_of_a_gpu() -> None:
    """A limit below the weights alone."""
    machine = Machine.named("a100-80gb")
    weights = sum(p.bytes for p in Estimator(JOB, machine).profiler.model.parameters(tightfit.Plan()))
    limit = int(Estimator(JOB, machine).runtime_bytes + 0.97 * weights)
    job = JOB.replace(limits=tightfit.Limits(memory=limit), allow=["offload"])
    chosen = search(job, machine, {"compile": "none", "update_in_backward": False})[0]
    assert {"states", "gradients", "parameters"} <= set(chosen.plan.offload)
    assert chosen.fits


def test_tensor_parallel_messages_lengthen_pipeline_bubbles() -> None:
    """The next stage waits for the messages of the tp devices within a stage, too."""
    plan = tightfit.Plan(tp=2, pp=2, micro_batch=1)
    estimator = Estimator(JOB, Machine.named("a100-80gb:4"))
    ledgers = {device: estimated_ledger(estimator.profiler, plan, estimator.machine, device) for device in range(2)}
    silent = {device: replace(ledger, messages=()) for device, ledger in ledgers.items()}
    time, silent_time = (estimator.time_model.pipeline_time(those)[0] for those in (ledgers, silent))
    assert time.communication_s > 0.1 * (time.compute_s + time.memory_s)
    assert time.bubble_s > 1.01 * silent_time.bubble_s


def test_a_server_s_link_carries_all_gradients_and_weights(estimator: Estimator) -> None:
    """Twice as many workers send twice as many bytes, while in a ring each device sends at most
    twice the gradients."""
    seconds = []
    for workers in (2, 4):
        plan = tightfit.Plan(parameter_server="sync", dp_replicate=workers, micro_batch=2)
        found = estimator.estimate(plan)
        (message,) = found.ledger.messages
        assert message.bytes == pytest.approx(2 * workers * found.ledger.gradient_bytes())
        assert found.peak_phase == "server"  # which has the states, and all gradients at once
        seconds.append(found.time.communication_s)
        hop, start = estimator.machine.process_latency_s, estimator.machine.call_s
        assert hop is not None
        assert start is not None
        assert message.latency_s == pytest.approx(2 * workers * (hop.value + start.value))
    ring = estimator.estimate(tightfit.Plan(dp_replicate=4, micro_batch=2)).time.communication_s
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert seconds[1] > 4 * ring


def test_the_server_is_one_of_the_processes() -> None:
    chosen = search(JOB, Machine.named("a100-80gb:3"), {"compile": "none", "parameter_server": "async"})[0]
    assert chosen.plan.dp_replicate == 2
    assert chosen.plan.devices == 3


def test_links_between_nodes_use_the_network() -> None:
    """Replicas with one device per node use one link; four devices that shard states together use
    four."""
    machine = Machine.named("a100-80gb:4x2")
    estimator = Estimator(JOB, machine)
    inside = estimator.estimate(tightfit.Plan(dp_replicate=2, dp_shard=4, zero=3)).ledger.messages
    across = estimator.estimate(tightfit.Plan(dp_shard=8, zero=3)).ledger.messages
    assert machine.process_bytes_per_s is not None
    assert machine.network_bytes_per_s is not None
    assert inside[0].bytes_per_s == machine.process_bytes_per_s.value
    assert inside[-1].bytes_per_s == machine.network_bytes_per_s.value
    assert across[0].bytes_per_s == 4 * machine.network_bytes_per_s.value
    ring = estimator.estimate(tightfit.Plan(cp=8)).ledger.messages
    assert ring[0].bytes_per_s == machine.network_bytes_per_s.value


@pytest.mark.slow
def test_a_search_shards_models_too_large_for_replicas() -> None:
    machine = Machine.named("a100-80gb:8")
    free = search(JOB, machine, {"compile": "none"})[0]
    assert free.plan.devices == 8
    need = Estimator(JOB, machine).estimate(free.plan.replace(dp_replicate=8, dp_shard=1, zero=0, recompute="full"))
    limit = need.peak_bytes - 60e6  # of 16 bytes a parameter, zero takes 14
    tight = search(
        JOB.replace(limits=tightfit.Limits(memory=int(limit))), machine, {"compile": "none", "precision": "fp32"}
    )[0]
    assert tight.plan.zero > 0 or tight.plan.pp > 1
    assert tight.fits
    alone = {"compile": "none", "precision": "fp32", "tp": 1, "pp": 1}
    divided = search(JOB.replace(limits=tightfit.Limits(memory=int(limit))), machine, alone)[0]
    assert divided.plan.zero > 0
    assert divided.fits
    without_input = [one.time.step_s - one.time.input_s for one in (tight, divided)]  # which each search measures
    assert without_input[0] <= without_input[1] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sequence_parallel_takes_less_memory(estimator: Estimator, recompute: str) -> None:
    """Norms, residual stream and inputs of matrix products are sharded: all but the tensors inside
    attention and MLP."""
    plan = tightfit.Plan(tp=4, recompute=recompute, chunked_loss=512, fused_optimizer=True)
    held = [
        estimator.estimate(plan.replace(sequence_parallel=divided)).peak.rows["activations"]
        for divided in (False, True)
    ]
    assert held[1] < 0.6 * held[0]


def test_sequence_parallel_sends_gathers_and_scatters(estimator: Estimator) -> None:
    """Each of a block's 2 regions sends a gather and a scatter in forward and in backward, and one
    more gather in backward; a sum is both."""
    whole = 16 * 128 * 512 * 4  # samples, positions, width, bytes
    sent = {}
    for divided in (False, True):
        plan = tightfit.Plan(tp=2, sequence_parallel=divided)
        (message,) = estimator.estimate(plan).ledger.messages
        sent[divided] = message.bytes / (whole / 2)
    beside = sent[False] - 6 * 2 * 2 * 2  # embedding and head, and what each token's loss sends
    assert 3.9 < beside < 4.1
    assert sent[True] == pytest.approx(
        6 * 2 * 5 + 2 + beside, rel=1e-3
    )  # joined after the last block, divided before the first


@pytest.mark.slow
def test_a_search_shards_sequences_too_long_for_a_device() -> None:
    """There is one long sample per pair of devices: nothing else makes a sample's activations
    smaller, which take more than the buffers of further process groups."""
    job = JOB.replace(
        model={**LLAMA, "max_position_embeddings": 65536},
        data={"synthetic": "tokens", "sequence_length": 65536},
        train=tightfit.Train(batch=4, steps=1000),
    )
    machine, pins = Machine.named("a100-80gb:2"), {"compile": "none", "tp": 1, "pp": 1, "precision": "bf16-mixed"}
    alone = Estimator(job, machine).estimate(
        tightfit.Plan(dp_shard=2, zero=3, micro_batch=1, recompute="full", chunked_loss=1024, precision="bf16-mixed")
    )
    job = job.replace(limits=tightfit.Limits(memory=int(alone.peak_bytes - 30e6)))
    chosen = search(job, machine, pins)[0]
    assert chosen.plan.cp == 2
    assert chosen.fits


@pytest.mark.slow
def test_more_devices_than_samples_split_the_model() -> None:
    job = JOB.replace(train=tightfit.Train(batch=2, steps=1000))
    chosen = search(job, Machine.named("a100-80gb:8"), {"compile": "none"})[0].plan
    assert chosen.devices == 8
    assert chosen.data_parallel <= 2
    with pytest.raises(InputError, match="each device needs a sample"):
        search(job, Machine.named("a100-80gb:8"), {"compile": "none", "dp_replicate": 8})


@pytest.mark.slow
def test_a_pinned_pipeline_is_split_by_cost() -> None:
    wide = {**LLAMA, "vocab_size": 60000, "hidden_size": 2048, "max_position_embeddings": 1024}
    job = JOB.replace(model=wide, data={"synthetic": "tokens", "sequence_length": 1024})
    pins = {"compile": "none", "pp": 2, "precision": "fp32", "chunked_loss": None}
    chosen = search(job, Machine.named("a100-80gb:2"), pins)[0].plan
    assert chosen.split is not None
    assert chosen.split[0] > chosen.split[1]  # the head is on the second device
    assert chosen.micro_batch_of(16) < 16


@pytest.mark.parametrize("fields", part([{"dp_replicate": 4, "pp": 2, "split": (3, 3)}, {"dp_replicate": 8}], 2))
def test_plans_that_a_search_skips_are_not_better(estimator: Estimator, fields: dict[str, Any]) -> None:
    """Bounds rule out most plans: the best estimated plan is the best of all, whatever the limit."""
    start = tightfit.Plan(**fields)
    pins = {"precision": "fp32", **{name: fields[name] for name in fields if name != "dp_replicate"}}
    everything = [estimator.estimate(plan) for plans in candidates(estimator, start, pins) for plan in plans]
    peaks = sorted(one.peak_bytes for one in everything)
    for share in (0.02, 0.1, 0.3, 0.5, 0.7, 1.0):
        limit = peaks[int(share * (len(peaks) - 1))] * 1.1
        tight = copy.copy(estimator)
        tight.limit_bytes = limit
        tried = estimate_candidates(tight, start, pins)
        assert len(tried) < len(everything)
        best = min((replace(one, limit_bytes=limit) for one in everything), key=lambda one: (not one.fits, one.total_s))
        assert min(one.total_s for one in tried if one.fits) <= 1.01 * best.total_s


def test_latency_of_a_collective_counts_its_hops() -> None:
    """NCCL's model: of a ring of 32 on 4 nodes 28 hops are inside one and 3 between them; a sum goes around twice."""
    machine = Machine.named("h100-sxm:8x4")
    gather = latency(tightfit.Plan(dp_shard=32, zero=3), machine, ("dp_shard",), 1)
    assert gather == pytest.approx(14e-6 + 28 * 1.9e-6 + 3 * 4e-6)
    summed = latency(tightfit.Plan(dp_replicate=32), machine, ("dp_replicate",), 2)
    assert summed == pytest.approx(2 * gather - 14e-6)
    assert latency(tightfit.Plan(dp_shard=8, zero=3, dp_replicate=4), machine, ("dp_replicate",), 1) == pytest.approx(
        14e-6 + 3 * 4e-6
    )
    assert latency(tightfit.Plan(tp=8), machine, ("tp",), 2) == pytest.approx(14e-6 + 14 * 1.9e-6)
    assert latency(tightfit.Plan(tp=8, pp=4), machine, ("pp",), 1) == pytest.approx(14e-6 + 4e-6)


def test_latency_grows_with_the_number_of_calls(estimator: Estimator) -> None:
    """ZeRO-3 gathers each of 6 blocks and what is outside them twice and scatters once, for each micro-batch."""
    machine = Machine.named("a100-80gb:8")
    plan = tightfit.Plan(dp_shard=8, zero=3, micro_batch=1)
    messages = Estimator(JOB, machine).estimate(plan).ledger.messages
    calls = sum(message.latency_s for message in messages) / latency(plan, machine, ("dp_shard",), 1)
    assert calls == pytest.approx(2 * 3 * 7)
    pipeline = Estimator(JOB, machine).estimate(tightfit.Plan(pp=2, micro_batch=2)).ledger.rank_program
    assert pipeline is not None
    assert pipeline.latency_s == latency(tightfit.Plan(pp=2), machine, ("pp",), 1)


@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.slow
def test_a_stage_sends_its_share_of_tensor_parallel_messages(compiled: str) -> None:
    """The tp devices of half of the blocks send half of the messages, compiled or not."""
    estimator = Estimator(JOB, Machine.named("a100-80gb:8"))
    said = {
        pp: estimator.estimate(tightfit.Plan(tp=2, pp=pp, dp_replicate=8 // 2 // pp, compile=compiled, micro_batch=2))
        for pp in (1, 2)
    }
    whole, half = (
        sum(one.bytes for one in said[pp].ledger.messages if one.name == "activations")
        / said[pp].plan.share_of(JOB.train.batch)
        for pp in (1, 2)
    )
    assert 0.4 < half / whole < 0.65  # the embedding and the head are at one end each


def test_gradient_buckets_are_larger_on_many_devices() -> None:
    assert bucket_bytes(8) == bucket_bytes(1) == BUCKET_BYTES
    assert bucket_bytes(2048) == 2048 * MIN_BYTES_PER_DEVICE
    job = tightfit.Job(
        model={"preset": "llama-2-7b"},
        data={"synthetic": "tokens", "sequence_length": 512},
        train=tightfit.Train(batch=4096, steps=10),
    )
    estimator = Estimator(job, Machine.named("h100-sxm:8x256"))
    gradients = estimator.estimate(tightfit.Plan(dp_replicate=2048, micro_batch=1)).ledger.messages[0]
    assert gradients.latency_s < gradients.bytes / gradients.bytes_per_s


@pytest.mark.slow
def test_a_search_on_thousands_of_devices_tries_the_usual_plans() -> None:
    """The plans of Megatron and Llama 3: tensor parallelism within a node, an interleaved pipeline
    across nodes, ZeRO 1 for replicas."""
    job = tightfit.Job(
        model={"preset": "llama-3-405b"},
        data={"synthetic": "tokens", "sequence_length": 8192},
        train=tightfit.Train(batch=2048, steps=1000),
    )
    estimator = Estimator(job, Machine.named("h100-sxm:8x2048"))
    chosen = search(job, estimator.machine, estimator=estimator)[0]
    assert chosen.fits
    usual = [
        estimator.estimate(
            chosen.plan.replace(
                pp=pp, dp_shard=2048 // pp, dp_replicate=1, zero=1, tp=8, micro_batch=1, recompute=recompute, split=None,
                schedule="interleaved" if pieces > 1 else "1f1b", virtual_stages=pieces,
            )
        )
        for pp, pieces in ((2, 4), (4, 4), (8, 1), (8, 4), (16, 1), (16, 2))
        for recompute in ("selective", "full")
    ]  # fmt: skip
    assert any(one.fits for one in usual)
    assert chosen.total_s <= 1.1 * min(one.total_s for one in usual if one.fits)


def test_shards_of_replicas_are_summed_after_backward() -> None:
    """With ZeRO 1 and 2, in one flat copy; ZeRO-3 sums them block by block."""
    estimator = Estimator(JOB, Machine.named("l4:4"))
    whole = estimator.estimate(tightfit.Plan()).ledger.gradient_bytes()
    for zero in (1, 2, 3):
        ledger = estimator.estimate(tightfit.Plan(zero=zero, dp_shard=2, dp_replicate=2)).ledger
        across = [one for one in ledger.messages if one.name == "gradients"][-1]
        assert across.overlaps is (zero == 3)
        assert ledger.replica_sum_bytes == (0 if zero == 3 else whole / 2)


def test_a_parameter_server_sends_fp32_always() -> None:
    job = JOB.replace(allow=["bf16", "nearest-rounding"])
    estimator = Estimator(job, Machine.named("l4:2"))
    plans = [tightfit.Plan(parameter_server="sync", dp_replicate=2, precision=one) for one in ("fp32", "bf16-true")]
    wide, narrow = (estimator.estimate(plan).ledger for plan in plans)
    assert narrow.gradient_bytes() == wide.gradient_bytes() / 2
    (sent,), (same,) = ([one for one in ledger.messages if "server" in one.name] for ledger in (wide, narrow))
    assert sent.bytes == same.bytes
    assert narrow.phases["server"] > wide.phases["server"] / 2
