"""Settings files: YAML beyond plain data of a bounded size is refused, with its place and a fix."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.data import model_input
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.models import model_config
from tightfit.plan import read_pins
from tightfit.units import parse_bytes
from tightfit.values import nearest, read_yaml
from tightfit.yaml_input import MOST_BYTES, parse_yaml, write_yaml

LLAMA = "architecture: llama, hidden_size: 16, num_attention_heads: 2, num_key_value_heads: 2, num_hidden_layers: 2"
REST = "data: {synthetic: tokens, sequence_length: 16}\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)

WRONG: list[tuple[str, str, str]] = [
    ("an empty field", f"'': 3\nmodel: {{{LLAMA}}}\n{REST}", "empty name"),
    ("no field", f"? \n: 3\nmodel: {{{LLAMA}}}\n{REST}", "field names must be strings"),
    ("config is text", f"model: {{architecture: llama, config: text}}\n{REST}", "model: config(.|\n)*mapping"),
    (
        "config is a number",
        f"model: {{{LLAMA}, config: 3}}\n{REST}",
        "model.config(.|\n)*write config: {hidden_size: 384}",
    ),
    (
        "config is a list",
        f"model: {{{LLAMA}, config: [3]}}\n{REST}",
        r"model.config: expected a mapping of config keys, found \[3\]",
    ),
    (
        "a vocabulary of text",
        f"model: {{{LLAMA}, vocab_size: text}}\n{REST}",
        "model.vocab_size='text'(.|\n)*default, 32000",
    ),
    ("labels of text", f"model: {{{LLAMA}, num_labels: x}}\n{REST}", "model.num_labels='x'"),
    (
        "a seed beyond 64 bits",
        f"model: {{{LLAMA}}}\n{REST}train: {{seed: {2**70}}}\n",
        "train.seed(.|\n)*beyond 64 bits",
    ),
    (
        "a memory of 400 digits",
        f"model: {{{LLAMA}}}\n{REST}limits: {{memory: {'9' * 400}}}\n",
        "limits.memory(.|\n)*beyond 64 bits",
    ),
    ("a number of 5000 digits", f"model: {{{LLAMA}}}\n{REST}train: {{seed: {'9' * 5000}}}\n", ":3: not valid YAML"),
    ("an infinite number", f"model: {{{LLAMA}, rms_norm_eps: .inf}}\n{REST}", "rms_norm_eps: is inf"),
    (
        "lists 500 deep",
        f"model: {{{LLAMA}}}\n{REST}plan: {'[' * 500}{']' * 500}\n",
        ":3: not valid YAML .nested more than 32",
    ),
    ("an alias bomb", BOMB, "not valid YAML .more than 50000 values"),
    ("an alias of itself", "model: &a {config: *a}\n", "an alias of a value that contains the alias"),
    ("a tag of Python's", "model: !!python/name:os.system\n", "not valid YAML"),
    ("a tag that does not suit", "model: !!int abc\n", "'abc' is no int"),
    ("a zero byte", f'model: {{from: "a\\0b"}}\n{REST}', "model.from: contains a zero byte"),
    ("half a pair", f'model: {{from: "\\ud800"}}\n{REST}', "half a surrogate"),
    (
        "base 60",
        f"model: {{{LLAMA}}}\n{REST}train: {{batch: 1:30}}\n",
        "train: batch: '1:30' is not allowed(.|\n)*a whole number",
    ),
    ("a source of nothing", f"model: {{preset: ''}}\n{REST}", "model.preset: is ''"),
    ("data is a list", f"model: {{{LLAMA}}}\ndata: []\n", "job: data: is a list"),
    ("a sequence without end", f"model: {{{LLAMA}}}\n{REST[:-2]}, target_length: 10000000000}}\n", "at most 16777216"),
    ("too large a file", "#" * (MOST_BYTES + 1), "too many for a file of settings"),
]


@pytest.mark.parametrize(("text", "says"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_invalid_job_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        model_input(Job.load(path))


def test_command_line_changes_follow_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{{LLAMA}}}\n{REST}")
    for change in ("train.seed=" + "9" * 400, "plan=" + "[" * 500, "train.batch=1:30", "a..b=1", "model.from=&a [*a]"):
        with pytest.raises(InputError):
            Job.load(path, [change])
    assert Job.load(path, ["train.learning_rate=1e-4", "train.batch=010"]).train.batch == 10


@pytest.mark.parametrize("text", ["9" * 400 + "GiB", 10**400, "1e400", -1, "9e18GiB", True])
def test_impossible_sizes_are_refused(text: Any) -> None:
    with pytest.raises(InputError, match="not a number of bytes"):
        parse_bytes(text)


def test_numbers_and_texts_are_read_as_written() -> None:
    read = parse_yaml("[1:30, 010, 2024-01-01, 1e-4, 1_000, 0x1f, 0o17, .5, -1.5e3, yes, ~, 1.2.3]")
    assert read == ["1:30", "010", "2024-01-01", 1e-4, 1000, 31, 15, 0.5, -1500.0, True, None, "1.2.3"]


@pytest.mark.parametrize(
    "value", ["1:30", "010", "1e5", "0o17", "null", "yes", "2024-01-01", "é🙂", "a: b", 1e-5, 10**15, "1_0", ""]
)
def test_written_yaml_is_read_back_by_yaml_1_1_and_1_2(value: Any) -> None:
    assert parse_yaml(write_yaml({"a": [value]})) == {"a": [value]}
    assert yaml.safe_load(write_yaml({"a": [value]})) == {"a": [value]}


def test_a_written_job_is_read_back_unchanged(tmp_path: Path) -> None:
    for model in (
        {"from": str(tmp_path), "config": {"vocab_size": 3}},
        {"architecture": "llama", "config": {"task": "x"}},
    ):
        job = Job.parse({"model": model, "data": {"synthetic": "tokens"}})
        assert Job.parse(parse_yaml(job.to_yaml())) == job


def test_impossible_paths_are_refused() -> None:
    from tightfit.data.text import Columns, open_text

    for path in ("~nobody-is-called-so/x", "a" * 5000):
        with pytest.raises(InputError, match="cannot be a path"):
            open_text(DataSpec(text=path), Columns("text"))


@pytest.mark.parametrize("architecture", ["detr", "musicgen", "informer", "florence2", "vision-encoder-decoder"])
def test_configs_without_a_padding_token_do_not_crash(architecture: str) -> None:
    job = Job.parse({"model": {"architecture": architecture}, "data": {"synthetic": "tokens"}})
    with suppress(InputError):
        assert model_config(job.model).model_type == architecture


def test_zero_over_more_groups_than_there_are_devices(tmp_path: Path) -> None:
    from tightfit.machine import Machine
    from tightfit.planner.defaults import data_parallel_degrees

    (tmp_path / "plan.yaml").write_text("dp_replicate: 9\nzero: 1\n")
    assert data_parallel_degrees(Machine.named("h100-sxm:8"), read_pins(tmp_path / "plan.yaml"))["dp_shard"] == 1


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"model: {preset: gpt2}\n# caf\xe9\n")
    with pytest.raises(InputError, match=r"job.yaml:2: is not UTF-8 text"):
        read_yaml(tmp_path / "job.yaml")


def test_a_folder_is_no_settings_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_yaml(tmp_path)
    assert refused.value.found == "is a folder, not a YAML file"


def test_the_nearest_words_are_proposed() -> None:
    known = ["rtx-3060", "rtx-3090", "rtx-4090", "h100-sxm"]
    assert nearest("rtx-3006", known) == "did you mean 'rtx-3060'?"
    assert nearest("rtx-3091", known) == "did you mean 'rtx-3090'?"
    assert nearest("rtx-9090", known) == "did you mean 'rtx-3090' or 'rtx-4090'?"
    assert nearest("tpu", known).startswith("use one of")
