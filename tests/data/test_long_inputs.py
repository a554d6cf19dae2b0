"""Long records, words and files are read and tokenized in pieces, with the tokens of the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import make_job
from tightfit.data import long_records, open_samples, text, tokens
from tightfit.data.document_chunks import PIECE, chunk_documents
from tightfit.data.long_records import LongRecord
from tightfit.data.samples import DamagePolicy
from tightfit.data.text import Columns, Document, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec

WORDS = ["the", "fox,", "Über", "東京", "don't", "x=1;", "🙂", "naïve-", "1234567", "(a)", "ſ", "e\u0301t"]


def prose(seed: int, words: int) -> str:
    draw = random.Random(seed)
    gaps = [" "] * 12 + ["\n", "  ", "\n\n", "\t", " \n", "\r\n", "\u3000"]
    return "".join(draw.choice(WORDS) + draw.choice(gaps) for _ in range(words))


def tokenizers_of_all_kinds() -> dict[str, Any]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    kinds: dict[str, Any] = {}
    texts = [prose(seed, 400) for seed in range(5)]

    def trained(name: str, model: Any, trainer: Any, before: Any = None, normalizer: Any = None) -> None:
        kinds[name] = Tokenizer(model)
        if before is not None:
            kinds[name].pre_tokenizer = before
        if normalizer is not None:
            kinds[name].normalizer = normalizer
        kinds[name].train_from_iterator(texts, trainer)

    def bpe() -> Any:
        return trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=["<unk>"])

    trained("gpt2", models.BPE(), bpe(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    trained("roberta", models.BPE(), bpe(), pre_tokenizers.ByteLevel(add_prefix_space=True))
    digits = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    before = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(digits, "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    trained("llama3", models.BPE(), bpe(), before)
    lower = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    wordpiece = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]"])
    trained("bert", models.WordPiece(unk_token="[UNK]"), wordpiece, pre_tokenizers.BertPreTokenizer(), lower)
    unigram = trainers.UnigramTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    trained("t5", models.Unigram(), unigram, pre_tokenizers.Metaspace())
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kinds["llama2"] = Tokenizer(models.BPE(unk_token="<unk>"))
    kinds["llama2"].normalizer = spaced
    kinds["llama2"].pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    kinds["llama2"].train_from_iterator(texts, bpe())
    kinds["llama2"].pre_tokenizer = None
    kinds["added"] = Tokenizer.from_str(kinds["gpt2"].to_str())
    kinds["added"].add_special_tokens([AddedToken("fox", lstrip=True, rstrip=True), AddedToken("x=1")])
    kinds["gpt2"].decoder = decoders.ByteLevel()
    return kinds


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return tokenizers_of_all_kinds()


@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama3", "bert", "t5", "llama2", "added"])
@pytest.mark.parametrize("piece", [256, 1000])
def test_tokenizing_in_pieces_gives_the_tokens_of_the_whole(kinds: dict[str, Any], name: str, piece: int) -> None:
    backend = kinds[name]

    def encode(one: str) -> list[int]:
        return backend.encode(one, add_special_tokens=False).ids

    for seed in range(4):
        whole = prose(seed, 900)
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(len(whole)), 5))
        parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        documents = [Document("here", part, is_last_part=part is parts[-1]) for part in parts]
        found = list(chunk_documents(documents, encode, piece))
        assert len(found) >= len(whole) // piece
        assert all(len(one.text) <= piece for one in found)
        assert [one.begins for one in found] == [True] + [False] * (len(found) - 1)
        assert [one.ends for one in found] == [False] * (len(found) - 1) + [True]
        assert [token for one in found for token in encode(one.text)] == encode(whole)


def test_a_giant_word_is_split_without_losing_text() -> None:
    whole = "a" * 1000 + " end"
    found = [
        one.text
        for one in chunk_documents([Document("here", whole, target=whole)], lambda text: [ord(c) for c in text], 100)
    ]
    assert "".join(found[: len(found) // 2]).replace(" ", "") == whole.replace(" ", "")
    assert max(map(len, found)) == 100


RECORDS = [
    {"text": "plain " * 50, "label": 3, "more": {"deep": [1, {"a": None}, 'x"y'], "n": -1.5e3}},
    {"first": [], "text": 'ümläut 🙂🙂 東京 \n\t"quoted" \\ud83d \\\\ ' * 20, "label": "b"},
    {"label": 1, "text": "", "target": "words " * 40},
    {"text": 5, "label": 0},
    {"text": None},
    {"other": "x" * 300},
]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("part", [16, 33, 1 << 20])
def test_long_records_are_read_as_json_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, ascii_only: bool
) -> None:
    monkeypatch.setattr(long_records, "PART", part)
    file = tmp_path / "d.jsonl"
    for record in RECORDS:
        line = (" " + json.dumps(record, ensure_ascii=ascii_only) + " \r").encode()
        file.write_bytes(b"before\n" + line + b"\nafter")
        long = LongRecord(file, 7, 7 + len(line))
        fields = long.fields("text")
        said = json.loads(line)
        assert {**fields, "text": 0} == {**said, "text": 0}
        if isinstance(said.get("text"), str):
            parts = list(long.text("text"))
            assert "".join(parts) == said["text"]
            assert all(parts)


BROKEN = [
    '{"text": "abc}',
    '{"text": "abc" "label": 1}',
    '{"text": "abc", }',
    '{"text": "abc"} x',
    '{text: "abc"}',
    '{"text": "a\\x"}',
    '{"text": "\\ud800"}',
    '{"text": "a", "b": [1}',
    '{"text": "a", "b": tru}',
    '["text"]',
    '{"text"',
    '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    "[" * 100_000,
    '{"text": "a\x01"}',
]


@pytest.mark.parametrize("long", [4, 1 << 22])
def test_broken_records_of_any_length_count_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    monkeypatch.setattr(text, "LONG", long)
    file = tmp_path / "d.jsonl"
    for line in BROKEN:
        file.write_text('{"text": "one"}\n' + line + '\n{"text": "two"}', encoding="utf-8")
        damage = DamagePolicy(True)
        source = open_text(DataSpec(jsonl=str(file)), Columns("text"))
        assert ["".join(one.text for one in source.documents(damage)), damage.count] == ["onetwo", 1], line[:40]
        with pytest.raises(InputError, match=r"d\.jsonl:2"):
            list(source.documents(DamagePolicy(False)))


def rows(file: Path, model: str = "causal-lm", **spec: Any) -> Any:
    return open_samples(make_job(model, {"sequence_length": 16, **spec, "jsonl": str(file)})).rows.tokens


def test_tokens_do_not_depend_on_how_a_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "d.jsonl"
    lines = [json.dumps({"text": prose(seed, 200), "label": seed % 2}) for seed in range(5)]
    file.write_text("\n".join(lines))
    saved = tmp_path / "tokenizer"
    open_samples(make_job("text", {"jsonl": str(file)})).tokenizer.save_pretrained(saved)
    found = []
    for piece, long in ((1 << 17, 1 << 22), (256, 100)):
        monkeypatch.setattr(tokens, "PIECE", piece)
        monkeypatch.setattr(text, "LONG", long)
        monkeypatch.setattr(long_records, "PART", 64)
        for model in ("causal-lm", "text"):
            made = rows(file, model, tokenizer=str(saved), skip_damaged=piece == 256)
            found.append((made.ids.tolist(), made.offsets.tolist(), made.labels.tolist()))
    assert found[:2] == found[2:]
    assert found[1][2] == [0, 1, 0, 1, 0]


def test_the_template_encloses_the_whole_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a b " * 100, "label": 1}) + '\n{"text": "b", "label": 0}')
    monkeypatch.setattr(tokens, "PIECE", 32)
    made = rows(tmp_path / "d.jsonl", "text", tokenizer=str(tmp_path / "tokenizer.json"))
    assert made.ids.tolist() == [2, *[4, 5] * 100, 3, 2, 5, 3]
    assert made.offsets.tolist() == [0, 202, 205]


def test_repeated_texts_of_a_parquet_file_are_read_one_by_one(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["word " * 20_000] * 200}), file)
    assert file.stat().st_size < 200_000
    before = pyarrow.total_allocated_bytes()
    source = open_text(DataSpec(parquet=str(file)), Columns("text"))
    most, count = 0, 0
    for document in source.documents(DamagePolicy(False)):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        count += len(document.text)
    assert count == 200 * 100_000
    assert most < 2e6


def test_memory_does_not_grow_with_a_record(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "d.jsonl").write_text(json.dumps({"text": prose(0, 60_000) * 20, "label": 0}))
    assert (tmp_path / "d.jsonl").stat().st_size > 1e7
    source = open_text(DataSpec(jsonl=str(tmp_path / "d.jsonl")), Columns("text"))
    tracemalloc.start()
    count = sum(len(piece.text) for piece in chunk_documents(source.documents(DamagePolicy(False)), list, PIECE))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 5e6
    assert most < 20 * long_records.PART


def test_the_tokenizer_does_not_learn_giant_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(random.Random(0).choices("abcdef", k=300_000)))
    made = open_samples(make_job("causal-lm", {"text": str(tmp_path / "a.txt"), "sequence_length": 32}))
    ids = np.asarray(made.rows.tokens.ids)
    assert made.tokenizer.decode(ids) == (tmp_path / "a.txt").read_text() + "<|endoftext|>"


@pytest.mark.parametrize("probability", [0.01, 0.15, 0.5, 0.9, 0.99])
def test_the_row_of_a_long_input_is_found_quickly(probability: float) -> None:
    from tightfit.data.sequences import corruption, row_length

    def becomes(length: int) -> int:
        taken, spans = corruption(length, probability)
        return length - taken + spans + 1

    for wanted in (4, 5, 6, 7, 8, 9, 10, 11, 16, 31, 100, 257, 1000):
        first = next(length for length in range(2, 10**6) if becomes(length + 1) > wanted)
        assert row_length(wanted, probability) == first
    assert becomes(row_length(2**20, probability)) <= 2**20
