"""Words of other tools in a job or plan are answered with tightfit's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tightfit.errors import InputError
from tightfit.importers.importing import IMPORTERS
from tightfit.job import DataSpec, Evaluation, Job, Train
from tightfit.other_words import FIELDS
from tightfit.plan import Plan, read_pins

MODEL_AND_DATA: dict[str, Any] = {"model": {"preset": "gpt2"}, "data": {"synthetic": "tokens"}}
SECTIONS: dict[str, list[str]] = {
    "train": Train.field_names(),
    "plan": Plan.field_names(),
    "data": DataSpec.field_names(),
    "evaluate": Evaluation.field_names(),
    "model": ["from", "lora"],
}


@pytest.mark.parametrize("section", ["", "train", "plan"])
@pytest.mark.parametrize(
    ("word", "own"),
    [
        ("lr", "train.learning_rate"),
        ("bf16", "plan.precision"),
        ("fp16", "plan.precision"),
        ("gradient_checkpointing", "plan.recompute"),
        ("gradient_accumulation_steps", "train.batch"),
        ("per_device_train_batch_size", "plan.micro_batch"),
        ("num_train_epochs", "train.epochs"),
        ("warmup_steps", "train.warmup"),
        ("max_steps", "train.steps"),
        ("max_grad_norm", "train.clip"),
        ("lr_scheduler_type", "train.schedule"),
        ("deepspeed", "plan.zero"),
        ("fsdp", "plan.zero"),
    ],
)
def test_another_tools_word_is_answered_with_tightfits(section: str, word: str, own: str) -> None:
    content = {**MODEL_AND_DATA, **({section: {word: 1}} if section else {word: 1})}
    with pytest.raises(InputError) as raised:
        read_pins(Job.parse(content).plan)
    assert raised.value.found == "unknown field"
    assert raised.value.asked.endswith(f": {word}")
    assert raised.value.fix.startswith(f"tightfit calls it {own}")


def test_a_field_in_the_wrong_section_gets_the_right_one() -> None:
    for content in ({"weight_decay": 0.1}, {"plan": {"weight_decay": 0.1}}):
        with pytest.raises(InputError, match=r"tightfit calls it train\.weight_decay"):
            read_pins(Job.parse({**MODEL_AND_DATA, **content}).plan)


def test_a_misspelt_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'learning_rate'"):
        Job.parse({**MODEL_AND_DATA, "train": {"learning_rat": 1}})


@pytest.mark.parametrize("word", sorted(FIELDS))
def test_every_answer_names_a_field_that_exists(word: str) -> None:
    named = re.match(r"(\w+)(?:\.|: \{)(\w+)", FIELDS[word])
    assert named is not None
    assert named[2] in SECTIONS[named[1]]
    if word in SECTIONS["train"] + SECTIONS["plan"] + SECTIONS["data"]:
        assert named[2] == word


@pytest.mark.parametrize("word", sorted(FIELDS))
def test_answers_agree_with_the_tables_of_the_importers(word: str) -> None:
    """A word that several tools have, such as `batch_size`, agrees with one of them."""
    fields = {key.field for one in IMPORTERS for key in one.keys if key.name == word and key.field}
    sections = {field.partition(".")[0] for field in fields if field}
    assert not fields or any(field in FIELDS[word] or sections == {"model"} for field in fields), (fields, FIELDS[word])
