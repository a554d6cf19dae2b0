"""Text that is tokenized while training reads it. Nothing is written to disk, and the memory does
not grow with the source.

A stream reads the documents of its source in their order, makes token sequences of them, and draws
samples from a shuffle buffer: each new sample takes the place of a random one in the buffer, which
is read next. After the last document, the samples that are left in the buffer are read in random
order, and the source is read again: an epoch has each sample once.

Of several sources, the source of each sample is drawn by the weights. Each source has epochs and a
share of the shuffle buffer of its own.

The sample at a position depends only on the source, the tokenizer and the seed. Every data rank
reads the whole stream, and makes batches of its own samples. A resumed run reads the samples that
were consumed before, and skips them.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightfit.data.conversation_tokens import tokenized_conversations
from tightfit.data.conversations import Renderer, renderer
from tightfit.data.document_chunks import PIECE, chunk_documents
from tightfit.data.language import PreparedText, prepare_text, task_samples
from tightfit.data.mixture import with_shared_tokenizer
from tightfit.data.order import Integers, hash_numbers, permute, random_numbers, uniform
from tightfit.data.samples import DamagePolicy, ModelInput, Samples
from tightfit.data.segments import SegmentSamples, pack, stack_segments
from tightfit.data.tokenizer import load_tokenizer, named_tokenizer
from tightfit.data.tokens import ChunkEncoder, Mask, batches, plain_backend, token_dtype
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec
from tightfit.models.batches import Batch

_CHARACTERS = 100_000  # characters that are tokenized at a time
_PACKED_AT_ONCE = 64  # packing: separate packs the texts of so many sequences at a time
_TOKENIZING_BYTES = 32 * 2**20  # memory of the texts that are tokenized at a time
_OBJECT_BYTES = 280  # memory of a sample in the shuffle buffer, beside its tokens
_TIMED = 3  # measurements of the time of tokenizing, of which the fastest counts


@dataclass(frozen=True)
class StreamRow:
    """One token sequence of a stream.

    ids      (tokens,) unsigned integers
    counted  (tokens,) which tokens count in the loss; None if all of them do
    lengths  the lengths of the segments that it holds
    """

    ids: NDArray[Any]
    counted: Mask | None
    lengths: tuple[int, ...]


@dataclass
class _Window:
    """The rows of one batch, as TokenSequences and as the rows of SegmentSamples. Their indices are
    positions of the stream.

    length    the most tokens of a row
    pad       the padding token
    ragged    whether a batch is padded to its longest row, otherwise to `length`
    separate  whether rows hold several segments
    """

    length: int
    pad: int
    ragged: bool
    separate: bool
    first: int = 0
    rows: list[StreamRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indices: Integers) -> tuple[Integers, Mask]:
        chosen = self._chosen(indices)
        length = max(len(row.ids) for row in chosen) if self.ragged else self.length
        mask = np.arange(length) < np.array([[len(row.ids)] for row in chosen])
        ids = np.full(mask.shape, self.pad, dtype=np.int64)
        ids[mask] = np.concatenate([row.ids for row in chosen])
        return ids, mask

    def read(self, indices: Integers) -> tuple[Integers, Integers, Integers]:
        return stack_segments(map(_segments, self._chosen(indices)), None if self.ragged else self.length, self.pad)

    def _chosen(self, indices: Integers) -> list[StreamRow]:
        return [self.rows[index - self.first] for index in indices.tolist()]


def _segments(row: StreamRow) -> tuple[Integers, Mask, Integers]:
    """Return (token ids, which of them have a label, position ids) of a row, each (tokens,)."""
    positions = np.concatenate([np.arange(length) for length in row.lengths])
    counted = np.ones(len(row.ids), dtype=bool) if row.counted is None else row.counted
    return row.ids.astype(np.int64), counted & (positions > 0), positions


class TextStream:
    """The samples of text that is tokenized while it is read; see the top of this module.

    spec, model, seed  what the samples are made from; only these are pickled
    """

    def __init__(self, spec: DataSpec, model: ModelInput, seed: int) -> None:
        self.spec, self.model, self.seed = spec, model, seed
        parts = with_shared_tokenizer(spec, model)
        self._sources = [_Source(part, prepare_text(part, model)) for part in parts]
        weights = [source.weight for source in spec.sources or ()] or [1.0]
        self._bounds = np.cumsum(weights) / sum(weights)
        self._buffers = [max(round(spec.shuffle_buffer * weight / sum(weights)), 1) for weight in weights]
        text = self._sources[0].text
        self.tokenizer = text.tokenizer
        self.ragged, separate = spec.packing == "padded", spec.packing == "separate"
        self._window = _Window(text.length, text.special.pad, self.ragged, separate)
        if separate or any(part.format for part in parts):
            self._samples: Samples = SegmentSamples(self._window, self.tokenizer)  # type: ignore[arg-type]
        else:
            self._samples = task_samples(text.task, self._window, text.special, spec, seed, None, 0)

    def __reduce__(self) -> tuple[Callable[..., TextStream], tuple[DataSpec, ModelInput, int]]:
        return type(self), (self.spec, self.model, self.seed)

    @property
    def sample_items(self) -> int:
        return self._samples.sample_items

    @property
    def damaged(self) -> int:
        """How many samples this process has left out in the first epoch because they are damaged."""
        return sum(source.damage.count for source in self._sources)

    def batches(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Yield the batch of samples first..stop of the stream for each of `ranges`, which are in
        order. For a range that begins before the end of the previous one, the previous batch is
        yielded again."""
        rows, position = self._rows(), 0
        held: tuple[int, list[StreamRow]] = (0, [])
        for first, stop in ranges:
            if not held[1] or first >= position:
                held, position = (first, list(itertools.islice(rows, first - position, stop - position))), stop
            yield self._batch(*held)

    def example(self, count: int) -> Batch:
        """Return a batch of at most `count` samples, without filling the shuffle buffer."""
        return self._batch(0, list(itertools.islice(self._sources[0].rows(0), count)))

    def _batch(self, first: int, rows: list[StreamRow]) -> Batch:
        self._window.first, self._window.rows = first, rows
        indices = np.arange(first, first + len(rows))
        return self._samples.batch(indices, 0 * indices)

    def _rows(self) -> Iterator[StreamRow]:
        """Yield the rows of the stream, without an end."""
        streams = [self._source_rows(number) for number in range(len(self._sources))]
        if len(streams) == 1:
            yield from streams[0]
        for position in itertools.count():
            drawn = uniform(random_numbers(self.seed, np.array([position]), 1))[0, 0]
            yield next(streams[int(np.searchsorted(self._bounds[:-1], drawn, side="right"))])

    def _source_rows(self, number: int) -> Iterator[StreamRow]:
        for epoch in itertools.count():
            secret = hash_numbers(self.seed, number, epoch)
            yield from shuffled(self._sources[number].rows(epoch), self._buffers[number], secret)


