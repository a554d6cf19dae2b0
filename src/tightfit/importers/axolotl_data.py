"""Sets the fields of `data` from the data sets of an axolotl file, whose `type` says what their rows
hold."""

from __future__ import annotations

from typing import Any

from tightfit.importers import data_sources as data
from tightfit.importers.data_sources import Source
from tightfit.importers.mapping import Draft

_PLAIN = ("completion", "pretrain")
_PLACE = ("path", "type", "ds_type", "data_files", "name", "split")  # keys of a data set of any type
_OFF = {"trust_remote_code": False, "shards": None, "split_thinking": False, "drop_system_message": False}
_ROLES = {"human": "user", "gpt": "assistant"}


def combine_data(draft: Draft) -> None:
    """Set the source, the format, the template, the loss and the packing of the data from the part
    datasets, a list of the file's data sets, and the keys that hold for all of them."""
    if "datasets" not in draft.parts:
        _template(draft, [])
        _packing(draft, False)
        return
    found = draft.parts.get("datasets") or []
    sets = [one for one in found if one.get("path")]
    sources = [_source(draft, one) for one in sets]
    is_pretraining = bool(draft.value("pretraining_dataset"))
    if sources:
        data.set_sources(draft, "datasets", sources)
    else:
        draft.settle("datasets", "no counterpart", "it names no data set")
    _loss(draft, sets, sources)
    _template(draft, [one for one in sets if _format_of(one) in ("messages", "sharegpt")])
    if "data.chat_template" in draft.fields and any(_format_of(one) in ("alpaca", "prompt-response") for one in sets):
        draft.to_do.append(
            "decide whether data.chat_template may hold for all sources with a format, as it does in tightfit: axolotl writes those "
            "of type alpaca without it"
        )
    _packing(draft, is_pretraining)


def _format_of(dataset: dict[str, Any]) -> str | None:
    """Return tightfit's format for the type of a data set, such as messages for chat_template;
    None if it has none."""
    kind = dataset.get("type")
    if isinstance(kind, dict):
        return "prompt-response" if _is_plain_prompt(kind) else None
    if kind == "chat_template":
        names = _message_keys(dataset)
        return {("role", "content"): "messages", ("from", "value"): "sharegpt"}.get(names)
    return {"alpaca": "alpaca", "sharegpt": "sharegpt"}.get(str(kind))


def _message_keys(dataset: dict[str, Any]) -> tuple[str, str]:
    """Return the keys of a message's role and text in the rows of a data set of chats."""
    names = dataset.get("message_property_mappings")
    names = names if isinstance(names, dict) else {}
    role, content = (names.get(name) or dataset.get(f"message_field_{name}") or name for name in ("role", "content"))
    return str(role), str(content)


def _is_plain_prompt(kind: dict[str, Any]) -> bool:
    """Return whether a user-defined type writes the instruction and the output as they are."""
    plain = kind.get("format") == "{instruction}" and kind.get("no_input_format", "{instruction}") == "{instruction}"
    return plain and not kind.get("system_prompt") and not kind.get("field_system")


def _source(draft: Draft, dataset: dict[str, Any]) -> Source:
    """Return tightfit's source for one of the data sets, with the format of its rows."""
    source = data.source_of(str(dataset["path"]), dataset.get("data_files"), dataset.get("ds_type"))
    lost = data.add_part(source, dataset.get("name"), dataset.get("split"))
    kind, used = dataset.get("type"), set(_PLACE)
    row_format = _format_of(dataset)
    if str(kind) in _PLAIN:
        used |= {"field", "text_column"}
        field = dataset.get("text_column") or dataset.get("field")
        source |= {"field": field} if field else {}
    elif row_format in ("messages", "sharegpt"):
        used |= {"field_messages", "message_property_mappings", "message_field_role", "message_field_content"}
        used |= {"chat_template", "chat_template_jinja", "roles_to_train", "roles"}
        used |= {"train_on_eos"} if dataset.get("train_on_eos") == "turn" else set()
        used |= {"conversation"} if kind == "sharegpt" else set()
        field = dataset.get("field_messages") or ("messages" if kind == "chat_template" else None)
        source = data.with_format(source, row_format, {"messages": field, "conversations": field})
    elif row_format == "alpaca":
        draft.remark("datasets", data.ALPACA_PROMPT)
        source = data.with_format(source, "alpaca", {})
    elif row_format == "prompt-response":
        assert isinstance(kind, dict)
        names = {"prompt": kind.get("field_instruction", "instruction"), "response": kind.get("field_output", "output")}
        source = data.with_format(source, row_format, names)
    else:
        shown = "chat_template with other keys of messages" if kind == "chat_template" else f"type {kind}"
        draft.remark("datasets", f"{shown} has no counterpart among tightfit's formats")
        draft.to_do.append(
            f"{dataset['path']}: write what {shown} makes of a row as prompt and response, and name them in data.fields "
            "with data.format: prompt-response"
        )
    lost += sorted(name for name in set(dataset) - used if dataset[name] not in (None, _OFF.get(name)))
    if lost:
        draft.remark("datasets", f"no counterpart: {', '.join(lost)}")
    return source


