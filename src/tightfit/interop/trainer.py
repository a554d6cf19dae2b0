"""Advice for users of transformers' Trainer: the TrainingArguments with which their job trains
fastest on a machine, the predicted memory and time, and what the Trainer cannot do.

The import of TrainingArguments (`importers/training_arguments.py`) gives the job and the plan of
the user's arguments. `for_trainer` lists the plans that TrainingArguments can express, and `search`
chooses among them. The job stays the same: the optimizer, the learning rate, the samples of a step
and the seed do not change.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.calibration.this_machine import measured_machine_of
from tightfit.capabilities import can_compile
from tightfit.errors import DoesNotFit, InputError, Untraceable
from tightfit.importers.importing import import_content
from tightfit.importers.training_arguments import IMPORTER
from tightfit.job import Job, Train
from tightfit.machine import Machine
from tightfit.methods.compile import COMPILE_S
from tightfit.models.batches import Batch, sample_count
from tightfit.models.objective import TASKS, Objective
from tightfit.models.tasks import task_of_class
from tightfit.plan import Plan
from tightfit.planner.candidates import is_legal
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.kernels import max_compile_saving_s
from tightfit.planner.search import search
from tightfit.rules import needed_permissions
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch import Tensor, nn

WHERE = "TrainingArguments"
PRECISION_FLAGS: dict[str, dict[str, bool]] = {  # plan.precision -> fields of TrainingArguments
    "fp32": {"bf16": False, "fp16": False, "tf32": False},
    "tf32": {"bf16": False, "fp16": False, "tf32": True},
    "bf16-mixed": {"bf16": True, "fp16": False},
    "fp16-mixed": {"bf16": False, "fp16": True},
}
OPTIM_OF_STATES = {"fp32": "adamw_torch_fused", "8-bit": "adamw_torch_8bit", "4-bit": "adamw_torch_4bit"}
BEYOND: dict[str, Callable[[Any], str]] = {  # plan field -> what the Trainer cannot do, in words
    "precision": lambda value: f"train in {value}",
    "rounding": lambda value: f"keep small updates of 16-bit weights ({value} rounding)",
    "master_weights": lambda value: "keep fp32 weights beside 16-bit ones",
    "float8": lambda value: f"multiply in 8 bits with {value} scales",
    "recompute": lambda value: f"recompute only a part of the activations ({value})",
    "attention": lambda value: f"compute attention as plain matrix products ({value})",
    "dropout": lambda value: f"draw dropout masks from {value} random numbers",
    "memory_format": lambda value: f"store images in {value}",
    "chunked_loss": lambda value: f"compute the loss {value:,} tokens at a time, without the logits of all tokens",
    "states": lambda value: f"store the optimizer states in {value}",
    "update_in_backward": lambda value: "update each weight as soon as its gradient is complete",
    "compile": lambda value: f"compile each {value} by itself",
    "compile_mode": lambda value: f"compile in the mode {value}",
    "materialize": lambda value: "create the model directly on its device, in the type of its weights",
    "allocator": lambda value: f"start with a {value} allocator",
    "zero": lambda value: f"shard in ZeRO stage {value}",
    "gradient_sync": lambda value: f"shard gradients once per {value}",
    "dp_replicate": lambda value: f"train {value} replicas",
    "cp": lambda value: f"split each sequence over {value} devices",
    "tp": lambda value: f"split the layers over {value} devices",
    "sequence_parallel": lambda value: "split norms and dropout along the sequence",
    "pp": lambda value: f"split the blocks over {value} devices (a pipeline)",
    "offload": lambda value: f"offload {', '.join(value)}",
}


@dataclass(frozen=True)
class TrainerAdvice:
    """What `for_trainer` returns. `str` gives a text for the user.

    before     the user's TrainingArguments
    changes    the fields in which the advised arguments differ from `before`, by name
    given      the estimate of `before`
    estimate   the estimate of the advised arguments
    fastest    the estimate of tightfit's fastest plan for the same job
    cannot     what `fastest` does and the Trainer cannot, one phrase each
    ignored    fields of the user's arguments that the estimates do not consider, with the reason
    """

    before: Any
    changes: dict[str, Any]
    given: Estimate
    estimate: Estimate
    fastest: Estimate
    cannot: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def arguments(self) -> Any:
        """The advised TrainingArguments: `before` with `changes`. Give them to the Trainer.

        transformers raises ValueError if the machine that asks for them does not support them, such
        as bf16 on a machine without a GPU, unless use_cpu is set.
        """
        return dataclasses.replace(self.before, **self.changes)

    def __str__(self) -> str:
        lines = [
            f"as given     {_figures(self.given)}",
            f"advised      {_figures(self.estimate)}",
            *(f"             {name}={value!r}" for name, value in self.changes.items()),
            f"in tightfit  {_figures(self.fastest)}, with {self.fastest.plan}",
            *(f"             the Trainer cannot {phrase}" for phrase in self.cannot),
            *(f"ignored      {line}" for line in self.ignored),
        ]
        return "\n".join(lines)


def for_trainer(
    model: nn.Module,
    args: Any,
    dataset: Any,
    *,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    machine: Machine | str | None = None,
    allow: list[str] | None = None,
) -> TrainerAdvice:
    """Return the TrainingArguments with which transformers' Trainer trains this job fastest.

    model          the model that the Trainer gets. Its weights are only read for their shapes
    args           the user's TrainingArguments. The learning rate, the schedule, the optimizer, the
                   seed and the samples of a step stay as they are
    dataset        the Trainer's `train_dataset`: a dataset of samples, or of what `data_collator`
                   takes. One without a length must yield what the model takes, because it is read
                   without `data_collator`
    data_collator  the Trainer's `data_collator`; None if the samples need none
    machine        the machine to plan for, or its name, such as "h100-sxm:8"; None is this machine
    allow          what may change the numerics, as in `Job`; None is [bf16]

    The predicted memory and time are those of tightfit's engine with the plan that the arguments
    describe. The Trainer needs more: some models copy all logits to fp32, for example.

    Raises InputError for arguments that the Trainer would refuse, too, and for a model that cannot
    be traced. Raises DoesNotFit if no arguments make the job fit; if a plan of tightfit fits, the
    error names it.
    """
    import torch

    machine = measured_machine_of(machine)
    if not isinstance(model, torch.nn.Module) or not hasattr(args, "to_dict"):
        raise InputError(
            "for_trainer",
            f"got a {type(model).__name__} and a {type(args).__name__}",
            "give the model and its TrainingArguments, in this order",
        )
    devices = machine.devices_per_node * machine.nodes
    imported = import_content(IMPORTER, IMPORTER.prepare(args.to_dict(), Path.cwd()), WHERE, devices)
    current = _complete(Plan.parse(imported.plan, WHERE), model, machine)
    needed = needed_permissions(current)
    data, objective = _samples(model, args, dataset, data_collator), _objective(model, dataset)
    first = data[0] if hasattr(data, "__len__") and len(data) else None
    if objective in TASKS.values() and isinstance(first, Mapping) and "labels" not in first:
        raise _no_labels()
    job = Job(
        model=_shapes_of(model),
        data=data,
        loss=objective,
        train=Train.parse({**_without_checkpoints(imported.job.get("train", {})), "checkpoint_every": "never"}, WHERE),
        allow=sorted({*(["bf16"] if allow is None else allow), *needed}),
    )
    estimator = Estimator(job, machine)
    given = estimator.include_allocator(estimator.estimate(current))
    fastest = _fastest(job, machine, estimator)
    try:
        best = _best(estimator, model, current)
    except DoesNotFit as error:
        if fastest is None:
            raise
        raise DoesNotFit(
            f"{error}\n  The job fits if tightfit trains it: tightfit.train with {fastest.plan}", error.content
        ) from None
    assert fastest is not None  # its plans include all those of the Trainer
    if fastest.time.step_s > best.time.step_s:
        fastest = best
    changes = {
        name: value
        for name, value in _fields(best.plan, job, args).items()
        if _plain(getattr(args, name, None)) != _plain(value)
    }
    ignored = tuple(
        f"{row.key}={row.value!r}: {row.note}"
        for row in imported.rows
        if row.outcome in ("no counterpart", "unknown", "contradiction") and row.value not in (None, False, "", [], {})
    )
    return TrainerAdvice(
        before=args,
        changes=changes,
        given=given,
        estimate=best,
        fastest=fastest,
        cannot=tuple(_cannot(fastest.plan, best.plan)),
        ignored=ignored,
    )


def _figures(estimate: Estimate) -> str:
    """Return the predicted time of a step and the peak memory, and whether the plan fits."""
    verdict = "" if estimate.fits else ", does not fit"
    return f"{format_seconds(estimate.time.step_s)} a step, {format_bytes(estimate.peak_bytes)}{verdict}"


def _shapes_of(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that returns a copy of the model with new, unset parameters and buffers of
    the same shapes and dtypes."""

    def create() -> nn.Module:
        import torch

        copies: dict[int, Any] = {}
        for weight in model.parameters():
            empty = torch.empty(weight.shape, dtype=weight.dtype)
            copies[id(weight)] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
        for buffer in model.buffers():
            copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        return copy.deepcopy(model, copies)

    return create


