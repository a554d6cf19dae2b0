"""Implements `tightfit import`: writes a job file and a plan file, and prints how each key was
translated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.importers.importing import Imported, file_texts, import_file, lost_keys
from tightfit.importers.mapping import Row
from tightfit.report.unexpected_errors import not_writable

_WIDEST = 44  # a value in the table is cut to this number of characters


def import_command(path: Path, tool: str | None, out: Path | None, devices: int | None, as_json: bool) -> None:
    """Import another tool's file, write job.yaml and plan.yaml, and print how each key was
    translated.

    path     the file to import
    tool     the name of the tool; None: recognize it by the file's keys
    out      the folder for the two files; None: imported/ and the file's name without its suffix
    devices  the number of devices that train together, if the file does not say it

    Raises InputError if the file cannot be imported, or if the folder has one of the files or cannot
    be written to.
    """
    folder = out or Path("imported") / path.stem
    imported = import_file(path, tool, devices)
    texts = file_texts(imported, path)
    _write(folder, texts)
    if as_json:
        print(json.dumps(_content(imported, folder), indent=1))
        return
    print(f"{path} is read as {imported.tool.title}\n")
    print("\n".join(table(imported.rows)))
    lost = lost_keys(imported.rows)
    for title, sentences in (
        ("contradictions", imported.contradictions),
        ("no counterpart: without these keys the training is not the same", lost),
        ("to do", imported.to_do),
    ):
        if sentences:
            print(f"\n{title}")
            print("\n".join(f"  {sentence}" for sentence in sentences))
    *others, last = (str(folder / name) for name in texts)
    print(f"\nwrote {', '.join(others)} and {last}")
    print(f"next: tightfit explain {folder / 'job.yaml'} --plan {folder / 'plan.yaml'}")


def table(rows: tuple[Row, ...]) -> list[str]:
    """Return the lines of a table with a line for each key: the key, its value, and how it was
    translated."""
    cells = [(row.key, _shown(row), _outcome(row)) for row in rows]
    widths = [max((len(row[column]) for row in cells), default=0) for column in (0, 1)]
    return [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {said}" for key, value, said in cells]


def _shown(row: Row) -> str:
    value = row.value if isinstance(row.value, str) else json.dumps(row.value, default=str)
    value = " ".join(value.split())
    shown = value if len(value) <= _WIDEST else f"{value[: _WIDEST - 3]}..."
    return f"({shown})" if row.outcome == "default" or row.note.startswith("left out") else shown


def _outcome(row: Row) -> str:
    if row.outcome in ("mapped", "default") and row.field:
        text = f"{row.field}: {json.dumps(row.result, default=str).strip(chr(34))}"
        text += " (the tool's default)" if row.outcome == "default" else ""
        return f"{text}; {row.note}" if row.note else text
    return f"{row.outcome}: {row.note}"


def _content(imported: Imported, folder: Path) -> dict[str, Any]:
    keys = [
        {
            "key": row.key,
            "value": row.value,
            "outcome": row.outcome,
            "field": row.field or None,
            "result": row.result,
            "note": row.note or None,
        }
        for row in imported.rows
    ]
    return {
        "tool": imported.tool.name,
        "keys": json.loads(json.dumps(keys, default=str)),
        "contradictions": list(imported.contradictions),
        "to_do": list(imported.to_do),
        "job": imported.job,
        "plan": imported.plan,
        "files": [str(folder / name) for name in ("job.yaml", "plan.yaml", *imported.files)],
    }


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name in texts:
        if (folder / name).exists():
            raise InputError(
                f"import --out {folder}",
                f"already contains {name}",
                f"name another folder with --out, or move {name} away",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise not_writable(folder, error) from None
