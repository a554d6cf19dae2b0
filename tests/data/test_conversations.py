"""Rows of each format become conversations whose tokens are those of transformers' chat templates,
and only the chosen ones have labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import make_job
from tightfit.data import open_samples
from tightfit.data.conversations import CHATML
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job
from tightfit.yaml_input import parse_yaml

LLAMA = {
    "architecture": "llama",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4, déjà vu."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]
PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
# a template in Llama 2's manner, and one whose markers enclose the assistant's text
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}"
    "{% elif m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# the last message is rendered differently, and the first ones end with </s> only at the end
LAST = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}</s>"


@pytest.fixture(scope="module")
def backend() -> str:
    """A byte-level BPE with the special tokens of the templates, as JSON. It puts <s> before a
    text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([message["content"] for message in TALK] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


@pytest.fixture
def saved(tmp_path: Path, backend: str) -> Callable[..., str]:
    """A function that saves a tokenizer with a chat template. Returns its folder."""

    def save(template: str | None = None) -> str:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token="</s>", chat_template=template
        )
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def write(folder: Path, rows: list[Any], source: str = "jsonl") -> dict[str, str]:
    """Write rows as a source of this kind. Returns the data section that names it."""
    if source == "jsonl":
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"jsonl": str(folder / "d.jsonl")}
    import datasets

    table = datasets.Dataset.from_list(rows)
    if source == "parquet":
        table.to_parquet(str(folder / "d.parquet"))
        return {"parquet": str(folder / "d.parquet")}
    table.save_to_disk(str(folder / "saved"))
    return {"dataset": str(folder / "saved")}


def opened(data: dict[str, Any], **more: Any) -> Any:
    return open_samples(make_job(LLAMA, {"sequence_length": 256, "held_out": 0.0, **data, **more}))


def row(samples: Any, index: int) -> tuple[list[int], list[int]]:
    """The ids of one sample, and those that have labels."""
    batch = samples.batch(np.array([index]), np.array([0]))
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert (labels[labels != -100] == ids[labels != -100]).all()
    return ids.tolist(), labels[labels != -100].tolist()


@pytest.mark.parametrize("source", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, MARKED])
def test_messages_have_the_tokens_of_the_chat_template(source: str, template: str, tmp_path: Path, saved: Any) -> None:
    data = write(tmp_path, [{"messages": TALK}, {"messages": PLAIN}], source)
    samples = opened(data, format="messages", tokenizer=saved(template))
    for number, messages in enumerate((TALK, PLAIN)):
        ids, _ = row(samples, number)
        assert ids == samples.tokenizer.apply_chat_template(messages)["input_ids"]


def test_labels_are_those_of_the_answers(tmp_path: Path, saved: Any) -> None:
    data = write(tmp_path, [{"messages": TALK}])
    for template, answers in (
        (CHATML, "4, déjà vu.<|im_end|>\n6<|im_end|>\n"),
        (LLAMA2, " 4, déjà vu. </s> 6 </s>"),
        (MARKED, "4, déjà vu.<|im_end|>6<|im_end|>"),
    ):
        samples = opened(data, format="messages", tokenizer=saved(template))
        assert samples.tokenizer.decode(row(samples, 0)[1]) == answers


def test_labels_of_marked_templates_are_transformers_mask(tmp_path: Path, saved: Any) -> None:
    samples = opened(write(tmp_path, [{"messages": TALK}]), format="messages", tokenizer=saved(MARKED))
    wanted = samples.tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True)
    labels = samples.batch(np.array([0]), np.array([0]))["labels"][0]
    assert (labels != -100).int().tolist() == wanted["assistant_masks"]


