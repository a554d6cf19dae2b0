"""Checkpoints: everything that a run needs to go on as if it had not stopped.

A checkpoint is a folder `step-00000120` with `model.safetensors` (and `config.json` and the tokenizer's files where the model
and data have them, so that transformers can load it), `optimizer.safetensors`, and `state.pt`: loss scale, random states,
position. Large ones have several files of each kind, which the devices write together: see `files`. It is written beside and
renamed, so what has a name is whole.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tightfit.engine.randomness import random_states, seed_all, set_random_states
from tightfit.engine.step import drain
from tightfit.errors import InputError, TightfitError
from tightfit.files import Layout, Reader, Writer, file_bytes, file_name, laid_out, write_index
from tightfit.job import Job
from tightfit.methods.mesh import leads, on_mesh, rank
from tightfit.methods.run import Run, part, whole
from tightfit.optim.per_parameter import unpack


def save(run: Run, folder: str | Path, step: int) -> Path:
    """Write the checkpoint of a run that has done `step` steps under `folder`, and delete the oldest beyond the job's limit.

    On several devices all of them call it. What they divide is brought together tensor by tensor, and each writes some of the
    files, so that any number of devices, divided in any way, can go on from it. An asynchronous pipeline is drained first, and
    the steps that it has taken beyond `step` count.
    Raises TightfitError where it cannot be written; the checkpoints that are there stay.
    """
    drain(run)
    step += len(run.stages.losses) if run.stages is not None else 0
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    unfinished = folder / f".{final.name}.partial"
    model, states = _model(run), _states(run)
    state = _state(run, step, states)
    _together(run, lambda: _begin(folder, unfinished) if leads() else None, step, folder)
    writers = _writers(run, unfinished)
    if not all(_everyones(run, bool(writers))):
        _together(run, lambda: _unseen(folder), step, folder, unfinished)
    layouts: dict[str, tuple[Layout, int]] = {}
    with Writer() as writer:
        for kind, tensors in (("model", model), ("optimizer", states)):
            mine, layout, size = _layout(run, tensors, len(writers))
            layouts[kind] = layout, size
            names = {file_name(kind, number, len(layout)): layout[number] for number in mine}
            stride = max(len(writers) // max(len(mine), 1), 1)
            own = {file for place, file in enumerate(names) if writers[place * stride % len(writers)] == rank()}
            writer.fill(unfinished, names, tensors.fetch, own)
        writer.wait()
        _together(run, lambda: _raise_first(writer.errors), step, folder, unfinished)

    def finish() -> None:
        for kind, (layout, size) in layouts.items():
            write_index(unfinished, kind, layout, size)
        _describe(run, unfinished)
        torch.save(state, unfinished / "state.pt")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        for old in checkpoints(folder)[: -run.job.train.keep_checkpoints]:
            shutil.rmtree(old)

    _together(run, lambda: finish() if leads() else None, step, folder, unfinished)
    return final


def _begin(folder: Path, unfinished: Path) -> None:
    for left in folder.glob(".step-*.partial"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def _unseen(folder: Path) -> None:
    raise OSError(f"a stage of the pipeline is on hosts that do not see {folder}")


def _raise_first(errors: list[Exception]) -> None:
    for error in errors:
        raise error


def _together(run: Run, act: Callable[[], None], step: int, folder: Path, unfinished: Path | None = None) -> None:
    """Do something that files may forbid, and wait until all devices have. Where one cannot, all raise TightfitError."""
    said = ""
    try:
        act()
    except (OSError, SafetensorError) as error:
        said = str(error) or type(error).__name__
    found = [one for one in _everyones(run, said) if one]
    if found:
        if unfinished is not None and leads():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise TightfitError(
            f"the checkpoint of step {step} could not be written to {folder}: {found[0]}\n"
            "  fix: make room there, keep fewer with train.keep_checkpoints, or name another --out"
        )


def _everyones(run: Run, value: Any) -> list[Any]:
    """A small value of every device's, on all of them."""
    if run.mesh is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _stages(run: Run, value: Any) -> list[Any]:
    """A value of each piece of a pipeline's, in their order, on all devices."""
    if run.stages is None or run.mesh is None or run.mesh.size("pp") == 1:
        return [value]
    found: list[Any] = [None] * run.mesh.size("pp")
    dist.all_gather_object(found, value, group=run.mesh.group("pp"))
    return found


def _writers(run: Run, folder: Path) -> list[int]:
    """The devices that can write what this one's piece of the model has: those that have the same and see the folder."""
    if run.mesh is None or run.mesh.servers:
        return [0]
    sees, each = _everyones(run, folder.is_dir()), dist.get_world_size() // run.mesh.size("pp")
    first = run.mesh.rank("pp") * each
    return [device for device in range(first, first + each) if sees[device]]


def check_folder(run: Run, folder: Path) -> None:
    """Refuse a folder in which some piece of the model would find nobody to write it. Raises InputError; all devices call it."""
    if run.mesh is None:
        return
    dist.barrier()
    if not all(_everyones(run, bool(_writers(run, folder)))):
        raise InputError(
            f"--out {folder}",
            "a stage of the pipeline is on hosts that do not see it",
            "name a folder that all hosts share",
        )


