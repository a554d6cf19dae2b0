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
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from tightfit.engine.randomness import random_states, seed_all, set_random_states
from tightfit.engine.step import drain
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.methods.mesh import leads, on_mesh, rank
from tightfit.methods.run import Run, part, whole
from tightfit.optim.per_parameter import unpack


def save(run: Run, folder: str | Path, step: int) -> Path:
    """Write the checkpoint of a run that has done `step` steps under `folder`, and delete the oldest beyond the job's limit.

    On several devices all of them call it; what they divide is brought together, and the first writes it, so that any
    number of devices, divided in any way, can go on from it. An asynchronous pipeline is drained first, and the steps that it
    has taken beyond `step` count.
    Raises TightfitError where it cannot be written; the checkpoints that are there stay.
    """
    drain(run)
    step += len(run.stages.losses) if run.stages is not None else 0
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    model, state = _whole_model(run), _state(run, step)
    if not leads():
        dist.barrier()
        return final
    try:
        for left in folder.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        _write(run, model, state, partial)
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
    if run.mesh is not None:
        dist.barrier()
    return final


def _whole_model(run: Run) -> dict[str, Tensor] | None:
    """The model's tensors, where devices divide them: on the first device in host memory, empty on others. None where this
    device has them all."""
    if not _shares_model(run):
        return None
    found: dict[str, Tensor] = {}
    persistent = run.model.state_dict().keys()
    for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers()):  # what is tied once
        value = tensor.detach()
        value = on_mesh(value).full_tensor() if isinstance(value, DTensor) else value
        value = run.slices[name].whole(value) if name in run.slices else value
        if _speaks(run) and name in persistent:
            found[name] = value.to("cpu", copy=True).contiguous()
    return _of_all_stages(run, found)


def _shares_model(run: Run) -> bool:
    """Whether other devices have parts of the model that this one does not."""
    divided = any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    return bool(run.slices) or run.stages is not None or divided


def _speaks(run: Run) -> bool:
    """Whether this device is the first of those that have its piece of the model."""
    return run.mesh is None or (run.mesh.part[0] == run.mesh.piece == run.mesh.rank("tp") == 0)


def _of_all_stages(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """What the devices of a pipeline found, each of its piece, by name: on the first device, and nothing on the others."""
    if run.stages is None or not _speaks(run):
        return found
    assert run.mesh is not None
    everyones: list[Any] | None = [None] * run.mesh.size("pp") if run.mesh.rank("pp") == 0 else None
    dist.gather_object(found, everyones, group=run.mesh.group("pp"), group_dst=0)
    return {name: value for one in everyones or [] for name, value in one.items()}


def _write(run: Run, model: dict[str, Tensor] | None, state: dict[str, Any], folder: Path) -> None:
    if model is None:
        save_model(run.model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    else:
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    if is_transformers_model(run.model):
        config: Any = copy.deepcopy(run.model.config)
        config.architectures = [_plain_name(run.model)]
        if getattr(config, "use_cache", None) is False:
            config.use_cache = True  # training has no use for it, generating has
        config.save_pretrained(folder)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(folder)
    torch.save(state, folder / "state.pt")


def _plain_name(model: nn.Module) -> str:
    """The name of the model's class: fully_shard puts one of its own in front."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


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
        _load_model(run, path / "model.safetensors")
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": _parts(run, state["optimizer"]), "param_groups": groups})
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


def _load_model(run: Run, path: Path) -> None:
    parameters = dict(run.model.named_parameters())
    if not _shares_model(run):
        load_model(run.model, str(path), device=str(run.device))
        return
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        tensors = {**parameters, **dict(run.model.named_buffers())}
        missing = sorted(set(parameters) - names)
        if missing:
            raise RuntimeError(f"no {missing[0]} in it")
        for name in names & set(tensors):
            tensor, value = tensors[name].detach(), file.get_tensor(name).to(run.device)
            value = run.slices[name].part(value) if name in run.slices else value
            if isinstance(tensor, DTensor):
                distributed = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(distributed.to_local())
            else:
                tensor.copy_(value)


def _parts(run: Run, saved: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Saved states by name as the optimizer's own, by number; of what is divided this device takes its parts."""
    names = _names(run)
    if not _is_divided(run):
        return {number: saved[name] for number, (name, _) in enumerate(names) if name in saved}
    shapes = {
        name: run.slices[name].shape if name in run.slices else p.shape for name, p in run.model.named_parameters()
    }
    states: dict[int, dict[str, Any]] = {}
    for number, (owner, weight) in enumerate(names):
        if owner not in saved:
            continue
        like = torch.empty(shapes[owner], device=run.device)
        states[number] = {}
        for name, value in saved[owner].items():
            if isinstance(value, dict):
                packed = {what: tensor.to(run.device) for what, tensor in value.items()}
                value = unpack(name, packed, like)
            states[number][name] = part(run, weight, value).clone() if _lies_as(value, like.shape) else value
    return states


def _names(run: Run) -> list[tuple[str, Tensor]]:
    """Of each of the optimizer's weights, in its order, the name of its parameter."""
    names = {id(run.weights.get(parameter, parameter)): name for name, parameter in run.model.named_parameters()}
    weights = [weight for group in run.optimizer.param_groups for weight in group["params"]]
    return [(names[id(weight)], weight) for weight in weights]


def _is_divided(run: Run) -> bool:
    """Whether this device's optimizer holds parts of parameters."""
    return bool(run.slices) or (run.reduction is not None and bool(run.reduction.parts))


def _lies_as(value: Any, shape: torch.Size) -> bool:
    """Whether a state has one number for each of its parameter's; what has no dims is a counter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


def _set_random_states(run: Run, state: dict[str, Any]) -> None:
    """Where all generators stood; on other devices than before, a function of the seed, the step and the device."""
    states, number = state["random"], rank()
    if isinstance(states, dict):
        states = [states]
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
            f"its state.pt is damaged ({' '.join(str(error).split())[:160]})",
            f"delete {path}: the run goes on from the checkpoint before it",
        ) from error


def _state(run: Run, step: int) -> dict[str, Any]:
    """All but the model. A state that devices divide is brought together, in fp32 where it is kept packed."""
    states: Any = random_states()
    optimizer = run.optimizer.state_dict()["state"]
    if run.mesh is not None:
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, states)
        states = everyones
    by_name = _whole_states(run, optimizer) if _is_divided(run) else _named_states(run, optimizer)
    return {
        "step": step,
        "job": run.job.to_json(),
        "optimizer": _of_all_stages(run, by_name),
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale else None,
        "random": states,
    }


def _named_states(run: Run, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: states[number] for number, (name, _) in enumerate(_names(run)) if number in states}


def _whole_states(run: Run, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, (owner, weight) in enumerate(_names(run)):
        kept: dict[str, Any] = {}
        for name, value in states.get(number, {}).items():
            value = unpack(name, value, weight) if isinstance(value, dict) else value
            if _lies_as(value, weight.shape):
                value = whole(run, weight, value.to(weight.device)).to("cpu")
            kept[name] = value
        if _speaks(run) and kept:
            found[owner] = kept
    return found


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
