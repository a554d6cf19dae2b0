"""Memory over a step as an SVG: rows stacked, phases along the axis. No library draws it, so none is needed to see it."""

from __future__ import annotations

from html import escape

from tightfit.ledger import ROWS
from tightfit.planner.estimate import Estimate
from tightfit.units import format_bytes

_COLOURS = {
    "allocator": "#c9c9c9",
    "runtime": "#8d99ae",
    "parameters": "#2b6cb0",
    "optimizer": "#6b46c1",
    "gradients": "#c05621",
    "activations": "#2f855a",
    "temporaries": "#d69e2e",
    "communication": "#b83280",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 300, 70, 46


def memory_svg(estimate: Estimate) -> str:
    """An SVG of what is in memory through one step, by row, with the limit where it is near."""
    instants = list(estimate.ledger.instants())
    most = max(sum(rows.values()) for _, _, rows in instants)
    top = min(estimate.limit_bytes, 1.25 * most) if estimate.limit_bytes < 1.6 * most else 1.08 * most
    top = max(top, most) * 1.04
    across = _WIDTH / max(len(instants) - 1, 1)

    def point(place: int, size: float) -> str:
        return f"{_LEFT + place * across:.1f},{_TOP + _HEIGHT * (1 - size / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 150} {_TOP + _HEIGHT + 44}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(str(estimate.plan)[:110])}</text>',
    ]
    below = [0.0] * len(instants)
    shown = [row for row in _COLOURS if any(rows.get(row) for _, _, rows in instants)]
    assert set(_COLOURS) == set(ROWS)
    for number, row in enumerate(shown):
        above = [low + max(rows.get(row, 0.0), 0.0) for low, (_, _, rows) in zip(below, instants, strict=True)]
        outline = [point(place, size) for place, size in enumerate(above)]
        outline += [point(place, size) for place, size in reversed(list(enumerate(below)))]
        parts.append(f'<polygon points="{" ".join(outline)}" fill="{_COLOURS[row]}" fill-opacity="0.85"/>')
        line = _TOP + 14 + 20 * number
        parts.append(f'<rect x="{_LEFT + _WIDTH + 14}" y="{line - 10}" width="12" height="12" fill="{_COLOURS[row]}"/>')
        parts.append(f'<text x="{_LEFT + _WIDTH + 32}" y="{line}">{row}</text>')
        below = above
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#ddd" stroke-width="0.7"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{format_bytes(share * top)}</text>')
    if estimate.limit_bytes <= top:
        y = _TOP + _HEIGHT * (1 - estimate.limit_bytes / top)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#c53030" stroke-dasharray="6 3"/>'
        )
        parts.append(f'<text x="{_LEFT + _WIDTH + 4}" y="{y + 4}" fill="#c53030">limit</text>')
    parts += _phases(instants, across)
    return "\n".join([*parts, "</svg>\n"])


def _phases(instants: list[tuple[str, str, dict[str, float]]], across: float) -> list[str]:
    """The names of the phases below the axis, each under its stretch, and a line where one begins."""
    parts, start = [], 0
    for place in range(1, len(instants) + 1):
        if place == len(instants) or instants[place][0] != instants[start][0]:
            x, end = _LEFT + start * across, _LEFT + min(place, len(instants) - 1) * across
            bottom = _TOP + _HEIGHT
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 6}" stroke="black"/>')
            if end - x > 40 or place == len(instants):
                anchor = "end" if place == len(instants) and end - x < 60 else "middle"
                middle = end if anchor == "end" else (x + end) / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{bottom + 22}" text-anchor="{anchor}">{instants[start][0]}</text>'
                )
            start = place
    return parts
