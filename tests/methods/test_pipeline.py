"""Pipelines: schedules against theory, PipeDream against a serial simulation of its delayed
updates, and refusals."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.cost.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Action,
    dependencies_of,
    in_flight,
    make_schedule,
    simulate,
    split_balanced,
    split_evenly,
)
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.models import find_blocks, parameter_uses
from tightfit.parallel.pipeline.stages import stage_ranges
from tightfit.parallel.pipeline.weight_gradients import DeferredWeightGradients

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
HERE = "tests.methods.test_pipeline:"


def seconds(action: Action) -> float:
    return {FORWARD: 1.0, BACKWARD: 2.0}[action.kind]


@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 3), st.integers(1, 13))
def test_schedules_run_each_action_once_without_deadlock(
    schedule: str, devices: int, virtual_stages: int, micro_batches: int
) -> None:
    virtual_stages = virtual_stages + 1 if schedule == "interleaved" else 1
    table = make_schedule(schedule, devices, virtual_stages, micro_batches)
    kinds = (FORWARD, BACKWARD, WEIGHTS) if schedule == "zero-bubble" else (FORWARD, BACKWARD)
    for device, actions in enumerate(table):
        own = range(device, devices * virtual_stages, devices)
        wanted = {Action(kind, stage, number) for kind in kinds for stage in own for number in range(micro_batches)}
        assert len(actions) == len(wanted)
        assert set(actions) == wanted
    ended = {slot.action: slot for slot in simulate(table, lambda action: 1.0)}
    for action, slot in ended.items():
        assert all(ended[other].end <= slot.start for other in dependencies_of(action, devices * virtual_stages))
    for kind in (FORWARD, BACKWARD):  # what is sent on one line is received in the order in which it is sent
        for stage in range(devices * virtual_stages - 1):
            here, there = (
                [action.micro_batch for action in table[c % devices] if (action.kind, action.stage) == (kind, c)]
                for c in (stage, stage + 1)
            )
            assert here == there


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_bubbles_and_activations_match_the_papers(devices: int, micro_batches: int) -> None:
    """GPipe and 1F1B wait (p-1)/(m+p-1) of a step; naive (p-1)/p. GPipe holds m micro-batches, 1F1B p - s, naive one."""
    busy = 3.0 * micro_batches
    expected = {
        "naive": busy * devices,
        "gpipe": busy * (micro_batches + devices - 1) / micro_batches,
        "1f1b": busy * (micro_batches + devices - 1) / micro_batches,
    }
    held = {
        "naive": [1] * devices,
        "gpipe": [micro_batches] * devices,
        "1f1b": [min(devices - device, micro_batches) for device in range(devices)],
    }
    for schedule, wanted in expected.items():
        table = make_schedule(schedule, devices, 1, micro_batches)
        assert max(slot.end for slot in simulate(table, seconds)) == pytest.approx(wanted)
        assert [in_flight(actions) for actions in table] == held[schedule]


@pytest.mark.parametrize("virtual_stages", [2, 4])
def test_interleaving_divides_the_bubble_by_stages_per_device(virtual_stages: int) -> None:
    devices, micro_batches = 4, 8
    slots = simulate(
        make_schedule("interleaved", devices, virtual_stages, micro_batches),
        lambda action: seconds(action) / virtual_stages,
    )
    busy = 3.0 * micro_batches
    assert max(slot.end for slot in slots) == pytest.approx(busy + 3.0 * (devices - 1) / virtual_stages)


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 4), (4, 4), (4, 8), (4, 16)])
def test_zero_bubble_waits_at_most_a_third_with_equal_memory(devices: int, micro_batches: int) -> None:
    """ZB-H1 waits (p-1)(F + B - W), with F, B and W of equal length, and holds as many
    micro-batches as 1F1B."""
    table = make_schedule("zero-bubble", devices, 1, micro_batches)
    whole = max(slot.end for slot in simulate(table, lambda action: 1.0))
    assert whole - 3.0 * micro_batches <= devices - 1 + 2.0
    assert max(in_flight(actions) for actions in table) <= devices


def test_the_split_minimises_the_slowest_stage() -> None:
    assert split_evenly(10, 4) == (2, 3, 3, 2)
    assert split_balanced([1.0] * 8, 0.3, 1.5, 4) == (2, 2, 3, 1)
    for blocks in ([1.0, 5.0, 1.0, 1.0, 1.0], [3.0, 1.0, 2.0, 2.0, 4.0, 1.0]):
        found = split_balanced(blocks, 0.5, 0.0, 3)
        assert sum(found) == len(blocks)
        ends = [sum(found[:number]) for number in range(4)]
        cost = max(sum(blocks[a:b]) + (0.5 if a == 0 else 0.0) for a, b in itertools.pairwise(ends))
        every = [
            max(sum(blocks[:i]) + 0.5, sum(blocks[i:j]), sum(blocks[j:]))
            for i in range(1, len(blocks))
            for j in range(i + 1, len(blocks))
        ]
        assert cost == pytest.approx(min(every))


def test_no_other_split_has_a_faster_slowest_stage() -> None:
    drawn = random.Random(0)
    for _ in range(100):
        count = drawn.randint(1, 8)
        blocks, stages = [drawn.choice([0.0, 1.0, drawn.random()]) for _ in range(count)], drawn.randint(1, count)
        first, last = drawn.choice([(0.0, 0.0), (0.5, 3.0), (0.3, 0.1)])

        def slowest(ends: tuple[int, ...]) -> float:
            seconds = [sum(blocks[begin:end]) for begin, end in itertools.pairwise((0, *ends, count))]  # noqa: B023
            return max(seconds[0] + first, *seconds[1:-1], seconds[-1] + last) if len(ends) else 0.0  # noqa: B023

        found = split_balanced(blocks, first, last, stages)
        assert len(found) == stages
        assert sum(found) == count
        assert min(found) >= 1
        ends = tuple(itertools.accumulate(found[:-1]))
        every = itertools.combinations(range(1, count), stages - 1)
        assert slowest(ends) == pytest.approx(min(slowest(others) for others in every))


def test_the_stages_that_use_each_parameter_are_found() -> None:
    def places(name: str) -> dict[str, tuple[int, ...]]:
        model = tightfit.build(cases.make_case(name).job).model
        return parameter_uses(model, find_blocks(model))

    llama, gpt2, vit = places("llama"), places("gpt2"), places("vit")
    assert llama["model.embed_tokens.weight"] == (-1,)
    assert llama["model.layers.2.mlp.up_proj.weight"] == (2,)
    assert llama["model.norm.weight"] == llama["lm_head.weight"] == (4,)
    assert gpt2["transformer.wte.weight"] == (-1, 4)  # tied to the head
    assert vit["vit.embeddings.cls_token"] == (-1,)


# PipeDream ------------------------------------------------------------------------------------------------------------

STEPS = 7


def pipedream_job(name: str, **train: Any) -> tightfit.Job:
    case = cases.make_case(name, steps=STEPS, schedule="linear", **train)
    return case.job.replace(allow=[*cases.ALLOW, "asynchronous"])


def pipedreamed(name: str, fields: dict[str, Any], train: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(pipedream_job(name, **train), tightfit.Plan(**fields))
    losses = [step.loss for step in tightfit.train(run)]
    return losses, cases.state_of(run)


def simulated(
    name: str, devices: int, vertical_sync: bool, train: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Serially: the gradient of step t at the weights of update t - d, where d is p - 1 - s on stage s, or p - 1 with
    vertical sync; applied to the newest weights."""
    run = tightfit.build(pipedream_job(name, **train))
    blocks = find_blocks(run.model)
    pieces = stage_ranges(tightfit.Plan(pp=devices), len(blocks))
    stage = {}
    for key, (place, *_) in parameter_uses(run.model, blocks).items():
        stage[key] = next((s for s, piece in enumerate(pieces) if place in piece), 0 if place < 0 else devices - 1)
    weights = dict(run.model.named_parameters())
    history = [{key: weight.detach().clone() for key, weight in weights.items()}]
    losses = []
    for step, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False):
        for key, weight in weights.items():
            late = devices - 1 if vertical_sync else devices - 1 - stage[key]
            weight.data.copy_(history[max(step - late, 0)][key])
        total = run.loss_sum(batch)
        items = run.objective.count(batch)
        (total / items).backward()
        losses.append(float(total.detach()) / items)
        for key, weight in weights.items():
            weight.data.copy_(history[step][key])
        for group in run.optimizer.param_groups:
            group["lr"] = run.learning_rate(step)
        run.optimizer.step()
        run.optimizer.zero_grad()
        history.append({key: weight.detach().clone() for key, weight in weights.items()})
    return losses, cases.state(run.model)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize(
    ("name", "fields", "train"),
    [
        ("llama", {"pp": 2}, {}),
        ("llama", {"pp": 4}, {"optimizer": "sgd", "momentum": 0.9}),
        ("vit", {"pp": 4, "micro_batch": 3}, {}),
        ("vit", {"pp": 2, "recompute": "full"}, {}),
        ("llama", {"pp": 2, "dp_replicate": 2}, {}),
        ("llama", {"pp": 2, "tp": 2}, {}),
    ],
)
def test_pipedream_equals_its_serial_simulation(
    name: str, fields: dict[str, Any], train: dict[str, Any], vertical_sync: bool
) -> None:
    expected_losses, expected = simulated(name, fields["pp"], vertical_sync, train)
    plan = {**fields, "schedule": "pipedream", "vertical_sync": vertical_sync}
    for losses, weights in together(tightfit.Plan(**plan).devices, HERE + "pipedreamed", name, plan, train):
        assert losses == pytest.approx(expected_losses, rel=2e-6)
        assert cases.distance(weights, expected) < 1e-6


