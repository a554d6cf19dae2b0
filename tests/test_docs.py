"""What the documents say exists, and the README's Python runs."""

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


def test_reading_order_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "reading-order.md").read_text()
    assert len(re.findall(r"src/tightfit/[\w/]+\.py", text)) >= 8


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_method_is_in_the_readme_with_a_card() -> None:
    from tightfit.methods import METHODS

    readme = (ROOT / "README.md").read_text()
    for method in METHODS:
        name = method.__name__.rpartition(".")[2]
        assert f"`{name}`" in readme
        for part in ("Saves", "Costs", "When", "Order", "Source"):
            assert f"\n{part} " in (method.__doc__ or ""), f"{name}: no {part} on its card"
