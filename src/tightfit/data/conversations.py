"""Reads conversations for fine-tuning from rows of the formats prompt-response, messages, Alpaca
and ShareGPT, and renders each conversation as one text.

The rendered text comes with the spans of its characters that count in the loss, such as the
assistant's answers. `data/conversation_tokens.py` tokenizes the rendered texts.

Source  Alpaca: Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca; ShareGPT: Chiang et al.
        2023 (Vicuna); chat templates: transformers' apply_chat_template; ChatML: OpenAI 2023.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tightfit.data.samples import DamagePolicy
from tightfit.data.text import Document, is_unicode, row_damage
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.job_sections.data import FORMAT_FIELDS
from tightfit.job_sections.paths import expand_path

Message = dict[str, Any]  # {"role": ..., "content": ...}, and other keys that the chat template may read
Span = tuple[int, int]  # the characters of a text from begin to end, without end

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}  # ShareGPT's names of the roles
_TASK = "Below is an instruction that describes a task"
_INSTRUCTION = _TASK + (
    ". Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_INSTRUCTION_AND_INPUT = _TASK + (
    ", paired with an input that provides further context. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers recognises it


@dataclass(frozen=True)
class Conversation(Document):
    """A Document that is a conversation. Its `text` joins the contents of all messages: a tokenizer
    can be trained on it, but the model is trained on the text that a `Renderer` makes.

    messages  the messages, which a chat template reads: dicts with "role" and "content"
    prompt    the text that precedes the response if no chat template is used; None if the
              conversation can only be rendered by a chat template
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None


@dataclass(frozen=True)
class ConversationFormat:
    """A RowFormat for rows with one conversation each.

    kind    the format: a value of `data.format`, such as "messages"
    fields  pairs (the format's name of a field, the name of this field in the rows), for the fields
            whose names differ, such as ("prompt", "question")
    """

    kind: str
    fields: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> list[Any]:
        return [self.kind, self.fields]

    @property
    def names(self) -> dict[str, str]:
        return {self._name(part): f"data.fields.{part}" for part in self._parts() if not self._is_optional(part)}

    @property
    def optional(self) -> tuple[str, ...]:
        return tuple(self._name(part) for part in self._parts() if self._is_optional(part))

    @property
    def long_text(self) -> None:
        return None

    def documents(self, location: str, row: Any, damage: DamagePolicy) -> Iterator[Document]:
        """Yield the conversation of one row. Yield nothing if the row is damaged, which is reported
        to `damage`.

        location: the row's file and number, for messages
        """
        found = row_damage(row, self)
        if found is None:
            values = {part: row.get(self._name(part)) for part in self._parts()}
            try:
                yield self._conversation(location, values)
                return
            except _Damage as error:
                found = str(error)
        damage.report(location, found)

    def _conversation(self, location: str, values: dict[str, Any]) -> Conversation:
        if self.kind == "messages":
            return _of_messages(location, self._messages(values["messages"], "messages", "role", "content"))
        if self.kind == "sharegpt":
            messages = self._messages(values["conversations"], "conversations", "from", "value")
            return _of_messages(location, [{**message, "role": _known_role(message["role"])} for message in messages])
        texts = {part: self._text(part, value) for part, value in values.items()}
        if self.kind == "prompt-response":
            return _of_pair(location, texts["prompt"], texts["prompt"], texts["response"])
        instruction, context = texts["instruction"], texts["input"]
        prompt = (_INSTRUCTION_AND_INPUT if context else _INSTRUCTION).format(instruction=instruction, input=context)
        return _of_pair(location, prompt, f"{instruction}\n{context}" if context else instruction, texts["output"])

    def _text(self, part: str, value: Any) -> str:
        if value is None and self._is_optional(part):
            return ""
        if not isinstance(value, str):
            raise _Damage(f"field {self._name(part)!r} holds {type(value).__name__}, not text")
        if not is_unicode(value):
            raise _Damage(f"field {self._name(part)!r} holds half a surrogate pair, which is no character")
        return value

    def _messages(self, value: Any, part: str, role: str, content: str) -> list[Message]:
        """Return the messages in a field of a row, as dicts with the keys "role" and "content".

        value          what the row's field holds
        part           the format's name of the field
        role, content  the names of these two keys in the row's messages, such as "from" and "value"

        Raises _Damage if the field holds no messages.
        """
        name = self._name(part)
        if not isinstance(value, list) or not value:
            raise _Damage(
                f"field {name!r} holds {'an empty list' if value == [] else type(value).__name__}, not messages"
            )
        return [_message(f"message {number} of {name!r}", one, role, content) for number, one in enumerate(value, 1)]

    def _parts(self) -> tuple[str, ...]:
        return FORMAT_FIELDS[self.kind]  # type: ignore[index]

    def _name(self, part: str) -> str:
        return dict(self.fields).get(part, part)

    def _is_optional(self, part: str) -> bool:
        return self.kind == "alpaca" and part == "input"


