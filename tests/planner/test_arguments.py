"""Functions of the package that take a job, a plan or a machine: the job's pins count where no plan is
given, and arguments of other types are converted or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import InputError


def job(plan: Any = None) -> tightfit.Job:
    samples = [(torch.randn(8), number % 3) for number in range(16)]
    train = {"batch": 8, "steps": 2, "learning_rate": 1e-2, "trackers": []}
    return tightfit.Job(model=lambda: nn.Linear(8, 3), data=samples, train=train, plan=plan)


def setup(plan: tightfit.Plan) -> Callable[[], None]:
    net = tightfit.prepare(lambda: nn.Linear(8, 3), tightfit.Train(), plan)

    def step() -> None:
        net.backward(net(torch.ones(2, 8)).sum())
        net.step()

    return step


def test_build_uses_the_job_s_pins_without_a_plan() -> None:
    pinned = job({"micro_batch": 4})
    assert tightfit.build(pinned).plan == tightfit.Plan(micro_batch=4)
    assert tightfit.build(pinned, tightfit.Plan()).plan == tightfit.Plan()
    assert tightfit.build(job("reference")).plan == tightfit.build(job()).plan == tightfit.Plan()


@pytest.mark.slow
def test_search_adds_its_pins_to_those_of_the_job() -> None:
    pinned = job({"micro_batch": 4, "precision": "fp32"})
    alone = tightfit.search(pinned, "l4")[0].plan
    assert (alone.micro_batch, alone.precision) == (4, "fp32")
    both = tightfit.search(pinned, "l4", {"micro_batch": 2})[0].plan
    assert (both.micro_batch, both.precision) == (2, "fp32")
    assert tightfit.search(job("reference"), "l4")[0].plan == tightfit.Plan()


@pytest.mark.slow
def test_estimates_and_explanations_keep_the_job_s_pins() -> None:
    pinned = job({"micro_batch": 4, "precision": "fp32"})
    assert tightfit.estimate(pinned, machine="l4").plan == tightfit.Plan(micro_batch=4)
    assert "micro_batch=4" in tightfit.explain(pinned, machine="l4").splitlines()[0]
    assert tightfit.explain(pinned, {"micro_batch": 2}, "l4").startswith("plan     micro_batch=2\n")


@pytest.mark.parametrize("name", ["build", "search", "explain", "estimate", "verify", "profile", "dry_run"])
def test_a_misspelt_or_ill_typed_pin_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="plan: micro_bach: unknown field\n  fix: did you mean 'micro_batch'"):
        getattr(tightfit, name)(job({"micro_bach": 4}))
    with pytest.raises(InputError, match="plan: micro_batch: 'many' is not allowed"):
        getattr(tightfit, name)(job({"micro_batch": "many"}))


@pytest.mark.slow
def test_a_mapping_is_read_as_a_plan() -> None:
    fields = {"micro_batch": 4}
    expected = tightfit.Plan(micro_batch=4)
    assert tightfit.build(job(), fields).plan == expected
    assert tightfit.estimate(job(), fields, "l4").plan == expected
    assert tightfit.verify(job(), fields).passed
    assert tightfit.dry_run(job(), fields).total == tightfit.dry_run(job(), expected).total
    assert tightfit.profile(job(), fields).parameters == tightfit.profile(job(), expected).parameters
    mixed = {"precision": "bf16-mixed"}
    assert tightfit.prepare(lambda: nn.Linear(8, 3), tightfit.Train(), mixed).run.plan == tightfit.Plan(**mixed)
    assert (
        tightfit.explain_loop(setup, mixed).plan == tightfit.measure_loop(setup, mixed).plan == tightfit.Plan(**mixed)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: tightfit.build(job(), plan),
        lambda plan: tightfit.prepare(lambda: nn.Linear(8, 3), tightfit.Train(), plan),
        lambda plan: tightfit.estimate(job(), plan),
        lambda plan: tightfit.explain(job(), plan),
        lambda plan: tightfit.verify(job(), plan),
        lambda plan: tightfit.dry_run(job(), plan),
        lambda plan: tightfit.profile(job(), plan),
        lambda plan: tightfit.explain_loop(setup, plan),
        lambda plan: tightfit.measure_loop(setup, plan),
    ],
)
def test_an_argument_that_is_no_plan_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="plan: is of type Machine") as raised:
        call(tightfit.Machine.named("l4"))
    assert "tightfit.Plan(micro_batch=4)" in raised.value.fix


@pytest.mark.parametrize(
    "call",
    [
        lambda machine: tightfit.build(job(), machine=machine),
        lambda machine: tightfit.prepare(lambda: nn.Linear(8, 3), tightfit.Train(), machine=machine),
        lambda machine: tightfit.search(job(), machine),
        lambda machine: tightfit.estimate(job(), machine=machine),
        lambda machine: tightfit.explain(job(), machine=machine),
        lambda machine: tightfit.verify(job(), machine=machine),
        lambda machine: tightfit.complete(job(), machine, {}),
        lambda machine: tightfit.for_trainer(nn.Linear(8, 3), None, [], machine=machine),
    ],
)
def test_a_machine_is_found_by_name_or_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="did you mean 'l4'"):
        call("l44")
    with pytest.raises(InputError, match="machine: is of type Plan") as raised:
        call(tightfit.Plan())
    assert "the name of one" in raised.value.fix


def test_pins_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(InputError, match="pins: is of type Plan, and must be a mapping"):
        tightfit.search(job(), "l4", tightfit.Plan())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ({"precision": "bf16-mixed"}, "changes numerics in a way the job does not allow: bf16"),
        ({"update_in_backward": True, "micro_batch": 2}, "update_in_backward"),
        ({"dp_replicate": 4}, "is for 4 devices, and the machine has 1"),
    ],
)
def test_only_what_can_be_trained_is_predicted(plan: dict[str, Any], found: str) -> None:
    strict = job().replace(allow=[])
    for predict in (tightfit.explain, tightfit.estimate):
        with pytest.raises(InputError, match=found):
            predict(strict, plan, "l4")
    if "micro_batch" not in plan:
        return
    with pytest.raises(InputError, match=found):
        tightfit.search(strict, "l4", choices=[tightfit.Plan(**plan)])


def test_a_search_among_no_plans_is_refused() -> None:
    with pytest.raises(InputError, match="choices: is empty"):
        tightfit.search(job(), "l4", choices=[])


@pytest.mark.parametrize("pins", [{"tp": 0}, {"tp": "two"}, {"dp_shard": "x"}, {"parameter_server": "x"}])
def test_wrong_degrees_are_refused_before_devices_are_divided(pins: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"plan: {next(iter(pins))}: .* is not allowed"):
        tightfit.complete(job(), "h100-sxm:8", pins)
