"""The explanation as text, from Python."""

from __future__ import annotations

import tightfit
from tests.planner import cases
from tightfit.machine import Machine


def test_an_explanation_says_where_bytes_and_time_go() -> None:
    job, machine = cases.job("gpt2"), Machine.named("l4")
    text = tightfit.explain(job, machine, tightfit.Plan(precision="bf16-mixed", micro_batch=4))
    for word in ("memory", "speed", "+ precision", "+ microbatch", "activations", "at the peak", "bf16: changed"):
        assert word in text, word


def test_an_estimate_explains_itself() -> None:
    estimate = tightfit.estimate(cases.job("vit"), tightfit.Plan(), Machine.named("l4"))
    assert "parameters" in estimate.explain()
    assert "samples/s" not in estimate.explain()
    assert estimate.tokens_per_s is None
    assert estimate.samples_per_s > 0


def test_an_explanation_says_that_a_machine_s_speed_is_a_guess() -> None:
    job = cases.job("gpt2")
    here = Machine.detect()
    for machine, guessed in ((here.replace(rates={}, matrix_flops_per_s={}), True), (Machine.named("l4"), False)):
        assert ("--calibrate" in tightfit.explain(job, machine, tightfit.Plan())) is guessed
