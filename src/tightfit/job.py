"""Job: what is trained. A job fixes the mathematics. A plan says how the job is fitted to a
machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, WrapValidator, model_validator

from tightfit.errors import InputError
from tightfit.selection import LOSS, Criterion, EarlyStopping, KeepBest
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
Format = Literal["prompt-response", "messages", "alpaca", "sharegpt"]
FORMAT_FIELDS: dict[Format, tuple[str, ...]] = {
    "prompt-response": ("prompt", "response"),
    "messages": ("messages",),
    "alpaca": ("instruction", "input", "output"),
    "sharegpt": ("conversations",),
}  # the fields of a row in each format
OptimizerName = Literal["adamw", "adafactor", "sgd", "lamb", "lars", "lion", "muon"]
ScheduleName = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
WithoutDecay = Literal["norms", "biases", "embeddings"]
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


def _name_or_function(value: Any, by_name: Callable[[Any], Any]) -> Any:
    """Return a function as it is, and the function's place for a mapping such as
    {python: "file.py:function"}. `by_name` checks all other values, which are words."""
    if callable(value) or isinstance(value, PythonSpec):
        return value
    return PythonSpec.parse(value) if isinstance(value, dict) else by_name(value)


def _word_or_place(value: Any) -> Any:
    return value if isinstance(value, str) else _where_defined(value)


def _or_function(words: Any) -> tuple[Any, ...]:
    """Return the annotations of a field that is one of `words` (a Literal) or a function."""
    place = {"type": "object", "properties": {"python": {"type": "string"}}, "required": ["python"]}
    schema = {"anyOf": [{"enum": list(get_args(words)), "type": "string"}, {**place, "additionalProperties": False}]}
    return (
        WrapValidator(_name_or_function),
        PlainSerializer(_word_or_place, when_used="json"),
        WithJsonSchema(schema),
    )


PythonObject = Annotated[
    Any, PlainSerializer(_where_defined), WithJsonSchema({"not": {}, "description": "a Python object, only in Python"})
]


class PythonSpec(Value):
    """A function of the user's: "file.py:function" or "package.module:function"."""

    python: str


class LoraSpec(Value):
    """Low-rank adapters: the model's own weights are frozen, and small matrices beside its linear
    layers are trained. Needs the library peft.

    The product of an adapter's two matrices is multiplied by alpha / rank and added to the layer's
    weight.
    """

    rank: int = Field(16, gt=0, le=2**16, description="inner size of the two matrices of an adapter")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of an adapter's input")
    targets: str | list[str] = Field(
        "all-linear",
        description="which layers get adapters: all-linear (all but the output layer), or names such as [q_proj, v_proj] or "
        'patterns such as "*.mlp.*"',
    )
    dora: bool = Field(False, description="also train the magnitude of each output of a layer (DoRA)")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.targets or (isinstance(self.targets, list) and not all(self.targets)):
            raise InputError(
                "job: model.lora.targets",
                f"is {self.targets!r}, which names nothing",
                "use all-linear, or [q_proj, v_proj]",
            )
        return self

    def __str__(self) -> str:
        where = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{'DoRA' if self.dora else 'LoRA'} of rank {self.rank}, alpha {self.alpha:g}{dropout} on {where}"


