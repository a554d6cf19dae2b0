"""Timetables: which device of a pipeline does what in which order. One table, read by the engine, which runs it, and by the
planner, which plays it through.

A model of `devices x chunks` chunks lies on `devices` devices: chunk c on device c mod devices. Each device has a list of
actions: the forward of a micro-batch through a chunk, its backward, or where backward is split, the weights' part of it.

Source  GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B: Narayanan et al. 2019 (PipeDream), arXiv:1806.03377, and 2021,
        arXiv:2006.09503 (flush); interleaved: Narayanan et al. 2021, arXiv:2104.04473; zero bubble (ZB-H1): Qi et al. 2023,
        arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True, slots=True)
class Action:
    """kind: F, B or W; chunk: of the model, from 0; micro_batch: of the step, from 0."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Timetable = tuple[tuple[Action, ...], ...]  # by device


@cache
def timetable(schedule: str, devices: int, chunks: int, micro_batches: int) -> Timetable:
    """Every device's actions in one step (of pipedream, in several), in order. chunks: on each device."""
    if schedule == "interleaved":
        padded = -(-micro_batches // devices) * devices
        whole = tuple(_interleaved(device, devices, chunks, padded) for device in range(devices))
        return tuple(tuple(action for action in actions if action.micro_batch < micro_batches) for actions in whole)
    if schedule == "pipedream":
        return tuple(_steps_of(device, devices, micro_batches) for device in range(devices))
    if schedule == "zero-bubble":
        return _zero_bubble(devices, micro_batches)
    make = {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_forward_one_backward}[schedule]
    return tuple(make(device, devices, micro_batches) for device in range(devices))


def _naive(device: int, devices: int, count: int) -> tuple[Action, ...]:
    """One micro-batch after another, each through all devices and back: one of them works at a time."""
    return tuple(Action(kind, device, number) for number in range(count) for kind in (FORWARD, BACKWARD))


def _gpipe(device: int, devices: int, count: int) -> tuple[Action, ...]:
    return tuple(Action(kind, device, number) for kind in (FORWARD, BACKWARD) for number in range(count))


def _one_forward_one_backward(device: int, devices: int, count: int) -> tuple[Action, ...]:
    """As many forwards as devices come after this one, then backwards and forwards in turn: at most as many activations."""
    ahead = min(devices - device - 1, count)
    forwards = [Action(FORWARD, device, number) for number in range(count)]
    backwards = [Action(BACKWARD, device, number) for number in range(count)]
    return _in_turn(forwards, backwards, ahead)


def _steps_of(device: int, devices: int, count: int) -> tuple[Action, ...]:
    """PipeDream: 1F1B of whole steps, `count` micro-batches each; as many steps as show how it goes on."""
    return tuple(
        Action(action.kind, device, action.micro_batch * count + number)
        for action in _one_forward_one_backward(device, devices, 2 * devices)
        for number in range(count)
    )


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    found = forwards[:ahead]
    for number, forward in enumerate(forwards[ahead:]):
        found += [forward, backwards[number]]
    return (*found, *backwards[len(forwards) - ahead :])


def _interleaved(device: int, devices: int, chunks: int, count: int) -> tuple[Action, ...]:
    """Groups of as many micro-batches as devices go through a device's chunks in turn. `count`: a multiple of devices."""
    total = count * chunks
    ahead = min((devices - device - 1) * 2 + (chunks - 1) * devices, total)

    def action(kind: str, place: int) -> Action:
        group, inside = divmod(place, devices * chunks)
        turn = inside // devices
        own = turn if kind == FORWARD else chunks - 1 - turn
        return Action(kind, own * devices + device, group * devices + inside % devices)

    forwards = [action(FORWARD, place) for place in range(total)]
    backwards = [action(BACKWARD, place) for place in range(total)]
    return _in_turn(forwards, backwards, ahead)


def _zero_bubble(devices: int, count: int) -> Timetable:
    """1F1B whose waiting is filled with weights' gradients that earlier backwards left: who is free does a backward that can
    be done, else a forward (of no more micro-batches at once than 1F1B's first device), else weights."""
    done: dict[Action, int] = {}
    tables: list[list[Action]] = [[] for _ in range(devices)]
    counts = [dict.fromkeys((FORWARD, BACKWARD, WEIGHTS), 0) for _ in range(devices)]
    moment = 0
    while any(counted[WEIGHTS] < count for counted in counts):
        for device, counted in enumerate(counts):
            for kind in (BACKWARD, FORWARD, WEIGHTS):
                action = Action(kind, device, counted[kind])
                waits = needs(action, devices)
                if kind == FORWARD and counted[FORWARD] - counted[WEIGHTS] >= devices:
                    continue
                if counted[kind] < count and all(done.get(other, moment) < moment for other in waits):
                    tables[device].append(action)
                    done[action] = moment
                    counted[kind] += 1
                    break
        moment += 1
    return tuple(map(tuple, tables))


def needs(action: Action, chunks: int) -> list[Action]:
    """What has to be done before an action. chunks: of the whole model."""
    kind, chunk, number = action.kind, action.chunk, action.micro_batch
    if kind == FORWARD:
        return [Action(FORWARD, chunk - 1, number)] if chunk else []
    if kind == BACKWARD:
        after = [Action(BACKWARD, chunk + 1, number)] if chunk < chunks - 1 else []
        return [Action(FORWARD, chunk, number), *after]
    return [Action(BACKWARD, chunk, number)]


def taken_by(action: Action) -> Action:
    """The action that begins with what this one hands on; a backward that is the first of its row hands on nothing."""
    return Action(action.kind, action.chunk + (1 if action.kind == FORWARD else -1), action.micro_batch)


def given_by(action: Action) -> Action:
    """The action that hands on what this one begins with."""
    return Action(action.kind, action.chunk - (1 if action.kind == FORWARD else -1), action.micro_batch)


@cache
def coming(
    schedule: str, devices: int, chunks: int, micro_batches: int, device: int, stops: bool
) -> tuple[Action | None, ...]:
    """For each action of a device, in the order of `timetable`, the action after it whose message the device asks for before it
    begins with this one: double buffering. None where that message

    - does not exist: weights' part of a backward needs none, nor does what begins the row;
    - belongs to PipeDream's next step: an update lies between, and its samples are not known yet;
    - is one of `late`, where a device `stops`: a GPU does amid an action, until all that it was asked to receive is there, when
      memory is freed or a kernel is loaded.

    On each line (from one device to the next, or back) messages are asked for in the order in which they are sent: NCCL and gloo
    match the two by their order alone.
    Source  overlapped p2p communication of Megatron-LM: Narayanan et al. 2021, arXiv:2104.04473.
    """
    last, waits = devices * chunks - 1, late(schedule, devices, chunks, micro_batches) if stops else frozenset()
    found: list[Action | None] = []
    for here, after in pairwise(timetable(schedule, devices, chunks, micro_batches)[device]):
        is_sent = after.kind != WEIGHTS and 0 <= given_by(after).chunk <= last
        is_update = schedule == "pipedream" and here.kind == BACKWARD and (here.micro_batch + 1) % micro_batches == 0
        found.append(after if is_sent and not is_update and after not in waits else None)
    return (*found, None)


@cache
def late(schedule: str, devices: int, chunks: int, micro_batches: int) -> frozenset[Action]:
    """The actions whose messages a device that may stop asks for when they begin, not before.

    Where two devices ask ahead for what the other one makes meanwhile, and both stop, they wait for ever: in 1F1B one does a forward
    for the other's next action, and that one a backward for its own. So all actions have a place in one order, and a device asks
    ahead only for what is made before its own action in this order. Then nobody waits in a circle. PipeDream's devices are steps
    apart, and wait for nothing that is made meanwhile.
    """
    if schedule == "pipedream":
        return frozenset()
    table, places = (
        timetable(schedule, devices, chunks, micro_batches),
        _places(schedule, devices, chunks, micro_batches),
    )
    found = set()
    for actions in table:
        for here, after in pairwise(actions):
            given = given_by(after)
            if after.kind != WEIGHTS and given in places and places[given] > places[here]:
                found.add(after)
    return frozenset(found)


def _places(schedule: str, devices: int, chunks: int, micro_batches: int) -> dict[Action, int]:
    """Each action's place in one order of all of a step's: as they run where all take as long. At one time forwards come first,
    from the first device on, then backwards, from the last device on: the way of their messages.

    As far as that can be, an action comes after the receiver has come to what its device sent before: a device that stops waits
    for its sends, too.
    """
    table = timetable(schedule, devices, chunks, micro_batches)
    own = {action: place for actions in table for place, action in enumerate(actions)}
    done, at = dict[Action, int](), [0] * devices
    sending: list[list[Action]] = [[] for _ in table]  # by the action that takes it
    while len(done) < len(own):
        ready = []
        for device, actions in enumerate(table):
            if at[device] < len(actions) and all(
                other in done for other in needs(actions[at[device]], devices * chunks)
            ):
                ready.append(actions[at[device]])
            sending[device] = [one for one in sending[device] if at[one.chunk % devices] < own[one]]
        free = [action for action in ready if not sending[action.chunk % devices]] or ready
        assert free, "the devices of this timetable wait for each other"
        for action in sorted(free, key=_along):
            done[action] = len(done)
            at[action.chunk % devices] += 1
            if (taken := taken_by(action)) in own and action.kind != WEIGHTS:
                sending[action.chunk % devices].append(taken)
    return done


def _along(action: Action) -> tuple[bool, int]:
    """In the way of messages."""
    is_forward = action.kind == FORWARD
    return not is_forward, action.chunk if is_forward else -action.chunk


def _in_order(table: Timetable) -> Iterator[Action]:
    """All actions, each after those that it needs. Raises ValueError for a table in which devices wait for each other."""
    chunks = 1 + max(action.chunk for actions in table for action in actions)
    done: set[Action] = set()
    places = [0] * len(table)
    while any(place < len(actions) for place, actions in zip(places, table, strict=True)):
        before = len(done)
        for device, actions in enumerate(table):
            while places[device] < len(actions) and done.issuperset(needs(actions[places[device]], chunks)):
                done.add(actions[places[device]])
                yield actions[places[device]]
                places[device] += 1
        if len(done) == before:
            raise ValueError("the devices of this timetable wait for each other")


def sent(table: Timetable, device: int) -> tuple[tuple[Action, ...], ...]:
    """For each action of a device, which messages that it sent lie in its memory beside what the action itself works with, each
    by the action that takes it. A message stays until it is known to have arrived: until the device that takes it has sent one
    back that it made later."""
    devices, last = len(table), max(action.chunk for actions in table for action in actions)
    places = {action: place for actions in table for place, action in enumerate(actions)}
    there: list[Action] = []
    found = []
    for action in table[device]:
        given = given_by(action)
        if action.kind != WEIGHTS and given in places:
            there = [
                one for one in there if one.chunk % devices != given.chunk % devices or places[one] > places[given]
            ]
        found.append(tuple(there))
        taken = taken_by(action)
        if action.kind != WEIGHTS and 0 <= taken.chunk <= last:
            there.append(taken)
    return tuple(found)


def in_flight(actions: Iterable[Action]) -> int:
    """The most micro-batches, counted by chunk, whose activations a device holds at once."""
    there, most = 0, 0
    actions = list(actions)
    last = WEIGHTS if any(action.kind == WEIGHTS for action in actions) else BACKWARD
    for action in actions:
        there += (action.kind == FORWARD) - (action.kind == last)
        most = max(most, there)
    return most


@dataclass(frozen=True, slots=True)
class Slot:
    """An action of a device, from its start to its end, in seconds from the step's begin."""

    device: int
    action: Action
    start: float
    end: float


def play(
    table: Timetable,
    seconds: Callable[[Action], float],
    between: Callable[[Action], float] = lambda action: 0.0,
    late: Collection[Action] = (),
) -> list[Slot]:
    """When each action runs.

    seconds  of an action; between: of what it hands to the next device, which is on its way once it is made and was asked for:
             when the action began that comes before the one that takes it (see `coming`)
    late     actions whose message is asked for when they could begin themselves
    Raises ValueError for a table in which devices wait for each other.
    """
    chunks = 1 + max(action.chunk for actions in table for action in actions)
    ends: dict[Action, float] = {}
    asked, free = [0.0] * len(table), [0.0] * len(table)
    found: list[Slot] = []
    for action in _in_order(table):
        device, start = action.chunk % len(table), 0.0
        for other in needs(action, chunks):
            since = free[device] if action in late else asked[device]
            start = max(start, ends[other] if other.chunk == action.chunk else max(ends[other], since) + between(other))
        start = max(free[device], start)
        asked[device] = start
        free[device] = ends[action] = start + seconds(action)
        found.append(Slot(device, action, start, free[device]))
    return found


def split_evenly(blocks: int, chunks: int) -> tuple[int, ...]:
    """How many blocks each chunk has, as equal as can be; the first and the last, which have more to do, the fewer."""
    each, more = divmod(blocks, chunks)
    inner = sorted(range(chunks), key=lambda chunk: (chunk in (0, chunks - 1), chunk))
    return tuple(each + (chunk in inner[:more]) for chunk in range(chunks))


def split_balanced(blocks: list[float], first: float, last: float, chunks: int) -> tuple[int, ...]:
    """How many blocks each chunk has, so that the slowest chunk is as fast as can be.

    blocks  seconds of each block; first, last: of what comes before them, and after, on the first and the last chunk
    Each chunk has a block at least. Source: the linear partition problem, by dynamic programming.
    """
    count = len(blocks)
    sums = [0.0]
    for block in blocks:
        sums.append(sums[-1] + block)

    def cost(chunk: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (first if chunk == 0 else 0.0) + (last if chunk == chunks - 1 else 0.0)

    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0, 0, end), (end,)) for end in range(1, count + 1)}
    for chunk in range(1, chunks):
        best = {
            end: min(
                (max(best[begin][0], cost(chunk, begin, end)), (*best[begin][1], end - begin))
                for begin in best
                if begin < end
            )
            for end in range(chunk + 1, count + 1)
        }
    return best[count][1]
