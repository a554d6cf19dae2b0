"""Find out whether a user's own function returns a model of transformers as it is.

Tables of shards and ring attention know the models of transformers. One with another module in it, such as a
norm between two sharded layers, may compute something else when it is divided.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tightfit._torch.modules import has_hooks
from tightfit.job import Job, ModelSpec
from tightfit.models.caches import isolated_model_caches
from tightfit.models.functions import made_of_fakes


def is_unchanged(job: Job) -> bool:
    """Return whether the job trains a model of transformers in which nothing was replaced or wrapped."""
    if job.of_transformers:
        return True
    model = made_of_fakes(job.model)
    return model is not None and _is_as_created(model)


def has_table(job: Job) -> bool:
    """Return whether the user says how the model's modules are sharded."""
    return isinstance(job.model, ModelSpec) and job.model.tensor_parallel is not None


def _is_as_created(model: nn.Module) -> bool:
    kind = type(model)
    if kind.__module__.partition(".")[0] != "transformers" or not hasattr(model, "config"):
        return False
    with isolated_model_caches(), torch.device("meta"):
        fresh = kind(copy.deepcopy(model.config))
    if _kinds(model) != _kinds(fresh):
        return False
    return not any(
        "forward" in vars(module) or has_hooks(module) or _package(module) not in _PACKAGES
        for module in model.modules()
    )


_PACKAGES = ("torch", "transformers")


def _package(module: nn.Module) -> str:
    return type(module).forward.__module__.partition(".")[0]


def _kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


__all__ = ["has_table", "is_unchanged"]