class ModelSpec(Value):
    """The model: exactly one of preset, architecture, from, python. Beside preset or architecture,
    every other key is a transformers config key.

    preset        a name in `tightfit.models.presets`; its sizes are those of the paper or of the
                  published config
    architecture  a transformers model type (llama, gpt2, bert, vit, t5, ...), with its config keys
                  in the same mapping: {architecture: llama, hidden_size: 384}
    from          a local folder with config.json and safetensors files, or the id of a model on the
                  Hugging Face Hub, such as "org/name". Its tokenizer is used, too, unless the data
                  names another
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
    lora: LoraSpec | None = Field(
        None, description="train low-rank adapters in place of all weights: {rank: 16, alpha: 32}"
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
        if self.lora is not None and self.python:
            raise InputError(
                "job: model.lora",
                "tightfit adds adapters to models of transformers, and model.python makes its own",
                "leave model.lora out, and return get_peft_model(...) of peft from the function",
            )
        return self

    def content(self) -> dict[str, Any]:
        return _flat(super().content())

    def __str__(self) -> str:
        return self.preset or self.architecture or self.from_ or self.python or ""


class DataSpec(Value):
    """The data: exactly one of text, jsonl, parquet, dataset, images, synthetic, python. The other
    fields say how samples are made from this source.

    With a `format`, rows are conversations for fine-tuning, and only the response counts in the
    loss. Each sequence then holds one conversation (packing: padded), or several that do not attend
    to one another (packing: separate).
    """

    text: str | list[str] | None = Field(None, description="a file, a folder, a glob, or python-stdlib")
    jsonl: str | list[str] | None = None
    parquet: str | list[str] | None = None
    dataset: str | None = Field(None, description="a folder written by datasets.save_to_disk")
    images: str | None = Field(None, description="a folder with one sub-folder per class, or digits")
    synthetic: Literal["tokens", "images"] | None = None
    python: str | None = None
    field: str = "text"
    target_field: str | None = Field(None, description="seq2seq: the field of the target text")
    label_field: str = "label"
    format: Format | None = Field(None, description="what a row of jsonl, parquet or dataset holds for fine-tuning")
    fields: dict[str, str] | None = Field(
        None, description="names of the format's fields in the rows: {prompt: question, response: answer}"
    )
    chat_template: str | None = Field(
        None,
        description="a file with a Jinja template, chatml, or tokenizer: the tokenizer's own, which messages and sharegpt use "
        "by default",
    )
    loss_on: Literal["response", "all"] | Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="with a format: response (the default), all, or the roles whose tokens count in the loss"
    )
    tokenizer: str | None = Field(
        None,
        description="a folder, a tokenizer.json or a model on the Hub; if left out, the tokenizer in the folder of model.from; "
        "without one, a byte-level BPE is trained on the data",
    )
    vocabulary_size: int | None = Field(
        None,
        gt=0,
        description="train a BPE of so many tokens; if left out, a BPE has the size of the model's vocabulary",
    )
    sequence_length: int = Field(256, gt=1, le=2**24)
    target_length: int | None = Field(None, gt=1, le=2**24)
    packing: Literal["packed", "padded", "separate"] = Field(
        "packed",
        description="packed: texts are joined and cut; padded: one text in each sequence; separate: several whole texts in each "
        "sequence, which do not attend to one another. With a format, padded is the default",
    )
    mask_probability: float = Field(0.15, gt=0, lt=1)
    image_size: int | None = Field(None, gt=0)
    samples: int = Field(4096, gt=0, description="how many synthetic samples")
    held_out: float = Field(0.01, ge=0, lt=1, description="share of the samples kept for evaluation")
    skip_damaged: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _exactly_one("data", {name: getattr(self, name) for name in SOURCES})
        return self

    @model_validator(mode="before")
    @classmethod
    def _pad_conversations(cls, content: Any) -> Any:
        """With a format, the default of `packing` is padded."""
        if isinstance(content, dict) and content.get("format") is not None and content.get("packing") is None:
            return {**content, "packing": "padded"}
        return content

    @model_validator(mode="after")
    def _consistent_format(self) -> Self:
        rows = self.jsonl or self.parquet or self.dataset
        if self.packing == "separate" and not (rows or self.text):
            raise InputError(
                "job: data.packing=separate",
                "packs texts, and this data has none",
                "leave out data.packing, or use data.text, data.jsonl, data.parquet or data.dataset",
            )
        if self.format is None:
            for name in ("fields", "chat_template", "loss_on"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"job: data.{name}",
                        "is given without data.format",
                        f"add data.format ({', '.join(FORMAT_FIELDS)}), or leave out data.{name}",
                    )
            return self
        if not rows:
            raise InputError(
                f"job: data.format={self.format}",
                "needs rows with fields",
                "use data.jsonl, data.parquet or data.dataset, or leave out data.format",
            )
        if self.packing == "packed":
            raise InputError(
                "job: data.packing=packed",
                f"cuts texts anywhere, and data.format={self.format} keeps prompts and responses together",
                "use data.packing: separate, or padded",
            )
        known = FORMAT_FIELDS[self.format]
        for name in self.fields or {}:
            if name not in known:
                raise InputError(
                    f"job: data.fields.{name}", f"is no field of the format {self.format}", nearest(name, list(known))
                )
        return self

    def __str__(self) -> str:
        return str(
            self.text
            or self.jsonl
            or self.parquet
            or self.dataset
            or self.images
            or self.python
            or f"synthetic {self.synthetic}"
        )


class ParameterGroup(Value):
    """Parameters with a learning rate or a weight decay of their own.

    match          a pattern of parameter names, as in a shell: "*.embed_tokens.*", "layers.[01].*"
    learning_rate  their full learning rate. It follows the job's schedule in proportion; if left
                   out, it is the job's
    weight_decay   their weight decay, of norms and biases, too; if left out, they have the job's,
                   which `train.no_decay` restricts
    """

    match: str = Field(min_length=1)
    learning_rate: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None:
            raise InputError(
                f"job: train.groups: match={self.match}",
                "gives neither a learning rate nor a weight decay",
                "add learning_rate or weight_decay, or leave the group out",
            )
        return self


class Train(Value):
    """How the model is trained: optimizer, learning-rate schedule, batch and length.

    `batch` is the number of samples (sequences) per optimizer step, on all devices together.

    In Python, `optimizer` may be a function of the parameters that returns a torch optimizer, such
    as lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3). It sets learning rate and weight
    decay. `schedule` may be a function of the step that returns a factor of the learning rate, or a
    function of an optimizer that returns one of torch's learning-rate schedulers. A job file names
    such functions: {python: "file.py:function"}.
    """

    optimizer: Annotated[OptimizerName, *_or_function(OptimizerName)] = "adamw"
    learning_rate: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    no_decay: tuple[WithoutDecay, ...] | None = Field(
        None,
        description="parameters without weight decay: norms, biases, embeddings. The default is [norms, biases]; [] decays all",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="parameters with a learning rate or weight decay of their own; the first group that matches counts",
    )
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
    schedule: Annotated[ScheduleName, *_or_function(ScheduleName)] = "constant"
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
    keep_best: KeepBest | None = Field(
        None, description="keep the checkpoint of the best evaluation, beside the newest keep_checkpoints ones"
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="end the training when an evaluation metric stops improving"
    )
    check_split: Literal["auto", "always", "never"] = Field(
        "auto", description="compare a pipeline's stages with the undivided model before the first step"
    )
    expert_imbalance: float = Field(
        1.0,
        ge=1,
        description="mixtures of experts, for predictions: tokens of the busiest expert divided by the mean over all "
        "experts; 1 spreads the tokens evenly",
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
        self._check_functions()
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise InputError(
                "job: train.betas", f"{list(self.betas)} lies outside [0, 1)", "use two numbers such as [0.9, 0.95]"
            )
        return self

    def _check_functions(self) -> None:
        """Raise InputError if a field is set that has no effect, because the user's own function takes
        its place: learning_rate and weight_decay if train.optimizer is a function, warmup and
        final_learning_rate if train.schedule is a function."""
        replaced: dict[str, tuple[tuple[str, str], ...]] = {
            "optimizer": (
                ("learning_rate", "set lr in the function that creates the optimizer"),
                ("weight_decay", "set weight_decay in the function that creates the optimizer"),
            ),
            "schedule": (
                ("warmup", "let the schedule's function warm up"),
                ("final_learning_rate", "let the schedule's function decay"),
            ),
        }
        for name, fields in replaced.items():
            if not self.uses_function(name):
                continue
            for field, fix in fields:
                value = getattr(self, field)
                if value != type(self).model_fields[field].default:
                    raise InputError(
                        f"job: train.{field}={value}", f"has no effect, because train.{name} is a function", fix
                    )

    def uses_function(self, field: str) -> bool:
        """Whether the optimizer or the schedule is a function of the user, and not one of
        tightfit's by its name."""
        return not isinstance(getattr(self, field), str)

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name; for a function its place in the user's code."""
        place = _word_or_place(self.optimizer)
        return place if isinstance(place, str) else str(place["python"])

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate after `scale_learning_rate`."""
        return self.learning_rate * self.rate_scale

    @property
    def rate_scale(self) -> float:
        """What `scale_learning_rate` multiplies the learning rate by: batch / base_batch if linear
        (Goyal et al. 2017), the square root of this ratio if sqrt (Krizhevsky 2014)."""
        ratio = self.batch / (self.base_batch or self.batch)
        return {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.scale_learning_rate]


class LossSpec(PythonSpec):
    """The job's own loss: "file.py:function" or "package.module:function". The function takes and
    returns what `Job.loss` describes."""


class PythonFunction(Value):
    """A function, class or object of the user: "file.py:name" or "package.module:name"."""

    python: str


class Evaluation(Value):
    """When a training is evaluated, on which data, and with which metrics besides the loss.

    data     a DataSpec (or its mapping), or a map-style dataset. Fields that its mapping leaves out
             are those of the job's data, such as sequence_length. If data is left out, the
             evaluation uses the share `data.held_out` of the job's data
    every    evaluate after every so many steps; the same as train.evaluate_every
    samples  how many samples an evaluation uses, at most. If left out: all samples of `data`, or
             train.evaluate_samples of the held-out ones
    metrics  name -> a torchmetrics.Metric, a pair (torchmetrics.Metric, function), or a callable;
             in a job file {python: "file.py:name"}
             A callable `metric(outputs, batch)` returns the mean over the samples of `batch`, a
             number or a dict of numbers. An evaluation weights it by the number of samples, so
             every sample counts once
             A Metric gets `update(predictions, targets)`. For the default loss of a task, these are
             the logits (items, classes) and the labels (items,) of the items that count; for other
             losses, the model's output and the batch's labels. With a pair, it gets
             `update(*function(outputs, batch))`
    """

    data: DataSpec | PythonObject = None
    every: int | None = Field(None, gt=0, description="evaluate after every so many steps")
    samples: int | None = Field(None, gt=0, description="most samples of an evaluation")
    metrics: dict[str, PythonFunction | PythonObject] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = dict(content)
        if isinstance(content.get("data"), dict):
            content["data"] = DataSpec.parse(content["data"], "job: evaluate.data")
        _refuse_plain(content, "data", "{jsonl: evaluation.jsonl}", "evaluate.data")
        metrics = content.get("metrics")
        if metrics is None:
            content.pop("metrics", None)
        elif not isinstance(metrics, dict):
            raise InputError(
                "job: evaluate.metrics",
                f"expected a mapping from names to metrics, found {metrics!r}",
                'write it like metrics: {accuracy: {python: "file.py:accuracy"}}',
            )
        else:
            content["metrics"] = {str(name): _metric(str(name), metric) for name, metric in metrics.items()}
        return content


def _metric(name: str, metric: Any) -> Any:
    """Return a metric, parsed if it is a mapping. Raises InputError if it is no metric."""
    where = f"job: evaluate.metrics.{name}"
    if name == LOSS or not name:
        raise InputError(
            where, "is the name of the evaluation loss" if name else "has no name", "give the metric another name"
        )
    if isinstance(metric, dict):
        return PythonFunction.parse(metric, where)
    if not isinstance(metric, PythonFunction | tuple) and not callable(metric):
        raise InputError(
            where, f"expected a metric, found {metric!r}", 'give a function, or in a job file {python: "file.py:name"}'
        )
    return metric


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
    callbacks: list[PythonFunction | PythonObject] | None = None
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
        _refuse_plain(content, "evaluate", "{every: 100}")
        content["evaluate"] = _with_fields_of(content.get("evaluate"), content["data"])
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
        """Check the fields of `train` and `evaluate` that depend on each other."""
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

    @property
    def evaluate_every(self) -> int | None:
        """The number of steps between evaluations; None if the job never evaluates."""
        own = self.evaluate.every if self.evaluate else None
        return own if own is not None else self.train.evaluate_every

    @property
    def evaluate_samples(self) -> int | None:
        """The largest number of samples of an evaluation; None for all samples of the evaluation's
        own data."""
        if self.evaluate is not None and (self.evaluate.samples is not None or self.evaluate.data is not None):
            return self.evaluate.samples
        return self.train.evaluate_samples

    @property
    def has_metrics(self) -> bool:
        """Whether evaluations compute metrics from the model's outputs, besides the loss."""
        return self.evaluate is not None and bool(self.evaluate.metrics)

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
SOURCES = ("text", "jsonl", "parquet", "dataset", "images", "synthetic", "python")  # of a DataSpec


