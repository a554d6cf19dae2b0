"""Everything that the documents name exists, and the README's Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|scripts|examples|benchmarks|records|docs|tests)/[\w./-]+)`", document.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_architecture_names_modules_that_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text())
    missing = [name for name in named if not (ROOT / "src" / "tightfit" / name).exists()]
    assert len(named) > 30
    assert not missing


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_and_methods_page_are_generated_from_methods() -> None:
    from tightfit.report import method_docs

    readme = (ROOT / "README.md").read_text()
    assert readme == method_docs.with_table(readme), "run python -m tightfit.report.method_docs"
    assert (ROOT / "docs" / "methods.md").read_text() == method_docs.page()


def test_every_method_says_what_it_saves_and_costs() -> None:
    from tightfit.methods import METHODS
    from tightfit.report.method_docs import PARTS

    for method in METHODS:
        for part in PARTS:
            assert f"\n{part} " in (method.__doc__ or ""), f"{method.__name__}: no {part} in its docstring"
