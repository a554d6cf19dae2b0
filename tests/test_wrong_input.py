"""More than forty common mistakes: each ends with exit code 2 and a message that names the fix."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny
from tightfit.__main__ import main
from tightfit.report import commands

GOOD: dict[str, Any] = {
    "model": tiny.LLAMA,
    "data": {"synthetic": "tokens", "sequence_length": 16, "samples": 64},
    "train": {"batch": 4, "steps": 2},
    "plan": "reference",
}
VIT = {
    "architecture": "vit",
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
SPARSE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.table(x).mean(1))

def make():
    return Model()

def data():
    return [(torch.arange(3), i % 2) for i in range(8)]
"""


@dataclass(frozen=True)
class Mistake:
    """`change` edits the valid job (a dotted path to a value; DROP removes it); the message must
    contain all of `says`."""

    name: str
    change: dict[str, Any]
    says: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


DROP = object()

MISTAKES = [
    # the file
    Mistake("no model", {"model": DROP}, ("model", "is needed", "preset: gpt2")),
    Mistake("no data", {"data": DROP}, ("data", "is needed", "python-stdlib")),
    Mistake("unknown section", {"trian": {}}, ("trian", "did you mean 'train'")),
    Mistake("model is a word", {"model": "gpt2"}, ("model", "preset: gpt2")),
    Mistake("missing job file", {}, ("no such file",), ("nowhere.yaml",)),
    Mistake(
        "job is not YAML", {}, ("not valid YAML",), ("broken.yaml",), {"broken.yaml": "model: {preset: gpt2\ndata: ]"}
    ),
    Mistake("job is a list", {}, ("expected a mapping",), ("list.yaml",), {"list.yaml": "- 1\n- 2\n"}),
    Mistake("set without value", {}, ("KEY=VALUE", "train.steps=20"), ("job.yaml", "--set", "train.steps")),
    Mistake(
        "set of an unknown field", {}, ("unknown field", "did you mean 'steps'"), ("job.yaml", "--set", "train.step=3")
    ),
    # the model
    Mistake("two models", {"model.preset": "gpt2"}, ("preset and architecture", "exactly one")),
    Mistake("unknown preset", {"model": {"preset": "gpt-2"}}, ("gpt-2", "gpt2")),
    Mistake("unknown architecture", {"model.architecture": "lama"}, ("lama", "llama")),
    Mistake("unknown config key", {"model.hiden_size": 8}, ("hiden_size", "hidden_size")),
    Mistake("config key without architecture", {"model": {"hidden_size": 8}}, ("hidden_size", "unknown field")),
    Mistake("heads do not divide", {"model.num_attention_heads": 3}, ("fix",)),
    Mistake("no such folder", {"model": {"from": "nowhere"}}, ("nowhere", "config.json")),
    Mistake("no such Python file", {"model": {"python": "nowhere.py:make"}}, ("nowhere.py", "fix")),
    Mistake(
        "no such function", {"model": {"python": "m.py:mke"}}, ("mke", "make"), files={"m.py": "def make(): return 1\n"}
    ),
    Mistake(
        "not a module", {"model": {"python": "m.py:make"}}, ("nn.Module",), files={"m.py": "def make(): return 1\n"}
    ),
    Mistake("wrong blocks", {"model.blocks": "model.layrs", "plan": {"recompute": "full"}}, ("model.layers",)),
    *(
        Mistake(
            f"sparse gradients with {name}",
            {"model": {"python": "m.py:make"}, "data": {"python": "m.py:data"}, "plan": plan},
            ("model (table)", "sparse=False"),
            files={"m.py": SPARSE},
        )
        for name, plan in (("any plan", {}), ("the reference", "reference"))
    ),
    # the data
    Mistake("two sources", {"data.text": "x"}, ("text and synthetic", "exactly one")),
    Mistake("unknown data field", {"data.sequence_lenght": 4}, ("did you mean 'sequence_length'",)),
    Mistake("missing text", {"data": {"text": "nowhere.txt"}}, ("nowhere.txt", "fix")),
    Mistake("empty text", {"data": {"text": "t.txt"}}, ("t.txt", "fix"), files={"t.txt": ""}),
    Mistake(
        "text shorter than a sequence",
        {"data": {"text": "t.txt", "sequence_length": 512}},
        ("sequence_length",),
        files={"t.txt": "ab"},
    ),
    Mistake(
        "broken line",
        {"data": {"jsonl": "d.jsonl", "sequence_length": 4}},
        ("d.jsonl:2", "skip_damaged"),
        files={"d.jsonl": '{"text": "abc abc abc"}\n{"text": \n'},
    ),
    Mistake(
        "missing field",
        {"data": {"jsonl": "d.jsonl", "field": "body"}},
        ("body", "text"),
        files={"d.jsonl": '{"text": "a"}\n'},
    ),
    Mistake("sequence longer than the model's positions", {"data.sequence_length": 64}, ("64", "32")),
    Mistake(
        "images without classes",
        {"model": VIT, "data": {"images": "empty"}},
        ("empty", "fix"),
        files={"empty/readme.txt": "x"},
    ),
    Mistake("tokens for an image model", {"model": VIT}, ("images",)),
    Mistake("mask probability", {"data.mask_probability": 2}, ("mask_probability", "less than 1")),
    # training
    Mistake("batch of nothing", {"train.batch": 0}, ("batch", "more than 0")),
    Mistake("batch is text", {"train.batch": "many"}, ("batch", "whole number")),
    Mistake("batch is a boolean", {"train.batch": True}, ("train: batch", "not true")),
    Mistake("learning rate is a boolean", {"train.learning_rate": True}, ("learning_rate", "not true")),
    Mistake("steps and epochs", {"train.epochs": 2}, ("steps", "epochs", "keep the one")),
    Mistake("unknown optimizer", {"train.optimizer": "adam"}, ("adamw",)),
    Mistake("unknown schedule", {"train.schedule": "cosin"}, ("cosine",)),
    Mistake("negative learning rate", {"train.learning_rate": -1}, ("more than 0",)),
    Mistake("warm-up longer than the training", {"train.warmup": 5}, ("warmup", "at most 2")),
    Mistake("scaled from no batch", {"train.scale_learning_rate": "linear"}, ("base_batch",)),
    Mistake("tracker that is not installed", {"train.trackers": ["wandb"]}, ("wandb", "pip install")),
    # several devices
    Mistake("zero on one device", {"plan": {"zero": 3}}, ("dp_shard", "zero: 0")),
    Mistake("more devices than processes", {"plan": {"dp_replicate": 2}}, ("1 process trains", "--nproc 2")),
    Mistake("more devices than samples", {"plan": {"dp_replicate": 64}}, ("a sample", "at most")),
    Mistake(
        "compressed without replicas",
        {"plan": {"compressed_gradients": "bf16"}, "allow": ["compressed-gradients"]},
        ("dp_replicate: 2",),
    ),
    Mistake(
        "compressed without permission",
        {"plan": {"compressed_gradients": "bf16", "dp_replicate": 2}},
        ("allow: [", "compressed-gradients"),
    ),
    # what is allowed, and limits
    Mistake("unknown permission", {"allow": ["bf61"]}, ("bf16",)),
    Mistake("memory in parsecs", {"limits": {"memory": "3 parsecs"}}, ("24GiB",)),
    # the plan
    Mistake("loss scale without fp16", {"plan": {"loss_scale": 128}}, ("loss_scale has no effect", "fp16-mixed")),
    Mistake("unknown plan field", {"plan": {"precison": "fp32"}}, ("did you mean 'precision'",)),
    Mistake("unknown precision", {"plan": {"precision": "bf16"}}, ("bf16-mixed",)),
    Mistake("micro-batch is a boolean", {"plan": {"micro_batch": True}}, ("plan: micro_batch", "not true")),
    Mistake("zero is a boolean", {"plan": {"zero": True, "dp_shard": 2}}, ("zero", "not true")),
    Mistake("unknown recompute", {"plan": {"recompute": "some"}}, ("selective", "every-2")),
    Mistake("bf16 where only fp32 is allowed", {"allow": [], "plan": {"precision": "bf16-mixed"}}, ("allow: [bf16]",)),
    Mistake("8-bit states not allowed", {"plan": {"states": "8-bit"}}, ("8-bit-states",)),
    Mistake("micro-batch above the batch", {"plan": {"micro_batch": 8}}, ("at most 4",)),
    Mistake(
        "update in backward with micro-batches",
        {"plan": {"update_in_backward": True, "micro_batch": 2}},
        ("micro_batch: 4",),
    ),
    Mistake(
        "update in backward with clipping", {"train.clip": 1.0, "plan": {"update_in_backward": True}}, ("train.clip",)
    ),
    Mistake("kahan in fp32", {"plan": {"rounding": "kahan"}}, ("bf16-true",)),
    Mistake(
        "narrow states of Adafactor",
        {"train.optimizer": "adafactor", "allow": ["8-bit-states"], "plan": {"states": "8-bit"}},
        ("states: fp32",),
    ),
    Mistake("fused Lion", {"train.optimizer": "lion", "plan": {"fused_optimizer": True}}, ("fused_optimizer: false",)),
    Mistake(
        "chunked loss of an image model",
        {"model": VIT, "data": {"synthetic": "images", "samples": 8}, "plan": {"chunked_loss": 8}},
        ("leave out chunked_loss",),
    ),
    Mistake("plan file that is not there", {}, ("no such file",), ("job.yaml", "--plan", "nowhere.yaml")),
    # the command
    Mistake("resume of nothing", {}, ("no checkpoint in this folder", "--resume"), ("job.yaml", "--resume")),
    Mistake("out is a file", {}, ("is a file", "folder"), ("job.yaml", "--out", "out"), {"out": ""}),
]


