"""Ledger: what a step costs, as rows of buffers (bytes) and operations (FLOPs, bytes moved), in the order they happen.

A ledger is a program: passages through parts of the model, forward and backward, each with the buffers that come and
go in it and the operations that it runs. Sizes are linear in the samples of a micro-batch, so one ledger stands for
any of them. Each method's `cost` edits it; the peak is found by playing it through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tightfit.entries import Gathered, Message, Parameter, Peak, Sent, Stage, Update, Visit
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.program import (
    Buffer,
    Linear,
    Operation,
    Passage,
    Played,
    Timeline,
    accumulated,
    edited,
    handed_over,
    play,
    updated_at_once,
)
from tightfit.timetable import FORWARD, WEIGHTS

ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "allocator", "runtime")


@dataclass(frozen=True)
class Ledger:
    """What one device holds and does in one optimizer step.

    micro_batch     samples of one micro-batch; micro_batches: how many make a step
    training        the program of one micro-batch: forward, then backward
    inference       gives the program of an evaluation's micro-batch: it is traced when it is first asked for
    parameters      the model's, by name; updates: by name, what the optimizer does to each
    dataflow        gives what a forward computes from what (`models/dataflow.py`), for what cuts the model
    try_segments    raises InputError for a model whose blocks cannot be computed again in segments
    batch_bytes     of one sample, as it lies in device memory (or in the host's, on a CPU)
    batches_ahead   micro-batches that lie in device memory beside the one at work
    keeps_memory    whether freed memory is kept by the process and used again; mapped_from: else, bytes from which a block is
                    mapped by itself, and fetched anew each time; None where the allocator learns that (see `planner/heap.py`)
    keeps_step      whether what forward and backward need is kept from step to step, for them alone, as CUDA graphs do
    fixed           bytes that live through the whole step beside the model: by row
    phases          bytes at the largest instant of what comes before the first step, by name, without the fixed rows
    whole_step      operations once for each step that are of no passage and no update, such as clipping
    seconds         once for each step, by what they are for; ahead: those of them that pass beside the step's work
    sample_s        seconds that it takes to prepare one sample, as far as it was tried
    host            bytes in the host's memory that are not this device's, by what they are for; passing: what is there
                    before the first step, or between steps
    disk            bytes of files, by what they are for
    saving          bytes of a checkpoint's files that each process holds in host memory while it writes them
    takes_gradients  whether each gradient leaves for other memory when it is complete
    device          of a pipeline, which one this is the ledger of; stage: what it does
    summed_bytes    that it takes to bring gradients together when backward has ended
    sent            how gradients leave for other devices; gathered: how parameters come from them; messages: all of it,
                    in a step
    """

    micro_batch: int
    micro_batches: int
    training: tuple[Passage, ...]
    inference: Callable[[], tuple[Passage, ...]]
    parameters: tuple[Parameter, ...]
    blocks: int = 0
    dataflow: Callable[[], Any] | None = None
    try_segments: Callable[[], None] | None = None
    updates: dict[str, Update] = field(default_factory=dict)
    whole_step: tuple[Operation, ...] = ()
    batch_bytes: float = 0.0
    batches_ahead: int = 0
    update_in_backward: bool = False
    foreach: bool = False
    host_batch: bool = False
    keeps_memory: bool = False
    keeps_step: bool = False
    mapped_from: float | None = None
    fixed: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    sample_s: float = 0.0
    host: dict[str, float] = field(default_factory=dict)
    passing: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    saving: float = 0.0
    compile_s: float = 0.0
    summed_bytes: float = 0.0
    sent: Sent | None = None
    gathered: Gathered | None = None
    messages: tuple[Message, ...] = ()
    takes_gradients: bool = False
    device: int = 0
    stage: Stage | None = None

    def row_bytes(self) -> dict[str, float]:
        """What lives from step to step, by row."""
        rows = dict.fromkeys(ROWS, 0.0)
        rows["parameters"] = sum(parameter.bytes for parameter in self.parameters)
        if self.stage is not None:
            rows["parameters"] += self.stage.versions * self.gradient_bytes()
        rows["optimizer"] = sum(update.state_bytes for update in self.updates.values())
        for row, size in self.fixed.items():
            rows[row] += size
        return rows

    def gradient_bytes(self) -> float:
        """Of the gradients that this device keeps."""
        return sum(parameter.bytes for parameter in self.parameters if parameter.trainable)

    def instants(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """(phase, part, bytes by row) at the largest instant of each passage of a step, in order, and between them.

        The first micro-batch finds no gradients; in later ones a gradient is added to the one that is there.
        """
        if not self.keeps_step:
            yield from self._instants()
            return
        pool = self._pool_bytes()
        for phase, part, rows in self._instants():
            inside = sum(rows[row] for row in _OF_A_GRAPH)
            beside = rows if phase in _IN_A_GRAPH else _sum(rows, {"temporaries": max(pool - inside, 0.0)})
            yield phase, part, beside

    def _pool_bytes(self) -> float:
        """What CUDA graphs keep from step to step: as much as forward and backward ever need beside parameters and states."""
        steps = (rows for phase, _, rows in self._instants() if phase in _IN_A_GRAPH)
        return max(sum(rows[row] for row in _OF_A_GRAPH) for rows in steps)

    def _instants(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        rows = self.row_bytes()
        there = self.micro_batches if self.host_batch else 1 + self.batches_ahead
        in_memory = self.batch_bytes * self.micro_batch * there
        rows["activations"] += in_memory
        if self.gathered is not None:
            rows["communication"] += self.gathered.rest
        coming = self.sent.coming if self.sent is not None and self.sent.stays else 0.0
        yield "forward", "start", {**rows, "communication": rows["communication"] + coming}
        known: dict[Timeline, Played] = {}
        whole, arrived = self.gradient_bytes(), 0.0
        for visit in self.visits():
            sends, done = visit.sends, 0.0
            for passage in visit.passages:
                if passage.timeline not in known:
                    known[passage.timeline] = play(passage.timeline, self.micro_batch)
                played = known[passage.timeline]
                travelling: dict[str, float] = {"gradients": arrived}
                then, made = played.made
                if sends and self.sent is not None:
                    travelling = self._travelling(done + then, whole, arrived)
                if self.gathered is not None:
                    parts = max(arrived, done * self.gathered.widened / self.gathered.devices)
                    travelling = self._gathered(passage, parts, reducing=done > 0 or self.stage is not None)
                yield passage.phase, passage.part, _sum(_sum(rows, played.largest), travelling)
                rows = _sum(rows, played.net)
                if sends and self.sent is not None and made:
                    if visit.later and not self.sent.always:  # the sums of earlier micro-batches move into the buckets
                        rows = _sum(rows, {"gradients": -made})
                    done += made
                    last = {"temporaries": played.gradient}
                    yield passage.phase, passage.part, _sum(_sum(rows, self._travelling(done, whole, arrived)), last)
                if self.gathered is not None and passage.block is not None:  # of a block this device's part is left
                    if made:
                        summed = self.gathered.reduced * (1 + 1 / self.gathered.devices)
                        yield passage.phase, "reduce", _sum_all(rows, {"communication": summed, "gradients": parts})
                    done += made
                    rows = _sum(rows, {"gradients": -made})
            if sends and self.sent is not None:
                arrived = self.sent.during(whole, whole)["gradients"]
            if self.gathered is not None and visit.ends:
                rest = rows["gradients"]
                yield (
                    "backward",
                    "reduce",
                    _sum_all(
                        rows,
                        {
                            "gradients": max(arrived, done * self.gathered.widened / self.gathered.devices),
                            "communication": rest,
                        },
                    ),
                )
                rows = _sum(rows, {"gradients": -rest})
                arrived = whole
            if visit.updates:
                yield "optimizer", "update", {**rows, "temporaries": rows["temporaries"] + self._update_bytes()}
                rows, arrived = {**rows, "gradients": 0.0}, 0.0
        if self.gathered is not None:
            rows = _sum(rows, {"communication": -self.gathered.rest})
        rows = _sum(rows, {"gradients": arrived})
        if self.summed_bytes:
            yield "backward", "reduce", {**rows, "temporaries": rows["temporaries"] + self.summed_bytes}
        yield "optimizer", "update", {**rows, "temporaries": rows["temporaries"] + self._update_bytes()}
        if self.sent is not None and self.sent.coming:
            without = {**rows, "gradients": 0.0}
            yield "optimizer", "gather", _sum_all(without, {"communication": self.sent.coming})

    def _travelling(self, done: float, whole: float, arrived: float) -> dict[str, float]:
        """What is on its way when `done` bytes of gradients are made, beside what earlier micro-batches left."""
        assert self.sent is not None
        found = self.sent.during(done, whole)
        if arrived and self.sent.devices > 1:  # a part is there beside the sum that it is added to
            found["communication"] += 2 * self.sent.bucket / self.sent.devices
        return {**found, "gradients": max(found["gradients"], arrived)}

    def _gathered(self, passage: Passage, arrived: float, reducing: bool) -> dict[str, float]:
        """What is there beside a passage's own buffers: its parameters, and in backward those that come next, the gradients
        on their way, where an earlier block has made some, and the parts that arrived."""
        assert self.gathered is not None
        there = 0.0
        if passage.block is not None:
            there = self.gathered.block
            if passage.phase == "backward" or self.gathered.ahead:
                there += self.gathered.coming
            if passage.phase == "backward" and reducing:
                there += self.gathered.reduced
        return {"communication": there, "gradients": arrived}

    def model_flops(self) -> float:
        """FLOPs of a step as throughput is compared by (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a forward of all
        samples, attention counted over all pairs even under a causal mask, and twice as much for its gradients;
        recomputation is not counted."""
        forward = sum(
            operation.flops.at(self.micro_batch) * operation.count.at(self.micro_batch)
            for passage in self.inference()
            for operation in passage.timeline.operations
        )
        devices = len(self.stage.table) if self.stage is not None else 1
        return 3 * forward * self.micro_batches / devices

    def visits(self) -> Iterator[Visit]:
        """The stretches of a step, in order: of equal micro-batches the first two, or all that a pipeline has under way."""
        sent = self.sent
        if self.stage is None:
            programs = self.passes(self.training, self.micro_batches)
            for number, program in enumerate(programs):
                yield Visit(program, sent is not None and (sent.always or number == len(programs) - 1), number > 0)
            return
        stage = self.stage
        backward = {piece: self.passes(part.backward, 2) for piece, part in stage.parts.items()}
        weights = {piece: self.passes(part.weights, 2) for piece, part in stage.parts.items()}
        seen: set[tuple[str, int]] = set()
        for number, action in enumerate(stage.table[stage.device]):
            kind, piece, place = action.kind, action.chunk, action.micro_batch % self.micro_batches
            come, go = _messages(stage.beside(number), "forward" if kind == FORWARD else "backward")
            if kind == FORWARD:
                yield Visit((come, *stage.parts[piece].forward, go), False, False, ends=False)
                continue
            last, completes = place == self.micro_batches - 1, kind == WEIGHTS or not stage.parts[piece].weights
            later = place > 0 if stage.continuous else (kind, piece) in seen
            passages = (weights if kind == WEIGHTS else backward)[piece][int(later)]
            sends = sent is not None and (sent.always or last) and completes
            updates = last and completes and stage.continuous
            yield Visit((come, *passages, go), sends, later, ends=completes, updates=updates)
            seen.add((kind, piece))

    def passes(self, training: tuple[Passage, ...], micro_batches: int) -> list[tuple[Passage, ...]]:
        """The programs of a step's first micro-batch and, where there are more, of a later one, as this plan runs them.

        Passages that share a timeline share what becomes of it.
        """
        edits: list[Callable[[Timeline], Timeline]] = []
        if self.update_in_backward:
            needed = {name: float(update.transient_bytes + update.comes) for name, update in self.updates.items()}
            edits.append(lambda timeline: updated_at_once(timeline, needed))
        if self.takes_gradients:
            edits.append(handed_over)
        first = edited(training, edits)
        if self.takes_gradients:
            return [first] * min(micro_batches, 2)
        if self.gathered is not None:
            return [first] * min(micro_batches, 2)
        if self.sent is not None and (self.sent.always or micro_batches == 1):
            first = edited(first, [handed_over])
            return [first] * min(micro_batches, 2)
        return [first] if micro_batches == 1 else [first, edited(first, [accumulated])]

    def evaluation(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """As `instants`, of one micro-batch of an evaluation."""
        rows = self.row_bytes()
        rows["activations"] += self.batch_bytes * self.micro_batch * (1 + self.batches_ahead)
        if self.keeps_step:
            rows["temporaries"] += self._pool_bytes()
        for passage in self.inference():
            played = play(passage.timeline, self.micro_batch)
            yield "evaluation", passage.part, _sum(rows, played.largest)
            rows = _sum(rows, played.net)

    def peak(self) -> Peak:
        """The largest instant of a step; of an evaluation, where it needs its memory beside what CUDA graphs keep."""
        return _largest((*self.instants(), *self.evaluation()) if self.keeps_step else self.instants())

    def peaks(self) -> dict[str, float]:
        """Device bytes at the largest instant of each phase, in the order in which the phases come."""
        found: dict[str, float] = {}
        for phase, _, rows in (*self.instants(), *self.evaluation()):
            found[phase] = max(found.get(phase, 0.0), sum(rows.values()))
        return {**found, **self.outside()}

    def outside(self) -> dict[str, float]:
        """Device bytes at the largest instant of each phase outside the steps: before the first, and of a checkpoint, for
        which what devices divide is brought together in host memory, a few files of it at a time."""
        rows = self.row_bytes()
        fixed = sum(self.fixed.values())
        checkpoint = sum(rows.values()) + (self.saving if self.host_batch else 0.0)
        return {**{name: size + fixed for name, size in self.phases.items()}, "checkpoint": checkpoint}

    def _update_bytes(self) -> float:
        if self.update_in_backward or not self.updates:
            return 0.0
        largest, left, leaving = 0, dict[int, int](), 0
        order = sorted(self.updates.values(), key=lambda update: update.group)
        order = [update for update in order if update.operations or not update.elements]  # others are part of a batch
        for update, following in zip(order, [*order[1:], None], strict=True):
            beside = leaving + update.comes + (following.comes if following is not None else 0)
            largest = max(largest, update.transient_bytes + left.get(update.group, 0) + beside)
            left[update.group], leaving = update.left_bytes, update.leaves
        together = sum(update.foreach_bytes for update in self.updates.values())
        return max(largest, together) if self.foreach else largest

    def operations(self) -> Iterator[tuple[str, str, Operation, float]]:
        """(phase, part, operation, how often) of a whole step; sizes at this ledger's micro-batch."""
        for passage in self.training:
            for operation in passage.timeline.operations:
                yield passage.phase, passage.part, operation, operation.count.at(self.micro_batch) * self.micro_batches
        for operation in self.whole_step:
            yield "optimizer", "whole step", operation, operation.count.at(1)
        for update in self.updates.values():
            for operation in update.operations:
                yield "optimizer", "update", operation, operation.count.at(1)


_IN_A_GRAPH = ("forward", "backward")
_OF_A_GRAPH = ("activations", "temporaries", "gradients")  # rows that a graph allocates from its own pool


def _messages(size: Linear, phase: str) -> tuple[Passage, Passage]:
    """Messages of such bytes together, which come before an action and go after it."""
    buffer = Buffer(size, "temporaries", "message")
    come, go = (Timeline(((buffer, sign),)) for sign in (1, -1))
    return Passage("messages", phase, come), Passage("messages", phase, go)


def _sum(rows: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {**rows, **{row: rows[row] + size for row, size in more.items() if size}}


def _sum_all(rows: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {row: rows.get(row, 0.0) + more.get(row, 0.0) for row in {**rows, **more}}


def _largest(instants: Iterable[tuple[str, str, dict[str, float]]]) -> Peak:
    best = Peak()
    for phase, part, rows in instants:
        total = sum(rows.values())
        if total > best.total:
            best = Peak(total, rows, phase, part)
    return best


def traced(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The cost of a room that the profile applies before it traces: what it changes is in the ledger already."""
    return ledger
