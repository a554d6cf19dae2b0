"""Job: what is trained. A job fixes the mathematics. A plan says how the job is fitted to a
machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BeforeValidator, Field, model_validator

from tightfit.errors import InputError
from tightfit.job_sections.checks import refuse_plain
from tightfit.job_sections.data import DataSpec, SourceSpec
from tightfit.job_sections.evaluation import Evaluation, with_fields_of
from tightfit.job_sections.model import LoraSpec, ModelSpec, flat_model
from tightfit.job_sections.paths import with_absolute_paths
from tightfit.job_sections.python_objects import PythonObject, PythonSpec, where_defined
from tightfit.job_sections.selection import LOSS, Criterion
from tightfit.job_sections.train import ParameterGroup, Train
from tightfit.units import parse_bytes
from tightfit.values import Value, nearest, read_yaml
from tightfit.yaml_input import check_plain, parse_yaml

Permission = Literal[
    "tf32",
    "bf16",
    "fp16",
    "float8",
    "bf16-states",
    "8-bit-states",
    "4-bit-states",
    "another-optimizer",
    "stochastic-rounding",
    "nearest-rounding",
    "compressed-gradients",
    "asynchronous",
    "offload",
]


def _memory(text: Any) -> int:
    """Return a size in bytes. A number without a unit that is less than 1 MiB is probably meant in GiB."""
    size = parse_bytes(text)
    if 0 < size < 2**20:
        raise InputError(f"size {text!r}", f"is {size} bytes", f"write the unit: {str(text).strip()}GiB")
    return size


Bytes = Annotated[int, BeforeValidator(_memory), Field(gt=0)]


class LossSpec(PythonSpec):
    """Names the user's own loss function: "file.py:function" or "package.module:function". The
    function takes the model's output and the batch, and returns the mean loss over the batch's
    samples. The name may also be that of a `tightfit.Objective`."""


class Limits(Value):
    """The most that a run may use: of the memory of each device (memory), of host memory and of
    disk. Each limit is a number of bytes or a text such as '24GiB'; None sets no limit."""

    memory: Bytes | None = None
    host_memory: Bytes | None = None
    disk: Bytes | None = None


HELD_OUT = 0.01  # default share of the samples that evaluations of the training data use


class Job(Value):
    """What is trained: model, data, loss, optimizer and schedule, batch, steps, seed, and what
    `allow` permits.

    model  a ModelSpec (or its mapping), or a callable that returns an nn.Module
    data   a DataSpec (or its mapping), or a map-style or iterable dataset of samples
    loss   a callable `loss(output, batch)` that returns the mean over the batch's samples, or a
           `tightfit.Objective`; in a job file {python: "file.py:function"}. If left out, the loss
           follows from the model's task. A mean over other items than samples, such as the tokens
           that are not masked, would depend on micro_batch: give an Objective for it
    allow  what may change the numerics. The default is [bf16]; [] keeps fp32
           tf32, bf16, fp16      precision of the arithmetic; either 16-bit type allows tf32, too
           float8                matrix products of linear layers in 8 bits; needs bf16, too
           bf16-states, 8-bit-states, 4-bit-states
                                 storage of the optimizer states
           compressed-gradients  lossy compression of the gradients for the all-reduce
           asynchronous          gradients may be stale: computed with weights from some updates ago
           offload               does not change numerics: host memory or disk may be used, too
           stochastic-rounding   updates of bf16 weights may be rounded at random
           nearest-rounding      search may store weights only in bf16 and round each update to
                                 nearest, which loses small updates; a plan that pins precision:
                                 bf16-true with rounding: nearest needs only bf16
           another-optimizer     an optimizer with smaller states than the job's; no plan uses this
                                 yet
    train  optimizer, schedule, batch, steps, seed
    evaluate  an Evaluation (or its mapping): the data, interval and metrics of evaluations
    callbacks  Callback objects that `tightfit train` calls after steps and evaluations, and at the
           end; in a job file a list of {python: "file.py:name"}
    limits the most memory and disk that a run may use
    plan   the plan fields that the job fixes (pins), such as {micro_batch: 8}, or the word
           reference
    """

    model: ModelSpec | PythonObject
    data: DataSpec | PythonObject
    loss: LossSpec | PythonObject = None
    train: Train = Train()
    allow: list[Permission] | None = Field(None, description="what may change the numerics; the default is [bf16]")
    evaluate: Evaluation | None = None
    callbacks: list[PythonSpec | PythonObject] | None = None
    limits: Limits = Limits()
    plan: dict[str, Any] | Literal["reference"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, content: Any) -> Any:
        """Return the content of a job with its sections (model, data, train, ...) parsed one by
        one, so that an error names the section that is wrong. Raise InputError if a section is
        wrong, or if the model or the data is missing."""
        if not isinstance(content, dict):
            return content
        content = dict(content)
        for name, kind in _SECTIONS.items():
            if isinstance(content.get(name), dict):
                content[name] = kind.parse(content[name], f"job: {name}")
        for name, example in (("model", "{preset: gpt2}"), ("data", "{text: python-stdlib}")):
            if content.get(name) is None:
                raise InputError(f"job: {name}", "is needed", f"add a section such as {name}: {example}")
            refuse_plain(content, name, example)
        refuse_plain(content, "loss", '{python: "file.py:function"}')
        refuse_plain(content, "evaluate", "{every: 100}")
        content["evaluate"] = with_fields_of(content.get("evaluate"), content["data"])
        content["callbacks"] = _callbacks(content.get("callbacks"))
        _check_allow(content.get("allow"))
        if isinstance(content.get("plan"), str) and content["plan"] != "reference":
            raise InputError(
                f"job: plan={content['plan']}",
                'is neither a mapping of a plan\'s fields nor "reference"',
                "write it like {micro_batch: 8}, write reference, or name a plan's file with --plan",
            )
        return content

    @model_validator(mode="after")
    def _evaluates(self) -> Self:
        """Raise InputError if fields of `train` and `evaluate` contradict each other: if they give
        different intervals of evaluations, or if keep_best or early_stopping names a metric that
        the job does not compute."""
        own, every = self.evaluate.every if self.evaluate else None, self.train.evaluate_every
        if own is not None and every is not None and own != every:
            raise InputError(
                "job: evaluate.every and train.evaluate_every",
                f"differ ({own} and {every})",
                "keep one of them",
            )
        known = [LOSS, *(self.evaluate.metrics if self.evaluate else ())]
        criteria: dict[str, Criterion | None] = {
            "keep_best": self.train.keep_best,
            "early_stopping": self.train.early_stopping,
        }
        for name, criterion in criteria.items():
            if criterion is None:
                continue
            if self.evaluate_every is None:
                raise InputError(f"job: train.{name}", "the job never evaluates", "set train.evaluate_every: 100")
            if criterion.metric.partition(".")[0] not in known:  # a metric may return several values
                raise InputError(
                    f"job: train.{name}.metric={criterion.metric}",
                    "is not a metric of the job",
                    nearest(criterion.metric, known),
                )
        if self.train.keep_best is not None and self.train.checkpoint_every == "never":
            raise InputError(
                "job: train.keep_best",
                "train.checkpoint_every is never, so no checkpoint is saved",
                "set train.checkpoint_every: end, or leave out train.keep_best",
            )
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        """Check what a stream of unknown length needs."""
        if not isinstance(self.data, DataSpec) or not self.data.streaming:
            return self
        if self.train.steps is None:
            raise InputError("job: data.streaming", "gives the data no known length", "set train.steps: 1000")
        if self.evaluate_every is not None and (self.evaluate is None or self.evaluate.data is None):
            raise InputError(
                "job: data.streaming",
                "holds out no samples for the evaluations that the job asks for",
                "give evaluate.data, such as {jsonl: evaluation.jsonl}, or leave out train.evaluate_every",
            )
        return self

    @property
    def evaluate_every(self) -> int | None:
        """The number of steps between evaluations; None if the job never evaluates."""
        own = self.evaluate.every if self.evaluate else None
        return own if own is not None else self.train.evaluate_every

    @property
    def held_out(self) -> float:
        """The share of the data's samples that is kept for evaluation and not trained: `data.held_out`. Its default
        is 0.01 if the job evaluates without data of their own, and otherwise 0. A program's own data is all trained."""
        if not isinstance(self.data, DataSpec):
            return 0.0
        if self.data.held_out is not None:
            return self.data.held_out
        has_own = self.evaluate is not None and self.evaluate.data is not None
        return 0.0 if self.evaluate_every is None or has_own else HELD_OUT

    @property
    def evaluate_samples(self) -> int | None:
        """The largest number of samples of an evaluation; None for all samples of the evaluation's
        own data."""
        if self.evaluate is not None and (self.evaluate.samples is not None or self.evaluate.data is not None):
            return self.evaluate.samples
        return self.train.evaluate_samples

    @property
    def has_metrics(self) -> bool:
        """True if evaluations compute metrics from the model's outputs, besides the loss."""
        return self.evaluate is not None and bool(self.evaluate.metrics)

    @classmethod
    def load(cls, path: str | Path, changes: list[str] | None = None) -> Job:
        """Read a job file (YAML) and return the job. Relative paths in the file start at the file's
        folder.

        changes  texts KEY=VALUE that set fields, such as train.steps=20

        Raises InputError if the file cannot be read, if it is not a valid job, or if a change is
        not of the form KEY=VALUE.
        """
        content = read_yaml(path)
        for change in changes or []:
            apply_change(content, change)
        if isinstance(content.get("data"), list):  # in Python a list of samples
            raise InputError("job: data", "is a list", "write it like data: {text: python-stdlib}, with one source")
        return cls.parse(with_absolute_paths(content, Path(path).resolve().parent), str(path))

    @property
    def allowed(self) -> frozenset[str]:
        """The options that may change the numerics, such as {"bf16", "tf32"}: the words of `allow`,
        or bf16 if `allow` was left out.

        If bf16 or fp16 is allowed, tf32 is, too, because it is at least as precise. tf32 keeps
        fp32's storage, sums and range. It rounds the factors of products to 10 bits of mantissa,
        as many as fp16 has; bf16 has 7.
        """
        said = frozenset(["bf16"] if self.allow is None else self.allow)
        return said | {"tf32"} if said & {"bf16", "fp16"} else said

    @property
    def of_transformers(self) -> bool:
        """True if transformers creates the model, False if the user's own function creates it."""
        return isinstance(self.model, ModelSpec) and self.model.python is None

    @property
    def blocks_name(self) -> str | None:
        """The name of the model's list of repeated blocks, such as "encoder.layers", as
        `model.blocks` gives it; None if the job does not give it."""
        return self.model.blocks if isinstance(self.model, ModelSpec) else None

    def content(self) -> dict[str, Any]:
        content = super().content()
        return {**content, "model": flat_model(content["model"])}

    def __repr__(self) -> str:
        train = self.train
        length = _counted(train.steps, "step") if train.steps else _counted(train.epochs or 1, "epoch")
        model, data = (
            part if isinstance(part, Value) else (where_defined(part) or {})["python"]
            for part in (self.model, self.data)
        )
        rate = "" if train.uses_function("optimizer") else f" {train.scaled_learning_rate:g}"
        return f"Job({model} on {data}, {train.optimizer_name}{rate}, batch {train.batch}, {length})"

    __str__ = __repr__


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