class RefusedMessages(Exception):
    """Raised if a chat template fails for the messages of a conversation, for example because the
    roles do not alternate. The error's text says why."""


class _Damage(Exception):
    """Raised if a row is damaged. The error's text says what is wrong with the row."""


def _message(location: str, message: Any, role: str, content: str) -> Message:
    if not isinstance(message, dict):
        raise _Damage(f"{location} is {type(message).__name__}, not a mapping with {role!r} and {content!r}")
    known = {name: value for name, value in message.items() if value is not None}  # tables fill keys with null
    if not isinstance(known.get(role), str):
        raise _Damage(f"{location} has no {role!r}; it has {', '.join(map(repr, known)) or 'none'}")
    text = known.get(content, "" if "tool_calls" in known else None)
    if not isinstance(text, str):
        wrong = f"holds {type(text).__name__}, not text, as {content!r}" if text is not None else f"has no {content!r}"
        raise _Damage(f"{location} {wrong}; it has {', '.join(map(repr, known))}")
    if not is_unicode(text):
        raise _Damage(f"{location} holds half a surrogate pair, which is no character")
    others = {name: value for name, value in known.items() if name not in (role, content)}
    return {"role": known[role], "content": text, **others}


def _known_role(name: str) -> str:
    if name not in _ROLES:
        raise _Damage(f"has a message from {name!r}, which is none of {', '.join(_ROLES)}")
    return _ROLES[name]


def _of_messages(location: str, messages: list[Message]) -> Conversation:
    return Conversation(location, "\n".join(message["content"] for message in messages), messages=tuple(messages))


def _of_pair(location: str, prompt: str, request: str, response: str) -> Conversation:
    messages = ({"role": "user", "content": request}, {"role": ASSISTANT, "content": response})
    return Conversation(location, prompt + response, messages=messages, prompt=prompt)


