"""Define pipeline schedules: what each pipeline rank does, in which order.

The engine runs a schedule, and the planner simulates the same schedule. A pipeline of P ranks with
V virtual stages each cuts the model into P x V stages, and stage s is on rank s mod P. Each rank
has a list of actions: the forward (F) of one micro-batch through one stage, its backward (B), or,
where backward is split, the part of it that computes the weights' gradients (W).

Example: 1f1b with 4 ranks and 8 micro-batches.

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7     4 micro-batches in flight
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7     3
    rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7     2
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7     1

The next table compares the schedules for this pipeline, if a forward through all of a rank's layers
takes 1 s and its backward 2 s. Each rank computes for 24 s; the rest of the step is the bubble. `in
flight` is the largest number of micro-batches whose activations a rank holds at once. With two
virtual stages, each of the rank's stages has half of the layers, and each is counted.

    schedule                         step     in flight on ranks 0 to 3
    naive                            96 s      1  1  1  1
    gpipe                            33 s      8  8  8  8
    1f1b                             33 s      4  3  2  1
    interleaved, 2 virtual stages    28.5 s   11  9  7  5
    zero-bubble, B and W 1 s each    29 s      4  4  4  4

Source  GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B: Narayanan et al. 2019 (PipeDream),
        arXiv:1806.03377, and 2021, arXiv:2006.09503 (flush); interleaved: Narayanan et al. 2021,
        arXiv:2104.04473; zero bubble (ZB-H1): Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a pipeline rank's list: the forward or backward of one micro-batch through one
    stage.

    kind         "F" (forward), "B" (backward) or "W" (the part of a split backward that computes
                 the gradients of the weights)
    stage        number of the model's stage, from 0
    micro_batch  number of the micro-batch in the step, from 0
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]  # a list of actions for each rank


@cache
def make_schedule(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """Return the actions of one step as one tuple for each pipeline rank, in the order in which the
    rank runs them. For pipedream, return the actions of several steps, so that its steady state is
    included.

    schedule        a plan's `schedule`: naive, gpipe, 1f1b, interleaved, zero-bubble or pipedream
    ranks           ranks of the pipeline
    virtual_stages  stages on each rank; more than one only for interleaved
    micro_batches   number of micro-batches in one step

    Raises KeyError for an unknown schedule.
    """
    if schedule == "interleaved":
        padded = -(-micro_batches // ranks) * ranks
        whole = tuple(_interleaved(rank, ranks, virtual_stages, padded) for rank in range(ranks))
        return tuple(tuple(action for action in actions if action.micro_batch < micro_batches) for actions in whole)
    if schedule == "pipedream":
        return tuple(_steps_of(rank, ranks, micro_batches) for rank in range(ranks))
    if schedule == "zero-bubble":
        return _zero_bubble(ranks, micro_batches)
    make = {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_forward_one_backward}[schedule]
    return tuple(make(rank, ranks, micro_batches) for rank in range(ranks))


def _naive(rank: int, ranks: int, count: int) -> tuple[Action, ...]:
    """Return the actions of rank `rank` if one micro-batch after the other passes through all ranks
    and back. Only one rank computes at a time. `count` is the number of micro-batches."""
    return tuple(Action(kind, rank, number) for number in range(count) for kind in (FORWARD, BACKWARD))


def _gpipe(rank: int, ranks: int, count: int) -> tuple[Action, ...]:
    return tuple(Action(kind, rank, number) for kind in (FORWARD, BACKWARD) for number in range(count))


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> tuple[Action, ...]:
    """Return the actions of rank `rank` in the 1F1B schedule: as many forwards as there are ranks
    after this rank, then alternately one forward and one backward. So rank r of P holds the
    activations of at most P - r micro-batches. `count` is the number of micro-batches."""
    ahead = min(ranks - rank - 1, count)
    forwards = [Action(FORWARD, rank, number) for number in range(count)]
    backwards = [Action(BACKWARD, rank, number) for number in range(count)]
    return _in_turn(forwards, backwards, ahead)


def _steps_of(rank: int, ranks: int, count: int) -> tuple[Action, ...]:
    """Return the actions of rank `rank` in PipeDream's schedule: 1F1B in which each entry is a
    whole step of `count` micro-batches. A rank does not wait between steps for the pipeline to
    become empty. There are twice as many steps as ranks, so that the steady state is included."""
    return tuple(
        Action(action.kind, rank, action.micro_batch * count + number)
        for action in _one_forward_one_backward(rank, ranks, 2 * ranks)
        for number in range(count)
    )


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Return one tuple of actions: the first `ahead` forwards, then alternately one forward and one
    backward until the forwards end, then the remaining backwards."""
    found = forwards[:ahead]
    for number, forward in enumerate(forwards[ahead:]):
        found += [forward, backwards[number]]
    return (*found, *backwards[len(forwards) - ahead :])