def _with_fields_of(evaluate: Any, data: Any) -> Any:
    """Return an Evaluation whose data has the fields of the job's data that it does not set itself.

    evaluate, data  the job's `evaluate` and `data`; returned unchanged unless both are specs
    """
    own = evaluate.data if isinstance(evaluate, Evaluation) else None
    if not isinstance(own, DataSpec) or not isinstance(data, DataSpec):
        return evaluate
    shared = {name: value for name, value in data if name not in (*SOURCES, *own.model_fields_set)}
    return evaluate.replace(data=own.replace(**shared))


def _callbacks(callbacks: Any) -> list[Any] | None:
    """Return the job's callbacks, parsed where they are mappings. Raises InputError."""
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
        found.append(PythonFunction.parse(callback, where) if isinstance(callback, dict) else callback)
    return found


def _refuse_plain(content: dict[str, Any], name: str, example: str, asked: str = "") -> None:
    """Raise InputError if section `name` is a word, a number or (except for data) a list.

    asked  the section's full name; `name` if empty
    """
    section = content.get(name)
    if isinstance(section, str | int | float) or (isinstance(section, list) and name != "data"):
        raise InputError(
            f"job: {asked or name}", f"expected a mapping, found {section!r}", f"write it like {name}: {example}"
        )


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
    """Set one field in a mapping of sections, in place. Raises InputError if `change` is not of the
    form KEY=VALUE, or if its value is not valid YAML.

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


def is_hub_id(text: str) -> bool:
    """Return whether `text` can be the id of a model on the Hugging Face Hub: "name" or
    "org/name"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text) is not None and not text.endswith(".json")


