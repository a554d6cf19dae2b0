"""Create models from a ModelSpec (the job's `model`) or from the user's own callable.

The planner calls `model_factory` to create a model of fake tensors, which it traces. The engine
calls it to create the model that it trains. torch and transformers are imported only when a model
is needed. Every mistake in a spec raises InputError. Errors that say that memory ran out are not
turned into InputError, because the spec is not wrong then.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models.presets import preset
from tightfit.models.pretrained import PRETRAINED_FOLDER_FIX, pretrained_folder, read_config
from tightfit.models.pretrained_weights import check_sizes, read_weights
from tightfit.models.python import as_input_error, checked_model_function, load_python
from tightfit.values import nearest

if TYPE_CHECKING:
    from torch import nn

# The task of common model types, so that transformers need not be imported to find it. Other types
# are looked up in transformers' tables.
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
    "T5WithLMHeadModel": "seq2seq-lm",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForImageClassification": "classification",
    "ForImageClassificationWithTeacher": "classification",
    "ForSequenceClassification": "classification",
}
# their heads say which tokens were replaced, and predict no tokens
_DISCRIMINATORS = ("ElectraForPreTraining", "FunnelForPreTraining")
_TRANSFORMERS_TABLES = {
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "causal-lm": "CAUSAL_LM",
    "classification": "IMAGE_CLASSIFICATION",
}
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


def task_of(model: Any) -> str | None:
    """Return the task of a job's model, such as causal-lm: `model.task` if it is set, else the
    usual task of the architecture or of the pretrained model. If a function of the user's own
    creates the model, it is the task of the class of transformers that the function returns, and
    None for any other model.

    Raises InputError for an unknown preset or architecture, for one without any of the tasks, for a
    folder without a readable config.json, and for a pretrained model of a class for another task,
    such as BertForTokenClassification.
    """
    if not isinstance(model, ModelSpec):
        return _task_of_function(model)
    if model.task:
        return model.task
    if model.python:
        return _task_of_function(load_python(model.python))
    if not model.from_:
        return _task_of_architecture(_architecture(model))
    content = read_config(model.from_)
    names = [str(name) for name in content.get("architectures") or []]
    for name in names:
        task = task_of_class(name)
        if task is not None:
            return task
    task = _task_of_architecture(content.get("model_type", ""))
    for name in names:
        if re.search("For[A-Z]", name) and name not in _class_names(task, content["model_type"]):
            raise InputError(
                f"job: model.from={model.from_}",
                f"its model is a {name}, and tightfit has no task for this class",
                f"set model.task, such as {task}, to train its other weights with a new head; or let a function of yours "
                'return the model (model.python), with a loss of your own (loss: {python: "file.py:function"})',
            )
    return task


def task_of_class(name: str) -> str | None:
    """Return the task of a class of transformers, such as causal-lm for "LlamaForCausalLM". None if
    the name does not say it."""
    if name in _DISCRIMINATORS:
        return None
    return next((task for ending, task in _TASK_OF_CLASS.items() if name.endswith(ending)), None)


def _class_names(task: str, architecture: str) -> list[str]:
    """Return the names of the classes of transformers that have this task and model type."""
    from transformers.models.auto import modeling_auto

    names = vars(modeling_auto)[f"MODEL_FOR_{_TRANSFORMERS_TABLES[task]}_MAPPING_NAMES"].get(architecture, ())
    return [names] if isinstance(names, str) else list(names)


_FACTS_OF_FUNCTIONS: WeakKeyDictionary[Any, tuple[str | None, Any]] = WeakKeyDictionary()


def _task_of_function(function: Any) -> str | None:
    """Return the task of the model that a function of the user's own returns, found on fake tensors;
    None if it is no model of transformers, or if it cannot be created on them."""
    return _facts_of_function(function)[0]


def config_of_function(model: Any) -> Any:
    """Return the transformers config of the model that a function of the user's own returns: a
    callable, or a ModelSpec with `python`. None if it is no model of transformers, or if it cannot be
    created on fake tensors."""
    return _facts_of_function(load_python(str(model.python)) if isinstance(model, ModelSpec) else model)[1]


def _facts_of_function(function: Any) -> tuple[str | None, Any]:
    """Return (the task, the config) of the model that a function returns. It is called once."""
    try:
        if function in _FACTS_OF_FUNCTIONS:
            return _FACTS_OF_FUNCTIONS[function]
    except TypeError:  # an object without a hash or without weak references
        return _facts_of_made(function)
    return _FACTS_OF_FUNCTIONS.setdefault(function, _facts_of_made(function))


def _facts_of_made(function: Any) -> tuple[str | None, Any]:
    made: Any = _made_of_fakes(function)
    if made is None or not is_transformers_model(made):
        return None, None
    kinds = [kind.__name__ for kind in type(made).__mro__]
    found = next((task for task in map(task_of_class, kinds) if task is not None), None)
    config: Any = made.config
    if found is None and made.can_generate() and config.is_encoder_decoder:  # T5ForConditionalGeneration
        return "seq2seq-lm", config
    return found, config


def _made_of_fakes(model: Any) -> nn.Module | None:
    """Return the model of a user's own function with fake tensors, or None if it fails on them."""
    from tightfit._torch.fake import FakeTensorMode
    from tightfit.models.caches import isolated_model_caches

    try:
        with isolated_model_caches(), FakeTensorMode():
            return model_factory(model)()
    except InputError:
        return None


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
        config = _pretrained_config(spec, folder)
    else:
        architecture = _architecture(spec)
        kind = _config_class(architecture)
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


