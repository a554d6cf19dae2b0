"""The timeline of a pipeline, as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tightfit.cli import app
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, WEIGHTS, make_schedule, simulate
from tightfit.errors import InputError
from tightfit.report.figures import draw_timeline
from tightfit.report.schedule_text import timeline_text

SECONDS = {"F": 1.0, "B": 2.0, "W": 1.0}
JOB = """
model: {architecture: llama, vocab_size: 128, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4}
data: {synthetic: tokens, sequence_length: 16}
train: {batch: 8, steps: 10}
"""


def test_each_rank_has_a_line_of_its_actions() -> None:
    slots = simulate(make_schedule("1f1b", 2, 1, 2), lambda action: SECONDS[action.kind])
    first, second, note = timeline_text(slots, width=18)
    assert first.split() == ["rank", "0", "0011....aaaa..bbbb", "67%", "busy"]
    assert second.split() == ["rank", "1", "..00aaaa11bbbb....", "67%", "busy"]
    assert "9 s from end to end" in note


def test_a_picture_has_every_action(tmp_path: Path) -> None:
    for schedule, virtual_stages in (("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)):
        slots = simulate(make_schedule(schedule, 4, virtual_stages, 8), lambda action: SECONDS[action.kind])
        draw_timeline(slots, schedule, tmp_path / "timeline.svg")
        drawn = (tmp_path / "timeline.svg").read_text()
        colours = {FORWARD: "#bee3f8", BACKWARD: "#c6f6d5", WEIGHTS: "#fefcbf"}
        for kind, colour in colours.items():
            actions = sum(slot.action.kind == kind for slot in slots)
            assert drawn.count(f"fill: {colour}") == actions + bool(actions)  # and once in the legend


@pytest.mark.slow
def test_explain_draws_the_pipeline_or_says_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = ["explain", str(tmp_path / "job.yaml"), "--machine", "a100-80gb:2", "--timeline", str(tmp_path / "t.svg")]
    pinned = ["--set", "plan.pp=2", "--set", "plan.micro_batch=2", "--set", "plan.compile=none"]
    drawn = CliRunner().invoke(app, [*command, *pinned])
    assert drawn.exit_code == 0, drawn.output
    assert "rank 1" in drawn.output
    assert "<svg" in (tmp_path / "t.svg").read_text()
    alone = [*command[:3], "a100-80gb", *command[4:], "--set", "plan.compile=none"]
    refused = CliRunner().invoke(app, alone)
    assert isinstance(refused.exception, InputError)
    assert "the plan has no pipeline" in str(refused.exception)
