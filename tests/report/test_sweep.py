"""`tightfit sweep`: every combination has a row, and wrong fields or values are refused before the first is explained."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.report.test_run_folder import command
from tightfit.errors import DoesNotFit, InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.report import sweep

OVER = ("--over", "train.batch=4,8", "--over", "machine=l4,t4")


def no_machine() -> Machine:
    raise AssertionError("this machine was asked for")


def test_each_combination_is_a_row_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    job, table, picture = str(tiny.write(tmp_path)), tmp_path / "sweep.csv", tmp_path / "sweep.svg"
    common = ("sweep", job, *OVER, "--plan", "reference", "--price", "3")
    assert command(monkeypatch, *common, "--picture", str(picture)) == 0
    shown = capsys.readouterr().out
    for words in ("4/4  train.batch=8, machine=t4", "tokens/s", "hours", "cost", "fastest:", "cheapest:", "at 3 per"):
        assert words in shown
    assert "<svg" in picture.read_text()
    assert command(monkeypatch, *common, "--json", "--csv", str(table)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["over"] == {"train.batch": ["4", "8"], "machine": ["l4", "t4"]}
    assert [row["over"] for row in told["rows"]] == [
        {"train.batch": batch, "machine": machine} for batch in ("4", "8") for machine in ("l4", "t4")
    ]
    lines = list(csv.DictReader(table.read_text().splitlines()))
    for row, line in zip(told["rows"], lines, strict=True):
        assert row["fits"]
        assert row["machine"] == row["over"]["machine"] == line["machine"]
        assert row["run"]["cost"] == pytest.approx(3 * row["run"]["device_hours"])
        assert row["run"]["samples"] == 8 * int(row["over"]["train.batch"])
        assert float(line["step_s"]) == pytest.approx(row["step_s"])
        assert float(line["cost"]) == pytest.approx(row["run"]["cost"])
        assert (line["plan"], line["fits"]) == ("reference", "True")


@pytest.mark.slow
def test_what_does_not_fit_and_what_does_not_work_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = ("--over", "plan.zero=0,2", "--over", "limits.memory=200MiB,8GiB")
    job = str(tiny.write(tmp_path))
    common = ("sweep", job, *over, "--plan", "reference", "--set", "plan.dp_shard=1")
    monkeypatch.setattr(sweep, "this_machine", lambda say: Machine.named("l4"))
    assert command(monkeypatch, *common, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["fits"] for row in rows] == [False, True, False, False]
    assert "needs" in rows[0]["why_not"]
    assert rows[0]["memory_bytes"] > rows[0]["limit_bytes"] == 200 * 2**20
    assert "dp_shard" in rows[2]["why_not"]
    assert rows[2]["plan"] is None
    assert command(monkeypatch, *common) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no (2)" in shown
    assert rows[2]["why_not"] in shown


def test_a_plan_that_is_not_pinned_is_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself has tests of its own; here it finds the first plan and refuses the second job."""
    asked = []

    def found(job: Job, machine: Machine, pins: dict[str, Any], estimator: Estimator) -> list[Estimate]:
        asked.append(pins)
        one = estimator.estimate(Plan(recompute="full"))
        if len(asked) == 2:
            content = {**one.content(), "rejected_because": "needs 9 GiB, 8 GiB are available"}
            raise DoesNotFit("needs 9 GiB", {"plans": [content]})
        return [one]

    monkeypatch.setattr("tightfit.planner.search.search", found)
    axes = sweep.read_axes(["machine=l4,t4"])
    both = sweep.combinations(tiny.write(tmp_path), None, axes, ["plan.compile=none"], no_machine)
    fits, refused = sweep.explain_all(both, 2.0, lambda line: None)
    assert asked == [{"compile": "none"}] * 2
    assert (fits.fits, fits.why_not, fits.plan) == (True, "", Plan(recompute="full"))
    assert (refused.fits, refused.why_not) == (False, "needs 9 GiB, 8 GiB are available")
    assert refused.content()["memory_bytes"] == fits.content()["memory_bytes"]
    assert sweep.reasons([fits, refused]) == [refused.why_not]


@pytest.mark.slow
def test_traces_are_shared_where_model_and_batch_are_the_same(tmp_path: Path) -> None:
    axes = sweep.read_axes(["machine=l4,h100-sxm", "train.batch=4,8"])
    found = sweep.combinations(tiny.write(tmp_path), "reference", axes, [], no_machine)
    assert len(found) == 4
    profilers: dict[str, Any] = {}
    rows = [sweep.explain_one(one, profilers, None) for one in found]
    assert len(profilers) == 2  # one for each batch
    alone = [sweep.explain_one(one, {}, None) for one in found]
    compared = ("over", "machine", "fits", "plan", "memory_bytes", "limit_bytes")  # times are of samples that are timed
    for row, other in zip(rows, alone, strict=True):
        assert [row.content()[name] for name in compared] == [other.content()[name] for name in compared]


def test_commas_in_brackets_belong_to_a_value() -> None:
    assert sweep.read_axes(["plan.offload=[],[states,gradients]", 'data.text="a,b",c']) == {
        "plan.offload": ["[]", "[states,gradients]"],
        "data.text": ['"a,b"', "c"],
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing is varied"),
        (("--over", "train.batch"), "is not NAME=VALUE"),
        (("--over", "train.batch=8,,16"), "is not NAME=VALUE"),
        (("--over", "batch=8"), "is not a field of a job"),
        (("--over", "train.btach=8"), "did you mean 'batch'"),
        (("--over", "train.batch=8,eight"), "batch: 'eight' is not allowed"),
        (("--over", "plan.zero=2,9"), "zero"),
        (("--over", "plan.zeros=2"), "did you mean 'zero'"),
        (("--over", "machine=l4,l44"), "did you mean 'l4'"),
        (("--over", "train.batch=8", "--over", "train.batch=16"), "varied twice"),
        (("--over", "train.batch=8,8"), "a value twice"),
        (("--over", f"train.batch={','.join(map(str, range(1, 500)))}"), "are more than"),
        (("--over", "machine=l4", "--picture", "sweep.gif"), "sweep.svg"),
        (("--over", "machine=l4", "--csv", "no-such-folder/sweep.csv"), "folder does not exist"),
        (("--over", "machine=l4", "--price", "-3"), "is not a price"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_ends_before_anything_is_explained(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a combination was explained")

    monkeypatch.setattr(sweep, "explain_all", refuse)
    assert command(monkeypatch, "sweep", str(tiny.write(tmp_path)), *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    row = sweep.Row({"machine": "l4"}, Machine.named("l4"), why_not="no plan")
    with pytest.raises(InputError, match="cannot be written"):
        sweep.write_csv([row], tmp_path)
