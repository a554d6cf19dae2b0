"""Write checkpoints: everything that a run needs to continue as if it had not stopped.

`report/run_folder.py` calls `save`, and `engine/checkpoint/resume.py` reads checkpoints. A
checkpoint is a folder such as `step-00000120` with

    model.safetensors      parameters and persistent buffers
    config.json            the config of a transformers model, so that transformers can load it, with
                           the names of the classes; also the tokenizer's files, if the data has a
                           tokenizer, and preprocessor_config.json for images
    optimizer.safetensors  optimizer states
    state.json             step, loss scale, states of the random number generators, and the extra
                           states of modules (see `engine/checkpoint/extra_state.py`)
    extra_state.safetensors  the tensors in these extra states, if there are any
    checksums.json         the SHA-256 of every other file of the folder
    adapter/               the adapters of a model with adapters, as peft reads them

A large checkpoint has several files of tensors, which the devices write together: see
`tensor_files.py`. Tensors are saved unsharded, so a run can resume on any number of devices and
with any sharding. The folder is written under another name and renamed at the end, so a folder
named like `step-00000120` is complete. It contains only tensors, JSON and text, and no code that
would be executed when it is read.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tightfit._torch.fake import FakeTensorMode
from tightfit.data.image_processing import PROCESSOR_FILE, ImageProcessing
from tightfit.distributed.processes import is_rank_zero, rank
from tightfit.engine.checkpoint.contents import SavedTensors, model_of, states_of
from tightfit.engine.checkpoint.extra_state import FILE, KIND, ExtraStates, extra_states_of
from tightfit.engine.rng import random_states
from tightfit.engine.step import drain
from tightfit.errors import InputError, TightfitError, TightfitWarning
from tightfit.models import is_transformers_model, model_factory
from tightfit.models.caches import isolated_model_caches
from tightfit.models.lora import has_adapters, save_adapters
from tightfit.models.pretrained import pretrained_folder
from tightfit.optim.groups import changed_options, changed_rates, group_options
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import Run, check_run
from tightfit.tensor_files import (
    CHECKSUMS,
    Layout,
    Reader,
    Writer,
    distribute,
    file_bytes,
    file_name,
    sync,
    write_checksums,
    write_index,
)

STATE = "state.json"
EARLIER = "state.pt"  # a pickle in place of state.json, written by earlier versions


def save(run: Run, folder: str | Path, step: int, kept_steps: frozenset[int] = frozenset()) -> Path:
    """Write a checkpoint of the run into a new folder under `folder`, and return the path of the
    new folder.

    step        how many steps the run has done. Steps count from 0, so after the `Step` that `train`
                yields this is its number plus 1: save(run, folder, result.step + 1). A run that
                resumes continues with the step of this number
    kept_steps  steps whose checkpoints are never deleted, such as the step of the best evaluation

    Afterwards, old checkpoints are deleted: the job's `keep_checkpoints` newest ones and those of
    `kept_steps` are kept. All devices must call this function, because sharded tensors are
    all-gathered and each device writes some of the files. An asynchronous pipeline first completes
    the steps that are in flight, and their number is added to `step`.

    Raises TightfitError if the checkpoint cannot be written, and InputError if a module returns an
    extra state that cannot be saved. Earlier checkpoints are then kept.
    """
    check_run(run, "save")
    drain(run)
    step += len(run.executor.losses) if run.executor is not None else 0
    folder = Path(folder)
    final = folder / folder_name(step)
    unfinished = folder / f".{final.name}.partial"
    model, states = model_of(run), states_of(run)
    extra = _extra_states(run)
    state = {**_state(run, step, states), KIND: extra.values}
    _together(run, lambda: _begin(folder, unfinished) if is_rank_zero() else None, step, folder)
    writers = _writers(run, unfinished)
    if not all(all_gather_values(run, bool(writers))):
        _together(run, lambda: _unseen(folder), step, folder, unfinished)
    layouts: dict[str, tuple[Layout, int]] = {}
    with Writer() as writer:
        for kind, tensors in (("model", model), ("optimizer", states)):
            mine, layout, size = _layout(run, tensors, len(writers))
            layouts[kind] = layout, size
            names = {file_name(kind, number, len(layout)): layout[number] for number in mine}
            stride = max(len(writers) // max(len(mine), 1), 1)
            own = {file for index, file in enumerate(names) if writers[index * stride % len(writers)] == rank()}
            writer.fill(unfinished, names, partial(_fetch, tensors), own)
        writer.wait()
        _together(run, lambda: _raise_first(writer.errors), step, folder, unfinished)
    note_activity("the end of writing a checkpoint")
    written = all_gather_values(run, writer.checksums)

    def finish() -> None:
        for kind, (layout, size) in layouts.items():
            write_index(unfinished, kind, layout, size)
        _describe(run, unfinished)
        _write_adapters(run, unfinished)
        if extra.tensors:
            save_file(extra.tensors, unfinished / FILE, metadata={"format": "pt"})
        (unfinished / STATE).write_text(json.dumps(state) + "\n")
        write_checksums(unfinished, {name: sum for one in written for name, sum in one.items()})
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        sync(folder)  # before older checkpoints are deleted
        for old in checkpoints(folder)[: -run.job.train.keep_checkpoints]:
            if old.name not in map(folder_name, kept_steps):
                shutil.rmtree(old)

    _together(run, lambda: finish() if is_rank_zero() else None, step, folder, unfinished)
    return final


def _fetch(tensors: SavedTensors, name: str) -> Tensor:
    note_activity(f"writing a checkpoint, {name}")
    return tensors.fetch(name)


def _begin(folder: Path, unfinished: Path) -> None:
    for left in folder.glob(".step-*.partial"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)


def _unseen(folder: Path) -> None:
    raise OSError(f"the hosts of a pipeline stage cannot see {folder}")


def _raise_first(errors: list[Exception]) -> None:
    for error in errors:
        raise error


def _together(run: Run, act: Callable[[], None], step: int, folder: Path, unfinished: Path | None = None) -> None:
    """Call `act` on all devices. If it raises an I/O error on any device, raise TightfitError on
    all devices.

    act         the function to call, such as one that writes a file
    step        number of steps that the run has done, for the error message
    folder      folder of the checkpoints, for the error message
    unfinished  a folder to delete if `act` fails; None: delete nothing
    """
    said = ""
    try:
        act()
    except (OSError, SafetensorError) as error:
        said = str(error) or type(error).__name__
    found = [refusal for refusal in all_gather_values(run, said) if refusal]
    if found:
        if unfinished is not None and is_rank_zero():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise TightfitError(
            f"the checkpoint of step {step} could not be written to {folder}: {found[0]}\n"
            "  fix: free disk space, set a smaller train.keep_checkpoints, or name another folder with --out"
        )


def all_gather_values(run: Run, value: Any) -> list[Any]:
    """All-gather a small Python object. Return a list of the `value` of every device, in the order
    of global ranks; [value] for a single device. All devices must call this function."""
    if run.mesh is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _stages(run: Run, value: Any) -> list[Any]:
    """All-gather a Python object over the pipeline. Return a list of the `value` of each pipeline
    rank, in order; [value] without a pipeline. All ranks of the pipeline must call this function.
    """
    if run.executor is None or run.mesh is None or run.mesh.size("pp") == 1:
        return [value]
    found: list[Any] = [None] * run.mesh.size("pp")
    dist.all_gather_object(found, value, group=run.mesh.group("pp"))
    return found


def _writers(run: Run, folder: Path) -> list[int]:
    """Return the global ranks that can write the tensors of this device's pipeline stages: the
    ranks that hold the same stages and whose host sees `folder`. The list is empty if no such rank
    sees the folder. All devices must call this function."""
    if run.mesh is None or run.mesh.servers:
        return [0]
    sees, each = all_gather_values(run, folder.is_dir()), dist.get_world_size() // run.mesh.size("pp")
    first = run.mesh.rank("pp") * each
    return [device for device in range(first, first + each) if sees[device]]


def check_folder(run: Run, folder: Path) -> None:
    """Raise InputError if a checkpoint could not be written to `folder`, because no device that
    holds a certain pipeline stage sees this folder. All devices must call this function."""
    if run.mesh is None:
        return
    dist.barrier()
    if not all(all_gather_values(run, bool(_writers(run, folder)))):
        raise InputError(
            f"--out {folder}",
            "the hosts of a pipeline stage cannot see this folder",
            "name a folder that all hosts share",
        )


def _layout(run: Run, tensors: SavedTensors, writers: int) -> tuple[list[int], Layout, int]:
    """Distribute the tensors of all pipeline stages over files. Return (indices of the files with
    this device's tensors, for each file the names of its tensors, total bytes of all tensors).

    A tensor that two pipeline ranks have, such as a tied weight, is in a file of the first of these
    ranks.

    tensors  the tensors of this device's stages
    writers  how many ranks write the files of this device's stages
    """
    files: Layout = []
    assigned: set[str] = set()
    mine: list[int] = []
    total = sum(tensors.sizes.values())
    by_stage = _stages(run, (distribute(tensors.sizes, file_bytes(total, writers)), total))
    own_rank = run.mesh.rank("pp") if run.mesh is not None and len(by_stage) > 1 else 0
    for pp_rank, (layout, _) in enumerate(by_stage):
        left = [[name for name in names if name not in assigned] for names in layout]
        for names in filter(None, left):
            assigned.update(names)
            mine += [len(files)] if pp_rank == own_rank else []
            files.append(names)
    if not files:  # an optimizer without states
        files, mine = [[]], [0] if own_rank == 0 else []
    return mine, files, sum(size for _, size in by_stage)


def _describe(run: Run, folder: Path) -> None:
    """Write the files without tensors that transformers needs to load the model: its config, the
    tokenizer's files and, for images, preprocessor_config.json. Write nothing for a model that is not
    a transformers model and for data without a tokenizer."""
    source = getattr(run.data, "source", None)
    if is_transformers_model(run.model):
        config: Any = copy.deepcopy(run.model.config)
        config.architectures = [_plain_name(run.model)]
        if getattr(config, "use_cache", None) is False:
            config.use_cache = True  # generation needs it, training does not
        _name_classes(config, getattr(source, "class_names", ()))
        config.save_pretrained(folder)
        _describe_images(run, getattr(source, "processing", None), folder)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(folder)


def _name_classes(config: Any, names: tuple[str, ...]) -> None:
    """Write the names of the data's classes into the config of a classifier. Classes without names
    keep those of the config.

    names: by the numbers of the classes
    """
    if names and len(names) <= (getattr(config, "num_labels", None) or 0):
        named = {number: str(name) for number, name in {**config.id2label, **dict(enumerate(names))}.items()}
        config.id2label, config.label2id = named, {name: number for number, name in named.items()}


def _describe_images(run: Run, processing: ImageProcessing | None, folder: Path) -> None:
    """Write the preprocessor_config.json that describes how the images of the training were
    processed. For images of the user's own, copy the file of the pretrained model."""
    model: Any = run.job.model
    if processing is not None:
        (folder / PROCESSOR_FILE).write_text(json.dumps(processing.content, indent=2) + "\n")
    elif run.job.of_transformers and model.from_:
        with suppress(InputError):  # the folder may be gone since the beginning of the run
            file = pretrained_folder(model.from_) / PROCESSOR_FILE
            if file.is_file():
                shutil.copyfile(file, folder / PROCESSOR_FILE)


def _write_adapters(run: Run, folder: Path) -> None:
    """If the model has adapters (LoRA), write them in peft's format into the subfolder "adapter" of
    the checkpoint `folder`.

    The adapters' tensors are read from the checkpoint's own files, which contain them unsharded.
    peft finds adapters by the layers of the model, but a pipeline rank has only the layers of its
    own stages. So peft gets the full model, created on fake tensors.
    """
    if not has_adapters(run.model):
        return
    model = run.model
    if run.plan.pp > 1:
        with isolated_model_caches(), FakeTensorMode(allow_non_fake_inputs=True):
            model = model_factory(run.job.model)()
    with Reader(folder, "model") as saved:
        tensors = {name: saved.get(name) for name in saved.names}
    # a tensor is saved once, and peft may ask for it by another of its names, as for VeRA's projections
    states = model.state_dict(keep_vars=True)
    by_tensor = {id(states[name]): value for name, value in tensors.items() if name in states}
    tensors |= {name: by_tensor[id(state)] for name, state in states.items() if id(state) in by_tensor}
    try:
        save_adapters(model, tensors, folder / "adapter")
    except Exception as error:  # the checkpoint has them, and must not be lost
        warnings.warn(
            f"{folder}: the adapters were not written in peft's format, too ({type(error).__name__}: {error})",
            TightfitWarning,
            stacklevel=2,
        )


def _plain_name(model: nn.Module) -> str:
    """Return the name of the model's original class. fully_shard replaces the class of a model by a
    subclass, whose name transformers would not know."""
    from torch.distributed.fsdp import FSDPModule  # here, because a plan without ZeRO-3 does not need it

    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def folder_name(step: int) -> str:
    """Return the name of the folder for a checkpoint after `step` steps, such as "step-00000120"."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return after how many steps a checkpoint was saved. Example: a folder named "step-00000120"
    gives 120."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the paths of the complete checkpoints under `folder`, oldest first."""
    files = (STATE, CHECKSUMS, EARLIER)  # one of them is enough: resume reports files that are missing
    return sorted(path for path in Path(folder).glob("step-*") if any((path / name).exists() for name in files))


def newest(folder: str | Path) -> Path:
    """Return the folder of the newest complete checkpoint under `folder`. Raises InputError if
    there is none."""
    found = checkpoints(folder)
    if not found:
        raise InputError(
            f"resume from {folder}",
            "no checkpoint in this folder",
            "leave out --resume, or name the folder of an earlier run with --out",
        )
    return found[-1]


def _extra_states(run: Run) -> ExtraStates:
    """Return the extra states of the model's modules: those on rank 0, and in a pipeline also those
    of the modules that only other ranks have. A parameter server runs no forward, so with one they
    are those of the first worker. All devices must call this function."""
    own = extra_states_of(run.model)
    if run.mesh is not None and run.mesh.servers:
        found: ExtraStates = all_gather_values(run, own if own.values else None)[1]
        return found or own
    stages = _stages(run, own)[::-1]  # of a module on several ranks, the first rank's value counts
    return ExtraStates(
        {name: value for stage in stages for name, value in stage.values.items()},
        {name: tensor for stage in stages for name, tensor in stage.tensors.items()},
    )


def dataset_samples(run: Run) -> int | None:
    """Return how many samples the run's data has, those for evaluations included; None for a stream."""
    source: Any = getattr(run.data, "source", None)
    return len(source) if hasattr(source, "__len__") else None


def _state(run: Run, step: int, states: SavedTensors) -> dict[str, Any]:
    """Return the content of state.json: everything of a checkpoint that is not a tensor, such as
    the step, the job and the states of the random number generators. All devices must call this
    function.

    states  the optimizer states, of which only the counts are used here
    """
    counts = {name: value for stage in _stages(run, states.counts) for name, value in stage.items()}
    rates = {name: factor for stage in _stages(run, changed_rates(run.optimizer)) for name, factor in stage.items()}
    return {
        "step": step,
        "job": json.loads(run.job.to_json()),
        "dataset_samples": dataset_samples(run),
        "counts": counts,
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale else None,
        "changed_rates": rates,
        "changed_options": {
            name: one for part in _stages(run, changed_options(run.optimizer)) for name, one in part.items()
        },
        # a loop of the user's own may change any of them, as schedulers of torch do
        "group_options": group_options(run.optimizer) if run.own_loop else {},
        "random": all_gather_values(run, random_states()),
    }
