"""The transformers config of a ModelSpec (the job's `model`).

Every mistake in a spec raises InputError. transformers is imported only when a config is needed.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models.presets import preset
from tightfit.models.pretrained import pretrained_folder, read_config
from tightfit.models.python import as_input_error
from tightfit.values import nearest

# config keys that every model type accepts, although its config class does not define them
_COMMON_KEYS = {
    "num_labels",
    "torch_dtype",
    "attn_implementation",
    "experts_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "tie_word_embeddings",
    "use_cache",
}
# older config keys, which rope_parameters replaces
_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def model_config(spec: ModelSpec) -> Any:
    """Return the transformers config of a ModelSpec. Its key/value cache is switched off, because
    training does not need it. Return None for a model from the user's Python code.

    Raises InputError for unknown config keys, for values that transformers refuses, and for numbers
    of heads that do not divide the hidden size.
    """
    if spec.python:
        return None
    if spec.from_:
        read_config(spec.from_)
        folder = pretrained_folder(spec.from_)
        if "trust_remote_code" in spec.config:
            raise InputError(
                "job: model.trust_remote_code",
                "tightfit never runs code that comes with a model's folder",
                'use a function of your own that returns the model: {python: "file.py:function"}',
            )
        _check_pretrained_keys(spec)
        config = pretrained_config(spec, folder)
    else:
        architecture = architecture_of(spec)
        kind = config_class(architecture)
        keys = _config_keys(spec, kind)
        _check_heads(spec, kind, keys)
        config = _make_config(spec, architecture, keys)
    if getattr(config, "use_cache", False):
        # training reads no key/value cache, and some models warn if recompute is on too
        config.use_cache = False
    if getattr(config, "architectures", None) is None:
        config.architectures = []  # transformers looks through it for types with several classes (DeiT)
    # some configs do not have these fields, and some have no pad_token_id
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def pretrained_config(spec: ModelSpec, folder: Path) -> Any:
    """Return the transformers config of a pretrained folder, with the keys of `model.config`. Raises InputError if
    transformers cannot read it."""
    import transformers

    with as_input_error(f"job: model.from={folder}", "correct the config.json in this folder"):
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **spec.config
        )


def _check_pretrained_keys(spec: ModelSpec) -> None:
    """Raise InputError for a key of `model.config` that neither the config class nor the config.json
    of a pretrained model has. transformers would silently ignore it."""
    import transformers

    content = read_config(str(spec.from_))
    if content.get("model_type") not in transformers.CONFIG_MAPPING:
        return  # transformers says what is wrong
    kind = transformers.CONFIG_MAPPING[content["model_type"]]
    known = _known_keys(kind) | set(content)
    for key in spec.config:
        if key not in known and not _reads_undeclared(kind, key):
            raise InputError(
                f"job: model.config.{key}", f"{kind.model_type} has no such config key", nearest(key, sorted(known))
            )


def _make_config(spec: ModelSpec, architecture: str, keys: dict[str, Any]) -> Any:
    """Return the transformers config of an architecture with the config keys `keys`: those of the
    preset and of the user, who gave the keys in `spec.config`.

    Raises InputError if transformers refuses the keys. The error blames a single key of the user if
    the config is valid without this key, and there is no other such key.
    """
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
        with as_input_error(f"job: model ({spec})", "change the config keys that the message names"):
            return transformers.AutoConfig.for_model(architecture, **keys)
    except InputError as error:
        kind = config_class(architecture)
        guilty = [key for key in spec.config if without(key)]
        if len(guilty) != 1:
            raise
        (key,) = guilty
        default = config_defaults(kind).get(kind.attribute_map.get(key, key))
        asked, fix = f"job: model.{key}={spec.config[key]!r}", f"give a value like its default, {default!r}"
        raise InputError(asked, error.found, fix) from error


def text_config(config: Any) -> Any:
    """Return the part of a multimodal model's transformers config that describes its text model.
    Return the config itself if it has no such part, or several. A config of None gives None."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # ValueError: several parts read text
        return config


