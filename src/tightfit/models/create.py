"""Models made from a ModelSpec or the user's own callable. torch and transformers are imported when one is needed.

Every mistake in a spec comes back as an InputError; running out of memory does not, as no spec is wrong then.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.job import ModelSpec, expanded
from tightfit.models.presets import preset
from tightfit.models.python import as_input_error, load_python, returning_module
from tightfit.values import nearest

if TYPE_CHECKING:
    from torch import nn

# transformers' model types whose task needs no import to be known; the others are looked up in its tables
TASK_OF_ARCHITECTURE = {
    **dict.fromkeys(
        (
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "gptj",
            "opt",
            "bloom",
            "falcon",
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "phi",
            "phi3",
        ),
        "causal-lm",
    ),
    **dict.fromkeys(("bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert"), "masked-lm"),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "pegasus", "marian"), "seq2seq-lm"),
    **dict.fromkeys(("vit", "deit", "swin", "beit", "dinov2", "resnet", "convnext"), "classification"),
}
_TASK_OF_CLASS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForImageClassification": "classification",
    "ForSequenceClassification": "classification",
}
_TABLE_OF_TASK = {
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "causal-lm": "CAUSAL_LM",
    "classification": "IMAGE_CLASSIFICATION",
}
# keys that every config takes although they are no field of its class
_COMMON_KEYS = {
    "num_labels",
    "torch_dtype",
    "attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "tie_word_embeddings",
    "use_cache",
}
_WRITE_IT = "name a folder with config.json and safetensors, as transformers' save_pretrained writes it"
_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # how rope_parameters was written before


def task_of(model: Any) -> str | None:
    """The task of a ModelSpec: what it says, or what its architecture is for. None for the user's own callables.

    Raises InputError for an unknown preset or architecture, or a folder without a readable config.json.
    """
    if not isinstance(model, ModelSpec):
        return None
    if model.task or model.python:
        return model.task
    if not model.from_:
        return _task_of_architecture(_architecture(model))
    content = _read_config(expanded(model.from_))
    for name in content.get("architectures") or []:
        for ending, task in _TASK_OF_CLASS.items():
            if name.endswith(ending):
                return task
    return _task_of_architecture(content.get("model_type", ""))


def model_config(spec: ModelSpec) -> Any:
    """The transformers config of a ModelSpec, without a cache of keys and values; None for python callables.

    Raises InputError for unknown keys and impossible dimensions.
    """
    if spec.python:
        return None
    import transformers

    if spec.from_:
        folder = expanded(spec.from_)
        _read_config(folder)
        if "trust_remote_code" in spec.config:
            raise InputError(
                "job: model.trust_remote_code",
                "code that comes with a model's folder is never run",
                'name code of your own that makes the model: {python: "file.py:function"}',
            )
        with as_input_error(f"job: model.from={folder}", "mend its config.json"):
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **spec.config
            )
    else:
        architecture = _architecture(spec)
        kind = _config_class(architecture)
        keys = _config_keys(spec, kind)
        _check_heads(spec, kind, keys)
        config = _config_of(spec, architecture, keys)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # training reads no cache, and some models warn when one meets recompute
    is_pair = getattr(
        config, "is_encoder_decoder", False
    )  # of encoder and decoder; not every config says so, nor how it pads
    if is_pair and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _config_of(spec: ModelSpec, architecture: str, keys: dict[str, Any]) -> Any:
    """The config of these keys. Raises InputError that names the key without which it could be, where there is one such."""
    import transformers

    def without(key: str) -> bool:
        left = {name: value for name, value in keys.items() if name != kind.attribute_map.get(key, key)}
        try:
            with as_input_error("", ""):
                transformers.AutoConfig.for_model(architecture, **left)
        except InputError:
            return False
        return True

    try:
        with as_input_error(f"job: model ({spec})", "change the config keys it names"):
            return transformers.AutoConfig.for_model(architecture, **keys)
    except InputError as error:
        kind = _config_class(architecture)
        guilty = [key for key in spec.config if without(key)]
        if len(guilty) != 1:
            raise
        (key,) = guilty
        default = _defaults(kind).get(kind.attribute_map.get(key, key))
        asked, fix = f"job: model.{key}={spec.config[key]!r}", f"give a value like its default, {default!r}"
        raise InputError(asked, error.found, fix) from error


def text_config(config: Any) -> Any:
    """The part of a config that is about text, of a model of several kinds of input too; the config itself where there is none."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # several parts read text
        return config


def shallow(model: Any, blocks: int) -> ModelSpec | None:
    """One of transformers' models with fewer blocks, where one number says how many it has and all are alike; None where not."""
    if not isinstance(model, ModelSpec) or model.python or model.from_:
        return None
    config = model_config(model)
    depth, alike = getattr(config, "num_hidden_layers", None), not getattr(config, "layer_types", None)
    if alike and isinstance(depth, int) and depth > blocks:
        return model.replace(config={**model.config, "num_hidden_layers": blocks})
    return None


