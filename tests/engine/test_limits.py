"""Models whose states exceed the memory of a process train under that limit, with the results of a
run without it.

The limit is the operating system's own (RLIMIT_DATA): beyond it an allocation fails.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests.pool import Pool

JOB = tightfit.Job(
    model={
        "architecture": "llama",
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
    },
    data={"synthetic": "tokens", "sequence_length": 32, "samples": 64},
    train=tightfit.Train(batch=4, steps=3, learning_rate=1e-3),
    allow=["offload"],
)
MORE = 400 * 10**6  # bytes beside what Python and torch have taken before; the model's states take 0.77 GB
DISK = {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"}


def trained(fields: dict[str, Any], more: int | None) -> list[float] | str:
    """Losses of the job, in a process that may take `more` bytes beside libraries and threads; what it says if that is not enough."""
    plan = tightfit.Plan(materialize="device", micro_batch=1, fused_optimizer=True, allocator="lean", **fields)
    small = JOB.model.replace(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    for _ in tightfit.train(tightfit.build(JOB.replace(model=small), plan)):  # so that threads and libraries are there
        pass
    if more is not None:
        status = Path("/proc/self/status").read_text()
        data = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + more, data + more))
    try:
        return [step.loss for step in tightfit.train(tightfit.build(JOB, plan))]
    except (MemoryError, RuntimeError) as error:
        return str(error)


def in_fresh_processes(count: int, fields: dict[str, Any], more: int | None) -> list[Any]:
    pool = Pool(count)
    try:
        return pool.run("tests.engine.test_limits:trained", fields, more)
    finally:
        pool.close()


@pytest.mark.slow
def test_too_large_models_train_sharded_or_offloaded(tmp_path: Path) -> None:
    (expected,) = in_fresh_processes(1, {}, None)
    (said,) = in_fresh_processes(1, {}, MORE)
    assert isinstance(said, str)
    assert "allocate memory" in said
    for losses in in_fresh_processes(4, {"zero": 3, "dp_shard": 4, "recompute": "full"}, MORE):
        assert losses == pytest.approx(expected, rel=1e-5)
    (losses,) = in_fresh_processes(1, {**DISK, "offload_folder": str(tmp_path)}, MORE)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not list(tmp_path.iterdir())
