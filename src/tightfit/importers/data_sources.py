"""Sets the fields of `data` from the data sets of another tool and from what their rows hold: plain
text, prompts with responses, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.importers.mapping import Draft
from tightfit.job_sections.data import FORMAT_FIELDS, TEXT_SOURCES

Source = dict[str, Any]  # fields of tightfit's SourceSpec: {"jsonl": "a.jsonl", "format": "alpaca"}

ONE_TEMPLATE = "tightfit renders conversations with data.chat_template alone"
OTHER_TEMPLATE = "name a file with this template, in Jinja, in data.chat_template"
LAST_TURN = "tightfit trains on the answers of all turns"
ALPACA_PROMPT = "tightfit's prompt ends with '### Response:', without the line break that the tool puts after it"
TEMPLATE_FILE = "chat_template.jinja"
_KINDS = {"json": "jsonl", "jsonl": "jsonl", "ndjson": "jsonl", "parquet": "parquet", "text": "text", "txt": "text"}


def source_of(path: str, files: Any = None, kind: str | None = None) -> Source:
    """Return where a data set of another tool is, as {jsonl: ...}, {parquet: ...}, {text: ...} or
    {dataset: ...}.

    path   the path of a file, a name on the Hugging Face Hub, or json, parquet or text, with the
           files in `files`
    files  the files of the data set, if `path` does not name them
    kind   the kind of the files, such as json, if their names do not say it
    """
    ending = path.rpartition(".")[2].lower() if "." in Path(path).name else ""
    field = _KINDS.get(ending) or _KINDS.get(kind or "") or (_KINDS.get(path) if files else None)
    return {field: files or path} if field else {"dataset": path}


def add_part(source: Source, subset: Any, split: Any) -> list[str]:
    """Add the subset and the split to a source in place. Return the names of those that it cannot
    have: only a data set has them. The split train needs no field, because it is the default."""
    lost = []
    for name, value in (("subset", subset), ("split", None if split == "train" else split)):
        if value and "dataset" in source:
            source[name] = value
        elif value:
            lost.append(name)
    return lost


def renamed(kind: str, names: Mapping[str, str | None]) -> dict[str, str]:
    """Return the value of `fields` for a format: the names that differ from the format's own.

    kind   the format, such as prompt-response
    names  the name of each of the format's fields in the rows; None leaves the format's own
    """
    known = FORMAT_FIELDS[kind]  # type: ignore[index]
    return {name: new for name, new in names.items() if name in known and new and new != name}


def with_format(source: Source, kind: str, names: Mapping[str, str | None]) -> Source:
    """Return a copy of a source whose rows have the format `kind`. `names` is as in `renamed`."""
    fields = renamed(kind, names)
    return {**source, "format": kind, **({"fields": fields} if fields else {})}


def set_sources(draft: Draft, part: str, sources: Sequence[Source]) -> None:
    """Set data.jsonl, data.parquet, data.text or data.dataset to the only source, with its format,
    or data.sources to several sources. The row that gave `part` then names this field.

    Sources without a weight are drawn equally often. The other tools join their data sets, so the
    to-do list asks for weights in proportion to the sizes.
    """
    if len(sources) == 1:
        for name, value in sources[0].items():
            draft.fields[f"data.{name}"] = value
            if name in TEXT_SOURCES:
                draft.point(part, f"data.{name}")
        others = [f"data.{name}: {value}" for name, value in sources[0].items() if name not in TEXT_SOURCES]
        if others:
            draft.remark(part, ", ".join(others))
        return
    draft.fields["data.sources"] = [dict(source) for source in sources]
    draft.point(part, "data.sources")
    if not any("weight" in source for source in sources):
        draft.to_do.append(
            "set the weight of each of data.sources in proportion to its number of samples: the tool joins the data sets, "
            "and tightfit draws from each equally often without weights"
        )


def has_format(sources: Sequence[Source]) -> bool:
    """Return whether the rows of at least one source have a format."""
    return any("format" in source for source in sources)


def set_loss(draft: Draft, part: str, sources: Sequence[Source], value: str, key: str, default: Any) -> None:
    """Set data.loss_on, if the rows have a format. Otherwise, all tokens count in the loss.

    part     the part of the tool's key that decides it
    value    the value of data.loss_on
    key      the tool's key, for the row of its default
    default  the tool's default of this key
    """
    if not has_format(sources):
        draft.settle(part, "not needed", "all tokens of plain texts count in the loss")
    elif part in draft.parts:
        draft.fields["data.loss_on"] = value
    else:
        draft.assume(key, default, "data.loss_on", value)


def set_packing(draft: Draft, part: str, value: str, key: str, default: Any) -> None:
    """Set data.packing. The arguments are as those of `set_loss`."""
    if part in draft.parts:
        draft.fields["data.packing"] = value
    else:
        draft.assume(key, default, "data.packing", value)


def set_template(draft: Draft, part: str, template: str) -> None:
    """Set data.chat_template to tokenizer, chatml, the path of a file with a Jinja template, or to
    a new file with the template if `template` is its text."""
    if "{" in template:
        draft.files[TEMPLATE_FILE] = template
        template = TEMPLATE_FILE
        draft.remark(part, f"the template is written to {TEMPLATE_FILE}, beside the job")
    draft.fields["data.chat_template"] = template


def name_json_arrays(draft: Draft) -> None:
    """Add a sentence to the to-do list for each of the job's JSON files on this machine that holds
    one list of rows: tightfit reads JSON lines."""
    sources = [*draft.fields.get("data.sources", ()), {"jsonl": draft.fields.get("data.jsonl")}]
    for source in sources:
        files = source.get("jsonl")
        for file in files if isinstance(files, list) else [files]:
            if isinstance(file, str) and _begins_with_bracket(Path(file)):
                draft.to_do.append(f"write {file} as JSON lines, with one row in each line: it is one list of rows")


def _begins_with_bracket(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except (OSError, ValueError):
        return False
