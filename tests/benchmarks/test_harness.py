"""The benchmarks' harness: rounds in turns, fresh processes, summaries, records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import harness, published


def test_contenders_take_turns_in_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int]] = []

    def measure(name: str, number: int) -> int:
        calls.append((name, number))
        return 10 * number

    found = harness.interleaved(2, ["a", "b"], measure, lambda name, value: f"{name} is {value}")
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert found == [{"a": 0, "b": 0}, {"a": 10, "b": 10}]
    assert "round 2/2  b is 10" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fresh_process_returns_the_function_s_result() -> None:
    figures = {"ran": None, "published_bytes": 2e9, "predicted_bytes": 1e9}
    found = harness.in_fresh_process(published.summed_up, [figures], environment={"RANK": "0"})
    assert found == {"rows": 1, "errors": 0, "memory": {"rows": 1, "median": 0.5, "worst": 0.5, "bias": -0.5}}


@pytest.mark.slow
def test_a_failed_process_is_reported_with_its_error() -> None:
    with pytest.raises(harness.MeasurementFailed, match=r"summed_up(.|\n)*KeyError: 'ran'") as failed:
        harness.in_fresh_process(published.summed_up, [{}])
    assert "KeyError" in failed.value.output


def test_summaries_of_several_measurements() -> None:
    assert harness.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert harness.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert harness.median_of_each([{"s": 1.0}, {"s": 5.0}, {"s": 2.0}]) == {"s": 2.0}
    assert harness.error_summary([-0.5, 0.1, 0.2]) == {"median": 0.2, "worst": 0.5}


def test_a_record_names_versions_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    harness.write_record(None, {"rows": []})
    assert harness.read_record(path) == harness.read_record(None) == {}
    harness.write_record(path, {"rows": [1]})
    record = harness.read_record(path)
    assert list(record) == ["code", "commit", "date", "machine", "processor", "rows"]
    assert {"tightfit", "torch", "python"} <= record["code"].keys()
    assert record == json.loads(path.read_text())
    assert os.listdir(tmp_path) == ["record.json"]
