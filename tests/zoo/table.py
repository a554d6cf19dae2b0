"""The table of what each architecture supports: python -m tests.zoo.table writes docs/models.md (some 15 minutes)."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.zoo import zoo
from tests.zoo.trial import Found, Trial

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "chunked": {"chunked_loss": 5},
    "zero 3": {"zero": 3, "dp_shard": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batch": 2},
}
NOT_RUN = "."
SAID = {
    "recompute": "`recompute: full`",
    "chunked": "`chunked_loss`",
    "zero 3": "`zero: 3, dp_shard: 2`",
    "tp": "`tp: 2`",
    "cp": "`cp: 2`",
    "pp": "`pp: 2, micro_batch: 2`",
}
HEAD = """# What each architecture supports

`python -m tests.zoo.table` writes this page, and `tests/zoo` holds the code to it. Each architecture of transformers was
made in a tiny size. It was trained for two steps with each method alone, and with plain PyTorch.

- `=` means that the losses and all weights are equal up to rounding.
- A number means that the plan is refused before the first step. The list at the end says why.
- `!` marks what is known to be wrong, and `.` what was not run.

The tables say nothing about speed or about pairs of methods. `scripts/test --zoo` draws pairs.

The columns are these plans:

"""


def trials() -> list[Trial]:
    names = [entry.name for entry in zoo().values() if entry.kind != "custom"]
    return [Trial(name, plan) for name in names for plan in COLUMNS.values()]


def reason(found: Found) -> str:
    """Why a plan was refused, without what names the model or the plan."""
    said = found.said.split("\n")[0]
    said = re.sub(r"^InputError: (plan|job): [^:]*(?:=[^:]*)?: ", "", said)
    said = re.sub(r"^InputError: ", "", said)
    said = re.sub(r"^\S+ (has no table|divides modules)", r"the architecture \1", said)
    said = re.sub(r" \((RuntimeError|ValueError|AssertionError|DynamicOutputShape).*", "", said)
    underivable = r"a block returns \1 that the other pipeline stages cannot derive from its inputs"
    said = re.sub(r"^[\w.]+ returns (int|a tensor).*", underivable, said)
    said = said if len(said) < 160 else said[:160] + " ..."
    return re.sub(r"\b[A-Z]\w*(For[A-Z]\w+|LMHeadModel|Model|Classification)\b", "the model", said)


def lines_of(results: dict[tuple[str, str], Found]) -> Iterator[str]:
    """The page. results: by model and column."""
    yield from HEAD.splitlines()
    yield from (f"- **{name}** {said}" for name, said in SAID.items())
    yield ""
    reasons: dict[str, int] = {}
    kinds: dict[str, list[str]] = {}
    for entry in zoo().values():
        if entry.kind != "custom":
            kinds.setdefault(entry.kind, []).append(entry.name)
    for kind, names in kinds.items():
        yield f"| {kind} | " + " | ".join(COLUMNS) + " |"
        yield "| --- |" + " --- |" * len(COLUMNS)
        for name in names:
            yield f"| {name} | " + " | ".join(_cell(results.get((name, column)), reasons) for column in COLUMNS) + " |"
        yield ""
    yield "Why plans are refused:"
    yield ""
    yield from (f"{number}. {why}" for why, number in reasons.items())


def _cell(found: Found | None, reasons: dict[str, int]) -> str:
    if found is None:
        return NOT_RUN
    if found.outcome == "equal":
        return "="
    return str(reasons.setdefault(reason(found), len(reasons) + 1)) if found.outcome == "refused" else "!"


def cells(page: str) -> dict[tuple[str, str], str]:
    """What a page says of each model and column."""
    found = {}
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            name, *values = [part.strip() for part in line.strip("|").split("|")]
            if name in zoo():
                found.update({(name, column): value for column, value in zip(COLUMNS, values, strict=True)})
    return found


def run(lanes: int, columns: list[str], kept: Path | None) -> dict[tuple[str, str], Found]:
    """The trials of some columns. kept: a file of what earlier calls have found, which is not run again."""
    from tests.zoo.crew import Crew

    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    found = {(name, column): Found(*one) for name, column, *one in map(json.loads, lines)}
    todo = [(trial, column) for trial in trials() for column in columns if COLUMNS[column] == trial.plan]
    todo = [one for one in todo if (one[0].model, one[1]) not in found]
    todo.sort(key=lambda one: one[0].processes)
    lock = threading.Lock()

    def lane(folder: Path) -> None:
        crew = Crew(folder, limit_s=120)
        while True:
            with lock:
                if not todo:
                    break
                trial, column = todo.pop(0)
            one = crew.hold(trial)
            if one.failed:
                crew.close()
                one = crew.hold(trial)
            with lock:
                found[trial.model, column] = one
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps([trial.model, column, one.outcome, one.said]) + "\n")
            if one.failed:
                print(one.outcome, trial.model, json.dumps(trial.plan), one.said[:200], flush=True)
        crew.close()

    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        threads = [threading.Thread(target=lane, args=(Path(folder),)) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(30)
                print(f"{len(found)} found, {len(todo)} to do", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.table", description=__doc__)
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), help="only run these")
    parser.add_argument("--lanes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kept", type=Path, help="a file of what has been found, to go on from")
    asked = parser.parse_args()
    found = run(asked.lanes, asked.columns, asked.kept)
    PAGE.write_text("\n".join(lines_of(found)) + "\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from multiprocessing import get_context

    get_context("forkserver").set_forkserver_preload(["tests.zoo.preload"])
    main()
