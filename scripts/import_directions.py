"""Imports point one way: a package may import those below it, never one above or beside it. Methods do not import each other."""

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
    ("planner",),
    ("calibration",),
    ("engine",),
    ("methods",),
    ("parallel",),
    ("runtime",),
    ("distributed",),
    ("data", "optim"),
    ("models",),
    ("record",),
    ("cost",),
    ("importers",),
    ("rules",),
    ("plan",),
    ("capabilities",),
    ("achieved_rates",),
    ("job", "machine"),
    ("job_sections",),
    ("machines",),
    ("tensor_files", "values", "target_device"),
    ("cache_folder", "yaml_input", "units", "other_words", "optional_packages"),
    ("errors",),
    ("_torch",),
)  # from the top to the bottom
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}


def package_of(path: Path) -> str:
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
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        package = package_of(path)
        for module in sorted(imported_modules(path)):
            other = module.split(".")[0]
            if other not in RANK:
                continue
            upward = RANK[other] < RANK[package] or (RANK[other] == RANK[package] and other != package)
            if upward and package != "__init__":
                found.append(f"{path.relative_to(SOURCE)} imports {module}, which lies above or beside it")
            if package == other == "methods" and path.name != "__init__.py":
                found.append(f"{path.relative_to(SOURCE)} imports the method {module}; methods do not know each other")
    return found


if __name__ == "__main__":
    problems = violations()
    print("\n".join(problems) or "imports point one way")
    sys.exit(bool(problems))
