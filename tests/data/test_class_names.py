"""Classes keep their names, and their numbers in a pretrained model and in evaluation data; data that
repeats in a step gives a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification

from tests.data.conftest import MODELS, make_job
from tightfit.data import open_evaluation, open_samples
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def write(path: Path, *labels: Any) -> str:
    rows = [{"text": f"some words {number}", "label": label} for number, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labels_of(samples: Any) -> list[int]:
    everything = np.arange(len(samples))
    found: list[int] = samples.batch(everything, everything * 0)["labels"].tolist()
    return found


def text_job(source: str, model: Any = "text", **fields: Any) -> Job:
    return make_job(model, {"jsonl": source, "sequence_length": 32, "vocabulary_size": 280}, **fields)


def pretrained(folder: Path, *names: str) -> dict[str, Any]:
    config = BertConfig(**SIZES, vocab_size=300, max_position_embeddings=64, id2label=dict(enumerate(names)))
    BertForSequenceClassification(config).save_pretrained(folder)
    return {"from": str(folder)}


def test_labels_of_text_name_the_classes(tmp_path: Path) -> None:
    samples: Any = open_samples(text_job(write(tmp_path / "a.jsonl", "good", "bad", "good")))
    assert samples.class_names == ("bad", "good")
    numbered: Any = open_samples(text_job(write(tmp_path / "b.jsonl", 1, 0)))
    assert numbered.class_names == ()


def test_a_pretrained_classifier_keeps_its_numbers(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model", "positive", "negative", "neutral")
    samples: Any = open_samples(text_job(write(tmp_path / "a.jsonl", "negative", "positive"), model))
    assert labels_of(samples) == [1, 0]
    assert samples.class_names == ("positive", "negative", "neutral")
    with pytest.warns(TightfitWarning, match=r"classes \(bad, good\) are not those of the pretrained model \(positive"):
        others: Any = open_samples(text_job(write(tmp_path / "b.jsonl", "good", "bad"), model))
    assert (labels_of(others), others.class_names) == ([1, 0], ("bad", "good"))
    unnamed = pretrained(tmp_path / "unnamed", "LABEL_0", "LABEL_1")
    assert labels_of(open_samples(text_job(write(tmp_path / "c.jsonl", "good", "bad"), unnamed))) == [1, 0]


def test_evaluation_data_has_the_training_s_numbers(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", "a", "b", "c")

    def evaluation(*labels: str) -> list[int]:
        data = {"jsonl": write(tmp_path / "e.jsonl", *labels), "sequence_length": 32, "vocabulary_size": 280}
        job = text_job(train, evaluate={"every": 1, "data": data})
        return labels_of(open_evaluation(job, open_samples(job)))

    assert evaluation("c", "a", "c") == [2, 0, 2]
    with pytest.raises(InputError, match=r"has the class 'd', and the training data does not(.|\n)*a, b, c"):
        evaluation("d")


def test_folders_name_the_classes_of_images(tmp_path: Path) -> None:
    for name in ("ants", "bees", "cats"):
        (tmp_path / "all" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "all" / name / "0.png")
    shutil.copytree(tmp_path / "all" / "cats", tmp_path / "some" / "cats")
    evaluate = {"every": 1, "data": {"images": str(tmp_path / "some")}}
    job = make_job("images", {"images": str(tmp_path / "all")}, evaluate=evaluate)
    samples: Any = open_samples(job)
    assert samples.class_names == ("ants", "bees", "cats")
    assert labels_of(open_evaluation(job, samples)) == [2]


def test_saved_datasets_name_their_classes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": ["some words", "more words"], "label": [1, 0]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved"), "sequence_length": 32, "vocabulary_size": 280}
    samples: Any = open_samples(make_job("text", data))
    assert (labels_of(samples), samples.class_names) == ([1, 0], ("no", "yes"))


@pytest.mark.parametrize("label", [0.5, [1, 0]], ids=str)
def test_labels_of_other_tasks_name_the_way(label: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_samples(text_job(write(tmp_path / "a.jsonl", label)))
    assert f"holds {type(label).__name__}, not a label" in caught.value.found
    assert "Regression and several labels for a sample are no tasks" in caught.value.fix


@pytest.mark.parametrize(("batch", "times"), [(6, "3 times"), (5, "2 or 3 times"), (2, None)])
def test_a_batch_larger_than_the_data_gives_a_warning(batch: int, times: str | None, tmp_path: Path) -> None:
    job = text_job(write(tmp_path / "a.jsonl", 0, 1, 2))
    held_out = job.data.replace(held_out=0.3)  # type: ignore[union-attr]  # one of three samples
    job = job.replace(data=held_out, train=job.train.replace(batch=batch))
    if times is None:
        open_samples(job)
        return
    with pytest.warns(
        TightfitWarning, match=f"more than the 2 training samples, so each step has every sample {times}"
    ):
        open_samples(job)


@pytest.mark.parametrize(
    ("task", "settings", "found"),
    [
        ("causal-lm", {"samples": 4}, r"data\.samples=4 has no effect: it is for synthetic data; data.split"),
        ("causal-lm", {"shuffle_buffer": 5}, "is for data.streaming"),
        ("causal-lm", {"image_size": 64}, "is for images"),
        ("causal-lm", {"label_field": "kind"}, "is for the task classification"),
        ("causal-lm", {"target_length": 8}, "is for the target texts"),
        ("causal-lm", {"mask_probability": 0.5}, "is for masked-lm"),
        ("masked-lm", {"mask_probability": 0.5}, None),
        ("text", {"label_field": "label"}, None),
    ],
    ids=str,
)
def test_settings_without_effect_give_a_warning(task: str, settings: Any, found: str | None, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", *[0] * 40)
    job = make_job(task, {"jsonl": source, "sequence_length": 32, "vocabulary_size": 280, **settings})
    if found is None:
        open_samples(job)
    else:
        with pytest.warns(TightfitWarning, match=found):
            open_samples(job)


def test_synthetic_data_may_be_smaller_than_a_batch() -> None:
    job = make_job("text", {"synthetic": "tokens", "samples": 3})
    open_samples(job.replace(train=job.train.replace(batch=8)))
    assert MODELS["text"]["num_labels"] == 3