# What is refused ------------------------------------------------------------------------------------------------------


def refused(name: str, fields: dict[str, Any]) -> str:
    job = cases.make_case(name).job.replace(allow=[*cases.ALLOW, "asynchronous"])
    try:
        tightfit.build(job, tightfit.Plan(**fields))
    except InputError as error:
        return str(error)
    return ""


class Twice(torch.nn.Module):
    """Goes through its blocks twice, as ALBERT does. idle: the first half of them is frozen, and all that lies before."""

    def __init__(self, rounds: int = 2, idle: bool = False) -> None:
        super().__init__()
        self.rounds = rounds
        self.stem = torch.nn.Linear(4, 8).requires_grad_(not idle)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).requires_grad_(not idle or n > 1)
            for n in range(4)
        )
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def job_of(model: Any) -> tightfit.Job:
    samples = [(torch.randn(4), 1) for _ in range(16)]
    return tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=4, steps=1))


def twice() -> str:
    try:
        tightfit.build(job_of(Twice), tightfit.Plan(pp=2))
    except InputError as error:
        return str(error)
    return ""


def idle() -> str:
    try:
        tightfit.build(job_of(lambda: Twice(rounds=1, idle=True)), tightfit.Plan(pp=2))
    except InputError as error:
        return str(error)
    return ""


