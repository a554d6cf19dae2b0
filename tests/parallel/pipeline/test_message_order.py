"""The order in which a pipeline's devices receive and send messages: in every schedule, and in real
runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tightfit
from tests import tiny
from tests.contract import cases
from tests.pool import together
from tightfit.cost.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Action,
    coming,
    consumer_of,
    make_schedule,
    producer_of,
    simulate,
)
from tightfit.engine.step import take_step
from tightfit.parallel.pipeline import executor, pipedream
from tightfit.parallel.pipeline.executor import PipelineRank
from tightfit.parallel.pipeline.pipedream import PipeDream

HERE = "tests.parallel.pipeline.test_message_order:"
SCHEDULES = ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream")
KINDS = [*((schedule, 1) for schedule in SCHEDULES), ("interleaved", 2), ("interleaved", 3)]
Step = tuple[str, Action]  # what a device does, in order


def program(
    schedule: str, devices: int, virtual_stages: int, micro_batches: int, device: int, stops: bool
) -> list[Step]:
    """A device's step as `Pipeline._run_schedule` goes through it: it asks for the message of an action and for the next one's, waits
    for the first, computes, and sends what it made."""
    last, asked, found = devices * virtual_stages - 1, set[Action](), list[Step]()
    actions = make_schedule(schedule, devices, virtual_stages, micro_batches)[device]
    comes = coming(schedule, devices, virtual_stages, micro_batches, device, stops)
    for action, after in zip(actions, comes, strict=True):
        for one in (action, *after):
            if one.kind != WEIGHTS and 0 <= producer_of(one).stage <= last and one not in asked:
                asked.add(one)
                found.append(("ask", one))
        found.append(("work", action))
        if action.kind != WEIGHTS and 0 <= consumer_of(action).stage <= last:
            found.append(("send", consumer_of(action)))
    return found


class Line:
    """From one device to the next, or back: messages that were sent and asked for, by the actions that take them."""

    def __init__(self) -> None:
        self.posted: dict[str, list[Action]] = {"ask": [], "send": []}

    def post(self, what: str, action: Action) -> None:
        """Both ends match by their order alone."""
        mine, other = self.posted[what], self.posted["send" if what == "ask" else "ask"]
        assert len(mine) >= len(other) or other[len(mine)] == action, "two ends of a line disagree"
        mine.append(action)

    def done(self) -> int:
        return min(map(len, self.posted.values()))


def play_through(schedule: str, devices: int, virtual_stages: int, micro_batches: int, stops: bool) -> None:
    """All devices' steps at once; raises AssertionError where they wait for each other for ever.

    stops  each device stops amid each action until all that it has posted is done: what it asked for, and what it sent. Else it
           waits for the action's own message only.
    """
    programs = [program(schedule, devices, virtual_stages, micro_batches, device, stops) for device in range(devices)]
    lines: dict[tuple[str, int, bool], Line] = defaultdict(Line)  # the mesh has a group for each kind, and around
    waiting: list[list[tuple[Action, Line, int]]] = [[] for _ in programs]
    places, moved = [0] * devices, True
    while moved:
        moved = False
        for device, steps in enumerate(programs):
            while places[device] < len(steps):
                what, action = steps[places[device]]
                if what == "work":
                    waiting[device] = [one for one in waiting[device] if one[1].done() <= one[2]]
                    if any(stops or one[0] == action for one in waiting[device]):
                        break
                else:
                    given = producer_of(action)
                    line = lines[action.kind, given.stage % devices, max(action.stage, given.stage) % devices == 0]
                    if what == "ask" or stops:
                        waiting[device].append((action, line, len(line.posted[what])))
                    line.post(what, action)
                places[device] += 1
                moved = True
    assert places == [len(steps) for steps in programs], "devices wait for each other"
    assert all(line.posted["ask"] == line.posted["send"] for line in lines.values())


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("schedule", "virtual_stages"), KINDS)
def test_both_ends_of_a_link_use_one_order_without_deadlock(schedule: str, virtual_stages: int) -> None:
    """A GPU may block in any action. The test runs every schedule on 2 to 8 devices with 1 to 16
    micro-batches."""
    for devices, micro_batches in itertools.product(range(2, 9), range(1, 17)):
        for stops in (False, True):
            play_through(schedule, devices, virtual_stages, micro_batches, stops)


def test_receives_ahead_depend_on_schedule_and_device() -> None:
    """A device that never blocks receives every next message ahead. One that may block receives one
    direction in 1F1B, and both in GPipe."""

    def ahead(schedule: str, stops: bool, device: int) -> str:
        return " ".join(str(one) for after in coming(schedule, 4, 1, 6, device, stops) for one in after)

    assert ahead("1f1b", False, 1) == "F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert ahead("1f1b", True, 1) == ahead("1f1b", True, 3) == "F1 F2 F3 F4 F5"
    assert ahead("gpipe", True, 1) == "F1 F2 F3 F4 F5 B1 B2 B3 B4 B5"
    assert ahead("naive", True, 1) == ""
    assert ahead("pipedream", True, 3).startswith("F1 F2 F3 F4 F5 F7")  # F6 is of the next step


def test_receiving_everything_ahead_deadlocks_blocking_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B without the restriction of `late`, to show why it is needed."""
    every = partial(coming, stops=False)
    monkeypatch.setitem(globals(), "coming", lambda *shape: every(*shape[:-1]))
    with pytest.raises(AssertionError, match="wait for each other"):
        play_through("1f1b", 2, 1, 4, stops=True)


