"""Pretrained models of another task, of another loss or with another number of classes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit._torch.fake import FakeTensorMode
from tightfit.data import model_input, open_samples
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job, ModelSpec
from tightfit.models import model_factory, task_of

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
VIT = {**SIZES, "image_size": 8, "patch_size": 4}
ROWS = [{"input_ids": [1, 2, 3], "labels": number} for number in (0, 2)]


def save(kind: str, folder: Path, **config: Any) -> Path:
    made = getattr(transformers, kind)
    sizes = VIT if kind.startswith("ViT") else {**SIZES, "vocab_size": 40}
    if kind.startswith("ViT"):
        sizes = {name: value for name, value in sizes.items() if name != "max_position_embeddings"}
    torch.manual_seed(0)
    made(made.config_class(**{**sizes, **config})).save_pretrained(folder)
    return folder


def spec(folder: Path, **fields: Any) -> ModelSpec:
    return ModelSpec.parse({"from": str(folder), **fields})


def at(samples: Any, index: int) -> Any:
    return samples[index]


def job(model: Any, **fields: Any) -> Job:
    return Job(model=model, data=ROWS, train={"batch": 1, "steps": 1}, **fields)


@pytest.mark.parametrize(
    "kind", ["TokenClassification", "QuestionAnswering", "MultipleChoice", "NextSentencePrediction"]
)
def test_classes_without_a_task_need_model_task(kind: str, tmp_path: Path) -> None:
    folder = save(f"BertFor{kind}", tmp_path)
    with pytest.raises(InputError) as caught:
        task_of(spec(folder))
    assert f"BertFor{kind}, and tightfit has no task" in caught.value.found
    assert "set model.task, such as masked-lm" in caught.value.fix
    assert task_of(spec(folder, task="classification")) == "classification"


@pytest.mark.parametrize(
    ("architecture", "model_type", "task"),
    [
        ("BertModel", "bert", "masked-lm"),
        ("T5ForConditionalGeneration", "t5", "seq2seq-lm"),
        ("T5WithLMHeadModel", "t5", "seq2seq-lm"),
        ("DeiTForImageClassificationWithTeacher", "deit", "classification"),
        ("ElectraForPreTraining", "electra", None),
        ("ViTForMaskedImageModeling", "vit", None),
    ],
)
def test_the_task_of_a_pretrained_class(architecture: str, model_type: str, task: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    if task is None:
        with pytest.raises(InputError, match="no task for this class"):
            task_of(spec(tmp_path))
    else:
        assert task_of(spec(tmp_path)) == task


@pytest.mark.parametrize(
    ("config", "found", "loss"),
    [
        (
            {"problem_type": "multi_label_classification", "num_labels": 3},
            "problem_type: multi_label",
            "BCEWithLogitsLoss",
        ),
        ({"problem_type": "regression", "num_labels": 3}, "problem_type: regression", "MSELoss"),
        ({"num_labels": 1}, "has a single label", "MSELoss"),
    ],
    ids=str,
)
def test_classifiers_with_another_loss_are_refused(config: Any, found: str, loss: str, tmp_path: Path) -> None:
    folder = save("BertForSequenceClassification", tmp_path, **config)
    made: Any = lambda: transformers.BertForSequenceClassification.from_pretrained(folder)  # noqa: E731
    own = {"architecture": "bert", "task": "classification", **SIZES, **config}
    for model in (spec(folder), own, made):
        with pytest.raises(InputError) as caught:
            model_input(job(model))
        assert found in caught.value.found
        assert f"torch.nn:{loss}" in caught.value.fix
        model_input(job(model, loss=getattr(nn, loss)()))
    if config["num_labels"] > 1:
        model_input(job(spec(folder, config={"problem_type": "single_label_classification"})))


def test_a_regression_trains_with_a_loss_of_its_own(tmp_path: Path) -> None:
    from tightfit.engine.build import build
    from tightfit.engine.loop import train
    from tightfit.plan import Plan

    folder = save("BertForSequenceClassification", tmp_path, num_labels=1, hidden_dropout_prob=0.0)
    rows = [{"input_ids": [1, 2, 3], "labels": [0.5]}, {"input_ids": [4, 2, 3], "labels": [1.5]}]
    asked = Job(model=spec(folder), data=rows, loss=nn.MSELoss(), train={"batch": 2, "steps": 1}, allow=[])
    (step,) = train(build(asked, Plan(micro_batch=2)))
    model = transformers.BertForSequenceClassification.from_pretrained(folder).train()
    expected = model(torch.tensor([[1, 2, 3], [4, 2, 3]]), labels=torch.tensor([[0.5], [1.5]])).loss
    assert float(step.loss) == pytest.approx(float(expected.detach()), abs=0.3)  # attention dropout


@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "ViTForImageClassification", "LlamaForSequenceClassification"]
)
def test_num_labels_gives_a_classifier_a_new_head(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path, num_labels=3)
    pretrained = model_factory(spec(folder))().state_dict()
    asked = spec(folder, config={"num_labels": 5})
    torch.manual_seed(0)
    model = model_factory(asked)()
    new = model.state_dict()
    heads = {name for name in new if new[name].shape != pretrained[name].shape}
    assert {name.partition(".")[0] for name in heads} <= {"classifier", "score"}
    assert all(new[name].shape == (5, *pretrained[name].shape[1:]) for name in heads)
    assert all(torch.equal(new[name], pretrained[name]) for name in new.keys() - heads)
    assert all(new[name].isfinite().all() for name in heads)
    torch.manual_seed(0)
    assert all(torch.equal(new[name], value) for name, value in model_factory(asked)().state_dict().items())
    with torch.device("meta"):
        assert model_factory(asked)().state_dict().keys() == new.keys()
    with FakeTensorMode():
        assert {name for name, _ in model_factory(asked)().named_parameters()} == {
            name for name, _ in model.named_parameters()
        }
    with pytest.warns(TightfitWarning, match="has 3 classes, and the job sets 5: its last layer is replaced"):
        assert model_input(job(asked)).labels == 5


def test_a_backbone_gets_any_number_of_classes(tmp_path: Path) -> None:
    folder = save("BertModel", tmp_path)
    asked = spec(folder, task="classification", config={"num_labels": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_input(job(asked)).labels == 4
    assert model_factory(asked)().classifier.weight.shape == (4, 16)
    named = spec(save("BertForSequenceClassification", tmp_path / "c"), config={"id2label": {0: "a", 1: "b", 2: "c"}})
    assert model_factory(named)().classifier.weight.shape == (3, 16)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        ({"vocab_size": 64}, "bert.embeddings.word_embeddings.weight has [40, 16] there and [64, 16] here"),
        (
            {"num_labels": 4, "max_position_embeddings": 64},
            "position_embeddings.weight has [32, 16] there and [64, 16]",
        ),
    ],
    ids=str,
)
def test_other_changed_sizes_are_refused_before_training(config: Any, tensor: str, tmp_path: Path) -> None:
    asked = spec(save("BertForSequenceClassification", tmp_path, num_labels=3), config=config)
    for mode in (torch.device("meta"), torch.device("cpu"), FakeTensorMode()):
        with pytest.raises(InputError) as caught, mode:
            model_factory(asked)()
        assert tensor in caught.value.found
        assert caught.value.asked == f"job: model.config: {', '.join(config)}"


def test_unknown_keys_of_a_pretrained_model_are_refused(tmp_path: Path) -> None:
    folder = save("BertForMaskedLM", tmp_path)
    with pytest.raises(InputError, match=r"model\.config\.num_lables(.|\n)*did you mean 'num_labels'"):
        model_factory(spec(folder, config={"num_lables": 3}))()
    with pytest.raises(InputError, match=r"pretrained model as model\.config: {num_labels: 3}"):
        spec(folder, num_labels=3)
    with pytest.raises(InputError, match=r"did you mean 'task'\?"):
        spec(folder, taks="classification")


def test_remedies_for_a_pretrained_model_work(tmp_path: Path) -> None:
    """Each names a setting that a pretrained model has."""
    folder = save("BertForSequenceClassification", tmp_path, num_labels=2)
    with pytest.raises(InputError, match=r"the labels 0 to 1(.|\n)*model\.config: {num_labels: 3}, which gives"):
        at(open_samples(job(spec(folder))), 1)
    found = model_input(job(spec(folder)))
    with pytest.raises(InputError, match=r"resize_token_embeddings\(50\)"):
        found.check_tokenizer("data: tokenizer=x", 50)
    with pytest.raises(
        InputError, match=r"use at most 32; or, if the positions(.|\n)*model\.config: {max_position_embeddings: 64}"
    ):
        found.check_length("data: sequence_length", 64)


def trained_head(folder: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    data = [{"pixel_values": torch.full((3, 8, 8), number / 8), "labels": number % 5} for number in range(8)]
    train = {"batch": 4, "steps": 3, "learning_rate": 0.1, "optimizer": "sgd", "trackers": []}
    asked = Job(model=spec(Path(folder), config={"num_labels": 5}), data=data, train=train, allow=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TightfitWarning)
        run = tightfit.build(asked, tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"materialize": "device"},
        {"materialize": "device", "zero": 3, "dp_shard": 2},
        {"materialize": "device", "pp": 2, "micro_batch": 2},
        {"zero": 1, "dp_shard": 2},
    ],
    ids=str,
)
def test_a_new_head_has_the_same_values_in_every_plan(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = str(save("ViTForImageClassification", tmp_path, num_labels=3, num_hidden_layers=2))
    losses, weights = trained_head(folder, {})
    place = "tests.models.test_pretrained_heads:trained_head"
    devices = tightfit.Plan(**fields).devices
    found = together(devices, place, folder, fields) if devices > 1 else [trained_head(folder, fields)]
    assert found[-1][0] == pytest.approx(losses, rel=1e-5)
    assert cases.distance(found[0][1], weights) <= 1e-5


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def test_a_folder_without_some_weights_is_refused(tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["bert.encoder.layer.0.intermediate.dense.weight"]
        return tensors

    folder = _edit(save("BertForMaskedLM", tmp_path), without)
    with pytest.raises(InputError, match=r"has no weights for bert\.encoder\.layer\.0\.intermediate\.dense\.weight"):
        model_factory(spec(folder))()


def test_a_folder_with_other_names_is_refused(tmp_path: Path) -> None:
    folder = _edit(
        save("LlamaForCausalLM", tmp_path), lambda tensors: {f"net.{name}": one for name, one in tensors.items()}
    )
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight, .* and \d+ more, but has net\.lm_head\.weight"):
        model_factory(spec(folder))()


def test_a_new_output_layer_is_named_in_a_warning(tmp_path: Path) -> None:
    with pytest.warns(TightfitWarning, match=r"no weights for lm_head\.weight, which start from random values"):
        model_factory(spec(save("LlamaModel", tmp_path), task="causal-lm"))()


def test_a_classifier_may_begin_with_a_masked_language_model(tmp_path: Path) -> None:
    asked = spec(save("BertForMaskedLM", tmp_path), task="classification", config={"num_labels": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_factory(asked)()
    with pytest.warns(TightfitWarning, match="classifier"):
        model_factory(asked.replace(config={}))()
