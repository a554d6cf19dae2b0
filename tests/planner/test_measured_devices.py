"""The peak memory of each device of a pipeline, a ring or replicas: predicted, and measured on
processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.pool import together
from tests.sweeps import part, spread
from tightfit.engine.build import build
from tightfit.engine.step import drain, take_step
from tightfit.machine import Machine
from tightfit.measure.memory import MemorySample
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.profiler import Profiler

SCHEDULES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive"},
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
    "pipedream": {"schedule": "pipedream"},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
}
SIZES = {"tiny": (32, 4, 160, 16), "larger": (96, 8, 512, 32)}  # width, blocks, vocabulary, length
WITHIN = 0.01


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Knows nothing of tightfit, and ties nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 32)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(4)))
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(torch.tanh(self.first(x))))


def job(name: str, size: str) -> tightfit.Job:
    width, blocks, vocabulary, length = SIZES[size]
    train = tightfit.Train(batch=16, steps=40)
    allow = ["bf16", "asynchronous", "compressed-gradients"]
    if name == "net":
        generator = torch.Generator().manual_seed(1)
        samples = [(torch.randn(length, 24, generator=generator), number % 10) for number in range(64)]
        return tightfit.Job(model=Net, loss=loss_of_means, data=samples, train=train, allow=allow)
    model: dict[str, Any] = {"architecture": name, "vocab_size": vocabulary}
    if name == "gpt2":  # whose head and embedding are one
        model |= {"n_embd": width, "n_layer": blocks, "n_head": 4, "n_positions": length}
        model |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        model |= {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4}
        model |= {"intermediate_size": 3 * width, "max_position_embeddings": length}
    data = {"synthetic": "tokens", "sequence_length": length, "samples": 64}
    return tightfit.Job(model=model, data=data, train=train, allow=allow)


def loss_of_means(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.mean(1), batch[1], reduction="sum")


def measured(name: str, size: str, fields: dict[str, Any]) -> int:
    return measured_of(job(name, size), fields)


def measured_of(job: tightfit.Job, fields: dict[str, Any]) -> int:
    """Bytes of tensors at this device's peak, once steps are as they will be."""
    run = build(job, tightfit.Plan(**fields))
    steps, number = run.data.steps(0, None), 0
    for number in range(2):
        take_step(run, next(steps), number)
    sample = MemorySample(run)
    while not sample.ended:
        number += 1
        sample.take(run, next(steps), number)
    drain(run)
    assert sample.peak is not None
    return sample.peak.total


SLOW = [
    *(("llama", 2, schedule) for schedule in SCHEDULES if schedule not in ("1f1b", "zero-bubble")),
    ("gpt2", 4, "zero-bubble"),
    ("gpt2", 2, "1f1b"),
    ("bert", 2, "interleaved"),
    ("bert", 4, "gpipe"),
    ("net", 2, "gpipe"),
    ("net", 4, "vertical"),
]


def held(name: str, size: str, fields: dict[str, Any]) -> None:
    plan, machine = tightfit.Plan(**fields), Machine.detect()
    profiler = Profiler(job(name, size), "cpu")
    found = together(plan.devices, "tests.planner.test_measured_devices:measured", name, size, fields)
    for device, bytes_there in enumerate(found):
        predicted = estimated_ledger(profiler, plan, machine, device * plan.pp // plan.devices).peak().total
        assert predicted == pytest.approx(bytes_there, rel=WITHIN), f"device {device}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pp", "schedule"),
    [
        ("llama", 2, "1f1b"),
        pytest.param("llama", 2, "zero-bubble", marks=pytest.mark.slow),
        pytest.param("net", 4, "pipedream", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_each_stage_takes_the_predicted_memory(name: str, pp: int, schedule: str) -> None:
    held(name, "tiny", {"pp": pp, "micro_batch": 2, **SCHEDULES[schedule]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "fields"), spread(["1f1b", "zero-bubble"], [{"recompute": "full"}, {"precision": "bf16-mixed"}], 4)
)
def test_recomputing_or_casting_stages_take_predicted_memory(schedule: str, fields: dict[str, Any]) -> None:
    held("llama", "tiny", {"pp": 2, "micro_batch": 2, **SCHEDULES[schedule], **fields})


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields",
    part(
        [
            {"cp": 2},
            {"cp": 2, "micro_batch": 2},
            {"dp_replicate": 2, "compressed_gradients": "powersgd"},
            {"dp_replicate": 2, "compressed_gradients": "powersgd", "micro_batch": 2},
            {"dp_replicate": 2, "compressed_gradients": "bf16"},
        ],
        2,
    ),
)
def test_rings_and_replicas_take_the_predicted_memory(fields: dict[str, Any]) -> None:
    held("llama", "tiny", fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_a_larger_model_take_the_predicted_memory(name: str, pp: int, schedule: str) -> None:
    if name != "llama" and schedule in ("pipedream", "vertical"):
        return  # what is tied is refused
    held(name, "larger", {"pp": pp, "micro_batch": 2, **SCHEDULES[schedule]})
