"""The peak memory of a step, by estimate and by dry run, agrees with the measured peak of a device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import tightfit
from tests import devices
from tests.devices import on_each_device, on_gpu
from tightfit.engine.step import take_step
from tightfit.measure.memory import sample_step
from tightfit.measure.observer import SAMPLED, Observer
from tightfit.planner.dry_run import dry_run

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "num_attention_heads": 4,
        "vocab_size": 320, "max_position_embeddings": 32,
    },
    "cuda": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "vocab_size": 16384, "max_position_embeddings": 512,
    },
}  # fmt: skip
PLANS: list[dict[str, Any]] = [
    {},
    {"micro_batch": 2},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "bf16-true", "master_weights": True, "micro_batch": 2},
    {"precision": "bf16-mixed", "recompute": "full"},
    {"states": "8-bit", "fused_optimizer": False},
    {"update_in_backward": True},
    {"fused_optimizer": True, "materialize": "device"},
]
HOST: list[dict[str, Any]] = [
    {"offload": ("states",)},
    {"offload": ("states", "gradients", "parameters"), "precision": "bf16-mixed", "micro_batch": 2},
]
WITHIN = 0.05
BESIDE = {"cpu": 0, "cuda": 64 * 2**20}
"""Bytes that a GPU's libraries take of its allocator beside tensors: cuBLAS a workspace of up to 32 MiB for the thread of forward
and for that of backward. A prediction has them among its runtime, a measurement among its tensors."""


def job_of(device: str) -> tightfit.Job:
    model = {"architecture": "llama", **SIZES[device]}
    data = {"synthetic": "tokens", "sequence_length": model["max_position_embeddings"], "samples": 64}
    allow = ["bf16", "8-bit-states", "offload"]
    return tightfit.Job(model=model, data=data, train=tightfit.Train(batch=8, steps=5), allow=allow)


def measured(job: tightfit.Job, plan: tightfit.Plan, device: str) -> int:
    """Peak bytes of the third step: the first makes the optimizer's states."""
    gc.collect()  # what earlier tests left in cycles would count
    run = tightfit.build(job, plan, devices.machine(device))
    assert run.device.type == device
    steps = run.data.steps(0, None)
    for number in range(2):
        take_step(run, next(steps), number)
    return sample_step(run, next(steps), 2)[1].total


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("fields", "device"),
    [
        *(
            pytest.param(one, "cpu", id=f"{one}-cpu", marks=[] if n % 3 == 0 else pytest.mark.slow)
            for n, one in enumerate(PLANS)
        ),
        *(on_gpu(one) for one in PLANS + HOST),
    ],
)
def test_estimated_and_dry_run_peaks_agree_with_the_measured(fields: dict[str, Any], device: str) -> None:
    job, plan = job_of(device), tightfit.Plan(**fields)
    found = measured(job, plan, device)
    rows = tightfit.estimate(job, plan, devices.machine(device)).peak.rows
    predicted = sum(size for row, size in rows.items() if row not in ("runtime", "allocator"))
    for told in (predicted, dry_run(job, plan, device).total):
        assert -WITHIN * found <= found - told <= WITHIN * found + BESIDE[device]


@on_each_device
def test_a_record_names_the_device_that_ran(device: str) -> None:
    """The peak is that of the sampled step, on a GPU with the allocator's reserved bytes; its steps
    took time."""
    run = tightfit.build(job_of(device), machine=devices.machine(device))
    observer = Observer(run, 0)
    for step in tightfit.train(run, take=observer.take):
        observer.add(step)
    record = observer.record(devices.machine(device))
    peak = record.peak_bytes
    assert record.machine.device == device
    assert len(record.step_s) == run.job.train.steps - SAMPLED - 1
    assert min(record.step_s) > 0
    assert sum(peak.rows.values()) == peak.measured
    assert (peak.reserved is None) == (device == "cpu")
    assert peak.reserved is None or peak.reserved >= peak.measured
    assert device == "cpu" or torch.cuda.max_memory_allocated() >= peak.measured
