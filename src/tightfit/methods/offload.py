"""Moves optimizer states, gradients, parameters or saved activations out of the device's memory
into host memory or files on disk. It is for models that do not fit otherwise.

Saves   the data that `offload` names. Per fp32 parameter with Adam, states take 8 bytes, gradients
        4 and parameters 4; activations are all tensors that are saved for backward. `host` is
        page-locked memory of the GPU's host. `disk` is memory-mapped files: when memory is short,
        the system writes their pages to disk.
Costs   copies at the rate of the link or the disk. States are copied to the device and back once
        per step. Activations are copied out and in once per micro-batch. Gradients are copied out
        once per micro-batch, and in for the update. On a GPU, parameters are copied in for each
        forward, each backward and the update. These copies overlap with the GPU's work. Activations
        are copied out while forward runs, and prefetched during backward, at most 256 MiB or one
        tensor ahead. During the update of one parameter, or of one batch of parameters, the data of
        the next one is copied in and the results of the previous one are copied out; so the device
        holds the data of three. Copies for an update in backward, and from and to a disk, do not
        overlap.
When    nothing else fits on one device. Large batches hide the copies of states, whose bytes do not
        grow with the batch.
Order   after `precision`, `recompute` and `compile`, because it wraps the forward and the blocks
        that they have changed; before `pipeline` and `zero`, which then shard the offloaded data.
Source  Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
        arXiv:2104.07857.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from tightfit._torch.tensors import storage_id
from tightfit.cost.entries import Message, Parameter, Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.pipeline_schedule import in_flight, make_schedule
from tightfit.cost.recorded_step import Buffer, Segment
from tightfit.cost.remembered import remembered
from tightfit.machine import Machine
from tightfit.models.batches import Batch
from tightfit.parallel.fsdp.planning import (
    low_precision_names,
    sharded_parameters,
    uses_fully_shard,
)
from tightfit.plan import Plan
from tightfit.runtime.offload_store import (
    Store,
    is_stored,
    mark_stored,
)
from tightfit.runtime.offloaded_activations import MIN_OFFLOAD_BYTES, max_prefetch_bytes, offload_saved
from tightfit.runtime.offloaded_gradients import OffloadedGradients
from tightfit.runtime.run import Run, UnshardedReduction
from tightfit.target_device import has_own_memory

FIELDS = ("offload", "offload_to", "offload_folder")
VARIANTS = (
    {"offload": ("states",), "offload_to": "disk"},
    {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
    {"offload": ("activations",), "offload_to": "disk"},
)
DISK_BYTES_PER_S = 5e8  # the write rate of a common SSD, assumed for all disks
HOST_BYTES_PER_S = 1e10

Events = tuple[tuple[Buffer, int], ...]


def enabled(plan: Plan) -> bool:
    return bool(plan.offload)


def combinations(device: str) -> tuple[tuple[str, ...], ...]:
    """Return the values of `offload` that search tries if nothing else fits, such as ("states",).
    Values that offload less data come first.

    device  the kind of device: "cpu" or "cuda"
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
    """Return the ledger (the predicted memory and time of a step) without the offloaded data in the
    device's memory, and with the copies between the device and host memory or disk.
    """
    store = _StoreModel(plan, machine)
    for name in plan.offload:
        offloaded = _OFFLOADS[name](ledger, store)
        messages = [store.message(name, copy) for copy in offloaded.copies if copy.bytes]
        stored = {f"offloaded {name}": offloaded.stored}
        ledger = replace(
            offloaded.ledger,
            messages=(*ledger.messages, *messages),
            host=ledger.host if store.on_disk else {**ledger.host, **stored},
            disk={**ledger.disk, **stored} if store.on_disk else ledger.disk,
        )
    return ledger


@dataclass(frozen=True)
class _Copy:
    """The copies of one kind of offloaded data in a step, in one direction.

    bytes   bytes that are copied in a step
    during  the part of the step in which they are copied: forward, backward or update
    way     "in" (to the device) or "out" (to the store, which is host memory or files)
    """

    bytes: float
    during: str
    way: str


@dataclass(frozen=True)
class _Offloaded:
    """The effect of offloading one kind of data, such as the optimizer states.

    ledger  the ledger without this data in the device's memory
    stored  bytes of this data in the store (host memory or files)
    copies  the copies between the device and the store in a step
    """

    ledger: Ledger
    stored: float
    copies: list[_Copy]


