"""Presets: the dimensions of published models, by name, such as bert-base.

They are read from presets.yaml, which also has the source and the published number of parameters of
each model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.values import Value, nearest, read_yaml


class Preset(Value):
    """The dimensions of one published model.

    architecture       the model type in transformers, such as "bert"
    config             the model's dimensions, as keys of its transformers config
    parameters         the published number of parameters: exact, or rounded as in the paper
    source             where these figures are from: the paper and table, or the published config
    active_parameters  for a mixture of experts: the published number of parameters that one token
                       uses, rounded; None for other models
    """

    architecture: str
    config: dict[str, Any]
    parameters: int
    source: str
    active_parameters: int | None = None


@functools.cache
def presets() -> dict[str, Preset]:
    """Return all presets, as {name: preset}."""
    content = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: Preset.parse(fields, name) for name, fields in content.items()}


def preset(name: str) -> Preset:
    """Return the preset of this name. Raises InputError, which suggests the nearest name, if there
    is no such preset."""
    if name not in presets():
        raise InputError(f"job: model.preset={name}", "unknown preset", nearest(name, list(presets())))
    return presets()[name]