def vocabulary_size(spec: ModelSpec) -> int | None:
    """How many tokens the model knows; None for vision models and python callables."""
    config = model_config(spec)
    return None if config is None else getattr(text_config(config), "vocab_size", None)


def model_factory(model: Any, sequential: bool = False) -> Callable[[], nn.Module]:
    """How a ModelSpec or the user's own callable is created the usual way: on the CPU, in fp32.

    sequential  tensors of a pretrained folder are read one by one, each when its turn comes, and not ahead by threads

    Under torch.device("meta") or FakeTensorMode only shapes are made, of pretrained folders too: no weights are read.
    """
    make = _factory(model, sequential)

    def create() -> nn.Module:
        with _without_values() if _shapes_only() else nullcontext():
            return _without_cache(make())

    return create


def _without_cache(model: nn.Module) -> nn.Module:
    """transformers' models fill a cache of keys and values as they run. Training reads none; a block that is computed again would
    add its keys a second time."""
    for module in model.modules():
        config: Any = module.config if is_transformers_model(module) else None
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def _factory(model: Any, sequential: bool) -> Callable[[], nn.Module]:
    if not isinstance(model, ModelSpec):
        return returning_module(model, getattr(model, "__qualname__", type(model).__name__))
    if model.python:
        return returning_module(load_python(model.python), model.python)

    def create() -> nn.Module:
        import torch

        config = model_config(model)
        kind = _model_class(model, config)
        if model.from_ and not _shapes_only():
            with (
                as_input_error(f"job: model.from={model.from_}", _WRITE_IT),
                _read_sequentially() if sequential else nullcontext(),
            ):
                return kind.from_pretrained(
                    model.from_,
                    config=config,
                    dtype=torch.float32,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                )
        with as_input_error(f"job: model ({model})", "change the config keys it names"):
            return kind.from_config(config, dtype=torch.float32)

    return create


@contextmanager
def _read_sequentially() -> Iterator[None]:
    """transformers' own switch against threads that read tensors ahead of the ones that are placed."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        os.environ.pop(switch)
        if before is not None:
            os.environ[switch] = before


def _shapes_only() -> bool:
    """Whether tensors created now hold no values."""
    import torch

    probe = torch.empty(0)
    return probe.is_meta or type(probe) is not torch.Tensor


@contextmanager
def _without_values() -> Iterator[None]:
    """torch's trunc_normal_ looks at the values that it drew; here there are none, so it draws nothing."""
    from torch.nn import init

    drawn = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = drawn


def _architecture(spec: ModelSpec) -> str:
    if spec.preset:
        return preset(spec.preset).architecture
    assert spec.architecture is not None
    return spec.architecture


def _task_of_architecture(architecture: str) -> str:
    if architecture in TASK_OF_ARCHITECTURE:
        return TASK_OF_ARCHITECTURE[architecture]
    _config_class(architecture)
    from transformers.models.auto import modeling_auto

    for task, table in _TABLE_OF_TASK.items():
        if architecture in vars(modeling_auto)[f"MODEL_FOR_{table}_MAPPING_NAMES"]:
            return task
    raise InputError(
        f"job: model.architecture={architecture}",
        "is for none of the tasks " + ", ".join(_TABLE_OF_TASK),
        "give a python callable that returns the model, and a loss",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a pretrained folder."""
    asked = f"job: model.from={folder}"
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*/")], 1)
        raise InputError(
            asked,
            "is a file" if folder.exists() else "no such folder",
            f"did you mean {folder.parent / near[0]}?" if near else _WRITE_IT,
        )
    try:
        content = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise InputError(asked, "has no config.json", _WRITE_IT) from None
    except ValueError as error:
        raise InputError(asked, f"its config.json is not JSON ({error})", _WRITE_IT) from None
    if not isinstance(content, dict):
        raise InputError(asked, "its config.json holds no mapping", _WRITE_IT)
    return content


def _config_class(architecture: str) -> Any:
    """transformers' config class of a model type. Raises InputError with the nearest model type."""
    import transformers

    known = transformers.CONFIG_MAPPING
    if architecture not in known:
        near = difflib.get_close_matches(architecture.lower(), list(known), 1, 0.5)
        raise InputError(
            f"job: model.architecture={architecture}",
            "transformers has no such model type",
            f"did you mean {near[0]!r}?" if near else "use one such as llama, gpt2, bert, t5 or vit",
        )
    return known[architecture]


def _config_keys(spec: ModelSpec, kind: Any) -> dict[str, Any]:
    """The preset's keys with the spec's own over them, under the names the config class stores them by."""
    known = set(_defaults(kind)) | set(kind.attribute_map) | set(kind.sub_configs) | _COMMON_KEYS
    if "rope_parameters" in known:
        known |= _ROPE_KEYS
    for key in spec.config:
        if key not in known:
            raise InputError(
                f"job: model.{key}", f"{kind.model_type} has no such config key", nearest(key, sorted(known))
            )
    base = preset(spec.preset).config if spec.preset else {}
    stored = [{kind.attribute_map.get(key, key): value for key, value in keys.items()} for keys in (base, spec.config)]
    keys = stored[0] | stored[1]
    _join_rope(keys)
    vocabulary = keys.get("vocab_size")
    for key, default in _defaults(kind).items():  # special tokens of the published vocabulary, which this one has not
        of_token = key.endswith("_token_id") and isinstance(default, int)
        if of_token and isinstance(vocabulary, int) and 0 < vocabulary <= default:
            keys.setdefault(key, None)
    return keys


def _join_rope(keys: dict[str, Any]) -> None:
    """Write rotary embeddings in one way: where both are given, transformers silently reads rope_parameters only."""
    rope = keys.get("rope_parameters")
    if isinstance(rope, dict):
        scaling = keys.pop("rope_scaling", None)
        if scaling is not None:
            rope = {"rope_theta": rope.get("rope_theta"), **scaling}
        keys["rope_parameters"] = rope | {key: keys.pop(key) for key in sorted(_ROPE_KEYS & set(keys))}


def _defaults(kind: Any) -> dict[str, Any]:
    """The config class's own keys and their defaults, those of its parents included."""
    defaults: dict[str, Any] = {}
    for parent in reversed(kind.__mro__[:-1]):
        defaults |= {
            name: value.default
            for name, value in inspect.signature(parent.__init__).parameters.items()
            if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY) and name != "self"
        }
    return defaults


