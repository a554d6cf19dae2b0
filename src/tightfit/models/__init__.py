"""Creates models from presets, transformers configs, pretrained folders or the user's own Python
code, and finds their repeated blocks."""

from tightfit.models.blocks import find_blocks, parameter_uses
from tightfit.models.configs import model_config, position_count, text_config, vocabulary_size, with_fewer_blocks
from tightfit.models.create import model_factory
from tightfit.models.functions import has_complex_parameters, is_transformers_model
from tightfit.models.presets import Preset, preset, presets
from tightfit.models.python import load_python
from tightfit.models.tasks import task_of

__all__ = [
    "Preset",
    "find_blocks",
    "has_complex_parameters",
    "is_transformers_model",
    "load_python",
    "model_config",
    "model_factory",
    "parameter_uses",
    "position_count",
    "preset",
    "presets",
    "task_of",
    "text_config",
    "vocabulary_size",
    "with_fewer_blocks",
]
