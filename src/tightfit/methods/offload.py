"""Offload: optimizer states, gradients, parameters or saved activations lie outside the device's memory.

Saves   what is named: of an fp32 parameter with Adam, states 8 bytes, gradients 4, parameters 4; activations all that is saved.
        host: page-locked memory beside a GPU. disk: files that are mapped, and take no memory that cannot be taken back.
Costs   copies at the link's rate or the disk's: states once to the device and once back for each step, activations once out and
        once in for each micro-batch, gradients out for each and in for the update; parameters to a GPU for each forward, each
        backward and the update. A GPU goes on meanwhile: what forward saved leaves beside it, and comes back while it is at what
        was saved later, up to 256 MiB or one tensor ahead of its use. While it updates one parameter, or one batch of them, what
        the next one needs comes, and what the one before has changed leaves: three are on the device. An update in backward, and
        copies from and to a disk, are waited for.
When    nothing else fits on one device. Large batches hide it: what moves with states does not grow with them.
Order   around the forward as the precision runs it, and around blocks that recompute and compile have changed; before a
        pipeline or zero divide what it holds.
Source  Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from tightfit.entries import Message
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.run import Run, Undivided
from tightfit.methods.shards import comes_and_goes, gathered_of, narrow_names, sharded, working_weights
from tightfit.methods.stores import SMALL, Gradients, Store, is_apart, most_ahead
from tightfit.models.objective import Batch
from tightfit.plan import Plan
from tightfit.program import Buffer, Passage

FIELDS = ("offload", "offload_to", "offload_folder")
VARIANTS = (
    {"offload": ("states",), "offload_to": "disk"},
    {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
    {"offload": ("activations",), "offload_to": "disk"},
)
DISK_BYTES_PER_S = 5e8  # until somebody measures it: what a plain SSD writes
HOST_BYTES_PER_S = 1e10

Events = tuple[tuple[Buffer, int], ...]


def wanted(plan: Plan) -> bool:
    return bool(plan.offload)


def combinations(device: str) -> tuple[tuple[str, ...], ...]:
    """What may be offloaded together, the least first: search tries them where nothing else fits."""
    return _COMBINATIONS[device]


_COMBINATIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "cuda": (
        ("states",),
        ("states", "activations"),
        ("states", "gradients"),
        ("states", "gradients", "parameters"),
        ("states", "gradients", "parameters", "activations"),
    ),
    "cpu": (("states",), ("states", "gradients", "parameters"), ("states", "gradients", "parameters", "activations")),
}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """What is named counts no more where the device's memory is counted; what moves instead is a message."""
    on_disk = plan.offload_to == "disk"
    link = machine.host_to_device_bytes_per_s.value if machine.host_to_device_bytes_per_s else HOST_BYTES_PER_S
    rate = DISK_BYTES_PER_S if on_disk else link
    room = float if on_disk else _pinned
    apart, gathers = machine.device == "cuda", comes_and_goes(plan, machine.device)
    part = 1.0 / (plan.pp * (plan.shards if plan.zero else 1))  # of the states, on this device
    moves: list[tuple[str, float, str, str]] = []  # what, bytes in a step, beside which work, which way
    held: dict[str, float] = {}  # where it is put
    updates, parameters, training = ledger.updates, ledger.parameters, ledger.training
    trained = {parameter.name: parameter.bytes for parameter in parameters if parameter.trainable}
    whole, steps = part * sum(trained.values()), ledger.micro_batches
    comes = dict.fromkeys(updates, 0)  # bytes that come to the device for each update, and that go back
    leaves = dict.fromkeys(updates, 0)
    if "states" in plan.offload:
        size = part * sum(update.state_bytes for update in updates.values())
        moves += [("states", size, "update", way) for way in ("in", "out")]
        held["states"] = sum(
            2 * room(part * update.state_bytes / 2) for update in updates.values()
        )  # moments, mostly two
        if apart:  # a processor updates them where they are mapped
            comes = {name: update.state_bytes for name, update in updates.items()}
            leaves = dict(comes)
        updates = {name: replace(update, state_bytes=0) for name, update in updates.items()}
    if "gradients" in plan.offload:
        moves += [("gradients", (2.0 * steps - 1) * whole, "backward", "out"), ("gradients", whole, "update", "in")]
        held["gradients"] = sum(room(part * size) for size in trained.values())
    if "parameters" in plan.offload:
        if apart:
            moves += [("parameters", steps * whole, phase, "in") for phase in ("forward", "backward")]
        moves += [("parameters", whole, "update", way) for way in ("in", "out")]
        held["parameters"] = sum(room(part * size) for size in trained.values())
        if gathers and plan.zero < 3:
            ledger = replace(ledger, gathered=gathered_of(ledger, plan, narrow_names(ledger)))
        if plan.zero < 3:
            parameters = tuple(replace(p, bytes=0) if p.trainable else p for p in parameters)
    if apart:
        words = [word for word in ("parameters", "gradients") if word in plan.offload]
        comes = {name: size + len(words) * trained.get(name, 0) for name, size in comes.items()}
        if "parameters" in words:
            leaves = {name: size + trained.get(name, 0) for name, size in leaves.items()}
    updates = {name: replace(update, comes=comes[name], leaves=leaves[name]) for name, update in updates.items()}
    if "activations" in plan.offload:
        training, size = _left_out(training, ledger.micro_batch, apart, divided=plan.pp > 1)
        moves += [
            ("activations", size * steps / plan.pp, phase, way)
            for phase, way in (("forward", "out"), ("backward", "in"))
        ]
        held["activations"] = size
    waits = set[str]()
    if gathers and plan.shards == 1:  # then fully_shard takes gradients over while nothing else goes on
        waits.add("gradients backward")
    if plan.update_in_backward:
        waits |= {f"{name} update" for name, *_ in moves}
    messages = [
        Message(name, size, rate, apart and not on_disk and f"{name} {phase}" not in waits, during=phase, way=way)
        for name, size, phase, way in moves
        if size
    ]
    elsewhere = {f"offloaded {name}": size for name, size in held.items()}
    return replace(
        ledger,
        host=ledger.host if on_disk else {**ledger.host, **elsewhere},
        disk={**ledger.disk, **elsewhere} if on_disk else ledger.disk,
        updates=updates,
        parameters=parameters,
        training=training,
        messages=(*ledger.messages, *messages),
        takes_gradients="gradients" in plan.offload and not gathers,
    )