def _absolute(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a job file's content whose relative paths are absolute. A name that no file
    has, and that can be the id of a model on the Hub, stays as it is.

    folder  the folder of the job file, where relative paths start
    """

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        return str(folder / expand_path(text)) if isinstance(text, str) and text else text

    def python(text: Any) -> Any:
        return path(text) if isinstance(text, str) and ".py:" in text else text

    def hub(name: str, text: Any) -> bool:
        known = name in ("from", "tokenizer") and isinstance(text, str) and is_hub_id(text)
        return known and not (folder / expand_path(text)).exists()

    words = {"text": ["python-stdlib"], "images": ["digits"], "chat_template": ["chatml", "tokenizer"]}
    sources = ["text", "jsonl", "parquet", "dataset", "images", "tokenizer", "chat_template"]

    def section(fields: Any, names: list[str]) -> Any:
        if not isinstance(fields, dict):
            return fields
        named = [n for n in names if n in fields and fields[n] not in words.get(n, []) and not hub(n, fields[n])]
        changed = {n: path(fields[n]) for n in named}
        if "python" in fields:
            changed["python"] = python(fields["python"])
        return {**fields, **changed}

    for name, names in {"model": ["from"], "data": sources, "loss": []}.items():
        if name in content:
            content = {**content, name: section(content[name], names)}
    evaluate, callbacks = content.get("evaluate"), content.get("callbacks")
    if isinstance(evaluate, dict):
        evaluate = dict(evaluate)
        if "data" in evaluate:
            evaluate["data"] = section(evaluate["data"], sources)
        if isinstance(evaluate.get("metrics"), dict):
            evaluate["metrics"] = {key: section(metric, []) for key, metric in evaluate["metrics"].items()}
        content = {**content, "evaluate": evaluate}
    if isinstance(callbacks, list):
        content = {**content, "callbacks": [section(callback, []) for callback in callbacks]}
    train = content.get("train")
    if isinstance(train, dict):
        functions = {name: train[name] for name in ("optimizer", "schedule") if isinstance(train.get(name), dict)}
        places = {name: {**one, "python": python(one.get("python"))} for name, one in functions.items()}
        content = {**content, "train": {**train, **places}}
    return content
