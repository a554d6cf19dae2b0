"""A pretrained model gives its weights, its config and its tokenizer, from a folder or from the cache
of the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tightfit
from tests import tiny
from tightfit.data import describe_tokenizer, open_samples
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.models import model_factory
from tightfit.models.pretrained import pretrained_folder

TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
TEXT = ["The quick brown fox jumps over the lazy dog. " * 8, "Pack my box with five dozen liquor jugs. " * 8]


def write_pretrained(folder: Path) -> Path:
    """Write a tiny Llama with a tokenizer of its own, as transformers' save_pretrained does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<stop>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "architecture"}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def write_hub_cache(cache: Path, name: str) -> Path:
    """Write a tiny Llama into a cache of the Hub, as huggingface_hub lays it out. Return its
    snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return write_pretrained(repository / "snapshots" / revision)


def make_job(source: str, folder: Path, **data: Any) -> Job:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    return Job.parse(
        {
            "model": {"from": source},
            "data": {"jsonl": str(folder / "texts.jsonl"), "sequence_length": 16, **data},
            "train": {"batch": 2, "steps": 2, "learning_rate": 1e-3, "trackers": []},
        }
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_folder_gives_its_tokenizer_to_the_data(tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "model")
    job = make_job(str(folder), tmp_path)
    samples = open_samples(job)
    plain = AutoTokenizer.from_pretrained(folder)
    assert samples.tokenizer.get_vocab() == plain.get_vocab()
    assert samples.tokenizer.chat_template == TEMPLATE
    assert str(folder) in str(describe_tokenizer(job))
    row = samples.batch([0], 1)["input_ids"][0]
    assert plain.decode(row) in TEXT[0] + plain.eos_token + TEXT[1]


def test_data_may_name_another_tokenizer(tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "model")
    other = shutil.copytree(folder, tmp_path / "other")
    named = make_job(str(folder), tmp_path, tokenizer=str(other))
    assert describe_tokenizer(named) == f"{other} (data.tokenizer)"
    trained = make_job(str(folder), tmp_path, vocabulary_size=270)
    assert "byte-level BPE of 270 tokens" in str(describe_tokenizer(trained))
    assert len(open_samples(trained).tokenizer) <= 270


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, cache: Path) -> None:
    snapshot = write_hub_cache(cache, "org/name")
    assert pretrained_folder("org/name", weights=True) == snapshot
    job = make_job("org/name", tmp_path)
    expected = LlamaForCausalLM.from_pretrained(snapshot).state_dict()
    found = model_factory(job.model)().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert open_samples(job).tokenizer.chat_template == TEMPLATE


def test_a_job_file_may_name_a_hub_id(tmp_path: Path, cache: Path) -> None:
    write_hub_cache(cache, "org/name")
    path = tmp_path / "job.yaml"
    path.write_text(make_job("org/name", tmp_path).to_yaml())
    job = Job.load(path)
    assert isinstance(job.model, tightfit.job.ModelSpec)
    assert job.model.from_ == "org/name"


@pytest.mark.parametrize("source", ["org/missing", "missing"])
def test_an_unknown_tokenizer_is_named_by_its_field(source: str, tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "model")
    with pytest.raises(InputError) as caught:
        open_samples(make_job(str(folder), tmp_path, tokenizer=source))
    assert caught.value.asked == f"job: data.tokenizer={source}"


@pytest.mark.parametrize("source", ["org/missing", "missing"])
def test_an_unknown_model_is_refused_offline(source: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        model_factory(make_job(source, tmp_path).model)()
    assert "HF_HUB_OFFLINE is set" in caught.value.found
    assert f"hf download {source}" in caught.value.fix


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("./modle", "model"),
        ("modle", "model"),
        ("models/tny", "models/tiny"),
        ("model/tiny", "models/tiny"),
        ("modles/tiny", "models/tiny"),
    ],
)
def test_a_mistyped_folder_is_answered_before_the_hub(
    source: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job file, and in Python."""
    for folder in (tmp_path / "model", tmp_path / "models" / "tiny"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(make_job(source, tmp_path).to_yaml())
    for make in (lambda: Job.load(path), lambda: make_job(source, tmp_path)):
        with pytest.raises(InputError, match=f"did you mean .*{meant}\\?") as raised:
            model_factory(make().model)()
        assert "no such folder" in raised.value.found


def test_similar_folders_do_not_hide_the_hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded model is used although a local folder has a similar name; folders without a model,
    and other names, do not count."""
    write_hub_cache(cache, "org/name-2")
    (tmp_path / "org" / "name-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    for source in ("org/name-2", "org/name-3"):
        path.write_text(make_job(source, tmp_path).to_yaml())
        assert Job.load(path).model.from_ == source
    (tmp_path / "org" / "name-1" / "config.json").write_text("{}")
    path.write_text(make_job("org/name-2", tmp_path).to_yaml())
    assert Job.load(path).model.from_ == "org/name-2"
    path.write_text(make_job("org/name-3", tmp_path).to_yaml())
    with pytest.raises(InputError, match=r"did you mean org/name-1\?(.|\n)*hf download org/name-3"):
        Job.load(path)


def test_a_repository_without_weights_is_refused(tmp_path: Path, cache: Path) -> None:
    snapshot = write_hub_cache(cache, "org/name")
    (snapshot / "model.safetensors").unlink()
    job = make_job("org/name", tmp_path)
    with torch.device("meta"):
        assert model_factory(job.model)().lm_head.weight.is_meta  # planning needs no weights
    with pytest.raises(InputError) as caught:
        model_factory(job.model)()
    assert "does not have" in caught.value.found


def test_explain_and_the_checkpoint_have_the_tokenizer(tmp_path: Path) -> None:
    from tightfit.machine import Machine
    from tightfit.report.run_folder import train_in_folder

    folder = write_pretrained(tmp_path / "model")
    job = make_job(str(folder), tmp_path)
    plan = tightfit.Plan()
    assert f"{folder} (the model's own tokenizer)" in tightfit.explain(job, plan=plan)
    record, _, _ = train_in_folder(job, plan, Machine.detect(), tmp_path / "run")
    assert record.tokenizer == f"{folder} (the model's own tokenizer)"
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert saved.chat_template == TEMPLATE
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
