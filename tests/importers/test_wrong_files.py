"""Files that contradict themselves, and files that cannot be read, are answered in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tightfit.cli import app
from tightfit.errors import InputError
from tightfit.importers.importing import IMPORTERS, Imported, import_content, import_file

FULL_SHARD = {
    "distributed_type": "MULTI_GPU",
    "num_processes": 8,
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
}
CONTRADICTIONS: list[tuple[str, dict[str, Any], str, str]] = [  # tool, content, what is said, the field left out
    ("transformers", {"bf16": True, "fp16": True}, "bf16 and fp16 are both on", "plan.precision"),
    (
        "deepspeed",
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "bf16.enabled and fp16.enabled are both on",
        "plan.precision",
    ),
    (
        "deepspeed",
        {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        "train_batch_size 30 is not a multiple of train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2",
        "train.batch",
    ),
    (
        "deepspeed",
        {"zero_optimization": {"stage": 3}, "pipeline": {"stages": 4}},
        "zero_optimization.stage 3 and pipeline.stages 4: DeepSpeed's pipelines take ZeRO stage 0 or 1 only",
        "",
    ),
    (
        "deepspeed",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device is for ZeRO stage 3, and the stage is 2",
        "",
    ),
    (
        "deepspeed",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
            }
        },
        "name cpu and nvme",
        "plan.offload_to",
    ),
    (
        "transformers",
        {"per_device_train_batch_size": 4, "deepspeed": {"train_micro_batch_size_per_gpu": 2}},
        "disagree about plan.micro_batch",
        "plan.micro_batch",
    ),
    (
        "transformers",
        {"max_grad_norm": 1.0, "deepspeed": {"gradient_clipping": 0.5}},
        "max_grad_norm and deepspeed.gradient_clipping disagree about train.clip",
        "train.clip",
    ),
    (
        "transformers",
        {"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 3}}},
        "fsdp and deepspeed are both given",
        "",
    ),
    (
        "transformers",
        {"bf16": True, "deepspeed": {"bf16": {"enabled": False}}},
        "bf16 and deepspeed.bf16.enabled disagree about plan.precision",
        "plan.precision",
    ),
    (
        "transformers",
        {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}, "max_steps": 3},
        "fsdp and fsdp_config.reshard_after_forward disagree about plan.zero",
        "plan.zero",
    ),
    ("transformers", {"max_steps": 10, "warmup_steps": 20}, "20 steps of warm-up in a training of 10", "train.warmup"),
    ("accelerate", FULL_SHARD, "distributed_type is MULTI_GPU, which does not", "plan.zero"),
    (
        "accelerate",
        {"distributed_type": "NO", "num_processes": 4},
        "num_processes is 4, but distributed_type is NO",
        "plan.dp_shard",
    ),
    (
        "accelerate",
        {"distributed_type": "MEGATRON_LM", "num_processes": 6, "megatron_lm_config": {"megatron_lm_tp_degree": 4}},
        "6 devices are not a multiple of tp x pp x cp = 4",
        "",
    ),
    (
        "axolotl",
        {"base_model": "x", "batch_size": 10, "micro_batch_size": 4},
        "batch_size 10 is not a multiple of micro_batch_size 4",
        "",
    ),
    (
        "llama-factory",
        {"stage": "sft", "pure_bf16": True, "fp16": True},
        "pure_bf16 and fp16 are both on",
        "plan.precision",
    ),
    (
        "torchtune",
        {"optimizer_in_bwd": True, "gradient_accumulation_steps": 4, "batch_size": 2},
        "optimizer_in_bwd is on, but gradient_accumulation_steps is more than 1",
        "plan.update_in_backward",
    ),
    (
        "torchtitan",
        {
            "training": {"local_batch_size": 5},
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
        },
        "training.local_batch_size 5 is not a multiple of parallelism.pipeline_parallel_microbatch_size 2",
        "plan.micro_batch",
    ),
    (
        "torchtitan",
        {
            "training": {"local_batch_size": 4, "global_batch_size": 30},
            "parallelism": {"data_parallel_shard_degree": 4},
        },
        "training.global_batch_size 30 is not a multiple of training.local_batch_size 4 x 4 data ranks",
        "train.batch",
    ),
    (
        "torchtitan",
        {
            "model": {"converters": ["float8"]},
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        },
        "tightfit refuses the plan: zero-bubble delays the gradients of weights",
        "",
    ),
    (
        "lightning",
        {
            "trainer": {"strategy": "deepspeed_stage_2", "devices": 4, "precision": "bf16-mixed"},
            "fabric": {"devices": 2},
        },
        "disagree about plan.dp_shard",
        "plan.dp_shard",
    ),
]


def _import(tool: str, content: dict[str, Any], devices: int | None = None) -> Imported:
    return import_content(next(one for one in IMPORTERS if one.name == tool), content, "file", devices)


@pytest.mark.parametrize(("tool", "content", "said", "left_out"), CONTRADICTIONS)
def test_contradictions_are_named(tool: str, content: dict[str, Any], said: str, left_out: str) -> None:
    imported = _import(tool, content)
    assert any(said in sentence for sentence in imported.contradictions), imported.contradictions
    section, _, field = left_out.partition(".")
    assert field not in (imported.plan if section == "plan" else imported.job.get(section, {}))


def test_nothing_is_pinned_that_depends_on_a_contradiction() -> None:
    assert set(_import("accelerate", FULL_SHARD).plan) == set()


def test_a_batch_that_devices_contradict_is_named() -> None:
    content = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert _import("deepspeed", content, devices=8).contradictions == ()
    assert _import("deepspeed", content, devices=4).contradictions == (
        "train_batch_size 64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 4 data ranks = 32",
    )


def test_devices_that_the_file_contradicts_are_named() -> None:
    imported = _import("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 8}, devices=4)
    assert imported.contradictions == ("--devices and num_processes disagree about plan.dp_shard",)


@pytest.mark.parametrize("name", ["full.yaml", "lora.yml"])
def test_a_file_without_contradictions_has_none(name: str) -> None:
    assert import_file(Path(__file__).parent / "files" / "axolotl" / name).contradictions == ()


WRONG = [  # file name, text, what is asked, what is found
    ("empty.yaml", "", "empty.yaml", "expected a mapping"),
    ("list.yaml", "- 1\n- 2\n", "list.yaml", "expected a mapping"),
    ("broken.yaml", "a: [1\n", "broken.yaml:2", "not valid YAML"),
    ("twice.yaml", "bf16: true\nbf16: false\n", "twice.yaml", "written twice"),
    ("broken.json", '{"train_batch_size": 3,}', "broken.json", "not valid JSON"),
    ("twice.json", '{"bf16": {}, "bf16": {}}', "twice.json", "written twice"),
    ("comment.json", '{\n// batch\n"train_batch_size": 3}', "comment.json", "not valid JSON"),
    ("list.json", "[1, 2]", "list.json", "expected a mapping"),
    ("infinite.json", '{"train_batch_size": 1e999}', "infinite.json", "is inf"),
    ("broken.toml", "[training\nsteps = 3", "broken.toml", "not valid TOML"),
    ("strange.yaml", "title: a\nauthor: b\n", "strange.yaml", "keys of no known tool (found: title, author)"),
    ("nothing.json", "{}", "nothing.json", "no known tool (found: no keys)"),
    ("rate.yaml", "output_dir: x\nlearning_rate: fast\n", "rate.yaml: learning_rate", "'fast' is not allowed"),
    ("batch.json", '{"train_batch_size": 2.5}', "batch.json: train_batch_size", "2.5 is not allowed"),
    ("stage.json", '{"zero_optimization": {"stage": 5}}', "stage.json: zero_optimization.stage", "5 is not allowed"),
    ("flag.yaml", "output_dir: x\nbf16: maybe\n", "flag.yaml: bf16", "'maybe' is not allowed"),
    ("negative.yaml", "output_dir: x\nlearning_rate: -1\n", "negative.yaml: learning_rate", "-1.0 is not allowed"),
]


@pytest.mark.parametrize(("name", "text", "asked", "found"), WRONG, ids=[one[0] for one in WRONG])
def test_wrong_files_are_refused(name: str, text: str, asked: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        import_file(path)
    assert asked in raised.value.asked
    assert found in raised.value.found
    assert raised.value.fix


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00{")
    for path in (tmp_path / "none.yaml", tmp_path / "none.json", tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(InputError):
            import_file(path)


def test_an_unknown_tool_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="accelerate, axolotl, deepspeed, lightning, llama-factory") as raised:
        import_file(tmp_path / "a.yaml", "megatron")
    assert raised.value.asked == "--from megatron"


def test_the_command_writes_both_files_and_lists_each_key(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}, "frobnicate": 1}))
    result = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    said = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    assert said["train_batch_size"] == ["8", "train.batch:", "8"]
    assert said["frobnicate"] == ["1", "unknown:", "no", "key", "of", "DeepSpeed", "that", "tightfit", "knows"]
    assert "add the model" in result.output
    job = (tmp_path / "out" / "job.yaml").read_text()
    assert "# To do: add the model" in job
    assert yaml.safe_load(job) == {"train": {"batch": 8}, "allow": []}
    assert yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text()) == {"precision": "fp32", "zero": 3}
    again = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "out")])
    assert isinstance(again.exception, InputError)
    assert again.exception.exit_code == 2
    assert "already contains job.yaml" in str(again.exception)


def test_json_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "arguments.yaml"
    file.write_text("per_device_train_batch_size: 4\nbf16: true\n")
    result = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "out"), "--devices", "4", "--json"])
    content = json.loads(result.output)
    assert content["tool"] == "transformers"
    assert content["job"]["train"]["batch"] == 16
    assert content["plan"]["micro_batch"] == 4
    keys = {row["key"]: row for row in content["keys"]}
    assert keys["bf16"] == {
        "key": "bf16",
        "value": True,
        "outcome": "mapped",
        "field": "plan.precision",
        "result": "bf16-mixed",
        "note": None,
    }
    assert all(Path(one).exists() for one in content["files"])
