"""Configurations of eight tools become the jobs and plans that they say, key by key."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.importers.expected import FIELDS, OUTCOMES
from tightfit.importers.importing import IMPORTERS, Imported, file_texts, import_file
from tightfit.importers.reading import read_settings
from tightfit.job import Job
from tightfit.plan import Plan, read_pins

FOLDER = Path(__file__).parent / "files"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*"))


def _value(imported: Imported, name: str) -> Any:
    content: Any = {**imported.job, "plan": imported.plan}
    for place in name.split("."):
        content = content.get(place, {})
    return None if content == {} else content


def test_there_are_files_of_every_tool() -> None:
    counted = Counter(name.partition("/")[0] for name in FILES)
    assert set(counted) == {importer.name for importer in IMPORTERS}
    assert min(counted.values()) >= 8
    assert set(FIELDS) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_tool_is_told_by_the_keys(name: str) -> None:
    assert import_file(FOLDER / name).tool.name == name.partition("/")[0]


@pytest.mark.parametrize("name", FILES)
def test_fields(name: str) -> None:
    imported = import_file(FOLDER / name)
    found = {field: _value(imported, field) for field in FIELDS[name]}
    assert found == {
        field: pytest.approx(value) if isinstance(value, float) else value for field, value in FIELDS[name].items()
    }


@pytest.mark.parametrize(
    ("section", "plan"),
    [
        ({"bf16": {"enabled": True}}, {"precision": "bf16-true", "master_weights": True}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision": "fp16-true", "master_weights": True}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"precision": "bf16-true", "master_weights": False, "states": "bf16"},
        ),
        ({"bf16": {"enabled": False}}, {"precision": "fp32", "master_weights": None}),
    ],
    ids=str,
)
def test_deepspeed_s_masters(section: dict[str, Any], plan: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, **section}))
    imported = import_file(file)
    assert {name: _value(imported, f"plan.{name}") for name in plan} == plan


@pytest.mark.parametrize(("each", "when"), [(True, "micro-batch"), (False, "step")])
@pytest.mark.parametrize("stage", ["full_shard", "no_shard"])
def test_when_gradients_are_reduced(each: bool, when: str, stage: str, tmp_path: Path) -> None:
    """Without sharded gradients, tightfit reduces once per step."""
    file = tmp_path / "arguments.yaml"
    kwargs = f"{{gradient_accumulation_kwargs: {{sync_each_batch: {str(each).lower()}}}}}"
    file.write_text(
        f"output_dir: out\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nfsdp: {stage}\n"
        f"accelerator_config: {kwargs}\n"
    )
    imported = import_file(file)
    assert _value(imported, "plan.gradient_sync") == (when if stage == "full_shard" else None)


@pytest.mark.parametrize("name", sorted(OUTCOMES))
def test_outcomes(name: str) -> None:
    said = {row.key: row.outcome for row in import_file(FOLDER / name).rows}
    assert {key: said.get(key) for key in OUTCOMES[name]} == OUTCOMES[name]


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_one_row_with_a_result_or_a_reason(name: str) -> None:
    content = read_settings(FOLDER / name)
    imported = import_file(FOLDER / name)
    rows = {row.key: row for row in imported.rows}
    assert len(rows) == len(imported.rows)
    for key in _leaves(content):
        under = [row for row in rows if row == key or row.startswith(f"{key}.") or key.startswith(f"{row}.")]
        assert under, key
    for row in imported.rows:
        assert row.note or (row.field and row.result is not None), row


@pytest.mark.parametrize("name", FILES)
def test_what_is_mapped_is_in_the_files(name: str) -> None:
    imported = import_file(FOLDER / name)
    for row in imported.rows:
        if row.outcome in ("mapped", "default"):
            assert _value(imported, row.field) is not None, row


@pytest.mark.parametrize("name", FILES)
def test_written_files_are_read_back(name: str, tmp_path: Path) -> None:
    imported = import_file(FOLDER / name)
    for file, text in file_texts(imported, Path(name)).items():
        (tmp_path / file).write_text(text)
    pins = read_pins(tmp_path / "plan.yaml")
    assert pins == {field: getattr(Plan.parse(imported.plan), field) for field in imported.plan}
    content = read_settings(tmp_path / "job.yaml")
    model, data = content.get("model", {}), content.get("data", {})
    if not {"preset", "from"} & set(model):
        content["model"] = {"preset": "gpt2", **model}
    if not {"text", "jsonl", "parquet", "dataset", "sources"} & set(data):
        content["data"] = {"jsonl": "samples.jsonl", **data}
    assert Job.parse(content).train == Job.parse({**content, "train": imported.job.get("train", {})}).train


@pytest.mark.parametrize("devices", [2, 8])
def test_the_batch_counts_all_devices(devices: int) -> None:
    imported = import_file(FOLDER / "transformers/full_finetune.yaml", devices=devices)
    assert imported.job["train"]["batch"] == 4 * 8 * devices
    assert Plan.parse(imported.plan).micro_batch_of(imported.job["train"]["batch"] * 1) == 4


def test_devices_are_divided_by_what_shares_samples() -> None:
    imported = import_file(FOLDER / "torchtitan/llama3_8b.toml", devices=64)
    assert (imported.job["train"]["batch"], imported.plan["dp_shard"]) == (64, 64)
    imported = import_file(FOLDER / "torchtune/full.yaml", devices=4)
    assert (imported.job["train"]["batch"], imported.plan["zero"], imported.plan["dp_shard"]) == (64, 3, 4)


def test_devices_that_shard_nothing_are_replicas() -> None:
    imported = import_file(FOLDER / "transformers/full_finetune.yaml", devices=4)
    assert (imported.plan["zero"], imported.plan["dp_replicate"], "dp_shard" in imported.plan) == (0, 4, False)


def test_a_file_that_was_not_found_leaves_the_sharding_open(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("per_device_train_batch_size: 1\ndeepspeed: zero3.json\n")
    imported = import_file(path, devices=4)
    assert "zero" not in imported.plan
    assert any("deepspeed names zero3.json, which was not found" in sentence for sentence in imported.to_do)
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert (import_file(path, devices=4).plan["zero"], import_file(path, devices=4).plan["dp_shard"]) == (3, 4)


def test_deepspeeds_own_warmup_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}}')
    imported = import_file(path)
    assert imported.job["train"]["warmup"] == 1000
    note = next(row.note for row in imported.rows if row.key == "scheduler.type")
    assert "along a logarithm" in note


@pytest.mark.parametrize(
    ("name", "text", "key", "outcome"),
    [
        ("a.yaml", "output_dir: x\nsave_steps: -1\n", "save_steps", "not needed"),
        ("a.yaml", "output_dir: x\neval_steps: 0\n", "eval_steps", "not needed"),
        ("a.yaml", "output_dir: x\nbf16: null\n", "bf16", "default"),
        ("a.yaml", "output_dir: x\nfsdp: ''\n", "fsdp", "not needed"),
        (
            "a.yaml",
            "trainer: {strategy: {class_path: a.ModelParallelStrategy, init_args: {data_parallel_size: auto}}}\n",
            "trainer.strategy.init_args.data_parallel_size",
            "left open",
        ),
        ("a.yaml", "output_dir: x\nlearning_rate: '2e-5'\n", "learning_rate", "mapped"),
        ("a.toml", "[training]\nseq_len = 128\nstart = 2024-01-01\n", "training.start", "unknown"),
    ],
)
def test_single_keys(name: str, text: str, key: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert {row.key: row.outcome for row in import_file(tmp_path / name).rows}[key] == outcome


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.yaml",
            "trainer: {max_epochs: 1}\noptimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}\n",
            {"weight_decay": 0.01, "no_decay": []},
        ),
        (
            "a.yaml",
            "trainer: {max_epochs: 1}\noptimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01}}\n",
            {"momentum": 0.0},
        ),
        (
            "a.yaml",
            "trainer: {max_epochs: 1}\noptimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01, momentum: 0.8}}\n",
            {"momentum": 0.8},
        ),
        (
            "a.json",
            '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.001}}}',
            {"momentum": 0.0},
        ),
    ],
    ids=["AdamW", "SGD", "momentum", "DeepSpeed's SGD"],
)
def test_defaults_of_the_other_tools_optimizer_are_written(
    name: str, text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    train = import_file(tmp_path / name).job["train"]
    assert {key: train.get(key) for key in expected} == expected


def test_paths_beside_the_file_are_made_whole(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "texts.jsonl").write_text("{}")
    path = tmp_path / "config.yaml"
    path.write_text("base_model: weights\ndatasets: [{path: texts.jsonl, type: completion}]\nmicro_batch_size: 1\n")
    job = import_file(path).job
    assert job["model"]["from"] == job["data"]["tokenizer"] == str(tmp_path / "weights")
    assert job["data"]["jsonl"] == str(tmp_path / "texts.jsonl")


def _leaves(content: dict[str, Any], section: str = "") -> list[str]:
    names = []
    for name, value in content.items():
        names += _leaves(value, f"{section}{name}.") if isinstance(value, dict) and value else [f"{section}{name}"]
    return names
