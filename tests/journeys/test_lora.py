"""LoRA on a pretrained folder with its own tokenizer: explained, trained, exported, and read by
transformers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tightfit
from tests.models.test_pretrained import TEMPLATE, make_job, write_pretrained
from tightfit.cli import app
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.report.explain import logical_rows
from tightfit.report.export import export, generate, load_trained
from tightfit.report.run_folder import train_in_folder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's call
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapted_job(tmp_path: Path, dora: bool = False) -> Job:
    content = make_job(str(write_pretrained(tmp_path / "base")), tmp_path).model_dump(mode="json", by_alias=True)
    model = {"from": str(tmp_path / "base"), "lora": {**LORA, "dora": dora}}
    train = {"batch": 8, "steps": 3, "learning_rate": 1e-2, "trackers": []}
    return Job.parse({"model": model, "data": content["data"], "train": train})


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dora", [False, True])
def test_lora_from_a_folder_to_transformers(dora: bool, tmp_path: Path) -> None:
    job, plan, machine = adapted_job(tmp_path, dora), tightfit.Plan(), Machine.detect()
    estimate = tightfit.estimate(job, plan, machine)
    record, sample, _ = train_in_folder(job, plan, machine, tmp_path / "run", False, estimate.content())

    predicted = sum(logical_rows(estimate).values())
    assert record.peak_bytes.measured == pytest.approx(predicted, rel=0.05)
    assert record.loss[-1][1] < record.loss[0][1]
    assert sample

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "base")("The quick brown", return_tensors="pt")["input_ids"]
    trained = load_trained(tmp_path / "run")
    with torch.no_grad():
        expected = trained.model(tokens).logits
        untrained = base(tokens).logits
    assert not torch.allclose(expected, untrained, atol=1e-3)

    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    beside = trained.path / "adapter"
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        for folder in (tmp_path / "adapters", beside):
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            adapted = PeftModel.from_pretrained(base, folder)
            torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-6, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE

    wanted = merged.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
    said = generate(tmp_path / "run", "The quick brown", tokens=5)
    assert said == trained.tokenizer.decode(wanted, skip_special_tokens=True)


def test_the_commands_export_and_generate(tmp_path: Path) -> None:
    train_in_folder(adapted_job(tmp_path), tightfit.Plan(), Machine.detect(), tmp_path / "run")
    run = CliRunner().invoke
    done = run(app, ["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merge", "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    assert "merged model and tokenizer" in done.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    for options in (["--chat"], ["--temperature", "0.7"]):
        done = run(app, ["generate", str(tmp_path / "run"), "The", "--tokens", "3", *options])
        assert done.exit_code == 0, done.output

    with pytest.raises(InputError, match="the prompt: has no tokens"):
        generate(tmp_path / "run", "")
    with pytest.raises(InputError, match=r"--tokens 100000: the model has \d+ positions") as caught:
        generate(tmp_path / "run", "The", tokens=100_000)
    assert caught.value.fix.startswith("use --tokens ")

    for folder, asked in ((tmp_path / "run", tmp_path / "out"), (tmp_path, tmp_path / "new")):
        with pytest.raises(InputError):
            export(folder, asked)
    with pytest.raises(InputError, match="use one of: fp32, bf16, fp16"):
        export(tmp_path / "run", tmp_path / "new", dtype="int8")


def test_a_run_without_adapters_is_exported_whole(tmp_path: Path) -> None:
    job = make_job(str(write_pretrained(tmp_path / "base")), tmp_path)
    train_in_folder(job, tightfit.Plan(), Machine.detect(), tmp_path / "run")
    with pytest.raises(InputError, match="no adapters"):
        export(tmp_path / "run", tmp_path / "out", merge=True)
    export(tmp_path / "run", tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = load_trained(tmp_path / "run").model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (weights,) = (tmp_path / "run").rglob("model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-10] ^= 0x41
    weights.write_bytes(content)
    with pytest.raises(InputError, match="its checksum differs"):
        export(tmp_path / "run", tmp_path / "damaged")
