"""The asynchronous parameter server is compared with a serial replay of the updates in the order in
which they came."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.distributed.processes import rank
from tightfit.errors import InputError

HERE = "tests.methods.test_parameter_server:"
STEPS = 6


def job(**train: Any) -> tightfit.Job:
    settings = {"steps": STEPS, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, **train}
    return cases.make_case("llama", **settings).job.replace(allow=[*cases.ALLOW, "asynchronous"])


def trained(fields: dict[str, Any], slow: int) -> tuple[list[Any], list[int | None], dict[str, Tensor]]:
    """The server's log, the staleness of its steps, and this process's weights; process `slow` takes its time."""
    run = tightfit.build(job(), tightfit.Plan(**fields))
    late = []
    for step in tightfit.train(run):
        late.append(step.staleness)
        if rank() == slow:
            time.sleep(0.05)
    return getattr(run.executor, "log", []), late, cases.state_of(run)


def replayed(log: list[tuple[int, int, int]], workers: int) -> dict[str, Tensor]:
    """One process: each update's gradient is that of its worker's samples at the version that the log names."""
    run = tightfit.build(job())
    batches = [batch for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False)]
    weights = list(run.model.parameters())
    versions = [[weight.detach().clone() for weight in weights]]
    for worker, step, version in log:
        size = cases.BATCH
        first, last = size * (worker - 1) // workers, size * worker // workers
        share = {name: value[first:last] for name, value in batches[step].items()}
        put(weights, versions[version])
        (run.loss_sum(share) / run.objective.count(share)).backward()
        put(weights, versions[-1])
        run.optimizer.step()
        run.optimizer.zero_grad()
        versions.append([weight.detach().clone() for weight in weights])
    return cases.state(run.model)


@torch.no_grad()
def put(weights: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_each_gradient_is_applied_when_it_arrives(staleness: int | None) -> None:
    plan = {"parameter_server": "async", "dp_replicate": 3, "staleness": staleness}
    found = together(4, HERE + "trained", plan, 3)
    log, late, weights = found[0]
    assert sorted((worker, step) for worker, step, _ in log) == [(w, s) for w in (1, 2, 3) for s in range(STEPS)]
    assert cases.distance(weights, replayed(log, 3)) < 1e-6
    for _, _, others in found[1:]:
        assert cases.distance(others, weights) < 1e-6  # in the end everybody has the server's
    behind = [number - version for number, (_, _, version) in enumerate(log)]
    assert max(late) == max(behind)  # what a step says of its staleness is what it was
    ahead = max(
        sum(worker == 1 for worker, _, _ in log[:number]) - sum(worker == 3 for worker, _, _ in log[:number])
        for number in range(len(log) + 1)
    )
    assert ahead <= (STEPS if staleness is None else staleness + 1)


def evaluated(fields: dict[str, Any]) -> float:
    data = {"synthetic": "tokens", "sequence_length": 16, "held_out": 0.1, "samples": 64}
    small = tightfit.Job(model=cases.LLAMA, data=data, train=job().train, allow=["asynchronous"])
    run = tightfit.build(small, tightfit.Plan(**fields))
    return tightfit.evaluate(run, 5)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_evaluation_equals_that_of_one_process(kind: str) -> None:
    alone = evaluated({})
    found = together(3, HERE + "evaluated", {"parameter_server": kind, "dp_replicate": 2})
    assert found == pytest.approx([alone] * 3, rel=1e-6)


class Numbers(torch.nn.Module):
    """Parameters that are complex, or have more digits than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.fine = torch.nn.Parameter(torch.full((8,), 1.0 + 1e-9, dtype=torch.float64))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)
        return self.head((mixed.double() * self.fine).float())


def numbers(fields: dict[str, Any], clip: float | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    samples = [(torch.randn(8, generator=generator), number % 3) for number in range(24)]
    train = tightfit.Train(batch=8, steps=3, optimizer="sgd", learning_rate=0.1, clip=clip)
    run = tightfit.build(
        tightfit.Job(model=Numbers, data=samples, train=train, allow=("compressed-gradients",)), tightfit.Plan(**fields)
    )
    list(tightfit.train(run))
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def test_complex_and_fp64_parameters_are_sent_unconverted() -> None:
    expected = numbers({})
    for found in together(3, HERE + "numbers", {"parameter_server": "sync", "dp_replicate": 2}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(found["fine"], found["fine"].float().double())


@pytest.mark.parametrize(
    ("fields", "close"), [({"dp_replicate": 2}, 1e-5), ({"dp_replicate": 2, "compressed_gradients": "bf16"}, 5e-3)]
)
def test_replicas_clip_and_compress_gradients_of_every_type(fields: dict[str, Any], close: float) -> None:
    expected = numbers({}, 0.1)
    for found in together(2, HERE + "numbers", fields, 0.1):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=close, atol=close / 10)


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises(tightfit.InputError) as caught:
        numbers(fields)
    return str(caught.value)


def test_zero_3_refuses_mixed_types_in_one_gather() -> None:
    for said in together(2, HERE + "refused", {"zero": 3, "dp_shard": 2}):
        assert "Numbers has both float32 parameters and parameters of another dtype" in said


class RunningMean(torch.nn.Module):
    """Averages a buffer of its own, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * hidden.mean(0))
        return self.second(torch.relu(hidden - self.average.clone()))


def with_running_mean(kind: str) -> str:
    job = tightfit.Job(
        model=RunningMean,
        data=[(torch.randn(6), number % 3) for number in range(8)],
        train=tightfit.Train(batch=4, steps=1),
        allow=["asynchronous"],
    )
    try:
        tightfit.build(job, tightfit.Plan(parameter_server=kind, dp_replicate=2))  # type: ignore[arg-type]
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_buffer_that_each_worker_changes_is_refused(kind: str) -> None:
    for said in together(3, HERE + "with_running_mean", kind):
        assert ("changes the buffer average" in said) is (kind == "async")
