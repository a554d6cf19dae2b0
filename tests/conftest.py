"""What all tests share: a cache of their own, a machine whose speed is always the same, and how they are dealt out to workers.

Those that start processes of their own run in one worker, which keeps the processes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tightfit.machine import Figure, Machine
from tightfit.planner.complete import has_fast_bf16

os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache")

_SEVERAL = re.compile(
    r"engine/test_(several_devices|limits|hosts|freed|missing_gradients|unused_modules|processes|sample|every_value)"
    r"|methods/test_(collectives|pipeline|stage_boundaries|tensor_parallel|parameter_server|data_parallel|shards)"
    r"|methods/test_(context_parallel|offload|gradcheck)"
    r"|zoo/test_zoo.*several|measure/test_verify_several"
    r"|planner/test_(measured_devices|crossings)"
    r"|contract/.*[\[,+](dp_replicate|dp_shard|cp|tp|pp|parameter_server)="
)


def pytest_configure() -> None:
    keep_machine()


def keep_machine() -> None:
    """Plans are chosen by a machine's figures: here they depend neither on what it was measured to do nor on a glance at it."""
    machine = Machine.detect()
    if machine.device == "cpu" and not machine.matrix_flops_per_s:
        types = {"fp32": "float32", **({"bf16": "bfloat16"} if has_fast_bf16(machine) else {})}
        rates = {kind: machine.achieved("product", dtype, 1e9) for kind, dtype in types.items()}
        figures = {kind: Figure(value=rate, source="measured", detail="of tests") for kind, rate in rates.items()}
        machine.replace(matrix_flops_per_s=figures).keep()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, which knows the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_machine()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As --dist loadgroup with the mark xdist_group, which pytest-xdist 3.8 does not see under pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "distributed" if _SEVERAL.search(nodeid) else nodeid

    return Scheduling(config, log)
