"""Live storages, by row: what a dispatch mode sees of a step's memory, on real tensors or fake ones.

A step that no machine here could hold is measured on fake tensors the same way. Nothing is seen operation by
operation inside a compiled region: see `measure/memory.py` for what is done there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from tightfit.methods.run import Run
from tightfit.models.objective import Batch

ELSEWHERE = "elsewhere"  # of what lies in another memory, and is no row
ACCUMULATES = 2**63  # sequence numbers from here on are of nodes that accumulate gradients, and belong to no operation
ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Take = Callable[[Run], Result]


@dataclass(frozen=True)
class Peak:
    """Bytes at the instant of the largest total, by row, and the phase it fell in (forward, backward, optimizer).

    timeline   (phase, live bytes) after each storage that came or went
    """

    total: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    timeline: list[tuple[str, int]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Seen:
    """One storage: its row, as far as it is known by now, its size, and a reference that says when it is freed."""

    row: str
    size: int
    reference: weakref.ref[torch.UntypedStorage]


class StorageTracker(TorchDispatchMode):
    """Follows every storage that operations make, until it is freed; `peak` says afterwards what was alive when.

    What a storage is for is often known only after it was made, so each is counted where it is found to belong in the
    end, for the whole of its life:

    parameters    what `assign` was told, as are the batch, the states and whatever else lives before the step
    gradients     what became the .grad of one of `parameters`
    optimizer     what `assign` was told, when the step is over too: narrow states are made anew by each update
    activations   the batch, and what forward made and left for backward
    temporaries   the rest, recomputed activations among it

    Phases are those that are seen: forward is the function wrapped by `forward`, backward is known to autograd, and
    what comes between a backward and the next forward is the optimizer's. A weight updated in backward is of backward.

    again  whether it will be entered again: what is freed meanwhile is seen, and what is made is not
    """

    again = False

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._awaited: list[Tensor] = []  # parameters whose gradient the backward under way has not made yet
        self._phase = ""  # before the step
        self._node: int | None = None  # of the backward under way, the sequence number of the node that computes
        self._live: dict[int, _Seen] = {}  # by id of the storage
        self._made: list[_Seen] = []  # by the forward under way
        self._events: list[tuple[_Seen, int, str]] = []  # storage, change of its bytes, phase
        self.assign(self._parameters, "parameters")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """On fake tensors a compiled region runs as the compiler's stand-in, whose buffers are seen."""
        return True

    def assign(self, tensors: Iterable[Tensor], row: str) -> None:
        """Count the storages behind `tensors` under `row`."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                seen = self._see(storage)
                seen.row = row if seen.row != ELSEWHERE else ELSEWHERE

    def forward(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """`function` as the forward of a micro-batch: what it takes, and what it leaves alive, are activations."""

        def watched(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._find_gradients(self._parameters)
            self._phase = "forward"
            self._made.clear()
            self.assign((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), "activations")
            try:
                return function(*args, **kwargs)
            finally:  # a pipeline leaves a forward behind its last block
                for seen in self._made:
                    if seen.reference() is not None and seen.row != ELSEWHERE:
                        seen.row = "activations"
                self._made.clear()

        return watched

    def peak(self) -> Peak:
        """The instant of the largest total. What was assigned last is where a storage counts."""
        rows, total, best, timeline = dict.fromkeys(ROWS, 0), 0, Peak(), []
        for seen, change, phase in self._events:
            if seen.row == ELSEWHERE:
                continue
            rows[seen.row] += change
            total += change
            if phase:
                timeline.append((phase, total))
            if total > best.total:
                best = Peak(total, dict(rows), phase, timeline)
        return best

    def __enter__(self) -> Self:
        self._phase = "forward"
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._seeing_sizes()  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def _seeing_sizes(self) -> Callable[[torch.UntypedStorage, int], None]:
        """UntypedStorage.resize_, by which fully_shard frees gathered parameters: no operation that a mode would see."""

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if id(storage) in self._live:
                self._see(storage)

        return resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)  # a question that tensors without values are asked all the time
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its parts come by one by one
        output = func(*args, **(kwargs or {}))
        self._enter_phase()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                for storage in storages_of(leaf):
                    self._see(storage)
        return output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._find_gradients(self._parameters)
        if not self.again or error[0] is not None:
            self._forget()

    def _forget(self) -> None:
        self._live.clear()  # with its references: a tracker keeps nothing alive
        self._made.clear()
        self._parameters.clear()
        self._awaited.clear()

    def _enter_phase(self) -> None:
        """See which phase an operation is of, and which gradients have come since the last one."""
        if torch._C._current_graph_task_id() != -1:
            if self._phase != "backward":
                self._phase, self._awaited, self._node = "backward", list(self._parameters), None
            node = torch._C._current_autograd_node()
            number = node._sequence_nr() if node is not None else ACCUMULATES
            if number != self._node or number >= ACCUMULATES:  # within one node no gradient comes
                self._awaited = self._find_gradients(self._awaited)
            self._node = number
        elif self._phase == "backward":
            self._phase = "optimizer"
            self._find_gradients(self._parameters)

    def _find_gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        """Assign the gradients that are there; returns the parameters that have none."""
        without = [parameter for parameter in parameters if parameter.grad is None]
        if len(without) < len(parameters):
            self.assign((p.grad for p in parameters if p.grad is not None), "gradients")
        return without

    def _see(self, storage: torch.UntypedStorage) -> _Seen:
        """Its record; a storage that is new, or has another size than before, is an event."""
        size, seen = storage.nbytes(), self._live.get(id(storage))
        if seen is None:
            seen = _Seen("temporaries", 0, weakref.ref(storage, partial(self._free, id(storage))))
            self._live[id(storage)] = seen
            if self._phase == "forward":
                self._made.append(seen)
        if size != seen.size:
            self._events.append((seen, size - seen.size, self._phase))
            seen.size = size
        return seen

    def _free(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        seen = self._live.pop(key, None)
        if seen is not None:
            self._events.append((seen, -seen.size, self._phase))


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's bytes: its own, or those of the parts of a wrapped or sparse one."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in map(partial(getattr, tensor), tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from storages_of(tensor._indices())
        yield from storages_of(tensor._values())


class Tracking:
    """The storages of a run while it takes steps: `take` looks into one, `peak` says what was alive when. Fake tensors are counted
    as real ones."""

    def __init__(self, run: Run) -> None:
        self._tracker = StorageTracker([*run.model.parameters(), *run.weights.values()])
        if run.store is not None:
            self._tracker.assign(run.store.there(run.model), ELSEWHERE)
        self._tracker.assign(run.model.buffers(), "parameters")

    def take(self, run: Run, micro_batches: list[Batch], take: Take[Result], last: bool = True) -> Result:
        """What `take` makes of `run`. micro_batches: those that are in the device's memory before it begins; last: whether no other
        step follows."""
        tracker = self._tracker
        tracker.again = not last
        if run.store is not None:
            run.store.note = lambda tensor: tracker.assign([tensor], ELSEWHERE)
        tracker.assign(run.model.parameters(), "parameters")  # of a pipeline that keeps versions, they move
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


def track(run: Run, micro_batches: list[Batch], take: Take[Result]) -> tuple[Result, Peak]:
    """What `take` makes of `run`, and the peak of the storages alive meanwhile."""
    tracking = Tracking(run)
    result = tracking.take(run, micro_batches, take)
    return result, tracking.peak()


def _states_of(run: Run) -> list[Tensor]:
    """What an update leaves for the next one: the optimizer's, and of gradients that are compressed what is still to be sent."""
    return [*state_tensors(run.optimizer), *(run.reduction.states() if run.reduction is not None else [])]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    storages = {id(storage): storage for tensor in tensors for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def tensors_in(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch, or of several."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor among the optimizer's states."""
    return tensors_in(list(optimizer.state.values()))