def test_prefixes_label_what_the_markers_label(tmp_path: Path, saved: Any) -> None:
    """The same template without markers labels the same tokens."""
    data, labels = write(tmp_path, [{"messages": TALK}]), []
    for template in (MARKED, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        labels.append(row(opened(data, format="messages", tokenizer=saved(template)), 0)[1])
    assert labels[0] == labels[1]


def test_loss_on_chosen_roles_or_all(tmp_path: Path, saved: Any) -> None:
    data = write(tmp_path, [{"messages": TALK}])
    named = {"format": "messages", "tokenizer": saved(CHATML)}
    ids, labels = row(opened(data, **named, loss_on="all"), 0)
    assert labels == ids[1:]  # nothing precedes the first token
    samples = opened(data, **named, loss_on=["user"])
    said = samples.tokenizer.decode(row(samples, 0)[1])
    assert said == "".join(f"<|im_start|>user\n{TALK[at]['content']}<|im_end|>\n" for at in (1, 3))
    with pytest.raises(InputError, match=r"the roles of its messages are assistant, system, user(.|\n)*data.loss_on"):
        opened(data, **named, loss_on=["critic"])
    with pytest.warns(
        TightfitWarning, match="has the role critic of data.loss_on; the roles are assistant, system, user"
    ):
        opened(data, **named, loss_on=["user", "critic"])


def test_templates_whose_prefixes_differ_are_refused(tmp_path: Path, saved: Any) -> None:
    data = write(tmp_path, [{"messages": TALK}])
    with pytest.raises(
        InputError, match=r"d\.jsonl:1 differently if others follow(.|\n)*generation %(.|\n)*loss_on: all"
    ):
        opened(data, format="messages", tokenizer=saved(LAST))
    samples = opened(data, format="messages", tokenizer=saved(LAST), loss_on="all")
    assert row(samples, 0)[0] == samples.tokenizer.apply_chat_template(TALK)["input_ids"]


def test_templates_from_a_file_chatml_and_none(tmp_path: Path, saved: Any) -> None:
    data, place = write(tmp_path, [{"messages": TALK}]), saved()
    with pytest.raises(InputError, match=r"the tokenizer has none(.|\n)*data.chat_template: chatml"):
        opened(data, format="messages", tokenizer=place)
    (tmp_path / "t.jinja").write_text(LLAMA2)
    for given, template in (("chatml", CHATML), (str(tmp_path / "t.jinja"), LLAMA2)):
        samples = opened(data, format="messages", tokenizer=place, chat_template=given)
        wanted = samples.tokenizer.apply_chat_template(TALK, chat_template=template)["input_ids"]
        assert row(samples, 0)[0] == wanted
    with pytest.raises(InputError, match=r"chat_template=.*no\.jinja: cannot be read"):
        opened(data, format="messages", tokenizer=place, chat_template=str(tmp_path / "no.jinja"))
    (tmp_path / "t.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match=r"line 1 is not valid Jinja"):
        opened(data, format="messages", tokenizer=place, chat_template=str(tmp_path / "t.jinja"))


def test_a_template_that_refuses_messages_is_damage(tmp_path: Path, saved: Any) -> None:
    place = saved("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML)
    data = write(tmp_path, [{"messages": PLAIN}, {"messages": TALK}])
    with pytest.raises(InputError, match=r"d\.jsonl:2: (.*)fails(.*)no system(.|\n)*skip_damaged"):
        opened(data, format="messages", tokenizer=place)
    assert opened(data, format="messages", tokenizer=place, skip_damaged=True).damaged == 1


def test_chatml_trains_a_tokenizer_with_its_tokens(tmp_path: Path) -> None:
    samples = opened(write(tmp_path, [{"messages": TALK}] * 3), format="messages", chat_template="chatml")
    ids, labels = row(samples, 0)
    assert samples.tokenizer.decode(labels) == "4, déjà vu.<|im_end|>\n6<|im_end|>\n"
    assert ids[0] == samples.tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize("source", ["jsonl", "parquet", "dataset"])
def test_prompts_and_responses_are_joined(source: str, tmp_path: Path, saved: Any) -> None:
    data = write(tmp_path, [{"q": "2 + 2 =", "a": " 4", "n": 1}], source)
    named = {"format": "prompt-response", "fields": {"prompt": "q", "response": "a"}, "tokenizer": saved()}
    samples = opened(data, **named)
    ids, labels = row(samples, 0)
    assert samples.tokenizer.decode(ids) == "<s>2 + 2 = 4</s>"
    assert samples.tokenizer.decode(labels) == " 4</s>"
    assert ids[:-1] == samples.tokenizer("2 + 2 = 4")["input_ids"]
    assert row(opened(data, **named, loss_on="all"), 0)[1] == ids[1:]
    assert samples.tokenizer.decode(row(opened(data, **named, loss_on=["user"]), 0)[1]) == "2 + 2 ="
    samples = opened(data, **named, chat_template="chatml")
    talk = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": " 4"}]
    assert row(samples, 0)[0] == samples.tokenizer.apply_chat_template(talk, chat_template=CHATML)["input_ids"]


def test_alpaca_has_the_prompts_of_its_authors(tmp_path: Path, saved: Any) -> None:
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Go.", "output": "ok"}]
    samples = opened(write(tmp_path, rows), format="alpaca", tokenizer=saved())
    first, second = (samples.tokenizer.decode(row(samples, at)[0]) for at in (0, 1))
    assert first.startswith(
        "<s>Below is an instruction that describes a task, paired with an input that provides further"
    )
    assert first.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:3</s>")
    assert second.endswith("completes the request.\n\n### Instruction:\nGo.\n\n### Response:ok</s>")
    assert [samples.tokenizer.decode(row(samples, at)[1]) for at in (0, 1)] == ["3</s>", "ok</s>"]


def test_sharegpt_is_messages_under_other_names(tmp_path: Path, saved: Any) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    talk = [{"from": names[message["role"]], "value": message["content"]} for message in TALK]
    samples = opened(write(tmp_path, [{"conversations": talk}]), format="sharegpt", tokenizer=saved(CHATML))
    ids, labels = row(samples, 0)
    assert ids == samples.tokenizer.apply_chat_template(TALK)["input_ids"]
    assert samples.tokenizer.decode(labels) == "4, déjà vu.<|im_end|>\n6<|im_end|>\n"
    data = write(tmp_path, [{"conversations": [{"from": "bird", "value": "tweet"}]}])
    with pytest.raises(InputError, match=r"message from 'bird', which is none of human, user, gpt"):
        opened(data, format="sharegpt", tokenizer=saved(CHATML))


def test_long_samples_are_truncated_and_counted(tmp_path: Path, saved: Any) -> None:
    rows = [
        {"prompt": "x", "response": "y"},
        {"prompt": "x", "response": "y" * 40},
        {"prompt": "x" * 40, "response": "y"},
    ]
    data, named = write(tmp_path, rows), {"format": "prompt-response", "tokenizer": saved()}
    with pytest.warns(TightfitWarning, match=r"2 of 3 samples are longer .*sequence_length=16.*; 1 of 3 .* left out"):
        samples = opened(data, **named, sequence_length=16)
    assert len(samples) == 2
    assert [len(row(samples, at)[0]) for at in (0, 1)] == [4, 16]
    assert len(row(samples, 1)[1]) == 14
    with pytest.raises(InputError, match=r"first 16 tokens(.|\n)*data.sequence_length: 43"):
        opened(write(tmp_path, rows[2:]), **named, sequence_length=16)


WRONG = [
    ("messages", {"messages": []}, "empty list"),
    ("messages", {"messages": "hello"}, "holds str, not messages"),
    ("messages", {"messages": ["hello"]}, "message 1 of 'messages' is str"),
    ("messages", {"messages": [{"from": "human", "value": "x"}]}, "has no 'role'; it has 'from', 'value'"),
    ("messages", {"messages": [{"role": "user", "text": "x"}]}, "has no 'content'; it has 'role', 'text'"),
    ("messages", {"messages": [{"role": "user", "content": ["x"]}]}, "holds list, not text"),
    ("prompt-response", {"prompt": "x", "response": None}, "holds NoneType, not text"),
    ("prompt-response", {"prompt": "\ud800", "response": "x"}, "surrogate"),
]


@pytest.mark.parametrize(("kind", "wrong", "said"), WRONG)
def test_damaged_rows_are_located(kind: str, wrong: Any, said: str, tmp_path: Path, saved: Any) -> None:
    good = {"messages": PLAIN} if kind == "messages" else {"prompt": "a", "response": "b"}
    data, named = write(tmp_path, [good, wrong]), {"format": kind, "tokenizer": saved(CHATML)}
    with pytest.raises(InputError, match=r"d\.jsonl:2(.|\n)*skip_damaged") as raised:
        opened(data, **named)
    assert said in str(raised.value)
    samples = opened(data, **named, skip_damaged=True)
    assert (len(samples), samples.damaged) == (1, 1)


@pytest.mark.parametrize("source", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", [None, "prompt-response"])
def test_a_field_that_no_sample_has_is_named(
    source: str, skip: bool, kind: str | None, tmp_path: Path, saved: Any
) -> None:
    data = write(tmp_path, [{"question": "x", "answer": "y"}] * 3, source) | {
        "tokenizer": saved(),
        "skip_damaged": skip,
    }
    with pytest.raises(InputError, match=r"question.*answer") as raised:
        opened(data, **({"format": kind} if kind else {}))
    assert f"with {'data.fields.prompt' if kind else 'data.field'}" in raised.value.fix
    assert "skip_damaged" not in str(raised.value)


@pytest.mark.slow
def test_a_long_conversation_is_read_from_its_mapped_line(tmp_path: Path, saved: Any) -> None:
    talk = [{"role": "user", "content": "x" * (5 << 20)}, PLAIN[1]]
    data = write(tmp_path, [{"messages": PLAIN}, {"messages": talk}])
    with pytest.warns(TightfitWarning, match="1 of 2 samples are longer"):
        samples = opened(data, format="messages", tokenizer=saved(CHATML))
    assert len(samples) == 1


JOBS = [
    ({"jsonl": "d", "loss_on": "all"}, "data.loss_on: is given without data.format"),
    ({"text": "d", "format": "alpaca"}, "needs rows with fields"),
    ({"jsonl": "d", "format": "alpaca", "packing": "packed"}, "use data.packing: separate"),
    ({"jsonl": "d", "format": "alpaca", "fields": {"outptu": "x"}}, "did you mean 'output'"),
    ({"jsonl": "d", "format": "alpacka"}, "alpaca"),
    ({"jsonl": "d", "format": "alpaca", "loss_on": "responses"}, "loss_on"),
    ({"synthetic": "tokens", "packing": "separate"}, "packs texts"),
]


@pytest.mark.parametrize(("data", "said"), JOBS)
def test_inconsistent_jobs_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        make_job(LLAMA, data)
    assert said in str(raised.value)


def test_formats_pad_and_survive_a_job_file(tmp_path: Path) -> None:
    data = {"jsonl": "d.jsonl", "format": "messages", "chat_template": "t.jinja", "loss_on": ["assistant", "tool"]}
    (tmp_path / "job.yaml").write_text(json.dumps({"model": LLAMA, "data": data}))
    job = Job.load(tmp_path / "job.yaml")
    assert job.data.packing == "padded"
    assert job.data.chat_template == str(tmp_path / "t.jinja")
    assert Job.parse(job.content()) == job


def test_formats_need_a_causal_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is for causal-lm, and the model is a masked-lm"):
        open_samples(make_job("masked-lm", write(tmp_path, [{"messages": PLAIN}]) | {"format": "messages"}))


def test_the_job_of_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conversations.md").read_text()
    job = Job.parse(parse_yaml(page.split("```yaml\n")[1].split("```")[0]))
    assert job.data.format == "messages"
    for setting in ("prompt-response", "messages", "alpaca", "sharegpt"):
        assert f"| `{setting}` |" in page