class _StoreModel:
    """Describes the store of a plan's offloaded data (host memory or files), and how a device uses
    it.

    on_disk      True if the data is in files, False if it is in host memory
    is_copied    whether the device copies the data to its own memory to use it, as a GPU does. A
                 CPU uses the store's memory directly
    gathers      whether fully_shard copies parameters to the device for each block
    share        this device's share of all parameters, gradients and states, from 0 to 1
    bytes_per_s  bandwidth of the link to the host, or of the disk
    """

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = plan
        self.on_disk = plan.offload_to == "disk"
        self.is_copied = machine.device == "cuda"
        self.gathers = uses_fully_shard(plan, machine.device)
        self.share = 1.0 / (plan.pp * (plan.shards if plan.zero else 1))
        link = machine.host_to_device_bytes_per_s
        host_rate = link.value if link else HOST_BYTES_PER_S
        self.bytes_per_s = DISK_BYTES_PER_S if self.on_disk else host_rate

    def stored_bytes(self, size: float) -> float:
        """Return the bytes that a tensor of `size` bytes takes in the store. In page-locked host
        memory, this is the next power of two, because torch rounds the size up; on disk, it is
        `size`.
        """
        if self.on_disk:
            return size
        return 2.0 ** math.ceil(math.log2(size)) if size >= 1 else 0.0

    def message(self, name: str, copy: _Copy) -> Message:
        overlaps = self.is_copied and not self.on_disk
        if name == "gradients" and copy.during == "backward" and self.gathers and self.plan.shards == 1:
            overlaps = False  # on one device, fully_shard waits for each gradient that it adds
        if copy.during == "update" and self.plan.update_in_backward:
            overlaps = False
        return Message(name, copy.bytes, self.bytes_per_s, overlaps, during=copy.during, way=copy.way)


def _offload_states(ledger: Ledger, store: _StoreModel) -> _Offloaded:
    updates, sizes = _without_states(ledger.updates)
    moved = store.share * sum(sizes.values())
    # most states are two moments per parameter, and its master weights
    count = 3 if store.plan.master_weights else 2
    stored = sum(count * store.stored_bytes(store.share * size / count) for size in sizes.values())
    ledger = replace(ledger, updates=updates)
    if store.is_copied:
        ledger = _copied_for_updates(ledger, sizes, returns=True)
    return _Offloaded(ledger, stored, [_Copy(moved, "update", way) for way in ("in", "out")])


def _offload_gradients(ledger: Ledger, store: _StoreModel) -> _Offloaded:
    sizes = _gradient_bytes(ledger.parameters)
    moved = store.share * sum(sizes.values())
    stored = sum(store.stored_bytes(store.share * size) for size in sizes.values())
    # each micro-batch but the first also copies the accumulated gradients of the earlier ones
    copies = [_Copy((2.0 * ledger.micro_batches - 1) * moved, "backward", "out"), _Copy(moved, "update", "in")]
    if store.is_copied:
        ledger = _copied_for_updates(ledger, sizes, returns=False)
    return _Offloaded(replace(ledger, offloads_gradients=not store.gathers), stored, copies)


def _offload_parameters(ledger: Ledger, store: _StoreModel) -> _Offloaded:
    sizes, plan = _trainable_bytes(ledger.parameters), store.plan
    moved = store.share * sum(sizes.values())
    stored = sum(store.stored_bytes(store.share * size) for size in sizes.values())
    copies = [_Copy(moved, "update", way) for way in ("in", "out")]
    if store.is_copied:
        gathered = ledger.micro_batches * moved
        copies = [*(_Copy(gathered, phase, "in") for phase in ("forward", "backward")), *copies]
        ledger = _copied_for_updates(ledger, sizes, returns=True)
    if plan.zero < 3:  # with zero: 3, `zero` shards the parameters and corrects their bytes
        if store.gathers:
            ledger = replace(ledger, sharded_parameters=sharded_parameters(ledger, plan, low_precision_names(ledger)))
        ledger = replace(ledger, parameters=_without_trainable(ledger.parameters))
    return _Offloaded(ledger, stored, copies)


def _offload_activations(ledger: Ledger, store: _StoreModel) -> _Offloaded:
    """Return the effect of offloading the activations that forward saves for backward.

    The recorded step is changed. It now frees a saved buffer at the end of the segment of forward
    (such as one block) that allocates it, and allocates it again before backward uses it. A CPU
    does not allocate it again, because it reads it from the store.
    """
    samples, plan = ledger.micro_batch, store.plan
    saved = _saved_for_backward(ledger.training, samples)
    leaving = [_left_by_forward(segment, saved) for segment in ledger.training]
    sizes = [[buffer.size.at(samples) for buffer in buffers] for buffers in leaving]
    training = [_then_freed(*one) for one in zip(ledger.training, leaving, strict=True)]
    backward = [number for number, segment in enumerate(training) if segment.phase != "forward"]
    stretches = [training[number].timeline.events for number in backward]
    if store.is_copied:
        prefetch = _Prefetch(saved, samples, max_prefetch_bytes(max(itertools.chain(*sizes), default=0.0)))
        compiled = [_is_compiled(training[number], plan) for number in backward]
        segments = list(zip(stretches, compiled, strict=True))
        # the segments of a pipeline may run on several devices
        parts = [segments] if plan.pp == 1 else [[segment] for segment in segments]
        stretches = [events for part in parts for events in prefetch.with_returns(part)]
    else:
        stretches = [tuple(event for event in events if event[0] not in saved) for events in stretches]
    for number, events in zip(backward, stretches, strict=True):
        training[number] = _with_events(training[number], events)
    total = sum(map(sum, sizes), 0.0)
    moved = total * ledger.micro_batches / plan.pp
    copies = [_Copy(moved, "forward", "out"), _Copy(moved, "backward", "in")]
    stored = _share_in_flight(plan, ledger.micro_batches) * sum(map(store.stored_bytes, itertools.chain(*sizes)))
    return _Offloaded(replace(ledger, training=tuple(training)), stored, copies)


