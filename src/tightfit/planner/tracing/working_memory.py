"""Find the memory that tightfit's own operations allocate and free while they run. A dispatch mode sees such
an operation as a whole, with its inputs and outputs only."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tightfit.methods.attention import attend_in_blocks, backward_in_blocks
from tightfit.models.tensors import tensors_in
from tightfit.planner.tracing.storages import StorageMode, storages_of, tensor_bytes

_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.tightfit.blocked_attention.default: attend_in_blocks,
    torch.ops.tightfit.blocked_attention_backward.default: backward_in_blocks,
}


class _LiveBytes(StorageMode[int]):
    """Adds up the bytes of the storages that operations have allocated and that are still alive.

    peak  the largest sum so far
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        existing = set(map(id, (storage for tensor in tensors_in((args, kwargs)) for storage in storages_of(tensor))))
        output = func(*args, **kwargs)
        for tensor in tensors_in(output):
            for storage in storages_of(tensor):
                if id(storage) not in self._live and id(storage) not in existing:
                    self.follow(storage, storage.nbytes())
                    self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        return output

    def record_free(self, note: int) -> None:
        self._now -= note


def working_bytes(func: Any, args: Any) -> int:
    """Return the most bytes that an operation's call `func(*args)` needs at once beside its inputs and
    outputs. Return 0 for operations that are not tightfit's own."""
    if func not in _IMPLEMENTATIONS:
        return 0
    return _working_bytes(func, *map(_described, args))


def _described(value: Any) -> Any:
    """Return a value that can be hashed: a tensor's shape, strides and dtype, a list as a tuple."""
    if isinstance(value, Tensor):
        return torch.empty_strided, value.shape, value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=1024)
def _working_bytes(func: Any, *described: Any) -> int:
    """Run the operation on tensors without data."""
    args = [
        value[0](*value[1:3], dtype=value[3], device="meta")
        if isinstance(value, tuple) and callable(value[0])
        else value
        for value in described
    ]
    with torch.no_grad(), _LiveBytes() as live:
        outputs = _IMPLEMENTATIONS[func](*args)
    return live.peak - tensor_bytes(tensors_in(outputs))