def changed(change: dict[str, Any]) -> dict[str, Any]:
    job = copy.deepcopy(GOOD)
    for path, value in change.items():
        *sections, last = path.split(".")
        place = job
        for section in sections:
            place = place[section]
        if value is DROP:
            del place[last]
        else:
            place[last] = value
    return job


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_exits_with_code_2_and_a_remedy(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in mistake.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed(mistake.change)))
    monkeypatch.setattr(sys, "argv", ["tightfit", "train", *(mistake.arguments or ("job.yaml",))])
    with pytest.raises(SystemExit) as ended:
        main()
    message = capsys.readouterr().err
    assert ended.value.code == 2, message
    assert "fix: " in message
    assert "Traceback" not in message
    for words in mistake.says:
        assert words in message
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_at_least_forty_mistakes_are_tested() -> None:
    assert len(MISTAKES) >= 40
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(
    "change",
    [
        {"data": {"text": "nowhere.txt", "sequence_length": 8}},
        {"data": {"jsonl": ["nowhere.jsonl"], "sequence_length": 8}},
        {"data": {"dataset": "./nowhere", "sequence_length": 8}},
        {"data": {"text": "job.yaml", "tokenizer": "nowhere.json", "sequence_length": 8}},
        {"model": VIT, "data": {"images": "nowhere"}},
        {"model": {"from": "./nowhere"}},
        {"evaluate": {"data": {"parquet": "nowhere"}}},
    ],
    ids=str,
)
def test_missing_inputs_are_found_before_a_plan_is_chosen(
    command: str,
    change: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed({**change, "plan": DROP})))
    monkeypatch.setattr(sys, "argv", ["tightfit", command, "job.yaml"])
    monkeypatch.setattr(commands, "this_machine", lambda say: pytest.fail("the machine is measured first"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err


def test_explain_says_that_data_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed({"data": {"text": "nowhere.txt", "sequence_length": 8}})))
    monkeypatch.setattr(sys, "argv", ["tightfit", "explain", "job.yaml", "--machine", "a100-80gb"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "nowhere.txt: no such file or folder; explained without it" in capsys.readouterr().out
