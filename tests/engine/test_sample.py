"""The sample text at the end of a training is the same on any number of processes, and the command
ends."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

import tightfit
from tests import tiny
from tests.engine.test_processes import training
from tests.pool import together
from tightfit.report.sample_text import sample_text

AXES: dict[str, dict[str, Any]] = {
    "dp_replicate": {"dp_replicate": 2},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "cp": {"cp": 2},
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "micro_batch": 2},
    "pipedream": {"pp": 2, "micro_batch": 2, "schedule": "pipedream"},
    "parameter_server": {"dp_replicate": 2, "parameter_server": "sync"},
    "asynchronous server": {"dp_replicate": 2, "parameter_server": "async"},
}
_SAME = (
    {"zero 1", "zero 2", "zero 3"},
    {"tp", "sequence_parallel"},
    {"pp", "pipedream"},
    {"parameter_server", "asynchronous server"},
)
PAIRS = {
    f"{one} and {other}": {**AXES[one], **AXES[other]}
    for one, other in itertools.combinations(AXES, 2)
    if not any({one, other} <= same for same in _SAME)
}
QUICK = {"tp", "cp", "zero 3", "sequence_parallel", "pp", "parameter_server"}


def content() -> dict[str, Any]:
    """Each device has several samples, of a length that cp and tp divide."""
    return {
        "model": {**tiny.MODEL, "attention_dropout": 0.0},
        "data": {"text": "python-stdlib", "sequence_length": 16, "held_out": 0.001},
        "train": {
            "batch": 8, "steps": 4, "learning_rate": 1e-2, "clip": 1.0, "trackers": [], "checkpoint_every": 2,
            "evaluate_every": 2, "evaluate_samples": 4,
        },
        "allow": ["asynchronous"],
    }  # fmt: skip


def sampled(fields: dict[str, Any], precision: str = "fp32") -> str | None:
    job = tightfit.Job.parse({**content(), "allow": ["bf16", "asynchronous"]})
    job = job.replace(train=job.train.replace(clip=None))
    run = tightfit.build(job, tightfit.Plan(**fields, precision=precision))
    for _ in tightfit.train(run):
        pass
    return sample_text(run)


def size_of(fields: dict[str, Any]) -> int:
    return tightfit.Plan(**fields).devices


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in AXES])
def test_several_processes_sample_the_same_text_as_one(name: str) -> None:
    fields = AXES[name]
    texts = together(size_of(fields), "tests.engine.test_sample:sampled", fields)
    if name in ("pp", "pipedream", "parameter_server", "asynchronous server"):
        assert set(texts) == {None}
    else:
        alone = sampled({})
        assert alone is not None
        assert alone.startswith("def ")
        assert texts == [alone] * len(texts)


def test_sharded_16_bit_parameters_generate_a_sample() -> None:
    texts = together(2, "tests.engine.test_sample:sampled", AXES["zero 3"], "bf16-mixed")
    assert texts[0] == texts[1]
    assert texts[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*AXES, *PAIRS])
def test_the_command_ends_on_every_axis_and_pair(name: str, tmp_path: Path) -> None:
    """Evaluation, checkpoints and clipping are on; each plan trains or is refused with a remedy."""
    fields = {**AXES, **PAIRS}[name]
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(content()))
    changes = [word for field, value in fields.items() for word in ("--set", f"plan.{field}={value}")]
    with training(job, tmp_path / "out", "--nproc", str(size_of(fields)), *changes) as run:
        code, said = run.end()
    assert "Traceback" not in said
    assert code == 0 or (code == 2 and "  fix: " in said), said
    if code == 0:
        assert run.steps == 4
        assert run.saved[-1] == 4
    else:
        print(name, said)