def _pinned(size: float) -> float:
    """What a page-locked buffer takes: torch rounds it up to a power of two."""
    return 2.0 ** math.ceil(math.log2(size)) if size >= 1 else 0.0


def _left_out(
    training: tuple[Passage, ...], samples: int, apart: bool, divided: bool
) -> tuple[tuple[Passage, ...], float]:
    """The program in which what forward saves goes at the end of its passage, and comes back before backward frees it (where it
    is not used as it is mapped); and how many bytes that is. divided: passages may come to lie on several devices."""
    saved = {
        buffer
        for passage in training
        if passage.phase == "backward"
        for buffer, sign in passage.timeline.events
        if sign < 0 and buffer.row == "activations" and buffer.size.at(samples) > SMALL
    }
    for passage in training:
        if passage.phase == "backward":  # what it makes itself, as where it recomputes
            saved.difference_update(passage.timeline.born)
    size, largest = 0.0, 0.0
    forward: list[Passage] = []
    for passage in training:
        timeline = passage.timeline
        leaving: list[Buffer] = []
        if passage.phase == "forward":
            gone = timeline.gone
            leaving = [buffer for buffer in timeline.born if buffer in saved and buffer not in gone]
            sizes = [buffer.size.at(samples) for buffer in leaving]
            size, largest = size + sum(sizes), max(largest, *sizes, 0.0)
        events = (*timeline.events, *((buffer, -1) for buffer in leaving))
        forward.append(replace(passage, timeline=replace(timeline, events=events)))
    backward = [number for number, passage in enumerate(forward) if passage.phase != "forward"]
    stretches = [forward[number].timeline.events for number in backward]
    if not apart:
        found = [tuple(event for event in events if event[0] not in saved) for events in stretches]
    else:
        ahead = _Ahead(saved, samples, most_ahead(largest))
        found = ahead.coming_back(stretches) if not divided else [ahead.coming_back([one])[0] for one in stretches]
    for number, events in zip(backward, found, strict=True):
        forward[number] = replace(forward[number], timeline=replace(forward[number].timeline, events=events))
    return tuple(forward), size