def test_blocks_called_twice_are_refused_before_any_message() -> None:
    for error in together(2, HERE + "twice"):
        assert "does not call each of its blocks once, in order" in error
    with pytest.raises(InputError, match="once, in order"):
        tightfit.estimate(job_of(Twice), tightfit.Plan(pp=2), tightfit.Machine.named("a100-80gb:2"))


def test_a_device_without_anything_to_train_is_refused_by_all() -> None:
    for error in together(2, HERE + "idle"):
        assert "rank 0 of the pipeline would have no trainable parameter" in error


def received() -> tuple[list[str], list[str]]:
    """How a device asked for its messages: in a first step, where their shapes are not known, and in the second."""
    job = cases.make_case("llama").job
    run = tightfit.build(job, tightfit.Plan(pp=2, micro_batch=1))
    asked: list[str] = []
    real = {name: getattr(dist, name) for name in ("recv", "irecv")}
    steps = run.data.steps(0, None)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name, call in real.items():
            patch.setattr(
                dist, name, lambda *args, name=name, call=call, **kw: (asked.append(name), call(*args, **kw))[1]
            )
        for step in range(2):
            asked.clear()
            take_step(run, next(steps), step)
            found.append([*asked])
    return found[0], found[1]


def test_inputs_of_an_action_are_received_during_the_one_before() -> None:
    """This starts once the shape is known; each message is received once."""
    for first, second in together(2, HERE + "received"):
        assert second == ["irecv"] * 8  # one of each micro-batch
        assert (
            first.count("recv") == 2
        )  # what hidden states look like, or which gradients there are; and the first of them
        assert len(first) == 9


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("t5", {"pp": 2}, "an encoder and a decoder are two stacks of blocks"),
        ("gpt2", {"pp": 2, "schedule": "pipedream"}, "transformer.wte.weight is used by the first and the last device"),
        ("llama", {"pp": 2, "split": (1, 2)}, "the model has 4 blocks, and split adds up to 3"),
        ("llama", {"pp": 2, "schedule": "interleaved", "virtual_stages": 4}, "a pipeline of at most 4 stages"),
        ("llama", {"pp": 2, "schedule": "zero-bubble", "zero": 2, "dp_shard": 2}, "use schedule: 1f1b"),
    ],
)
def test_models_that_cannot_be_split_are_refused(name: str, fields: dict[str, Any], said: str) -> None:
    for error in together(tightfit.Plan(**fields).devices, HERE + "refused", name, fields):
        assert said in error


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def losses_in_bf16(fields: dict[str, Any]) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    samples = [(torch.randn(8, generator=generator), torch.randn(8, generator=generator)) for _ in range(16)]
    train = tightfit.Train(batch=8, steps=2, optimizer="sgd", learning_rate=0.1)
    loss = lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])  # noqa: E731
    plan = tightfit.Plan(precision="bf16-true", **fields)
    run = tightfit.build(tightfit.Job(model=Deep, data=samples, loss=loss, train=train), plan)
    return [step.loss for step in tightfit.train(run)]


def test_devices_sum_a_16_bit_loss_in_one_type() -> None:
    """Only the last device has a loss, in bf16: with another type on the others the processes would
    abort in gloo."""
    alone = losses_in_bf16({})
    for found in together(2, HERE + "losses_in_bf16", {"pp": 2}):
        assert found == pytest.approx(alone, rel=2e-2)


class Scaled(torch.nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias) * scale


def test_layers_that_defer_gradients_may_be_called_by_keywords() -> None:
    layer = Scaled(3, 2)
    x = torch.ones(1, 3)
    expected = layer(x, scale=0.5)
    DeferredWeightGradients().attach(layer)
    torch.testing.assert_close(layer(x, scale=0.5), expected)
