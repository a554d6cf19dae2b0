"""Makes the paths in a job file absolute. Relative paths start at the folder of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tightfit.errors import InputError


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
    """Return whether `text` can be the id of a model on the Hugging Face Hub: "name" or
    "org/name"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text) is not None and not text.endswith(".json")


def with_absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a job file's content in which relative paths are absolute. Left unchanged
    are words that have a meaning of their own, such as `text: python-stdlib`, and names that can be
    ids of a model on the Hugging Face Hub, unless a file with this name exists.

    folder  the folder of the job file, where relative paths start
    """

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        return str(folder / expand_path(text)) if isinstance(text, str) and text else text

    def python(text: Any) -> Any:
        return path(text) if isinstance(text, str) and ".py:" in text else text

    def hub(name: str, text: Any) -> bool:
        known = name in ("from", "tokenizer") and isinstance(text, str) and is_hub_id(text)
        return known and not (folder / expand_path(text)).exists()

    words = {"text": ["python-stdlib"], "images": ["digits"], "chat_template": ["chatml", "tokenizer"]}
    sources = ["text", "jsonl", "parquet", "dataset", "images", "tokenizer", "chat_template"]

    def section(fields: Any, names: list[str]) -> Any:
        if not isinstance(fields, dict):
            return fields
        named = [n for n in names if n in fields and fields[n] not in words.get(n, []) and not hub(n, fields[n])]
        changed = {n: path(fields[n]) for n in named}
        if "python" in fields:
            changed["python"] = python(fields["python"])
        return {**fields, **changed}

    for name, names in {"model": ["from"], "data": sources, "loss": []}.items():
        if name in content:
            content = {**content, name: section(content[name], names)}
    evaluate, callbacks = content.get("evaluate"), content.get("callbacks")
    if isinstance(evaluate, dict):
        evaluate = dict(evaluate)
        if "data" in evaluate:
            evaluate["data"] = section(evaluate["data"], sources)
        if isinstance(evaluate.get("metrics"), dict):
            evaluate["metrics"] = {key: section(metric, []) for key, metric in evaluate["metrics"].items()}
        content = {**content, "evaluate": evaluate}
    if isinstance(callbacks, list):
        content = {**content, "callbacks": [section(callback, []) for callback in callbacks]}
    train = content.get("train")
    if isinstance(train, dict):
        functions = {name: train[name] for name in ("optimizer", "schedule") if isinstance(train.get(name), dict)}
        places = {name: {**one, "python": python(one.get("python"))} for name, one in functions.items()}
        content = {**content, "train": {**train, **places}}
    return content
