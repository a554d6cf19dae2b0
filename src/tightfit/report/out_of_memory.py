"""Turns out-of-memory errors into DoesNotFit errors, whose message lists changes of the plan that
need less memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.errors import DoesNotFit, InputError
from tightfit.job import Job
from tightfit.models import task_of
from tightfit.plan import Plan
from tightfit.rules import check

_SAID = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "alloc_failed")
_SAID_BY_ONEDNN = "could not create a primitive"  # the end of oneDNN's message


@contextmanager
def memory_errors_named(plan: Plan, job: Job, device: str) -> Iterator[None]:
    """A context manager that turns an out-of-memory error of the device or the host, raised inside
    it, into DoesNotFit. The message of DoesNotFit lists changes of the plan that need less memory.
    Other errors pass unchanged.

    device  the kind of device, cpu or cuda, for which the changes must be valid
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DoesNotFit(
            f"{plan}: out of memory ({said[0][:160]})\n  smallest changes to try: {smaller_changes(plan, job, device)}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, torch, CUDA, oneDNN or the operating system means that
    memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower()
    return any(words in said for words in _SAID) or said.endswith(_SAID_BY_ONEDNN)


def smaller_changes(plan: Plan, job: Job, device: str) -> str:
    """Return, as text, the changes of single plan fields that need less memory and that the job
    allows. The change that costs the least time is first: "chunked_loss: 1024, recompute: full".

    device  the kind of device, cpu or cuda, for which the changes must be valid
    """
    micro_batch = plan.micro_batch_of(job.train.batch)
    language = job.loss is None and task_of(job.model) not in (None, "classification")
    wished: dict[str, Any] = {
        "materialize": "device",
        "chunked_loss": 1024 if language and plan.chunked_loss is None else plan.chunked_loss,
        "precision": "bf16-mixed" if plan.precision == "fp32" else plan.precision,
        "states": "8-bit" if plan.states in ("fp32", "bf16") else plan.states,
        "update_in_backward": True,
        "micro_batch": micro_batch // 2 if micro_batch > 1 else plan.micro_batch,
        "recompute": "full" if plan.recompute.startswith(("none", "attention", "first")) else plan.recompute,
    }
    found = [
        f"{field}: {str(value).lower() if isinstance(value, bool) else value}"
        for field, value in wished.items()
        if value != getattr(plan, field) and _is_admitted(plan.replace(**{field: value}), job, device)
    ]
    return ", ".join(found) or "a smaller model, or a machine with more memory"


def _is_admitted(plan: Plan, job: Job, device: str) -> bool:
    try:
        check(plan, job, device)
    except InputError:
        return False
    return True
