"""Track live storages by row (parameters, gradients, ...) during a step, on real or fake tensors.

`StorageTracker` is a torch dispatch mode. The dry run uses it on fake tensors, so it can measure
steps that would not fit on this machine. Measurements use it on real tensors. Inside a compiled
region, the mode does not see the operations on real tensors, so `measure/memory.py` measures
compiled runs in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from tightfit._torch.patches import after_resize
from tightfit._torch.tensors import in_backward
from tightfit.models.batches import Batch
from tightfit.models.tensors import tensors_in
from tightfit.planner.tracing.storages import ACCUMULATES, StorageMode, backward_node, storages_of
from tightfit.planner.tracing.working_memory import working_bytes
from tightfit.runtime.run import Run

OTHER_MEMORY = "elsewhere"  # marks storages in another memory (host, disk), which count in no row
ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Take = Callable[[Run], Result]


@dataclass(frozen=True)
class Peak:
    """The live bytes at the instant with the most live bytes.

    total     live bytes of all rows
    rows      live bytes by row, such as "parameters"
    phase     "forward", "backward" or "optimizer"
    timeline  (phase, live bytes) after each allocation and each free
    """

    total: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    timeline: list[tuple[str, int]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _LiveStorage:
    """What the tracker knows of a live storage: the row to which it was assigned last, and its
    bytes."""

    row: str = "temporaries"
    size: int = 0


class StorageTracker(StorageMode[_LiveStorage]):
    """Tracks every storage that operations allocate while the tracker is entered, until the storage
    is freed. Call `peak` afterwards.

    The purpose of a storage is often known only after its allocation. For its whole life, a storage
    therefore counts in the row to which it was assigned last:

    parameters   the model's parameters, and other tensors that `assign` was told to count here
    gradients    tensors that became the .grad of one of `parameters`
    optimizer    optimizer states: `assign` gets them before the step, and again after it, because
                 each update allocates 8-bit and 4-bit states anew
    activations  the batch, and what the forward allocated and saved for backward
    temporaries  all other storages, including recomputed activations

    Example: a matrix product allocates 4 MiB in forward. The storage is a temporary at first. If it
    is alive when the forward ends, the tracker moves it to activations, from its allocation on.

    Phases: forward is the function that `forward` wraps. Autograd tells when backward runs.
    Everything between a backward and the next forward is the optimizer. An update in backward
    counts as backward.

    on_gpu  whether the step runs on a GPU. Then storages in host memory, such as weights that
            fully_shard has offloaded, are not counted
    again   whether the tracker will be entered again. Between two uses, frees are recorded and
            allocations are not
    """

    again = False

    def __init__(self, parameters: Iterable[Tensor], on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._parameters = list(parameters)
        self._without_gradient: list[Tensor] = []  # parameters that the current backward has made no gradient for yet
        self._phase = ""  # before the step
        self._node: int | None = None  # sequence number of the autograd node that runs
        self._made_in_forward: list[int] = []  # ids of storages, of the current forward
        self._events: list[tuple[_LiveStorage, int, str]] = []  # storage, change of its bytes, phase
        self.assign(self._parameters, "parameters")

    def assign(self, tensors: Iterable[Tensor], row: str) -> None:
        """Count the storages of `tensors` in `row`, from their allocation on.

        row  one of ROWS, or OTHER_MEMORY for tensors in host memory or on disk, which are not
             counted
        """
        for tensor in tensors:
            for storage in storages_of(tensor):
                note = self._record(storage)
                note.row = row if note.row != OTHER_MEMORY else OTHER_MEMORY

    def add_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Count these parameters in the row "parameters", and their gradients in "gradients". Call
        it for parameters that did not exist when the tracker was made."""
        more = list(parameters)
        self._parameters += more
        self.assign(more, "parameters")

    def forward(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Wrap `function`, the forward of a micro-batch, and return the wrapped function. Its
        arguments, and the storages that it allocates and does not free, count as activations."""

        def watched(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._assign_gradients(self._parameters)
            self._phase = "forward"
            self._made_in_forward.clear()
            self.assign(tensors_in((args, kwargs)), "activations")
            try:
                return function(*args, **kwargs)
            finally:  # a pipeline stage leaves the forward early, after its last block
                for note in self.notes_of(self._made_in_forward):
                    if note.row != OTHER_MEMORY:
                        note.row = "activations"
                self._made_in_forward.clear()

        return watched

    def mark(self) -> int:
        """Return the number of events (allocations and frees) so far. Pass it to `peak` to find the
        peak after this point."""
        return len(self._events)

    def peak(self, since: int = 0) -> Peak:
        """Return the live bytes, by row, at the instant with the most live bytes.

        since  a number that `mark` returned: only instants after that call are compared; 0: all
               instants
        """
        rows, total, best, timeline = dict.fromkeys(ROWS, 0), 0, Peak(), []
        for number, (note, change, phase) in enumerate(self._events):
            if note.row == OTHER_MEMORY:
                continue
            rows[note.row] += change
            total += change
            if phase and number >= since:
                timeline.append((phase, total))
            if total > best.total and number >= since:
                best = Peak(total, dict(rows), phase, timeline)
        return best

    def __enter__(self) -> Self:
        self._phase = "forward"
        self._resizes = after_resize(self._note_resize)
        self._resizes.__enter__()
        return super().__enter__()

    def _note_resize(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage whose size was changed in place, if the storage is
        tracked."""
        if id(storage) in self._live:
            self._record(storage)

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        self._update_phase()
        for tensor in tensors_in(output):
            for storage in storages_of(tensor):
                self._record(storage)
        if working := working_bytes(func, args):
            note = _LiveStorage(size=working)
            self._events += [(note, working, self._phase), (note, -working, self._phase)]
        return output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(None, None, None)
        self._assign_gradients(self._parameters)
        if not self.again or error[0] is not None:
            self._forget()

    def _forget(self) -> None:
        self._live.clear()  # also drops the weak references
        self._made_in_forward.clear()
        self._parameters.clear()
        self._without_gradient.clear()

    def _update_phase(self) -> None:
        """Find out in which phase (forward, backward or optimizer) the operation ran that just
        ended. Also count the gradients that were set since the operation before it."""
        if in_backward():
            if self._phase != "backward":
                self._phase, self._without_gradient, self._node = "backward", list(self._parameters), None
            number = backward_node()
            if number != self._node or number >= ACCUMULATES:  # no gradient is set within a node
                self._without_gradient = self._assign_gradients(self._without_gradient)
            self._node = number
        elif self._phase == "backward":
            self._phase = "optimizer"
            self._assign_gradients(self._parameters)

    def _assign_gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        """Count the gradients of `parameters` in the row gradients. Return the parameters whose
        .grad is None."""
        without = [parameter for parameter in parameters if parameter.grad is None]
        if len(without) < len(parameters):
            self.assign((p.grad for p in parameters if p.grad is not None), "gradients")
        return without

    def _record(self, storage: torch.UntypedStorage) -> _LiveStorage:
        """Return what is known of a storage. If the storage is new or was resized, first add an
        event: the change of its bytes in the current phase."""
        size = storage.nbytes()
        if id(storage) in self._live:
            note = self._live[id(storage)][0]
        else:
            note = _LiveStorage()
            if self._on_gpu and storage.device.type == "cpu":
                note.row = OTHER_MEMORY
            self.follow(storage, note)
            if self._phase == "forward":
                self._made_in_forward.append(id(storage))
        if size != note.size:
            self._events.append((note, size - note.size, self._phase))
            note.size = size
        return note

    def record_free(self, note: _LiveStorage) -> None:
        self._events.append((note, -note.size, self._phase))


class RunTracker:
    """Tracks the storages of a run while `take` runs steps with it. Afterwards, `peak` returns the
    live bytes at the peak. Fake tensors count like real tensors."""

    def __init__(self, run: Run) -> None:
        weights = [*run.model.parameters(), *run.optimizer_weights.values()]
        self._tracker = StorageTracker(weights, on_gpu=run.device.type == "cuda")
        if run.store is not None:
            self._tracker.assign(run.store.stored_tensors(run.model), OTHER_MEMORY)
        self._tracker.assign(run.model.buffers(), "parameters")

    def take(self, run: Run, micro_batches: list[Batch], take: Take[Result], last: bool = True) -> Result:
        """Call `take(run)` while all storages are tracked, and return its result.

        micro_batches  the micro-batches that are in device memory before the step
        take           function that takes a step with the run that it is given
        last           whether this is the last step to track; the tracker then forgets all storages
        """
        tracker = self._tracker
        tracker.again = not last
        if run.store is not None:
            run.store.note = lambda tensor: tracker.assign([tensor], OTHER_MEMORY)
        tracker.assign(run.model.parameters(), "parameters")  # a pipeline with weight versions replaces them
        tracker.assign(tensors_in(micro_batches), "activations")
        tracker.assign(_states_of(run), "optimizer")
        with tracker:
            result = take(replace(run, loss_sum=tracker.forward(run.loss_sum)))
            tracker.assign(_states_of(run), "optimizer")
        if run.store is not None:
            run.store.note = None
        return result

    def peak(self) -> Peak:
        return self._tracker.peak()


def track_peak(run: Run, micro_batches: list[Batch], take: Take[Result]) -> tuple[Result, Peak]:
    """Call `take(run)` while all storages are tracked. Return (its result, the peak of the live
    storages).

    micro_batches  the micro-batches that are in device memory before the step
    take           function that takes a step with the run that it is given
    """
    tracking = RunTracker(run)
    result = tracking.take(run, micro_batches, take)
    return result, tracking.peak()


def _states_of(run: Run) -> list[Tensor]:
    """Return the tensors of a run that persist from one update to the next: the optimizer states,
    and the errors that compressed gradients add to the next step's gradients (error feedback)."""
    return [*state_tensors(run.optimizer), *(run.reduction.states() if run.reduction is not None else [])]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors in the optimizer's states."""
    return tensors_in(list(optimizer.state.values()))
