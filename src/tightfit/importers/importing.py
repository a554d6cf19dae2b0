"""Imports a configuration file of another tool: recognizes the tool, translates every key, and
validates the resulting job and plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tightfit.errors import InputError
from tightfit.importers import (
    accelerate,
    axolotl,
    deepspeed,
    lightning,
    llama_factory,
    torchtitan,
    torchtune,
    training_arguments,
)
from tightfit.importers.combine import combine
from tightfit.importers.data_sources import name_json_arrays
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, Row
from tightfit.importers.reading import read_settings
from tightfit.job import Job, Permission
from tightfit.job_sections.data import SOURCES
from tightfit.job_sections.paths import is_hub_id
from tightfit.plan import Plan
from tightfit.rules import RULES, needed_permissions
from tightfit.yaml_input import write_yaml

IMPORTERS: tuple[Importer, ...] = (
    torchtune.IMPORTER,
    torchtitan.IMPORTER,
    axolotl.IMPORTER,
    llama_factory.IMPORTER,
    accelerate.IMPORTER,
    deepspeed.IMPORTER,
    training_arguments.IMPORTER,
    lightning.IMPORTER,  # last, because some of its marks are common words
)
_EXAMPLES = {
    "model": {"preset": "gpt2"},
    "data": {"jsonl": "samples.jsonl"},
}  # stand in for a model or data that a file does not have, to validate the rest
_SECTIONS = ("model", "data", "train", "limits")
CLEARLY = 3  # marks of a tool, at which a single mark of an earlier one does not count
_WIDEST = 60  # characters of a value that a message or a comment shows


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    tool            the tool whose file was imported
    job, plan       the content of the job file and of the plan file
    rows            the translation of each key
    contradictions  one sentence for each contradiction in the file, and for each rule of tightfit
                    that the plan breaks
    to_do           one sentence for each thing that the user must add or decide
    files           files beside the job that it names, such as a chat template: name -> text
    """

    tool: Importer
    job: dict[str, Any]
    plan: dict[str, Any]
    rows: tuple[Row, ...]
    contradictions: tuple[str, ...]
    to_do: tuple[str, ...]
    files: dict[str, str]


def import_file(path: Path, tool: str | None = None, devices: int | None = None) -> Imported:
    """Import a file of another tool and return the job and plan.

    tool     the name of a tool, such as axolotl; None: recognize the tool by the file's keys
    devices  the number of devices that train together, if the file does not say it

    Raises InputError if the file cannot be read, if its tool is not recognized, or has only few of its keys,
    or if it has a value that the tool itself would not accept.
    """
    content = read_settings(path)
    importer = _named(tool) if tool is not None else detect(content, str(path))
    imported = import_content(importer, importer.prepare(content, path.resolve().parent), str(path), devices)
    given = [row for row in imported.rows if row.outcome != "default"]
    unknown = [row.key for row in given if row.outcome == "unknown"]
    if tool is None and len(unknown) > len(given) / 2:
        raise InputError(
            str(path),
            f"looks like a file of {importer.title}, which does not have {len(unknown)} of its {len(given)} keys "
            f"({', '.join(unknown[:4])}, ...)",
            f"name the tool: --from {' | '.join(sorted(one.name for one in IMPORTERS))}",
        )
    return imported


def import_content(importer: Importer, content: dict[str, Any], where: str, devices: int | None = None) -> Imported:
    """Import the content of a tool's file, a dict, and return the job and plan.

    where    the name of the file, for error messages
    devices  the number of devices that train together, if the file does not say it

    Raises InputError if a value is one that the tool itself would not accept, if the file asks for an
    objective that tightfit does not have, such as DPO, or if the resulting job or plan is not valid.
    """
    draft = Draft()
    if devices is not None:
        draft.imply("devices", devices, "--devices")
    for name, value in importer.flatten(content):
        _map(draft, importer, name, value, where)
    _fill_defaults(draft, importer, where)
    importer.combine(draft)
    combine(draft)
    draft.remove_dropped()
    _finish_rows(draft)
    try:
        return _validated(importer, draft)
    except InputError as error:
        field = error.asked.replace(": ", ".").rpartition(".")[2]
        keys = [row.key for row in draft.rows if row.field.endswith(f".{field}")]
        raise InputError(f"{where}: {' and '.join(keys) or error.asked}", error.found, error.fix) from None


