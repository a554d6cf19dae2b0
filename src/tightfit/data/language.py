"""Prepares text as samples of the model's task.

The steps are: open the source (`text`), load or train a tokenizer (`tokenizer`), write the token
file (`tokens`), cut it into sequences, and turn these into samples of the task (`sequences`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tightfit.data.samples import ModelInput, Samples
from tightfit.data.sequences import (
    CausalSamples,
    LabelledSamples,
    MaskedSamples,
    PairSamples,
    SpanSamples,
    corruption,
    row_length,
)
from tightfit.data.synthetic import SyntheticRows
from tightfit.data.text import Columns, TextSource, first_document, open_text
from tightfit.data.tokenizer import SpecialTokens, load_tokenizer, special_tokens, trained_tokenizer
from tightfit.data.tokens import PackedSequences, PaddedSequences, TokenFile, TokenSequences, token_file
from tightfit.errors import InputError
from tightfit.job import DataSpec


def open_language(spec: DataSpec, model: ModelInput, seed: int, words: TextSource | None = None) -> Samples:
    """Open a text source as samples of the model's task.

    seed   selects the random masks and spans
    words  the text that a tokenizer is trained on, if one is; None for the text of the source

    Raises InputError if the data, the tokenizer or the model lacks something that the task needs.
    """
    task = _task(spec, model)
    pairs, labelled = task == "seq2seq-lm" and spec.target_field is not None, task == "classification"
    source = open_text(spec, Columns(spec.field, spec.target_field, spec.label_field if labelled else None))
    # so that a wrong field name fails before a tokenizer is trained
    first_document(source, spec.skip_damaged)
    _check_lengths(spec, model)
    spanned = task == "seq2seq-lm" and not pairs
    length = row_length(spec.sequence_length, spec.mask_probability) if spanned else spec.sequence_length
    spans = corruption(length, spec.mask_probability)[1] if spanned else 0
    tokenizer = (
        load_tokenizer(spec.tokenizer) if spec.tokenizer else trained_tokenizer(words or source, spec, model, spans)
    )
    asked = f"data: tokenizer={spec.tokenizer}" if spec.tokenizer else f"data: {source.name}"
    special = special_tokens(tokenizer, asked, task)
    model.check_tokenizer(asked, special.vocabulary)
    if len(special.sentinels) < spans:
        raise InputError(
            asked,
            f"has {len(special.sentinels)} sentinel tokens (<extra_id_0>, <extra_id_1>, ...), but T5's span corruption needs {spans}",
            "to train on pairs of texts instead, set data.target_field; or leave out data.tokenizer, and one with enough "
            "sentinel tokens is trained",
        )
    tokens = token_file(source, tokenizer, special, task != "causal-lm", spec.skip_damaged)
    damaged = tokens.facts["damaged"]
    if labelled:
        model.check_labels(f"data: {source.name}", tokens.labels)
        return LabelledSamples(PaddedSequences(tokens, length, special.pad), tokenizer, damaged, labels=tokens.labels)
    if pairs:
        targets = PaddedSequences(TokenFile(tokens.folder, "target"), spec.target_length or length, special.pad)
        return PairSamples(PaddedSequences(tokens, length, special.pad), tokenizer, damaged, targets=targets)
    rows = (
        PaddedSequences(tokens, length, special.pad)
        if spec.packing == "padded"
        else _packed_sequences(source, tokens, length)
    )
    return _task_samples(task, rows, special, spec, seed, tokenizer, damaged)


def synthetic_language(spec: DataSpec, model: ModelInput, seed: int) -> Samples:
    """Make synthetic sequences as samples of the model's task. Raises InputError if no vocabulary
    size is known."""
    task, vocabulary = _task(spec, model), spec.vocabulary_size or model.vocabulary
    if vocabulary is None:
        raise InputError(
            "data: synthetic=tokens", "the vocabulary size of the model is not known", "set data.vocabulary_size"
        )
    _check_lengths(spec, model)
    model.check_tokenizer("data: vocabulary_size", vocabulary)
    rows = SyntheticRows(spec.samples, spec.sequence_length, vocabulary, seed)
    if task == "classification":
        return LabelledSamples(rows, labels=rows.rules(np.arange(spec.samples)) % (model.labels or 2))
    if task == "seq2seq-lm":
        return PairSamples(rows, targets=replace(rows, length=spec.target_length or spec.sequence_length))
    special = SpecialTokens(vocabulary, end=0, pad=0, mask=vocabulary - 1, sentinels=(), all=(vocabulary - 1,))
    return _task_samples(task, rows, special, spec, seed, None, 0)


def _task(spec: DataSpec, model: ModelInput) -> str:
    """Return the task for which text is prepared. Raises InputError if the model does not read
    text, or if its task is unknown."""
    task = model.task or ("causal-lm" if model.own_loss else None)
    if task is None:
        raise InputError(
            f"data: {spec}",
            "the data is text, but the model's task is not known",
            "set model.task (such as causal-lm), or give the job a loss",
        )
    if task == "classification" and model.vocabulary is None and not spec.vocabulary_size and not spec.tokenizer:
        raise InputError(
            f"data: {spec}", "is text, but the model has no vocabulary", "use data.images, or a model that reads tokens"
        )
    if spec.target_field is not None and task != "seq2seq-lm":
        raise InputError(
            f"data: target_field={spec.target_field}",
            f"a {task} model has no target text",
            "leave out data.target_field, or use a seq2seq-lm model",
        )
    return task


def _check_lengths(spec: DataSpec, model: ModelInput) -> None:
    model.check_length("data: sequence_length", spec.sequence_length)
    model.check_length("data: target_length", spec.target_length or 0)


def _packed_sequences(source: TextSource, tokens: TokenFile, length: int) -> PackedSequences:
    rows = PackedSequences(tokens, length)
    if len(rows) == 0:
        count = len(tokens.ids)
        raise InputError(
            f"data: {source.name}",
            f"has only {count} tokens, less than one sequence of data.sequence_length={length}",
            f"set data.sequence_length: {count // 2}" if count >= 4 else "give more text",
        )
    return rows


def _task_samples(
    task: str, rows: TokenSequences, special: SpecialTokens, spec: DataSpec, seed: int, tokenizer: Any, damaged: int
) -> Samples:
    if task == "causal-lm":
        return CausalSamples(rows, tokenizer, damaged)
    kinds: dict[str, Callable[..., Samples]] = {"masked-lm": MaskedSamples, "seq2seq-lm": SpanSamples}
    return kinds[task](rows, tokenizer, damaged, special=special, probability=spec.mask_probability, seed=seed)
