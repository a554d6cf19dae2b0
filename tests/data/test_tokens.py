"""Tokenizers and token files are exact and cached, and are made again when the text or the settings
change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import make_job
from tightfit.data import open_samples
from tightfit.data import tokens as tokens_module
from tightfit.data.cache import cache_folder
from tightfit.data.tokens import PackedSequences, PaddedSequences
from tightfit.errors import InputError, TightfitWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*texts are longer than data.sequence_length")

DOCUMENTS = ["def f(x):\n    return x\n" * 20, "Grüße aus 東京 🙂\r\n\tend  ", "def g(y):\n    return y\n" * 30]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(document.encode())
    return folder


def language(folder: Path, model: str = "causal-lm", **spec: Any) -> Any:
    return open_samples(make_job(model, {"text": str(folder), "sequence_length": 16, **spec}))


def made() -> list[str]:
    return sorted(path.name for path in (cache_folder() / "data").iterdir() if path.is_dir())


def test_packed_rows_concatenate_to_the_text(folder: Path) -> None:
    samples = language(folder)
    ids = np.concatenate([samples[index]["input_ids"].numpy() for index in range(len(samples))])
    whole = "".join(document + "<|endoftext|>" for document in DOCUMENTS)
    text = samples.tokenizer.decode(ids)
    assert whole.startswith(text)
    assert len(samples.tokenizer.backend_tokenizer.encode(whole[len(text) :]).ids) < 16  # less than one row is left out
    assert {len(samples[index]["input_ids"]) for index in range(len(samples))} == {16}
    assert (samples.sample_items, samples.ragged, samples.damaged) == (16, False, 0)


def test_tokens_do_not_depend_on_blocks_and_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = language(folder, tokenizer=str(tokenizer_of(folder)))
    expected = whole.rows.tokens.ids.copy()
    shutil.rmtree(whole.rows.tokens.folder)
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 10)
    assert np.array_equal(language(folder, tokenizer=str(tokenizer_of(folder))).rows.tokens.ids, expected)


def tokenizer_of(folder: Path) -> Path:
    saved = folder.parent / "tokenizer"
    language(folder).tokenizer.save_pretrained(saved)
    return saved


def test_padded_rows_hold_one_document_each(folder: Path) -> None:
    samples = language(folder, packing="padded", sequence_length=32)
    batch = samples.batch(np.array([1, 0]), np.array([0, 0]))
    assert samples.ragged
    assert len(samples) == 3
    assert batch["input_ids"].shape == (2, 32)
    assert set(batch) == {"input_ids", "labels"}
    short = samples.batch(np.array([1]), np.array([0]))
    text = samples.tokenizer.decode(short["input_ids"][0])
    assert text == (DOCUMENTS[1] + "<|endoftext|>")[: len(text)]


def test_padding_texts_says_what_is_cut_off(folder: Path) -> None:
    with pytest.warns(
        TightfitWarning, match=r"3 of 3 texts are longer .*sequence_length=16: only their first 16 tokens"
    ):
        language(folder, packing="padded", sequence_length=16)


def test_padding_has_no_labels(folder: Path) -> None:
    (folder / "3.txt").write_text("ab")
    samples = language(folder, packing="padded")
    batch = samples.batch(np.array([3, 0]), np.array([0, 0]))
    end = samples.tokenizer.eos_token_id
    ids, labels = batch["input_ids"], batch["labels"]
    length = int((labels[0] != -100).sum())
    assert 2 <= length <= 3
    assert ids[0, length - 1] == end
    assert (labels[0, length:] == -100).all()
    assert (ids[0, length:] == end).all()
    assert (labels[0, :length] == ids[0, :length]).all()
    assert (labels[1] == ids[1]).all()
    assert samples.batch(np.array([3]), np.array([0]))["input_ids"].shape == (1, length)


def test_the_cache_is_reused_for_every_sequence_length(folder: Path) -> None:
    first = language(folder)
    names = made()
    assert len(names) == 2  # a tokenizer and its tokens
    stamp = (first.rows.tokens.folder / "text.bin").stat().st_mtime_ns
    again = language(folder, sequence_length=8, packing="padded")
    assert made() == names
    assert (again.rows.tokens.folder / "text.bin").stat().st_mtime_ns == stamp


def test_a_changed_text_or_vocabulary_makes_a_new_cache(folder: Path) -> None:
    language(folder)
    names = made()
    language(folder, vocabulary_size=258)
    assert len(made()) == len(names) + 2
    (folder / "0.txt").write_text("something else entirely, and long enough for a piece of sixteen tokens")
    samples = language(folder)
    assert len(made()) == len(names) + 4
    assert samples.tokenizer.decode(samples[0]["input_ids"]).startswith("some")


def test_the_trained_tokenizer_is_the_same_each_time(folder: Path) -> None:
    first = language(folder).tokenizer.backend_tokenizer.to_str()
    shutil.rmtree(cache_folder())
    assert language(folder).tokenizer.backend_tokenizer.to_str() == first


def test_a_user_s_own_tokenizer_is_used(folder: Path) -> None:
    saved = tokenizer_of(folder)
    ids = language(folder)[0]["input_ids"]
    for place in (saved, saved / "tokenizer.json"):
        samples = language(folder, tokenizer=str(place))
        assert (samples[0]["input_ids"] == ids).all()
        assert samples.tokenizer.eos_token == "<|endoftext|>"
    (saved / "tokenizer_config.json").unlink()
    assert (language(folder, tokenizer=str(saved))[0]["input_ids"] == ids).all()


def test_truncation_and_padding_of_a_tokenizer_are_disabled(folder: Path) -> None:
    from tokenizers import Tokenizer

    saved = tokenizer_of(folder)
    cutting = Tokenizer.from_file(str(saved / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=50)
    cutting.save(str(saved / "tokenizer.json"))
    assert (language(folder, tokenizer=str(saved))[5]["input_ids"] == language(folder)[5]["input_ids"]).all()


def test_wrong_tokenizers_and_vocabularies_are_refused(folder: Path, tmp_path: Path) -> None:
    saved = tokenizer_of(folder)
    (tmp_path / "not.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        language(folder, tokenizer=str(tmp_path / "not.json"))
    with pytest.raises(InputError, match="no such file"):
        language(folder, tokenizer=str(tmp_path / "nowhere"))
    small = {"architecture": "gpt2", "vocab_size": 270, "n_embd": 8, "n_head": 2, "n_layer": 1}
    data = {"text": str(folder), "sequence_length": 16}
    with pytest.raises(InputError, match=r"vocabulary has 270(.|\n)*model.vocab_size: \d\d\d"):
        open_samples(make_job(small, data | {"tokenizer": str(saved)}))
    with pytest.raises(InputError, match=r"too small for text(.|\n)*257 or more"):
        open_samples(make_job(small | {"vocab_size": 256}, data))
    with pytest.raises(InputError, match="no mask token"):
        language(folder, "masked-lm", tokenizer=str(saved))
    with pytest.raises(InputError, match=r"has 0 sentinel tokens(.|\n)* needs \d"):
        language(folder, "seq2seq-lm", tokenizer=str(saved))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only a few words")
    with pytest.raises(
        InputError, match=r"less than one sequence of data.sequence_length=64(.|\n)*sequence_length: \d"
    ):
        language(tmp_path / "a.txt", sequence_length=64)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match=r"a\.txt: contains no text"):
        language(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match="sequence_length=65: the model has only 64 positions"):
        language(tmp_path / "a.txt", sequence_length=65)


def test_skipped_lines_are_counted_when_read_from_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "%s"}\n{"text": \nnothing\n' % ("words " * 50))
    for _ in range(2):
        samples = open_samples(make_job("causal-lm", {"jsonl": str(file), "sequence_length": 8, "skip_damaged": True}))
        assert samples.damaged == 2
    with pytest.raises(InputError, match=r"d\.jsonl:2"):
        open_samples(make_job("causal-lm", {"jsonl": str(file), "sequence_length": 8}))
    file.write_text("nothing\n")
    with pytest.raises(InputError, match="all 1 samples are damaged"):
        open_samples(make_job("causal-lm", {"jsonl": str(file), "skip_damaged": True}))


def test_large_vocabularies_use_wide_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(66_000)} | {"</s>": 66_000}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w65999 " * 40)
    wide = {"architecture": "gpt2", "vocab_size": 70_000, "n_embd": 8, "n_head": 2, "n_layer": 1}
    data = {"text": str(tmp_path / "a.txt"), "sequence_length": 16, "tokenizer": str(tmp_path / "tokenizer.json")}
    assert set(open_samples(make_job(wide, data))[0]["input_ids"].tolist()) == {65_999}


def test_rows_pickle_as_their_path(folder: Path) -> None:
    import pickle

    samples = language(folder)
    _ = samples[0]
    content = pickle.dumps(samples)
    assert len(content) < 1000
    copy = pickle.loads(content)
    assert (copy[3]["input_ids"] == samples[3]["input_ids"]).all()
    assert copy.tokenizer is None
    assert isinstance(samples.rows, PackedSequences)
    assert isinstance(pickle.loads(pickle.dumps(language(folder, packing="padded"))).rows, PaddedSequences)