@dataclass(frozen=True)
class _Tensors:
    """What is saved as one kind of file, of this device's piece of the model. fetch: name -> the whole tensor; all devices that
    have a part of it take part. counts: states that are no tensors, by parameter."""

    sizes: dict[str, int]
    fetch: Callable[[str], Tensor]
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)


def _layout(run: Run, tensors: _Tensors, writers: int) -> tuple[list[int], Layout, int]:
    """Numbers of the files of this device's piece of the model, all files, and their bytes. What two pieces have is in the first
    one's."""
    found: Layout = []
    seen: set[str] = set()
    mine: list[int] = []
    total = sum(tensors.sizes.values())
    pieces = _stages(run, (laid_out(tensors.sizes, file_bytes(total, writers)), total))
    here = run.mesh.rank("pp") if run.mesh is not None and len(pieces) > 1 else 0
    for place, (layout, _) in enumerate(pieces):
        left = [[name for name in names if name not in seen] for names in layout]
        for names in filter(None, left):
            seen.update(names)
            mine += [len(found)] if place == here else []
            found.append(names)
    if not found:  # states that nothing has
        found, mine = [[]], [0] if here == 0 else []
    return mine, found, sum(size for _, size in pieces)


def _model(run: Run) -> _Tensors:
    """The model's parameters and persistent buffers; what is tied once."""
    persistent = run.model.state_dict().keys()
    named = {name: tensor.detach() for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers())}
    named = {name: tensor for name, tensor in named.items() if name in persistent}

    def size(name: str) -> int:
        return _whole_shape(run, name, named[name]).numel() * named[name].dtype.itemsize

    def fetch(name: str) -> Tensor:
        value = named[name]
        value = on_mesh(value).full_tensor() if isinstance(value, DTensor) else value
        return run.slices[name].whole(value) if name in run.slices else value

    return _Tensors({name: size(name) for name in named}, fetch)


def _whole_shape(run: Run, name: str, tensor: Tensor) -> torch.Size:
    return run.slices[name].shape if name in run.slices else tensor.shape


def _states(run: Run) -> _Tensors:
    """The optimizer's states, as "exp_avg:layers.0.weight"; those that are kept packed in parts, "exp_avg.codes:layers.0.weight",
    or where devices divide them in fp32."""
    states, divided = run.optimizer.state_dict()["state"], _is_divided(run)
    shapes = {name: _whole_shape(run, name, p) for name, p in run.model.named_parameters()}
    sizes: dict[str, int] = {}
    makers: dict[str, Callable[[], Tensor]] = {}
    counts: dict[str, dict[str, Any]] = {}
    for number, (owner, weight) in enumerate(_names(run)):
        for name, value in states.get(number, {}).items():
            key = f"{name}:{owner}"
            if isinstance(value, dict) and not divided:
                for what, tensor in value.items():
                    key = f"{name}.{what}:{owner}"
                    sizes[key], makers[key] = tensor.nbytes, partial(_same, tensor)
            elif isinstance(value, dict) or (divided and _lies_as(value, weight.shape)):
                width = 4 if isinstance(value, dict) else value.dtype.itemsize
                sizes[key] = shapes[owner].numel() * width
                makers[key] = partial(_brought_together, run, weight, name, value)
            elif isinstance(value, Tensor):
                sizes[key], makers[key] = value.nbytes, partial(_same, value)
            else:
                counts.setdefault(owner, {})[name] = value
    return _Tensors(sizes, lambda key: makers[key](), counts)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _brought_together(run: Run, weight: Tensor, name: str, value: Tensor | dict[str, Tensor]) -> Tensor:
    value = unpack(name, value, weight) if isinstance(value, dict) else value
    return whole(run, weight, value.to(weight.device))


def _describe(run: Run, folder: Path) -> None:
    """What transformers needs to load the model."""
    if is_transformers_model(run.model):
        config: Any = copy.deepcopy(run.model.config)
        config.architectures = [_plain_name(run.model)]
        if getattr(config, "use_cache", None) is False:
            config.use_cache = True  # training has no use for it, generating has
        config.save_pretrained(folder)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(folder)


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
        shape = _whole_shape(run, name, tensor)
        if value.shape != shape:
            raise RuntimeError(f"{name} is {tuple(value.shape)} there and {tuple(shape)} here")
        value = run.slices[name].part(value) if name in run.slices else value
        if isinstance(tensor, DTensor):
            assert run.reduction is not None
            value, tensor = run.reduction.part(tensors[name], value), tensor.to_local()
        tensor.copy_(value)


def _parts(run: Run, saved: Reader, counts: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Saved states as the optimizer's own, by number; of what is divided this device takes its parts."""
    divided, names = _is_divided(run), _names(run)
    shapes = {name: _whole_shape(run, name, p) for name, p in run.model.named_parameters()}
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
        if divided and _lies_as(value, shapes[owner]):
            value = part(run, weight, value)
        return value.clone() if isinstance(value, Tensor) else value  # what is mapped is the file's

    return {
        number: {name: taken(owner, weight, name, value) for name, value in found[owner].items()}
        for number, (owner, weight) in enumerate(names)
        if found[owner]
    }


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


def _state(run: Run, step: int, states: _Tensors) -> dict[str, Any]:
    """All but tensors."""
    counts = {name: value for piece in _stages(run, states.counts) for name, value in piece.items()}
    return {
        "step": step,
        "job": run.job.to_json(),
        "counts": counts,
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale else None,
        "random": _everyones(run, random_states()),
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
