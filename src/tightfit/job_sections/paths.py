"""Makes the paths in a job file absolute, and tells them from URLs and from ids of the Hugging Face
Hub. Relative paths start at the folder of the file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from tightfit.errors import InputError

_HUB_FIELDS = {"from": "model", "tokenizer": "model", "dataset": "dataset"}  # field -> kind of repository
_PATHS = {"model": ["from"], "data": ["text", "jsonl", "parquet", "dataset", "images", "tokenizer", "chat_template"]}
_WORDS = {"text": ["python-stdlib"], "images": ["digits"], "chat_template": ["chatml", "tokenizer"]}  # are no paths


def expand_path(text: str) -> Path:
    """Return `text` as a path in which ~ is replaced by the home folder. Raises InputError if the
    text cannot be a path, or if it names the home of an unknown user."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"path {text}", f"cannot be a path ({said})", "check how it is written") from None
    return path


def is_hub_id(text: str) -> bool:
    """Return whether `text` can be the id of a model or data set on the Hugging Face Hub: "name" or
    "org/name"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text) is not None and not text.endswith(".json")


def is_url(text: str) -> bool:
    """Return whether `text` is a URL such as s3://bucket/file, and not a path."""
    return re.match(r"[A-Za-z][\w+.-]*://", text) is not None


def refuse_mistyped_folder(field: str, text: str, folder: Path) -> None:
    """Raise InputError if `text`, which can be the id of a repository on the Hub, is more likely
    the mistyped path of a local folder: a folder with a similar path exists, and the cache of the
    Hub does not have the repository.

    field   the job's field, such as "model.from"
    folder  the folder where relative paths start
    """
    kind = _HUB_FIELDS[field.rpartition(".")[2]]
    near = _similar_folder(folder / text, kind)
    if near is None and "/" in text:
        parent, name = text.split("/")
        near = next((one / name for one in _alike(folder / parent) if _is_repository(one / name, kind)), None)
    if near is None or _is_downloaded(text, kind):
        return
    download = f"hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{text}"
    raise InputError(
        f"job: {field}={text}",
        f"there is no such folder, but {near} exists",
        f"did you mean {_relative(near, folder)}? To use {text} of the Hub, run first: {download}",
    )


def _similar_folder(path: Path, kind: str) -> Path | None:
    return next((one for one in _alike(path) if _is_repository(one, kind)), None)


def _alike(path: Path) -> list[Path]:
    """Return the folders beside a missing one whose names are like its name, the nearest first."""
    beside = {one.name: one for one in path.parent.iterdir() if one.is_dir()} if path.parent.is_dir() else {}
    return [beside[name] for name in difflib.get_close_matches(path.name, beside, 3, 0.75)]


def _is_repository(folder: Path, kind: str) -> bool:
    """Return whether a folder holds a model, a tokenizer or (kind: dataset) files of data."""
    return folder.is_dir() and any(folder.glob("*.json" if kind == "model" else "*"))


def _is_downloaded(text: str, kind: str) -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=text, repo_type=kind)).exists()


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def with_absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a job file's content in which relative paths are absolute. Left unchanged
    are URLs, words that have a meaning of their own, such as `text: python-stdlib`, and names that
    can be ids on the Hugging Face Hub, unless a file with this name exists.

    folder  the folder of the job file, where relative paths start

    Raises InputError for such a name if a local folder has a similar one.
    """

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if not isinstance(text, str) or not text or is_url(text):
            return text
        return str(folder / expand_path(text))

    def python(text: Any) -> Any:
        return path(text) if isinstance(text, str) and ".py:" in text else text

    def hub(section_name: str, name: str, text: Any) -> bool:
        known = name in _HUB_FIELDS and isinstance(text, str) and is_hub_id(text)
        if not known or (folder / expand_path(text)).exists():
            return False
        refuse_mistyped_folder(f"{section_name}.{name}", text, folder)
        return True

    def section(section_name: str, fields: Any, names: list[str]) -> Any:
        if not isinstance(fields, dict):
            return fields
        named = [
            n
            for n in names
            if n in fields and fields[n] not in _WORDS.get(n, []) and not hub(section_name, n, fields[n])
        ]
        changed = {n: path(fields[n]) for n in named}
        if "python" in fields:
            changed["python"] = python(fields["python"])
        if isinstance(fields.get("sources"), list):
            changed["sources"] = [
                section(f"{section_name}.sources[{number}]", one, names) for number, one in enumerate(fields["sources"])
            ]
        return {**fields, **changed}

    for name, names in {**_PATHS, "loss": []}.items():
        if name in content:
            content = {**content, name: section(name, content[name], names)}
    evaluate, callbacks = content.get("evaluate"), content.get("callbacks")
    if isinstance(evaluate, dict):
        evaluate = dict(evaluate)
        if "data" in evaluate:
            evaluate["data"] = section("evaluate.data", evaluate["data"], _PATHS["data"])
        if isinstance(evaluate.get("metrics"), dict):
            evaluate["metrics"] = {key: section("", metric, []) for key, metric in evaluate["metrics"].items()}
        content = {**content, "evaluate": evaluate}
    if isinstance(callbacks, list):
        content = {**content, "callbacks": [section("", callback, []) for callback in callbacks]}
    train = content.get("train")
    if isinstance(train, dict):
        functions = {name: train[name] for name in ("optimizer", "schedule") if isinstance(train.get(name), dict)}
        resolved = {
            name: {**function, "python": python(function.get("python"))} for name, function in functions.items()
        }
        content = {**content, "train": {**train, **resolved}}
    return content
