"""Adapters, prompts and chats of other tools' files become jobs that load, and whose samples and
adapters are what the files say."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from tests.models.test_pretrained import TEMPLATE, write_pretrained
from tightfit.cli import app
from tightfit.data import open_samples
from tightfit.errors import InputError
from tightfit.importers.importing import IMPORTERS, Imported, file_texts, import_content, import_file
from tightfit.importers.mapping import Importer
from tightfit.job import Job, LoraSpec, ModelSpec
from tightfit.models import model_factory

FILES = Path(__file__).parent / "files"
ROWS = {
    "pairs": [{"question": f"Add {n}.", "answer": f"It is {n}."} for n in range(40)],
    "instructions": [{"instruction": f"Add {n}.", "input": "", "output": f"It is {n}."} for n in range(40)],
    "chats": [
        {"turns": [{"from": "human", "value": f"Add {n}."}, {"from": "gpt", "value": f"It is {n}."}]} for n in range(40)
    ],
    "texts": [{"body": f"{n} is a number. " * 3} for n in range(40)],
}
LAST = "It is 7."  # the answer of row 7
LORA = {"rank": 4, "alpha": 8}
TORCHTUNE = {
    "model": {
        "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
        "lora_attn_modules": ["q_proj", "output_proj"],
        "lora_rank": 4,
        "lora_alpha": 8,
    },
    "tokenizer": {"max_seq_len": 64},
    "checkpointer": {"checkpoint_dir": "model"},
    "max_steps_per_epoch": 4,
    "epochs": 1,
    "batch_size": 2,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
}
AXOLOTL = {
    "base_model": "model",
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "o_proj"],
    "sequence_len": 64,
    "micro_batch_size": 2,
    "max_steps": 4,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
}
LLAMA_FACTORY = {
    "model_name_or_path": "model",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,o_proj",
    "cutoff_len": 64,
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
}
SFT = {
    "model_name_or_path": "model",
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "o_proj"],
    "max_length": 64,
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
}
CHAT = {"type": "chat_template", "message_property_mappings": {"role": "from", "content": "value"}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # file, text of row 7, text that counts in the loss
    "axolotl-chat": (
        {**AXOLOTL, "datasets": [{"path": "chats.jsonl", "field_messages": "turns", **CHAT}]},
        "<|user|>Add 7.<|assistant|>It is 7.",
        LAST,
    ),
    "axolotl-alpaca": (
        {
            **AXOLOTL,
            "sequence_len": 256,
            "datasets": [{"path": "instructions.jsonl", "type": "alpaca"}],
            "train_on_inputs": True,
        },
        "### Instruction:\nAdd 7.\n\n### Response:It is 7.",
        "an instruction that describes a task",
    ),
    "llama-factory-chats": (
        {**LLAMA_FACTORY, "cutoff_len": 128, "dataset": "chats", "template": "chatml"},
        "<|im_start|>user\nAdd 7.<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>",
        f"{LAST}<|im_end|>\n",
    ),
    "llama-factory-pairs": (
        {**LLAMA_FACTORY, "dataset": "pairs"},
        "<|user|>Add 7.<|assistant|>It is 7.",
        LAST,
    ),
    "torchtune-instruct": (
        {
            **TORCHTUNE,
            "dataset": {
                "_component_": "torchtune.datasets.instruct_dataset",
                "source": "json",
                "data_files": "pairs.jsonl",
                "column_map": {"input": "question", "output": "answer"},
            },
        },
        "<|user|>Add 7.<|assistant|>It is 7.",
        LAST,
    ),
    "torchtune-text": (
        {
            **TORCHTUNE,
            "dataset": {
                "_component_": "torchtune.datasets.text_completion_dataset",
                "source": "json",
                "data_files": "texts.jsonl",
                "column": "body",
                "packed": True,
            },
        },
        "7 is a number.",
        "7 is a number.",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, files of rows and a dataset_info.json."""
    folder = tmp_path_factory.mktemp("imports")
    config = write_pretrained(folder / "model") / "config.json"
    template = TEMPLATE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 512}))
    (folder / "data").mkdir()
    for name, rows in ROWS.items():
        for place in (folder, folder / "data"):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = {
        "pairs": {"file_name": "pairs.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return folder


def write_import(folder: Path, content: dict[str, Any], name: str) -> Imported:
    """Import a file with this content, and write the job and the plan beside it."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    imported = import_file(path)
    (folder / name).mkdir()
    for file, text in file_texts(imported, path).items():
        (folder / name / file).write_text(text)
    return imported


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_the_file(name: str, folder: Path) -> None:
    content, text, counted = CASES[name]
    imported = write_import(folder, content, name)
    assert imported.contradictions == ()
    assert all("--devices" in sentence for sentence in imported.to_do), imported.to_do
    job = Job.load(folder / name / "job.yaml")
    samples = open_samples(job)
    found = []
    for number in range(len(samples)):
        batch = samples.batch(np.array([number]), np.array([0]))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        found.append((samples.tokenizer.decode(ids), samples.tokenizer.decode(labels[labels != -100])))
    label = next(label for whole, label in found if text in whole)
    if text == counted or counted.startswith("an instruction"):
        assert counted in label
    else:
        assert label == counted


@pytest.mark.parametrize("name", ["axolotl-chat", "llama-factory-pairs", "torchtune-instruct"])
def test_adapters_are_those_of_the_file(name: str, folder: Path) -> None:
    pytest.importorskip("peft")
    imported = write_import(folder, CASES[name][0], f"{name}-adapters")
    job = Job.load(folder / f"{name}-adapters" / "job.yaml")
    assert isinstance(job.model, ModelSpec)
    assert isinstance(job.model.lora, LoraSpec)
    assert (job.model.lora.rank, job.model.lora.alpha) == (4, 8)
    assert imported.job["model"]["lora"]["targets"] == ["q_proj", "o_proj"]
    model = model_factory(job.model)()
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    layers = len(model.model.layers)
    assert len(trained) == layers * 2 * 2
    assert all(".q_proj.lora_" in name or ".o_proj.lora_" in name for name in trained)


def test_the_text_of_a_template_becomes_a_file(folder: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    content = {**AXOLOTL, "chat_template_jinja": template}
    content["datasets"] = [{"path": "chats.jsonl", "field_messages": "turns", **CHAT}]
    content["train_on_inputs"] = True
    imported = write_import(folder, content, "template")
    assert imported.files == {"chat_template.jinja": template}
    samples = open_samples(Job.load(folder / "template" / "job.yaml"))
    ids = samples.batch(np.array([0]), np.array([0]))["input_ids"][0]
    assert samples.tokenizer.decode(ids).startswith("[user] Add ")


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "content",
    [
        CASES["axolotl-chat"][0],
        {**CASES["llama-factory-chats"][0], "quantization_bit": 4},
        pytest.param(CASES["torchtune-instruct"][0], marks=pytest.mark.slow),
        pytest.param({**SFT, "assistant_only_loss": True, "dataset_name": "saved"}, marks=pytest.mark.slow),
    ],
    ids=["axolotl", "llama-factory", "torchtune", "transformers"],
)
def test_explain_reads_the_imported_job(content: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if content.get("dataset_name") == "saved":
        from datasets import Dataset

        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 40
        Dataset.from_list(rows).save_to_disk(folder / "saved")
    path = folder / "explained.yaml"
    path.write_text(yaml.safe_dump(content))
    for file, text in file_texts(import_file(path), path).items():
        (tmp_path / file).write_text(text)
    arguments = ["explain", str(tmp_path / "job.yaml"), "--plan", str(tmp_path / "plan.yaml"), "--machine", "h100-sxm"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "LoRA of rank 4" in result.output
    assert ("in 4 bits" in result.output) == ("quantization_bit" in content)


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("axolotl", {"adapter": "qlora", "lora_r": 8}, "adapter is qlora, but load_in_4bit is off"),
    ("axolotl", {"load_in_4bit": True}, "load_in_4bit needs adapters, but adapter is not given"),
    ("axolotl", {"adapter": "lora", "unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters trains weights"),
    ("llama-factory", {"finetuning_type": "full", "use_dora": True}, "use_dora needs adapters"),
    ("llama-factory", {"finetuning_type": "lora", "use_galore": True}, "use_galore is for full training"),
    ("llama-factory", {"train_on_prompt": True, "mask_history": True}, "mask_history and train_on_prompt"),
    ("llama-factory", {"stage": "pt", "neat_packing": True}, "neat_packing is for stage sft"),
    ("torchtune", {"model": {"_component_": "a.llama3_8b", "use_dora": True}}, "model.use_dora needs adapters"),
    ("transformers", {"load_in_4bit": True}, "load_in_4bit needs adapters, but use_peft is off"),
    ("transformers", {"use_peft": True, "load_in_4bit": True, "load_in_8bit": True}, "weights have one type"),
]


@pytest.mark.parametrize(("tool", "content", "said"), CONTRADICTIONS)
def test_adapters_of_full_training_are_named(tool: str, content: dict[str, Any], said: str) -> None:
    imported = import_content(next(one for one in IMPORTERS if one.name == tool), content, "file")
    assert any(said in sentence for sentence in imported.contradictions), imported.contradictions


def test_defaults_of_adapters_need_adapters() -> None:
    importer = next(one for one in IMPORTERS if one.name == "transformers")
    keys = {row.key for row in import_content(importer, {"output_dir": "x"}, "file").rows}
    assert not keys & {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "packing"}


def test_a_template_that_some_data_do_not_use_is_named() -> None:
    importer = next(one for one in IMPORTERS if one.name == "axolotl")
    sets = [{"path": "a", "type": "alpaca"}, {"path": "b", "type": "chat_template"}]
    imported = import_content(importer, {**AXOLOTL, "datasets": sets, "chat_template": "chatml"}, "file")
    assert any("data.chat_template may hold for all sources" in sentence for sentence in imported.to_do)


def test_json_that_is_one_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS["pairs"]))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**AXOLOTL, "datasets": [{"path": "rows.json", "type": "completion"}]}))
    imported = import_file(path)
    assert any("rows.json as JSON lines" in sentence for sentence in imported.to_do)


ODD: list[Any] = [True, 0, 3, 0.5, "", "x", "a.json", [], [1, "x"], ["x"], {"a": 1}, {"a": ["b"]}, None]
KEYS = ("type", "path", "data_files", "name", "split", "field", "field_messages", "message_property_mappings", "roles")
KEYS += ("roles_to_train", "chat_template", "chat_template_jinja", "ds_type", "train_on_eos")
INFO = ("file_name", "hf_hub_url", "formatting", "columns", "tags", "split", "subset", "ranking")


def test_no_data_set_ends_in_a_traceback() -> None:
    importers = {one.name: one for one in IMPORTERS}
    for value in ODD:
        for key in KEYS:
            one = {"path": "a.jsonl", "field_messages": "turns", **CHAT, key: value}
            refuse_or_import(importers["axolotl"], {**AXOLOTL, "datasets": [one, {"path": "b", "type": "alpaca"}]})
        for key in INFO:
            info = {"a": {"file_name": "a.json", "formatting": "sharegpt", key: value}}
            refuse_or_import(importers["llama-factory"], {**LLAMA_FACTORY, "dataset": "a", "dataset_dir": info})


def refuse_or_import(importer: Importer, content: dict[str, Any]) -> None:
    """Import a content, which may be refused with an InputError and with no other error."""
    with contextlib.suppress(InputError):
        import_content(importer, content, "file")