def _without_adapters(model: Any) -> nn.Module:
    """Return the model that peft has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _without_checkpoints(train: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `train` without those that need checkpoints or evaluations, which estimates do
    not consider."""
    left_out = ("keep_best", "early_stopping", "evaluate_every", "evaluate_samples")
    return {name: value for name, value in train.items() if name not in left_out}


def _objective(model: nn.Module, dataset: Any) -> Objective:
    """Return the loss that the Trainer trains: the cross entropy of the model's task, if its class
    has a usual one, or else the `loss` of its output, as of a regression or of several labels."""
    inner = _without_adapters(model)
    task, config = task_of_class(type(inner).__name__), getattr(inner, "config", None)
    if task == "classification" and (getattr(config, "num_labels", None) == 1 or _has_real_labels(dataset)):
        task = None
    if task is not None and getattr(config, "problem_type", None) is None:
        return TASKS[task]

    def total(model: nn.Module, batch: Batch) -> Tensor:
        output = model(**batch)
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        if loss is None:
            raise _no_labels()
        return loss * sample_count(batch)

    return Objective(total, sample_count)


def _no_labels() -> InputError:
    return InputError(
        "for_trainer: dataset",
        "the model returns no loss for its samples",
        "add the field 'labels', or give the data_collator that adds it",
    )


