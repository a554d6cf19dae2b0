"""Lower bounds on memory, by which a search skips plans before it traces them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

import tightfit
from tests.contract import cases
from tightfit.cost.entries import Parameter, with_fp32_gradients
from tightfit.errors import DoesNotFit
from tightfit.machine import Machine
from tightfit.parallel.fsdp.planning import least_unsharded_bytes
from tightfit.planner import parallel_plans
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import surely_exceeds_memory
from tightfit.planner.micro_batches import search_micro_batch
from tightfit.planner.search import search
from tightfit.planner.tracing.profiler import Profiler


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    model = {**cases.LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    job = tightfit.Job(
        model={**model, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64},
        data={"synthetic": "tokens", "sequence_length": 64},
        train=tightfit.Train(batch=64, steps=1000),
        allow=["bf16"],
    )
    return Estimator(job, Machine.named("h100-sxm:8"))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "bf16-true", "master_weights": True},
        {"precision": "bf16-mixed", "gradient_sync": "step"},
        {"precision": "bf16-mixed", "tp": 2, "dp_shard": 4},
    ],
    ids=str,
)
def test_a_step_needs_at_least_the_bound(estimator: Estimator, fields: dict[str, Any]) -> None:
    """With ZeRO-3, whole blocks are a part of it."""
    plan = tightfit.Plan(**{"zero": 3, "dp_shard": 8, "micro_batch": 1, "recompute": "full", **fields})
    one = estimator.estimate(plan)
    bound = estimator.memory_lower_bound(plan)
    parameters = estimator.profiler.model.parameters(plan)
    if plan.master_weights:
        parameters = with_fp32_gradients(parameters)
    sharded = sum(parameter.bytes for parameter in parameters) * (1 - 1 / plan.shards)
    stage_2 = plan.replace(zero=2, gradient_sync=tightfit.Plan().gradient_sync)
    runtime = estimator.runtime_bytes_of(plan) - estimator.runtime_bytes_of(stage_2)
    below = estimator.memory_lower_bound(stage_2) - sharded + runtime  # the bound of ZeRO-3 without whole blocks
    block = sum(parameter.bytes for parameter in parameters if ".layers.0." in parameter.name)
    assert bound - below == pytest.approx(least_unsharded_bytes(parameters, plan))
    assert below + block < bound <= one.peak.total


def test_a_pipeline_s_bound_has_no_whole_blocks(estimator: Estimator) -> None:
    plan = tightfit.Plan(zero=3, dp_shard=4, pp=2, micro_batch=1)
    assert estimator.memory_lower_bound(plan) <= estimator.estimate(plan).peak.total


def test_offloaded_parameters_are_not_counted(estimator: Estimator) -> None:
    plan = tightfit.Plan(zero=3, dp_shard=8, micro_batch=1)
    away = plan.replace(offload=("states", "gradients", "parameters"))
    assert estimator.memory_lower_bound(away) < estimator.memory_lower_bound(plan)
    assert estimator.memory_lower_bound(away) <= estimator.estimate(away).peak.total


def test_tensor_parallelism_divides_activations_at_best(estimator: Estimator) -> None:
    fresh = Estimator(estimator.job, estimator.machine, estimator.profiler)
    plan = tightfit.Plan(precision="bf16-mixed", dp_replicate=8, micro_batch=8)
    sharded = plan.replace(tp=4, dp_replicate=2, sequence_parallel=True)
    assert fresh.bytes_per_sample(sharded) == 0
    fresh.estimate(plan)
    assert fresh.bytes_per_sample(sharded) == fresh.bytes_per_sample(plan) / 4 > 0
    assert not fresh.is_far_too_large(sharded)
    fresh.limit_bytes = (fresh.memory_lower_bound(sharded) + 8 * fresh.bytes_per_sample(sharded)) / 1.4
    assert fresh.is_far_too_large(sharded)  # by more than 1.3 times
    assert not fresh.is_far_too_large(plan.replace(micro_batch=2))
    found = fresh.estimate(sharded)
    assert found.peak.total - fresh.memory_lower_bound(sharded) >= 8 * fresh.bytes_per_sample(plan) / 4


def test_degrees_whose_states_exceed_the_memory_are_recognized(estimator: Estimator) -> None:
    fresh = Estimator(estimator.job, estimator.machine, estimator.profiler)
    start, pins = tightfit.Plan(precision="bf16-mixed", tp=2, dp_replicate=4), {"tp": 2, "precision": "bf16-mixed"}
    assert not surely_exceeds_memory(fresh, start, pins)
    fresh.limit_bytes = fresh.runtime_bytes_of(start)
    assert surely_exceeds_memory(fresh, start, pins)


@pytest.mark.slow
def test_a_batch_smaller_than_the_cluster_is_refused(estimator: Estimator) -> None:
    """The refusal names the leanest plan, although no plan of data parallelism alone uses all devices."""
    job = estimator.job.replace(train=tightfit.Train(batch=4, steps=10), limits={"memory": "600 MiB"})
    with pytest.raises(DoesNotFit, match="leanest plan"):
        search(job, estimator.machine, {"compile": "none"})


def test_search_does_not_divide_experts() -> None:
    from tightfit.planner.parallelism import by_lower_bound

    sizes: dict[str, Any] = {
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        **{"num_key_value_heads": 4, "max_position_embeddings": 16},
    }
    degrees = {}
    for name, more in (("llama", {}), ("mixtral", {"num_local_experts": 4})):
        job = tightfit.Job(
            model={"architecture": name, **sizes, **more},
            data={"synthetic": "tokens", "sequence_length": 16},
            train=tightfit.Train(batch=8, steps=100),
        )
        found = by_lower_bound(Estimator(job, Machine.named("h100-sxm:8")), tightfit.Plan(), {})
        degrees[name] = {field for _, one in found for field in one}
    assert degrees == {"llama": {"tp", "pp", "cp"}, "mixtral": {"pp", "cp"}}


def test_a_size_that_cannot_fit_is_not_traced(estimator: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the activations without tensor parallelism, which divides them at best."""
    fresh = Estimator(estimator.job, estimator.machine, estimator.profiler)
    plain = tightfit.Plan(precision="bf16-mixed", dp_replicate=8, micro_batch=8)
    fresh.estimate(plain)
    start = plain.replace(tp=4, dp_replicate=2, sequence_parallel=True)
    plans = [start.replace(micro_batch=size) for size in (8, 4, 2, 1)]
    fresh.limit_bytes = (fresh.memory_lower_bound(start) + fresh.bytes_per_sample(start)) / 1.4
    traced: list[int | None] = []
    estimate = fresh.estimate
    monkeypatch.setattr(fresh, "estimate", lambda plan: traced.append(plan.micro_batch) or estimate(plan))
    assert search_micro_batch(fresh, plans) == []
    assert traced == []
    lean = [plan.replace(recompute="full") for plan in plans]  # is estimated, so that a refusal can name it
    assert [one.plan.micro_batch for one in search_micro_batch(fresh, lean)] == [1]


