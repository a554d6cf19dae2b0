"""Presets: published models by name.

Their dimensions are in presets.yaml, with the source and the published parameter count of each
model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.values import Value, nearest, read_yaml


class Preset(Value):
    """One published model.

    architecture  a transformers model type
    config        the model's dimensions, as keys of its transformers config
    parameters    the published number of parameters: exact, or rounded as in the paper
    source        the paper and table, or the published config
    active_parameters  of a mixture of experts: the published number of parameters that one token
                  uses, rounded; None for other models
    """

    architecture: str
    config: dict[str, Any]
    parameters: int
    source: str
    active_parameters: int | None = None


@functools.cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    content = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: Preset.parse(fields, name) for name, fields in content.items()}


def preset(name: str) -> Preset:
    """Return the preset of this name. Raises InputError, which suggests the nearest name, for an
    unknown name."""
    if name not in presets():
        raise InputError(f"job: model.preset={name}", "unknown preset", nearest(name, list(presets())))
    return presets()[name]
