"""Prepares text as training samples for the model's task, such as causal-lm.

The steps are: open the source (`text`), load or train a tokenizer (`tokenizer`), write the token
file (`tokens`), cut it into sequences, and turn these into samples of the task (`sequences`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tightfit.data.conversation_tokens import conversation_tokens, kept_conversations
from tightfit.data.conversations import conversation_format, renderer
from tightfit.data.order import Integers
from tightfit.data.samples import ModelInput, Samples
from tightfit.data.segments import SegmentSamples, padded_rows, separate_rows
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
from tightfit.data.tokenizer import SpecialTokens, load_tokenizer, named_tokenizer, special_tokens, trained_tokenizer
from tightfit.data.tokens import PackedSequences, PaddedSequences, TokenFile, TokenSequences, token_file
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec


@dataclass(frozen=True)
class PreparedText:
    """A source of text, and what its samples are made with.

    length     the most tokens of a row
    tokenizer  a transformers tokenizer
    pairs      whether documents are pairs of texts
    """

    task: str
    source: TextSource
    length: int
    tokenizer: Any
    special: SpecialTokens
    pairs: bool

    @property
    def labelled(self) -> bool:
        """Whether documents have class labels."""
        return self.task == "classification"


def prepare_text(spec: DataSpec, model: ModelInput) -> PreparedText:
    """Return the source that `spec` names, with a tokenizer: the one of the data or of the model,
    else one that is trained on the text.

    Raises InputError if the data, the tokenizer or the model lacks something that the task needs,
    such as a field of the rows or a mask token.
    """
    task = check_task(spec, model)
    source = text_source(spec, task)
    # so that a wrong field name fails before a tokenizer is trained
    first_document(source, spec.skip_damaged)
    _check_lengths(spec, model)
    length, spans = row_length_and_spans(spec, task)
    path = named_tokenizer(spec, model)
    tokenizer = load_tokenizer(path) if path else trained_tokenizer(source, spec, model, spans)
    asked = f"data: tokenizer={path}" if path else f"data: {source.name}"
    special = special_tokens(tokenizer, asked, task)
    model.check_tokenizer(asked, special.vocabulary)
    if len(special.sentinels) < spans:
        raise InputError(
            asked,
            f"has {len(special.sentinels)} sentinel tokens (<extra_id_0>, <extra_id_1>, ...), but T5's span corruption needs {spans}",
            "to train on pairs of texts instead, set data.target_field; or "
            + (
                "leave out data.tokenizer, and one with enough sentinel tokens is trained"
                if spec.tokenizer and not model.pretrained
                else "name a tokenizer with them in data.tokenizer, such as that of T5"
            ),
        )
    return PreparedText(task, source, length, tokenizer, special, task == "seq2seq-lm" and not _is_spanned(spec, task))


def text_source(spec: DataSpec, task: str) -> TextSource:
    """Return the source of a task's documents. Raises InputError if its files do not exist."""
    label = spec.label_field if task == "classification" else None
    return open_text(spec, conversation_format(spec) if spec.format else Columns(spec.field, spec.target_field, label))


def row_length_and_spans(spec: DataSpec, task: str) -> tuple[int, int]:
    """Return (the most tokens of a row, how many spans of it T5's span corruption removes)."""
    if not _is_spanned(spec, task):
        return spec.sequence_length, 0
    length = row_length(spec.sequence_length, spec.mask_probability)
    return length, corruption(length, spec.mask_probability)[1]


def _is_spanned(spec: DataSpec, task: str) -> bool:
    return task == "seq2seq-lm" and spec.target_field is None


def open_language(spec: DataSpec, model: ModelInput, seed: int) -> Samples:
    """Return the text that `spec` names as samples for the model's task. It is tokenized if the
    cache does not have its tokens.

    seed: selects the random masks of masked-lm and the random spans of span corruption. Raises
    InputError like `prepare_text`.
    """
    text = prepare_text(spec, model)
    task, source, length, tokenizer, special = text.task, text.source, text.length, text.tokenizer, text.special
    if spec.format:
        return _conversations(source, spec, special, tokenizer)
    tokens = token_file(source, tokenizer, special, spec.skip_damaged)
    damaged = tokens.facts["damaged"]
    if text.labelled:
        labels, names = _classes(tokens, source, model)
        rows: Any = PaddedSequences(tokens, length, special.pad)
        return LabelledSamples(rows, tokenizer, damaged, labels=labels, class_names=names)
    if text.pairs:
        targets = PaddedSequences(TokenFile(tokens.folder, "target"), spec.target_length or length, special.pad)
        return PairSamples(PaddedSequences(tokens, length, special.pad), tokenizer, damaged, targets=targets)
    if spec.packing == "separate":
        return SegmentSamples(separate_rows(tokens, None, length, special.pad), tokenizer, damaged)
    if spec.packing == "padded":
        _warn_of_cut_texts(tokens, length, source.name)
        rows = PaddedSequences(tokens, length, special.pad)
    else:
        rows = _packed_sequences(source, tokens, length)
    return task_samples(task, rows, special, spec, seed, tokenizer, damaged)


