"""Several sources are drawn in proportion to their weights, in an order that can be resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tightfit.data import MixedOrder, Order, open_samples, order_of
from tightfit.data.mixture import MixedSamples, shares
from tightfit.engine.build import build
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.models.batches import IGNORED
from tightfit.plan import Plan
from tightfit.runtime.run_length import length_of

GPT = {"architecture": "gpt2", "vocab_size": 300, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64}
FIELDS = {"prompt": "question", "response": "answer"}
counts = st.lists(st.tuples(st.integers(2, 60), st.floats(0.5, 4)), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mixed_order(sources: list[tuple[int, float]], share: float = 0.1) -> MixedOrder:
    orders = tuple(Order(count, share, number) for number, (count, _) in enumerate(sources))
    return MixedOrder(orders, tuple(weight for _, weight in sources), seed=3)


def write(path: Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def job(data: dict[str, Any], model: Any = GPT, **train: Any) -> Job:
    return Job(model=model, data=data, train={"batch": 8, "steps": 10, "seed": 1, **train})


def padded(sources: list[dict[str, Any]], model: Any = GPT, **data: Any) -> MixedSamples:
    found = open_samples(job({"sources": sources, "packing": "padded", "sequence_length": 32, **data}, model))
    assert isinstance(found, MixedSamples)
    return found


def decoded(samples: MixedSamples, indices: Any) -> list[str]:
    batch = samples.batch(np.array(indices), np.zeros(len(indices), dtype=np.int64))
    rows = [ids[labels != IGNORED] for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    return [samples.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


@given(counts, st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_an_epoch_has_samples_by_weight(sources: list[tuple[int, float]], epoch: int) -> None:
    """Each source is read evenly, and never its held-out samples."""
    order = mixed_order(sources)
    length = order.training_count
    indices, epochs = order.training_samples(0, (epoch + 1) * length)
    starts = np.cumsum([0, *(count for count, _ in sources)])
    weights = np.array([weight for _, weight in sources])
    for number, own in enumerate(order.orders):
        here = (indices >= starts[number]) & (indices < starts[number + 1])
        assert abs(here[-length:].sum() - length * weights[number] / weights.sum()) < 1
        read = np.bincount(indices[here] - starts[number], minlength=own.count)
        trained = np.setdiff1d(np.arange(own.count), own.held_out(own.count))
        assert read[own.held_out(own.count)].sum() == 0
        assert read[trained].max() - read[trained].min() <= 1
        assert epochs[here].max(initial=0) <= here.sum() // own.training_count


@given(counts, st.integers(0, 300), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_any_slice_is_the_same_by_itself(sources: list[tuple[int, float]], start: int, first: int, second: int) -> None:
    order = mixed_order(sources)
    whole = order.training_samples(start, start + first + second)
    left = order.training_samples(start, start + first)
    right = order.training_samples(start + first, start + first + second)
    for together, one, other in zip(whole, left, right, strict=True):
        assert np.array_equal(together, np.concatenate([one, other]))


def test_the_order_is_the_same_in_every_version() -> None:
    order = MixedOrder((Order(4, 0.25, 1), Order(8, 0.25, 2)), (2.0, 1.0), seed=7)
    assert order.drawn == [6, 3]
    indices, epochs = order.training_samples(0, 9)
    assert indices.tolist() == [0, 8, 5, 0, 1, 3, 1, 3, 11]
    assert epochs.tolist() == [1, 0, 0, 0, 0, 0, 1, 1, 0]


def test_shares_are_proportional_up_to_their_largest() -> None:
    assert shares(10, (3, 1), (6, 9)) == [6, 4]
    assert shares(10, (1, 1), (2, 3)) == [2, 3]
    assert shares(10, (0.7, 0.3), (100, 100)) == [7, 3]
    assert shares(0, (1, 2), (5, 5)) == [0, 0]


def test_held_out_samples_are_in_proportion() -> None:
    order = mixed_order([(1000, 1.0), (100, 3.0)])
    found = order.held_out(12)
    assert ((found >= 1000).sum(), len(set(found.tolist()))) == (9, 12)
    assert len(order.held_out(10**6)) == order.evaluation_count == 110


def test_sources_share_a_tokenizer_and_are_padded(tmp_path: Path) -> None:
    long, short = ["the cat sat on the mat"] * 6, ["a dog", "a cow"]
    samples = padded(
        [
            {"jsonl": write(tmp_path / "a.jsonl", long), "weight": 3},
            {"jsonl": write(tmp_path / "b.jsonl", short, "body"), "field": "body"},
        ]
    )
    assert len(samples) == 8
    assert decoded(samples, [7, 0, 6]) == ["a cow", long[0], "a dog"]
    indices, _ = order_of(samples, 0.0, 1).training_samples(0, 80)
    assert (indices < 6).sum() == 60


def test_masks_differ_between_sources(tmp_path: Path) -> None:
    """The same sample in two sources gets other random numbers."""
    text = write(tmp_path / "a.jsonl", ["one two three four five six seven eight nine ten"])
    samples = padded([{"jsonl": text}, {"jsonl": text}], {"architecture": "bert", "vocab_size": 300})
    batch = samples.batch(np.array([0, 1]), np.array([0, 0]))
    assert not torch.equal(batch["labels"][0], batch["labels"][1])
    assert set(batch) == {"input_ids", "labels", "attention_mask"}


def test_sources_of_a_file_start_at_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["x"])
    content = {**tiny.content(), "data": {"sources": [{"jsonl": "a.jsonl", "weight": 2}, {"text": "python-stdlib"}]}}
    (tmp_path / "job.json").write_text(json.dumps(content))
    data = Job.load(tmp_path / "job.json").data
    assert data.sources[0].jsonl == str(tmp_path / "a.jsonl")
    assert data.sources[1].text == "python-stdlib"
    assert DataSpec.parse(data.content()) == data


def test_a_mixture_resumes_where_it_ended(tmp_path: Path) -> None:
    texts = [[f"{word} number {number} of the texts" for number in range(30)] for word in ("red", "blue")]
    files = [write(tmp_path / f"{number}.jsonl", lines) for number, lines in enumerate(texts)]
    sources = [{"jsonl": files[0], "weight": 0.7}, {"jsonl": files[1], "weight": 0.3}]
    run = build(
        job({"sources": sources, "sequence_length": 16}, batch=4, evaluate_every=5),
        Plan(micro_batch=2),
    )
    whole = [batch["input_ids"] for step in run.data.steps(0, 20) for batch in step]
    rest = [batch["input_ids"] for step in run.data.steps(8, 20) for batch in step]
    assert all(torch.equal(*pair) for pair in zip(whole[4:], rest, strict=True))
    assert next(run.data.held_out(2))["input_ids"].shape[1] == 16


def test_epochs_are_predicted_from_all_sources(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", ["a text of some length, which is repeated"] * 100)
    one = length_of(job({"jsonl": text, "sequence_length": 16, "held_out": 0}, steps=None, epochs=1))
    two = length_of(job({"sources": [{"jsonl": text}] * 2, "sequence_length": 16, "held_out": 0}, steps=None, epochs=1))
    assert one is not None
    assert two is not None
    assert abs(two.steps - 2 * one.steps) <= 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sources": []}, "names nothing"),
        ({"sources": [{"weight": 1}]}, "none of its sources"),
        ({"sources": [{"jsonl": "a", "text": "b"}]}, "text and jsonl"),
        ({"sources": [{"jsonl": "a", "weight": 0}]}, "weight"),
        ({"sources": [{"jsonl": "a", "wieght": 1}]}, "weight"),
        ({"sources": [{"jsonl": "a"}], "text": "b"}, "text and sources"),
        ({"sources": [{"jsonl": "a", "target_field": "b"}]}, "data.target_field: b"),
        ({"sources": [{"jsonl": "a"}, {"text": "b", "format": "messages"}]}, r"sources\[1\].format"),
        ({"sources": [{"jsonl": "a", "split": "train"}]}, r"sources\[0\].split"),
        ({"sources": [{"jsonl": "a"}], "loss_on": "all"}, "data.loss_on"),
    ],
)
def test_wrong_sources_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        job(data)


def test_a_source_without_samples_in_an_epoch_is_refused(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", ["one two three"] * 4)
    samples = padded([{"jsonl": text, "weight": 1000}, {"jsonl": text}])
    with pytest.raises(InputError, match="less than one of the 8 samples"):
        order_of(samples, 0.0, 0)


def test_sources_with_different_classes_are_refused(tmp_path: Path) -> None:
    for name, labels in (("a", ("good", "bad")), ("b", ("good", "fair"))):
        rows = [json.dumps({"text": "some text", "label": label}) for label in labels]
        (tmp_path / name).write_text("\n".join(rows))
    sources = [{"jsonl": str(tmp_path / name)} for name in "ab"]
    with pytest.raises(InputError, match="bad, good and fair, good"):
        padded(sources, {"architecture": "bert", "vocab_size": 300, "task": "classification"})


def test_each_source_has_a_format_of_its_own(tmp_path: Path) -> None:
    """Conversations of two formats and plain text, with one tokenizer."""
    chats = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi 0"}]}]
    pairs = [{"question": "how many?", "answer": "seven"}]
    for name, rows in (("chats", chats * 3), ("pairs", pairs * 2), ("texts", [{"text": "some text"}])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"jsonl": str(tmp_path / "chats"), "format": "messages"},
        {"jsonl": str(tmp_path / "pairs"), "format": "prompt-response", "fields": FIELDS},
        {"jsonl": str(tmp_path / "texts")},
    ]
    spec = {"sources": sources, "sequence_length": 64, "chat_template": "chatml"}
    samples = open_samples(job(spec))
    assert isinstance(samples, MixedSamples)
    said = decoded(samples, range(6))
    assert [text.strip() for text in said] == ["hi 0"] * 3 + ["seven"] * 2 + ["some text"]
    packed = open_samples(job({**spec, "packing": "separate"}))
    assert set(packed.batch(np.array([0, 1]), np.array([0, 0]))) == {"input_ids", "labels", "position_ids"}


def test_settings_of_formats_hold_for_sources_with_one() -> None:
    sources = [
        {"jsonl": "a", "format": "alpaca"},
        {"jsonl": "b", "format": "prompt-response", "fields": FIELDS},
        {"jsonl": "c"},
    ]
    spec = DataSpec(sources=sources, loss_on="all")
    assert spec.packing == "padded"
    assert [(part.loss_on, part.fields) for part in spec.parts()] == [("all", None), ("all", FIELDS), (None, None)]
    spec = DataSpec(sources=[{"jsonl": "a"}, {"jsonl": "b"}], format="prompt-response", fields=FIELDS)
    assert all(part.fields == FIELDS for part in spec.parts())


def test_evaluations_of_a_mixture_are_in_proportion(tmp_path: Path) -> None:
    texts = {name: write(tmp_path / name, [f"{name} text"] * 20) for name in ("red", "blue", "train")}
    sources = [{"jsonl": texts["red"], "weight": 3}, {"jsonl": texts["blue"]}]
    data = {"jsonl": texts["train"], "packing": "padded", "sequence_length": 16}
    wanted = Job(model=GPT, data=data, train={"batch": 8, "steps": 1}, evaluate={"data": {"sources": sources}})
    run = build(wanted, Plan())
    for limit, reds in ((8, 6), (40, 20)):
        rows = [row for batch in run.data.held_out(limit) for row in batch["input_ids"]]
        assert (len(rows), sum("red" in run.data.tokenizer.decode(row) for row in rows)) == (limit, reds)


def test_evaluations_have_their_own_split() -> None:
    """The split is not that of the training data; the subset is, for the same data set."""
    data = {"dataset": "a", "subset": "en", "split": "train[:9%]"}
    evaluate = {"data": {"dataset": "a", "split": "validation"}}
    same = Job(model=GPT, data=data, train={"steps": 1}, evaluate=evaluate)
    assert (same.evaluate.data.subset, same.evaluate.data.split) == ("en", "validation")
    other = Job(model=GPT, data=data, train={"steps": 1}, evaluate={"data": {"jsonl": "b"}})
    assert (other.evaluate.data.subset, other.evaluate.data.split) == (None, None)


def test_the_jobs_of_the_documentation_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert isinstance(Job.parse({"model": GPT, "train": {"steps": 1}, **yaml.safe_load(block)}).data, DataSpec)


def test_the_order_is_the_same_from_chunks_that_are_kept() -> None:
    order = MixedOrder((Order(50, 0.0, 1), Order(20, 0.0, 2)), (1.0, 2.0), 3)
    whole = order.compute(0, 3000)
    parts = [order.training_samples(start, start + 4) for start in range(0, 3000, 4)]
    for place in (0, 1):
        assert np.array_equal(np.concatenate([part[place] for part in parts]), whole[place])