def detect(content: Mapping[str, Any], where: str) -> Importer:
    """Return the importer of the first tool that has one of its marks (typical keys) among the keys
    of a file, or of one with several marks if the first has a single one. Raises InputError if no tool has.

    content  the content of the file
    where    the name of the file, for the error message
    """
    names = list(_names(content))
    marked: list[tuple[int, Importer]] = []
    for importer in IMPORTERS:
        probe = Importer(importer.name, importer.title, (), tuple(Key(mark) for mark in importer.marks))
        if count := sum(probe.find(name) is not None for name in names):
            marked.append((count, importer))
    if marked:
        most, clearest = max(marked, key=lambda pair: pair[0])
        count, first = marked[0]
        return clearest if count == 1 and most >= CLEARLY else first
    found = ", ".join(str(name) for name in list(content)[:6]) or "no keys"
    raise InputError(
        where,
        f"has the keys of no known tool (found: {found})",
        f"name the tool: --from {' | '.join(sorted(one.name for one in IMPORTERS))}",
    )


def _named(tool: str) -> Importer:
    for importer in IMPORTERS:
        if importer.name == tool.lower():
            return importer
    raise InputError(
        f"--from {tool}",
        "is not a tool that tightfit knows",
        f"use one of: {', '.join(sorted(i.name for i in IMPORTERS))}",
    )


def _names(content: Mapping[str, Any], section: str = "") -> list[str]:
    """Return the names of all keys and sections in a file. The names of nested keys are joined by
    dots: {fp16: {enabled: true}} gives ["fp16", "fp16.enabled"]."""
    names = []
    for name, value in content.items():
        names.append(f"{section}{name}")
        if isinstance(value, Mapping):
            names += _names(value, f"{section}{name}.")
    return names


def _map(draft: Draft, importer: Importer, name: str, value: Any, where: str) -> None:
    """Translate one key of the file: add its row, and the value of its field, to the draft.

    where  the name of the file, for error messages
    """
    key = importer.find(name)
    is_section = any(one.name.startswith(f"{importer.without_section(name)}.") for one in importer.keys)
    if value in (None, {}) and (key or is_section):
        draft.rows.append(Row(name, value, "not needed", note="it is empty"))
    elif key is None:
        near = f"no key of {importer.title} that tightfit knows"
        draft.rows.append(Row(name, value, "unknown", note=near))
    elif isinstance(value, str) and value.lower() == "auto" and not key.takes_auto:
        note = f"{importer.auto}; {key.field} is left open" if key.field else importer.auto
        draft.rows.append(Row(name, value, "left open", note=note))
    else:
        _convert(draft, key, Row(name, value, "mapped"), where)


def _convert(draft: Draft, key: Key, row: Row, where: str, is_default: bool = False) -> None:
    draft.rows.append(row)
    if key.convert is None:
        is_off = row.value in (False, 0, "", "none", "no") or row.value == []
        row.outcome = "not needed" if is_off or not key.is_lost else "no counterpart"
        row.note = "it is off" if is_off and key.is_lost else key.reason
        return
    try:
        made = key.convert(row.value)
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        wants = str(error) if isinstance(error, ValueError) else "a value that the tool takes"
        raise InputError(f"{where}: {row.key}", f"{row.value!r} is not allowed", f"give {wants}") from None
    if isinstance(made, Lacks) and made.is_refused:
        raise InputError(
            f"{where}: {row.key}: {_shown(row.value)}",
            made.reason,
            "train it with the tool that the file is for; for supervised fine-tuning, import a file without this key",
        )
    if isinstance(made, Lacks):
        if made.is_lost:
            draft.lost.add(key.field)
        row.outcome, row.note = ("no counterpart" if made.is_lost else "not needed"), made.reason
    else:
        row.field, row.outcome = key.field, "default" if is_default else "mapped"
        draft.give(row, key, made, is_default)


