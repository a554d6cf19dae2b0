"""Checkpoints and exports have the names of the classes and the image processor of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import tightfit
from tests.data.conftest import MODELS
from tightfit.data.image_processing import PROCESSOR_FILE
from tightfit.engine.checkpoint.save import newest
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.report.export import export, load_trained
from tightfit.report.run_folder import train_in_folder

PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 8, "width": 8},
    "image_mean": [0.1, 0.2, 0.3],
}
LABELS = {0: "ants", 1: "bees", 2: "LABEL_2"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(model: Any, data: Any, folder: Path) -> Path:
    job = Job(model=model, data=data, train={"batch": 1, "steps": 1, "trackers": []}, allow=[])
    train_in_folder(job, tightfit.Plan(), Machine.detect(), folder / "run")
    return newest(folder / "run" / "checkpoints")


def pictures(folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    for name in ("ants", "bees"):
        (folder / "images" / name).mkdir(parents=True)
        pixels = random.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / name / "0.png")
    return {"images": str(folder / "images"), "held_out": 0}


def write_model(folder: Path) -> dict[str, Any]:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)).save_pretrained(folder)
    (folder / PROCESSOR_FILE).write_text(json.dumps(PROCESSOR))
    return {"from": str(folder)}


def test_an_exported_classifier_names_its_classes(tmp_path: Path) -> None:
    checkpoint = trained(write_model(tmp_path / "base"), pictures(tmp_path), tmp_path)
    assert json.loads((checkpoint / PROCESSOR_FILE).read_text()) == PROCESSOR
    said = export(tmp_path / "run", tmp_path / "out")
    assert said.startswith("model and image processor of")
    for folder in (checkpoint, tmp_path / "out"):
        model = AutoModelForImageClassification.from_pretrained(folder)
        assert model.config.id2label == LABELS
        assert model.config.label2id == {name: number for number, name in LABELS.items()}
        assert json.loads((folder / PROCESSOR_FILE).read_text())["image_mean"] == PROCESSOR["image_mean"]
    image = Image.open(tmp_path / "images" / "bees" / "0.png")
    pixels = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")(images=image, return_tensors="pt")
    with torch.no_grad():
        expected = load_trained(tmp_path / "run").model(**pixels).logits
        torch.testing.assert_close(model(**pixels).logits, expected)


def test_a_new_model_gets_an_image_processor(tmp_path: Path) -> None:
    model = {**MODELS["images"], "num_channels": 3, "num_labels": 3}
    checkpoint = trained(model, pictures(tmp_path), tmp_path)
    assert json.loads((checkpoint / "config.json").read_text())["id2label"]["1"] == "bees"
    processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    found = processor(images=Image.new("RGB", (20, 10), (255, 0, 0)), return_tensors="pt")["pixel_values"]
    assert found.shape == (1, 3, 8, 8)
    assert found.amin((0, 2, 3)).tolist() == pytest.approx([1.0, -1.0, -1.0])


def test_samples_of_the_user_s_keep_the_folder_s_processor(tmp_path: Path) -> None:
    rows = [{"pixel_values": torch.zeros(3, 8, 8), "labels": 1}]
    checkpoint = trained(write_model(tmp_path / "base"), rows, tmp_path)
    assert json.loads((checkpoint / PROCESSOR_FILE).read_text()) == PROCESSOR
    assert json.loads((checkpoint / "config.json").read_text())["id2label"]["1"] == "LABEL_1"


def test_labels_of_text_are_in_the_checkpoint(tmp_path: Path) -> None:
    rows = [{"text": "some words", "label": label} for label in ("ants", "bees", "ants")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"jsonl": str(tmp_path / "a.jsonl"), "sequence_length": 16, "vocabulary_size": 280, "held_out": 0}
    checkpoint = trained({**MODELS["text"], "num_hidden_layers": 1, "hidden_size": 24}, data, tmp_path)
    assert json.loads((checkpoint / "config.json").read_text())["label2id"] == {"ants": 0, "bees": 1, "LABEL_2": 2}
    assert not (checkpoint / PROCESSOR_FILE).exists()
