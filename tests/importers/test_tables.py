"""The tables of keys: whole, in words, and safe with any value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tightfit.errors import InputError
from tightfit.importers import training_arguments
from tightfit.importers.adapters import PEFT_TARGETS
from tightfit.importers.importing import IMPORTERS, Imported, import_content
from tightfit.importers.mapping import Importer
from tightfit.job import DataSpec, Limits, LoraSpec, ModelSpec, Train
from tightfit.plan import Plan

FIELDS = {
    f"{section}.{name}"
    for section, kind in {"model": ModelSpec, "data": DataSpec, "train": Train, "limits": Limits, "plan": Plan}.items()
    for name in kind.field_names()
} | {f"model.lora.{name}" for name in LoraSpec.field_names()}
ODD: list[Any] = [True, False, 0, -1, 3, 0.5, 1e300, "", "auto", "none", "x", "1e-4", [], [1, "x"], ["x"], {"a": 1}]
by_tool = pytest.mark.parametrize("importer", IMPORTERS, ids=lambda one: one.name)


@by_tool
def test_every_key_has_a_field_that_exists_or_a_reason(importer: Importer) -> None:
    for key in importer.keys:
        assert not key.field or key.field in FIELDS, key
        assert key.field or key.convert or key.reason, key
        assert key.reason or (key.convert and key.convert.__doc__), f"{key.name} has no words for a reader"
        assert not key.part or key.field, key


@by_tool
def test_defaults_are_keys_of_the_table(importer: Importer) -> None:
    assert all(any(key.name == name for key in importer.keys) for name in importer.defaults)


@pytest.mark.sweep(12)
@by_tool
@pytest.mark.parametrize("third", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_no_value_ends_in_a_traceback(importer: Importer, third: int) -> None:
    """The quick suite tries a third of the values with each key, other values with the next key."""
    for number, key in enumerate(importer.keys):
        name = key.name.replace("*", "x")
        for value in ODD[(number + third) % 3 :: 3]:
            content: dict[str, Any] = {}
            *sections, last = name.split(".")
            inner = content
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
            imported = _attempt(importer, content)
            if imported is not None:
                assert any(row.key == name or row.key.startswith(f"{name}.") for row in imported.rows), (name, value)


def _attempt(importer: Importer, content: dict[str, Any]) -> Imported | None:
    """What is imported; None if the value is refused."""
    try:
        return import_content(importer, content, "file")
    except InputError:
        return None


def test_every_field_of_transformers_is_in_the_table() -> None:
    from transformers import Seq2SeqTrainingArguments

    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert [name for name in names if training_arguments.IMPORTER.find(name) is None] == []


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    own = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name, value in training_arguments.DEFAULTS.items():
        found = str(own[name]).removesuffix("_fused")  # v5 chooses the fused kernel
        assert found in (str(value), f"SchedulerType.{str(value).upper()}"), name


def test_every_optimizer_and_schedule_has_an_answer() -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    for field, words in (("optim", OptimizerNames), ("lr_scheduler_type", SchedulerType)):
        for word in words:
            rows = import_content(training_arguments.IMPORTER, {field: word.value}, "file").rows
            row = next(row for row in rows if row.key == field)
            assert row.outcome in ("mapped", "no counterpart"), row


def test_default_targets_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: list(names) for kind, names in PEFT_TARGETS.items()} == {kind: known[kind] for kind in PEFT_TARGETS}
