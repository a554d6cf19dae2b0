"""Loads the user's tokenizer, or trains a byte-level BPE tokenizer on the data and caches it.

Source  byte-level BPE: Radford et al. 2019 (GPT-2); sentinel tokens, which mark removed spans of
        text: Raffel et al. 2020, arXiv:1910.10683 (T5).
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.data.cache import cached_folder
from tightfit.data.samples import DamagePolicy, ModelInput
from tightfit.data.text import TextSource
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.models.pretrained import pretrained_folder

_log = logging.getLogger(__name__)
PAD, END, MASK, SENTINEL = "<|pad|>", "<|endoftext|>", "<|mask|>", "<extra_id_{}>"
CHATML_NAMES = ["<|im_start|>", "<|im_end|>"]  # special tokens of the chat template chatml
_TRAINING_CHARACTERS = 8_000_000
_LONG_RUN = re.compile(r"(\S{1024})\S+|(\s{1024})\s+")
_BYTES = 256  # the alphabet of a byte-level tokenizer
_END_NAMES = (END, "</s>", "[SEP]", "<|end_of_text|>", "<eos>", "<|im_end|>")
_PAD_NAMES = (PAD, "[PAD]", "<pad>")
_MASK_NAMES = (MASK, "[MASK]", "<mask>")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of a tokenizer's special tokens, which represent no text.

    vocabulary  the size of the tokenizer's vocabulary, special tokens included (not an id)
    end         the end-of-text token
    pad         the padding token; the end-of-text token if the tokenizer has no padding token
    mask        the mask token, which masked-lm needs; None if the tokenizer has none
    sentinels   the tokens <extra_id_0>, <extra_id_1>, ..., which span corruption (T5) needs
    all         the ids of all special tokens, sorted: the ones above, and any others that the
                tokenizer declares as special
    """

    vocabulary: int
    end: int
    pad: int
    mask: int | None
    sentinels: tuple[int, ...]
    all: tuple[int, ...]


def named_tokenizer(spec: DataSpec, model: ModelInput) -> str | None:
    """Return which tokenizer to load, as a path or the id of a model on the Hub: `data.tokenizer`
    if it is set, else the tokenizer in the model's own folder.

    Return None if a new byte-level BPE must be trained instead: if neither of the two exists, or if
    `data.vocabulary_size` is set without `data.tokenizer`.
    """
    return spec.tokenizer or (None if spec.vocabulary_size else model.tokenizer)


