"""Silences other libraries while a command runs, and prints tightfit's warnings as single lines."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

from tightfit._torch.loggers import PYTREE, WRAPPED_OPERATIONS
from tightfit.errors import TightfitWarning
from tightfit.job import Job

_show = warnings.showwarning
_SHOWN: set[str] = set()  # tightfit's warnings that this command has printed


def quiet_libraries() -> None:
    """Silence the log messages of other libraries, and print each of tightfit's warnings as one
    line, once and on rank 0 only.

    This changes the logging and warnings of the whole process, so only commands call it.
    """
    warnings.showwarning = _show_in_a_line
    _SHOWN.clear()
    # WRAPPED_OPERATIONS warns about in-place writes under selective recomputation, which tightfit
    # checks itself
    for name in ("torchao", PYTREE, "torch.utils.flop_counter", WRAPPED_OPERATIONS):
        logging.getLogger(name).setLevel(logging.ERROR)


def _show_in_a_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if not issubclass(category, TightfitWarning):
        _show(message, category, filename, lineno, file, line)
    elif os.environ.get("RANK", "0") == "0" and str(message) not in _SHOWN:
        _SHOWN.add(str(message))
        print(f"warning  {message}", file=sys.stderr)


def quiet_transformers(job: Job) -> None:
    """Silence transformers' log messages and progress bars, if the job's model comes from
    transformers."""
    if job.of_transformers:
        from transformers.utils import logging as notes

        notes.set_verbosity_error()
        notes.disable_progress_bar()
