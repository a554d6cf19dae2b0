"""Find the folder of a pretrained model: a local folder, or the local copy of a repository of the
Hugging Face Hub.

`huggingface_hub` downloads a repository once and keeps it in its cache. A repository that is
complete in the cache is used without asking the network. Planning needs only the config and the
tokenizer, so the weights are downloaded only when a model with values is created.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.job_sections.paths import expand_path, is_hub_id, refuse_mistyped_folder

PRETRAINED_FOLDER_FIX = "name a folder with config.json and safetensors, as transformers' save_pretrained writes it"
_DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # config and tokenizer
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt")


def pretrained_folder(source: str, weights: bool = False, field: str = "model.from") -> Path:
    """Return the local folder with the files of a pretrained model.

    source   a folder, or the id of a repository on the Hub, such as "org/name". If there is a
             folder of this name, it is used
    weights  whether the folder must also have the weights (safetensors files), not only the config
             and the tokenizer
    field    the field of the job that names it, for messages

    A repository that the cache of `huggingface_hub` does not have is downloaded. If `source` cannot
    be an id on the Hub, it is returned as a path, whether it exists or not. Raises InputError if
    the Hub has no such repository or cannot be reached, or if weights are missing in the download,
    and before the Hub is asked if a local folder has a similar name.
    """
    folder = expand_path(source)
    if folder.exists() or not is_hub_id(source):
        return folder
    if (found := _cached(source, weights)) is not None:
        return found
    refuse_mistyped_folder(field, source, Path())
    return _download(source, weights, f"job: {field}={source}")


def own_tokenizer(source: str) -> Path | None:
    """Return the folder of a pretrained model if it has the files of a tokenizer, else None.

    source: a folder, or the id of a repository on the Hub
    """
    folder = pretrained_folder(source)
    return folder if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None


def read_config(source: str) -> dict[str, Any]:
    """Return the content of the config.json of a pretrained model. Raises InputError if the file
    does not exist or is not a JSON object.

    source: a folder, or the id of a repository on the Hub
    """
    folder = pretrained_folder(source)
    asked = f"job: model.from={source if is_hub_id(source) and not expand_path(source).exists() else folder}"
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*/")], 1)
        raise InputError(
            asked,
            "is a file, and a folder is needed" if folder.exists() else "no such folder",
            f"did you mean {folder.parent / near[0]}?" if near else PRETRAINED_FOLDER_FIX,
        )
    try:
        content = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise InputError(asked, "has no config.json", PRETRAINED_FOLDER_FIX) from None
    except ValueError as error:
        raise InputError(asked, f"config.json is not JSON ({error})", PRETRAINED_FOLDER_FIX) from None
    if not isinstance(content, dict):
        raise InputError(asked, "config.json does not contain a JSON object", PRETRAINED_FOLDER_FIX)
    return content


def _cached(source: str, weights: bool) -> Path | None:
    """Return the folder with the newest version of a Hub repository in the cache of
    `huggingface_hub`. Return None if it is not there, or lacks config.json or, with `weights`, a
    file of the weights.

    source: the id of the repository
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").exists() and (not weights or _has_weights(folder)) else None


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has all files of a model's weights: those that
    model.safetensors.index.json names or, without this file, model.safetensors."""
    try:
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        names = {"model.safetensors"}
    return all((folder / name).exists() for name in names)


def _download(source: str, weights: bool, asked: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = [*_DESCRIPTIONS, *(_WEIGHTS if weights else ())]
    try:
        folder = Path(snapshot_download(source, allow_patterns=patterns))
    except GatedRepoError:
        raise InputError(
            asked, "the Hub gives this model only to those who accepted its terms", "accept them, and run hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            asked,
            "there is no such folder, and no such model on the Hub",
            "name a folder with config.json, or correct the name; for a private model, run hf auth login",
        ) from None
    except Exception as error:  # the HTTP library's many classes
        if isinstance(error, MemoryError):
            raise
        why = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub cannot be reached ({_first_line(error)})"
        )
        raise InputError(
            asked,
            f"there is no such folder, the cache {constants.HF_HUB_CACHE} does not have such a model, and {why}",
            f"download it where there is a network: hf download {source}; or name a folder with config.json",
        ) from None
    if weights and not _has_weights(folder):
        raise InputError(
            asked,
            f"its snapshot {folder} does not have all safetensors files of the weights",
            f"download them where there is a network: hf download {source}; or name a folder with config.json",
        )
    return folder


def _first_line(error: Exception) -> str:
    return re.split(r"[\n]", str(error).strip() or type(error).__name__)[0][:120]


__all__ = ["PRETRAINED_FOLDER_FIX", "own_tokenizer", "pretrained_folder", "read_config"]
