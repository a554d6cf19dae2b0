"""Tensors saved by a forward in a store: fetched before their use, once per use, and released with
their graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.optim.per_parameter import PerParameter
from tightfit.runtime import offloaded_activations
from tightfit.runtime.offload_store import PendingFetch, Store
from tightfit.runtime.offloaded_activations import MIN_OFFLOAD_BYTES, is_dense, offload_saved
from tightfit.runtime.offloaded_gradients import OffloadedGradients
from tightfit.target_device import TARGET

WIDTH, ROWS = 64, 512  # of a tensor that is larger than SMALL
BYTES = WIDTH * ROWS * 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of a device that computes only with its own memory."""
    assert BYTES > MIN_OFFLOAD_BYTES
    meant = TARGET.set("cuda")
    yield Store(tightfit.Plan(offload=("activations",), offload_to="disk", offload_folder=str(tmp_path)), CPU)
    TARGET.reset(meant)


CPU = torch.device("cpu")


class Watched:
    """Notes the tensors that a store begins to fetch and those that are used, by their number in
    the forward."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[int] = []
        self.seen: list[str] = []
        begin, put, fetch = (
            store.begin_fetch,
            offloaded_activations._SaveOrder.put,
            offloaded_activations._SaveOrder.fetch,
        )

        def begins(value: Tensor) -> PendingFetch:
            self.seen.append(f"{self.saved.index(value.data_ptr())} comes")
            return begin(value)

        def puts(order: Any, value: Tensor) -> Any:
            made = put(order, value)
            self.saved.append(made.stored.data_ptr())
            return made

        def fetches(order: Any, saved: Any) -> Tensor:
            self.seen.append(f"{saved.index} is asked for")
            here = fetch(order, saved)
            assert order.ahead <= max(offloaded_activations.MAX_PREFETCH_BYTES, BYTES)
            assert torch.equal(here, saved.stored)
            return here

        monkeypatch.setattr(store, "begin_fetch", begins)
        monkeypatch.setattr(offloaded_activations._SaveOrder, "put", puts)
        monkeypatch.setattr(offloaded_activations._SaveOrder, "fetch", fetches)


def chain(length: int, begin: Tensor) -> Tensor:
    """Each sine saves its operand."""
    for _ in range(length):
        begin = begin.sin()
    return begin.sum()


def operand() -> Tensor:
    return torch.linspace(-1, 1, WIDTH * ROWS).view(ROWS, WIDTH).requires_grad_()


def gradient_of(loss: Callable[[Tensor], Tensor]) -> Tensor:
    start = operand()
    loss(start).backward()
    assert start.grad is not None
    return start.grad


def check_gradient(store: Store, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Offloading what the loss saves does not change the gradient, and leaves nothing behind."""
    start = operand()
    with offload_saved(store, set()):
        loss = loss_of(start)
    loss.backward()
    assert torch.equal(start.grad, gradient_of(loss_of))  # type: ignore[arg-type]
    del loss
    assert store.stored_bytes == 0