def position_count(config: Any) -> int | None:
    """Return how many positions of text a model has, by its transformers config. Return None if it has any
    number (XLNet's config says -1), or if the config does not say."""
    found = getattr(text_config(config), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def with_fewer_blocks(model: Any, blocks: int) -> ModelSpec | None:
    """Return the spec of the same transformers model with only `blocks` blocks (transformer
    layers).

    Return None if this is not possible, for one of these reasons:

    - The model is the user's own or pretrained.
    - Its config lists several types of layers (layer_types) or stages (depths), has no
      num_hidden_layers, or does not take another one: EfficientNet computes it, and GPT-Neo lists
      the kinds of its layers.
    - Its adapters are for named layers only.
    - It has no more than `blocks` blocks.
    """
    if not isinstance(model, ModelSpec) or model.python or model.from_:
        return None
    if model.lora is not None and model.lora.targets != "all-linear":  # a target may name some blocks
        return None
    config = model_config(model)
    depth, types = getattr(config, "num_hidden_layers", None), getattr(config, "layer_types", None)
    if not isinstance(depth, int) or depth <= blocks or len(set(types or [None])) > 1 or hasattr(config, "depths"):
        return None
    fewer: dict[str, Any] = {"num_hidden_layers": blocks}
    if types and "layer_types" in config_defaults(type(config)):
        fewer["layer_types"] = types[:blocks]
    few = model.replace(config={**model.config, **fewer})
    try:
        return few if model_config(few).num_hidden_layers == blocks else None
    except InputError:
        return None


def vocabulary_size(spec: ModelSpec) -> int | None:
    """Return the number of tokens in the vocabulary of a transformers model. Return None for a
    vision model, and for a model from the user's Python code."""
    config = model_config(spec)
    return None if config is None else getattr(text_config(config), "vocab_size", None)


def architecture_of(spec: ModelSpec) -> str:
    """Return the model type of a spec with an architecture or a preset, such as "llama"."""
    if spec.preset:
        return preset(spec.preset).architecture
    assert spec.architecture is not None
    return spec.architecture


def config_class(architecture: str) -> Any:
    """Return transformers' config class for a model type, such as "gpt2". Raises InputError, which
    suggests the nearest model type, if transformers does not have this type."""
    import transformers

    known = transformers.CONFIG_MAPPING
    if architecture not in known:
        near = difflib.get_close_matches(architecture.lower(), list(known), 1, 0.5)
        raise InputError(
            f"job: model.architecture={architecture}",
            "transformers has no such model type",
            f"did you mean {near[0]!r}?" if near else "use a model type such as llama, gpt2, bert, t5 or vit",
        )
    return known[architecture]


def _known_keys(kind: Any) -> set[str]:
    """Return the config keys that a transformers config class accepts."""
    known = set(config_defaults(kind)) | set(kind.attribute_map) | set(kind.sub_configs) | _COMMON_KEYS
    return known | _ROPE_KEYS if "rope_parameters" in known else known


def _reads_undeclared(kind: Any, key: str) -> bool:
    """Return whether the code of a model reads a config key that its config class `kind` does not
    declare. Example: Qwen3-MoE reads `getattr(config, "head_dim", ...)`, and published models set it."""
    folder = Path(inspect.getfile(kind)).parent
    return any(f'getattr(config, "{key}"' in path.read_text() for path in folder.glob("modeling_*.py"))


def _config_keys(spec: ModelSpec, kind: Any) -> dict[str, Any]:
    """Return the config keys of a model with their values: those of the spec's preset, overridden
    by those in `spec.config`. Their names are those that the config class uses; for example, GPT-2
    stores hidden_size as n_embd.

    kind: transformers' config class. Raises InputError for a key that the class does not have.
    """
    known = _known_keys(kind)
    for key in spec.config:
        if key not in known and not _reads_undeclared(kind, key):
            raise InputError(
                f"job: model.{key}", f"{kind.model_type} has no such config key", nearest(key, sorted(known))
            )
    base = preset(spec.preset).config if spec.preset else {}
    stored = [{kind.attribute_map.get(key, key): value for key, value in keys.items()} for keys in (base, spec.config)]
    keys = stored[0] | stored[1]
    _merge_rope_keys(keys)
    vocabulary = keys.get("vocab_size")
    # the default special tokens belong to the published vocabulary; a smaller vocabulary does not
    # contain those with a larger id
    for key, default in config_defaults(kind).items():
        of_token = key.endswith("_token_id") and isinstance(default, int)
        if of_token and isinstance(vocabulary, int) and 0 < vocabulary <= default:
            keys.setdefault(key, None)
    return keys


def _merge_rope_keys(keys: dict[str, Any]) -> None:
    """Move the older config keys of rotary embeddings (rope_theta, ...) into the dict
    rope_parameters, in place, if `keys` has this dict. transformers would silently ignore the older
    keys."""
    rope = keys.get("rope_parameters")
    if isinstance(rope, dict):
        scaling = keys.pop("rope_scaling", None)
        if scaling is not None:
            rope = {"rope_theta": rope.get("rope_theta"), **scaling}
        keys["rope_parameters"] = rope | {key: keys.pop(key) for key in sorted(_ROPE_KEYS & set(keys))}


def config_defaults(kind: Any) -> dict[str, Any]:
    """Return the keys that a transformers config class and its parents accept, as {key: default
    value}."""
    defaults: dict[str, Any] = {}
    for parent in reversed(kind.__mro__[:-1]):
        defaults |= {
            name: value.default
            for name, value in inspect.signature(parent.__init__).parameters.items()
            if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY) and name != "self"
        }
    return defaults


def _check_heads(spec: ModelSpec, kind: Any, keys: dict[str, Any]) -> None:
    """Raise InputError if the sizes in a config cannot work. transformers accepts some of these
    configs, and their first forward fails. The error is raised if

    - a size is below 1,
    - the number of heads does not divide the hidden size, and the config has no head_dim,
    - the number of key/value heads does not divide the number of heads,
    - heads with rotary embeddings have an odd size.

    kind  transformers' config class
    keys  the config keys with their values; missing ones have the defaults of the class
    """
    defaults = config_defaults(kind)

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
            refuse(name, "is less than 1", "1 or more")
    hidden, heads = value("hidden_size"), value("num_attention_heads")
    groups = value("num_key_value_heads")
    if hidden and heads and not value("head_dim") and hidden % heads:
        refuse("num_attention_heads", f"does not divide the hidden size {hidden}", _nearest_divisor(hidden, heads))
    if hidden and heads and not value("head_dim") and "rope_parameters" in defaults and hidden // heads % 2:
        refuse(
            "num_attention_heads",
            f"makes heads of size {hidden // heads}, and rotary embeddings need an even size",
            _nearest_divisor(hidden // 2, heads),
        )
    if heads and groups and heads % groups:
        refuse("num_key_value_heads", f"does not divide the {heads} attention heads", _nearest_divisor(heads, groups))


def _nearest_divisor(number: int, wanted: int) -> str:
    return str(min((d for d in range(1, number + 1) if number % d == 0), key=lambda divisor: abs(divisor - wanted)))
