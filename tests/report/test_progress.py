"""The progress bar on a terminal and the lines elsewhere show the same figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.engine.step import Step
from tightfit.report.progress import ProgressBar, ProgressLines, progress

STEP = Step(
    step=4,
    loss=2.5,
    learning_rate=3e-4,
    gradient_norm=None,
    samples=4,
    items=60,
    processed=64,
    skipped=False,
    seconds=0.5,
)


@pytest.mark.parametrize(("terminal", "kind"), [(True, ProgressBar), (False, ProgressLines)])
def test_progress_shows_loss_speed_and_time_left(terminal: bool, kind: type) -> None:
    text = io.StringIO()
    with progress(10, "tokens", Console(file=text, force_terminal=terminal, width=160, legacy_windows=False)) as view:
        assert isinstance(view, kind)
        view.show(STEP, 128.0, 3 * 2**20, 2.5)
        view.say("a remark")
    shown = text.getvalue()
    for words in ("loss 2.5000", "lr 3.00e-04", "128 tokens/s", "peak 3 MiB", "left 2.5 s", "a remark", "5/10"):
        assert words in shown