def _check_heads(spec: ModelSpec, kind: Any, keys: dict[str, Any]) -> None:
    """Refuse widths and heads that do not divide: transformers accepts some of them and fails in the first forward."""
    defaults = _defaults(kind)

    def value(name: str) -> int | None:
        key = kind.attribute_map.get(name, name)
        found = keys.get(key, defaults.get(key))
        return found if isinstance(found, int) else None

    def refuse(name: str, found: str, fix: str) -> None:
        key = kind.attribute_map.get(name, name)
        raise InputError(f"job: model.{key}={value(name)}", found, f"use {key}: {fix}")

    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        size = value(name)
        if size is not None and size < 1:
            refuse(name, "is not a size", "1 or more")
    hidden, heads = value("hidden_size"), value("num_attention_heads")
    groups = value("num_key_value_heads")
    if hidden and heads and not value("head_dim") and hidden % heads:
        refuse("num_attention_heads", f"does not divide the hidden size {hidden}", _nearest_divisor(hidden, heads))
    if hidden and heads and not value("head_dim") and "rope_parameters" in defaults and hidden // heads % 2:
        refuse(
            "num_attention_heads",
            f"makes heads of {hidden // heads}, and rotary embeddings turn pairs",
            _nearest_divisor(hidden // 2, heads),
        )
    if heads and groups and heads % groups:
        refuse("num_key_value_heads", f"does not divide the {heads} attention heads", _nearest_divisor(heads, groups))


def _nearest_divisor(number: int, wanted: int) -> str:
    return str(min((d for d in range(1, number + 1) if number % d == 0), key=lambda divisor: abs(divisor - wanted)))


def _model_class(spec: ModelSpec, config: Any) -> Any:
    """The transformers class that makes the spec's task of this config."""
    import transformers

    task = task_of(spec)
    kinds = {
        "causal-lm": ["AutoModelForCausalLM"],
        "masked-lm": ["AutoModelForMaskedLM"],
        "seq2seq-lm": ["AutoModelForSeq2SeqLM"],
        "classification": ["AutoModelForImageClassification", "AutoModelForSequenceClassification"],
    }
    for name in kinds[task or "classification"]:
        kind = getattr(transformers, name)
        if type(config) in kind._model_mapping:
            return kind
    raise InputError(
        f"job: model.task={task}",
        f"transformers has no model of {config.model_type} for it",
        f"leave it out: the task is then {_task_of_architecture(config.model_type)}",
    )


def has_complex(model: Any) -> bool:
    """Whether a model of the user's own has complex parameters; no other has. One that cannot be created on tensors without
    values has none as far as is known."""
    if isinstance(model, ModelSpec) and not model.python:
        return False
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tightfit.models.caches import tensors_kept_out

    try:
        with tensors_kept_out(), FakeTensorMode():
            return any(parameter.is_complex() for parameter in model_factory(model)().parameters())
    except InputError:
        return False


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers', which is not imported to know it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
