"""Draw the README's picture from the records: python benchmarks/picture.py writes docs/picture.svg."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH, ROW, TOP, LABEL, VALUE = 960, 24, 56, 190, 112
INK, SOFT, OURS, OTHERS = "#1f2933", "#616e7c", "#0b7285", "#adb5bd"


def bars(rows: list[tuple[str, float, str, str]], left: int, width: int, title: str, note: str) -> list[str]:
    """A panel of horizontal bars: (label, value, text, colour) from top to bottom."""
    most = max(value for _, value, _, _ in rows)
    room = width - LABEL - VALUE
    parts = [
        f'<text x="{left}" y="22" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="{left}" y="40" font-size="11" fill="{SOFT}">{escape(note)}</text>',
    ]
    for number, (label, value, text, colour) in enumerate(rows):
        y = TOP + number * ROW
        length = max(room * value / most, 1)
        parts += [
            f'<text x="{left + LABEL - 8}" y="{y + 14}" font-size="11" text-anchor="end" fill="{INK}">{escape(label)}</text>',
            f'<rect x="{left + LABEL}" y="{y + 3}" width="{length:.1f}" height="15" rx="2" fill="{colour}"/>',
            f'<text x="{left + LABEL + length + 6:.1f}" y="{y + 14}" font-size="11" fill="{INK}">{escape(text)}</text>',
        ]
    return parts


def draw(ladder: list[dict], contenders: list[dict]) -> str:
    """The two panels as one SVG."""
    memory = [
        (r["name"].split(" (")[0], r["peak_bytes"] / 1e9, f"{r['peak_bytes'] / 1e9:.2f} GB", OURS) for r in ladder
    ]
    names = {
        "plain loop": "loop",
        "lean: bf16 weights, compiled, fused, 8 x 2": "lean",
        "lean: as above": "lean",
        "compiled, fused": "compiled",
        "bf16 autocast": "autocast",
        "glibc's defaults": "glibc",
    }
    speed = []
    for row in contenders:
        name = row["name"].replace(" (fp32)", "")
        for long, short in names.items():
            name = name.replace(long, short)
        colour = OURS if name.startswith("tightfit") else OTHERS
        speed.append(
            (name, row["tokens_per_s"], f"{row['tokens_per_s']:,.0f} in {row['rss_bytes'] / 1e9:.2f} GB", colour)
        )
    half = WIDTH // 2
    parts = bars(
        memory,
        0,
        half - 10,
        "Peak memory of ViT-L/16, method by method",
        "logical bytes of a training step, 224 x 224 images",
    )
    parts += bars(
        speed,
        half + 10,
        half - 10,
        "The demo's job, tokens/s, and what the process takes",
        "13.8M-parameter Llama on 2 CPU cores, all in one run; lean: 8 micro-batches of 2",
    )
    height = TOP + ROW * max(len(memory), len(speed)) + 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDTH + 20} {height}" width="{WIDTH}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f'<rect x="-10" y="0" width="{WIDTH + 20}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    ladder = json.loads((ROOT / "records" / "memory_ladder.json").read_text())["rungs"]
    contenders = json.loads((ROOT / "records" / "single_device.json").read_text())["contenders"]
    (ROOT / "docs" / "picture.svg").write_text(draw(ladder, contenders))