def test_a_message_is_sent_during_the_action_before() -> None:
    """Only if it is received ahead; otherwise it is sent when the action could begin."""
    table = make_schedule("gpipe", 2, 1, 3)
    second = Action(FORWARD, 1, 1)
    for late, wanted in ((frozenset[Action](), 3.0), (frozenset({second}), 4.0)):
        starts = {slot.action: slot.start for slot in simulate(table, lambda action: 1.0, lambda action: 1.0, late)}
        assert starts[Action(FORWARD, 1, 0)] == 2.0
        assert starts[second] == wanted


# As they run -----------------------------------------------------------------------------------------------------------


def recorded(fields: dict[str, Any], stops: bool) -> tuple[list[Any], list[Any]]:
    """What a device does in its second step, and what it should: which messages it asks for and sends, and what it computes."""
    run = tightfit.build(
        cases.make_case("llama").job.replace(allow=[*cases.ALLOW, "asynchronous"]), tightfit.Plan(**fields)
    )
    assert isinstance(run.executor, PipelineRank)
    seen: list[tuple[str, str]] = []
    kinds = {id(group): name[0].upper() for name, group in run.executor.mesh.other_groups.items()}

    def recording(real: Any, what: str) -> Any:
        def call(tensor: Tensor, *args: Any, **named: Any) -> Any:
            if tensor.dim():  # no loss of PipeDream's
                seen.append((what, kinds[id(named["group"])]))
            return real(tensor, *args, **named)

        return call

    def working(real: Any, kind: str) -> Any:
        def call(run: Any, action: Action, *rest: Any) -> Any:
            seen.append(("work", kind))
            return real(run, action, *rest)

        return call

    steps = run.data.steps(0, None)
    with pytest.MonkeyPatch.context() as patch:
        if stops:
            patch.setattr(executor, "kind_of", lambda device: "cuda")
        take_step(run, next(steps), 0)
        for name, what in (("irecv", "ask"), ("recv", "late"), ("isend", "send")):
            patch.setattr(dist, name, recording(getattr(dist, name), what))
        for name, kind in (("forward", FORWARD), ("backward", BACKWARD)):
            patch.setattr(run.executor, name, working(getattr(run.executor, name), kind))
        take_step(run, next(steps), 1)
    plan, count = run.plan, cases.make_case("llama").job.train.batch // fields["micro_batch"]
    wanted = program(plan.schedule, plan.pp, plan.virtual_stages, count, run.executor.rank, stops)
    return seen, [(what, action.kind) for what, action in wanted if action.kind != WEIGHTS]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({"pp": 2, "micro_batch": 2}, False),
        ({"pp": 4, "micro_batch": 2}, True),
        ({"pp": 2, "micro_batch": 2, "schedule": "gpipe"}, True),
        ({"pp": 2, "micro_batch": 1, "schedule": "interleaved", "virtual_stages": 2}, True),
        ({"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"}, True),
    ],
)
def test_the_runtime_receives_and_sends_in_that_order(fields: dict[str, Any], stops: bool) -> None:
    """As in the simulated tables: the next micro-batch is received before this one's forward
    begins."""
    for seen, wanted in together(fields["pp"], HERE + "recorded", fields, stops):
        assert seen == wanted


