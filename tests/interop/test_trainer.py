"""Advice for users of transformers' Trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import tightfit
from tightfit.errors import DoesNotFit, InputError
from tightfit.interop.trainer import BEYOND, OPTIM_OF_STATES, _cannot, _fields, for_trainer
from tightfit.plan import Plan

LENGTH = 64
SAID_BY_ARGUMENTS = {  # fields that TrainingArguments can say, and those that only refine others
    "loss_scale", "micro_batch", "fused_optimizer", "dp_shard", "loader_workers", "prefetch", "pin_memory", "non_blocking",
    "schedule", "virtual_stages", "split", "vertical_sync", "staleness", "powersgd_rank", "offload_to", "offload_folder",
}  # fmt: skip
NEVER_CHOSEN = {"parameter_server", "compressed_gradients"}  # by a search


def llama(**more: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, **more}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, **sizes))


def samples(count: int = 16, length: int = LENGTH, **more: Any) -> list[dict[str, Any]]:
    tokens = torch.arange(count * length).view(count, length) % 512
    return [{"input_ids": row, "labels": row, **more} for row in tokens]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "report_to": "none"}
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **{**given, **more})


@pytest.mark.slow
def test_the_advised_arguments_are_faster_for_the_same_job(tmp_path: Path) -> None:
    given = arguments(tmp_path, learning_rate=3e-4, optim="adamw_torch")
    with torch.device("meta"):
        model = llama(hidden_size=1024, intermediate_size=2816, num_attention_heads=16)
    advice = for_trainer(model, given, samples(length=512), machine="rtx-4090")
    best = advice.arguments
    assert best.per_device_train_batch_size * best.gradient_accumulation_steps == 8
    assert best.bf16
    assert best.optim == "adamw_torch_fused"
    assert (best.learning_rate, best.max_steps, best.seed) == (3e-4, 2, given.seed)
    assert advice.estimate.time.step_s < advice.given.time.step_s
    assert advice.fastest.time.step_s <= advice.estimate.time.step_s
    assert "bf16=True" in str(advice)
    assert not given.bf16  # the user's arguments do not change


@pytest.mark.slow
def test_nothing_is_allowed_that_the_user_excludes(tmp_path: Path) -> None:
    given = arguments(tmp_path, label_smoothing_factor=0.1)
    advice = for_trainer(llama(), given, samples(), machine="rtx-4090", allow=[])
    assert any("label_smoothing_factor" in line for line in advice.ignored)
    assert not advice.arguments.bf16
    assert advice.estimate.plan.precision == "fp32"


@pytest.mark.slow
def test_the_trainer_accepts_the_advised_arguments(tmp_path: Path) -> None:
    model = llama()
    before = model.lm_head.weight.detach().clone()
    advice = for_trainer(model, arguments(tmp_path, save_strategy="no"), samples(note="dropped"))
    assert torch.equal(model.lm_head.weight, before)
    trained = Trainer(model, advice.arguments, train_dataset=samples()).train()
    assert trained.global_step == 2
    assert not torch.equal(model.lm_head.weight, before)


@pytest.mark.slow
def test_a_collator_makes_the_samples(tmp_path: Path) -> None:
    seen: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len(rows))
        tokens = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": tokens}

    bare = [{"input_ids": row["input_ids"]} for row in samples()]
    advice = for_trainer(llama(), arguments(tmp_path), bare, data_collator=collate, machine="rtx-4090", allow=[])
    assert set(seen) == {1}
    assert advice.estimate.fits


def test_samples_without_labels_name_the_remedy(tmp_path: Path) -> None:
    model = BertForMaskedLM(BertConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
    bare = [{"input_ids": row["input_ids"]} for row in samples()]
    with pytest.raises(InputError, match="labels"):
        for_trainer(model, arguments(tmp_path), bare, machine="rtx-4090")


@pytest.mark.slow
def test_several_gpus_are_sharded_if_that_fits(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = llama(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    given = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    advice = for_trainer(model, given, samples(), machine="a100-80gb:8")
    assert not advice.given.fits
    assert advice.estimate.fits
    assert advice.estimate.plan.zero in (2, 3)
    assert advice.changes["fsdp"]


@pytest.mark.slow
def test_if_no_arguments_fit_the_error_names_tightfits_plan(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = llama(hidden_size=2048, intermediate_size=5504, num_hidden_layers=28, num_attention_heads=32)
    with pytest.raises(DoesNotFit, match=r"fits if tightfit trains it: tightfit\.train with Plan"):
        for_trainer(model, arguments(tmp_path), samples(), machine="t4", allow=["fp16", "offload"])


@pytest.mark.slow
def test_the_models_own_loss_is_taken_if_its_task_is_unknown(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.layer(inputs), labels)}

    rows = [{"inputs": torch.ones(8), "labels": torch.ones(1)} for _ in range(16)]
    advice = for_trainer(Own(), arguments(tmp_path), rows, machine="rtx-4090")
    assert advice.estimate.fits


def classifier(labels: int) -> BertForSequenceClassification:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=labels, **sizes))


@pytest.mark.slow
@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("labels", "sample"),
    [(3, {"label": 1}), (1, {"labels": 0.5}), (3, {"labels": torch.tensor([1.0, 0.0, 0.0])})],
    ids=["label", "regression", "several-labels"],
)
def test_what_the_trainer_makes_of_labels_is_made_here(tmp_path: Path, labels: int, sample: dict[str, Any]) -> None:
    rows = [{"input_ids": torch.arange(8), **sample} for _ in range(8)]
    best = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    given = arguments(tmp_path, load_best_model_at_end=True, **best)
    assert for_trainer(classifier(labels), given, rows, machine="rtx-4090").estimate.fits


@pytest.mark.slow
def test_labels_of_text_are_left_to_the_collator(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(8), "label": name} for name in ("cat", "dog") * 4]

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([["cat", "dog"].index(row["label"]) for row in rows])
        return {"input_ids": torch.stack([row["input_ids"] for row in rows]), "labels": labels}

    given = arguments(tmp_path)
    assert for_trainer(classifier(2), given, rows, data_collator=collate, machine="rtx-4090").estimate.fits


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got a TrainingArguments and a BertForSequenceClassification"):
        for_trainer(arguments(tmp_path), classifier(2), [])  # type: ignore[arg-type]


def test_every_plan_field_is_either_said_or_described() -> None:
    fields = set(Plan.field_names())
    assert fields == set(BEYOND) | SAID_BY_ARGUMENTS | NEVER_CHOSEN
    assert not set(BEYOND) & SAID_BY_ARGUMENTS
    phrases = list(_cannot(Plan(chunked_loss=1024, recompute="every-2", offload=("states",)), Plan()))
    assert len(phrases) == 3
    assert "1,024 tokens at a time" in " ".join(phrases)


@pytest.mark.parametrize(("zero", "reshards"), [(2, False), (3, True)])
def test_transformers_takes_the_advised_sharding(tmp_path: Path, zero: Literal[2, 3], reshards: bool) -> None:
    given = arguments(tmp_path)
    job = tightfit.Job(model=llama, data=samples(), train=tightfit.Train(batch=8))
    found = dataclasses.replace(given, **_fields(Plan(dp_shard=2, zero=zero), job, given))
    assert found.fsdp
    assert found.fsdp_plugin_args["reshard_after_forward"] is reshards
    replicas = dataclasses.replace(given, **_fields(Plan(dp_replicate=2), job, given))
    assert not replicas.fsdp


@pytest.mark.parametrize("states", sorted(OPTIM_OF_STATES))
def test_transformers_has_the_advised_optimizers(tmp_path: Path, states: str) -> None:
    assert arguments(tmp_path, optim=OPTIM_OF_STATES[states]).optim.value == OPTIM_OF_STATES[states]


def test_it_is_a_public_name() -> None:
    assert tightfit.for_trainer is for_trainer
