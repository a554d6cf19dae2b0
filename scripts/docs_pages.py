"""A hook of mkdocs: the site has the README and other files of the repository's root as pages.

mkdocs reads pages from docs/ only. This hook adds those of `PAGES`, and points links between them
and docs/ to the pages of the site. A link to a file that is no page of the site becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "records/README.md": "records.md",
}
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as they are in the site."""
    here = page.file.src_uri  # type: ignore[attr-defined]
    sources = {to: source for source, to in PAGES.items()}
    source = sources.get(here, f"docs/{here}")
    return LINK.sub(lambda link: _in_site(link, source, here, files), markdown)


def _in_site(link: re.Match[str], source: str, here: str, files: Files) -> str:
    image, text, target = link.groups()
    path, hash_, anchor = target.partition("#")
    if not path or "://" in target:
        return link.group()
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(place, place.removeprefix("docs/"))
    if files.get_file_from_path(page) is None:
        if not (ROOT / place).exists():
            return link.group()  # mkdocs says that it leads nowhere
        return text
    return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{hash_}{anchor})"