_SECTIONS: dict[str, type[Value]] = {
    "model": ModelSpec,
    "data": DataSpec,
    "loss": LossSpec,
    "train": Train,
    "evaluate": Evaluation,
    "limits": Limits,
}


def _callbacks(callbacks: Any) -> list[Any] | None:
    """Return the job's list of callbacks, in which a mapping such as {python: "file.py:name"} is
    replaced by a PythonSpec. Return None if `callbacks` is None. Raises InputError if `callbacks`
    is not a list, or if an element is a plain value such as a number."""
    if callbacks is None:
        return None
    if not isinstance(callbacks, list | tuple):
        raise InputError(
            "job: callbacks",
            f"expected a list, found {callbacks!r}",
            'write it like callbacks: [{python: "file.py:MyCallback"}]',
        )
    found = []
    for number, callback in enumerate(callbacks):
        where = f"job: callbacks[{number}]"
        if isinstance(callback, str | int | float | list) or callback is None:
            raise InputError(where, f"expected a mapping, found {callback!r}", 'write {python: "file.py:MyCallback"}')
        found.append(PythonSpec.parse(callback, where) if isinstance(callback, dict) else callback)
    return found


def _check_allow(allow: Any) -> None:
    known = list(get_args(Permission))
    if allow is not None and not isinstance(allow, list | tuple):
        raise InputError(
            f"job: allow: {allow}",
            "is not a list",
            f"write it like allow: [{allow}]" if allow in known else "write it like allow: [bf16]",
        )
    for permission in allow or []:
        if permission not in known:
            raise InputError(f"job: allow: {permission}", "unknown permission", nearest(str(permission), known))


