"""Compiled once: no batch of another size, evaluation or length compiles anything again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import tightfit
from tightfit.errors import InputError
from tightfit.methods import compile as room

from .. import tiny

BLOCKS = tiny.MODEL["num_hidden_layers"]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what is handed to the compiler, which differentiates it and leaves it to eager kernels."""
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(room, "BACKEND", counted)
    torch.compiler.reset()
    yield counted
    torch.compiler.reset()


def ragged_samples() -> list[dict[str, torch.Tensor]]:
    """Of 5 to 15 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 300, (5 + index % 11,), generator=generator) for index in range(48)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def losses(job: tightfit.Job, plan: tightfit.Plan) -> list[float]:
    return [step.loss for step in tightfit.train(tightfit.build(job, plan))]


def job(data: Any = None, **train: Any) -> tightfit.Job:
    plain = tiny.job(**train).replace(model={**tiny.MODEL, "attention_dropout": 0.0})
    return plain if data is None else plain.replace(data=data)


@pytest.mark.parametrize("regions", ["block", "model"])
def test_short_micro_batches_and_evaluations_run_as_written(regions: str, counter: CompileCounterWithBackend) -> None:
    """Of 4 samples 3 and 1 are in a micro-batch; only those of 3 are compiled, and the evaluation's are not."""
    run = tightfit.build(job(steps=3), tightfit.Plan(compile=regions, micro_batch=3))
    counts = []
    for _ in tightfit.train(run):
        tightfit.evaluate(run)
        counts.append(counter.frame_count)
    assert counts[0] >= 1
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("regions", ["block", "model"])
def test_ragged_data_compile_once(regions: str, counter: CompileCounterWithBackend) -> None:
    uneven = job(ragged_samples(), steps=6)
    run = tightfit.build(uneven, tightfit.Plan(compile=regions))
    assert run.data.ragged
    counts, lengths = [], set()
    plain = run.loss_sum
    object.__setattr__(run, "loss_sum", lambda batch: (lengths.add(batch["input_ids"].shape), plain(batch))[1])
    for _ in tightfit.train(run):
        counts.append(counter.frame_count)
    assert len(lengths) > 1
    assert counts == [counts[0]] * 6


def test_blocks_of_one_kind_share_one_graph(counter: CompileCounterWithBackend) -> None:
    losses(job(steps=1), tightfit.Plan(compile="block"))
    assert counter.frame_count == 1


@pytest.mark.parametrize("regions", ["block", "model"])
def test_ragged_losses_are_those_of_eager(regions: str, counter: CompileCounterWithBackend) -> None:
    uneven = job(ragged_samples(), steps=3)
    assert losses(uneven, tightfit.Plan(compile=regions)) == pytest.approx(losses(uneven, tightfit.Plan()), rel=1e-5)


def test_a_model_without_blocks_is_compiled_whole_or_refused(counter: CompileCounterWithBackend) -> None:
    flat = tightfit.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 3)),
        data=[(torch.randn(4), index % 3) for index in range(4)],
        train=tightfit.Train(batch=2, steps=1),
    )
    with pytest.raises(InputError, match="compile: model"):
        tightfit.build(flat, tightfit.Plan(compile="block"))
    assert losses(flat, tightfit.Plan(compile="model")) == pytest.approx(losses(flat, tightfit.Plan()))
    assert counter.frame_count == 1


class Counting(nn.Module):
    """A block whose output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.scale * self.inner(x) / self.calls


class Constant(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Counted(nn.Module):
    def __init__(self, block: type[Counting]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("regions", ["block", "model"])
def test_buffers_that_blocks_change_are_not_computed_again_by_the_compiler(
    regions: str, counter: CompileCounterWithBackend
) -> None:
    samples = [(torch.randn(8), index % 8) for index in range(8)]
    train = tightfit.Train(batch=4, steps=2, trackers=())
    plan = tightfit.Plan(compile=regions, recompute="full")
    with pytest.raises(InputError, match=r"blocks.0.calls changes in forward"):
        losses(tightfit.Job(model=lambda: Counted(Counting), data=samples, train=train), plan)
    constant = tightfit.Job(model=lambda: Counted(Constant), data=samples, train=train)
    assert losses(constant, plan) == pytest.approx(losses(constant, tightfit.Plan()), rel=1e-6)


def fails(*unused: Any) -> Any:
    raise RuntimeError("view size is not compatible")


FAILING = {
    "while compiling": fails,
    "backward, while compiling": aot_autograd(fw_compiler=nop, bw_compiler=fails),
    "forward": aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(fails), bw_compiler=nop),
    "backward": aot_autograd(fw_compiler=nop, bw_compiler=lambda graph, inputs: make_boxed_func(fails)),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Wrong(Small):
    """Adds what does not fit together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :3] + torch.ones(5)


def small(model: Any) -> tightfit.Job:
    samples: list[Any] = [(torch.randn(4), 0) for _ in range(4)]
    return tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=2, steps=1))


@pytest.mark.parametrize(("when", "regions"), [*((when, "block") for when in FAILING), ("backward", "model")])
def test_a_model_that_the_compiler_fails_on_is_refused(
    when: str, regions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "BACKEND", FAILING[when])
    torch.compiler.reset()
    with pytest.raises(
        InputError, match=rf"compile={regions}: torch.compile fails on this model .*view size(.|\n)*compile: none"
    ):
        losses(small(Small), tightfit.Plan(compile=regions))
    torch.compiler.reset()


def test_what_the_model_does_wrong_beside_compiled_blocks_is_its_own(counter: CompileCounterWithBackend) -> None:
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        losses(small(Wrong), tightfit.Plan(compile="block"))
    assert not isinstance(raised.value, InputError)