@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_weights_are_tried_beside_a_slow_plan(
    estimator: Estimator, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pipelines, which share the traces of other plans; with tensor parallelism only if nothing fitted yet."""
    tried: list[str] = []
    monkeypatch.setattr(
        parallel_plans, "_candidates_that_may_fit", lambda _, plan, *__: tried.append(plan.precision) or []
    )
    start = tightfit.Plan(precision="bf16-mixed", pp=2, tp=tp, dp_replicate=4 // tp, micro_batch=1)
    parallel_plans._by_precision(estimator, start, {}, 10.0)
    assert tried == ["bf16-mixed", "bf16-true"][: 2 if tp == 1 else 1]
    tried.clear()
    parallel_plans._by_precision(estimator, start, {}, math.inf)
    assert tried == ["bf16-mixed", "bf16-true"]


def test_traces_are_shared_with_and_without_masters(estimator: Estimator) -> None:
    fields: dict[str, Any] = {"precision": "bf16-true", "dp_shard": 8, "micro_batch": 1}
    pairs = [[tightfit.Plan(**fields, zero=zero, master_weights=own) for own in (False, True)] for zero in (2, 3)]
    apart, shared = ([estimator.profiler.recorded_step(plan, 1)[0] for plan in pair] for pair in pairs)
    assert apart[0] is not apart[1]  # their gradients have other types
    assert shared[0] is shared[1]


def test_unequal_blocks_are_bounded_by_their_neighbours() -> None:
    """The largest block needs its own weights and gradients, and at least the smallest of others."""
    parameters = [
        Parameter(f"blocks.{number}.w", (size,), 4 * size, True, (number,)) for number, size in enumerate((1, 1, 8))
    ]
    assert least_unsharded_bytes(parameters, tightfit.Plan(zero=3, dp_shard=2)) == 4 * (8 + 8 + 1 + 1)


WITHOUT_NARROW_STATES: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "bf16-true", "master_weights": True},
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        ("adamw", {"states": "8-bit"}),
        *itertools.product(("adamw", "sgd", "adafactor", "lamb", "muon"), WITHOUT_NARROW_STATES),
    ],
    ids=str,
)
def test_states_without_recording_have_the_same_bytes(device: str, optimizer: str, fields: dict[str, Any]) -> None:
    plan = tightfit.Plan(**fields)
    train = tightfit.Train(batch=2, steps=2, optimizer=optimizer, groups=[{"match": "*norm*", "learning_rate": 0.1}])
    data = {"synthetic": "tokens", "sequence_length": 16}
    job = tightfit.Job(model=cases.LLAMA, data=data, train=train, allow=["bf16", "8-bit-states"])
    model = Profiler(job, device).model
    alone = model.state_bytes(plan)
    assert alone == sum(update.state_bytes for update in model.updates(plan).values())
    assert alone > 0 or optimizer == "sgd"
