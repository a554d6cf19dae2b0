"""Images are processed as by the image processor in the folder of a pretrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.data.conftest import make_job
from tightfit.data import model_input, open_samples
from tightfit.data.image_processing import PROCESSOR_FILE, default_processing, pretrained_processing
from tightfit.errors import InputError

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE = {"size": {"height": 8, "width": 8}}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, shape in (("cats", (12, 20, 3)), ("dogs", (21, 14, 3))):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(tmp_path / "pets" / name / "0.png")
    return tmp_path / "pets"


def write_model(folder: Path, processor: dict[str, Any] | None) -> dict[str, str]:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(folder)
    if processor is not None:
        (folder / PROCESSOR_FILE).write_text(json.dumps(processor))
    return {"from": str(folder)}


@pytest.mark.parametrize(
    "processor",
    [
        {"image_processor_type": "ViTImageProcessor", **SQUARE, **IMAGENET, "resample": 3},
        {"image_processor_type": "ViTImageProcessor", **SQUARE, "do_normalize": False},
        {
            "image_processor_type": "ViTImageProcessor",
            **SQUARE,
            "do_rescale": False,
            "image_mean": 127.5,
            "image_std": 60.0,
        },
        {"image_processor_type": "ViTImageProcessor", **SQUARE, "rescale_factor": 1 / 127.5},
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 8, **IMAGENET},
        {"image_processor_type": "DeiTImageProcessor", "size": {"height": 10, "width": 10}, "crop_size": 8},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 11}, "crop_size": 8},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 8}, "crop_pct": 0.875},
    ],
    ids=lambda one: " ".join(map(str, one.values())),
)
def test_pixels_are_those_of_the_processor(processor: dict[str, Any], tmp_path: Path, pets: Path) -> None:
    model = write_model(tmp_path / "model", processor)
    samples: Any = open_samples(make_job(model, {"images": str(pets)}))
    found = samples.batch(np.array([0, 1]), np.array([0, 0]))["pixel_values"]
    own = AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    images = [Image.open(pets / name / "0.png") for name in ("cats", "dogs")]
    expected = own(images=images, return_tensors="pt")["pixel_values"].float()
    assert found.shape == (2, 3, 8, 8)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert samples.processing.content == processor


@pytest.mark.parametrize(
    ("processor", "found"),
    [
        ({"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 16}}, "does more than to resize"),
        ({"image_processor_type": "EfficientNetImageProcessor", "include_top": True}, "does more than to resize"),
        ({"image_processor_type": "MobileViTImageProcessor"}, "does more than to resize"),
        ({"image_processor_type": "ViTImageProcessor", "do_resize": False}, "does more than to resize"),
        ({"image_processor_type": "MyImageProcessor"}, "cannot be used"),
    ],
    ids=lambda one: str(one),
)
def test_processors_that_do_more_are_refused(processor: dict[str, Any], found: str, tmp_path: Path, pets: Path) -> None:
    model = write_model(tmp_path / "model", processor)
    with pytest.raises(InputError) as caught:
        open_samples(make_job(model, {"images": str(pets)}))
    assert found in caught.value.found
    assert caught.value.asked.endswith(PROCESSOR_FILE)
    assert "data.python" in caught.value.fix


def test_without_a_file_pixels_are_from_minus_1_to_1(tmp_path: Path, pets: Path) -> None:
    samples: Any = open_samples(make_job(write_model(tmp_path / "model", None), {"images": str(pets)}))
    assert samples.processing == default_processing(8, 3)
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(samples.processing.content))
    assert pretrained_processing(tmp_path, 3) == default_processing(8, 3)


def test_the_size_is_the_job_s_or_the_processor_s(tmp_path: Path, pets: Path) -> None:
    """A ResNet takes any size, and its folder's processor crops."""
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    content = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 10}, "crop_size": 8}
    (tmp_path / "model" / PROCESSOR_FILE).write_text(json.dumps(content))
    model = {"from": str(tmp_path / "model")}
    own: Any = open_samples(make_job(model, {"images": str(pets)}))
    assert own[0]["pixel_values"].shape == (3, 8, 8)
    larger: Any = open_samples(make_job(model, {"images": str(pets), "image_size": 16}))
    assert larger[0]["pixel_values"].shape == (3, 16, 16)
    assert larger.processing.content == {**content, "size": {"shortest_edge": 20}, "crop_size": 16}
    vit = write_model(
        tmp_path / "vit", {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    )
    assert model_input(make_job(vit, {"images": str(pets)})).image_size == 16
    with pytest.raises(InputError, match="takes images of 16"):
        open_samples(make_job(vit, {"images": str(pets), "image_size": 12}))


def test_digits_are_normalised_as_by_the_processor(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {"image_processor_type": "ViTImageProcessor", **SQUARE, **IMAGENET})
    model["config"] = {"num_labels": 10}  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="its last layer is replaced"):
        samples: Any = open_samples(make_job(model, {"images": "digits"}))
    pixels = samples[0]["pixel_values"]
    assert torch.allclose(
        pixels.amin((1, 2)), -torch.tensor(IMAGENET["image_mean"]) / torch.tensor(IMAGENET["image_std"])
    )
