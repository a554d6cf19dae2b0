"""The explanation as text, from Python."""

from __future__ import annotations

import pytest

import tightfit
from tests.planner import cases
from tightfit.machine import Machine


def test_an_explanation_says_where_bytes_and_time_go() -> None:
    job, machine = cases.job("gpt2"), Machine.named("l4")
    text = tightfit.explain(job, tightfit.Plan(precision="bf16-mixed", micro_batch=4), machine)
    for word in ("memory", "speed", "+ precision", "+ microbatch", "activations", "at the peak", "bf16: changed"):
        assert word in text, word


def test_an_estimate_explains_itself() -> None:
    estimate = tightfit.estimate(cases.job("vit"), tightfit.Plan(), Machine.named("l4"))
    assert "parameters" in estimate.explain()
    assert "samples/s" not in estimate.explain()
    assert estimate.tokens_per_s is None
    assert estimate.samples_per_s > 0


def test_mfu_is_shown_only_with_a_published_peak() -> None:
    """The share of the measured matrix rate is shown everywhere."""
    job, here, gpu = cases.job("gpt2"), Machine.detect(), Machine.named("l4")
    on_gpu, on_processor = (tightfit.estimate(job, tightfit.Plan(), machine) for machine in (gpu, here))
    assert on_gpu.mfu is not None
    assert on_gpu.matrix_utilization == pytest.approx(on_gpu.mfu / 0.51)  # of the fp32 peak, as large products reach it
    assert on_processor.mfu is None
    assert {"mfu", "matrix_utilization"} <= on_processor.content().keys()
    for machine, said in ((gpu, True), (here, False)):
        text = tightfit.explain(job, tightfit.Plan(), machine)
        assert (" MFU" in text) is said
        assert "of the matrix rate" in text


def test_an_explanation_says_that_a_machine_s_speed_is_a_guess() -> None:
    job = cases.job("gpt2")
    here = Machine.detect()
    for machine, guessed in ((here.replace(rates={}, matrix_flops_per_s={}), True), (Machine.named("l4"), False)):
        assert ("--calibrate" in tightfit.explain(job, tightfit.Plan(), machine)) is guessed