def _classes(tokens: TokenFile, source: TextSource, model: ModelInput) -> tuple[Integers, tuple[str, ...]]:
    """Return (the class of each text, the names of the classes by their numbers). Raises InputError
    for a class that the model does not have."""
    asked, labels, names = f"data: {source.name}", tokens.labels, source.class_names
    if tokens.facts["classes"]:
        numbers, names = model.numbered(asked, tokens.facts["classes"])
        labels = numbers[labels]
    model.check_labels(asked, labels)
    return labels, names


def _warn_of_cut_texts(tokens: TokenFile, length: int, name: str) -> None:
    """Issue a TightfitWarning if texts are longer than `length` tokens, so that their rest is not used."""
    lengths = np.diff(tokens.offsets)
    longer = int((lengths > length).sum())
    if longer:
        warnings.warn(
            f"data: {name}: {longer:,} of {len(lengths):,} texts are longer than data.sequence_length={length}: only their "
            f"first {length} tokens are used. packing: packed or packing: separate uses all tokens",
            TightfitWarning,
            stacklevel=3,
        )


def synthetic_language(spec: DataSpec, model: ModelInput, seed: int) -> Samples:
    """Return synthetic token sequences as samples for the model's task. Raises InputError if the
    vocabulary size is not known or is larger than the model's, or if the model has too few
    positions for the sequences."""
    task, vocabulary = check_task(spec, model), spec.vocabulary_size or model.vocabulary
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
    return task_samples(task, rows, special, spec, seed, None, 0)


def _conversations(source: TextSource, spec: DataSpec, special: SpecialTokens, tokenizer: Any) -> Samples:
    """Return the conversations of a source as samples for causal-lm. Issues a TightfitWarning if
    some conversations are cut because they are longer than data.sequence_length, or left out
    because none of their tokens counts in the loss."""
    length = spec.sequence_length
    tokens = conversation_tokens(source, renderer(spec, tokenizer), special, spec.skip_damaged)
    kept, longer, left_out = kept_conversations(tokens, length, source.name)
    absent = {*spec.loss_on} - {*tokens.facts["roles"]} if isinstance(spec.loss_on, list | tuple) else set()
    if absent:
        warnings.warn(
            f"data: {source.name}: no message has the role {' or '.join(sorted(absent))} of data.loss_on; the roles are "
            f"{', '.join(tokens.facts['roles'])}",
            TightfitWarning,
            stacklevel=2,
        )
    if longer or left_out:
        count = len(kept) + left_out
        cut = f"{longer:,} of {count:,} samples are longer than data.sequence_length={length}: only their first {length} tokens "
        lost = f"{left_out:,} of {count:,} samples have no token that counts in the loss"
        parts = [f"{cut}are used"] if longer else []
        parts += (
            [f"{lost}{f' among their first {length} tokens' if longer else ''}, and are left out"] if left_out else []
        )
        warnings.warn(f"data: {source.name}: {'; '.join(parts)}", TightfitWarning, stacklevel=2)
    rows = separate_rows if spec.packing == "separate" else padded_rows
    return SegmentSamples(rows(tokens, kept, length, special.pad), tokenizer, tokens.facts["damaged"])


def check_task(spec: DataSpec, model: ModelInput) -> str:
    """Return the task for which text is prepared: the model's task, or causal-lm if the model has
    no task but the job has its own loss. Raises InputError if there is neither, if the model does
    not read text, or if `spec` has a setting that is for another task."""
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
    for name, value in (("format", spec.format), ("packing", spec.packing)):
        if task != "causal-lm" and (value == "separate" or (name == "format" and value)):
            raise InputError(
                f"data: {name}={value}",
                f"is for causal-lm, and the model is a {task}",
                f"leave out data.{name}, or use a causal-lm model",
            )
    if spec.streaming and (task == "classification" or spec.target_field is not None):
        raise InputError(
            "job: data.streaming",
            "is for texts without labels and target texts",
            "leave out data.streaming",
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


def task_samples(
    task: str, rows: TokenSequences, special: SpecialTokens, spec: DataSpec, seed: int, tokenizer: Any, damaged: int
) -> Samples:
    if task == "causal-lm":
        return CausalSamples(rows, tokenizer, damaged)
    kinds: dict[str, Callable[..., Samples]] = {"masked-lm": MaskedSamples, "seq2seq-lm": SpanSamples}
    return kinds[task](rows, tokenizer, damaged, special=special, probability=spec.mask_probability, seed=seed)