def _has_real_labels(dataset: Any) -> bool:
    """Return whether the labels of the first sample are real numbers, so that transformers takes them for a
    regression or for several labels."""
    import torch

    sample = dataset[0] if hasattr(dataset, "__len__") and len(dataset) else None
    label = sample.get("labels", sample.get("label")) if isinstance(sample, Mapping) else None
    try:
        return label is not None and torch.as_tensor(label).is_floating_point()
    except (TypeError, ValueError, RuntimeError):  # such as a text, of which the collator makes a number
        return False


class _Samples:
    """The samples that the Trainer's model gets: each goes through the data collator alone, and
    keeps only the fields that the model's forward takes.

    fields  the names of these fields; None keeps all
    """

    def __init__(self, dataset: Any, collator: Callable[[list[Any]], Any] | None, fields: set[str] | None) -> None:
        self.dataset, self.collator, self.fields = dataset, collator, fields

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if self.fields is not None and isinstance(sample, Mapping):
            sample = {name: value for name, value in sample.items() if name in self.fields}
        if self.collator is None and not isinstance(sample, Mapping):
            return sample
        if self.collator is None:
            from transformers import default_data_collator

            return {name: value[0] for name, value in default_data_collator([sample]).items()}
        return {name: value[0] for name, value in self.collator([sample]).items()}


def _samples(model: nn.Module, args: Any, dataset: Any, collator: Callable[[list[Any]], Any] | None) -> Any:
    """Return the dataset that the job reads: each sample of the Trainer's `dataset`, passed through
    the data collator. As in the Trainer, fields that the model's forward does not take are dropped,
    except labels; if `args.remove_unused_columns` is false, all fields are kept. An iterable
    without a length is returned unchanged."""
    if not hasattr(dataset, "__len__"):
        return dataset
    fields = None
    if args.remove_unused_columns:
        fields = {*inspect.signature(_without_adapters(model).forward).parameters, "label", "label_ids", "labels"}
    return _Samples(dataset, collator, fields)


def _complete(plan: Plan, model: nn.Module, machine: Machine) -> Plan:
    """Return the plan of the user's TrainingArguments, completed by what these do not say: 16-bit
    precision if the model's weights have 16 bits, and dp_shard or dp_replicate for all devices of
    the machine. On a CPU, pinned memory and non-blocking copies are switched off."""
    import torch

    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        plan = plan.replace(precision="bf16-true" if dtype == torch.bfloat16 else "fp16-true")
    count = machine.devices_per_node * machine.nodes
    if count > 1 and plan.devices == 1:
        plan = plan.replace(dp_shard=count) if plan.zero else plan.replace(dp_replicate=count)
    if plan.shards == 1:
        plan = plan.replace(zero=0)
    if machine.device == "cpu":
        plan = plan.replace(pin_memory=False, non_blocking=False)
    return plan


def _best(estimator: Estimator, model: nn.Module, current: Plan) -> Estimate:
    """Return the estimate of the fastest plan that TrainingArguments can express. Raises DoesNotFit
    if none of them fits.

    Compile is tried last, and only with the options of the fastest plan without it, because each
    trace with compile takes seconds.
    """
    job, machine = estimator.job, estimator.machine
    plain = [plan for plan in _plans(job, model, machine, current) if is_legal(plan, job, machine.device)]
    best = search(job, machine, estimator=estimator, choices=[*plain, current])[0]
    if not can_compile(machine) or COMPILE_S[machine.device] >= max_compile_saving_s(best):
        return best
    kept = ("precision", "states", "dp_replicate", "dp_shard", "zero")
    compiled = [
        plan.replace(compile="model")
        for plan in plain
        if all(getattr(plan, name) == getattr(best.plan, name) for name in kept)
        and plan.micro_batch_of(job.train.batch) >= best.plan.micro_batch_of(job.train.batch)
    ]
    try:
        return search(job, machine, estimator=estimator, choices=[*compiled, best.plan])[0]
    except Untraceable as error:  # torch.compile fails on this model
        estimator.untraceable["compile: model"] = error.found
        return best


