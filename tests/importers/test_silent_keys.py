"""Keys and defaults of other tools that change the training, and that look as if they did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.importers.importing import Imported, import_file

TRAINER = {"output_dir": "o", "per_device_train_batch_size": 64, "learning_rate": 1e-4, "max_steps": 100}
DEEPSPEED = {"train_batch_size": 64, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}


def imported(folder: Path, content: dict[str, Any], devices: int | None = None, tool: str | None = None) -> Imported:
    path = folder / "settings.json"
    path.write_text(json.dumps(content))
    return import_file(path, tool, devices)


def note(found: Imported, key: str) -> str:
    return next(row.note for row in found.rows if row.key == key)


@pytest.mark.parametrize("where", ["split_batches", "accelerator_config"])
def test_split_batches_make_the_batch_that_of_all_devices(where: str, tmp_path: Path) -> None:
    content = {**TRAINER, where: True if where == "split_batches" else {"split_batches": True}}
    found = imported(tmp_path, content, devices=8)
    assert (found.job["train"]["batch"], found.plan["micro_batch"]) == (64, 8)
    switched_off = {**TRAINER, "accelerator_config": {"split_batches": False}}
    assert imported(tmp_path, switched_off, devices=8).job["train"]["batch"] == 512
    (contradiction,) = imported(tmp_path, content, devices=3).contradictions
    assert "64 is not a multiple of 3 data ranks, among which split_batches divides it" in contradiction


@pytest.mark.parametrize(
    ("scheduler", "rate", "final"),
    [
        ({"type": "WarmupLR"}, 1e-3, None),
        ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 100}}, 1e-3, None),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5}}, 2e-5, None),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 100}}, 2e-5, 1e-4),
        (None, 2e-5, None),
    ],
)
def test_deepspeed_schedules_set_the_rate(
    scheduler: dict[str, Any] | None, rate: float, final: float | None, tmp_path: Path
) -> None:
    content = {**DEEPSPEED, **({"scheduler": scheduler} if scheduler else {})}
    train = imported(tmp_path, content).job["train"]
    assert (train["learning_rate"], train.get("final_learning_rate")) == (rate, final)


@pytest.mark.parametrize(("schedule", "final"), [("linear", None), ("cosine", 0.1), (None, 0.1)])
def test_axolotl_reads_a_final_rate_for_cosine_only(schedule: str | None, final: float | None, tmp_path: Path) -> None:
    content = {"base_model": "folder", "micro_batch_size": 2, "cosine_min_lr_ratio": 0.1, "learning_rate": 1e-4}
    found = imported(tmp_path, {**content, **({"lr_scheduler": schedule} if schedule else {})}, tool="axolotl")
    assert found.job["train"].get("final_learning_rate") == final


def test_where_a_name_means_something_else_it_is_said(tmp_path: Path) -> None:
    found = imported(tmp_path, {**TRAINER, "optim": "adafactor", "lr_scheduler_type": "warmup_stable_decay"})
    assert "raise train.learning_rate" in note(found, "optim")
    assert "tightfit linearly" in note(found, "lr_scheduler_type")
    recipe = {"optimizer": {"_component_": "torch.optim.Adafactor", "lr": 1e-4}, "batch_size": 2}
    of_torch = imported(tmp_path, recipe, tool="torchtune")
    assert of_torch.job["train"]["optimizer"] == "adafactor"
    assert not any("raise train.learning_rate" in row.note for row in of_torch.rows)


def test_accumulation_multiplies_a_pipelines_micro_batches(tmp_path: Path) -> None:
    training = {"batch_size": 8, "gradient_accumulation_steps": 4}
    found = imported(
        tmp_path, {"training": training, "parallelism": {"pipeline_parallel_degree": 2}}, tool="torchtitan"
    )
    assert (found.job["train"]["batch"], found.plan["micro_batch"]) == (32, 1)


def test_one_key_of_another_tool_does_not_decide(tmp_path: Path) -> None:
    """TrainingArguments.to_sanitized_dict() has train_batch_size, as DeepSpeed's files have."""
    found = imported(tmp_path, {**TRAINER, "train_batch_size": 64, "optim": "adamw_torch"})
    assert found.tool.name == "transformers"
    assert imported(tmp_path, DEEPSPEED).tool.name == "deepspeed"


@pytest.mark.parametrize(("shuffle", "outcome"), [(True, "not needed"), (False, "no counterpart")])
def test_an_order_that_is_not_random_is_lost(shuffle: bool, outcome: str, tmp_path: Path) -> None:
    recipe = {"shuffle": shuffle, "batch_size": 2, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4}}
    found = imported(tmp_path, recipe, tool="torchtune")
    assert next(row.outcome for row in found.rows if row.key == "shuffle") == outcome
