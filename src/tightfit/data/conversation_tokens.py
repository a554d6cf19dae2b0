"""Tokenizes each conversation once, with a mask of the tokens that count in the loss.

A conversation is first rendered as one text, in which spans of characters count in the loss, such
as the assistant's answers. This text is tokenized as a whole, as transformers' apply_chat_template
does. A token counts if it overlaps with one of these spans.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.cache import cached_folder
from tightfit.data.conversations import Conversation, RefusedMessages, Rendered, Renderer, Span
from tightfit.data.order import Integers
from tightfit.data.samples import DamagePolicy
from tightfit.data.text import TextSource
from tightfit.data.tokenizer import SpecialTokens
from tightfit.data.tokens import Mask, TokenFile, leading_tokens, plain_backend, token_dtype
from tightfit.errors import InputError

_log = logging.getLogger(__name__)
_BATCH_CHARACTERS = 1_000_000


def conversation_tokens(
    source: TextSource, renderer: Renderer, special: SpecialTokens, skip_damaged: bool
) -> TokenFile:
    """Return the token file of a source of conversations, which also says which tokens count in the
    loss. The source is tokenized once, and the result is cached.

    renderer      renders each conversation as text
    special       the special tokens of the renderer's tokenizer
    skip_damaged  True leaves out damaged rows, and conversations that the chat template refuses.
                  False raises InputError at the first one

    Raises InputError also if the chat template is not valid, or if it renders the first messages of
    a conversation differently when others follow. The tokens that count cannot be found then.
    """
    backend = plain_backend(renderer.tokenizer)
    identity = ["conversations", source.identity, backend.to_str(), special.end, renderer.identity, skip_damaged]

    def make(folder: Path) -> None:
        damage, written = DamagePolicy(skip_damaged), 0.0
        roles: set[str] = set()
        dtype = token_dtype(special)
        offsets, first_counted = array("q", [0]), array("q")
        with (folder / "text.bin").open("wb") as ids_file, (folder / "counted.bin").open("wb") as counted_file:
            for batch in tokenized_conversations(source, renderer, special, damage):
                for conversation in batch:
                    roles |= conversation.roles
                    np.array(conversation.ids, dtype=dtype).tofile(ids_file)
                    conversation.counted.tofile(counted_file)
                    offsets.append(offsets[-1] + len(conversation.ids))
                    first_counted.append(conversation.first_counted)
                    written += conversation.characters / 1e6
                _log.info("tokenizing %s: %.0f million characters so far", source.name, written)
        np.save(folder / "text-offsets.npy", np.array(offsets, dtype=np.int64))
        np.save(folder / "first-counted.npy", np.array(first_counted, dtype=np.int64))
        facts = {"dtype": dtype.name, "damaged": damage.count, "classes": [], "roles": sorted(roles)}
        (folder / "facts.json").write_text(json.dumps(facts))

    return TokenFile(cached_folder("tokens", identity, make))


@dataclass(frozen=True)
class TokenizedConversation:
    """The tokens of a conversation.

    ids            the token ids
    counted        (tokens,) which of them count in the loss
    first_counted  the position, from 1 on, of the first token that counts in the loss. Position 0
                   is left out, because no earlier token predicts it. The number of tokens if there
                   is none
    roles          the roles of the messages
    characters     the length of the rendered text
    """

    ids: list[int]
    counted: Mask
    roles: frozenset[str]
    characters: int

    @property
    def first_counted(self) -> int:
        positions = np.flatnonzero(self.counted[1:])
        return int(positions[0]) + 1 if len(positions) else len(self.counted)


def tokenized_conversations(
    source: TextSource,
    renderer: Renderer,
    special: SpecialTokens,
    damage: DamagePolicy,
    characters: int = _BATCH_CHARACTERS,
) -> Iterator[list[TokenizedConversation]]:
    """Yield the tokens of a source's conversations in lists of about so many characters. A
    conversation that the chat template refuses is damaged."""
    backend = plain_backend(renderer.tokenizer)
    before = leading_tokens(backend)
    for batch in _batches(_conversations(source, damage), characters):
        pairs = list(_rendered(batch, renderer, damage))
        encodings = backend.encode_batch([one.text for _, one in pairs], add_special_tokens=False)
        found = []
        for (roles, one), encoding in zip(pairs, encodings, strict=True):
            ids, counted = _tokens(one, encoding, before, special.end)
            found.append(TokenizedConversation(ids, counted, roles, len(one.text)))
        yield found


def _conversations(source: TextSource, damage: DamagePolicy) -> Iterator[Conversation]:
    for document in source.documents(damage):
        assert isinstance(document, Conversation)
        yield document


def _rendered(
    batch: list[Conversation], renderer: Renderer, damage: DamagePolicy
) -> Iterator[tuple[frozenset[str], Rendered]]:
    """Yield (the roles of a conversation, its rendered text) for each conversation. One that the
    chat template refuses is reported to `damage` and left out."""
    for conversation in batch:
        try:
            yield frozenset(message["role"] for message in conversation.messages), renderer.render(conversation)
        except RefusedMessages as error:
            damage.report(conversation.location, str(error))


def _batches(conversations: Iterable[Conversation], characters: int) -> Iterator[list[Conversation]]:
    """Yield the conversations in lists that have about so many characters each. The tokenizer
    encodes the conversations of a list in parallel."""
    batch: list[Conversation] = []
    size = 0
    for conversation in conversations:
        batch.append(conversation)
        size += len(conversation.text)
        if size > characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokens(rendered: Rendered, encoding: Any, before: list[int], end: int) -> tuple[list[int], Mask]:
    """Return (the token ids of a rendered text, a mask of the tokens that count in the loss).

    encoding  the text's encoding without special tokens
    before    the ids of the special tokens that the tokenizer puts before a text
    end       the id of the end-of-text token

    `before` and `end` are added only to a text that no chat template wrote, because a chat template
    writes its own special tokens. `before` never counts; `end` counts if the end of the text does.
    """
    counted = overlapping(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2), rendered.counted)
    if not rendered.ends:
        return encoding.ids, counted
    ids = [*before, *encoding.ids]
    counted = np.concatenate([np.zeros(len(before), dtype=bool), counted])
    if encoding.ids[-1:] != [end]:
        last_counts = bool(rendered.counted) and rendered.counted[-1][1] == len(rendered.text)
        ids, counted = [*ids, end], np.append(counted, last_counts)
    return ids, counted


def overlapping(offsets: Integers, spans: tuple[Span, ...]) -> Mask:
    """Return a mask, (tokens,) bool, of the tokens that overlap with at least one span. This is how
    transformers computes its mask of the assistant's tokens.

    offsets  (tokens, 2): the position of each token in the text, as (begin, end) in characters
    spans    (begin, end) of each span, in characters of the text

    In both, `end` is exclusive: it is the position after the last character.

    Example: offsets [[0, 3], [3, 7], [7, 9]] and the span (4, 7) give [False, True, False].
    """
    found = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        found |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
    return found


def kept_conversations(tokens: TokenFile, length: int, name: str) -> tuple[Integers, int, int]:
    """Choose the conversations that have a token to train on among their first `length` tokens.

    Return (their indices, how many of all conversations have more than `length` tokens, how many
    conversations are not chosen).

    name: the source's name, for messages. Raises InputError if no conversation is chosen.
    """
    lengths, first = np.diff(tokens.offsets), tokens.first_counted
    kept = np.flatnonzero(first < np.minimum(lengths, length))
    if len(kept) == 0:
        labelled = first < lengths
        if not len(lengths):
            raise InputError(f"data: {name}", "contains no conversation", "name files that contain some")
        if not labelled.any():
            roles = ", ".join(tokens.facts["roles"])
            raise InputError(
                f"data: {name}",
                f"has no token that counts in the loss; the roles of its messages are {roles}",
                "name some of these roles with data.loss_on, or set data.loss_on: all",
            )
        raise InputError(
            f"data: sequence_length={length}",
            f"the first {length} tokens of each sample of {name} have none that counts in the loss",
            f"set data.sequence_length: {int(lengths[labelled].max())}, with which the longest sample is used whole",
        )
    return kept, int((lengths > length).sum()), len(lengths) - len(kept)


__all__ = [
    "TokenizedConversation",
    "conversation_tokens",
    "kept_conversations",
    "overlapping",
    "tokenized_conversations",
]
