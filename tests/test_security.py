"""What SECURITY.md promises about files from elsewhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import tightfit
from tests import tiny
from tightfit.data.tokenizer import load_tokenizer
from tightfit.errors import InputError

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "foreign"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


class Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code ran"


@pytest.fixture
def folder(tmp_path: Path, marker: Path) -> Path:
    """A model's folder with code, of a kind that only that code knows, and weights that are a pickle."""
    made = tmp_path / "foreign"
    made.mkdir()
    (made / "own.py").write_text(CODE.format(marker=str(marker)))
    sizes = {name: value for name, value in tiny.MODEL.items() if name != "architecture"}
    config = LlamaConfig(**sizes).to_dict() | {"model_type": "foreign", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (made / "config.json").write_text(json.dumps(config))
    described = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}}
    (made / "tokenizer_config.json").write_text(json.dumps(described))
    with (made / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Touches(marker), file)
    return made


@pytest.mark.parametrize("known", [False, True], ids=["a kind of its own", "a known kind"])
def test_code_and_pickles_in_a_model_folder_are_not_run(known: bool, folder: Path, marker: Path) -> None:
    if known:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        )
    job = {**tiny.content(), "model": {"from": str(folder), "task": "causal-lm"}}
    with pytest.raises(InputError):
        tightfit.build(tightfit.Job.parse(job))
    assert not marker.exists()
    with pytest.raises(InputError, match="never run"):
        tightfit.build(tightfit.Job.parse({**job, "model": {**job["model"], "config": {"trust_remote_code": True}}}))
    assert not marker.exists()


def test_code_of_a_tokenizer_is_not_run(folder: Path, marker: Path) -> None:
    with pytest.raises(InputError):
        load_tokenizer(str(folder))
    assert not marker.exists()


def test_yaml_makes_plain_values_only(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{marker}]]")
    with pytest.raises(InputError):
        tightfit.Job.load(path)
    assert not marker.exists()
