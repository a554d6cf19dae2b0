"""Create models from a ModelSpec (the job's `model`) or from the user's own callable.

The planner calls `model_factory` to create a model of fake tensors, which it traces. The engine
calls it to create the model that it trains. torch and transformers are imported only when a model
is needed. Every mistake in a spec raises InputError. Errors that say that memory ran out are not
turned into InputError, because the spec is not wrong then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models.configs import model_config, pretrained_config
from tightfit.models.functions import function_factory, prepared, shapes_only
from tightfit.models.pretrained import PRETRAINED_FOLDER_FIX, pretrained_folder
from tightfit.models.pretrained_weights import check_sizes, read_weights
from tightfit.models.python import as_input_error
from tightfit.models.tasks import task_of, task_of_architecture

if TYPE_CHECKING:
    from torch import nn


def model_factory(model: Any, sequential: bool = False) -> Callable[[], nn.Module]:
    """Return a function that creates the model on the CPU and in fp32.

    model       a ModelSpec or the user's own callable
    sequential  True reads the tensors of a pretrained folder one by one. False lets transformers'
                threads read several ahead, which takes more memory

    If the returned function is called under torch.device("meta") or FakeTensorMode, the model has
    no values, and the weights of a pretrained folder are not read. Both `model_factory` and the
    returned function raise InputError for a mistake in the spec or the callable.
    """
    if not isinstance(model, ModelSpec) or model.python:
        return function_factory(model)
    if model.from_ and model.config:
        _check_pretrained_sizes(model)
    return prepared(partial(_create, model, sequential))


def _create(spec: ModelSpec, sequential: bool) -> nn.Module:
    config = model_config(spec)
    made = _create_plain(spec, config, sequential)
    if spec.lora is None:
        return made
    from tightfit.models.lora import add_adapters

    return add_adapters(made, spec, task_of(spec))


def _create_plain(spec: ModelSpec, config: Any, sequential: bool) -> nn.Module:
    """Create the model of a spec without adapters."""
    import torch

    kind = _model_class(spec, config)
    if spec.from_ and not shapes_only():
        with (
            as_input_error(f"job: model.from={spec.from_}", PRETRAINED_FOLDER_FIX),
            _read_sequentially() if sequential else nullcontext(),
        ):
            return read_weights(spec, kind, config, pretrained_folder(spec.from_, weights=True))
    with as_input_error(f"job: model ({spec})", "change the config keys that the message names"):
        return kind.from_config(config, dtype=torch.float32)


def _check_pretrained_sizes(model: ModelSpec) -> None:
    """Raise InputError if `model.config` changes the shapes of pretrained tensors."""
    config = model_config(model)
    own = pretrained_config(model.replace(config={}), pretrained_folder(str(model.from_)))
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
        f"leave out model.task; the task is then {task_of_architecture(config.model_type)}",
    )
