"""Find out, by a forward on fake tensors, two things about a user's own model: which of its own
parameters its forward changes, such as weights that it normalises or the weights of a teacher that it
averages, and whether it branches on the values of tensors.

A plan that keeps parameters in shards, or on a parameter server, loses a change: the forward writes to
a copy. `engine/build.py` refuses these plans. A prediction does not know values: `Profiler` says which
line depends on one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import DataDependentOutputException, FakeTensorMode
from tightfit._torch.tensors import storage_id
from tightfit.models.caches import isolated_model_caches
from tightfit.models.dataflow import describe_line, innermost_model_line
from tightfit.models.fake_kernels import without_fake_tensor_logs
from tightfit.models.objective import Batch, map_tensors
from tightfit.models.tensors import written_tensors


@dataclass(frozen=True)
class ForwardWrites:
    """The full names of parameters that a forward changes.

    in_place  its values are overwritten, as by weight.copy_(...)
    replaced  it gets another storage, as by weight.data = ..., or is replaced by another parameter
    """

    in_place: tuple[str, ...]
    replaced: tuple[str, ...]


def forward_writes(
    make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch
) -> ForwardWrites:
    """Run a forward of a new model and its loss on fake tensors, and return which parameters of the
    model it changes. If the forward fails on fake tensors, these are the changes until then.

    make   creates the model
    total  (model, batch) -> the loss
    batch  a batch; only the shapes and types of its tensors are used

    The random number generators of torch, Python and NumPy are the same afterwards.
    """
    try:
        with _restoring_random_states(), _fake_forwards():
            model = make()
            model.train()
            given = dict(model.named_parameters(remove_duplicate=False))
            places, written = {name: storage_id(one) for name, one in given.items()}, []
            try:
                with WatchedWrites(given, lambda name, _: written.append(name)):
                    total(model, _fake_batch(batch))
            except Exception:  # the forward needs values; training runs it on real tensors
                pass
            now = dict(model.named_parameters(remove_duplicate=False))
            replaced = [
                name for name, one in given.items() if now.get(name) is not one or storage_id(one) != places[name]
            ]
            return ForwardWrites(tuple(written), tuple(replaced))
    except Exception:  # the model cannot be created on fake tensors
        return ForwardWrites((), ())


def branch_on_values(make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> str:
    """Run a forward like `forward_writes`. Return the first line of the model that reads the value of a
    tensor in Python, usually for a branch, such as "net.py, line 12 (if error.max() < 0.1:)"; "" if
    none does, or if the forward fails for another reason."""
    with _restoring_random_states(), _fake_forwards():
        try:
            model = make()
            model.train()
            total(model, _fake_batch(batch))
        except DataDependentOutputException as error:
            return describe_line(innermost_model_line(error))
        except Exception:
            return ""
    return ""


@contextmanager
def _restoring_random_states() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def _fake_forwards() -> Iterator[None]:
    with (
        isolated_model_caches(),
        without_fake_tensor_logs(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.enable_grad(),
    ):
        yield


def _fake_batch(batch: Batch) -> Batch:
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), batch)


class WatchedWrites(TorchDispatchMode):
    """A mode that calls `before_write(name, tensor)` before the first operation that writes to one of
    some tensors, or to a view of it.

    tensors       name -> tensor
    before_write  a function that gets the name and the tensor
    """

    def __init__(self, tensors: Mapping[Any, Tensor], before_write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.places = {storage_id(one): (name, one) for name, one in tensors.items()}
        self.before_write = before_write
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in written_tensors(func, args, kwargs or {}):
            place = storage_id(one) if isinstance(one, Tensor) else None
            if place in self.places and place not in self.written:
                self.written.add(place)
                self.before_write(*self.places[place])
        return func(*args, **(kwargs or {}))


__all__ = ["ForwardWrites", "WatchedWrites", "branch_on_values", "forward_writes"]