def _share_in_flight(plan: Plan, micro_batches: int) -> float:
    """Return how many times the saved activations of one micro-batch, of all stages together, the first
    rank of a pipeline holds at once: 1 without a pipeline."""
    if plan.pp == 1:
        return 1.0
    actions = make_schedule(plan.schedule, plan.pp, plan.virtual_stages, micro_batches)[0]
    return in_flight(actions) / (plan.pp * plan.virtual_stages)


_OFFLOADS: dict[str, Callable[[Ledger, _StoreModel], _Offloaded]] = {
    "states": _offload_states,
    "gradients": _offload_gradients,
    "parameters": _offload_parameters,
    "activations": _offload_activations,
}


@remembered(16)
def _without_states(updates: dict[str, Update]) -> tuple[dict[str, Update], dict[str, int]]:
    """Return (updates without states, bytes of the states), both by name of the parameter."""
    sizes = {name: update.state_bytes for name, update in updates.items()}
    return {name: replace(update, state_bytes=0, fp32_state_bytes=0) for name, update in updates.items()}, sizes


@remembered(16)
def _gradient_bytes(parameters: tuple[Parameter, ...]) -> dict[str, int]:
    return {parameter.name: parameter.gradient_bytes for parameter in parameters if parameter.trainable}


@remembered(16)
def _trainable_bytes(parameters: tuple[Parameter, ...]) -> dict[str, int]:
    return {parameter.name: parameter.bytes for parameter in parameters if parameter.trainable}


def _copied_for_updates(ledger: Ledger, sizes: dict[str, int], returns: bool) -> Ledger:
    """Return the ledger with copies of offloaded data to the device for each parameter's update.

    sizes    for each parameter, by name, the bytes that are copied to the device for its update
    returns  whether the update changes the data, so that the data is also copied back
    """
    return replace(ledger, updates=_with_copies(ledger.updates, sizes, returns))


