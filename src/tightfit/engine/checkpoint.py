"""Checkpoints: everything that a run needs to go on as if it had not stopped.

A checkpoint is a folder `step-00000120` with `model.safetensors` (and `config.json` and the tokenizer's files
where the model and data have them, so that transformers can load it) and `state.pt`: optimizer, loss scale,
random states, position. It is written beside and renamed, so what has a name is whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_model, save_model

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.methods.run import Run


def save(run: Run, folder: str | Path, step: int) -> Path:
    """Write the checkpoint of a run that has done `step` steps under `folder`, and delete the oldest beyond the job's limit."""
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(run.model, str(partial / "model.safetensors"), metadata={"format": "pt"})
    config = getattr(run.model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(partial)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(partial)
    torch.save(_state(run, step), partial / "state.pt")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in checkpoints(folder)[: -run.job.train.keep_checkpoints]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints under `folder`, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if (path / "state.pt").exists())


def resume(run: Run, folder: str | Path) -> int:
    """Put the newest checkpoint under `folder` into `run`; returns the step to go on from. Raises InputError."""
    found = checkpoints(folder)
    if not found:
        raise InputError(
            f"resume from {folder}",
            "no checkpoint there",
            "leave out --resume, or name the folder of an earlier run with --out",
        )
    state = torch.load(found[-1] / "state.pt", map_location="cpu", weights_only=True)
    _same_job(json.loads(state["job"]), run.job, found[-1])
    load_model(run.model, str(found[-1] / "model.safetensors"), device=str(run.device))
    run.optimizer.load_state_dict(state["optimizer"])
    if run.loss_scale is not None and state["loss_scale"] is not None:
        run.loss_scale.load_state_dict(state["loss_scale"])
    _set_random_states(state["random"])
    return state["step"]


def _state(run: Run, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "job": run.job.to_json(),
        "optimizer": run.optimizer.state_dict(),
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale else None,
        "random": _random_states(),
    }


def _random_states() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys).astype("int64")), position, has_gauss, gauss),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


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
    for section in ("model", "data", "train"):
        before, now = saved.get(section) or {}, asked.get(section) or {}
        for name in sorted(set(before) | set(now)):
            if before.get(name) != now.get(name) and not (section == "train" and name in _MAY_CHANGE):
                raise InputError(
                    f"resume from {where}",
                    f"{section}.{name} was {before.get(name)!r} and is now {now.get(name)!r}",
                    f"set {section}.{name} back, or start afresh with another --out",
                )
