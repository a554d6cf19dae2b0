"""Resume a run: load the newest checkpoint into it. A checkpoint has full tensors; each device
keeps only its own shards of them."""

from __future__ import annotations

import copy
import json
import math
import socket
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from tightfit.distributed.processes import is_rank_zero, rank
from tightfit.engine.checkpoint.contents import is_sharded, names_of, unsharded_shape
from tightfit.engine.checkpoint.extra_state import FILE, KIND, restore_extra_states
from tightfit.engine.checkpoint.save import EARLIER, STATE, all_gather_values, checkpoints, dataset_samples, newest
from tightfit.engine.rng import seed_all, set_random_states
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job, Train
from tightfit.optim.gradient_dtype import gradient_dtype
from tightfit.optim.groups import restore_changed_rates, restore_group_options
from tightfit.optim.nested_states import NESTED, rebuild_state
from tightfit.optim.per_parameter import MASTER, dequantize_state
from tightfit.optim.schedule import learning_rate, total_steps
from tightfit.optim.whole_parameters import has_parameter_shape
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import Run, check_run, shard, wait_for_weights
from tightfit.tensor_files import CHECKSUMS, Reader, checksum, file_name, index_name, read_checksums

INDEX = ".index.json"
SHARED = "name a folder that all hosts share with --out"


def resume(run: Run, folder: str | Path) -> int:
    """Load the newest checkpoint under `folder` into `run`: weights, optimizer states, loss scale,
    extra states of modules and states of the random number generators. Return the number of the
    step to continue from, which is the number of steps that were done.

    Every file is checked against its checksum before it is used. All devices must call this
    function. Issues a TightfitWarning with PowerSGD, whose errors are not saved.

    Raises InputError on all devices if there is no checkpoint, if it is damaged, or if it belongs
    to another job or does not fit the model. Also raises it if hosts see different checkpoints.
    """
    check_run(run, "resume")
    note_activity("reading a checkpoint")
    wait_for_weights(run)  # weights that arrive later would overwrite the loaded ones
    path, state, needed = _agreed(run, lambda: _begin(run, folder))
    paths = all_gather_values(run, path.name)
    if len(set(paths)) > 1:
        raise InputError(
            f"resume from {folder}",
            f"the newest checkpoint is not the same on all hosts ({', '.join(sorted(set(paths)))})",
            SHARED,
        )
    share = _share(run, needed)
    _agreed(run, lambda: check_files(path, share))
    _agreed(run, lambda: _load(run, path, state))
    if run.loss_scale is not None and state["loss_scale"] is not None:
        run.loss_scale.load_state_dict(state["loss_scale"])
    restore_changed_rates(run.optimizer, state.get("changed_rates", {}))
    restore_group_options(run.optimizer, state.get("changed_options", {}))
    if run.job.train.uses_function("optimizer"):  # others follow the job's schedule
        restore_group_options(run.optimizer, state.get("group_options", {}))
    _set_random_states(run, state)
    step: int = state["step"]
    _warn_of_another_rate(run, state, step)
    if run.plan.compressed_gradients == "powersgd" and is_rank_zero():
        warnings.warn(
            "checkpoints do not hold what PowerSGD has not sent yet: the first steps from here on are as inexact as those of "
            "a new run",
            TightfitWarning,
            stacklevel=2,
        )
    return step


def _agreed(run: Run, act: Callable[[], Any]) -> Any:
    """Call `act` on all devices, and return its result on this device. If it raises InputError on
    some devices, raise the error of the first of them on all devices."""
    found, said = None, None
    try:
        found = act()
    except InputError as error:
        said = (error.asked, error.found, error.fix)
    first = next((refusal for refusal in all_gather_values(run, said) if refusal is not None), None)
    if first is not None:
        raise InputError(*first)
    return found