def load_tokenizer(path: str) -> Any:
    """Return a transformers tokenizer, loaded from `path`: a tokenizer.json, a folder with a
    tokenizer, or the id of a model on the Hub.

    Raises InputError if the path does not exist, or if it holds no tokenizer that the library
    tokenizers can run (one in pure Python is not supported).
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    asked, local_path = f"data: tokenizer={path}", pretrained_folder(path, field="data.tokenizer")
    check_path(path, local_path)
    try:
        described = (local_path / "tokenizer_config.json").exists() or not (local_path / "tokenizer.json").exists()
        if local_path.is_dir() and described:
            loaded = AutoTokenizer.from_pretrained(str(local_path), local_files_only=True, trust_remote_code=False)
            loaded.backend_tokenizer  # noqa: B018  fails for a tokenizer in pure Python
            return loaded
        return _with_roles(
            Tokenizer.from_file(str(local_path / "tokenizer.json" if local_path.is_dir() else local_path))
        )
    except Exception as error:  # the Rust library raises plain Exception, transformers many classes
        raise InputError(
            asked, f"not a tokenizer ({error})", "write one with tokenizer.save_pretrained(folder)"
        ) from None


def check_path(tokenizer: str, path: Path) -> None:
    """Raise InputError if `path`, the path of the tokenizer that the job names `tokenizer`, does not exist."""
    if not path.exists():
        raise InputError(
            f"data: tokenizer={tokenizer}", "no such file or folder", "name a tokenizer.json, or a folder that has one"
        )


def _with_roles(backend: Any) -> Any:
    """Wrap a tokenizers.Tokenizer as a transformers tokenizer. A tokenizers.Tokenizer does not
    record which of its special tokens ends a text, pads or masks, so these are recognised by their
    usual names, such as </s>, <pad> and [MASK]."""
    from transformers import PreTrainedTokenizerFast

    def named(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if backend.token_to_id(name) is not None), None)

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=named(_END_NAMES),
        pad_token=named(_PAD_NAMES),
        mask_token=named(_MASK_NAMES),
    )


def trained_tokenizer(source: TextSource, spec: DataSpec, model: ModelInput, sentinels: int) -> Any:
    """Return a byte-level BPE tokenizer trained on about 8 million characters of the source. It is
    trained once and then cached. Its vocabulary has the size `data.vocabulary_size`, or that of the
    model if this is not set.

    sentinels  how many sentinel tokens (<extra_id_0>, ...) the tokenizer needs

    Raises InputError if the model has pretrained weights, which another tokenizer's ids would not fit,
    and the job does not ask for a new tokenizer by `data.vocabulary_size`. Also raises it if the
    vocabulary size is unknown, or less than 256 (one token for each byte) plus the number of special
    tokens.
    """
    if source.identity is None:
        raise InputError(
            f"data: {source.name}",
            "is a stream, whose content may change, so no tokenizer is trained on it",
            "set data.tokenizer, or use a model whose folder has a tokenizer",
        )
    if model.pretrained is not None and spec.vocabulary_size is None:
        raise InputError(
            f"job: model.from={model.pretrained}",
            "has no tokenizer, and with a new one, its pretrained weights would get other tokens than those they learned",
            "set data.tokenizer to the model's tokenizer; or data.vocabulary_size, to train a new one all the same",
        )
    names, size = _special_names(model.task, sentinels), spec.vocabulary_size or model.vocabulary
    names += CHATML_NAMES if spec.chat_template == "chatml" else []
    if size is None:
        raise InputError(
            f"data: {source.name}",
            "no tokenizer can be trained, because the vocabulary size of the model is not known",
            "set data.vocabulary_size or data.tokenizer",
        )
    if size < _BYTES + len(names):
        raise InputError(
            f"vocabulary of {size} tokens",
            "too small for text: a byte-level BPE needs a token for each of the 256 bytes, and its special tokens",
            f"set {'' if model.pretrained else 'model.vocab_size (or '}data.vocabulary_size{'' if model.pretrained else ')'} to "
            f"{_BYTES + len(names)} or more",
        )
    identity = [source.identity, size, names, _TRAINING_CHARACTERS]
    return load_tokenizer(str(cached_folder("tokenizer", identity, lambda folder: _train(folder, source, size, names))))


def _special_names(task: str | None, sentinels: int) -> list[str]:
    """Return the names of a new tokenizer's special tokens, in the order of their ids.

    For causal-lm or a task of None, this is only the end-of-text token. For other tasks, the order
    is: the padding token, as in BERT and T5, the end-of-text token, the mask token (for masked-lm),
    and `sentinels` sentinel tokens.
    """
    if task in (None, "causal-lm"):
        return [END]
    extra = [MASK] if task == "masked-lm" else []
    return [PAD, END, *extra, *(SENTINEL.format(number) for number in range(sentinels))]


def _train(folder: Path, source: TextSource, vocabulary: int, names: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_training_texts(source), trainer)
    _with_roles(backend).save_pretrained(str(folder))


def _training_texts(source: TextSource) -> Iterator[str]:
    """Yield the texts on which a tokenizer is trained: about 8 million characters in all, from
    documents that are spread evenly over the source.

    A run of more than 1024 characters without white space is cut to 1024, and so is a run of white
    space: such runs are data or drawings, not words.
    """
    every = max(1, -(-source.size_bytes // _TRAINING_CHARACTERS))
    left, read = _TRAINING_CHARACTERS, 0
    for document in itertools.islice(source.documents(DamagePolicy(skip=True)), 0, None, every):
        for text in filter(None, (document.text, document.target)):
            kept = _LONG_RUN.sub(r"\1\2", text[:left])
            yield kept
            left -= len(kept)
            read += len(text)
            _log.info("choosing a tokenizer's words: %.0f million characters so far", read / 1e6)
            if left <= 0 or read > 4 * _TRAINING_CHARACTERS:
                return


def special_tokens(tokenizer: Any, asked: str, task: str | None) -> SpecialTokens:
    """Return the ids of a tokenizer's special tokens. Raises InputError if the tokenizer has no
    end-of-text token, or if `task` is masked-lm and the tokenizer has no mask token.

    asked: the setting that selects the tokenizer, for the error message
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise InputError(asked, "has no end-of-text token", "add eos_token to its tokenizer_config.json")
    if task == "masked-lm" and tokenizer.mask_token_id is None:
        raise InputError(
            asked, "has no mask token", "add mask_token to its tokenizer_config.json, or train a causal-lm"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    found = (tokenizer.backend_tokenizer.token_to_id(SENTINEL.format(number)) for number in itertools.count())
    sentinels = tuple(itertools.takewhile(lambda token: token is not None, found))
    known = {*tokenizer.all_special_ids, end, pad, *sentinels}
    return SpecialTokens(len(tokenizer), end, pad, tokenizer.mask_token_id, sentinels, tuple(sorted(known)))
