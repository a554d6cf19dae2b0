"""What an import says of values that have no counterpart, where a default of tightfit's takes their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.errors import InputError
from tightfit.importers.importing import Imported, import_file

TRAINER = {"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_steps": 100}
TUNE = {
    "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "base/tokenizer.model"},
    "batch_size": 2,
    "epochs": 1,
}
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
"""


def imported(folder: Path, content: dict[str, Any] | str, name: str = "file.json") -> Imported:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return import_file(path, devices=1)


@pytest.mark.parametrize("schedule", ["polynomial", "inverse_sqrt"])
def test_a_lost_schedule_is_among_the_things_to_do(schedule: str, tmp_path: Path) -> None:
    to_do = imported(tmp_path, {**TRAINER, "lr_scheduler_type": schedule}).to_do
    assert any("set train.schedule" in one and "default is constant" in one for one in to_do)
    assert not any(
        "train.schedule" in one for one in imported(tmp_path, {**TRAINER, "lr_scheduler_type": "cosine"}).to_do
    )


def test_files_of_unknown_tools_are_refused(tmp_path: Path) -> None:
    keys = {
        "micro_batch_size": 1,
        "global_batch_size": 256,
        "train_iters": 1000,
        "lr": 1e-4,
        "tensor_model_parallel_size": 8,
    }
    with pytest.raises(InputError, match=r"looks like a file of .*, which does not have \d of its 5 keys"):
        imported(tmp_path, yaml.safe_dump(keys), "file.yaml")


def test_torchtitan_streams_its_part_of_c4(tmp_path: Path) -> None:
    data = imported(tmp_path, TITAN, "file.toml").job["data"]
    assert (data["dataset"], data["subset"], data["streaming"]) == ("allenai/c4", "en", True)


@pytest.mark.parametrize("length", [None, 2048])
def test_torchtune_without_a_length_asks_for_one(length: int | None, tmp_path: Path) -> None:
    content = {**TUNE, "tokenizer": {**TUNE["tokenizer"], "max_seq_len": length}}  # type: ignore[dict-item]
    to_do = imported(tmp_path, yaml.safe_dump(content), "file.yaml").to_do
    assert any("set data.sequence_length" in one for one in to_do) is (length is None)


def test_a_file_without_a_batch_asks_for_one() -> None:
    to_do = import_file(Path(__file__).parent / "files" / "accelerate" / "fsdp1.yaml").to_do
    assert any("set train.batch" in one for one in to_do)


@pytest.mark.parametrize(("value", "outcome"), [(True, "no counterpart"), (False, "not needed")])
def test_a_dropped_last_batch_has_no_counterpart(value: bool, outcome: str, tmp_path: Path) -> None:
    rows = imported(tmp_path, {**TRAINER, "dataloader_drop_last": value}).rows
    assert {row.key: row.outcome for row in rows}["dataloader_drop_last"] == outcome
