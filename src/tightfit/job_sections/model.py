"""Defines the section `model` of a job: which model is trained, and its adapters."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tightfit.errors import InputError
from tightfit.job_sections.checks import check_one_source
from tightfit.values import Value, nearest_field

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "classification"]


class LoraSpec(Value):
    """Describes low-rank adapters (LoRA). The model's own weights are frozen, and two small
    matrices are trained beside each chosen linear layer. A classifier's output layer is trained
    whole, because its weights may be new. Needs the library peft.

    The product of an adapter's two matrices, multiplied by alpha / rank, is added to the layer's
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
    modules_to_save: list[str] | None = Field(
        None,
        description="modules that are trained and saved whole, such as [embed_tokens, lm_head]. What a classifier has beside its "
        "base model is always trained",
    )
    dora: bool = Field(False, description="also train the magnitude of each output of a layer (DoRA)")
    quantize: Literal["nf4"] | None = Field(
        None, description="nf4: store the frozen linear layers, all but the output layer, in 4 bits (QLoRA)"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.targets or (isinstance(self.targets, list) and not all(self.targets)):
            raise InputError(
                "job: model.lora.targets",
                f"is {self.targets!r}, which names nothing",
                "use all-linear, or [q_proj, v_proj]",
            )
        if self.modules_to_save is not None and not all(self.modules_to_save):
            raise InputError(
                "job: model.lora.modules_to_save",
                f"is {self.modules_to_save!r}, which contains an empty name",
                "use names of modules, such as [lm_head]",
            )
        if self.dora and self.quantize:
            raise InputError(
                "job: model.lora.dora",
                "needs the full weights, and model.lora.quantize stores them in 4 bits",
                "leave out dora or quantize",
            )
        return self

    def __str__(self) -> str:
        where = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        whole = f", {', '.join(self.modules_to_save)} whole" if self.modules_to_save else ""
        stored = f", frozen layers in 4 bits ({self.quantize})" if self.quantize else ""
        kind = "DoRA" if self.dora else "LoRA"
        return f"{kind} of rank {self.rank}, alpha {self.alpha:g}{dropout} on {where}{whole}{stored}"


class ModelSpec(Value):
    """Describes the model. Exactly one of preset, architecture, from and python must be given. With
    preset or architecture, all keys that are not fields of this class are keys of the model's
    transformers config.

    preset        a name in `tightfit.models.presets`; its sizes are those of the paper or of the
                  published config
    architecture  a transformers model type (llama, gpt2, bert, vit, t5, ...), with its config keys
                  in the same mapping: {architecture: llama, hidden_size: 384}
    from          a local folder with config.json and safetensors files, or the id of a model on the
                  Hugging Face Hub, such as "org/name". Its tokenizer is used, too, unless the data
                  names another
    python        "file.py:function" or "package.module:function"; the function returns an nn.Module
    task          what the model is trained for, such as causal-lm; if left out, the task follows
                  from the model
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
            field, value = next(iter(extra.items()))
            fix = nearest_field(str(field), cls.field_names())
            if content.get("from") and not fix.startswith("did you mean"):
                fix = f"give config keys of a pretrained model as model.config: {{{field}: {value}}}"
            raise InputError(f"job: model.{field}", "unknown field", fix)
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
        check_one_source(
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
        return flat_model(super().content())

    def __str__(self) -> str:
        return self.preset or self.architecture or self.from_ or self.python or ""


def flat_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a model section as job files write it: the keys in its mapping `config`
    are moved up, next to architecture or preset. {preset: gpt2, config: {n_layer: 2}} becomes
    {preset: gpt2, n_layer: 2}.

    If a config key has the name of a ModelSpec field, or if the section has no architecture or
    preset, such a file could not be read back. The section is then returned unchanged.
    """
    config = model.get("config", {})
    if not (model.get("architecture") or model.get("preset")) or {"from_", *ModelSpec.field_names()} & set(config):
        return model
    return {**{name: value for name, value in model.items() if name != "config"}, **config}