def _interleaved(rank: int, ranks: int, virtual_stages: int, count: int) -> tuple[Action, ...]:
    """Return the actions of rank `rank` in the interleaved schedule. The micro-batches form groups,
    each with as many micro-batches as there are ranks. A group passes through all of the rank's
    stages, one after the other, before the next group begins.

    count  number of micro-batches, a multiple of `ranks`
    """
    total = count * virtual_stages
    ahead = min((ranks - rank - 1) * 2 + (virtual_stages - 1) * ranks, total)

    def action(kind: str, index: int) -> Action:
        group, inside = divmod(index, ranks * virtual_stages)
        turn = inside // ranks
        own = turn if kind == FORWARD else virtual_stages - 1 - turn
        return Action(kind, own * ranks + rank, group * ranks + inside % ranks)

    forwards = [action(FORWARD, index) for index in range(total)]
    backwards = [action(BACKWARD, index) for index in range(total)]
    return _in_turn(forwards, backwards, ahead)


def _zero_bubble(ranks: int, count: int) -> Schedule:
    """Return the zero-bubble schedule ZB-H1 for `count` micro-batches: 1F1B whose bubbles are
    filled with the computation of weight gradients (W) of earlier backwards.

    In each time slot a rank runs a backward if one is ready, else a forward, else a W. It runs a
    forward only while fewer micro-batches are in flight than on the first rank of 1F1B.
    """
    done: dict[Action, int] = {}
    tables: list[list[Action]] = [[] for _ in range(ranks)]
    counts = [dict.fromkeys((FORWARD, BACKWARD, WEIGHTS), 0) for _ in range(ranks)]
    moment = 0
    while any(counted[WEIGHTS] < count for counted in counts):
        for rank, counted in enumerate(counts):
            for kind in (BACKWARD, FORWARD, WEIGHTS):
                action = Action(kind, rank, counted[kind])
                waits = dependencies_of(action, ranks)
                if kind == FORWARD and counted[FORWARD] - counted[WEIGHTS] >= ranks:
                    continue
                if counted[kind] < count and all(done.get(other, moment) < moment for other in waits):
                    tables[rank].append(action)
                    done[action] = moment
                    counted[kind] += 1
                    break
        moment += 1
    return tuple(map(tuple, tables))


def dependencies_of(action: Action, stages: int) -> list[Action]:
    """Return the actions that must end before `action` can begin. Example: a forward needs the same
    micro-batch's forward through the stage before.

    stages  number of stages of the whole model
    """
    kind, stage, number = action.kind, action.stage, action.micro_batch
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, number)] if stage else []
    if kind == BACKWARD:
        after = [Action(BACKWARD, stage + 1, number)] if stage < stages - 1 else []
        return [Action(FORWARD, stage, number), *after]
    return [Action(BACKWARD, stage, number)]


def consumer_of(action: Action) -> Action:
    """Return the action that reads the output of the forward or backward `action`: the same
    micro-batch's forward in the next stage, or its backward in the stage before.

    The forward of the last stage and the backward of the first stage send nothing. For them, the
    returned action has a stage that does not exist, such as -1.
    """
    return Action(action.kind, action.stage + (1 if action.kind == FORWARD else -1), action.micro_batch)


