"""docs/import.md is what the importers' tables say."""

from __future__ import annotations

from pathlib import Path

from tightfit.importers.importing import IMPORTERS
from tightfit.report import import_docs

PAGE = Path(__file__).parents[2] / "docs" / "import.md"


def test_the_page_is_written_from_the_tables() -> None:
    assert PAGE.read_text() == import_docs.page(), "run python -m tightfit.report.import_docs"


def test_the_page_has_every_key() -> None:
    text = PAGE.read_text()
    for importer in IMPORTERS:
        section = text.split(f"## {importer.title}\n")[1].split("\n## ")[0]
        for key in import_docs.shown_keys(importer):
            assert f"`{key.name}`" in section, key.name


def test_keys_that_the_page_leaves_out_are_in_another_table() -> None:
    names = {key.name for importer in IMPORTERS for key in import_docs.shown_keys(importer)}
    for importer in IMPORTERS:
        for key in importer.keys:
            bare = key.name.removeprefix("deepspeed_config.deepspeed_config_file.").removeprefix("deepspeed.")
            assert bare in names, key.name