class _FirstEpochDamage(DamagePolicy):
    """Counts damaged samples, and warns of the first one."""

    def report(self, location: str, found: str) -> None:
        super().report(location, found)
        if self.count == 1:
            said = f"{location}: {found}: data.skip_damaged leaves out this sample, and further damaged ones"
            warnings.warn(said, TightfitWarning, stacklevel=2)


class _Source:
    """One source of a stream.

    damage  has counted the damaged samples of the first epoch, as far as it was read
    """

    def __init__(self, spec: DataSpec, text: PreparedText) -> None:
        self.spec, self.text = spec, text
        self.damage = DamagePolicy(spec.skip_damaged)

    def rows(self, epoch: int) -> Iterator[StreamRow]:
        """Yield the rows of one epoch in the order of the documents. Raises InputError if there are
        none, or for a damaged document."""
        damage = (DamagePolicy if epoch else _FirstEpochDamage)(self.spec.skip_damaged)
        if not epoch:
            self.damage = damage
        if self.spec.format:
            segments = self._conversations(renderer(self.spec, self.text.tokenizer), damage, epoch)
        else:
            segments = self._texts(damage)
        if self.spec.packing == "separate":
            segments = _packed(segments, self.text.length)
        empty = True
        for row in segments:
            empty = False
            yield row
        if empty:
            self._raise_empty()

    def _conversations(self, renders: Renderer, damage: DamagePolicy, epoch: int) -> Iterator[StreamRow]:
        text, dtype = self.text, token_dtype(self.text.special)
        read = longer = left_out = 0
        for batch in tokenized_conversations(text.source, renders, text.special, damage, _CHARACTERS):
            for one in batch:
                kept = min(len(one.ids), text.length)
                read, longer = read + 1, longer + (len(one.ids) > kept)
                if one.first_counted < kept:
                    yield StreamRow(np.array(one.ids[:kept], dtype), one.counted[:kept].copy(), (kept,))
                else:
                    left_out += 1
        if epoch == 0 and (longer or left_out):
            warnings.warn(
                f"data: {text.source.name}: of {read:,} samples, {longer:,} are longer than data.sequence_length="
                f"{text.length} and were truncated, and {left_out:,} were left out because they have no token that counts "
                "in the loss",
                TightfitWarning,
                stacklevel=2,
            )

    def _texts(self, damage: DamagePolicy) -> Iterator[StreamRow]:
        """Yield texts that are joined and cut (packing: packed), truncated (padded), or cut
        (separate). Issues a TightfitWarning at the first text that is truncated."""
        text, dtype, packing = self.text, token_dtype(self.text.special), self.spec.packing
        encoder = ChunkEncoder(text.tokenizer, text.special)
        pieces = chunk_documents(text.source.documents(damage), encoder.encode, PIECE)
        held, is_told = np.empty(0, dtype), False
        for batch in batches(pieces, _CHARACTERS):
            for piece, ids in encoder.tokens(batch):
                held = np.concatenate([held, np.array(ids, dtype)])
                if packing == "padded":
                    if len(held) > text.length and not is_told:
                        is_told = True
                        warnings.warn(
                            f"data: {text.source.name}: some texts are longer than data.sequence_length={text.length}: only "
                            f"their first {text.length} tokens are used. packing: packed or packing: separate uses all tokens",
                            TightfitWarning,
                            stacklevel=2,
                        )
                    held = held[: text.length]
                else:
                    whole = len(held) - len(held) % text.length
                    for begin in range(0, whole, text.length):
                        yield _row(held[begin : begin + text.length])
                    held = held[whole:]
                if piece.ends and packing != "packed":
                    if len(held):
                        yield _row(held)
                    held = np.empty(0, dtype)

    def _raise_empty(self) -> None:
        asked = f"data: {self.text.source.name}"
        if self.spec.format:
            raise InputError(
                asked,
                f"has no sample with a token that counts in the loss among its first {self.text.length}",
                "increase data.sequence_length, or name other roles with data.loss_on, or set data.loss_on: all",
            )
        raise InputError(
            asked,
            f"has fewer tokens than one sequence of data.sequence_length={self.spec.sequence_length}",
            "decrease data.sequence_length, or give more text",
        )


