"""With gradient_sync=step, gradients are reduce-scattered once per step; losses and weights are those
of a reduction in each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests import tiny
from tests.contract import cases
from tests.pool import together
from tightfit.distributed import collectives
from tightfit.errors import InputError
from tightfit.methods import zero
from tightfit.parallel import gradient_buckets
from tightfit.planner.candidates import candidates
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator

HERE = "tests.parallel.test_gradient_sync:"
WIDTH, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Dropping(nn.Module):
    """Leaves out its second block in every second forward, also in the last one of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head, self.calls = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 2:
                x = block(x)
        return self.head(x)


def job_of() -> tightfit.Job:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(WIDTH, generator=generator), index % 5) for index in range(32)]
    return tightfit.Job(model=Dropping, data=samples, train=tightfit.Train(batch=8, steps=STEPS, learning_rate=0.05))


def _trained(fields: dict[str, Any]) -> dict[str, Tensor]:
    run = tightfit.build(job_of(), tightfit.Plan(micro_batch=1, **fields))
    list(tightfit.train(run))
    return cases.state_of(run)


def test_a_layer_that_the_last_micro_batch_skips_is_reduced() -> None:
    """Each device has 4 micro-batches of a sample; the fourth does not call the second block."""
    expected = together(2, f"{HERE}_trained", {"dp_replicate": 2})[0]
    start = cases.state(tightfit.build(job_of()).model)
    assert not torch.equal(expected["blocks.1.inner.weight"], start["blocks.1.inner.weight"])
    for fields in ({"zero": 3}, {"zero": 2}):
        plan = {**fields, "dp_shard": 2, "gradient_sync": "step"}
        assert cases.distance(together(2, f"{HERE}_trained", plan)[0], expected) <= 1e-6


def _sent(fields: dict[str, Any]) -> int:
    """Bytes of the gradients that this device gives to reduce-scatters in a step."""
    run = tightfit.build(cases.make_case("llama").job, tightfit.Plan(micro_batch=1, **fields))
    sizes: list[int] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(part: Tensor, rows: Tensor, group: Any) -> Any:
            sizes.append(rows.nbytes)
            return call(part, rows, group)

        return counts

    with (
        patch.object(collectives, "reduce_scatter", counted(collectives.reduce_scatter)),
        patch.object(gradient_buckets, "begin_reduce_scatter", counted(gradient_buckets.begin_reduce_scatter)),
    ):
        next(iter(tightfit.train(run)))
    return sum(sizes)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradients_are_sent_once_per_step(stage: int) -> None:
    """Instead of once in each of the 4 micro-batches."""
    fields = {"zero": stage, "dp_shard": 2}
    each, once = (together(2, f"{HERE}_sent", {**fields, "gradient_sync": when})[0] for when in ("micro-batch", "step"))
    assert each == 4 * once > 0
    machine = tightfit.Machine.named("h100-sxm").replace(devices_per_node=2)
    job = cases.make_case("llama").job
    messages = [
        {one.name: one for one in tightfit.estimate(job, plan, machine).ledger.messages}["gradients"]
        for plan in (tightfit.Plan(micro_batch=1, **fields, gradient_sync=when) for when in ("micro-batch", "step"))
    ]
    assert messages[0].bytes == 4 * messages[1].bytes
    assert messages[0].latency_s == pytest.approx(4 * messages[1].latency_s)
    assert (messages[0].micro_batches, messages[1].micro_batches) == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "masters"),
    [
        pytest.param("fp32", False, marks=pytest.mark.slow),
        pytest.param("bf16-mixed", False, marks=pytest.mark.slow),
        pytest.param("bf16-true", False, marks=pytest.mark.slow),
        ("bf16-true", True),
    ],
)
def test_full_gradients_are_predicted(precision: str, masters: bool) -> None:
    """The estimate beside the dry run, which executes the step on fake tensors."""
    machine = tightfit.Machine.named("h100-sxm").replace(devices_per_node=2)
    job = cases.make_case("llama").job.replace(model={**cases.LLAMA, "hidden_size": 64, "intermediate_size": 512})
    more = {"precision": precision, "master_weights": masters, "recompute": "full"}
    peaks = {}
    for when in ("micro-batch", "step"):
        plan = tightfit.Plan(micro_batch=1, zero=3, dp_shard=2, gradient_sync=when, **more)
        rows = tightfit.estimate(job, plan, machine).peak.rows
        peaks[when] = sum(size for row, size in rows.items() if row not in ("runtime", "allocator"))
        assert peaks[when] == pytest.approx(tightfit.dry_run(job, plan, "cuda").total, rel=0.08)
    assert peaks["step"] > peaks["micro-batch"]


def test_stages_0_and_1_have_no_such_choice() -> None:
    with pytest.raises(InputError, match="as zero: 0 and 1 always do"):
        tightfit.build(tiny.job(), tightfit.Plan(gradient_sync="step"))


def test_search_tries_both_where_they_differ() -> None:
    machine, job = tightfit.Machine.named("l4").replace(devices_per_node=4), tiny.job(batch=32)
    start, _ = complete(job, machine, {})
    kinds = {
        (plan.zero, plan.gradient_sync)
        for plans in candidates(Estimator(job, machine), start, {"precision": "fp32"})
        for plan in plans
    }
    assert kinds == {(stage, "micro-batch") for stage in (0, 1, 2, 3)} | {(3, "step")}
    plan = tightfit.Plan(zero=3, dp_shard=4, gradient_sync="step")
    assert zero.is_redundant(plan, 32)
    assert not zero.is_redundant(plan.replace(micro_batch=2), 32)
