"""The documents name what exists, their Python runs, and their figures are those of the records."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import tightfit
from benchmarks import picture, tables
from benchmarks.record_shapes import SHAPES, schema
from tightfit.machine import Machine

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


def test_no_file_of_the_reading_order_imports_a_later_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    part = page.split("## Read the code in this order")[1].split("\n1. ")[1].split("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", part)
    modules = ["tightfit." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files]
    assert len(files) > 15
    for number, file in enumerate(files):
        nodes = ast.walk(ast.parse((ROOT / "src" / "tightfit" / file).read_text()))
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {node.module for node in froms} | {
            f"{node.module}.{one.name}" for node in froms for one in node.names
        }
        assert imported.isdisjoint(modules[number + 1 :]), file


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/explain.md",
        "docs/python.md",
        "docs/finetuning.md",
        "docs/conversations.md",
        "docs/sources.md",
    ],
)
def test_python_blocks_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, document, "exec"), {})


def test_readme_is_short_and_has_six_results() -> None:
    readme = (ROOT / "README.md").read_text()
    results = readme.split(tables.BEGIN)[1].split(tables.END)[0]
    assert len(results.splitlines()) == 2 + 6
    assert len(readme.splitlines()) <= 150


def test_page_of_methods_is_written_from_the_methods() -> None:
    from tightfit.report import method_docs

    assert (ROOT / "docs" / "methods.md").read_text() == method_docs.page(), "run python -m tightfit.report.method_docs"


def test_results_are_written_from_the_records() -> None:
    for path, text in tables.written().items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.tables"


def test_picture_is_drawn_from_the_records() -> None:
    drawn = picture.draw(tables.read("memory_ladder")["rungs"], tables.read("single_device")["contenders"])
    assert (ROOT / "docs" / "picture.svg").read_text() == drawn, "run python benchmarks/picture.py"


def test_records_have_their_shapes_and_are_listed() -> None:
    records = {path.stem for path in tables.RECORDS.glob("*.json")} - {"schema"}
    assert records <= tables.SOURCES.keys()
    assert set(SHAPES) == tables.SOURCES.keys() - {"machine"}
    for name in records - {"machine"}:
        SHAPES[name].model_validate_json((tables.RECORDS / f"{name}.json").read_text())
    Machine.model_validate_json((tables.RECORDS / "machine.json").read_text())


def test_schema_of_records_is_current() -> None:
    committed = json.loads((tables.RECORDS / "schema.json").read_text())
    assert committed == schema(), "run python benchmarks/record_shapes.py"


def test_a_record_with_another_field_is_refused() -> None:
    record = tables.read("search")
    with pytest.raises(ValidationError, match="Extra inputs"):
        SHAPES["search"].model_validate({**record, "fastest": 1})


def pages_of(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:  # type: ignore[attr-defined]
            yield from pages_of(entry)


def test_site_has_every_page_and_no_other() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    hook = ast.parse((ROOT / "scripts" / "docs_pages.py").read_text())
    (added,) = [
        ast.literal_eval(node.value)
        for node in hook.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    ]
    pages = list(pages_of(site["nav"]))
    assert len(pages) == len(set(pages))
    assert not [source for source in added if not (ROOT / source).exists()]
    assert not [page for page in pages if page not in added.values() and not (ROOT / "docs" / page).exists()]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert written <= set(pages), "a page that mkdocs.yml does not list"


def test_reference_has_every_public_name() -> None:
    texts = [path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")]
    named = re.findall(r"^::: tightfit\.([\w.]+)\.(\w+)$", "\n".join(texts), re.M)
    public = {(getattr(tightfit, name).__module__.removeprefix("tightfit."), name) for name in tightfit.__all__}
    assert sorted(named) == sorted(public)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*DOCUMENTS, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", ROOT / "records" / "README.md"]:
        for target in re.findall(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_method_says_what_it_saves_and_costs() -> None:
    from tightfit.methods import METHODS
    from tightfit.report.method_docs import PARTS

    for method in METHODS:
        for part in PARTS:
            assert f"\n{part} " in (method.__doc__ or ""), f"{method.__name__}: no {part} in its docstring"