def _row(ids: NDArray[Any]) -> StreamRow:
    return StreamRow(ids.copy(), None, (len(ids),))  # a view would keep the whole array in memory


def _packed(segments: Iterator[StreamRow], length: int) -> Iterator[StreamRow]:
    """Yield rows of several segments each, which are at most `length` tokens together."""
    held: list[StreamRow] = []
    tokens = 0
    for segment in segments:
        held.append(segment)
        tokens += len(segment.ids)
        if tokens >= _PACKED_AT_ONCE * length:
            yield from _pack(held, length)
            held, tokens = [], 0
    if held:
        yield from _pack(held, length)


def _pack(segments: list[StreamRow], length: int) -> Iterator[StreamRow]:
    order, firsts = pack(np.array([len(segment.ids) for segment in segments]), length)
    for begin, end in itertools.pairwise(firsts.tolist()):
        chosen = [segments[number] for number in order[begin:end].tolist()]
        masks = [segment.counted for segment in chosen if segment.counted is not None]
        counted = np.concatenate(masks) if masks else None
        yield StreamRow(np.concatenate([one.ids for one in chosen]), counted, tuple(len(one.ids) for one in chosen))


def shuffled(rows: Iterable[Any], size: int, secret: int) -> Iterator[Any]:
    """Yield rows in random order, with a buffer of `size` rows. Each `secret` gives another order.

    Example: with a buffer of 1, the order is unchanged.
    """
    held: list[Any] = []
    for number, row in enumerate(rows):
        if len(held) < size:
            held.append(row)
            continue
        at = hash_numbers(secret, number) % size
        yield held[at]
        held[at] = row
    for index in permute(np.arange(len(held)), len(held), secret).tolist():
        yield held[index]


def stream_bytes(spec: DataSpec, model: ModelInput) -> float:
    """Return the most host memory, in bytes, that a process needs to read a stream: the shuffle
    buffer, if each sample has its full length, and the texts that are being tokenized. Return 0 if
    the data is not streamed."""
    if not spec.streaming:
        return 0.0
    masked = any(part.format for part in spec.parts())
    token_bytes = (2 if model.vocabulary is not None and model.vocabulary <= 1 << 16 else 4) + masked
    rows = spec.shuffle_buffer + len(spec.parts()) + (_PACKED_AT_ONCE + 1 if spec.packing == "separate" else 0)
    return rows * (spec.sequence_length * token_bytes + _OBJECT_BYTES) + _TOKENIZING_BYTES


def seconds_per_sample(spec: DataSpec, model: ModelInput) -> float:
    """Measure the seconds to tokenize a sample of full length with the tokenizer of a stream.
    Return 0.0 if the tokenizer is not on this machine, or is still to be trained."""
    path = named_tokenizer(spec, model)
    if path is None:
        return 0.0
    try:
        encoder = plain_backend(load_tokenizer(path))
    except InputError:
        return 0.0
    lines = Path(str(textwrap.__file__)).read_text().splitlines()
    best = math.inf
    for _ in range(_TIMED):
        began = time.perf_counter()
        encodings = encoder.encode_batch_fast(lines, add_special_tokens=False)
        best = min(best, time.perf_counter() - began)
    return spec.sequence_length * best / sum(len(encoding.ids) for encoding in encodings)


def open_stream(spec: DataSpec, model: ModelInput, seed: int) -> TextStream:
    """Open text as a stream. Raises InputError if the text, the tokenizer or the model lacks
    something that the task needs."""
    return TextStream(spec, model, seed)


__all__ = ["StreamRow", "TextStream", "open_stream", "seconds_per_sample", "shuffled", "stream_bytes"]