def _begin(run: Run, folder: str | Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Find the newest checkpoint under `folder`, and check its state.json and index files. Return
    (the checkpoint's folder, the content of its state.json, the names of the other files that must
    be checked for this device).

    For most devices these are the files with tensors that the device loads. Rank 0 also gets the
    files without tensors, such as config.json.

    Raises InputError if there is no checkpoint, if one of the files that were read is damaged, or
    if another job wrote the checkpoint.
    """
    path = newest(folder)
    if (path / EARLIER).exists() and not (path / STATE).exists():
        raise InputError(
            f"resume from {path}",
            "an earlier version of tightfit wrote this checkpoint, in a format that is not read any more",
            "resume with that version of tightfit, or start afresh with another --out",
        )
    known = known_checksums(path)
    check_files(
        path, {STATE: known.get(STATE, ""), **{name: sum for name, sum in known.items() if name.endswith(INDEX)}}
    )
    state = json.loads((path / STATE).read_text())
    _same_job(state["job"], run.job, path, run.own_loop)
    _same_count(state.get("dataset_samples"), run, path)
    names = {*run.model.state_dict().keys(), *(name for name, _ in names_of(run))}
    needed: set[str] = set()
    for kind in ("model", "optimizer"):
        if (path / index_name(kind)).exists():
            with Reader(path, kind) as saved:
                needed |= saved.files_of([key for key in saved.names if key.partition(":")[2] in names or key in names])
        else:
            needed.add(file_name(kind, 0, 1))
    if FILE in known:
        needed.add(FILE)
    if is_rank_zero():  # verify files that no rank reads here, too, such as config.json
        needed |= {name for name in known if not name.endswith(".safetensors")}
    return path, state, sorted(needed)


def known_checksums(path: Path) -> dict[str, str]:
    """Return the checksums that were saved for the files of a checkpoint. Raises InputError if they cannot be
    read."""
    try:
        return read_checksums(path)
    except FileNotFoundError:
        raise _altered(path, f"{CHECKSUMS} is missing") from None
    except (ValueError, LookupError, TypeError):
        raise _altered(path, f"{CHECKSUMS} is not as it was written") from None


def _share(run: Run, needed: list[str]) -> list[str]:
    """Divide the files to check among the devices of each host, so that each file is checked once
    per host. Return the names of the files that this device has to check. All devices must call
    this function.

    needed  names of the files that this device loads
    """
    own_host = socket.gethostname()
    others = [
        (number, files)
        for number, (host, files) in enumerate(all_gather_values(run, (own_host, needed)))
        if host == own_host
    ]
    share = []
    for index, name in enumerate(sorted({name for _, files in others for name in files})):
        readers = [number for number, files in others if name in files]
        if readers[index % len(readers)] == (rank() if run.mesh is not None else 0):
            share.append(name)
    return share


def check_files(path: Path, names: Iterable[str]) -> None:
    """Check files of a checkpoint: raise InputError if a file is missing, cannot be read, or does
    not have the checksum that was saved for it.

    path   the checkpoint's folder
    names  names of the files to check
    """
    known = known_checksums(path)
    for name in names:
        note_activity(f"reading a checkpoint, {name}")
        try:
            if checksum(path / name) != known.get(name):
                raise _altered(path, f"{name} is not as it was written: its checksum differs")
        except FileNotFoundError:
            raise _altered(path, f"{name} is missing") from None
        except OSError as error:
            raise _altered(path, f"{name} cannot be read ({error.strerror or error})") from error


def _altered(path: Path, found: str) -> InputError:
    before = [checkpoint for checkpoint in checkpoints(path.parent) if checkpoint < path]
    if before:
        return InputError(f"checkpoint {path}", found, f"delete {path}: the run then continues from {before[-1]}")
    return InputError(
        f"checkpoint {path}", f"{found}, and there is no earlier checkpoint", "start afresh with another --out"
    )


def _load(run: Run, path: Path, state: dict[str, Any]) -> None:
    try:
        with Reader(path, "model") as model, Reader(path, "optimizer") as optimizer:
            _load_model(run, model, optimizer)
            states = _parts(run, model, optimizer, state["counts"])
        restore_extra_states(run.model, state.get(KIND, {}), path, run.device, run.executor is None)
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": states, "param_groups": groups})
    except (RuntimeError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError) or "memory" in str(error).lower():
            raise
        lines = " ".join(str(error).split())
        raise InputError(
            f"resume from {path}",
            f"the checkpoint does not fit this model ({lines[:200]})",
            "resume with the model's code from the time when the run was started",
        ) from error


@torch.no_grad()
def _load_model(run: Run, saved: Reader, states: Reader) -> None:
    """Copy the saved tensors into the model's parameters and buffers. Of a sharded tensor, copy
    only this device's shard. A parameter that is wider than 16 bits gets its saved master weights, if
    there are any.

    saved   reads the checkpoint's model files
    states  reads the checkpoint's optimizer files

    Raises RuntimeError if the names or shapes of the saved tensors differ from the model's.
    """
    parameters = dict(run.model.named_parameters())
    tensors = {**parameters, **dict(run.model.named_buffers())}
    in_state = run.model.state_dict().keys()
    missing = sorted(
        name
        for name, parameter in parameters.items()
        if name not in saved.names and (name in in_state or parameter.requires_grad)
    )
    if missing:
        raise RuntimeError(f"it has no {missing[0]}")
    unknown = sorted(saved.names - in_state - parameters.keys())
    if unknown and run.executor is None:
        raise RuntimeError(f"it has {unknown[0]}, which the model does not have")
    for name in sorted(saved.names & tensors.keys()):
        tensor, value, master = tensors[name].detach(), saved.get(name), f"{MASTER}:{name}"
        if master in states.names and tensor.dtype.itemsize > value.dtype.itemsize:
            value = states.get(master)
        shape = unsharded_shape(run, name, tensor)
        if value.shape != shape:
            raise RuntimeError(
                f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(shape)} in the model"
            )
        value = run.tp_shards[name].shard(value) if name in run.tp_shards else value
        if isinstance(tensor, DTensor):
            assert run.reduction is not None
            value, tensor = run.reduction.shard(tensors[name], value), tensor.to_local()
        tensor.copy_(value)


def _parts(run: Run, model: Reader, saved: Reader, counts: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the saved optimizer states in the form that `state_dict` has under "state": index of
    the parameter in the optimizer -> state name -> value. Of a sharded state, only this device's
    shard is in the result. If the plan has master weights and the checkpoint has none, the saved
    weights become the masters.

    model   reads the checkpoint's model files
    saved   reads the checkpoint's optimizer files
    counts  parameter name -> state name -> value, for states that are not tensors, such as step
            counts
    """
    sharded, names = is_sharded(run), names_of(run)
    shapes = {name: unsharded_shape(run, name, p) for name, p in run.model.named_parameters()}
    # the tensors of a nested state come beside its description
    states: dict[str, dict[str, Any]] = {owner: copy.deepcopy(counts.get(owner, {})) for owner, _ in names}
    for key in sorted(saved.names):
        what, _, owner = key.partition(":")
        name, _, within = what.partition(".")
        if owner in states and within:
            states[owner].setdefault(name, {})[within] = saved.get(key)
        elif owner in states:
            states[owner][name] = saved.get(key)

    if run.plan.master_weights:
        for owner, weight in names:
            if gradient_dtype(weight) != weight.dtype and owner in model.names:
                states[owner].setdefault(MASTER, model.get(owner).float())

    def taken(owner: str, weight: Tensor, name: str, value: Any) -> Any:
        if isinstance(value, dict) and NESTED in value:
            tensors = {position: one.clone() for position, one in value.items() if isinstance(one, Tensor)}
            return rebuild_state(value, tensors)
        if isinstance(value, dict) and not sharded:
            return {what: tensor.clone() for what, tensor in value.items()}
        if isinstance(value, dict):
            packed = {what: tensor.to(run.device) for what, tensor in value.items()}
            value = dequantize_state(name, packed, torch.empty(shapes[owner], device=run.device))
        if sharded and has_parameter_shape(name, value, shapes[owner]):
            value = shard(run, weight, value)
        return value.clone() if isinstance(value, Tensor) else value  # the file is mapped

    return {
        number: {name: taken(owner, weight, name, value) for name, value in states[owner].items()}
        for number, (owner, weight) in enumerate(names)
        if states[owner]
    }


def _set_random_states(run: Run, state: dict[str, Any]) -> None:
    """Restore this process's random number generators from the checkpoint. If the saved run had
    another number of devices, seed them from the job's seed, the step and the rank instead.

    state  content of the checkpoint's state.json
    """
    states, number = state["random"], rank()
    if len(states) == (dist.get_world_size() if run.mesh is not None else 1):
        set_random_states(states[number])
    else:
        seed_all(run.job.train.seed + 1 + state["step"] + 7919 * number)


_MAY_CHANGE = {
    "steps",
    "epochs",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_best",
    "early_stopping",
    "evaluate_every",
    "evaluate_samples",
    "trackers",
}


def _same_count(saved: int | None, run: Run, where: Path) -> None:
    """Raise InputError if the data has other samples than when the checkpoint was written: then the
    order of the samples is another one, and some would be used twice or never. Only their number is
    known, so changed samples are not noticed.

    saved  their number then; None: not known
    where  the checkpoint's folder, for the error message
    """
    now = dataset_samples(run)
    if None not in (saved, now) and saved != now:
        raise InputError(
            f"resume from {where}",
            f"the data had {saved:,} samples and now has {now:,}, so their order is another one",
            "give the data of that run, or start afresh with another --out",
        )


def _same_job(saved: dict[str, Any], job: Job, where: Path, own_loop: bool) -> None:
    """Raise InputError if `job` differs from the checkpoint's job in a field that changes the
    mathematics of the training. Other fields of the job, such as the number of steps, may differ.

    saved     the checkpoint's job as JSON values: section -> field -> value
    where     the checkpoint's folder, for the error message
    own_loop  whether the user's loop trains. It may have moved to another file, so the names of its
              functions are not compared
    """
    asked = json.loads(job.to_json())
    # a field that did not exist yet when the checkpoint was written had its default
    saved = {**saved, "train": {**json.loads(Train().to_json()), **saved.get("train", {})}}
    for section in ("train",) if own_loop else ("model", "data", "loss", "train"):
        before, now = saved.get(section) or {}, asked.get(section) or {}
        for name in sorted(set(before) | set(now)):
            if own_loop and isinstance(before.get(name), dict) and "python" in before[name]:
                continue
            if before.get(name) != now.get(name) and not (section == "train" and name in _MAY_CHANGE):
                raise InputError(
                    f"resume from {where}",
                    f"{section}.{name} was {before.get(name)!r} and is now {now.get(name)!r}",
                    f"set {section}.{name} to its old value, or "
                    + ("resume from another folder" if own_loop else "start afresh with another --out"),
                )


def _warn_of_another_rate(run: Run, state: dict[str, Any], step: int) -> None:
    """Warn if the length of the training changed, and with it the learning rate of the next step.

    state  the content of the checkpoint's state.json
    step   the number of steps that were done
    """
    now = run.job.train
    if now.uses_function("schedule") or not is_rank_zero():
        return
    lengths = {name: state["job"].get("train", {}).get(name) for name in ("steps", "epochs")}
    before = now.replace(**lengths)
    totals = [total_steps(train, run.data.samples) for train in (before, now)]
    rates = [learning_rate(train, total)(step) for train, total in zip((before, now), totals, strict=True)]
    if not math.isclose(*rates):
        warnings.warn(
            f"resume: the training ended after {totals[0]} steps and now ends after {totals[1]}, so the learning rate of "
            f"step {step + 1} is {rates[1]:.3g} and not {rates[0]:.3g}: schedule {now.schedule} decays over the whole "
            "training",
            TightfitWarning,
            stacklevel=3,
        )


__all__ = ["check_files", "known_checksums", "resume"]