def _fill_defaults(draft: Draft, importer: Importer, where: str) -> None:
    """For each key that changes the mathematics and that the file does not have, add the tool's
    default to the draft.

    where  the name of the file, for error messages
    """
    keys = {row.key for row in draft.rows if row.value is not None}
    for name, value in importer.defaults.items():
        key = importer.find(name)
        assert key is not None, name
        taken = key.part in draft.parts if key.part else key.field in draft.fields
        named = any(row.field == key.field for row in draft.rows) and not key.part and key.field
        if name not in keys and not taken and not named and not _is_said_by_another(importer, key, keys):
            draft.rows = [row for row in draft.rows if row.key != name]  # the key may be empty in the file
            _convert(draft, key, Row(name, value, "default"), where, is_default=True)


def _is_said_by_another(importer: Importer, key: Key, keys: set[str]) -> bool:
    """Return whether the file has another key with the same meaning as `key` (the same `part` and
    `field`), such as an older name of it. A key whose value is auto counts, too.

    keys  the names of all keys in the file
    """
    return any(
        other.part == key.part
        and other.field == key.field
        and any(other.matches(importer.without_section(name)) for name in keys)
        for other in importer.keys
        if key.part
    )


def _finish_rows(draft: Draft) -> None:
    """Set the result of each row to the final value of the row's field. If that field was never
    set, the row's outcome becomes "left open": the file does not decide the field."""
    for row in draft.rows:
        result = _result(draft, row.field) if row.field else None
        if result is not None:
            row.result = result
        elif row.field and row.outcome in ("mapped", "default"):
            row.outcome = "left open"
            row.note = row.note or f"{row.field} is left open"


def _result(draft: Draft, field: str) -> Any:
    """Return the value of a field; for a mapping such as model.lora, the values of its fields.
    Returns None if the field is not set."""
    inner = {name.removeprefix(f"{field}."): v for name, v in draft.fields.items() if name.startswith(f"{field}.")}
    return draft.fields.get(field, inner or None)


def _validated(importer: Importer, draft: Draft) -> Imported:
    """Return the finished import, after checking its job and its plan with Job.parse and
    Plan.parse. Raises InputError if one of them is not valid."""
    plan_fields = {name.removeprefix("plan."): v for name, v in draft.fields.items() if name.startswith("plan.")}
    plan = Plan.parse(plan_fields, "plan")
    sections: dict[str, Any] = {}
    for name, value in draft.fields.items():
        *parents, field = name.split(".")
        if parents[0] in _SECTIONS:
            inner = sections
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[field] = value
    job = {name: sections[name] for name in _SECTIONS if name in sections}
    _add_permissions(job, plan, "precision" in plan_fields)
    _name_missing(job, draft)
    parsed = Job.parse(_with_examples(job), "job")
    contradictions = [*draft.contradictions, *_refusals(plan, parsed)]
    written = {name: value for name, value in plan.content().items() if name in plan_fields}
    to_do = tuple(dict.fromkeys(draft.to_do))
    return Imported(importer, job, written, tuple(draft.rows), tuple(contradictions), to_do, draft.files)


def _add_permissions(job: dict[str, Any], plan: Plan, is_pinned: bool) -> None:
    """Set the job's `allow`, the list of changes of numerics that a plan may make, to those that
    this plan needs. If the file does not give the precision, bf16 is added. If this makes bf16 the
    only entry, `allow` is left out, because its default allows bf16.

    is_pinned  whether the file gives the precision
    """
    needed = needed_permissions(plan) | (set() if is_pinned else {"bf16"})
    if is_pinned or len(needed) > 1:
        job["allow"] = [word for word in get_args(Permission) if word in needed]