def _pretrained_config(spec: ModelSpec, folder: Path) -> Any:
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
        kind = _config_class(architecture)
        guilty = [key for key in spec.config if without(key)]
        if len(guilty) != 1:
            raise
        (key,) = guilty
        default = _defaults(kind).get(kind.attribute_map.get(key, key))
        asked, fix = f"job: model.{key}={spec.config[key]!r}", f"give a value like its default, {default!r}"
        raise InputError(asked, error.found, fix) from error


def text_config(config: Any) -> Any:
    """Return the part of a multimodal model's transformers config that describes its text model.
    Return the config itself if it has no such part, or several. A config of None gives None."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # ValueError: several parts read text
        return config


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
    if types and "layer_types" in _defaults(type(config)):
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


def model_factory(model: Any, sequential: bool = False) -> Callable[[], nn.Module]:
    """Return a function that creates the model on the CPU and in fp32.

    model       a ModelSpec or the user's own callable
    sequential  True reads the tensors of a pretrained folder one by one. False lets transformers'
                threads read several ahead, which takes more memory

    If the returned function is called under torch.device("meta") or FakeTensorMode, the model has
    no values, and the weights of a pretrained folder are not read. Both `model_factory` and the
    returned function raise InputError for a mistake in the spec or the callable.
    """
    make = _make_factory(model, sequential)

    def create() -> nn.Module:
        from tightfit._torch.patches import (
            convertible_fake_modules,
            copyable_fake_tensors,
            without_truncated_normal,
        )

        with ExitStack() as entered:
            if _shapes_only():
                entered.enter_context(without_truncated_normal())
                entered.enter_context(convertible_fake_modules())
                entered.enter_context(copyable_fake_tensors())
            return _switch_off_cache(make())

    return create


def _switch_off_cache(model: nn.Module) -> nn.Module:
    """Switch off the key/value cache of a transformers model, in place, and return the model.
    Training does not read this cache, and a block that is recomputed would append its keys a second
    time."""
    for module in model.modules():
        config: Any = module.config if is_transformers_model(module) else None
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def _make_factory(model: Any, sequential: bool) -> Callable[[], nn.Module]:
    if not isinstance(model, ModelSpec):
        return checked_model_function(model, getattr(model, "__qualname__", type(model).__name__))
    if model.python:
        return checked_model_function(load_python(model.python), model.python)
    if model.from_ and model.config:
        _check_pretrained_sizes(model)

    def create() -> nn.Module:
        config = model_config(model)
        kind = _model_class(model, config)
        made = plain(config, kind)
        if model.lora is None:
            return made
        from tightfit.models.lora import add_adapters

        return add_adapters(made, model, task_of(model))

    def plain(config: Any, kind: Any) -> nn.Module:
        import torch

        if model.from_ and not _shapes_only():
            with (
                as_input_error(f"job: model.from={model.from_}", PRETRAINED_FOLDER_FIX),
                _read_sequentially() if sequential else nullcontext(),
            ):
                return read_weights(model, kind, config, pretrained_folder(model.from_, weights=True))
        with as_input_error(f"job: model ({model})", "change the config keys that the message names"):
            return kind.from_config(config, dtype=torch.float32)

    return create


def _check_pretrained_sizes(model: ModelSpec) -> None:
    """Raise InputError if `model.config` changes the shapes of pretrained tensors."""
    config = model_config(model)
    own = _pretrained_config(model.replace(config={}), pretrained_folder(str(model.from_)))
    asked, fix = f"job: model.config={model.config}", "correct the keys that the message names"
    with as_input_error(asked, fix):
        check_sizes(model, _model_class(model, config), own, config)


@contextmanager
def _read_sequentially() -> Iterator[None]:
    """Inside this context, transformers reads the tensors of a file one by one, and not ahead in
    threads. An environment variable of transformers selects this."""
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
    """Return whether tensors that are created now have no values, because the meta device or
    FakeTensorMode is active."""
    import torch

    probe = torch.empty(0)
    return probe.is_meta or type(probe) is not torch.Tensor


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

    for task, table in _TRANSFORMERS_TABLES.items():
        if architecture in vars(modeling_auto)[f"MODEL_FOR_{table}_MAPPING_NAMES"]:
            return task
    raise InputError(
        f"job: model.architecture={architecture}",
        "transformers has no model of this type for any of the tasks " + ", ".join(_TRANSFORMERS_TABLES),
        "set model.python to a function that returns the model, and give the job its own loss",
    )


def _config_class(architecture: str) -> Any:
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
    known = set(_defaults(kind)) | set(kind.attribute_map) | set(kind.sub_configs) | _COMMON_KEYS
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
    for key, default in _defaults(kind).items():
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


def _defaults(kind: Any) -> dict[str, Any]:
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


def _model_class(spec: ModelSpec, config: Any) -> Any:
    """Return the transformers AutoModel class that creates a model with this config for the spec's
    task, such as AutoModelForCausalLM. Raises InputError if transformers has no such model."""
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
        f"transformers has no {config.model_type} model for this task",
        f"leave out model.task; the task is then {_task_of_architecture(config.model_type)}",
    )


def has_complex_parameters(model: Any) -> bool:
    """Return whether a user's own model has complex parameters. transformers' models have none, so
    the result is False for them.

    The result is also False if the model cannot be created on fake tensors, because its parameters
    are not known then.
    """
    if isinstance(model, ModelSpec) and not model.python:
        return False
    made = _made_of_fakes(model)
    return made is not None and any(parameter.is_complex() for parameter in made.parameters())


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is a transformers PreTrainedModel. This function does not import
    transformers: if nothing else has, the result is False."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