def producer_of(action: Action) -> Action:
    """Return the action whose output the forward or backward `action` reads: the same micro-batch's
    forward in the stage before, or its backward in the next stage. If `action` receives nothing,
    the returned action has a stage that does not exist, such as -1."""
    return Action(action.kind, action.stage - (1 if action.kind == FORWARD else -1), action.micro_batch)


@cache
def coming(
    schedule: str, ranks: int, virtual_stages: int, micro_batches: int, rank: int, stops: bool
) -> tuple[tuple[Action, ...], ...]:
    """Return, for each action of a rank in order, which inputs of later actions the rank requests
    before it begins the action. To request an input is to post a receive for it. An input is named
    by the action that reads it.

    schedule         a plan's `schedule`, such as "1f1b"
    ranks            number of ranks of the pipeline
    virtual_stages   stages on each rank
    micro_batches    number of micro-batches in one step
    rank             the rank whose actions these are
    stops            whether the device may stop in the middle of an action, for example to free
                     memory or to load a kernel. It then waits for all messages that it requested or
                     sent. A GPU may stop

    While an action computes, the input of the next action arrives (double buffering). So an entry
    of the result usually has the next action alone. The next action is left out if its input

    - does not exist: a W action receives nothing, nor does the first stage's forward or the last
      stage's backward;
    - belongs to pipedream's next step, whose samples are not known before the update;
    - must not be requested early (see `late`), if the device `stops`.

    Under pipedream, a round is the forwards of a step followed by the backwards of an earlier step.
    A device that stops requests all gradients of the round before the round's first forward.
    Otherwise there can be a deadlock: rank 0 stops in a forward until rank 1 receives its output,
    while rank 1 stops in a backward until rank 0 receives its gradient.

    Both ends of a link post sends and receives in the same order, because NCCL and gloo match
    messages by order alone.

    Source: overlapped p2p communication of Megatron-LM, Narayanan et al. 2021, arXiv:2104.04473.
    """
    last, waits = (
        ranks * virtual_stages - 1,
        late(schedule, ranks, virtual_stages, micro_batches) if stops else frozenset(),
    )
    actions = make_schedule(schedule, ranks, virtual_stages, micro_batches)[rank]
    requested: list[tuple[Action, ...]] = []
    for index, action in enumerate(actions):
        after = actions[index + 1 : index + 2]
        if schedule == "pipedream":
            is_last = (action.micro_batch + 1) % micro_batches == 0
            if action.kind == BACKWARD and is_last:
                after = ()
            elif stops:
                after = (*after, *_due_backwards(actions, index, micro_batches))
        is_sent = [one.kind != WEIGHTS and 0 <= producer_of(one).stage <= last for one in after]
        wanted = [one for one, is_so in zip(after, is_sent, strict=True) if is_so and one not in waits]
        requested.append(tuple(dict.fromkeys(wanted)))
    return tuple(requested)


