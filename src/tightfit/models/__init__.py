"""Models from presets, transformers configs, pretrained folders or the user's own Python code."""

from tightfit.models.blocks import find_blocks, places_of
from tightfit.models.create import (
    has_complex,
    is_transformers_model,
    model_config,
    model_factory,
    shallow,
    task_of,
    text_config,
    vocabulary_size,
)
from tightfit.models.presets import Preset, preset, presets
from tightfit.models.python import load_python

__all__ = [
    "Preset",
    "find_blocks",
    "has_complex",
    "is_transformers_model",
    "load_python",
    "model_config",
    "model_factory",
    "places_of",
    "preset",
    "presets",
    "shallow",
    "task_of",
    "text_config",
    "vocabulary_size",
]
