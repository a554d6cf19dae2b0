"""Moves optimizer states, gradients, parameters or saved activations out of the device's memory
into host memory or files on disk. It is for models that do not fit otherwise.

Saves   what the plan names: for an fp32 parameter with Adam, states 8 bytes, gradients 4,
        parameters 4; for activations, all that is saved for backward. `host` is page-locked memory
        of a GPU's host. `disk` is mapped files, whose memory the system can always reclaim.
Costs   copies at the rate of the link or the disk. States are copied to the device and back once
        per step; activations out and in once per micro-batch; gradients out once per micro-batch,
        and in for the update; on a GPU, parameters are copied in for each forward, each backward
        and the update. A GPU computes meanwhile. Saved activations leave while forward runs. They
        return while backward works on those saved later, up to 256 MiB or one tensor ahead of their
        use. While one parameter, or one batch of them, is updated, the data of the next one arrives
        and the results of the previous one leave, so the data of three is on the device. An update
        in backward, and copies from and to a disk, are not overlapped.
When    nothing else fits on one device. Large batches hide it: the bytes copied with states do not
        grow with the batch.
Order   around the forward with its precision, and around blocks that recompute and compile have
        changed; before a pipeline or zero shards what it holds.
Source  Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
        arXiv:2104.07857.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from tightfit._torch.tensors import storage_id
from tightfit.cost.entries import Message
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Buffer, Segment
from tightfit.machine import Machine
from tightfit.models.objective import Batch
from tightfit.parallel.fsdp.planning import (
    low_precision_names,
    sharded_parameters,
    uses_fully_shard,
)
from tightfit.plan import Plan
from tightfit.runtime.offload_store import MIN_OFFLOAD_BYTES, OffloadedGradients, Store, max_prefetch_bytes
from tightfit.runtime.run import Run, UnshardedReduction
from tightfit.target_device import has_own_memory

FIELDS = ("offload", "offload_to", "offload_folder")
VARIANTS = (
    {"offload": ("states",), "offload_to": "disk"},
    {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
    {"offload": ("activations",), "offload_to": "disk"},
)
DISK_BYTES_PER_S = 5e8  # the write rate of a plain SSD; used until it is measured
HOST_BYTES_PER_S = 1e10

Events = tuple[tuple[Buffer, int], ...]


def enabled(plan: Plan) -> bool:
    return bool(plan.offload)


def combinations(device: str) -> tuple[tuple[str, ...], ...]:
    """The combinations of data that may be offloaded together, the smallest first; search tries
    them where nothing else fits.

    device: "cpu" or "cuda".
    """
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
    """Remove the named data from the device's memory, and add the copies that replace it as
    messages.
    """
    on_disk = plan.offload_to == "disk"
    link = machine.host_to_device_bytes_per_s.value if machine.host_to_device_bytes_per_s else HOST_BYTES_PER_S
    rate = DISK_BYTES_PER_S if on_disk else link
    buffer_bytes = float if on_disk else _pinned
    apart, gathers = machine.device == "cuda", uses_fully_shard(plan, machine.device)
    part = 1.0 / (plan.pp * (plan.shards if plan.zero else 1))  # this device's share of the states
    moves: list[tuple[str, float, str, str]] = []  # data, bytes per step, phase, direction
    held: dict[str, float] = {}  # bytes in the store
    updates, parameters, training = ledger.updates, ledger.parameters, ledger.training
    trained = {parameter.name: parameter.bytes for parameter in parameters if parameter.trainable}
    whole, steps = part * sum(trained.values()), ledger.micro_batches
    # bytes copied to the device for each update, and below, those copied back
    comes = dict.fromkeys(updates, 0)
    leaves = dict.fromkeys(updates, 0)
    if "states" in plan.offload:
        size = part * sum(update.state_bytes for update in updates.values())
        moves += [("states", size, "update", way) for way in ("in", "out")]
        # mostly two moments per parameter
        held["states"] = sum(2 * buffer_bytes(part * update.state_bytes / 2) for update in updates.values())
        if apart:  # a CPU updates them where they are mapped
            comes = {name: update.state_bytes for name, update in updates.items()}
            leaves = dict(comes)
        updates = {name: replace(update, state_bytes=0, unpacked_bytes=0) for name, update in updates.items()}
    if "gradients" in plan.offload:
        moves += [("gradients", (2.0 * steps - 1) * whole, "backward", "out"), ("gradients", whole, "update", "in")]
        held["gradients"] = sum(buffer_bytes(part * size) for size in trained.values())
    if "parameters" in plan.offload:
        if apart:
            moves += [("parameters", steps * whole, phase, "in") for phase in ("forward", "backward")]
        moves += [("parameters", whole, "update", way) for way in ("in", "out")]
        held["parameters"] = sum(buffer_bytes(part * size) for size in trained.values())
        if gathers and plan.zero < 3:
            ledger = replace(ledger, sharded_parameters=sharded_parameters(ledger, plan, low_precision_names(ledger)))
        if plan.zero < 3:
            parameters = tuple(replace(p, bytes=0) if p.trainable else p for p in parameters)
    if apart:
        words = [word for word in ("parameters", "gradients") if word in plan.offload]
        comes = {name: size + len(words) * trained.get(name, 0) for name, size in comes.items()}
        if "parameters" in words:
            leaves = {name: size + trained.get(name, 0) for name, size in leaves.items()}
    updates = {name: replace(update, comes=comes[name], leaves=leaves[name]) for name, update in updates.items()}
    if "activations" in plan.offload:
        training, size = _offload_activations(training, ledger.micro_batch, apart, divided=plan.pp > 1)
        moves += [
            ("activations", size * steps / plan.pp, phase, way)
            for phase, way in (("forward", "out"), ("backward", "in"))
        ]
        held["activations"] = size
    waits = set[str]()
    if gathers and plan.shards == 1:  # fully_shard then accumulates gradients without overlap
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
    """Bytes of a page-locked buffer for `size` bytes: torch rounds up to a power of two."""
    return 2.0 ** math.ceil(math.log2(size)) if size >= 1 else 0.0


def _offload_activations(
    training: tuple[Segment, ...], samples: int, apart: bool, divided: bool
) -> tuple[tuple[Segment, ...], float]:
    """The recorded step with offloaded activations, and how many bytes are offloaded.

    Saved buffers are freed at the end of their forward segment, and allocated again before backward
    frees them (on a device that can use them where they are mapped, they are not allocated again).
    divided: the segments may run on several devices.
    """
    saved = {
        buffer
        for segment in training
        if segment.phase == "backward"
        for buffer, sign in segment.timeline.events
        if sign < 0 and buffer.row == "activations" and buffer.size.at(samples) > MIN_OFFLOAD_BYTES
    }
    for segment in training:
        if segment.phase == "backward":  # allocated in backward, as in a recomputation
            saved.difference_update(segment.timeline.allocated)
    size, largest = 0.0, 0.0
    forward: list[Segment] = []
    for segment in training:
        timeline = segment.timeline
        leaving: list[Buffer] = []
        if segment.phase == "forward":
            gone = timeline.freed
            leaving = [buffer for buffer in timeline.allocated if buffer in saved and buffer not in gone]
            sizes = [buffer.size.at(samples) for buffer in leaving]
            size, largest = size + sum(sizes), max(largest, *sizes, 0.0)
        events = (*timeline.events, *((buffer, -1) for buffer in leaving))
        forward.append(replace(segment, timeline=replace(timeline, events=events)))
    backward = [number for number, segment in enumerate(forward) if segment.phase != "forward"]
    stretches = [forward[number].timeline.events for number in backward]
    if not apart:
        found = [tuple(event for event in events if event[0] not in saved) for events in stretches]
    else:
        ahead = _Prefetch(saved, samples, max_prefetch_bytes(largest))
        found = ahead.with_returns(stretches) if not divided else [ahead.with_returns([one])[0] for one in stretches]
    for number, events in zip(backward, found, strict=True):
        forward[number] = replace(forward[number], timeline=replace(forward[number].timeline, events=events))
    return tuple(forward), size


class _Prefetch:
    """Finds when saved activations return to the device during backward.

    Buffers that backward frees one after another were used together. When backward uses a buffer,
    the next ones are copied in, up to `most` bytes or one buffer.
    """

    def __init__(self, saved: set[Buffer], samples: int, most: float) -> None:
        self.saved, self.samples, self.most = saved, samples, most

    def with_returns(self, stretches: list[Events]) -> list[Events]:
        """The events of consecutive stretches of backward, with the returning buffers added."""
        freed = [buffer for events in stretches for buffer, sign in events if sign < 0 and buffer in self.saved]
        # index of the next buffer to return; buffers that returned and are not used yet
        place, ahead = 0, deque[Buffer]()
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
    """Put the named data into the run's store. Parameters on a GPU are gathered from there for each
    forward and backward.
    """
    store = run.store
    assert store is not None
    if "activations" in plan.offload:
        run = replace(run, loss_sum=with_offloaded_activations(run.loss_sum, store, run.model))
    if plan.zero == 3:  # ZeRO puts each device's shards into the store
        return run
    if "parameters" in plan.offload:
        if has_own_memory(run.device):
            # here, because it imports torch's fully_shard, which other plans do not need
            from tightfit.parallel.fsdp.fully_shard import apply_fully_shard

            return apply_fully_shard(run, plan)
        for parameter in run.model.parameters():
            if parameter.requires_grad and not _is_stored(parameter):
                parameter.data = store.put(parameter.data)
                parameter.stored = True  # type: ignore[attr-defined]
    if "gradients" in plan.offload:
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        weights = {
            parameter: store.make_stub(parameter) if has_own_memory(run.device) else parameter for parameter in trained
        }
        run = replace(
            run,
            reduction=OffloadedReduction(OffloadedGradients(weights, store)),
            optimizer_weights=weights if has_own_memory(run.device) else {},
        )
    return run


def _is_stored(parameter: Tensor) -> bool:
    return getattr(parameter, "stored", False)


def with_offloaded_activations(
    loss_sum: Callable[[Batch], Tensor], store: Store, model: nn.Module
) -> Callable[[Batch], Tensor]:
    """`loss_sum` whose saved tensors are moved to the store, except the model's parameters."""

    from tightfit.parallel.fsdp.fully_shard import compute_weights  # here, as in `apply`

    def loss_sum_with_activations_elsewhere(batch: Batch) -> Tensor:
        with store.offload_saved({storage_id(weights) for weights in compute_weights(model)}):
            return loss_sum(batch)

    return loss_sum_with_activations_elsewhere


class OffloadedReduction(UnshardedReduction):
    """The `Reduction` of one device whose gradients are accumulated in the store."""

    def __init__(self, gradients: OffloadedGradients) -> None:
        self.gradients = gradients

    def end(self, last: bool) -> None:
        if last:
            self.gradients.end()
