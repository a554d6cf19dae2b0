"""The planner's benchmarks compare legal plans and cover the models and methods that they claim."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tightfit
from benchmarks import choice, other_models, prediction, published
from tightfit.rules import check


def test_prediction_pairs_are_legal_and_cover_all_methods() -> None:
    pairs = prediction.pairs()
    assert len(pairs) >= 60
    assert {"llama", "gpt2", "bert", "vit", "t5", "batchnorm"} <= {pair["model"] for pair in pairs}
    fields = {field for pair in pairs for field in pair["plan"]}
    assert {
        "precision",
        "micro_batch",
        "recompute",
        "chunked_loss",
        "states",
        "update_in_backward",
        "compile",
    } <= fields
    for pair in pairs:
        model, data, batch = prediction.MODELS[pair["model"]]
        train = tightfit.Train(optimizer=pair["optimizer"], batch=batch, steps=1)
        job = tightfit.Job(model=model, data=data, allow=prediction.ALLOW, train=train)
        check(tightfit.Plan(**pair["plan"]), job, "cpu")


def test_pairs_of_other_families_are_legal() -> None:
    pairs = other_models.pairs()
    assert len(pairs) == len({json.dumps(pair) for pair in pairs}) >= 50
    assert not {pair["model"] for pair in pairs} & prediction.MODELS.keys()
    for pair in pairs:
        check(tightfit.Plan(**pair["plan"]), prediction.job_of(pair, 1), "cpu")


@pytest.mark.sweep(20)
@pytest.mark.parametrize("name", [*other_models.ARCHITECTURES, *other_models.NETWORKS])
def test_other_families_are_predicted(name: str) -> None:
    job = prediction.job_of({"model": name, "optimizer": "adamw"}, 1)
    found = tightfit.estimate(job, {"precision": "bf16-mixed"}, "l4")
    assert found.peak_bytes > 0
    assert found.all_notes == [] or name == "lstm"


def test_choice_compares_legal_plans_under_tight_limits() -> None:
    assert len(choice.JOBS) >= 10
    for name, (*_, batch, _, share) in choice.JOBS.items():
        assert 0 < share < 0.8  # of what the reference plan needs
        for fields in choice.plans(batch):
            check(tightfit.Plan(**fields), choice.job_of(name), "cpu")


def compared(name: str) -> dict[str, Any]:
    """The comparison of the published run of this id."""
    (row,) = [row for row in published.read_rows() if row["id"] == name]
    found = published.compare(row, {})
    assert "error" not in found
    return found


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", ["rasbt-05", "rasbt-06", "hf-bertlarge-ga4", "tune-3b-actckpt", "titan-t1-fsdp8"])
def test_published_memory_is_reproduced(name: str) -> None:
    found = compared(name)
    assert abs(found["predicted_bytes"] / found["published_bytes"] - 1) < 0.1


def test_published_runs_are_legal_plans() -> None:
    rows = published.read_rows()
    assert len(rows) == len({row["id"] for row in rows}) >= 530
    assert {row["half"] for row in rows} == {"a", "b", "c", "d", "e"}
    for row in rows:
        plan, machine = tightfit.Plan(**row["plan"]), published.machine_of(row)
        check(plan, published.job_of(row), machine.device)
        assert plan.devices == machine.devices_per_node * machine.nodes
        assert {"memory", "speed", "fits"} & set(row)


def test_the_readme_counts_the_published_runs() -> None:
    rows, readme = published.read_rows(), (published.FOLDER / "README.md").read_text()
    for group in ("", *{row["group"] for row in rows}):
        those = [row for row in rows if row["group"] == group or not group]
        counts = {
            "memory": sum("memory" in row for row in those),
            "speed": sum("speed" in row for row in those),
            "ran": sum(row.get("fits") is True for row in those),
            "out of memory": sum(row.get("fits") is False for row in those),
        }
        compared = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        assert f"| {f'`{group}.yaml`' if group else 'all'} | {len(those)} | {compared} |" in readme


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "name", ["mpt-760m-a100_80gb-s2048-g8-amp_bf16-mb24-r119", "mpt-13b-h100_80gb-s2048-g64-amp_bf16-mb2-r30"]
)
def test_published_multi_device_speeds_are_reproduced(name: str) -> None:
    found = compared(name)
    assert abs(found["predicted_speed"] / found["published_speed"] - 1) < 0.12


def test_a_row_that_fails_is_counted() -> None:
    row = published.read_rows("torchtune")[0]
    found = published.compare({**row, "plan": {**row["plan"], "tp": 7}}, {})
    assert found["error"]
    assert published.summed_up([found])["errors"] == 1