@remembered(16)
def _without_trainable(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the parameters, without the bytes of those that are trained."""
    return tuple(replace(parameter, bytes=0) if parameter.trainable else parameter for parameter in parameters)


@remembered(32)
def _with_copies(updates: dict[str, Update], sizes: dict[str, int], returns: bool) -> dict[str, Update]:
    found = {}
    for name, update in updates.items():
        size = sizes.get(name, 0)
        found[name] = replace(
            update, upload_bytes=update.upload_bytes + size, download_bytes=update.download_bytes + size * returns
        )
    return found


def _saved_for_backward(training: tuple[Segment, ...], samples: int) -> set[Buffer]:
    """Return the activations that are offloaded: buffers that forward allocates and backward frees,
    and that are larger than MIN_OFFLOAD_BYTES.

    training  the segments of the recorded step
    samples   number of samples in a micro-batch
    """
    saved: set[Buffer] = set()
    again: set[Buffer] = set()  # allocated in backward, as in a recomputation
    for segment in training:
        if segment.phase == "backward":
            again.update(segment.timeline.allocated)
            saved.update(buffer for buffer in segment.timeline.freed if buffer.row == "activations")
    return {buffer for buffer in saved - again if buffer.size.at(samples) > MIN_OFFLOAD_BYTES}


def _left_by_forward(segment: Segment, saved: set[Buffer]) -> list[Buffer]:
    """Return those buffers of `saved` that this segment of the recorded step allocates and does not
    free. For a segment of backward, the list is empty.
    """
    if segment.phase != "forward":
        return []
    freed = segment.timeline.freed
    return [buffer for buffer in segment.timeline.allocated if buffer in saved and buffer not in freed]


def _then_freed(segment: Segment, buffers: list[Buffer]) -> Segment:
    """Return a copy of the segment that frees `buffers` at its end."""
    return _with_events(segment, (*segment.timeline.events, *((buffer, -1) for buffer in buffers)))


def _with_events(segment: Segment, events: Events) -> Segment:
    return replace(segment, timeline=replace(segment.timeline, events=events))


def _is_compiled(segment: Segment, plan: Plan) -> bool:
    """Return whether a segment of the recorded step is a compiled region. Its backward is a single
    function, which asks for all saved tensors before it begins."""
    return plan.compile == "model" or (plan.compile == "block" and segment.part == "block")


class _Prefetch:
    """Predicts when offloaded activations are copied back to the device during backward.

    It assumes that a buffer is used right before backward frees it, and that buffers that are freed
    without an allocation in between are used together. A compiled segment uses all of its buffers
    when it begins. When backward uses a buffer, the buffers that are freed next are prefetched.

    saved    the offloaded buffers
    samples  number of samples in a micro-batch
    most     largest number of bytes that are prefetched at a time; a single larger buffer is
             prefetched nevertheless
    """

    def __init__(self, saved: set[Buffer], samples: int, most: float) -> None:
        self.saved, self.samples, self.most = saved, samples, most

    def with_returns(self, stretches: list[tuple[Events, bool]]) -> list[Events]:
        """Return the events of consecutive segments of backward, with an allocation added for each
        offloaded buffer, at the place where it is copied back.

        stretches  for each segment, its events in order, and whether it is compiled. (buffer, 1)
                   allocates a buffer, and (buffer, -1) frees it
        """
        freed = [buffer for events, _ in stretches for buffer, sign in events if sign < 0 and buffer in self.saved]
        # next_index: index of the next buffer to prefetch; ahead: buffers prefetched and not used yet
        next_index, ahead = 0, deque[Buffer]()
        found = []
        for events, compiled in stretches:
            edited: list[tuple[Buffer, int]] = []
            for stretch in [list(events)] if compiled else _stretches(events):
                used = [buffer for buffer, sign in stretch if sign < 0 and buffer in self.saved]
                for buffer in used:
                    if ahead:
                        ahead.popleft()
                    else:
                        edited.append((buffer, 1))
                        next_index += 1
                    while next_index < len(freed) and self._fits(ahead, freed[next_index]):
                        edited.append((freed[next_index], 1))
                        ahead.append(freed[next_index])
                        next_index += 1
                edited += stretch
            found.append(tuple(edited))
        return found

    def _fits(self, ahead: deque[Buffer], one: Buffer) -> bool:
        return not ahead or sum(buffer.size.at(self.samples) for buffer in (*ahead, one)) <= self.most


def _stretches(events: Events) -> Iterator[list[tuple[Buffer, int]]]:
    """Yield the events in order, in lists that contain either only frees or no frees."""
    for _, group in itertools.groupby(events, key=lambda event: event[1] < 0):
        yield list(group)


def apply(run: Run, plan: Plan) -> Run:
    """Return the run set up to keep parameters, gradients and activations in the run's store (host
    memory or files), as far as the plan's field `offload` names them.

    On a GPU, parameters are copied from the store for each block's forward and backward. With
    ZeRO-3, `zero` offloads parameters and gradients. `optimizer_states` offloads the states.
    """
    store = run.store
    assert store is not None
    if "activations" in plan.offload:
        run = replace(run, loss_sum=with_offloaded_activations(run.loss_sum, store, run.model))
    if plan.zero == 3:  # ZeRO puts each device's shards into the store
        return run
    if "parameters" in plan.offload:
        if has_own_memory(run.device):
            # imported here, because other plans do not need torch's fully_shard
            from tightfit.parallel.fsdp.fully_shard import apply_fully_shard

            return apply_fully_shard(run, plan)
        for parameter in run.model.parameters():
            if parameter.requires_grad and not is_stored(parameter):
                parameter.data = store.put(parameter.data)
                mark_stored(parameter)
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


def with_offloaded_activations(
    loss_sum: Callable[[Batch], Tensor], store: Store, model: nn.Module
) -> Callable[[Batch], Tensor]:
    """Return a loss function that calls `loss_sum` (batch -> sum of the losses). It moves the
    tensors that forward saves for backward to the store, except the model's parameters.
    """

    from tightfit.parallel.fsdp.fully_shard import compute_weights  # imported here, as in `apply`

    def loss_sum_with_activations_elsewhere(batch: Batch) -> Tensor:
        with offload_saved(store, {storage_id(weights) for weights in compute_weights(model)}):
            return loss_sum(batch)

    return loss_sum_with_activations_elsewhere


class OffloadedReduction(UnshardedReduction):
    """Accumulates the gradients of one device in the store (host memory or files). `end`, which
    is called after each micro-batch, completes them after the last one. It implements the interface
    `Reduction` (see `runtime/run.py`)."""

    def __init__(self, gradients: OffloadedGradients) -> None:
        self.gradients = gradients

    def end(self, last: bool) -> None:
        if last:
            self.gradients.end()
