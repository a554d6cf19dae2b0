"""Architectures of transformers whose depth is no key of their config, and all that classify images, are estimated."""

from __future__ import annotations

from typing import Any

import pytest

import tightfit
from tests.zoo.architectures import tiny
from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.machine import Machine
from tightfit.models import with_fewer_blocks
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import estimate
from tightfit.planner.tracing.repeated_blocks import FEW_BLOCKS

GPU = Machine.named("a100-80gb")
# each has more blocks than a trace needs, or takes no number of them
IMAGES: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 5], "num_groups": 2},
    "convnext": {"hidden_sizes": [8, 16], "depths": [2, 5], "num_stages": 2, "patch_size": 4},
    "deit": {"num_hidden_layers": 6},
    "efficientnet": {"width_coefficient": 0.25, "hidden_dim": 320, "image_size": 64},
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [16] * 3,
        "num_attention_heads": [2] * 3,
        "key_dim": [8] * 3,
        "depths": [2] * 3,
        "drop_path_rate": 0,
    },
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 5], "groups_width": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 5], "layer_type": "basic"},
    "swin": {"embed_dim": 8, "depths": [2, 6], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "vit": {"num_hidden_layers": 6},
}
TEXTS: dict[str, dict[str, Any]] = {
    "falcon_mamba": {"num_hidden_layers": 6},
    "gpt_neo": {"num_layers": 6, "attention_types": [[["global", "local"], 3]]},
    "mamba": {"num_hidden_layers": 6},
    "mamba2": {"num_hidden_layers": 6, "num_heads": 4, "head_dim": 16, "n_groups": 2},
}
# those that do not classify images alone, or cannot be created on fake tensors, with the default config
OTHERS = {
    "dinat": "natten",  # a package
    "imagegpt": "input_ids",  # reads colours as tokens
    "pp_lcnet": "no logits",
    "shieldgemma2": "input_ids",  # reads text, too
    "siglip2": "fails on fake tensors",  # reads patches
    "timm_wrapper": "timm",  # a package
}


def estimated(model: dict[str, Any], data: dict[str, Any]) -> Estimate:
    job = tightfit.Job(model=model, data=data, train=tightfit.Train(batch=2, steps=1))
    return estimate(job, tightfit.Plan(), GPU)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("architecture", IMAGES)
def test_models_of_images_are_estimated(architecture: str) -> None:
    model = tiny(architecture, IMAGES[architecture])
    assert estimated(model, {"synthetic": "images", "image_size": model.get("image_size", 32)}).peak_bytes > 0


@pytest.mark.sweep(8)
@pytest.mark.parametrize("architecture", TEXTS)
def test_models_of_text_with_kinds_of_layers_are_estimated(architecture: str) -> None:
    model = tiny(architecture, TEXTS[architecture])
    assert estimated(model, {"synthetic": "tokens", "sequence_length": 16}).ledger.blocks == 6


@pytest.mark.parametrize(("architecture", "fewer"), [("efficientnet", False), ("gpt_neo", False), ("mamba", True)])
def test_only_some_configs_take_a_number_of_blocks(architecture: str, fewer: bool) -> None:
    assert (with_fewer_blocks(ModelSpec(architecture=architecture), FEW_BLOCKS) is not None) is fewer


def image_architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", image_architectures())
def test_every_architecture_that_classifies_images_is_estimated(architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[architecture]()
    sizes = [getattr(one, "image_size", None) for one in (config, getattr(config, "vision_config", None))]
    size: Any = next((one for one in sizes if one), 224)
    model = {"architecture": architecture, "task": "classification", "num_labels": 10}
    data = {"synthetic": "images", "image_size": size if isinstance(size, int) else size[0]}
    if architecture in OTHERS:
        with pytest.raises(InputError, match=OTHERS[architecture]):
            estimated(model, data)
    else:
        assert estimated(model, data).peak_bytes > 0
