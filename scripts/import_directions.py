"""Imports point one way: a room may import the rooms below it, never those above or (but for the noted) beside it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "tightfit"

LAYERS = (
    ("__main__",),
    ("__init__", "cli"),
    ("report", "interop"),
    ("measure",),
    ("planner", "engine"),
    ("methods",),
    ("data", "optim"),
    ("models",),
    ("ledger", "record"),
    ("rules",),
    ("plan",),
    ("capabilities",),
    ("job", "machine"),
    ("machines",),
    ("entries",),
    ("files", "values", "timetable", "program"),
    ("plain", "units"),
    ("errors",),
)
NOTED = {  # each with its reason
    ("planner/rehearse.py", "engine"),  # its point is to run the engine on fake tensors
}
NO_METHODS = (
    "methods.protocol",
    "methods.run",
    "methods.mesh",
    "methods.boundaries",
    "methods.sections",
    "methods.buckets",
    "methods.gathers",
    "methods.collectives",
    "methods.compiler",
    "methods.cutter",
    "methods.deferred",
    "methods.hollow",
    "methods.loss_kernels",
    "methods.pipedream",
    "methods.progress",
    "methods.recomputation",
    "methods.rendezvous",
    "methods.row",
    "methods.sequences",
    "methods.stages",
    "methods.agreed",
    "methods.ahead",
    "methods.shards",
    "methods.stores",
    "methods.turns",
    "methods.unused",
    "methods.uploads",
    "methods.vocabulary",
)  # what the rooms share, and a part of one that is long enough for a file
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """The tightfit modules that a file imports, anywhere in it, type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("tightfit.") for name in found if name.startswith("tightfit.")}


def violations() -> list[str]:
    """Every import that points upward or sideways, and every method that imports another."""
    said = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        for module in sorted(imported_modules(path)):
            other = module.split(".")[0]
            if other not in RANK:
                continue
            upward = RANK[other] < RANK[room] or (RANK[other] == RANK[room] and other != room)
            if upward and room != "__init__" and (str(path.relative_to(SOURCE)), other) not in NOTED:
                said.append(f"{path.relative_to(SOURCE)} imports {module}, which lies above or beside it")
            if room == other == "methods" and path.name != "__init__.py" and not module.startswith(NO_METHODS):
                said.append(f"{path.relative_to(SOURCE)} imports the method {module}; methods do not know each other")
    return said


if __name__ == "__main__":
    problems = violations()
    print("\n".join(problems) or "imports point one way")
    sys.exit(bool(problems))
