"""Finds out, before anything is planned or prepared, whether the local files that a job's data names are there."""

from __future__ import annotations

from tightfit.data.datasets_library import check_folder
from tightfit.data.images import DIGITS, class_folders
from tightfit.data.source_files import (
    JSON_ENDINGS,
    PARQUET_ENDINGS,
    PYTHON_STDLIB,
    as_list,
    find_files,
    is_remote,
)
from tightfit.data.tokenizer import check_path
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.job_sections.paths import expand_path, is_hub_id


def missing_files(job: Job) -> InputError | None:
    """Return the error that opening the job's data would raise because a local file or folder is not
    there, or None. Only names are looked at: nothing is read, downloaded or copied."""
    own = job.evaluate.data if job.evaluate is not None else None
    try:
        for spec in (job.data, own):
            if isinstance(spec, DataSpec):
                for part in spec.parts():
                    _check(part)
    except InputError as error:
        return error
    return None


def _check(spec: DataSpec) -> None:
    for field, endings in {"text": (), "jsonl": JSON_ENDINGS, "parquet": PARQUET_ENDINGS}.items():
        for given in as_list(getattr(spec, field)):
            if not is_remote(given) and given != PYTHON_STDLIB:
                find_files(field, given, endings)
    if spec.dataset is not None:
        check_folder(f"data: dataset={spec.dataset}", spec.dataset)
    if spec.images not in (None, DIGITS) and not expand_path(str(spec.images)).is_dir():
        class_folders(expand_path(str(spec.images)))
    if spec.tokenizer is not None and not is_hub_id(spec.tokenizer):
        check_path(spec.tokenizer, expand_path(spec.tokenizer))


__all__ = ["missing_files"]
