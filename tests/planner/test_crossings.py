"""Tensors that a model sends from one stage of a pipeline to the next: predicted bytes and sent
bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tightfit
from tests.planner.test_measured_devices import measured_of
from tests.pool import together
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.machine import Machine
from tightfit.planner.estimator import Estimator, estimated_ledger
from tightfit.planner.tracing.profiler import Profiler

WIDTH, LENGTH, BATCH = 16, 24, 8


class Mixer(nn.Module):
    """Takes the hidden states, the input's embedding, a mask that is computed from a parameter, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, skip: Tensor, gate: Tensor, positions: Tensor) -> Tensor:
        return h + gate * torch.tanh(self.wide(self.norm(h))) + 0.1 * skip + 0.01 * positions


class Skips(nn.Module):
    """The embedding is added to each block and to what comes behind them; positions come from the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(2 * WIDTH, 3)
        self.gate = nn.Linear(5, 1)
        self.blocks = nn.ModuleList(Mixer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip, gate = self.embed(x), torch.sigmoid(self.gate(x))
        positions = torch.arange(x.shape[1], device=x.device)[None, :, None].to(x.dtype)
        h = torch.tanh(skip)
        for block in self.blocks:
            h = block(h, skip, gate, positions)
        return self.head(torch.cat((h, skip), -1)).mean(1)


class Frozen(Skips):
    """The same, but what is added has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


MODELS = {"skips": Skips, "frozen": Frozen}
HIDDEN = 4 * LENGTH * WIDTH  # bytes of one sample's hidden states
FORWARD = 2 * HIDDEN + 4 * LENGTH  # the hidden states, the embedding and the gate
BACKWARD = {"skips": FORWARD, "frozen": HIDDEN + 4 * LENGTH}


def job_of(name: str) -> tightfit.Job:
    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(LENGTH, 5, generator=generator), number % 3) for number in range(4 * BATCH)]
    return tightfit.Job(model=MODELS[name], data=samples, train=tightfit.Train(batch=BATCH, steps=4))


def counted(name: str, fields: dict[str, Any]) -> int:
    """Bytes that this device sends in its second step: the first one's first messages are preceded by their shapes."""
    run, sent, send = build(job_of(name), tightfit.Plan(**fields)), [0], dist.isend

    def counting(tensor: Tensor, *args: Any, **named: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return send(tensor, *args, **named)

    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    dist.isend = counting
    try:
        take_step(run, next(steps), 1)
    finally:
        dist.isend = send
    return sent[0]


def measured(name: str, fields: dict[str, Any]) -> tuple[int, int]:
    return counted(name, fields), measured_of(job_of(name), fields)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("skips", {"pp": 2, "micro_batch": 2}),
        pytest.param("frozen", {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("skips", {"pp": 4, "micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param("skips", {"pp": 2, "micro_batch": 1, "schedule": "zero-bubble"}, marks=pytest.mark.slow),
        pytest.param(
            "skips",
            {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("skips", {"pp": 2, "micro_batch": 2, "recompute": "full"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_tensors_between_stages_are_sent_and_held_as_predicted(name: str, fields: dict[str, Any]) -> None:
    plan, machine, profiler = tightfit.Plan(**fields), Machine.detect(), Profiler(job_of(name), "cpu")
    found = together(plan.pp, "tests.planner.test_crossings:measured", name, fields)
    for device, (sent, peak) in enumerate(found):
        ledger = estimated_ledger(profiler, plan, machine, device)
        assert ledger.rank_program is not None
        assert ledger.rank_program.sent_bytes(ledger.micro_batch) == sent, f"device {device}"
        assert ledger.peak().total == pytest.approx(peak, rel=0.03), f"device {device}"
    boundaries = plan.stages - 1
    assert sum(sent for sent, _ in found) == boundaries * BATCH * (FORWARD + BACKWARD[name])


@pytest.mark.slow
def test_a_pipeline_waits_for_all_tensors_between_stages() -> None:
    """On a link that is slow enough to be all of a step, its time is that of the bytes."""
    machine = Machine.named("a100-80gb:2")
    plan = tightfit.Plan(pp=2, micro_batch=BATCH, schedule="naive")
    found = Estimator(job_of("skips"), machine).estimate(plan)
    stage = found.ledger.rank_program
    assert stage is not None
    sent = sum(size.at(BATCH) for taken in stage.boundaries.values() for size in (*taken.forward, *taken.backward))
    assert sent == BATCH * 2 * FORWARD
    ends = {slot.action.kind + str(slot.rank): slot for slot in found.schedule}
    rate = stage.bytes_per_s * (machine.efficiency["link"].value if "link" in machine.efficiency else 1.0)
    wanted = BATCH * FORWARD / rate + 3 * stage.latency_s
    assert ends["F1"].start - ends["F0"].end == pytest.approx(wanted)
    assert ends["B0"].start - ends["B1"].end == pytest.approx(wanted)
