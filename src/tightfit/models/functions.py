"""Create models by functions of the user's own, and find out what they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models.python import checked_model_function, load_python

if TYPE_CHECKING:
    from torch import nn


def prepared(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that creates a model with `make`, switches off its key/value cache, and works
    without values, too: under torch.device("meta") and FakeTensorMode."""

    def create() -> nn.Module:
        from tightfit._torch.fake import active_fake_mode
        from tightfit._torch.patches import (
            convertible_fake_modules,
            copyable_fake_tensors,
            without_truncated_normal,
        )
        from tightfit.models.known_values import KnownValues

        with ExitStack() as entered:
            if shapes_only():
                if active_fake_mode() is not None:
                    entered.enter_context(KnownValues())
                entered.enter_context(without_truncated_normal())
                entered.enter_context(convertible_fake_modules())
                entered.enter_context(copyable_fake_tensors())
            return _switch_off_cache(make())

    return create


def function_factory(model: Any) -> Callable[[], nn.Module]:
    """Return a function that creates the model of a user's own function, with errors that say what is
    wrong with it.

    model  the function, or a ModelSpec with `python`

    Raises InputError if there is no such function.
    """
    if isinstance(model, ModelSpec):
        return prepared(checked_model_function(load_python(str(model.python)), str(model.python)))
    return prepared(checked_model_function(model, getattr(model, "__qualname__", type(model).__name__)))


def made_of_fakes(model: Any) -> nn.Module | None:
    """Return the model of a user's own function with fake tensors, or None if it fails on them."""
    from tightfit._torch.fake import FakeTensorMode
    from tightfit.models.caches import isolated_model_caches

    try:
        with isolated_model_caches(), FakeTensorMode(allow_non_fake_inputs=True):
            return function_factory(model)()
    except InputError:
        return None


def has_complex_parameters(model: Any) -> bool:
    """Return whether a user's own model has complex parameters. transformers' models have none, so
    the result is False for them.

    The result is also False if the model cannot be created on fake tensors, because its parameters
    are not known then.
    """
    if isinstance(model, ModelSpec) and not model.python:
        return False
    made = made_of_fakes(model)
    return made is not None and any(parameter.is_complex() for parameter in made.parameters())


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is a transformers PreTrainedModel. This function does not import
    transformers: if nothing else has, the result is False."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def shapes_only() -> bool:
    """Return whether tensors that are created now have no values, because the meta device or
    FakeTensorMode is active."""
    import torch

    probe = torch.empty(0)
    return probe.is_meta or type(probe) is not torch.Tensor


def _switch_off_cache(model: nn.Module) -> nn.Module:
    """Switch off the key/value cache of a transformers model, in place, and return the model.
    Training does not read this cache, and a block that is recomputed would append its keys a second
    time."""
    for module in model.modules():
        config: Any = module.config if is_transformers_model(module) else None
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model
