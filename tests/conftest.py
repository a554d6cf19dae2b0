"""What all tests share: a cache of their own, a machine of constant speed, and their distribution
to workers.

Tests that start processes run in one worker, which keeps the processes. A run is either of tests
for processors or of tests with the mark `gpu`. In the former neither the tests nor the processes
that they start see a GPU, so on every machine plans are chosen for its processor.
"""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit.achieved_rates import achieved
from tightfit.capabilities import has_fast_bf16
from tightfit.machine import Figure, Machine

os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache")
os.environ["USE_PYTORCH_KERNEL_CACHE"] = (
    "0"  # workers would create this cache at the same time, and torch warns if that fails
)
os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: tests use no network

_SEVERAL = re.compile(
    r"engine/test_(several_devices|divided_check|evaluation_several|limits|hosts|freed|missing_gradients|unused_modules|processes|sample|every_value)"
    r"|optim/test_(nested_states|own_groups)|methods/test_(pipeline|tensor_parallel|parameter_server|data_parallel)|distributed/test_collectives|parallel/"
    r"|methods/test_(context_parallel|offload|gradcheck|gathers|float8|tiny_gradients)"
    r"|zoo/test_zoo.*several|measure/test_verify_several"
    r"|models/test_block_state.py::test_substituted"
    r"|planner/test_(measured_devices|crossings)|report/test_best_and_callbacks"
    r"|contract/.*[\[,+](dp_replicate|dp_shard|cp|tp|pp|parameter_server)="
)


LESS_URGENT = 5  # added to the niceness of workers that do not run those tests
GC_THRESHOLDS = (50_000, 20, 100)
GPU_MARK = "not gpu"  # in an expression of marks: GPU tests are excluded
_ONE_FIXTURE = re.compile(r"(benchmarks/test_gpu|test_gpu_suite)\.py")
"""Files whose tests share a slow fixture: they run in one worker, which makes it once."""


def pytest_configure(config: pytest.Config) -> None:
    if GPU_MARK in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    keep_machine()


GPU_TESTS = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the slow suite what `sweep` does not keep. Note the ids of what `scripts/test --gpu` would run, before pytest
    leaves them out here."""
    _thin_sweeps(items)
    marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    config.stash[GPU_TESTS] = [name for name, found in marks.items() if "gpu" in found and "slow" not in found]


def _thin_sweeps(items: list[pytest.Item]) -> None:
    """Mark cases of the tests with the mark `sweep(n)` as slow: all but the first and each n-th after it,
    of those that are not slow already and need no GPU."""
    seen: Counter[str] = Counter()
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is None or item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
            continue
        (every,), test = sweep.args, item.nodeid.partition("[")[0]
        if seen[test] % every:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Let the worker whose tests start processes go first. It would be the last to end: its processes also wait for each
    other."""
    if "PYTEST_XDIST_WORKER" in os.environ and not _SEVERAL.search(nodeid) and os.nice(0) < LESS_URGENT:
        os.nice(LESS_URGENT)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a run of both kinds on a machine with a GPU: results for this machine are cached for one kind.

    Spare Python's garbage collector the objects of imported modules, which it would visit again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    kinds = {item.get_closest_marker("gpu") is not None for item in session.items}
    if kinds == {True, False} and Machine.detect().device == "cuda":
        raise pytest.UsageError("tests for processors and for a GPU run apart: use -m gpu, or -m 'not gpu'")


@pytest.fixture(autouse=True)
def one_order_of_sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip a GPU test on a machine without a GPU; make its kernels deterministic; leave no process group behind."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    if torch.distributed.is_initialized():  # of one device that offloads parameters
        from tightfit.distributed import mesh

        mesh.forget_meshes()
        gc.collect()
        torch.distributed.destroy_process_group()


def keep_machine() -> None:
    """Keep fixed figures of this machine, so that plans depend neither on its calibration nor on a quick one."""
    machine = Machine.detect()
    if machine.device == "cpu" and not machine.matrix_flops_per_s:
        types = {"fp32": "float32", **({"bf16": "bfloat16"} if has_fast_bf16(machine) else {})}
        rates = {kind: achieved(machine, "product", dtype, 1e9) for kind, dtype in types.items()}
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
            shared = _ONE_FIXTURE.search(nodeid)
            if shared:
                return shared.group(1)
            return "distributed" if _SEVERAL.search(nodeid) else nodeid

    return Scheduling(config, log)
