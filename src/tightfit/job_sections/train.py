"""Defines the section `train` of a job: optimizer, learning-rate schedule, batch and length of the
training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tightfit.errors import InputError
from tightfit.job_sections.python_objects import or_function, word_or_place
from tightfit.job_sections.selection import EarlyStopping, KeepBest
from tightfit.values import Value

OptimizerName = Literal["adamw", "adafactor", "sgd", "lamb", "lars", "lion", "muon"]
ScheduleName = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
WithoutDecay = Literal["norms", "biases", "embeddings"]

READ_BY: dict[str, tuple[str, ...]] = {
    "momentum": ("sgd", "lars", "muon"),
    "betas": ("adamw", "lamb", "lion", "muon"),
    "epsilon": ("adamw", "lamb", "muon"),
    "trust": ("lars",),
    "norm_clamp": ("lamb",),
}  # fields of Train, each with the optimizers that read it


class ParameterGroup(Value):
    """A group of parameters with a learning rate or a weight decay of their own.

    match          a pattern of parameter names, with * and [...] as in a shell: "*.embed_tokens.*",
                   "layers.[01].*"
    learning_rate  the group's learning rate. The schedule scales it by the same factor as the job's
                   learning rate. If left out, the group has the job's learning rate
    weight_decay   the weight decay of all parameters of the group, also of its norms and biases. If
                   left out, the group has the job's weight decay, without the parameters that
                   `train.no_decay` excludes
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
    """Describes how the model is trained: optimizer, learning-rate schedule, batch and length.

    `batch` is the number of samples (sequences) per optimizer step, on all devices together.

    In Python, `optimizer` may be a function that takes the parameters and returns a torch
    optimizer, such as lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3). This function
    sets the learning rate and the weight decay. `schedule` may be a function that takes the step
    and returns a factor of the learning rate, or a function that takes an optimizer and returns one
    of torch's learning-rate schedulers. A job file names such a function by {python:
    "file.py:function"}.
    """

    optimizer: Annotated[OptimizerName, *or_function(OptimizerName)] = "adamw"
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
    schedule: Annotated[ScheduleName, *or_function(ScheduleName)] = "constant"
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
        "auto",
        description="compare a pipeline's stages, or a model of your own that tp or cp divides, with the undivided model "
        "before the first step",
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
        """Raise InputError if a field is set that has no effect, because the user's own function
        takes its place: learning_rate and weight_decay if train.optimizer is a function, warmup and
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

    @property
    def without_effect(self) -> list[str]:
        """One sentence for each field that has a value other than its default, and that the chosen
        optimizer or schedule does not read."""
        unread = [(field, f"train.optimizer={self.optimizer_name}") for field in READ_BY if not self._reads(field)]
        if self.schedule == "constant":
            unread += [("final_learning_rate", "train.schedule=constant")]
        if self.schedule != "warmup-stable-decay":
            unread += [("decay", "any schedule but warmup-stable-decay")]
        if self.scale_learning_rate == "none":
            unread += [("base_batch", "train.scale_learning_rate=none")]
        values = {field: getattr(self, field) for field, _ in unread}
        changed = {field for field, value in values.items() if value != type(self).model_fields[field].default}
        return [
            f"train.{field}={values[field]} has no effect with {reader}" for field, reader in unread if field in changed
        ]

    def _reads(self, field: str) -> bool:
        return not self.uses_function("optimizer") and self.optimizer in READ_BY[field]

    def uses_function(self, field: str) -> bool:
        """Return whether a function of the user takes the place of a name, such as adamw or cosine.

        field  optimizer or schedule
        """
        return not isinstance(getattr(self, field), str)

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name, such as adamw. If the optimizer is a function of the user, the
        function's place in the user's code, such as "module:name"."""
        described = word_or_place(self.optimizer)
        return described if isinstance(described, str) else str(described["python"])

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate multiplied by `rate_scale`, the factor that `scale_learning_rate` asks
        for."""
        return self.learning_rate * self.rate_scale

    @property
    def rate_scale(self) -> float:
        """The factor by which the learning rate is multiplied because of `scale_learning_rate`:
        batch / base_batch for linear (Goyal et al. 2017), the square root of this ratio for sqrt
        (Krizhevsky 2014), and 1 for none."""
        ratio = self.batch / (self.base_batch or self.batch)
        return {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.scale_learning_rate]
