"""Job, Plan, Machine and Record: frozen, validated, saved and read back, with one-line reprs and
schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import tightfit
from tests import tiny
from tightfit import units
from tightfit.capabilities import can_compile
from tightfit.errors import InputError
from tightfit.plan import read_pins
from tightfit.planner.defaults import complete
from tightfit.record import PeakBytes, code_version
from tightfit.rules import RULES


def make_model() -> None:
    raise AssertionError("never called")


def nouns() -> list[tightfit.Job | tightfit.Plan | tightfit.Machine | tightfit.Record]:
    machine = tightfit.Machine.detect()
    record = tightfit.Record(
        job=tiny.content(),
        plan=tightfit.Plan(),
        machine=machine,
        code=code_version(),
        step_s=[0.5, 0.25],
        tokens_per_s=10.0,
        samples_per_s=1.0,
        peak_bytes=PeakBytes(measured=5),
        mfu=None,
        compile_s=None,
        loss=[(1, 2.0)],
    )
    return [tiny.job(), tightfit.Plan(precision="bf16-mixed", micro_batch=2), machine, record]


@pytest.mark.parametrize("noun", nouns(), ids=lambda noun: type(noun).__name__)
def test_round_trips_and_prints(noun: tightfit.Job) -> None:
    kind = type(noun)
    assert kind.parse(yaml.safe_load(noun.to_yaml())) == noun
    assert kind.parse(json.loads(noun.to_json())) == noun
    assert repr(noun).startswith(kind.__name__ + "(")
    assert "\n" not in repr(noun)
    assert kind.model_json_schema()["title"] == kind.__name__
    with pytest.raises(ValidationError):
        noun.plan = None  # type: ignore[misc]


def test_python_objects_in_a_job_are_saved_by_name() -> None:
    job = tightfit.Job(model=make_model, data=[1, 2], train=tightfit.Train(steps=1))
    assert job.content()["model"] == {"python": f"{__name__}:make_model"}
    assert "make_model" in repr(job)


def test_set_reaches_every_section(tmp_path: Path) -> None:
    job = tightfit.Job.load(
        tiny.write(tmp_path), ["train.steps=3", "plan.recompute=full", "limits.memory=2GiB", "model.hidden_size=32"]
    )
    assert (job.train.steps, job.plan, job.limits.memory) == (3, {"recompute": "full"}, 2**31)
    assert job.model.config["hidden_size"] == 32


def test_relative_paths_start_at_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {python: m.py:make}\ndata: {text: texts/a.txt}\n")
    job = tightfit.Job.load(tmp_path / "job.yaml")
    assert job.model.python == f"{tmp_path}/m.py:make"
    assert job.data.text == f"{tmp_path}/texts/a.txt"


def test_pins_are_kept_and_the_rest_is_chosen_with_reasons() -> None:
    machine = tightfit.Machine.detect()
    plan, reasons = complete(tiny.job(), machine, {"precision": "fp32", "compile": "none"})
    assert plan.precision == "fp32"
    assert plan.compile == "none"
    assert "precision" not in reasons
    changed = [name for name in reasons if name != "compile" or can_compile(machine)]  # else why it stays off is said
    assert all(getattr(plan, name) != getattr(tightfit.Plan(), name) for name in changed)
    reference, none = complete(tiny.job(), machine, read_pins("reference"))
    assert reference == tightfit.Plan()
    assert not none


def test_fp32_is_used_if_nothing_else_is_allowed() -> None:
    plan, _ = complete(tiny.job().replace(allow=[]), tightfit.Machine.detect(), {})
    assert plan.precision == "fp32"


def test_short_jobs_are_not_compiled() -> None:
    machine = tightfit.Machine.detect()
    assert complete(tiny.job(steps=10), machine, {})[0].compile == "none"


def test_every_rule_has_a_remedy_that_can_be_printed() -> None:
    for rule in RULES:
        assert rule.remedy(tightfit.Plan(), tiny.job())


@pytest.mark.parametrize(
    ("text", "count"), [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), (7, 7), ("512mib", 2**29)]
)
def test_sizes_are_parsed_to_bytes(text: str | int, count: int) -> None:
    assert units.parse_bytes(text) == count


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="24GiB"):
        units.parse_bytes("plenty")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (units.format_bytes(3 * 2**30), "3 GiB"),
        (units.format_bytes(12), "12 B"),
        (units.format_count(13.8e6), "13.8M"),
        (units.format_seconds(3725), "1 h 02 min"),
        (units.format_seconds(0.002), "2 ms"),
    ],
)
def test_values_are_formatted_with_units(value: str, text: str) -> None:
    assert value == text


@pytest.mark.parametrize(
    ("section", "content", "asked", "fix"),
    [
        ("model", {"architecture": "llama", "lora": {"rnk": 3}}, "job: model: lora.rnk", "did you mean 'rank'"),
        ("model", {"architecture": "llama", "lora": 3}, "job: model: lora", "rank, alpha, dropout"),
        ("train", {"groups": [{"mtch": "x"}]}, "job: train: groups.0.mtch", "did you mean 'match'"),
        ("train", {"keep_best": {"metrc": "loss"}}, "job: train: keep_best.metrc", "did you mean 'metric'"),
        ("train", {"early_stopping": {"patience": 0}}, "job: train: early_stopping.patience", "more than 0"),
    ],
)
def test_a_mistake_inside_a_section_names_its_place(section: str, content: Any, asked: str, fix: str) -> None:
    job = {"model": {"architecture": "llama"}, "data": {"synthetic": "tokens"}, section: content}
    with pytest.raises(InputError) as raised:
        tightfit.Job.parse(job)
    assert raised.value.asked == asked
    assert fix in raised.value.fix