def conversation_format(spec: DataSpec) -> ConversationFormat:
    """Return the RowFormat for data whose setting `format` is set, such as format: alpaca."""
    assert spec.format is not None
    return ConversationFormat(spec.format, tuple(sorted((spec.fields or {}).items())))


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered as one text.

    text     the whole text
    counted  the spans of characters that count in the loss, as (begin, end), in order; `end` is
             exclusive
    ends     whether an end-of-text token must be added after the text. False for the text of a chat
             template, which writes its own end
    """

    text: str
    counted: tuple[Span, ...]
    ends: bool


@dataclass(frozen=True)
class Renderer:
    """Renders conversations as text, and finds the characters that count in the loss.

    tokenizer  the transformers tokenizer, which runs the chat template
    template   the text of the chat template, in Jinja; None joins prompt and response as they are
    roles      the roles whose messages count in the loss, such as ("assistant",); None if all text
               counts
    asked      the setting that gives the template, for error messages
    """

    tokenizer: Any
    template: str | None
    roles: tuple[str, ...] | None
    asked: str

    @property
    def identity(self) -> Any:
        """JSON-like content that changes when the same conversations would be rendered differently:
        a part of the key of the cache."""
        names = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        return [self.template, self.roles, names if self.template else None]

    def render(self, conversation: Conversation) -> Rendered:
        """Return a conversation rendered as text.

        Raises RefusedMessages if the template fails for this conversation. Raises InputError if the
        template is not valid Jinja. Also raises InputError if the template renders the first
        messages of a conversation differently when others follow, because the characters that count
        in the loss cannot be found then.
        """
        if self.template is None:
            assert conversation.prompt is not None
            return self._joined(conversation.prompt, conversation.messages[-1]["content"])
        messages = list(conversation.messages)
        whole = self._apply(messages, False)
        if self.roles is None:
            return Rendered(whole, ((0, len(whole)),), ends=False)
        if self.roles == (ASSISTANT,) and _GENERATION.search(self.template):
            return Rendered(whole, self._marked(messages, whole), ends=False)
        chosen = [number for number, message in enumerate(messages) if message["role"] in self.roles]
        return Rendered(whole, tuple(self._span(messages, at, whole, conversation.location) for at in chosen), False)

    def _joined(self, prompt: str, response: str) -> Rendered:
        spans = {"user": (0, len(prompt)), ASSISTANT: (len(prompt), len(prompt) + len(response))}
        counted = tuple(span for role, span in spans.items() if self.roles is None or role in self.roles)
        return Rendered(prompt + response, counted, ends=True)

    def _marked(self, messages: list[Message], whole: str) -> tuple[Span, ...]:
        """Return the spans of the rendered text that the template marks as written by the
        assistant: those between {% generation %} and {% endgeneration %}.

        whole: the rendered text
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (spans,) = rendered
        assert text == whole
        return tuple((begin, end) for begin, end in spans)

    def _span(self, messages: list[Message], at: int, whole: str, location: str) -> Span:
        """Return the span of message number `at` (from 0) in the rendered text.

        The span is found by rendering two parts of the conversation: the messages before message
        `at`, and the messages up to and including it. The first text ends where the span begins,
        and the second text ends where the span ends. For an assistant's message, the first text
        includes the generation prompt, so the header of the message (such as
        "<|im_start|>assistant") is not in the span. The span of message 0 begins at the beginning
        of the text.

        whole     the rendered text of the whole conversation
        location  the file and row of the conversation, for the message

        Raises InputError if the first text is not the beginning of the second, or the second not
        that of `whole`.
        """
        prompts = messages[at]["role"] == ASSISTANT
        try:
            before = self._apply(messages[:at], prompts) if at else ""
            until = self._apply(messages[: at + 1], False)
        except RefusedMessages as error:
            before, until, wrong = "", "", f"{error}, but renders the whole conversation"
        else:
            wrong = (
                f"renders the first {at + 1} messages of {location} differently if others follow, or does not begin an "
                "answer with its generation prompt"
            )
        if not until or not (until.startswith(before) and whole.startswith(until)):
            raise InputError(
                self.asked,
                f"{wrong}, so the tokens of message {at + 1} ({messages[at]['role']}) cannot be found",
                "put {% generation %} and {% endgeneration %} around the assistant's text in a copy of the template and name that "
                "file with data.chat_template, or set data.loss_on: all",
            )
        return len(before), len(until)

    def _apply(self, messages: list[Message], generation_prompt: bool) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TemplateSyntaxError as error:
            raise InputError(
                self.asked, f"line {error.lineno} is not valid Jinja ({error.message})", "correct the template"
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RefusedMessages(f"{self.asked} fails for messages of the roles {roles} ({error})") from None


def renderer(spec: DataSpec, tokenizer: Any) -> Renderer:
    """Return the Renderer for data whose setting `format` is set, such as format: alpaca.

    Raises InputError if the file that `data.chat_template` names cannot be read, or if the format
    needs a chat template and neither the data nor the tokenizer has one.
    """
    roles = (ASSISTANT,) if spec.loss_on in (None, "response") else None if spec.loss_on == "all" else spec.loss_on
    template = _template(spec, tokenizer)
    asked = f"data: chat_template={spec.chat_template}" if spec.chat_template else "the tokenizer's chat template"
    return Renderer(tokenizer, template, None if roles is None else tuple(roles), asked)


def _template(spec: DataSpec, tokenizer: Any) -> str | None:
    if spec.chat_template == "chatml":
        return CHATML
    if spec.chat_template not in (None, "tokenizer"):
        path = expand_path(str(spec.chat_template))
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(
                f"data: chat_template={spec.chat_template}",
                f"cannot be read ({said})",
                "name a file with a Jinja template, or use chatml or tokenizer",
            ) from None
    if spec.chat_template is None and spec.format in ("prompt-response", "alpaca"):
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise InputError(
            f"data: format={spec.format}",
            "needs a chat template, and the tokenizer has none",
            "add data.chat_template: chatml, or the file of a Jinja template",
        ) from None


__all__ = [
    "CHATML",
    "Conversation",
    "ConversationFormat",
    "RefusedMessages",
    "Rendered",
    "Renderer",
    "conversation_format",
    "renderer",
]
