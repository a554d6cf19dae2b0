"""How tests are dealt out to workers: those that start processes of their own run in one, which keeps the processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

_SEVERAL = re.compile(
    r"engine/test_(several_devices|limits|hosts|freed)"
    r"|methods/test_(collectives|pipeline|tensor_parallel|parameter_server|data_parallel|shards|context_parallel|offload)"
    r"|contract/.*[\[,+](dp_replicate|dp_shard|cp|tp|pp|parameter_server)="
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As --dist loadgroup with the mark xdist_group, which pytest-xdist 3.8 does not see under pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "distributed" if _SEVERAL.search(nodeid) else nodeid

    return Scheduling(config, log)