def apply_change(content: dict[str, Any], change: str) -> None:
    """Set one field in a mapping of sections, in place.

    content  the sections, such as {"train": {"batch": 8}}; missing sections are added
    change   KEY=VALUE, such as train.steps=20; the value is read as YAML

    Raises InputError if `change` is not of the form KEY=VALUE, if its value is not valid YAML, or
    if KEY names a field inside something that is not a mapping.
    """
    key, equals, value = change.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise InputError(f"--set {change}", "is not KEY=VALUE", "write it like --set train.steps=20")
    *path, last = key.strip().split(".")
    for part in path:
        inner = content.setdefault(part, {})
        if inner is None:
            inner = content[part] = {}
        if not isinstance(inner, dict):
            raise InputError(
                f"--set {change}",
                f"{part} is {inner!r}, which has no fields",
                f"use --set {part}=VALUE, or write {part} as a mapping in the job file",
            )
        content = inner
    try:
        content[last] = parse_yaml(value)
    except yaml.YAMLError as error:
        raise InputError(
            f"--set {change}",
            f"{value} is not a YAML value ({getattr(error, 'problem', None) or error})",
            f"quote it: --set '{key}=\"{value}\"'",
        ) from None
    check_plain(content[last], f"--set {change}")


__all__ = [
    "DataSpec",
    "Evaluation",
    "Job",
    "Limits",
    "LoraSpec",
    "LossSpec",
    "ModelSpec",
    "ParameterGroup",
    "PythonSpec",
    "SourceSpec",
    "Train",
    "apply_change",
]
