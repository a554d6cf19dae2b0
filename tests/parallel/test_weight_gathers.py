"""ZeRO stages 1 and 2 gather updated weights during the next forward, and nothing reads a weight
that has not arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import tightfit
from tests.pool import together
from tightfit.machine import Machine
from tightfit.measure.flops import forward_flops
from tightfit.methods import compile
from tightfit.parallel import gradient_buckets, weight_gathers
from tightfit.planner.estimator import Estimator

HERE = "tests.parallel.test_weight_gathers:"
PLANS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero": 1, "dp_shard": 2},
    "accumulated": {"zero": 2, "dp_shard": 2, "micro_batch": 1},
    "recomputed": {"zero": 1, "dp_shard": 2, "micro_batch": 1, "recompute": "full"},
    "compiled": {"zero": 1, "dp_shard": 2, "compile": "block"},
    "one region": {"zero": 1, "dp_shard": 2, "compile": "model"},
}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.wide, self.narrow = number, nn.Linear(6, 9), nn.Linear(9, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """Blocks in a row, between an embedding and a head that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x.mean(1) @ self.embedding.weight.T


class Reading(Net):
    """Reads the last block's weights before any block, without a gradient, and in the first block those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].wide.weight = self.blocks[2].wide.weight
        self.elsewhere = [self.blocks[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) / self.blocks[3].narrow.weight.detach().norm()
        for block in self.blocks:
            x = self.elsewhere[0].narrow(torch.relu(block.wide(x))) + block(x)
        return x.mean(1) @ self.embedding.weight.T


MODELS = {"net": Net, "reading": Reading}


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def job_of(name: str) -> tightfit.Job:
    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randint(7, (5,), generator=generator), number % 7) for number in range(24)]
    settings = tightfit.Train(batch=4, steps=4, learning_rate=0.05, optimizer="sgd")
    return tightfit.Job(model=MODELS[name], loss=loss, data=samples, train=settings)


class Late:
    """A broadcast that begins when it is waited for: what has not been waited for has not come, however fast the machine is."""

    def __init__(self, log: list[str], *given: Any, **named: Any) -> None:
        self.log, self.given, self.named = log, given, named

    def wait(self) -> None:
        self.log.append("arrived")
        SENT(*self.given, **self.named)


SENT = dist.broadcast


@contextmanager
def late() -> Iterator[list[str]]:
    """Within, gathers come only when they are waited for, in small buckets or in place; what arrived when."""
    log: list[str] = []

    def broadcast(*given: Any, async_op: bool = False, **named: Any) -> Any:
        return Late(log, *given, **named) if async_op else SENT(*given, **named)

    with (
        patch.multiple(gradient_buckets, BUCKET_BYTES=300, MIN_BYTES_PER_DEVICE=0),
        patch.object(weight_gathers, "MIN_IN_PLACE_BYTES", 100),
        patch.object(dist, "broadcast", broadcast),
        patch.object(compile, "BACKEND", "aot_eager"),
    ):
        yield log


def weights_of(run: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def trained(name: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with late():
        run = tightfit.build(job_of(name), tightfit.Plan(**fields))
        return [step.loss for step in tightfit.train(run, weights_at_yield=False)], weights_of(run)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_no_weight_is_read_before_it_is_gathered(name: str, plan: str) -> None:
    losses, expected = trained(name, {})
    for found, weights in together(2, HERE + "trained", name, PLANS[plan]):
        assert found == pytest.approx(losses, rel=1e-6)
        for key, value in weights.items():
            assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7), key


def order(name: str, fields: dict[str, Any]) -> tuple[list[str], int]:
    """What happens in the second step, in order; and how often torch's compiler gave up."""
    torch._dynamo.utils.counters.clear()
    with late() as log:
        run = tightfit.build(job_of(name), tightfit.Plan(**fields))
        steps = tightfit.train(run, weights_at_yield=False)
        next(steps)
        log.append("step")
        for block in run.model.blocks:
            block.wide.register_forward_pre_hook(lambda *_, number=block.number: log.append(f"block {number}"))
        next(steps)
        steps.close()
    return log, sum(torch._dynamo.utils.counters["graph_break"].values())


