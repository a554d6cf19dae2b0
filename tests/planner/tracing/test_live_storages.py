"""The storage tracker against results worked out by hand, on a model small enough to follow every
storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tightfit.planner.tracing.live_storages import ROWS, StorageTracker

NARROW, WIDE, OUT, SAMPLES = 8, 16, 4, 5
X, HIDDEN, SCALAR = 4 * SAMPLES * NARROW, 4 * SAMPLES * WIDE, 4
FIRST, SECOND = 4 * NARROW * WIDE, 4 * WIDE * OUT
PARAMETERS = FIRST + SECOND


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(NARROW, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, OUT, bias=False))


def watch(model: nn.Module) -> tuple[StorageTracker, Callable[[Tensor], Tensor]]:
    """A tracker, and the forward that it watches."""
    tracker = StorageTracker(model.parameters())
    return tracker, tracker.forward(lambda x: model(x).sum())


def rows(**bytes_of: int) -> dict[str, int]:
    return {**dict.fromkeys(ROWS, 0), **bytes_of}


def test_forward_keeps_its_input_and_the_relu_s_output() -> None:
    tracker, forward = watch(perceptron())
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        loss = forward(x)
    peak = tracker.peak()
    # the largest instant is the ReLU's, which holds its input and makes its output; only the output is kept
    assert peak.rows == rows(parameters=PARAMETERS, activations=X + HIDDEN, temporaries=HIDDEN)
    assert peak.total == sum(peak.rows.values())
    assert peak.phase == "forward"
    assert peak.timeline[-1] == ("forward", PARAMETERS + X + HIDDEN + loss.nbytes)


def test_backward_peaks_at_the_relu() -> None:
    tracker, forward = watch(perceptron())
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        loss = forward(x)
        loss.backward()
    peak = tracker.peak()
    # the second weight has its gradient; those of the ReLU's output, its input and the loss are there
    assert peak.rows == rows(
        parameters=PARAMETERS, gradients=SECOND, activations=X + HIDDEN + loss.nbytes, temporaries=2 * HIDDEN + SCALAR
    )
    assert peak.phase == "backward"
    assert peak.timeline[-1] == ("backward", 2 * PARAMETERS + X + SCALAR)


def test_the_second_micro_batch_runs_beside_the_first_gradients() -> None:
    model = perceptron()
    tracker, forward = watch(model)
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        for _ in range(2):
            loss = forward(x)
            loss.backward()
            del loss
    peak = tracker.peak()
    # all gradients, and beside them the new one of the second weight is gone by the time the ReLU is undone
    assert peak.rows == rows(
        parameters=PARAMETERS, gradients=PARAMETERS, activations=X + HIDDEN + SCALAR, temporaries=2 * HIDDEN + SCALAR
    )
    assert [phase for phase, _ in peak.timeline if phase == "optimizer"] == []


def test_fake_tensors_are_counted_as_real_ones() -> None:
    def step() -> Any:
        model = perceptron()
        tracker, forward = watch(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.ones(SAMPLES, NARROW)
        with tracker:
            forward(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tracker.peak()

    with FakeTensorMode():
        fake = step()
    assert fake == step()


def test_new_states_belong_to_the_optimizer_at_once() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker, forward = watch(model)
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        forward(x).backward()
        optimizer.step()
        tracker.assign((state for states in optimizer.state.values() for state in states.values()), "optimizer")
    peak = tracker.peak()
    # two moments of each weight and a count of each; the update of the first weight takes two tensors of its size
    assert peak.rows == rows(
        parameters=PARAMETERS,
        gradients=PARAMETERS,
        optimizer=2 * PARAMETERS + 2 * SCALAR,
        activations=X,
        temporaries=2 * FIRST,
    )
    assert peak.phase == "optimizer"


def test_tensors_after_backward_are_no_activations() -> None:
    model = perceptron()
    tracker, forward = watch(model)
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        forward(x).backward()
        held = torch.empty(10 * PARAMETERS, dtype=torch.uint8)
    peak = tracker.peak()
    assert peak.phase == "optimizer"
    assert peak.rows["temporaries"] == held.nbytes


def test_recomputed_activations_are_temporaries() -> None:
    model = perceptron()
    plain = lambda x: checkpoint(model, x, use_reentrant=False).sum()  # noqa: E731
    tracker = StorageTracker(model.parameters())
    forward = tracker.forward(plain)
    x = torch.ones(SAMPLES, NARROW)
    with tracker:
        loss = forward(x)
        kept = tracker.peak().timeline[-1]
        loss.backward()
    assert kept == ("forward", PARAMETERS + X + SCALAR)
    peak = tracker.peak()
    assert peak.phase == "backward"
    assert peak.rows["activations"] == X + SCALAR
    assert peak.rows["temporaries"] >= 3 * HIDDEN


def test_views_count_once_and_freed_storages_do_not() -> None:
    tracker = StorageTracker([])
    with tracker:
        whole = torch.empty(100)
        part = whole[10:].view(9, 10).t()
        del whole
        held = tracker.peak().timeline[-1]
        del part
        other = torch.empty(50)
    peak = tracker.peak()
    assert held == ("forward", 400)
    assert peak.total == 400
    assert peak.timeline[-1] == ("forward", other.nbytes)


def test_a_storage_that_grows_counts_at_its_new_size() -> None:
    tracker = StorageTracker([])
    with tracker:
        result = torch.empty(0)
        torch.add(torch.ones(10), torch.ones(10), out=result)
    assert tracker.peak().total == 3 * 40


def test_a_sparse_gradient_counts_by_its_parts() -> None:
    model = nn.Embedding(100, 4, sparse=True)
    tracker, forward = watch(model)
    tokens = torch.tensor([1, 2, 2])
    with tracker:
        forward(tokens).backward()
    assert model.weight.grad is not None
    indices, values = 3 * 8, 3 * 4 * 4
    assert tracker.peak().timeline[-1] == ("backward", model.weight.nbytes + tokens.nbytes + indices + values)


class Wrapped(Tensor):
    """A tensor whose bytes are those of another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda value: value.inner if isinstance(value, Wrapped) else value, (args, kwargs or {}))
        torch.empty(1000)  # a temporary of the wrapper's own
        return Wrapped(func(*bare[0], **bare[1]))


def test_wrapped_tensors_count_their_parts_and_temporaries() -> None:
    weight = Wrapped(torch.ones(10))
    tracker = StorageTracker([weight])
    with tracker:
        twice = weight * 2
    peak = tracker.peak()
    assert peak.rows == rows(parameters=40, temporaries=4000)
    assert peak.timeline[-1] == ("forward", 40 + twice.inner.nbytes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_keeps_nothing_alive(fails: bool) -> None:
    model = perceptron()
    tracker, forward = watch(model)
    gone = weakref.ref(model[0].weight)
    try:
        with tracker:
            forward(torch.ones(SAMPLES, NARROW))
            if fails:
                raise MemoryError
    except MemoryError:
        pass
    del model, forward
    assert gone() is None
    assert tracker.peak().total


@pytest.mark.parametrize(("on_gpu", "total"), [(False, 8192), (True, 0)])
def test_a_run_on_a_gpu_does_not_count_host_memory(on_gpu: bool, total: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1024))
    with StorageTracker([weight], on_gpu=on_gpu) as tracker:
        weight.grad = torch.ones(1024)
    assert tracker.peak().total == total
