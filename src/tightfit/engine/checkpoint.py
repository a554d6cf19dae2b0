"""Checkpoints: everything that a run needs to go on as if it had not stopped.

A checkpoint is a folder `step-00000120` with `model.safetensors` (and `config.json` and the tokenizer's files
where the model and data have them, so that transformers can load it) and `state.pt`: optimizer, loss scale,
random states, position. It is written beside and renamed, so what has a name is whole.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from tightfit.engine.randomness import random_states, set_random_states
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.methods.run import Run


def save(run: Run, folder: str | Path, step: int) -> Path:
    """Write the checkpoint of a run that has done `step` steps under `folder`, and delete the oldest beyond the job's limit.

    Raises TightfitError where it cannot be written; the checkpoints that are there stay.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        for left in folder.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        _write(run, step, partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in checkpoints(folder)[: -run.job.train.keep_checkpoints]:
            shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TightfitError(
            f"the checkpoint of step {step} could not be written to {folder}: {error}\n"
            "  fix: make room there, keep fewer with train.keep_checkpoints, or name another --out"
        ) from error
    return final


def _write(run: Run, step: int, folder: Path) -> None:
    save_model(run.model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if is_transformers_model(run.model):
        config: Any = copy.deepcopy(run.model.config)
        config.architectures = [type(run.model).__name__]
        if getattr(config, "use_cache", None) is False:
            config.use_cache = True  # training has no use for it, generating has
        config.save_pretrained(folder)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(folder)
    torch.save(_state(run, step), folder / "state.pt")


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers', which is not imported to know it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints under `folder`, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if (path / "state.pt").exists())


def newest(folder: str | Path) -> Path:
    """The newest checkpoint under `folder`. Raises InputError."""
    found = checkpoints(folder)
    if not found:
        raise InputError(
            f"resume from {folder}",
            "no checkpoint there",
            "leave out --resume, or name the folder of an earlier run with --out",
        )
    return found[-1]


def resume(run: Run, folder: str | Path) -> int:
    """Put the newest checkpoint under `folder` into `run`; returns the step to go on from. Raises InputError."""
    path = newest(folder)
    state = _read(path)
    _same_job(json.loads(state["job"]), run.job, path)
    try:
        load_model(run.model, str(path / "model.safetensors"), device=str(run.device))
        run.optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError) or "memory" in str(error).lower():
            raise
        lines = " ".join(str(error).split())
        raise InputError(
            f"resume from {path}",
            f"does not fit this model ({lines[:200]})",
            f"use the code that the run was started with; if the files are damaged, delete {path}",
        ) from error
    if run.loss_scale is not None and state["loss_scale"] is not None:
        run.loss_scale.load_state_dict(state["loss_scale"])
    set_random_states(state["random"])
    return state["step"]


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # what torch raises for a damaged file depends on where it is damaged
        raise InputError(
            f"resume from {path}",
            f"its state.pt is damaged ({' '.join(str(error).split())[:160]})",
            f"delete {path}: the run goes on from the checkpoint before it",
        ) from error


def _state(run: Run, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "job": run.job.to_json(),
        "optimizer": run.optimizer.state_dict(),
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale else None,
        "random": random_states(),
    }


_MAY_CHANGE = {
    "steps",
    "epochs",
    "checkpoint_every",
    "keep_checkpoints",
    "evaluate_every",
    "evaluate_samples",
    "trackers",
}


def _same_job(saved: dict[str, Any], job: Job, where: Path) -> None:
    """The mathematics may not change on the way; how long it trains, and how it is fitted, may."""
    asked = json.loads(job.to_json())
    for section in ("model", "data", "loss", "train"):
        before, now = saved.get(section) or {}, asked.get(section) or {}
        for name in sorted(set(before) | set(now)):
            if before.get(name) != now.get(name) and not (section == "train" and name in _MAY_CHANGE):
                raise InputError(
                    f"resume from {where}",
                    f"{section}.{name} was {before.get(name)!r} and is now {now.get(name)!r}",
                    f"set {section}.{name} back, or start afresh with another --out",
                )