def _loss(draft: Draft, sets: list[dict[str, Any]], sources: list[Source]) -> None:
    """Set data.loss_on from train_on_inputs and the roles_to_train of the data sets."""
    chats = [one for one in sets if _format_of(one) in ("messages", "sharegpt")]
    roles = {tuple(_known_roles(chat, chat.get("roles_to_train", ["assistant"]))) for chat in chats}
    value: str | list[str] = "response"
    if draft.parts.get("train_on_inputs"):
        value = "all"
    elif len(roles) == 1 and roles != {("assistant",)}:
        value = list(roles.pop())
        if not value:
            draft.remark(
                "datasets", f"roles_to_train is empty: axolotl trains on the last answer alone; {data.LAST_TURN}"
            )
            value = "response"
        else:
            draft.remark("datasets", "the header of a message counts in the loss, too, unless it is the assistant's")
    elif len(roles) > 1:
        draft.contradict("the data sets have different roles_to_train, but data.loss_on holds for all sources")
        draft.drop("data.loss_on")
    if isinstance(value, list):
        draft.fields["data.loss_on"] = value
        draft.remark("datasets", f"data.loss_on: {value}")
    else:
        data.set_loss(draft, "train_on_inputs", sources, value, "train_on_inputs", False)


def _known_roles(dataset: dict[str, Any], roles: Any) -> list[str]:
    """Return tightfit's names of the roles that are trained on in a data set, such as assistant for
    gpt. The data set's own names come first."""
    own = dataset.get("roles")
    own = own if isinstance(own, dict) else {}
    names = {str(source): role for role, sources in own.items() if isinstance(sources, list) for source in sources}
    given = roles if isinstance(roles, list) else [roles] if roles else []
    return [str((names or _ROLES).get(str(role), role)) for role in given]


def _template(draft: Draft, chats: list[dict[str, Any]]) -> None:
    """Set data.chat_template, if the data has conversations.

    chats: the data sets of conversations
    """
    if not chats:
        for part in ("template", "template_text"):
            draft.settle(part, "not needed", "only data sets of type chat_template use it")
        return
    written = draft.parts.get("template_text")
    shared = "jinja" if written else draft.parts.get("template")
    named = {(_template_of(chat, shared), _text_of(chat, written)) for chat in chats}
    if len(named) > 1:
        draft.contradict("the data sets have different chat templates, but data.chat_template holds for all sources")
        draft.drop("data.chat_template")
        return
    name, own = named.pop()
    part = "template_text" if written else "template" if "template" in draft.parts else "datasets"
    if name == "jinja" or (name is None and own):
        if own:
            data.set_template(draft, part, own)
            draft.settle("template", "not needed", "jinja: chat_template_jinja has the template")
    elif name == "chatml":
        data.set_template(draft, part, "chatml")
    elif name is None and any(chat.get("type") == "sharegpt" for chat in chats):
        draft.to_do.append(f"sharegpt without a template is written in a form of FastChat's: {data.OTHER_TEMPLATE}")
    elif name in (None, "tokenizer_default") or str(name).startswith("tokenizer_default_fallback_"):
        if "template" in draft.parts:
            data.set_template(draft, "template", "tokenizer")
    else:
        note = f"{name} is a text of axolotl's; without data.chat_template, the tokenizer's own template is used"
        draft.settle("template", "no counterpart", note)
        draft.to_do.append(f"chat_template is {name}: {data.OTHER_TEMPLATE}, unless the tokenizer has it")


def _template_of(dataset: dict[str, Any], shared: Any) -> str | None:
    found = dataset.get("chat_template") or dataset.get("conversation") or shared
    return str(found) if found else None


def _text_of(dataset: dict[str, Any], shared: Any) -> str | None:
    found = dataset.get("chat_template_jinja") or shared
    return str(found) if found else None


def _packing(draft: Draft, is_pretraining: bool) -> None:
    """Set data.packing. Two of the keys count only for a pretraining_dataset."""
    parts = draft.parts
    decides, value = "packing", "separate" if parts.get("packing") else "padded"
    if is_pretraining and parts.get("packing") and parts.get("packing_apart") is False:
        decides, value = "packing_apart", "packed"
    elif is_pretraining and parts.get("concatenation") and not parts.get("packing"):
        decides, value = "concatenation", "packed"
        draft.settle("packing", "not needed", "it is off, and pretraining_sample_concatenation is on")
    for part in {"packing_apart", "concatenation"} - {decides}:
        draft.settle(part, "not needed", "sample_packing decides it")
    if decides in parts:
        draft.fields["data.packing"] = value
    else:
        draft.assume("sample_packing", False, "data.packing", value)
