"""Which device of a pipeline does what when, as text and as an SVG."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.timetable import BACKWARD, FORWARD, Slot
from tightfit.units import format_seconds

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COLOURS = {"F": ("#bee3f8", "#2b6cb0"), "B": ("#c6f6d5", "#2f855a"), "W": ("#fefcbf", "#b7791f")}
_SHADES = ("#ffffff", "#cbd5e0", "#a0aec0", "#718096")  # of a device's second, third, ... piece
_WIDTH, _ROW, _LEFT, _TOP = 900, 26, 70, 40


def timeline_text(slots: Sequence[Slot], width: int = 100) -> list[str]:
    """A line for each device: digits are forwards by micro-batch, letters backwards, + weights' gradients, . waiting."""
    end, devices = max(slot.end for slot in slots), 1 + max(slot.device for slot in slots)
    lines = []
    for device in range(devices):
        cells = ["."] * width
        own = [slot for slot in slots if slot.device == device]
        for slot in own:
            number = slot.action.micro_batch
            mark = {FORWARD: str(number % 10), BACKWARD: _LETTERS[number % 26]}.get(slot.action.kind, "+")
            first, last = round(slot.start / end * width), round(slot.end / end * width)
            cells[first : max(last, first + 1)] = mark * (max(last, first + 1) - first)
        busy = sum(slot.end - slot.start for slot in own) / end
        lines.append(f"device {device:<3} {''.join(cells[:width])} {busy:4.0%} at work")
    note = "digits: forward of that micro-batch, letters: backward, +: weights' gradients, dots: waiting"
    return [*lines, f"{'':10} {format_seconds(end)} from end to end; {note}"]


def timeline_svg(slots: Sequence[Slot], title: str) -> str:
    """The same as an SVG: forwards blue, backwards green, weights' gradients yellow, each with its micro-batch's number."""
    end, devices = max(slot.end for slot in slots), 1 + max(slot.device for slot in slots)
    height = _TOP + devices * _ROW + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{title[:120]}</text>',
    ]
    for device in range(devices):
        y = _TOP + device * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">device {device}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 4}" fill="#f7fafc"/>')
    for slot in slots:
        x, wide = _LEFT + slot.start / end * _WIDTH, (slot.end - slot.start) / end * _WIDTH
        y, (fill, line) = _TOP + slot.device * _ROW, _COLOURS[slot.action.kind]
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW - 4}" fill="{fill}" stroke="{line}" '
            'stroke-width="0.7"/>'
        )
        piece = slot.action.chunk // devices
        if piece:
            shade = _SHADES[min(piece, len(_SHADES) - 1)]
            parts.append(f'<rect x="{x:.2f}" y="{y + _ROW - 8}" width="{wide:.2f}" height="4" fill="{shade}"/>')
        if wide > 11:
            number = slot.action.micro_batch
            parts.append(f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle">{number}</text>')
    y = _TOP + devices * _ROW + 20
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{y}" text-anchor="end">{format_seconds(end)}</text>')
    names = {"F": "forward", "B": "backward", "W": "weights' gradients"}
    x = _LEFT
    for kind in sorted({slot.action.kind for slot in slots}, key="FBW".index):
        fill, line = _COLOURS[kind]
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}" stroke="{line}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{names[kind]}</text>')
        x += 90
    return "\n".join([*parts, "</svg>\n"])
