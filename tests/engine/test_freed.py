"""A run without references leaves nothing in memory, so a notebook or a service can build one after
another."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tests.contract import cases
from tests.pool import together

HERE = "tests.engine.test_freed:"
ALL = ("states", "gradients", "parameters", "activations")
ALONE: list[dict[str, Any]] = [
    {},
    {"update_in_backward": True},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"states": "8-bit", "micro_batch": 2},
    {"chunked_loss": 8},
    {"precision": "bf16-mixed"},
    {"offload": ("gradients",), "offload_to": "disk"},
    {"offload": ALL, "offload_to": "disk"},
]
SEVERAL: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 2, "micro_batch": 1},
    {"dp_shard": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"pp": 2, "micro_batch": 1},
]


def left(fields: dict[str, Any]) -> int:
    """Parameters of a run that are in memory after it."""

    def trained() -> list[weakref.ref[Any]]:
        run = tightfit.build(cases.make_case("llama").job, tightfit.Plan(**fields))
        list(tightfit.train(run))
        assert any(True for _ in run.model.parameters())
        return [weakref.ref(parameter) for parameter in run.model.parameters()]

    parameters = trained()
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


def threads() -> int:
    """Of this process; those of gloo's groups are none of Python's."""
    return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()


@pytest.mark.parametrize("fields", ALONE, ids=str)
def test_a_released_run_is_freed(fields: dict[str, Any]) -> None:
    assert left(fields) == 0


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", SEVERAL, ids=str)
def test_a_released_run_on_several_devices_is_freed(fields: dict[str, Any]) -> None:
    assert together(2, HERE + "left", fields) == [0, 0]


@pytest.mark.slow
def test_nothing_keeps_the_process_groups_of_a_run_alive() -> None:
    together(2, HERE + "left", SEVERAL[3])
    before = max(together(2, HERE + "threads"))
    for fields in SEVERAL:
        together(2, HERE + "left", fields)  # afterwards the processes leave their groups
    assert max(together(2, HERE + "threads")) <= before
