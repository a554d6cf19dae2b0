"""Job: what is trained. A job fixes the mathematics. A plan says how the job is fitted to a
machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

from tightfit.errors import InputError
from tightfit.units import parse_bytes
from tightfit.values import Value, nearest, nearest_field, read_yaml
from tightfit.yaml_input import check_plain, parse_yaml

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "classification"]
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
OptimizerName = Literal["adamw", "adafactor", "sgd", "lamb", "lars", "lion", "muon"]
ScheduleName = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def _where_defined(thing: Any) -> dict[str, str] | None:
    """Return the mapping that a job file gets for a Python object that stands in place of a
    section.

    A top-level function or class becomes {python: "module:name"}, which a job file can name. Any
    other object becomes a description such as "<a list of 4 made in Python>"; reading such a file
    raises an error.
    """
    if thing is None or isinstance(thing, Value):
        return None if thing is None else thing.content()
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and name.isidentifier():
        script = getattr(sys.modules.get(module), "__file__", None) if module == "__main__" else None
        return {"python": f"{Path(script).resolve() if script else module}:{name}"}
    size = f" of {len(thing)}" if isinstance(thing, Sized) else ""
    return {"python": f"<a {type(thing).__qualname__}{size} made in Python>"}


PythonObject = Annotated[
    Any, PlainSerializer(_where_defined), WithJsonSchema({"not": {}, "description": "a Python object, only in Python"})
]


class ModelSpec(Value):
    """The model: exactly one of preset, architecture, from, python. Beside preset or architecture,
    every other key is a transformers config key.

    preset        a name in `tightfit.models.presets`; its sizes are those of the paper or of the
                  published config
    architecture  a transformers model type (llama, gpt2, bert, vit, t5, ...), with its config keys
                  in the same mapping: {architecture: llama, hidden_size: 384}
    from          a local folder with config.json and safetensors files
    python        "file.py:function" or "package.module:function", which returns an nn.Module
    task          what is trained, such as causal-lm; if left out, the task follows from the model
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    preset: str | None = None
    architecture: str | None = None
    from_: str | None = Field(None, alias="from")
    python: str | None = None
    task: Task | None = None
    blocks: str | None = Field(
        None,
        description="name of the list of repeated blocks, such as transformer.h; needed only if tightfit does not find it",
    )
    tensor_parallel: dict[str, str] | None = Field(
        None, description="how tp shards which modules: {blocks.*.up: colwise, blocks.*.down: rowwise}"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="transformers config keys")

    @model_validator(mode="before")
    @classmethod
    def _gather_config(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            raise InputError(
                "job: model",
                f"expected a mapping, found {content!r}",
                "write {preset: gpt2} or {architecture: llama, ...}",
            )
        own = set(cls.field_names()) | {"from_"}
        extra = {key: value for key, value in content.items() if key not in own}
        if not extra:
            return content
        if not (content.get("architecture") or content.get("preset")):
            field = next(iter(extra))
            raise InputError(f"job: model.{field}", "unknown field", nearest_field(str(field), cls.field_names()))
        kept = {key: value for key, value in content.items() if key in own}
        config = content.get("config") or {}
        if not isinstance(config, dict):
            raise InputError(
                "job: model.config",
                f"expected a mapping of config keys, found {config!r}",
                "write config: {hidden_size: 384}, or put the keys directly under model, next to architecture",
            )
        return {**kept, "config": {**config, **extra}}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _exactly_one(
            "model",
            {"preset": self.preset, "architecture": self.architecture, "from": self.from_, "python": self.python},
        )
        return self

    def content(self) -> dict[str, Any]:
        return _flat(super().content())

    def __str__(self) -> str:
        return self.preset or self.architecture or self.from_ or self.python or ""


class SourceSpec(Value):
    """One of several sources of text: exactly one of text, jsonl, parquet, dataset.

    weight  how often samples of this source are drawn, in proportion to the weights of the other
            sources. Example: with the weights 3 and 1, 3 of 4 training samples are of the first
            source, whatever the sizes of the sources
    field, target_field, label_field  as in DataSpec, if this source names its fields differently
    """

    weight: float = Field(1.0, gt=0)
    text: str | list[str] | None = None
    jsonl: str | list[str] | None = None
    parquet: str | list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    field: str | None = None
    target_field: str | None = None
    label_field: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _exactly_one("data.sources", {name: getattr(self, name) for name in _SOURCE_NAMES})
        _check_split("data.sources", self)
        return self

    def __str__(self) -> str:
        return str(self.text or self.jsonl or self.parquet or self.dataset)


class DataSpec(Value):
    """The data: exactly one of text, jsonl, parquet, dataset, sources, images, synthetic, python.
    The other fields say how samples are made from this source.

    sources  several sources of text, whose samples are drawn in proportion to their weights. All
             other fields of the data hold for each of the sources
    """

    text: str | list[str] | None = Field(None, description="a file, a folder, a glob, or python-stdlib")
    jsonl: str | list[str] | None = None
    parquet: str | list[str] | None = None
    dataset: str | None = Field(
        None,
        description="a folder written by datasets.save_to_disk, a folder of data files, or a data set of the hub: owner/name",
    )
    subset: str | None = Field(None, description="dataset: the name of a subset (config) of the data set")
    split: str | None = Field(None, description="dataset: the split; the default is train")
    sources: tuple[SourceSpec, ...] | None = Field(
        None, description="several sources of text, drawn by weight: [{jsonl: a, weight: 3}, {jsonl: b, weight: 1}]"
    )
    images: str | None = Field(None, description="a folder with one sub-folder per class, or digits")
    synthetic: Literal["tokens", "images"] | None = None
    python: str | None = None
    field: str = "text"
    target_field: str | None = Field(None, description="seq2seq: the field of the target text")
    label_field: str = "label"
    tokenizer: str | None = Field(
        None, description="a folder or tokenizer.json; if left out, a byte-level BPE is trained on the data"
    )
    vocabulary_size: int | None = Field(
        None, gt=0, description="number of tokens of the trained BPE; if left out, the size of the model's vocabulary"
    )
    sequence_length: int = Field(256, gt=1, le=2**24)
    target_length: int | None = Field(None, gt=1, le=2**24)
    packing: Literal["packed", "padded"] = "packed"
    mask_probability: float = Field(0.15, gt=0, lt=1)
    image_size: int | None = Field(None, gt=0)
    samples: int = Field(4096, gt=0, description="how many synthetic samples")
    held_out: float = Field(0.01, ge=0, lt=1, description="share of the samples kept for evaluation")
    skip_damaged: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        names = ("text", "jsonl", "parquet", "dataset", "sources", "images", "synthetic", "python")
        _exactly_one("data", {name: getattr(self, name) for name in names})
        _check_split("data", self)
        for source in self.sources or ():
            if source.target_field is not None and self.target_field is None:
                raise InputError(
                    f"job: data.sources: target_field={source.target_field}",
                    "the sources without a field of their own have no target text",
                    f"set data.target_field: {source.target_field}, which holds for all sources",
                )
        return self

    def parts(self) -> list[DataSpec]:
        """Return a DataSpec for each of the sources, with the other fields of this one. Without
        `sources`, return only this DataSpec."""
        return [
            self.replace(sources=None, **{n: v for n, v in source if n != "weight" and v is not None})
            for source in self.sources or ()
        ] or [self]

    def __str__(self) -> str:
        return str(
            self.text
            or self.jsonl
            or self.parquet
            or self.dataset
            or ", ".join(map(str, self.sources or ()))
            or self.images
            or self.python
            or f"synthetic {self.synthetic}"
        )


class Train(Value):
    """How the model is trained: optimizer, learning-rate schedule, batch and length.

    `batch` is the number of samples (sequences) per optimizer step, on all devices together.
    """

    optimizer: OptimizerName = "adamw"
    learning_rate: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = Field(1e-8, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    trust: float = Field(
        1e-3,
        gt=0,
        description="LARS: the trust coefficient, the length of a layer's update as a fraction of its weights' norm",
    )
    norm_clamp: tuple[float, float] | None = Field(
        None, description="LAMB: the smallest and the largest weight norm that the trust ratio is computed with"
    )
    schedule: ScheduleName = "constant"
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: float = Field(
        0.2,
        gt=0,
        le=1,
        description="warmup-stable-decay: the final fraction of the steps, in which the learning rate decays",
    )
    final_learning_rate: float = Field(
        0.0, ge=0, le=1, description="learning rate at the end of the schedule, as a fraction of learning_rate"
    )
    batch: int = Field(32, gt=0)
    steps: int | None = Field(None, gt=0)
    epochs: float | None = Field(None, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    clip: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    base_batch: int | None = Field(None, gt=0, description="the batch for which learning_rate was chosen")
    checkpoint_every: Annotated[int, Field(gt=0)] | Literal["end", "never"] | None = Field(
        None,
        description="a number: save after every so many steps and at the end; end (the default): only at the end; never: no "
        "checkpoint, not even if a signal ends the training",
    )
    keep_checkpoints: int = Field(2, gt=0)
    evaluate_every: int | None = Field(None, gt=0)
    evaluate_samples: int = Field(128, gt=0)
    check_split: Literal["auto", "always", "never"] = Field(
        "auto", description="compare a pipeline's stages with the undivided model before the first step"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise InputError(
                "job: train.steps and train.epochs",
                f"both given ({self.steps} and {self.epochs:g})",
                "keep the one that should end the training",
            )
        if self.steps is not None and self.warmup > self.steps:
            raise InputError(
                "job: train.warmup",
                f"{self.warmup} steps of warm-up in a training of {self.steps}",
                f"use a warmup of at most {self.steps}",
            )
        if self.scale_learning_rate != "none" and self.base_batch is None:
            raise InputError(
                f"job: train.scale_learning_rate={self.scale_learning_rate}",
                "no batch to scale from",
                "add train.base_batch, the batch that learning_rate was chosen for",
            )
        if self.norm_clamp is not None and not 0 <= self.norm_clamp[0] <= self.norm_clamp[1]:
            raise InputError(
                "job: train.norm_clamp",
                f"{list(self.norm_clamp)} are not two norms, the smaller one first",
                "use two numbers such as [0, 10]",
            )
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise InputError(
                "job: train.betas", f"{list(self.betas)} lies outside [0, 1)", "use two numbers such as [0.9, 0.95]"
            )
        return self

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate after `scale_learning_rate`: multiplied by batch / base_batch if linear
        (Goyal et al. 2017), by the square root of this ratio if sqrt (Krizhevsky 2014)."""
        ratio = self.batch / (self.base_batch or self.batch)
        return self.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.scale_learning_rate]


class LossSpec(Value):
    """The job's own loss: "file.py:function" or "package.module:function". The function takes and
    returns what `Job.loss` describes."""

    python: str


class Limits(Value):
    """The most that a run may use of device memory, host memory and disk, in bytes or as text such
    as '24GiB'."""

    memory: Bytes | None = None
    host_memory: Bytes | None = None
    disk: Bytes | None = None


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
    limits the most memory and disk that a run may use
    plan   the plan fields that the job fixes (pins), such as {micro_batch: 8}, or the word
           reference
    """

    model: ModelSpec | PythonObject
    data: DataSpec | PythonObject
    loss: LossSpec | PythonObject = None
    train: Train = Train()
    allow: list[Permission] | None = Field(None, description="what may change the numerics; the default is [bf16]")
    limits: Limits = Limits()
    plan: dict[str, Any] | Literal["reference"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, content: Any) -> Any:
        """Parse the sections one by one, so that an error names the section that is wrong."""
        if not isinstance(content, dict):
            return content
        content = dict(content)
        for name, kind in _SECTIONS.items():
            if isinstance(content.get(name), dict):
                content[name] = kind.parse(content[name], f"job: {name}")
        for name, example in (("model", "{preset: gpt2}"), ("data", "{text: python-stdlib}")):
            if content.get(name) is None:
                raise InputError(f"job: {name}", "is needed", f"add a section such as {name}: {example}")
            _refuse_plain(content, name, example)
        _refuse_plain(content, "loss", '{python: "file.py:function"}')
        _check_allow(content.get("allow"))
        if isinstance(content.get("plan"), str) and content["plan"] != "reference":
            raise InputError(
                f"job: plan={content['plan']}",
                "is neither a mapping of a plan's fields nor the word reference",
                "write it like {micro_batch: 8}, or name a plan's file with --plan",
            )
        return content

    @classmethod
    def load(cls, path: str | Path, changes: list[str] | None = None) -> Job:
        """Read a job file. Relative paths in it start at the file's folder. Raises InputError.

        changes  KEY=VALUE texts that replace fields, such as train.steps=20
        """
        content = read_yaml(path)
        for change in changes or []:
            apply_change(content, change)
        if isinstance(content.get("data"), list):  # in Python a list of samples
            raise InputError("job: data", "is a list", "write it like data: {text: python-stdlib}, with one source")
        return cls.parse(_absolute(content, Path(path).resolve().parent), str(path))

    @property
    def allowed(self) -> frozenset[str]:
        """What may change the numerics: the words of `allow`, or bf16 if `allow` was left out.

        A 16-bit type allows tf32, too: tf32 keeps fp32's storage, sums and range, and rounds the
        factors of products to 10 bits of mantissa, as fp16 does, while bf16 keeps 7.
        """
        said = frozenset(["bf16"] if self.allow is None else self.allow)
        return said | {"tf32"} if said & {"bf16", "fp16"} else said

    @property
    def of_transformers(self) -> bool:
        """Whether transformers builds the model, and not a function of the user."""
        return isinstance(self.model, ModelSpec) and self.model.python is None

    @property
    def blocks_name(self) -> str | None:
        """`model.blocks`, the name of the list of repeated blocks; None if the job does not give
        it."""
        return self.model.blocks if isinstance(self.model, ModelSpec) else None

    def content(self) -> dict[str, Any]:
        content = super().content()
        return {**content, "model": _flat(content["model"])}

    def __repr__(self) -> str:
        train = self.train
        length = _counted(train.steps, "step") if train.steps else _counted(train.epochs or 1, "epoch")
        model, data = (
            part if isinstance(part, Value) else (_where_defined(part) or {})["python"]
            for part in (self.model, self.data)
        )
        return (
            f"Job({model} on {data}, {train.optimizer} {train.scaled_learning_rate:g}, batch {train.batch}, {length})"
        )

    __str__ = __repr__


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


_SOURCE_NAMES = ("text", "jsonl", "parquet", "dataset")  # of a SourceSpec
_SECTIONS: dict[str, type[Value]] = {
    "model": ModelSpec,
    "data": DataSpec,
    "loss": LossSpec,
    "train": Train,
    "limits": Limits,
}


def _refuse_plain(content: dict[str, Any], name: str, example: str) -> None:
    """Raise InputError if section `name` is a word, a number or (except for data) a list."""
    section = content.get(name)
    if isinstance(section, str | int | float) or (isinstance(section, list) and name != "data"):
        raise InputError(f"job: {name}", f"expected a mapping, found {section!r}", f"write it like {name}: {example}")


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


def _exactly_one(section: str, sources: dict[str, Any]) -> None:
    given = [name for name, value in sources.items() if value is not None]
    for name in given:
        if not sources[name]:
            raise InputError(
                f"job: {section}.{name}",
                f"is {sources[name]!r}, which names nothing",
                f"give {section}.{name} a value, or leave it out",
            )
    if len(given) != 1:
        found = "gives none of its sources" if not given else f"gives {' and '.join(given)}"
        raise InputError(f"job: {section}", found, f"give exactly one of: {', '.join(sources)}")


def _check_split(section: str, data: DataSpec | SourceSpec) -> None:
    for name in ("subset", "split"):
        if data.dataset is None and getattr(data, name) is not None:
            raise InputError(
                f"job: {section}.{name}", f"is given without {section}.dataset", f"leave out {section}.{name}"
            )


def _flat(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model section with its config keys directly under model, next to architecture or
    preset, as job files write them.

    Returns the section unchanged if a config key has the name of a ModelSpec field, or if the model
    has no architecture or preset: such a file could not be read back.
    """
    config = model.get("config", {})
    if not (model.get("architecture") or model.get("preset")) or {"from_", *ModelSpec.field_names()} & set(config):
        return model
    return {**{name: value for name, value in model.items() if name != "config"}, **config}


def apply_change(content: dict[str, Any], change: str) -> None:
    """Set one field in a mapping of sections, in place. Raises InputError.

    content  such as {"train": {"batch": 8}}; missing sections are added
    change   KEY=VALUE, such as train.steps=20; the value is read as YAML
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
                "name a section: model, data, train, limits or plan",
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


def is_hub_name(text: str) -> bool:
    """Return whether `text` can be the name of a data set of the Hugging Face hub: owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def is_url(text: str) -> bool:
    """Return whether `text` is a URL such as s3://bucket/file, and not a path."""
    return re.match(r"[A-Za-z][\w+.-]*://", text) is not None


def expand_path(text: str) -> Path:
    """Return `text` as a path, with ~ replaced by the home folder. Raises InputError for the home
    of an unknown user and for text that cannot be a path."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"path {text}", f"cannot be a path ({said})", "check how it is written") from None
    return path


def _absolute(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a job file's content whose relative paths are absolute.

    folder  the folder of the job file, where relative paths start
    """

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if not isinstance(text, str) or not text or is_url(text):
            return text
        return str(folder / expand_path(text))

    def python(text: Any) -> Any:
        return path(text) if isinstance(text, str) and ".py:" in text else text

    def absolute(fields: Any, names: Iterable[str]) -> Any:
        if not isinstance(fields, dict):
            return fields  # a wrong value, which parsing refuses
        given = {name: fields[name] for name in names if name in fields and fields[name] not in words.get(name, [])}
        if is_hub_dataset(given.get("dataset")):
            given.pop("dataset")
        return {**fields, **{name: path(value) for name, value in given.items()}}

    def is_hub_dataset(text: Any) -> bool:
        return isinstance(text, str) and is_hub_name(text) and not (folder / text).exists()

    words = {"text": ["python-stdlib"], "images": ["digits"]}
    paths = {"model": ["from"], "data": ["text", "jsonl", "parquet", "dataset", "images", "tokenizer"], "loss": []}
    for section, names in paths.items():
        fields = content.get(section)
        if isinstance(fields, dict):
            changed = absolute(fields, names)
            if "python" in fields:
                changed["python"] = python(fields["python"])
            if section == "data" and isinstance(fields.get("sources"), list):
                changed["sources"] = [absolute(source, _SOURCE_NAMES) for source in fields["sources"]]
            content = {**content, section: {**fields, **changed}}
    return content