def _name_missing(job: dict[str, Any], draft: Draft) -> None:
    """Add a sentence to the draft's `to_do` for everything that the job still lacks: a model, data,
    a learning rate, or a folder that is named but does not exist.

    Also sets data.tokenizer to model.from if the file names no tokenizer.
    """
    source = job.get("model", {}).get("from")
    if source and "tokenizer" not in job.get("data", {}):
        job.setdefault("data", {})["tokenizer"] = source
    if not {"preset", "from", "architecture", "python"} & set(job.get("model", {})):
        draft.to_do.insert(0, "add the model, such as model: {from: folder} with config.json and safetensors files")
    elif source and not Path(source).is_dir() and not is_hub_id(source):
        draft.to_do.insert(
            0,
            f"model.from is {source}, which is not a folder on this machine: name the folder with config.json and safetensors files",
        )
    if not set(SOURCES) & set(job.get("data", {})) and not any(one.startswith("data: ") for one in draft.to_do):
        draft.to_do.insert(1, "add the data, such as data: {text: folder/} or data: {jsonl: file.jsonl}")
    elif (name := job.get("data", {}).get("dataset")) and not (is_hub_id(name) or Path(name).is_dir()):
        draft.to_do.insert(1, f"data.dataset is {name}: name an existing folder, or a data set of the Hub")
    name_json_arrays(draft)
    for field, default in _REPLACED.items():
        if field in draft.lost and field not in draft.fields:
            draft.to_do.append(f"set {field}: the file's value has no counterpart, and tightfit's default is {default}")
    if "train.learning_rate" not in draft.fields:
        missing = [field for field in ("train.optimizer", "train.learning_rate") if field not in draft.fields]
        draft.to_do.append(f"add {' and '.join(missing)}, which the file does not have")


# fields whose default takes the place of a value that has no counterpart
_REPLACED = {"train.schedule": "constant", "train.optimizer": "adamw"}


def _with_examples(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the job in which an example stands in for a missing model or missing data,
    so that the other sections can be validated."""
    whole = dict(job)
    sources = {
        "model": ("preset", "architecture", "from", "python"),
        "data": SOURCES,
    }
    for name, example in _EXAMPLES.items():
        if not set(sources[name]) & set(whole.get(name, {})):
            whole[name] = {**whole.get(name, {}), **example}
    return whole


def _refusals(plan: Plan, job: Job) -> list[str]:
    """Return one sentence for each rule of tightfit that the imported plan breaks on a GPU. Each
    sentence also says how to fix the plan."""
    if plan.zero and plan.shards == 1:
        plan = plan.replace(dp_shard=2)  # left open by the file; the batch is that of one data rank
        job = job.replace(train=job.train.replace(batch=2 * job.train.batch))
    if "batch" not in job.train.model_fields_set:
        job = job.replace(
            train=job.train.replace(batch=plan.data_parallel * (plan.micro_batch or 1))
        )  # the user must set it
    return [
        f"tightfit refuses the plan: {rule.text}; {rule.remedy(plan, job)}"
        for rule in RULES
        if not rule.holds(plan, job, "cuda")
    ]


def lost_keys(rows: Sequence[Row]) -> list[str]:
    """Return one line for each key of the file without which the training is not the same: those
    that have no counterpart, and those that tightfit does not know."""
    return [
        f"{row.key}: {_shown(row.value)} ({row.note})" for row in rows if row.outcome in ("no counterpart", "unknown")
    ]


def _shown(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value, default=str)).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def file_texts(imported: Imported, source: Path) -> dict[str, str]:
    """Return {"job.yaml": text, "plan.yaml": text}, and the texts of other files that the job
    names. Comments in the text of job.yaml list the contradictions, what the user still has to do,
    and the keys that have no counterpart.

    source  the imported file
    """
    head = f"# Imported from {source.name} ({imported.tool.title}) by tightfit import.\n"
    to_do = "".join(f"# To do: {sentence}\n" for sentence in (*imported.contradictions, *imported.to_do))
    lost = "".join(f"# No counterpart: {line}\n" for line in lost_keys(imported.rows))
    return {
        "job.yaml": head + to_do + lost + (write_yaml(imported.job) if imported.job else "{}\n"),
        "plan.yaml": head + (write_yaml(imported.plan) if imported.plan else "{}\n"),
        **imported.files,
    }