def _plans(job: Job, model: nn.Module, machine: Machine, current: Plan) -> Iterator[Plan]:
    """Yield the plans without compile that TrainingArguments can express for this model and
    machine, also those that the job does not allow."""
    adam, on_cuda = job.train.optimizer_name == "adamw", machine.device == "cuda"
    share = current.share_of(job.train.batch)
    options: dict[str, list[Any]] = {
        "precision": [current.precision] if current.has_16_bit_weights else list(PRECISION_FLAGS),
        "states": [*OPTIM_OF_STATES] if adam and on_cuda else [current.states],
        "fused_optimizer": [True] if adam else [current.fused_optimizer],
        "recompute": ["none", "full"] if getattr(model, "supports_gradient_checkpointing", False) else ["none"],
        "compile": ["none"],
        "micro_batch": [share // parts for parts in range(1, share + 1) if share % parts == 0],
    }
    for values in itertools.product(_shardings(current, machine), *options.values()):
        yield current.replace(**values[0], **dict(zip(options, values[1:], strict=True)))


def _shardings(current: Plan, machine: Machine) -> list[dict[str, Any]]:
    """Return the ways in which the Trainer can use all devices of the machine, each as plan fields:
    replicas, and on GPUs also FSDP with ZeRO stage 2 or 3.

    Return [{}], which keeps the layout of `current`, for a single device and for a plan with tp, cp
    or offload.
    """
    count = machine.devices_per_node * machine.nodes
    if count == 1 or current.tp * current.cp > 1 or current.offload:
        return [{}]
    found: list[dict[str, Any]] = [{"dp_replicate": count, "dp_shard": 1, "zero": 0}]
    if machine.device == "cuda":
        found += [{"dp_replicate": 1, "dp_shard": count, "zero": zero} for zero in (2, 3)]
    return found


def _fields(plan: Plan, job: Job, args: Any) -> dict[str, Any]:
    """Return the fields of TrainingArguments that describe this plan, by name."""
    share, micro = plan.share_of(job.train.batch), plan.micro_batch_of(job.train.batch)
    # transformers 5.24 has renamed gradient_checkpointing
    checkpointing = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    fields: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": share // micro,
        f"{checkpointing}_checkpointing": plan.recompute == "full",
        "torch_compile": plan.compile == "model",
    }
    flags = PRECISION_FLAGS.get(plan.precision, {})
    fields |= {name: value for name, value in flags.items() if value or getattr(args, name, None)}
    if plan.recompute == "full":
        fields[f"{checkpointing}_checkpointing_kwargs"] = {"use_reentrant": False}
    if job.train.optimizer_name == "adamw" and plan.fused_optimizer:
        fields["optim"] = OPTIM_OF_STATES[plan.states]
    if plan.data_parallel > 1 and not args.deepspeed:
        fields["fsdp"] = plan.zero > 0
        if plan.zero:  # FSDP 2 frees gathered parameters after forward in stage 3 only
            fields["fsdp_config"] = {"version": 2, "reshard_after_forward": plan.zero == 3}
    return fields


def _plain(value: Any) -> Any:
    """Return an argument of transformers' TrainingArguments in a form that can be compared: an enum
    member as its value, such as "cosine", and a list as one text with spaces. False, 0 and ""
    become None. Anything else is returned unchanged."""
    if isinstance(value, list):
        return " ".join(str(_plain(one)) for one in value)
    return getattr(value, "value", value) or None


def _cannot(fastest: Plan, best: Plan) -> Iterator[str]:
    """Yield what the fastest plan does and no TrainingArguments can say, one phrase for each
    field."""
    expressible: dict[str, set[Any]] = {
        "precision": set(PRECISION_FLAGS),
        "recompute": {"none", "full"},
        "compile": {"none", "model"},
        "states": set(OPTIM_OF_STATES),
        "zero": {0, 2, 3},
        "dp_replicate": {fastest.dp_replicate},
    }
    for name, value in fastest.differences().items():
        if name in BEYOND and value != getattr(best, name) and value not in expressible.get(name, set()):
            yield BEYOND[name](value)


def _fastest(job: Job, machine: Machine, estimator: Estimator) -> Estimate | None:
    """Return the estimate of tightfit's fastest plan that fits; None if none does."""
    try:
        return search(job, machine, estimator=estimator)[0]
    except DoesNotFit:
        return None


__all__ = ["TrainerAdvice", "for_trainer"]