class _Ahead:
    """When what forward saved comes back in the events of backward: what backward frees one after another it has used together,
    and when it uses a buffer the next ones come, up to `most` bytes or one."""

    def __init__(self, saved: set[Buffer], samples: int, most: float) -> None:
        self.saved, self.samples, self.most = saved, samples, most

    def coming_back(self, stretches: list[Events]) -> list[Events]:
        """The events of stretches that follow each other."""
        freed = [buffer for events in stretches for buffer, sign in events if sign < 0 and buffer in self.saved]
        place, ahead = 0, deque[Buffer]()  # of the next one that comes; what has come and is not used yet
        found = []
        for events in stretches:
            edited: list[tuple[Buffer, int]] = []
            for frees, group in itertools.groupby(events, key=lambda event: event[1] < 0):
                stretch = list(group)
                used = [buffer for buffer, _ in stretch if frees and buffer in self.saved]
                for buffer in used:
                    if ahead:
                        ahead.popleft()
                    else:
                        edited.append((buffer, 1))
                        place += 1
                    while place < len(freed) and self._fits(ahead, freed[place]):
                        edited.append((freed[place], 1))
                        ahead.append(freed[place])
                        place += 1
                edited += stretch
            found.append(tuple(edited))
        return found

    def _fits(self, ahead: deque[Buffer], one: Buffer) -> bool:
        return not ahead or sum(buffer.size.at(self.samples) for buffer in (*ahead, one)) <= self.most


def apply(run: Run, plan: Plan) -> Run:
    store = run.store
    assert store is not None
    if "activations" in plan.offload:
        run = replace(run, loss_sum=saving(run.loss_sum, store, run.model))
    if plan.zero == 3:  # which puts each device's rows there
        return run
    if "parameters" in plan.offload:
        if is_apart(run.device):
            return sharded(run, plan)
        for parameter in run.model.parameters():
            if parameter.requires_grad and not _is_stored(parameter):
                parameter.data = store.put(parameter.data)
                parameter.stored = True  # type: ignore[attr-defined]
    if "gradients" in plan.offload:
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        weights = {parameter: store.stand_in(parameter) if is_apart(run.device) else parameter for parameter in trained}
        run = replace(run, reduction=Taken(Gradients(weights, store)), weights=weights if is_apart(run.device) else {})
    return run


def _is_stored(parameter: Tensor) -> bool:
    return getattr(parameter, "stored", False)


def saving(loss_sum: Callable[[Batch], Tensor], store: Store, model: nn.Module) -> Callable[[Batch], Tensor]:
    """`loss_sum` whose saved tensors wait in the store, but for the model's parameters."""

    def loss_sum_with_activations_elsewhere(batch: Batch) -> Tensor:
        with store.saving({weights.untyped_storage()._cdata for weights in working_weights(model)}):
            return loss_sum(batch)

    return loss_sum_with_activations_elsewhere


class Taken(Undivided):
    """The `Reduction` of a device whose gradients are summed in the store."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def end(self, last: bool) -> None:
        if last:
            self.gradients.end()
