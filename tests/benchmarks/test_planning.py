"""The planner's benchmarks compare legal plans and cover the models and methods that they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import tightfit
from benchmarks import choice, prediction, published
from tightfit.machine import Machine
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


def test_choice_compares_legal_plans_under_tight_limits() -> None:
    assert len(choice.JOBS) >= 10
    for name, (*_, batch, _, share) in choice.JOBS.items():
        assert 0 < share < 0.8  # of what the reference plan needs
        for fields in choice.plans(batch):
            check(tightfit.Plan(**fields), choice.job_of(name), "cpu")


@pytest.mark.parametrize("begins", ["vit-l-4x4", "vit-l-sgd", "bert-large-4x1", "llama-3b-recompute"])
def test_published_memory_is_reproduced(begins: str) -> None:
    runs = yaml.safe_load(Path(published.__file__).with_suffix(".yaml").read_text())
    assert len(runs) == len({run["id"] for run in runs}) >= 20
    (run,) = [run for run in runs if run["id"] == begins]
    found = published.compare(run)
    assert abs(found["predicted_bytes"] / found["published_bytes"] - 1) < 0.1


def test_memory_reserved_on_each_of_8_devices_is_reproduced() -> None:
    runs = yaml.safe_load((Path(published.__file__).parent / published.FILES[1]).read_text())
    (run,) = [run for run in runs if run["id"] == "titan-t1-fsdp8"]
    found = published.compare(run)
    assert abs(found["predicted_bytes"] / found["published_bytes"] - 1) < 0.1


def test_published_multi_device_runs_are_legal_plans() -> None:
    runs = yaml.safe_load((Path(published.__file__).parent / published.FILES[1]).read_text())
    assert len(runs) == len({run["id"] for run in runs}) >= 50
    for run in runs:
        job = tightfit.Job(
            model=run["model"],
            data=run["data"],
            allow=published.ALLOW,
            train=tightfit.Train(batch=run["batch"], steps=1, clip=run["clip"]),
        )
        plan, machine = tightfit.Plan(**run["plan"]), Machine.named(run["machine"])
        check(plan, job, machine.device)
        assert plan.devices == machine.devices_per_node * machine.nodes > 1


@pytest.mark.parametrize("begins", ["mpt-125m-a100_40gb", "mpt-350m-a100_40gb"])
def test_published_multi_device_speeds_are_reproduced(begins: str) -> None:
    runs = yaml.safe_load((Path(published.__file__).parent / published.FILES[1]).read_text())
    (run,) = [run for run in runs if run["id"].startswith(begins)]
    found = published.compare(run)
    assert abs(found["predicted_speed"] / found["published_speed"] - 1) < 0.1