def pipedream_steps(stops: bool) -> tuple[list[float], set[int]]:
    """The losses of a PipeDream run, and how many gradients were posted when a forward began."""
    job = cases.make_case("llama").job.replace(allow=[*cases.ALLOW, "asynchronous"])
    run = tightfit.build(job, tightfit.Plan(pp=2, micro_batch=2, schedule="pipedream"))
    rank, posted = run.executor, set()
    assert isinstance(rank, PipeDream)
    forward = rank.forward

    def counting(run: Any, action: Action, *rest: Any) -> Any:
        posted.add(sum(one.kind == BACKWARD for one in rank.messages.posted_receives))
        return forward(run, action, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "forward", counting)
        if stops:
            for module in (executor, pipedream):
                patch.setattr(module, "kind_of", lambda device: "cuda")
        return [step.loss for step in tightfit.train(run)], posted


def test_pipedream_on_a_gpu_requests_gradients_first() -> None:
    plain, early = (together(2, HERE + "pipedream_steps", stops) for stops in (False, True))
    assert [losses for losses, _ in plain] == [losses for losses, _ in early]
    micro_batches = cases.make_case("llama").job.train.batch // 2
    assert micro_batches > 2
    assert early[0][1] == {0, micro_batches}  # 0: in the first round, which has no backward
    assert max(plain[0][1]) <= 1


def ragged_job() -> tightfit.Job:
    """Micro-batches of different lengths, most of which come back."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 300, (5 + number % 3,), generator=generator) for number in range(48)]
    data = [{"input_ids": one, "labels": one.clone()} for one in tokens]
    model = {**tiny.MODEL, "attention_dropout": 0.0}
    return tiny.job(batch=8, steps=4).replace(model=model, data=data, allow=[])


def ragged_losses(fields: dict[str, Any], stops: bool) -> tuple[list[float], int]:
    """Of a device's steps, and how many messages it asked for ahead."""
    run, ahead = tightfit.build(ragged_job(), tightfit.Plan(**fields)), 0
    assert run.data.ragged
    assert isinstance(run.executor, PipelineRank)
    messages = run.executor.messages
    expect = messages.post_receive

    def counting(run: Any, action: Action, batch: Any) -> bool:
        nonlocal ahead
        found = expect(run, action, batch)
        ahead += found and action in messages.posted_receives
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "post_receive", counting)
        if stops:
            patch.setattr(executor, "kind_of", lambda device: "cuda")
        return [
            step.loss for step in tightfit.train(replace(run, droppable_masks=("attention_mask",) if stops else ()))
        ], ahead


@pytest.mark.parametrize("stops", [False, True])
def test_receives_of_other_shapes_start_once_they_are_known(stops: bool) -> None:
    """A GPU's loader drops a mask that hides nothing, so micro-batches may lack it."""
    expected = [step.loss for step in tightfit.train(tightfit.build(ragged_job()))]
    fields = {"pp": 2, "micro_batch": 1}
    for losses, ahead in together(2, HERE + "ragged_losses", fields, stops):
        assert losses == pytest.approx(expected, rel=2e-6)
        assert ahead >= 4 * 8 // 2
