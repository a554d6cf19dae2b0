"""Resume: a checkpoint's tensors, of which this device takes its parts, and where the run stood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from tightfit.engine.checkpoint import checkpoints, newest
from tightfit.engine.randomness import seed_all, set_random_states
from tightfit.engine.saved import is_divided, names_of, whole_shape
from tightfit.errors import InputError
from tightfit.files import Reader
from tightfit.job import Job
from tightfit.methods.mesh import rank
from tightfit.methods.run import Run, part
from tightfit.optim.per_parameter import unpack
from tightfit.optim.whole import lies_as


def resume(run: Run, folder: str | Path) -> int:
    """Put the newest checkpoint under `folder` into `run`; returns the step to go on from. Raises InputError."""
    path = newest(folder)
    state = _read(path)
    _same_job(json.loads(state["job"]), run.job, path)
    try:
        with Reader(path, "model") as saved:
            _load_model(run, saved)
        with Reader(path, "optimizer") as saved:
            states = _parts(run, saved, state["counts"])
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": states, "param_groups": groups})
    except FileNotFoundError as error:
        raise InputError(
            f"resume from {path}",
            f"a file of it is missing ({error})",
            f"delete {path}: the run goes on from the one before it",
        ) from error
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
    _set_random_states(run, state)
    return state["step"]


@torch.no_grad()
def _load_model(run: Run, saved: Reader) -> None:
    """Put the saved tensors, or this device's parts of them, into the model's."""
    parameters = dict(run.model.named_parameters())
    tensors = {**parameters, **dict(run.model.named_buffers())}
    missing = sorted(parameters.keys() - saved.names)
    if missing:
        raise RuntimeError(f"no {missing[0]} in it")
    unknown = sorted(saved.names - run.model.state_dict().keys())
    if unknown and run.stages is None:
        raise RuntimeError(f"{unknown[0]} is in it")
    for name in sorted(saved.names & tensors.keys()):
        tensor, value = tensors[name].detach(), saved.get(name)
        shape = whole_shape(run, name, tensor)
        if value.shape != shape:
            raise RuntimeError(f"{name} is {tuple(value.shape)} there and {tuple(shape)} here")
        value = run.slices[name].part(value) if name in run.slices else value
        if isinstance(tensor, DTensor):
            assert run.reduction is not None
            value, tensor = run.reduction.part(tensors[name], value), tensor.to_local()
        tensor.copy_(value)


def _parts(run: Run, saved: Reader, counts: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Saved states as the optimizer's own, by number; of what is divided this device takes its parts."""
    divided, names = is_divided(run), names_of(run)
    shapes = {name: whole_shape(run, name, p) for name, p in run.model.named_parameters()}
    found: dict[str, dict[str, Any]] = {owner: dict(counts.get(owner, {})) for owner, _ in names}
    for key in sorted(saved.names):
        what, _, owner = key.partition(":")
        name, _, within = what.partition(".")
        if owner in found and within:
            found[owner].setdefault(name, {})[within] = saved.get(key)
        elif owner in found:
            found[owner][name] = saved.get(key)

    def taken(owner: str, weight: Tensor, name: str, value: Any) -> Any:
        if isinstance(value, dict) and not divided:
            return {what: tensor.clone() for what, tensor in value.items()}
        if isinstance(value, dict):
            packed = {what: tensor.to(run.device) for what, tensor in value.items()}
            value = unpack(name, packed, torch.empty(shapes[owner], device=run.device))
        if divided and lies_as(name, value, shapes[owner]):
            value = part(run, weight, value)
        return value.clone() if isinstance(value, Tensor) else value  # what is mapped is the file's

    return {
        number: {name: taken(owner, weight, name, value) for name, value in found[owner].items()}
        for number, (owner, weight) in enumerate(names)
        if found[owner]
    }


def _set_random_states(run: Run, state: dict[str, Any]) -> None:
    """Where all generators stood; on other devices than before, a function of the seed, the step and the device."""
    states, number = state["random"], rank()
    if len(states) == (dist.get_world_size() if run.mesh is not None else 1):
        set_random_states(states[number])
    else:
        seed_all(run.job.train.seed + 1 + state["step"] + 7919 * number)


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # what torch raises for a damaged file depends on where it is damaged
        raise InputError(
            f"resume from {path}",
            "its state.pt is damaged",
            f"delete {path}: the run goes on from the checkpoint before it"
            if len(checkpoints(path.parent)) > 1
            else "start afresh with another --out: there is no checkpoint before it",
        ) from error


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


__all__ = ["resume"]
