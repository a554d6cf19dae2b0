"""QLoRA on prompts and responses: a pretrained folder with its own tokenizer and chat template is
explained, trained with its frozen layers in 4 bits, resumed, exported, merged and asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tightfit
from tests.models.test_pretrained import write_pretrained
from tightfit.cli import app
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models.lora import ADAPTER_FILE
from tightfit.models.nf4 import Nf4Linear
from tightfit.report.explain import logical_rows
from tightfit.report.export import export, generate, load_trained
from tightfit.report.run_folder import train_in_folder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's call
CHAT = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_job(folder: Path, steps: int = 4) -> Job:
    """Return a job on a tiny Llama of a local folder, and on rows of prompts and responses."""
    base, rows = folder / "base", folder / "chats.jsonl"
    if not base.exists():
        write_pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(base)
        said = [{"prompt": f"quick {word}?", "response": "over the dog."} for word in ("fox", "box")]
        rows.write_text("".join(json.dumps(one) + "\n" for one in said * 8))
    return Job.parse(
        {
            "model": {"from": str(base), "lora": {"rank": 4, "alpha": 8, "targets": "all-linear", "quantize": "nf4"}},
            "data": {
                "jsonl": str(rows),
                "format": "prompt-response",
                "chat_template": "tokenizer",
                "sequence_length": 18,  # the tokens of each row, so that the prediction is exact
            },
            "train": {"batch": 8, "steps": steps, "learning_rate": 1e-2, "trackers": [], "schedule": "constant"},
        }
    )


@pytest.mark.slow
def test_qlora_from_a_folder_to_peft(tmp_path: Path) -> None:
    job, plan, machine = make_job(tmp_path), tightfit.Plan(), Machine.detect()
    text = tightfit.explain(job, plan=plan)
    assert "frozen layers in 4 bits (nf4)" in text
    estimate = tightfit.estimate(job, plan, machine)
    record, sample, _ = train_in_folder(job, plan, machine, tmp_path / "run", False, estimate.content())
    assert record.peak_bytes.measured == pytest.approx(sum(logical_rows(estimate).values()), rel=0.05)
    assert record.loss[-1][1] < record.loss[0][1]
    assert sample

    trained = load_trained(tmp_path / "run")
    ids = trained.tokenizer("quick fox?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = trained.model(ids).logits
    quantized = [module for module in trained.model.modules() if isinstance(module, Nf4Linear)]
    assert len(quantized) == 7 * 2  # of two blocks

    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
        for folder in (tmp_path / "adapters", trained.path / "adapter"):
            # peft puts the same adapters beside the weights that the 4 bits stand for
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            for name, module in trained.model.named_modules():
                if isinstance(module, Nf4Linear):
                    base.get_submodule(name.removesuffix(".base_layer")).weight = module.dequantized().weight
            adapted = PeftModel.from_pretrained(base, folder)
            torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == CHAT

    said = [{"role": "user", "content": "quick fox?"}]
    asked = trained.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    made = merged.generate(asked, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, asked.shape[1] :]
    answer = generate(tmp_path / "run", "quick fox?", tokens=5, chat=True)
    assert answer == trained.tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.slow
def test_the_commands_train_resume_and_export(tmp_path: Path) -> None:
    run = CliRunner().invoke
    whole, twice = tmp_path / "whole", tmp_path / "twice"
    for steps, out, options in ((4, whole, []), (2, twice, []), (4, twice, ["--resume"])):
        path = tmp_path / "job.yaml"
        path.write_text(make_job(tmp_path, steps).to_yaml())
        done = run(app, ["train", str(path), "--out", str(out), *options])
        assert done.exit_code == 0, done.output
    one, other = (load_file(load_trained(folder).path / "adapter" / ADAPTER_FILE) for folder in (whole, twice))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-7)

    done = run(app, ["export", str(twice), "--to", str(tmp_path / "out"), "--merge", "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    done = run(app, ["generate", str(twice), "quick fox?", "--tokens", "3", "--chat"])
    assert done.exit_code == 0, done.output