def _due_backwards(actions: tuple[Action, ...], index: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the backwards that a rank still has to run in pipedream's current round, after its
    action number `index` in `actions`. A round is the forwards of a step, then the backwards of
    an earlier step.

    actions        all actions of the rank, in order
    micro_batches  number of micro-batches in one step
    """
    action = actions[index]
    end = index + micro_batches - action.micro_batch % micro_batches  # of this step's forwards or backwards
    rest = actions[index + 1 : end] if action.kind == BACKWARD else actions[end : end + micro_batches]
    return tuple(one for one in rest if one.kind == BACKWARD)


@cache
def late(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> frozenset[Action]:
    """Return the actions whose input must not be requested early. Such an input is requested (a
    receive is posted) only when the action itself begins, instead of during the action before it.
    This is for devices that may stop in the middle of an action and wait for their messages.

    schedule         a plan's `schedule`, such as "1f1b"
    ranks            number of ranks of the pipeline
    virtual_stages   stages on each rank
    micro_batches    number of micro-batches in one step

    Example: in the steady phase of 1F1B, rank 0 computes the forward that rank 1 needs next, while
    rank 1 computes the backward that rank 0 needs next. If both requested these messages early and
    both stopped, they would wait for each other for ever. So all actions of a step are put into one
    order. A device requests a message early only if its producer comes before the device's current
    action in this order. Then no cycle of waits can form.

    The result is empty for pipedream: its ranks work on different steps, so a requested message was
    produced in an earlier round.
    """
    if schedule == "pipedream":
        return frozenset()
    table, positions = (
        make_schedule(schedule, ranks, virtual_stages, micro_batches),
        _total_order(schedule, ranks, virtual_stages, micro_batches),
    )
    late_actions = set()
    for actions in table:
        for action, after in pairwise(actions):
            given = producer_of(after)
            if after.kind != WEIGHTS and given in positions and positions[given] > positions[action]:
                late_actions.add(after)
    return frozenset(late_actions)


def _total_order(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> dict[Action, int]:
    """Put all actions of a step into one order. Return action -> its position in this order, from
    0.

    schedule         a plan's `schedule`, such as "1f1b"
    ranks            number of ranks of the pipeline
    virtual_stages   stages on each rank
    micro_batches    number of micro-batches in one step

    The order is that of a run in which every action takes equally long. Of the actions that run at
    the same time, forwards come first, by increasing stage, and then backwards, by decreasing
    stage. These are the directions in which their messages travel.

    If possible, an action also comes after the actions that receive what its rank has sent before.
    The reason is that a device that stops in an action waits for its sends, too.
    """
    table = make_schedule(schedule, ranks, virtual_stages, micro_batches)
    own = {action: index for actions in table for index, action in enumerate(actions)}
    done, at = dict[Action, int](), [0] * ranks
    sending: list[list[Action]] = [[] for _ in table]  # named by the action that receives it
    while len(done) < len(own):
        ready = []
        for rank, actions in enumerate(table):
            if at[rank] < len(actions) and all(
                dependency in done for dependency in dependencies_of(actions[at[rank]], ranks * virtual_stages)
            ):
                ready.append(actions[at[rank]])
            sending[rank] = [one for one in sending[rank] if at[one.stage % ranks] < own[one]]
        free = [action for action in ready if not sending[action.stage % ranks]] or ready
        assert free, "the ranks of this schedule wait for each other"
        for action in sorted(free, key=_message_direction):
            done[action] = len(done)
            at[action.stage % ranks] += 1
            if (taken := consumer_of(action)) in own and action.kind != WEIGHTS:
                sending[action.stage % ranks].append(taken)
    return done


def _message_direction(action: Action) -> tuple[bool, int]:
    """Return a sort key that puts forwards first, by increasing stage, and then backwards, by
    decreasing stage."""
    is_forward = action.kind == FORWARD
    return not is_forward, action.stage if is_forward else -action.stage


def _in_order(table: Schedule) -> Iterator[Action]:
    """Yield all actions of the ranks' lists in one order in which each action comes after its
    dependencies.

    Raises ValueError for a schedule in which ranks wait for each other (a deadlock).
    """
    stages = 1 + max(action.stage for actions in table for action in actions)
    done: set[Action] = set()
    next_indices = [0] * len(table)
    while any(index < len(actions) for index, actions in zip(next_indices, table, strict=True)):
        before = len(done)
        for rank, actions in enumerate(table):
            while next_indices[rank] < len(actions) and done.issuperset(
                dependencies_of(actions[next_indices[rank]], stages)
            ):
                done.add(actions[next_indices[rank]])
                yield actions[next_indices[rank]]
                next_indices[rank] += 1
        if len(done) == before:
            raise ValueError("the ranks of this schedule wait for each other")


def sent(table: Schedule, rank: int) -> tuple[tuple[Action, ...], ...]:
    """Return, for each action of the rank `rank` in order, the messages that the rank has sent
    before and still holds in memory while the action runs. A message is named by the action that
    receives it.

    table  the actions of every rank

    The sender frees a message when it knows that the message has arrived: when the receiver has
    sent back something that it computed after receiving it.
    """
    ranks, last = len(table), max(action.stage for actions in table for action in actions)
    indices = {action: index for actions in table for index, action in enumerate(actions)}
    held: list[Action] = []
    held_messages = []
    for action in table[rank]:
        given = producer_of(action)
        if action.kind != WEIGHTS and given in indices:
            held = [
                waiting
                for waiting in held
                if waiting.stage % ranks != given.stage % ranks or indices[waiting] > indices[given]
            ]
        held_messages.append(tuple(held))
        taken = consumer_of(action)
        if action.kind != WEIGHTS and 0 <= taken.stage <= last:
            held.append(taken)
    return tuple(held_messages)


def in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of micro-batches whose activations a rank holds at once. A
    micro-batch that is in flight in two of the rank's stages counts twice.

    actions  all actions of the rank, in order
    """
    count, most = 0, 0
    actions = list(actions)
    last = WEIGHTS if any(action.kind == WEIGHTS for action in actions) else BACKWARD
    for action in actions:
        count += (action.kind == FORWARD) - (action.kind == last)
        most = max(most, count)
    return most


@dataclass(frozen=True, slots=True)
class ScheduledAction:
    """An action of a rank with its start and its end, in seconds since the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda action: 0.0,
    late: Collection[Action] = (),
) -> list[ScheduledAction]:
    """Simulate a schedule: return all actions, each with its rank, start and end in seconds. An
    action starts when its rank is free and its inputs have arrived.

    schedule  the actions of every rank
    seconds   returns the seconds that an action takes
    transfer  returns the seconds to send an action's output to the next stage. A transfer starts
              when the output is complete and the receiver has requested it. The receiver requests
              the input of an action one action earlier: when it begins the action before it
    late      actions whose input is requested only when the rank is free to begin them

    Raises ValueError for a schedule in which ranks wait for each other (a deadlock).
    """
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    ends: dict[Action, float] = {}
    asked, free = [0.0] * len(schedule), [0.0] * len(schedule)
    scheduled: list[ScheduledAction] = []
    for action in _in_order(schedule):
        rank, start = action.stage % len(schedule), 0.0
        for dependency in dependencies_of(action, stages):
            since = free[rank] if action in late else asked[rank]
            start = max(
                start,
                ends[dependency]
                if dependency.stage == action.stage
                else max(ends[dependency], since) + transfer(dependency),
            )
        start = max(free[rank], start)
        asked[rank] = start
        free[rank] = ends[action] = start + seconds(action)
        scheduled.append(ScheduledAction(rank, action, start, free[rank]))
    return scheduled


def split_evenly(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, as equal as possible. If the numbers
    differ, the first and the last stage get fewer blocks, because they also hold the embedding and
    the output head. Example: 10 blocks in 4 stages are (2, 3, 3, 2)."""
    each, more = divmod(blocks, stages)
    inner = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    return tuple(each + (stage in inner[:more]) for stage in range(stages))


def split_balanced(blocks: list[float], first: float, last: float, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage with which the slowest stage is as fast as
    possible. Every stage has at least one block.

    blocks  seconds of each block
    first   seconds of the code before the blocks, on the first stage
    last    seconds of the code after the blocks, on the last stage
    stages  number of stages

    Example: 10 blocks of 1 s with first = 0.5 and last = 3 are split into 4 stages as (3, 3, 3, 1).
    Source: the linear partition problem, by dynamic programming.
    """
    count = len(blocks)
    sums = np.concatenate(([0.0], np.cumsum(blocks)))
    between = sums[None, :] - sums[:, None]  # seconds of the blocks from a row's number to a column's
    between[np.tril_indices(count + 1)] = np.inf  # an empty stage
    # by the number of blocks in the stages so far: seconds of the slowest of them, and the best split
    slowest = between[0] + first
    splits: dict[int, tuple[int, ...]] = {end: (end,) for end in range(1, count + 1)}
    for stage in range(1, stages):
        seconds = np.maximum(slowest[:, None], between + (last if stage == stages - 1 else 0.0))
        order = sorted(splits, key=lambda end: splits[end])  # of equally good splits, the lexicographically first
        begins = np.array(order)[np.argmin(seconds[order], axis=0)]
        slowest = seconds[begins, np.arange(count + 1)]
        splits = {end: (*splits[begins[end]], int(end - begins[end])) for end in range(stage + 1, count + 1)}
    return splits[count]
