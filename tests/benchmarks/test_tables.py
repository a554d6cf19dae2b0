"""Tables say of the records what is in them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tables

TUNED, OTHER = {"GLIBC_TUNABLES": "tuned"}, {"GLIBC_TUNABLES": "other"}


def record_of(**environments: dict[str, str] | None) -> dict[str, Any]:
    names = {"plan": "tightfit, best plan", "peer": "plain loop, bf16, compiled", "plain": "plain loop, defaults"}
    return {"contenders": [{"name": names[who], "environment": said} for who, said in environments.items()]}


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        (record_of(plan=TUNED, peer=TUNED, plain={}), "same"),
        (record_of(plan=TUNED, peer=OTHER, plain={}), "other"),
        (record_of(plan=TUNED, peer={}, plain={}), "other"),
        (record_of(plan=None, peer=None, plain=None), "older"),
    ],
)
def test_allocator_settings_of_peers(record: dict[str, Any], settings: str) -> None:
    assert tables.peers_settings(record) == settings


def test_summaries_in_records_are_those_of_their_pairs() -> None:
    for name in ("prediction", "prediction_single"):
        record = tables.read(name)
        for key, what in {
            "estimate": "memory, estimated",
            "process": "memory of the process",
            "time": "step time",
        }.items():
            found = tables.median_and_worst(tables.errors(record["pairs"], what))
            summary = record["summary"][key]
            assert found == (tables.percent(summary["median"]), tables.percent(summary["worst"]))


def test_prose_is_wrapped_and_tables_are_not() -> None:
    row = "| " + "a " * 80 + "|"
    wrapped = tables.wrapped("word " * 40 + "\n\n" + row)
    assert row in wrapped
    assert all(len(line) <= 100 for line in wrapped.split(row)[0].splitlines())
