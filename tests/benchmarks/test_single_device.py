"""Contenders of the single-device benchmark start alike."""

from __future__ import annotations

import pytest

import tightfit
from benchmarks.single_device import BEST, CONTENDERS, LEAN, demo_job, environment, tokens_of
from tightfit.engine import launch

TUNED_PEERS = [
    name
    for name, one in CONTENDERS.items()
    if one["kind"] != "tightfit" and one.get("compile") and "glibc's defaults" not in name
]


@pytest.mark.parametrize("name", TUNED_PEERS)
@pytest.mark.parametrize("plan", [BEST, LEAN], ids=["best", "lean"])
def test_tuned_peers_get_a_plan_s_allocator_settings(name: str, plan: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    expected = launch.environment(tightfit.Plan(**plan), "cpu", {})
    assert environment(CONTENDERS[name]) == expected != {}


def test_peers_with_default_settings_start_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    defaults = [name for name in CONTENDERS if "default" in name]
    assert len(defaults) == 4
    assert all(environment(CONTENDERS[name]) == {} for name in defaults)


@pytest.mark.slow
def test_peers_train_on_the_job_s_own_tokens() -> None:
    job = demo_job()
    first, second = tokens_of(job, 2)
    assert first.shape == second.shape == (job.train.batch, 256)
    run = tightfit.build(job, tightfit.Plan())
    (own,) = next(iter(run.data.steps(0, None)))
    assert first.equal(own["input_ids"])
