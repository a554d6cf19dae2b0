"""The task of a job's model, such as causal-lm: what it predicts, and so what its loss is."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models.configs import architecture_of, config_class
from tightfit.models.functions import is_transformers_model, made_of_fakes
from tightfit.models.pretrained import read_config
from tightfit.models.python import load_python

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
        return task_of_architecture(architecture_of(model))
    content = read_config(model.from_)
    names = [str(name) for name in content.get("architectures") or []]
    for name in names:
        task = task_of_class(name)
        if task is not None:
            return task
    task = task_of_architecture(content.get("model_type", ""))
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


def _task_of_function(function: Any) -> str | None:
    """Return the task of the model that a function of the user's own returns, found on fake tensors;
    None if it is no model of transformers, or if it cannot be created on them."""
    return _facts_of_function(function).task


def config_of_function(model: Any) -> Any:
    """Return the transformers config of the model that a function of the user's own returns: a
    callable, or a ModelSpec with `python`. None if it is no model of transformers, or if it cannot be
    created on fake tensors."""
    return _facts_of_function(load_python(str(model.python)) if isinstance(model, ModelSpec) else model).config


def classes_of(model: Any) -> tuple[str, ...]:
    """Return the names of the transformers classes that a model is of, the most specific one first, as far
    as its description names them; () for a model that is not of transformers.

    model  a ModelSpec, or a function of the user's own that returns a model
    """
    if isinstance(model, ModelSpec) and not model.python:
        if model.from_:
            return tuple(map(str, read_config(model.from_).get("architectures") or ()))
        return tuple(_class_names(task_of(model) or "", architecture_of(model)))
    return _facts_of_function(load_python(str(model.python)) if isinstance(model, ModelSpec) else model).classes


def is_token_classifier(model: Any) -> bool:
    """Return whether a function of the user's own returns a token classifier of transformers, such as
    BertForTokenClassification.

    model  the function: a callable, or a ModelSpec with `python`
    """
    return any(name.endswith("ForTokenClassification") for name in classes_of(model))


@dataclass(frozen=True)
class _Facts:
    """What is known of the model that a function returns.

    task     its task; None if it is no model of transformers, or if its class does not say it
    config   its transformers config
    classes  the names of its class and of the classes that this is derived from
    """

    task: str | None = None
    config: Any = None
    classes: tuple[str, ...] = ()


_FACTS_OF_FUNCTIONS: WeakKeyDictionary[Any, _Facts] = WeakKeyDictionary()


def _facts_of_function(function: Any) -> _Facts:
    """Return what is known of the model that a function returns. The function is called once."""
    try:
        if function in _FACTS_OF_FUNCTIONS:
            return _FACTS_OF_FUNCTIONS[function]
    except TypeError:  # an object without a hash or without weak references
        return _facts_of_made(function)
    return _FACTS_OF_FUNCTIONS.setdefault(function, _facts_of_made(function))


def _facts_of_made(function: Any) -> _Facts:
    made: Any = made_of_fakes(function)
    if made is None or not is_transformers_model(made):
        return _Facts()
    kinds = tuple(kind.__name__ for kind in type(made).__mro__)
    found = next((task for task in map(task_of_class, kinds) if task is not None), None)
    config: Any = made.config
    if found is None and made.can_generate() and config.is_encoder_decoder:  # T5ForConditionalGeneration
        return _Facts("seq2seq-lm", config, kinds)
    if found == "causal-lm" and not _shifts_labels(type(made)):
        found = None
    return _Facts(found, config, kinds)


def _shifts_labels(kind: type) -> bool:
    """Return whether the forward of a class of transformers shifts the labels of a causal language model
    itself, as its common loss function does. Others, such as BartForCausalLM, compare each output with
    the label at its own place: their labels are those of the next tokens already."""
    code = inspect.unwrap(vars(kind).get("forward") or kind.forward).__code__  # type: ignore[attr-defined]
    return "loss_function" in code.co_names or any("shift" in name for name in code.co_varnames)


def task_of_architecture(architecture: str) -> str:
    if architecture in TASK_OF_ARCHITECTURE:
        return TASK_OF_ARCHITECTURE[architecture]
    config_class(architecture)
    from transformers.models.auto import modeling_auto

    for task, table in _TRANSFORMERS_TABLES.items():
        if architecture in vars(modeling_auto)[f"MODEL_FOR_{table}_MAPPING_NAMES"]:
            return task
    raise InputError(
        f"job: model.architecture={architecture}",
        "transformers has no model of this type for any of the tasks " + ", ".join(_TRANSFORMERS_TABLES),
        "set model.python to a function that returns the model, and give the job its own loss",
    )