def test_blocks_wait_for_their_own_weights_in_the_next_forward() -> None:
    """No weight has arrived when the step ends: the embedding arrives when the next forward begins,
    and a block's weights when it is called."""
    for log, _ in together(2, HERE + "order", "net", PLANS["stage 1"]):
        assert log[0] == "step"
        places = [log.index(f"block {number}") for number in range(4)]
        assert all("arrived" in log[before:after] for before, after in zip([0, *places], places, strict=False))


def test_weights_shared_outside_blocks_are_gathered_first() -> None:
    for log, _ in together(2, HERE + "order", "reading", PLANS["stage 1"]):
        before = log[: log.index("block 0")]
        assert before.count("arrived") == log[: -log[::-1].index("block 3")].count("arrived")


def seen(fields: dict[str, Any], folder: str) -> list[Any]:
    """Each is read after a step: a forward's FLOPs on fake tensors, an evaluation, a checkpoint,
    the model's output, its state_dict."""
    job = tightfit.Job(
        model={
            "architecture": "llama",
            "vocab_size": 32,
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        },
        data={"synthetic": "tokens", "sequence_length": 8, "held_out": 0.1, "samples": 64},
        train=tightfit.Train(batch=4, steps=6, learning_rate=0.05, optimizer="sgd", evaluate_samples=4),
    )
    found: list[Any] = []
    with late():
        run = tightfit.build(job, tightfit.Plan(**fields))
        steps = tightfit.train(run, weights_at_yield=False)
        next(steps)
        found.append(forward_flops(run, run.data.example()))
        next(steps)
        found.append(tightfit.evaluate(run))
        next(steps)
        path = tightfit.save(run, folder, 2)
        found.append(
            {key: value for file in sorted(path.glob("model*.safetensors")) for key, value in load_file(file).items()}
        )
        next(steps)
        run.model.eval()
        with torch.no_grad():
            found.append(run.model(torch.arange(8).view(1, 8)).logits)
        run.model.train()
        next(steps)
        found.append(weights_of(run))
        next(steps)
        steps.close()
        found.append({key: value.detach().clone() for key, value in run.model.named_parameters()})
    return found


def test_reading_weights_between_steps_waits_for_them(tmp_path: Path) -> None:
    alone = seen({}, str(tmp_path / "alone"))
    for found in together(2, HERE + "seen", PLANS["stage 1"], str(tmp_path / "two")):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def read_at_yield(fields: dict[str, Any]) -> list[dict[str, Tensor]]:
    with late():
        run = tightfit.build(job_of("net"), tightfit.Plan(**fields))
        parameters = dict(run.model.named_parameters())
        return [{key: p.detach().clone() for key, p in parameters.items()} for _ in tightfit.train(run)]


def test_a_user_s_loop_finds_all_weights_at_each_step() -> None:
    alone = read_at_yield({})
    for found in together(2, HERE + "read_at_yield", PLANS["stage 1"]):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gathers_hidden_by_the_forward_take_no_gpu_time() -> None:
    """Weights that the forward needs first do take time. Without blocks that wait for their own
    weights, all of it does."""
    job = tightfit.Job(
        model={
            "architecture": "llama",
            "vocab_size": 2048,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 24,
        },
        data={"synthetic": "tokens", "sequence_length": 128},
        train=tightfit.Train(batch=64, steps=1000),
    )
    estimator = Estimator(job, Machine.named("a100-80gb:2"))
    found = estimator.estimate(tightfit.Plan(zero=1, dp_shard=2, micro_batch=16))
    updated = found.ledger.messages[-1]
    kept = [
        p.bytes for p in found.ledger.parameters if not 0 < p.used_by_blocks[0] < 24
    ]  # all but the first block, and what is in none
    at_start = max(sum(kept), gradient_buckets.BUCKET_BYTES) / found.ledger.gradient_bytes()
    assert updated.at_start == pytest.approx(at_start, rel=0.01)
    waiting = replace(found.ledger, messages=(replace(updated, overlaps=False, at_start=0.0),))
    beside = replace(found.ledger, messages=(updated,))
    whole_s, shown_s = (estimator.time_model.step_time(one).communication_s for one in (waiting, beside))
    assert updated.at_start * whole_s <= shown_s < whole_s
    one_region = estimator.estimate(tightfit.Plan(zero=1, dp_shard=2, micro_batch=16, compile="model"))
    assert not one_region.ledger.messages[-1].overlaps
