"""Live storages, by row: what a dispatch mode sees of a step's memory, on real tensors or fake ones.

A step that no machine here could hold is measured on fake tensors the same way. Nothing is seen operation by
operation inside a compiled region: see `memory.py` for what is done there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS = ("parameters", "gradients", "optimizer", "activations", "temporaries")


@dataclass
class Peak:
    """Bytes at the instant of the largest total, by row, and the phase it fell in (forward, backward, optimizer).

    timeline   (phase, live bytes) after each operation
    """

    total: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    timeline: list[tuple[str, int]] = field(default_factory=list)


class StorageTracker(TorchDispatchMode):
    """Follows every storage that operations make, until it is freed, and keeps the peak by row.

    What forward made is an activation as long as it lives; what backward makes (recomputed activations too) is a
    temporary until it is found to be a parameter's gradient; what the optimizer makes is a temporary until it is
    found among its states. `optimizer` phases are told by `optimizing`; backward is known to autograd.
    """

    def __init__(self, parameters: Iterable[Tensor], states: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = Peak()
        self.optimizing = False
        self.current = 0
        self._live: dict[int, tuple[str, int]] = {}
        self._by_row = dict.fromkeys(ROWS, 0)
        self._parameters = list(parameters)
        for tensor in self._parameters:
            self.move(tensor, "parameters")
        for tensor in states:
            self.move(tensor, "optimizer")
        self._note()

    @property
    def phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "optimizer" if self.optimizing else "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        row = "activations" if self.phase == "forward" else "temporaries"
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                for part in inner_tensors(leaf):
                    self._see(part.untyped_storage(), row)
        self._note()
        return output

    def move(self, tensor: Tensor, row: str) -> None:
        """Count the storage behind `tensor` under `row` from now on."""
        for part in inner_tensors(tensor):
            storage = part.untyped_storage()
            old, size = self._live.get(storage._cdata, (None, 0))
            if old is None:
                self._see(storage, row)
            elif old != row:
                self._by_row[old] -= size
                self._by_row[row] += size
                self._live[storage._cdata] = (row, size)

    def _see(self, storage: torch.UntypedStorage, row: str) -> None:
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = (row, size)
        self._by_row[row] += size
        self.current += size
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        row, size = self._live.pop(key, ("temporaries", 0))
        self._by_row[row] -= size
        self.current -= size

    def _note(self) -> None:
        if self.current > self.peak.total:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self.move(parameter.grad, "gradients")
            self.peak.total, self.peak.rows, self.peak.phase = self.current, dict(self._by_row), self.phase
        self.peak.timeline.append((self.phase, self.current))


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's bytes: itself, or the parts of a quantised or wrapped one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, torch.nn.Parameter):
        yield tensor
        return
    for name in flatten()[0]:
        yield from inner_tensors(getattr(tensor, name))
