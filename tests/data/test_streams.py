"""Streams of text: the same samples for every plan, exact resume, and bounded memory."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pytest
import torch

from tests import tiny
from tightfit.data import TextStream, model_input, open_samples
from tightfit.data.streams import seconds_per_sample, shuffled, stream_bytes
from tightfit.engine.build import build
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec, Job
from tightfit.models.batches import IGNORED
from tightfit.plan import Plan

GPT = {"architecture": "gpt2", "vocab_size": 300, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64}
BERT = {"architecture": "bert", "vocab_size": 300}
WORDS = ("red", "green", "blue", "a long word", "xylophone")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int, word: str = "") -> list[dict[str, str]]:
    return [{"text": f"{word} sample {number}: " + " ".join(WORDS[: number % 5])} for number in range(count)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", texts(40))


def job(data: dict[str, Any], model: Any = GPT, **train: Any) -> Job:
    return Job(model=model, data={"sequence_length": 32, **data}, train={"batch": 6, "steps": 10, "seed": 1, **train})


def opened(data: dict[str, Any], model: Any = GPT) -> TextStream:
    found = open_samples(job({"streaming": True, **data}, model))
    assert isinstance(found, TextStream)
    return found


def batch_of(stream: TextStream, count: int) -> Any:
    return next(stream.batches([(0, count)]))


def numbers(stream: TextStream, batch: Any) -> list[int]:
    """Return the numbers of the padded samples in a batch that `texts` made."""
    rows = [ids[labels != IGNORED] for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    said = [stream.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
    return [int(text.split("sample ")[1].split(":")[0]) for text in said]


@pytest.mark.parametrize(
    ("model", "packing"), [(GPT, "packed"), (GPT, "padded"), (BERT, "padded"), (BERT, "packed")], ids=str
)
def test_a_stream_has_the_samples_of_the_file(file: str, model: Any, packing: str) -> None:
    data = {"jsonl": file, "packing": packing}
    whole: Any = open_samples(job(data, model))
    stream = opened({**data, "shuffle_buffer": 1}, model)
    count = min(len(whole), 12)
    expected = whole.batch(np.arange(count), np.zeros(count, dtype=np.int64))
    found = batch_of(stream, count)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (stream.ragged, stream.sample_items) == (whole.ragged, whole.sample_items)


def test_texts_that_a_stream_cuts_are_warned_of_once(file: str) -> None:
    with pytest.warns(TightfitWarning, match=r"longer than data.sequence_length=4: only their first 4 tokens") as said:
        batch = batch_of(opened({"jsonl": file, "packing": "padded", "sequence_length": 4, "shuffle_buffer": 1}), 12)
    assert batch["input_ids"].shape == (12, 4)
    assert len(said) == 1


@pytest.mark.parametrize("packing", ["padded", "separate"])
def test_conversations_are_streamed(tmp_path: Path, packing: str) -> None:
    rows = [{"prompt": f"question {number}?", "response": " yes" * (number % 4 + 1)} for number in range(20)]
    data = {"jsonl": write(tmp_path / "a.jsonl", rows), "format": "prompt-response", "packing": packing}
    whole: Any = open_samples(job(data, batch=2))
    found = batch_of(opened({**data, "shuffle_buffer": 1}), len(whole))
    expected = whole.batch(np.arange(len(whole)), np.zeros(len(whole), dtype=np.int64))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_texts_in_a_row_are_separate(file: str) -> None:
    """Rows hold whole texts, whose positions start at 0 and whose first tokens have no label."""
    stream = opened({"jsonl": file, "packing": "separate"})
    batch = batch_of(stream, 8)
    starts = batch["position_ids"] == 0
    assert (starts.sum(1) > 1).any()
    assert (batch["labels"][starts] == IGNORED).all()
    assert batch["input_ids"].shape == (8, 32)


def test_an_epoch_has_each_sample_once(file: str) -> None:
    stream = opened({"jsonl": file, "packing": "padded", "shuffle_buffer": 8})
    first, second = (numbers(stream, batch) for batch in itertools.islice(stream.batches([(0, 40), (40, 80)]), 2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert first != sorted(first)
    assert all(number <= place + 8 for place, number in enumerate(first))  # no earlier than the buffer allows


def test_a_buffer_draws_evenly() -> None:
    assert list(shuffled(range(9), 1, 5)) == list(range(9))
    firsts = [next(shuffled(range(100), 4, secret)) for secret in range(400)]
    assert np.bincount(firsts, minlength=4).min() > 60
    assert sorted(shuffled(range(10), 100, 3)) == list(range(10))
    assert list(shuffled([], 4, 1)) == []


def steps(data: dict[str, Any], plan: Plan, consumed: int = 0, rank: tuple[int, int] = (0, 1)) -> list[Any]:
    from dataclasses import replace

    loaded: Any = build(job({"streaming": True, **data}), plan).data
    return list(replace(loaded, data_rank=rank).steps(consumed, 24))


def rows_of(batches: list[Any]) -> list[list[int]]:
    return [row[row != 0].tolist() for batch in batches for row in batch["input_ids"]]


def test_samples_are_those_of_every_plan_and_resume(file: str) -> None:
    data = {"jsonl": file, "packing": "padded", "shuffle_buffer": 8}
    whole = [rows_of(step) for step in steps(data, Plan(micro_batch=6))]
    assert [rows_of(step) for step in steps(data, Plan(micro_batch=2))] == whole
    assert [rows_of(step) for step in steps(data, Plan(micro_batch=2), consumed=12)] == whole[2:]
    parts = [[rows_of(step) for step in steps(data, Plan(micro_batch=2), rank=(rank, 2))] for rank in (0, 1)]
    assert [[*left, *right] for left, right in zip(*parts, strict=True)] == whole


@pytest.mark.slow
def test_a_worker_reads_the_same_samples(file: str) -> None:
    data = {"jsonl": file, "packing": "padded", "shuffle_buffer": 8}
    alone, worker = (steps(data, Plan(micro_batch=2, loader_workers=number)) for number in (0, 1))
    assert [rows_of(step) for step in alone] == [rows_of(step) for step in worker]


def test_sources_are_drawn_by_weight(tmp_path: Path) -> None:
    sources = [
        {"jsonl": write(tmp_path / "a.jsonl", texts(30, "red")), "weight": 3},
        {"jsonl": write(tmp_path / "b.jsonl", texts(30, "blue"))},
    ]
    stream = opened({"sources": sources, "packing": "padded", "shuffle_buffer": 4})
    batch = batch_of(stream, 400)
    said = [stream.tokenizer.decode(ids) for ids in batch["input_ids"]]
    assert 270 < sum(text.startswith("red") for text in said) < 330
    halves = list(stream.batches([(0, 200), (200, 400)]))
    assert rows_of(halves) == rows_of([batch])


@pytest.mark.slow
def test_memory_is_within_the_prediction(tmp_path: Path) -> None:
    """A large file is read with less memory than predicted, and much less than the file has."""
    path = write(tmp_path / "large.jsonl", [{"text": " ".join(WORDS) * 40}] * 20_000)
    data = {"jsonl": path, "sequence_length": 64, "shuffle_buffer": 500}
    wanted = job({"streaming": True, **data})
    stream: Any = open_samples(wanted)
    batch_of(stream, 1)
    tracemalloc.start()
    for _ in stream.batches([(number, number + 50) for number in range(0, 3000, 50)]):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    predicted = stream_bytes(wanted.data, model_input(wanted))
    assert peak < predicted
    assert 500 * 64 * 2 < predicted < 2 * Path(path).stat().st_size * 10


def test_the_memory_of_a_buffer_is_predicted(tmp_path: Path) -> None:
    """What a larger buffer adds to the measured memory is what it adds to the predicted memory."""
    path = write(tmp_path / "a.jsonl", [{"text": "word " * 200}] * 1000)
    measured, predicted = [], []
    for size in (10, 2010):
        wanted = job({"jsonl": path, "sequence_length": 64, "shuffle_buffer": size, "streaming": True})
        stream: Any = open_samples(wanted)
        batch_of(opened({"jsonl": path}), 1)  # what is made once
        tracemalloc.start()
        batches = stream.batches([(0, 1), (1, 2)])
        next(batches)
        measured.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        predicted.append(stream_bytes(wanted.data, model_input(wanted)))
    grown, expected = (pair[1] - pair[0] for pair in (measured, predicted))
    assert 0.7 * expected < grown < expected


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def tokenizer(file: str) -> str:
    return opened({"jsonl": file}).tokenizer.name_or_path


def test_urls_are_streamed_without_a_copy(memory: Any, tokenizer: str, tmp_path: Path) -> None:
    rows = texts(6)
    for name, part in (("a", rows[:4]), ("b", rows[4:])):
        memory.pipe(f"/data/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part).encode())
    data = {"packing": "padded", "tokenizer": tokenizer, "shuffle_buffer": 1}
    for url in ("memory://data", "memory://data/*.jsonl", ["memory://data/a.jsonl", "memory://data/b.jsonl"]):
        stream = opened({"jsonl": url, **data})
        assert numbers(stream, batch_of(stream, 6)) == list(range(6))
    assert not list((tmp_path / "cache").rglob("remote-*"))
    with pytest.raises(InputError, match=r"there are no files ending in .jsonl or .json or .ndjson"):
        opened({"jsonl": "memory://data/*.txt", **data})
    with pytest.raises(InputError, match=r"has no column 'body'; it has text"):
        opened({"jsonl": "memory://data", "field": "body", **data})


def test_parquet_at_a_url_is_streamed(memory: Any, tokenizer: str) -> None:
    with memory.open("/tables/a.parquet", "wb") as table:
        datasets.Dataset.from_list(texts(5)).to_parquet(table)
    stream = opened({"parquet": "memory://tables", "packing": "padded", "tokenizer": tokenizer, "shuffle_buffer": 1})
    assert numbers(stream, batch_of(stream, 5)) == list(range(5))


@pytest.mark.parametrize("saved", [False, True])
def test_data_sets_are_streamed(tmp_path: Path, tokenizer: str, saved: bool) -> None:
    folder = tmp_path / "set"
    if saved:
        datasets.Dataset.from_list(texts(5)).save_to_disk(folder)
    else:
        folder.mkdir()
        write(folder / "train.jsonl", texts(5))
    stream = opened({"dataset": str(folder), "packing": "padded", "tokenizer": tokenizer, "shuffle_buffer": 1})
    assert numbers(stream, batch_of(stream, 5)) == list(range(5))


def test_a_file_that_breaks_is_one_sentence(memory: Any, tokenizer: str) -> None:
    memory.pipe("/data/a.jsonl", b'{"text": "one"}\n' * 9 + b"{broken\n")
    with pytest.raises(InputError, match=r"cannot be (read after row|load)") as raised:
        batch_of(opened({"jsonl": "memory://data", "packing": "padded", "tokenizer": tokenizer}), 20)
    assert str(raised.value).count("\n") == 1


def test_explain_predicts_the_buffer_and_the_time(file: str, tokenizer: str) -> None:
    from tightfit.machine import Machine
    from tightfit.methods import loader
    from tightfit.planner.tracing.profiler import Profiler

    wanted = job({"jsonl": file, "streaming": True, "tokenizer": tokenizer, "shuffle_buffer": 100})
    ledger = Profiler(wanted, "cpu").ledger(Plan())
    found = loader.cost(ledger, Plan(), Machine.detect())
    assert found.host["stream"] == stream_bytes(wanted.data, model_input(wanted))
    assert found.host_work_s["prepare"] == pytest.approx(6 * ledger.sample_s)
    assert 0 < ledger.sample_s == pytest.approx(seconds_per_sample(wanted.data, model_input(wanted)), rel=20)


def test_evaluations_have_data_of_their_own(file: str, tmp_path: Path) -> None:
    other = write(tmp_path / "evaluation.jsonl", texts(3))
    wanted = Job(
        model=GPT,
        data={"jsonl": file, "streaming": True, "packing": "padded", "sequence_length": 32},
        train={"batch": 4, "steps": 2},
        evaluate={"data": {"jsonl": other}, "every": 1},
    )
    assert wanted.evaluate.data.streaming is False
    assert wanted.evaluate.data.packing == "padded"
    data = build(wanted, Plan()).data
    assert sum(len(batch["input_ids"]) for batch in data.held_out(None)) == 3


def test_left_out_conversations_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a " * length, "response": " yes"} for length in (2, 200)]
    data = {"jsonl": write(tmp_path / "a.jsonl", rows), "format": "prompt-response"}
    with pytest.warns(TightfitWarning, match="of 2 samples, 1 are longer .* 1 were left out"):
        batch_of(opened(data), 2)
    rows = [{"prompt": "a " * 200, "response": " yes"}]
    with pytest.raises(InputError, match="no sample with a token that counts"), pytest.warns(TightfitWarning):
        batch_of(opened({**data, "jsonl": write(tmp_path / "b.jsonl", rows)}), 2)


@pytest.mark.parametrize(
    ("data", "train", "words"),
    [
        ({}, {"steps": None}, "set train.steps"),
        ({}, {"evaluate_every": 5}, "give evaluate.data"),
        ({"jsonl": None, "synthetic": "tokens"}, {}, "leave out data.streaming"),
        ({"shuffle_buffer": 0}, {}, "shuffle_buffer"),
    ],
)
def test_jobs_that_cannot_be_streamed_are_refused(data: Any, train: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        job({"streaming": True, "jsonl": "a.jsonl", **data}, **train)


def test_a_stream_needs_a_tokenizer_and_text(memory: Any, file: str) -> None:
    memory.pipe("/data/a.jsonl", b'{"text": "one"}\n')
    with pytest.raises(InputError, match=r"no tokenizer is trained on it(.|\n)*data.tokenizer"):
        opened({"jsonl": "memory://data"})
    with pytest.raises(InputError, match="cannot be streamed"):
        opened({"text": "memory://data"})
    with pytest.raises(InputError, match="without labels"):
        opened({"jsonl": file}, {**BERT, "task": "classification"})
    with pytest.raises(InputError, match="fewer tokens than one sequence"):
        batch_of(opened({"jsonl": file, "sequence_length": 64, "text": None} | {"jsonl": _short(file)}), 1)


def _short(file: str) -> str:
    return write(Path(file).with_name("short.jsonl"), [{"text": "few words"}])


def test_one_worker_reads_a_stream(file: str) -> None:
    with pytest.raises(InputError, match="only one worker"):
        build(job({"streaming": True, "jsonl": file}), Plan(loader_workers=2))


def test_streams_survive_a_job_file(tmp_path: Path, file: str) -> None:
    content = {**tiny.content(), "data": {"jsonl": file, "streaming": True, "shuffle_buffer": 50}}
    content["train"] = {**content.get("train", {}), "steps": 3}
    (tmp_path / "job.json").write_text(json.dumps(content))
    data = Job.load(tmp_path / "job.json").data
    assert (data.streaming, data.shuffle_buffer) == (True, 50)
    assert DataSpec.parse(data.content()) == data


def test_a_streamed_training_resumes_with_the_same_losses(file: str, tmp_path: Path) -> None:
    """A run that is interrupted after 3 of 6 steps trains as one that is not, and saves the
    tokenizer with its checkpoint."""
    from tightfit.machine import Machine
    from tightfit.report.run_folder import train_in_folder

    model = {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    data = {"jsonl": file, "streaming": True, "packing": "padded", "shuffle_buffer": 8}
    settings: Any = {"batch": 8, "schedule": "constant", "trackers": []}
    losses = []
    for name, lengths, plan in (("whole", (6,), Plan()), ("parts", (3, 6), Plan(micro_batch=3))):
        for steps_trained in lengths:
            wanted = job(data, model, **settings, steps=steps_trained)
            again = steps_trained != lengths[0]
            train_in_folder(wanted, plan, Machine.detect(), tmp_path / name, resumes=again)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert list((tmp_path / "parts" / "checkpoints").glob("*/tokenizer.json"))


def test_damaged_rows_of_a_stream_are_told_and_counted(tmp_path: Path) -> None:
    rows: list[Any] = texts(12)
    rows[2], rows[5] = {"text": 3}, {"other": ""}
    data = {"jsonl": write(tmp_path / "b.jsonl", rows), "packing": "padded", "shuffle_buffer": 1, "skip_damaged": True}
    stream = opened(data)
    with pytest.warns(TightfitWarning, match="data.skip_damaged leaves out this sample") as told:
        batch = batch_of(stream, 10)
    assert numbers(stream, batch) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
    assert [str(one.message).split(":")[1] for one in told] == ["3"]  # the line of the first one
    assert stream.damaged == 2