def test_earlier_saved_tensors_are_fetched_during_backward(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(store, monkeypatch)
    start = operand()
    with offload_saved(store, set()):
        loss = chain(4, start)
    loss.backward()
    assert watched.seen == [
        "3 is asked for", "3 comes", "2 comes", "2 is asked for", "1 comes", "1 is asked for", "0 comes", "0 is asked for",
    ]  # fmt: skip
    assert torch.equal(start.grad, gradient_of(lambda x: chain(4, x)))  # type: ignore[arg-type]


def test_prefetching_is_as_large_as_the_largest_tensor(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(store, monkeypatch)
    start = operand()
    with offload_saved(store, set()):
        small = chain(4, start)
        loss = chain(1, torch.cat([start, start, start])) + small
    loss.backward()
    assert watched.saved[4:]
    first = watched.seen.index("4 comes")
    assert watched.seen[first : first + 4] == ["4 comes", "3 comes", "2 comes", "1 comes"]
    assert sorted(line for line in watched.seen if line.endswith("comes")) == [f"{place} comes" for place in range(5)]


def test_prefetching_stays_within_its_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "MAX_PREFETCH_BYTES", 2 * BYTES)
    watched = Watched(store, monkeypatch)
    start = operand()
    with offload_saved(store, set()):
        loss = chain(4, start) + chain(1, torch.cat([start] * 9))
    loss.backward()
    begun = [line for line in watched.seen if line.endswith("comes")]
    assert sorted(begun) == [f"{place} comes" for place in range(5)]


def test_a_retained_graph_can_be_used_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is fetched once per use, and the store keeps it until the graph is freed."""
    watched = Watched(store, monkeypatch)
    start = operand()
    with offload_saved(store, set()):
        loss = chain(3, start)
    (first,) = torch.autograd.grad(loss, start, retain_graph=True)
    assert store.stored_bytes == 3 * BYTES
    (second,) = torch.autograd.grad(loss, start)
    assert torch.equal(first, second)
    assert sorted(line for line in watched.seen if line.endswith("comes")) == [
        line for place in range(3) for line in [f"{place} comes"] * 2
    ]
    del loss
    assert store.stored_bytes == 0


def test_second_order_gradients_work(store: Store) -> None:
    def penalty(start: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(chain(3, start), start, create_graph=True)
        return gradient.square().sum()

    check_gradient(store, penalty)


def test_a_graph_without_backward_is_freed(store: Store) -> None:
    start = operand()
    gc.disable()  # no cycle has to be found
    try:
        with offload_saved(store, set()):
            loss = chain(3, start)
        assert store.stored_bytes == 3 * BYTES
        del loss
        assert store.stored_bytes == 0
        with offload_saved(store, set()):
            middle = start.sin()
            loss = chain(3, middle)
        torch.autograd.grad(loss, middle)  # the first sine is never asked for, though it has come
        del loss, middle
        assert store.stored_bytes == 0
        assert not store._copies_out
    finally:
        gc.enable()


def test_overlapping_forwards_fetch_their_own_tensors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of a pipeline overlap like this: the first backward begins after the second
    forward."""
    starts, losses = [operand(), operand()], []
    for start in starts:
        with offload_saved(store, set()):
            losses.append(chain(3, start))
    watched: list[int] = []
    begin = store.begin_fetch

    def begins(value: Tensor) -> PendingFetch:
        watched.append(value.data_ptr())
        return begin(value)

    monkeypatch.setattr(store, "begin_fetch", begins)
    losses[0].backward()
    assert len(set(watched)) == len(watched) == 3
    losses[1].backward()
    assert len(set(watched)) == len(watched) == 6
    assert all(torch.equal(start.grad, gradient_of(lambda x: chain(3, x))) for start in starts)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_works_with_offloaded_tensors(store: Store, reentrant: bool) -> None:
    def loss_of(start: Tensor) -> Tensor:
        for _ in range(3):
            start = checkpoint(lambda x: x.sin().exp().cos(), start, use_reentrant=reentrant)
        return chain(2, start)

    check_gradient(store, loss_of)


@pytest.mark.parametrize("heads", [1, 4])
def test_gradients_are_bit_for_bit_the_same(store: Store, heads: int) -> None:
    """Kernels find each tensor in the layout in which it was saved."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, heads, 4 * WIDTH, dropout=0.1, batch_first=True)
    batch = torch.randn(8, 64, WIDTH)
    gradients = []
    for hooks in (None, offload_saved(store, {weight.untyped_storage()._cdata for weight in model.parameters()})):
        model.zero_grad()
        torch.manual_seed(1)
        if hooks is None:
            loss = model(batch).square().sum()
        else:
            with hooks:
                loss = model(batch).square().sum()
            assert store.stored_bytes > 0
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "dense"),
    [
        (torch.empty(4, 6), True),
        (torch.empty(4, 6).t(), True),
        (torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last), True),
        (torch.empty(4, 1, 6).transpose(0, 1), True),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(4, 1).expand(4, 6), False),
        (torch.empty(9).as_strided((3, 3), (1, 1)), False),
        (torch.empty(()), True),
    ],
    ids=["plain", "transposed", "channels last", "of one row", "a part", "expanded", "overlapping", "a number"],
)
def test_dense_tensors_are_recognised(value: Tensor, dense: bool) -> None:
    assert is_dense(value) == dense
    if dense:
        assert torch.empty_like(value).stride() == value.stride()


class Streams:
    """Replaces torch.cuda and notes the work of each stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.made = 0
        outer = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "") -> None:
                outer.made += not name
                self.name = name or f"stream {outer.made}"

            def wait_stream(self, other: Stream) -> None:
                outer.seen.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                outer.seen.append(f"{self.name} waits for an event of {event.of}")

            def synchronize(self) -> None:
                outer.seen.append(f"the host waits for {self.name}")

        class Event:
            of = ""

            def record(self, stream: Stream) -> None:
                self.of = stream.name

        own = Stream(name="own")
        stack = [own]

        class Within:
            def __init__(self, stream: Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                stack.append(self.stream)

            def __exit__(self, *error: object) -> None:
                stack.pop()

        copy = Tensor.copy_

        def copies(here: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
            outer.seen.append(f"{stack[-1].name} copies")
            return copy(here, value)

        empty_like = torch.empty_like
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", Within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stack[-1])
        monkeypatch.setattr(Tensor, "copy_", copies)
        monkeypatch.setattr(Store, "_is_on_host", lambda store, value: False)  # tensors here stand for the GPU's
        monkeypatch.setattr(Tensor, "record_stream", lambda value, stream: None)
        monkeypatch.setattr(torch, "empty_like", lambda value, **options: empty_like(value))

    def since(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def on_a_gpu(streams: Streams, tmp_path: Path) -> Store:
    plan = tightfit.Plan(offload=("activations",), offload_to="disk", offload_folder=str(tmp_path))
    return Store(plan, torch.device("cuda"))


def test_a_fetch_waits_only_for_its_own_copy_to_the_host(streams: Streams, on_a_gpu: Store) -> None:
    store = on_a_gpu
    first, second = (store.empty(torch.Size([4]), torch.float32) for _ in range(2))
    store.send(torch.ones(4), first)
    assert streams.since() == ["stream 1 waits for own", "stream 1 copies"]
    store.fetch(second)
    assert streams.since() == ["stream 2 waits for own", "stream 2 copies", "own waits for an event of stream 2"]
    assert torch.equal(store.fetch(first), torch.ones(4))
    waits = "stream 2 waits for an event of stream 1"
    assert streams.since() == ["stream 2 waits for own", waits, "stream 2 copies", "own waits for an event of stream 2"]
    store.settle()
    assert streams.since() == ["the host waits for stream 1", "the host waits for own"]
    store.fetch(first)
    assert waits not in streams.since()


def test_memory_is_not_reused_before_its_copy_has_ended(streams: Streams, on_a_gpu: Store) -> None:
    coming = on_a_gpu.begin_fetch(torch.ones(4))
    streams.since()
    del coming
    assert streams.since() == ["own waits for an event of stream 1"]
    on_a_gpu.begin_fetch(torch.ones(4)).wait()
    assert streams.since().count("own waits for an event of stream 1") == 1


def test_gradients_are_accumulated_on_the_host(streams: Streams, on_a_gpu: Store) -> None:
    weight = nn.Parameter(torch.zeros(4))
    gradients = OffloadedGradients({weight: weight}, on_a_gpu)
    for value in (1.0, 2.0):
        (weight * value).sum().backward()
        assert weight.grad is None
    assert not any("stream 2" in line for line in streams.since())
    gradients.end()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))  # type: ignore[arg-type]


def test_state_copies_overlap_with_other_updates(streams: Streams, on_a_gpu: Store) -> None:
    """While a weight is updated, the next one's momentum is fetched and the previous one's is
    stored. The host never waits."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    inner = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    inner.register_step_post_hook(lambda *_: streams.seen.append("own updates"))
    optimizer = PerParameter(inner, state_store=on_a_gpu)
    for _ in range(2):
        streams.since()
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()
    comes = ["stream 2 waits for own", "stream 2 waits for an event of stream 1", "stream 2 copies"]
    update = ["own waits for an event of stream 2", "own updates", "stream 1 waits for own", "stream 1 copies"]
    left = "own waits for an event of stream 1"  # what its memory was, the device uses again
    assert streams.since() == [*comes, *comes, *update, *comes, *update, left, *update, left, left]
    assert all(torch.allclose(weight, torch.tensor(1 - 0.1 - 0.19)) for weight in weights)
    optimizer.state_dict()
    assert streams.since() == ["the host waits for stream 1", "the host waits for own"]


def test_at_most_three_updates_states_are_on_the_device(store: Store) -> None:
    """The states of the current, the next and the previous update are on the device, then none. A
    dry run, which never waits, is the same."""
    weights = [nn.Parameter(torch.ones(ROWS, WIDTH)) for _ in range(5)]
    inner = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    optimizer = PerParameter(inner, state_store=store)
    held: list[int] = []

    def note_states(*_: Any) -> None:
        held.append(len(store._prefetched) + len(store._pending_sends[0]) + 1)

    inner.register_step_pre_hook(note_states)
    for _ in range(2):
        held.clear()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert held == [2, 3, 3, 3, 2]
    assert not store._prefetched
    assert store._pending_sends == ([], [])
