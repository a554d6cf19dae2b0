"""Draws a pipeline schedule over time as text. (`report/figures.py` draws it as a picture.)"""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, ScheduledAction
from tightfit.units import format_seconds

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def timeline_text(slots: Sequence[ScheduledAction], width: int = 100) -> list[str]:
    """Return one line of text for each pipeline rank, and a last line that explains the characters.

    A line shows the step from left to right, with these characters:

    - A digit is the forward of a micro-batch: the last digit of the micro-batch's number.
    - A letter is a backward: a for micro-batch 0.
    - + is the computation of the gradients of weights.
    - A dot means that the rank waits.

    slots  the actions of all ranks, each with its start and end
    width  characters for the whole step
    """
    end, ranks = max(slot.end for slot in slots), 1 + max(slot.rank for slot in slots)
    lines = []
    for rank in range(ranks):
        cells = ["."] * width
        own = [slot for slot in slots if slot.rank == rank]
        for slot in own:
            number = slot.action.micro_batch
            mark = {FORWARD: str(number % 10), BACKWARD: _LETTERS[number % 26]}.get(slot.action.kind, "+")
            first, last = round(slot.start / end * width), round(slot.end / end * width)
            cells[first : max(last, first + 1)] = mark * (max(last, first + 1) - first)
        busy = sum(slot.end - slot.start for slot in own) / end
        lines.append(f"rank {rank:<5} {''.join(cells[:width])} {busy:4.0%} busy")
    note = "digits: forward of that micro-batch, letters: backward, +: weights' gradients, dots: waiting"
    return [*lines, f"{'':10} {format_seconds(end)} from end to end; {note}"]
