"""The rows that each task makes of tokens: shapes and rates, decided by seed, sample and epoch
alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import MODELS, make_job
from tightfit.data import open_samples
from tightfit.data.sequences import corruption, row_length
from tightfit.errors import InputError

WORDS = "the quick brown fox jumps over the lazy dog and the other way round. "


def text_samples(tmp_path: Path, model: Any, **spec: Any) -> Any:
    (tmp_path / "a.txt").write_text(WORDS * 3000)
    for number in range(200):
        (tmp_path / f"b{number}.txt").write_text(WORDS)
    return open_samples(make_job(model, {"text": str(tmp_path / "*.txt"), "sequence_length": 64, **spec}, seed=3))


def at(samples: Any, indices: list[int], epoch: int = 0) -> dict[str, torch.Tensor]:
    return samples.batch(np.array(indices), np.full(len(indices), epoch))


def test_masking_rates_are_those_of_bert(tmp_path: Path) -> None:
    samples = text_samples(tmp_path, "masked-lm")
    every = list(range(len(samples)))
    batch = at(samples, every)
    plain = at(text_samples(tmp_path, "causal-lm", tokenizer=saved(tmp_path, samples)), every)["input_ids"]
    ids, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    assert set(batch) == {"input_ids", "labels"}
    assert (labels[chosen] == plain[chosen]).all()
    assert (ids[~chosen] == plain[~chosen]).all()
    masked, same = ids[chosen] == samples.tokenizer.mask_token_id, ids[chosen] == labels[chosen]
    assert float(chosen.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(same.float().mean()) == pytest.approx(0.1, abs=0.02)
    assert len(ids[chosen][~masked & ~same].unique()) > 50  # replaced by any token
    ends = plain == samples.tokenizer.eos_token_id
    assert ends.sum() == 200  # the last document's falls into what is left out
    assert not (chosen & ends).any()


def saved(tmp_path: Path, samples: Any) -> str:
    samples.tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_masking_is_a_function_of_seed_sample_and_epoch(tmp_path: Path) -> None:
    samples = text_samples(tmp_path, "masked-lm")
    whole = at(samples, [4, 9, 2])["input_ids"]
    assert (at(samples, [9])["input_ids"] == whole[1]).all()
    assert (samples[9]["input_ids"] == whole[1]).all()
    assert (at(samples, [9], epoch=1)["input_ids"] != whole[1]).any()
    job = make_job("masked-lm", {"text": str(tmp_path / "*.txt"), "sequence_length": 64}, seed=4)
    assert (at(open_samples(job), [9])["input_ids"] != whole[1]).any()  # type: ignore[arg-type]


def test_masking_of_a_padded_row_is_independent_of_other_rows(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"text": WORDS * count}) + "\n" for count in (1, 2)))
    samples: Any = open_samples(make_job("masked-lm", {"jsonl": str(file), "packing": "padded", "sequence_length": 64}))
    alone, beside = at(samples, [0]), at(samples, [0, 1])
    length = alone["input_ids"].shape[1]
    assert beside["input_ids"].shape[1] > length
    assert (beside["input_ids"][0, :length] == alone["input_ids"][0]).all()
    assert (beside["labels"][0, length:] == -100).all()
    assert beside["attention_mask"].tolist()[0] == [1] * length + [0] * (beside["input_ids"].shape[1] - length)


def test_span_corruption_moves_the_removed_tokens_to_the_labels(tmp_path: Path) -> None:
    samples = text_samples(tmp_path, "seq2seq-lm")
    batch = at(samples, list(range(50)))
    sentinels = set(samples.special.sentinels)
    lengths = []
    for number in range(50):
        ids, labels = batch["input_ids"][number].tolist(), batch["labels"][number].tolist()
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in sentinels:
                spans[token] = []
            else:
                spans[next(reversed(spans))].append(token)
        assert ids[-1] == labels[-1] == samples.special.end
        whole = [token for part in ids[:-1] for token in spans.get(part, [part])]
        assert whole == samples.rows.gather(np.array([number]))[0][0].tolist()
        lengths += map(len, spans.values())
    assert batch["input_ids"].shape[1] + batch["labels"].shape[1] == samples.sample_items
    assert 60 <= batch["input_ids"].shape[1] <= 64
    assert (batch["attention_mask"] == 1).all()
    assert not samples.ragged
    assert np.mean(lengths) == pytest.approx(3, abs=0.5)
    assert len(set(lengths)) > 3
    assert (at(samples, [7])["labels"] == batch["labels"][7]).all()
    assert (at(samples, [7], epoch=1)["labels"] != batch["labels"][7]).any()


def test_span_corruption_pads_short_documents(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "ab", WORDS)))
    data = {"jsonl": str(file), "packing": "padded", "sequence_length": 64}
    samples: Any = open_samples(make_job("seq2seq-lm", data))
    batch = at(samples, [0, 1, 2])
    assert samples.ragged
    assert batch["labels"].shape[0] == batch["input_ids"].shape[0] == 3
    assert (batch["labels"][0] == -100).any()
    assert int(batch["attention_mask"][0].sum()) < int(batch["attention_mask"][2].sum())


@pytest.mark.parametrize("length", [2, 3, 16, 64, 512])
def test_rows_are_as_long_as_their_corrupted_input_allows(length: int) -> None:
    def inputs(row: int) -> int:
        taken, spans = corruption(row, 0.15)
        return row - taken + spans + 1

    row = row_length(length, 0.15)
    assert inputs(row) <= max(length, inputs(2))
    assert inputs(row + 1) > length


def test_pairs_of_texts_become_sequence_pairs(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    rows = [("a question", "an answer"), ("why", WORDS * 9), ("x", "")]
    file.write_text("".join(json.dumps({"text": text, "answer": answer}) + "\n" for text, answer in rows))
    spec = {"jsonl": str(file), "target_field": "answer", "sequence_length": 32, "target_length": 16}
    samples: Any = open_samples(make_job("seq2seq-lm", spec))
    assert len(samples) == 2  # an empty answer is no pair
    assert samples.sample_items == 48
    batch = at(samples, [0, 1])
    first = batch["labels"][0][batch["labels"][0] != -100]
    assert samples.tokenizer.decode(first) == "an answer<|endoftext|>"
    assert batch["labels"].shape == (2, 16)
    length = int(batch["attention_mask"][1].sum())
    assert samples.tokenizer.decode(batch["input_ids"][1][:length]) == "why<|endoftext|>"
    with pytest.raises(InputError, match="has no target text"):
        open_samples(make_job("causal-lm", spec))


def test_texts_with_classes_become_labelled_rows(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"

    def write(*labels: Any) -> Any:
        rows = [{"text": WORDS[: number + 9], "label": label} for number, label in enumerate(labels)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return open_samples(make_job("text", {"jsonl": str(file), "sequence_length": 32}))

    samples = write("good", "bad", "good")
    batch = at(samples, [0, 1, 2])
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["attention_mask"].sum(1).tolist() == sorted(batch["attention_mask"].sum(1).tolist())
    assert at(write(2, 0, 1), [0])["labels"].tolist() == [2]
    with pytest.raises(InputError, match=r"label 3, but the model knows only the labels 0 to 2(.|\n)*num_labels: 4"):
        write(3, 0)
    with pytest.raises(InputError, match="some labels are text"):
        write("a", 0)
    with pytest.raises(InputError, match="label -1"):
        write(-1, 0)
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(InputError, match="plain text has no fields"):
        open_samples(make_job("text", {"text": str(tmp_path / "a.txt"), "sequence_length": 32}))


def test_a_tokenizer_template_encloses_each_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    samples = text_samples(tmp_path, "masked-lm")
    place = saved(tmp_path, samples)
    backend = Tokenizer.from_file(f"{place}/tokenizer.json")
    backend.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=[("<|pad|>", 0), ("<|endoftext|>", 1)]
    )
    backend.save(f"{place}/tokenizer.json")
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "the fox"}\n' * 2)
    data = {"jsonl": str(file), "tokenizer": place, "packing": "padded", "sequence_length": 32}
    ids = at(open_samples(make_job("masked-lm", data | {"mask_probability": 1e-9})), [0])["input_ids"][0].tolist()
    assert ids[0] == 0
    assert ids[-1] == 1
    assert ids.count(1) == 1
    assert at(open_samples(make_job("causal-lm", data)), [0])["input_ids"][0].tolist() == ids


def test_plain_text_begins_as_the_tokenizer_begins_it(tmp_path: Path) -> None:
    """Gemma's and Llama's tokenizers put <bos> before a text and nothing after it. Packed documents
    keep their <bos>, and end with the end-of-text token."""
    from tokenizers import Tokenizer, processors

    place = saved(tmp_path, text_samples(tmp_path, "causal-lm"))
    backend = Tokenizer.from_file(f"{place}/tokenizer.json")
    first, end = backend.token_to_id("A"), backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(single="A $A", special_tokens=[("A", first)])
    backend.save(f"{place}/tokenizer.json")
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "the fox"}\n' * 8)
    data = {"jsonl": str(file), "tokenizer": place, "sequence_length": 8}
    text = backend.encode("the fox", add_special_tokens=False).ids
    ids = at(open_samples(make_job("causal-lm", data)), [0])["input_ids"][0].tolist()
    assert ids == ([first, *text, end] * 8)[:8]


@pytest.mark.parametrize("name", ["causal-lm", "masked-lm", "seq2seq-lm", "text"])
def test_models_accept_the_batches(name: str) -> None:
    """A transformers model of each task computes a finite loss of a synthetic batch."""
    from tightfit.models import model_factory, task_of
    from tightfit.models.objective import TASKS

    bert = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    small = {"gpt2": {}, "bert": bert, "t5": {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8}}
    model = MODELS[name] | small[MODELS[name]["architecture"]]
    job = make_job(model, {"synthetic": "tokens", "sequence_length": 16, "samples": 8})
    batch = at(open_samples(job), [0, 5])
    objective = TASKS[task_of(job.model)]  # type: ignore[index]
    assert objective.count(batch) > 0
    assert torch.isfinite(objective.total(model_factory(job.model)(), batch))
