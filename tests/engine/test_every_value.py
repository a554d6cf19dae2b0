"""Every value of every field of a plan, through `tightfit train`, trains like the reference plan or
is refused with a remedy.

The values are derived from Plan itself, so a new field or value is trained here too. Most fields do
nothing alone or are refused alone: WITH gives the other fields with which they take effect.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

import tightfit
from tests import tiny
from tests.pool import together
from tests.sweeps import spread
from tightfit.cli import app
from tightfit.errors import InputError, TightfitError
from tightfit.job import Permission
from tightfit.plan import Plan
from tightfit.rules import needed_permissions

PIPE = {"pp": 2, "micro_batch": 2}
WITH: dict[str, dict[str, Any]] = {
    "rounding": {"precision": "bf16-true"},
    "master_weights": {"precision": "bf16-true"},
    "float8": {"precision": "bf16-mixed"},
    "loss_scale": {"precision": "fp16-mixed"},
    "dp_shard": {"zero": 1},
    "zero": {"dp_shard": 2},
    "gradient_sync": {"zero": 3, "dp_shard": 2, "micro_batch": 1},
    "sequence_parallel": {"tp": 2},
    "schedule": PIPE,
    "virtual_stages": {**PIPE, "schedule": "interleaved"},
    "split": PIPE,
    "vertical_sync": {**PIPE, "schedule": "pipedream"},
    "parameter_server": {"dp_replicate": 2},
    "staleness": {"dp_replicate": 2, "parameter_server": "async"},
    "compressed_gradients": {"dp_replicate": 2},
    "powersgd_rank": {"dp_replicate": 2, "compressed_gradients": "powersgd"},
    "offload_to": {"offload": ["states"]},
    "offload_folder": {"offload": ["states"], "offload_to": "disk"},
    "prefetch": {"loader_workers": 1},
    "micro_batch": {"recompute": "full"},
}
SEVERAL: list[dict[str, Any]] = [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}]  # a plan of one process on two
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"clip": 0.1, "evaluate_every": 2, "evaluate_samples": 3, "checkpoint_every": 2},
}
STEPS, BEFORE = 5, 3  # how many, and how many before it is resumed


def values_of(name: str) -> list[Any]:
    """Values of a field, from its type and its bounds."""
    field = Plan.model_fields[name]
    if name == "recompute":  # words with numbers, which its own refusal lists
        with pytest.raises(InputError) as raised:
            Plan(recompute="?")
        return re.findall(r"(?:none|full|sqrt|attention|every-\d+|first-\d+|selective(?:-\d+)?)", raised.value.fix)
    if name == "split":  # of the two blocks of the model
        return [None, (1, 1)]
    if name == "offload_folder":
        return [None, "here"]
    bounds = [one for one in field.metadata if hasattr(one, "gt") or hasattr(one, "ge")]
    return list(dict.fromkeys(_values(field.annotation, bounds)))


def _values(kind: Any, bounds: list[Any]) -> Iterator[Any]:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _values(inside[0], [*bounds, *inside[1:]])
    elif origin in (Union, types.UnionType):
        for one in inside:
            yield from _values(one, bounds)
    elif origin is Literal:
        yield from inside
    elif origin is tuple:
        words = list(_values(inside[0], []))
        yield from [(), *((word,) for word in words), tuple(words)]
    elif kind is bool:
        yield from (False, True)
    elif kind in (int, float):
        limits = [limit for one in bounds for limit in getattr(one, "metadata", [one])]
        least = max(getattr(one, "ge", getattr(one, "gt", -1) + 1) for one in limits)
        yield from (kind(least), kind(least + 1))
    elif kind is type(None):
        yield None
    else:
        raise AssertionError(f"no values are known of {kind}: name some above")


def plans() -> dict[str, dict[str, Any]]:
    """Plans by name: each value alone, beside what it is for, and those of one process on two."""
    found: dict[str, dict[str, Any]] = {}
    same = set()
    for name in Plan.model_fields:
        for value in values_of(name):
            alone = {name: value}
            ways = [alone, {**WITH[name], **alone}] if name in WITH else [alone]
            if not any(field in ways[-1] for field in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "zero")):
                ways += [{**ways[-1], **more} for more in SEVERAL]
            for plan in ways:
                means = Plan(**plan).to_json()
                if means not in same:
                    found[",".join(f"{field}={said}" for field, said in plan.items())] = plan
                same.add(means)
    return found


PLANS = plans()


def test_every_field_has_values_besides_the_reference() -> None:
    assert WITH.keys() <= Plan.model_fields.keys()
    for name, field in Plan.model_fields.items():
        assert any(Plan(**{name: value}) != Plan() for value in values_of(name)), name
        for value in values_of(name):
            wanted = getattr(Plan(**{name: value}), name)
            assert any(getattr(Plan(**plan), name) == wanted for plan in PLANS.values())
        assert field.default in values_of(name) or name in ("prefetch", "powersgd_rank"), name


def content(settings: str) -> dict[str, Any]:
    return {
        "model": {**tiny.MODEL, "attention_dropout": 0.0},
        "data": {"text": "python-stdlib", "sequence_length": 16, "held_out": 0.001},
        "train": {"batch": 4, "steps": STEPS, "learning_rate": 1e-3, "trackers": [], **SETTINGS[settings]},
        "allow": list(get_args(Permission)),
    }


def commanded(arguments: list[str]) -> tuple[int, str]:
    """(exit code, what is said of a refusal) of the command in this process."""
    try:
        app(arguments, standalone_mode=False)
    except TightfitError as error:
        return error.exit_code, str(error)
    except SystemExit as ended:
        return int(ended.code or 0), ""
    return 0, ""


def trained(folder: Path, fields: dict[str, Any], settings: str) -> tuple[str, list[float]]:
    """(what is said if it is refused, the losses) of a training, which with all settings is stopped and resumed on the way."""
    job, out, size = folder / "job.yaml", folder / "out", tightfit.Plan(**fields).devices
    job.write_text(yaml.safe_dump(content(settings)))
    fields = {name: str(folder / value) if value == "here" else value for name, value in fields.items()}
    changes = [f"--set=plan.{name}={json.dumps(value)}" for name, value in fields.items()]
    command = ["train", str(job), "--plan", "reference", "--out", str(out), *changes]
    parts = [[f"--set=train.steps={BEFORE}"], ["--resume"]] if settings == "all" else [[]]
    for part in parts:
        arguments = [*command, *part]
        ended = (
            together(size, "tests.engine.test_every_value:commanded", arguments) if size > 1 else [commanded(arguments)]
        )
        codes, said = {code for code, _ in ended}, [text for _, text in ended if text]
        assert len(codes) == 1, ended
        assert codes <= {0, 2}, ended
        if codes == {2}:
            assert part is parts[0], said
            assert len(said) == 1, said  # by one process
            assert "\n  fix: " in said[0]
            return said[0], []
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return "", [line["loss"] for line in lines]


@cache
def reference(settings: str, folder: Path) -> list[float]:
    said, losses = trained(folder, {}, settings)
    assert not said
    assert len(losses) == STEPS
    return losses


@pytest.fixture(scope="module")
def of_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


def tolerance(plan: Plan) -> float:
    """Of losses, for what a plan does to numerics."""
    changed = needed_permissions(plan)
    if changed & {"asynchronous"}:
        return math.inf
    return 3e-2 if changed - {"offload"} else 2e-5


def quick(parameter: Any) -> Any:
    """Compilers take their time: the slow suite has those."""
    compiles = "compile" in PLANS[parameter.values[1]]
    return pytest.param(*parameter.values, id=parameter.id, marks=pytest.mark.slow) if compiles else parameter


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("default::tightfit.errors.TightfitWarning")
@pytest.mark.parametrize(("settings", "name"), [quick(one) for one in spread(list(SETTINGS), list(PLANS), 46)])
def test_each_value_trains_like_the_reference_or_is_refused(
    settings: str, name: str, tmp_path: Path, of_reference: Path
) -> None:
    said, losses = trained(tmp_path, PLANS[name], settings)
    print(f"{settings}  {name}: {said or 'trained'}")
    if not said:
        folder = of_reference / settings
        folder.mkdir(exist_ok=True)
        assert losses == pytest.approx(reference(settings, folder), rel=tolerance(Plan(**PLANS[name])))
