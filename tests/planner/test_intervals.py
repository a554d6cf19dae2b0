"""Intervals of predictions: their classes, their ends, and where they are shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import tightfit
from benchmarks import intervals as derive
from tests.planner import cases
from tightfit.machine import Figure, Machine
from tightfit.planner import intervals
from tightfit.planner.estimator import Estimator
from tightfit.planner.intervals import Interval, classes, interval_of, knowledge_of
from tightfit.planner.waterfall import waterfall
from tightfit.report.explain import explained, show

KNOWN = Machine.named("h100-sxm:8")


def cpu(source: str) -> Machine:
    return Machine.detect().replace(matrix_flops_per_s={"fp32": Figure(value=1e11, source=source)})


@pytest.mark.parametrize(
    ("machine", "knowledge"),
    [(KNOWN, "known"), (cpu("measured"), "measured"), (cpu("quick"), "guessed"), (cpu("estimated"), "guessed")],
)
def test_knowledge_of_a_machine(machine: Machine, knowledge: str) -> None:
    assert knowledge_of(machine) == knowledge
    assert classes("time", machine, tightfit.Plan(), True)[-1] == f"{knowledge} machine"


def test_classes_begin_with_the_most_special() -> None:
    names = classes("time", KNOWN, tightfit.Plan(dp_shard=4, pp=2), tokens=True)
    assert names == [
        "known machine, pipeline, tokens",
        "known machine, pipeline",
        "known machine, several devices",
        "known machine",
    ]
    assert classes("memory", KNOWN, tightfit.Plan(), tokens=False)[0] == "gpu, one device, no tokens"


def test_the_most_special_class_with_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"time": {"known machine": {"low": 0.5, "high": 2.0, "runs": 90}}, "memory": {}}
    monkeypatch.setattr(intervals, "_table", lambda: table)
    assert interval_of("time", KNOWN, tightfit.Plan(pp=2), True) == Interval(0.5, 2.0, 90, "known machine")
    assert interval_of("memory", KNOWN, tightfit.Plan(), True).around(3.0) == (3.0, 3.0)
    table["time"]["known machine, pipeline"] = {"low": 1.1, "high": 1.5, "runs": 20}
    found = interval_of("time", KNOWN, tightfit.Plan(pp=2), True)
    assert found.around(2.0) == (2.0, 3.0)  # the prediction itself is inside


def test_every_prediction_has_an_interval_from_runs() -> None:
    for machine in (KNOWN, cpu("measured"), cpu("quick")):
        for plan in (tightfit.Plan(), tightfit.Plan(dp_shard=8), tightfit.Plan(pp=4)):
            for tokens in (True, False):
                found = interval_of("time", machine, plan, tokens)
                assert found.runs >= intervals.FEWEST_RUNS
                assert 0.3 < found.low < 1.1
                assert 0.95 < found.high < 4
                assert interval_of("memory", machine, plan, tokens).runs >= intervals.FEWEST_RUNS


@pytest.mark.parametrize("fields", [{}, {"dp_shard": 8}, {"pp": 4}])
def test_a_guessed_machine_has_the_widest_interval(fields: dict[str, int]) -> None:
    plan = tightfit.Plan(**fields)
    known, guessed = (interval_of("time", one, plan, True) for one in (KNOWN, cpu("estimated")))
    assert guessed.name.removeprefix("guessed") == known.name.removeprefix("known")
    assert guessed.low < known.low
    assert guessed.high > known.high


def test_explain_shows_intervals_and_json_has_them() -> None:
    estimator = Estimator(cases.job("llama"), KNOWN)
    one = estimator.estimate(tightfit.Plan(dp_shard=8, zero=1))
    content = json.loads(json.dumps(explained([one])))["plans"][0]
    step, peak = content["intervals"]["step_s"], content["intervals"]["peak"]
    assert step["low"] < one.time.step_s < step["high"]
    assert peak["low"] <= content["memory"]["peak"] <= peak["high"]
    assert step["runs"] > 0
    console = Console(width=120, file=io.StringIO())
    show(console, [one], waterfall(estimator, one.plan))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert " a step (" in text
    assert " to " in text.split("speed", 1)[1].splitlines()[0]


def test_quantiles_of_weighted_values() -> None:
    ones = [(1.0, 1.0), (3.0, 1.0), (2.0, 1.0)]
    assert derive.quantile(ones, 0.5) == 2.0
    assert derive.quantile([(1.0, 1.0), (2.0, 1.0), (4.0, 1.0)], 0.625) == pytest.approx(3.0)
    assert derive.quantile([(1.0, 1.0), (2.0, 1.0)], 0.05) == 1.0
    assert derive.quantile(ones, 0.95) == 3.0
    # only the ratio of weights counts
    assert derive.quantile([(1.0, 3.0), (2.0, 3.0)], 0.5) == derive.quantile([(1.0, 1.0), (2.0, 1.0)], 0.5)
    assert derive.quantile([(1.0, 9.0), (5.0, 1.0)], 0.5) == 1.0  # the heavy value has more than half of the weight


def measured(source: str, ratios: list[float]) -> list[derive.Measured]:
    return [derive.Measured("time", ["a class"], ratio, source) for ratio in ratios]


def test_each_source_counts_the_same() -> None:
    few, many = measured("few", [0.5, 0.6]), measured("many", [1.0 + place / 1000 for place in range(60)])
    runs = [*few, *many, *measured("third", [1.5])]
    assert sum(weight for _, weight in derive.weighted(runs)) == pytest.approx(3.0)
    row = derive.table(runs)["time"]["a class"]
    assert row["low"] == 0.5  # 2 of 63 runs, but one of 3 sources
    assert row["high"] == pytest.approx(1.454, abs=0.001)  # between 1.059 and 1.5, which is at the place 63/64
    assert row["runs"] == 63
    assert derive.table([*few, *many])["time"] == {}  # too few sources
    assert derive.table([*few, *measured("b", [1.0]), *measured("c", [1.0])])["time"] == {}  # too few runs


def test_coverage_leaves_each_source_out() -> None:
    spread = [0.9 + place / 100 for place in range(21)]
    runs = [run for source in "abcd" for run in measured(source, spread)]
    assert derive.coverage(runs)["time, a class"] == {"runs": 84, "inside": 76, "share": 76 / 84}
    far = [*runs, *measured("e", [3.0] * 10)]  # nothing that the other sources show
    assert derive.coverage(far)["time, a class"]["inside"] <= 84
