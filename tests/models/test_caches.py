"""Caches in models' code hold no fake tensors after a trace, and no real ones during one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tightfit
from tightfit.engine.failures import naming_failures
from tightfit.errors import InputError
from tightfit.models.caches import isolated_model_caches
from tightfit.planner.dry_run import dry_run
from tightfit.planner.tracing.profiler import Profiler

TABLES: dict[int, Tensor] = {}
BEIT = {
    "architecture": "beit",
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 4,
    "use_relative_position_bias": True,
    "use_absolute_position_embeddings": False,
}


@lru_cache(maxsize=2)
def bounded(size: int) -> Tensor:
    return torch.arange(size)


@cache
def unbounded(size: int) -> list[Tensor]:
    return [torch.arange(size)]


@cache
def without_tensors(size: int) -> object:
    return object()


class Remembers(nn.Module):
    """Keeps what it computes in each of the places that code has for it."""

    known: dict[int, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    @staticmethod
    @lru_cache(maxsize=4)
    def of_class(size: int) -> Tensor:
        return torch.arange(size)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        for table in (TABLES, self.known):
            if size not in table:
                table[size] = torch.arange(size)
        places = bounded(size) + unbounded(size)[0] + self.of_class(size) + TABLES[size] + self.known[size]
        return self.head(x + places)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    for one in (bounded, unbounded, Remembers.of_class):
        one.cache_clear()
    TABLES.clear()
    Remembers.known.clear()


def all_results() -> list[Tensor]:
    return [bounded(8), unbounded(8)[0], Remembers.of_class(8), TABLES[8], Remembers.known[8]]


def test_a_training_works_after_a_trace_and_vice_versa() -> None:
    kept = without_tensors(8)
    job: Any = tightfit.Job(model=Remembers, data=[(torch.zeros(8), 1)] * 8, train=tightfit.Train(batch=4, steps=1))
    for _ in range(2):
        Profiler(job, "cpu").ledger(tightfit.Plan())
        dry_run(job, tightfit.Plan())
        assert not any(isinstance(one, FakeTensor) for one in (*TABLES.values(), *Remembers.known.values()))
        losses = [result.loss for result in tightfit.train(tightfit.build(job, tightfit.Plan()))]
        assert len(losses) == 1
        assert not any(isinstance(one, FakeTensor) for one in all_results())
    assert without_tensors(8) is kept


def test_dict_caches_are_restored_after_a_trace() -> None:
    TABLES[3], TABLES[5] = real, other = torch.arange(3), torch.arange(5)
    with isolated_model_caches(), FakeTensorMode():
        assert list(TABLES) == [3, 5]
        TABLES[4] = torch.arange(4)
        TABLES[3] = torch.arange(3)
        bounded(5)
    assert list(TABLES) == [3, 5]
    assert TABLES[3] is real
    assert TABLES[5] is other
    assert not isinstance(bounded(5), FakeTensor)


def test_beit_with_relative_positions_is_predicted_and_trains() -> None:
    job = tightfit.Job(model=BEIT, data={"synthetic": "images"}, train=tightfit.Train(batch=4, steps=1))
    for _ in range(2):
        assert Profiler(job, "cpu").ledger(tightfit.Plan()).peak().total > 0
        assert dry_run(job, tightfit.Plan(recompute="full")).total > 0
        assert [result.loss for result in tightfit.train(tightfit.build(job, tightfit.Plan()))]


RINGS: dict[str, Any] = {}


def test_a_dict_that_contains_itself_is_restored() -> None:
    RINGS["self"], RINGS["table"] = RINGS, torch.arange(2)
    try:
        with isolated_model_caches(on_meta=True):
            assert RINGS["table"].is_meta
        assert RINGS["self"] is RINGS
        assert RINGS["table"].tolist() == [0, 1]
    finally:
        RINGS.clear()


OF_THE_USER: dict[str, Any] = {
    "a": 1,
    "b": torch.tensor([1.0, 2.0, 1.0, 1.0]),
    "c": [torch.zeros(1), ("d", torch.ones(2))],
    "d": {},
}
WEIGHTS = torch.tensor([1.0, 2.0, 1.0, 1.0])


@pytest.mark.slow
def test_dicts_of_the_user_stay_as_they_are() -> None:
    """A program may go through a dict of its own while it plans or trains with an entry."""
    before, seen = list(OF_THE_USER.items()), []
    job: Any = tightfit.Job(model=Remembers, data=[(torch.zeros(8), 1)] * 8, train=tightfit.Train(batch=4, steps=1))
    for name, value in OF_THE_USER.items():
        seen.append((name, value))
        tightfit.estimate(job, {}, "l4")
        tightfit.build(job, tightfit.Plan())
        with isolated_model_caches(on_meta=True):
            assert list(OF_THE_USER) == ["a", "b", "c", "d"]
            assert OF_THE_USER["b"].is_meta
            assert OF_THE_USER["c"][1][1].is_meta
    assert [one[0] for one in seen] == ["a", "b", "c", "d"]
    assert all(now is then for (_, now), (_, then) in zip(OF_THE_USER.items(), before, strict=True))
    assert all(now is then for (_, now), (_, then) in zip(seen, before, strict=True))


FEATURES: list[Tensor] = []
NESTED: dict[str, Any] = {"features": [], "calls": 0, "known": (1, [])}
LATER: dict[str, Any] = {}
TABLE: Tensor | None = None


class Collects(nn.Module):
    """Keeps tensors of its forward in lists, dicts and global names that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        global TABLE
        FEATURES.clear()
        NESTED["features"].clear()
        for number, layer in enumerate(self.layers):
            x = layer(x)
            FEATURES.append(x)
            NESTED["features"].append(x)
            NESTED["known"][1].append([x])
            LATER.setdefault("new", {})[number] = x
        TABLE = x
        return torch.stack(FEATURES + NESTED["features"]).mean(0)


def test_a_long_list_is_restored_after_a_trace() -> None:
    real = [torch.zeros(1) for _ in range(5000)]
    FEATURES.extend(real)
    with isolated_model_caches(), FakeTensorMode():
        FEATURES.append(torch.zeros(2))
        assert isinstance(FEATURES[-1], FakeTensor)
    assert len(FEATURES) == 5000
    assert all(one is two for one, two in zip(FEATURES, real, strict=True))
    FEATURES.clear()


def test_what_a_forward_fills_is_there_after_a_trace() -> None:
    """In a notebook, they may be newer than the first use of tightfit."""
    names = set(globals())
    before = [FEATURES, NESTED, NESTED["features"], NESTED["known"], LATER]
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    job = tightfit.Job(model=Collects, data=data, loss=nn.MSELoss(), train=tightfit.Train(batch=4, steps=1))
    tightfit.estimate(job, tightfit.Plan())
    tightfit.search(job)
    assert set(globals()) == names
    assert all(
        one is old
        for one, old in zip([FEATURES, NESTED, NESTED["features"], NESTED["known"], LATER], before, strict=True)
    )
    assert (FEATURES, NESTED, LATER, TABLE) == ([], {"features": [], "calls": 0, "known": (1, [])}, {}, None)
    run = tightfit.build(job)
    assert [step.loss > 0 for step in tightfit.train(run)] == [True]
    assert len(FEATURES) == 3
    real = list(FEATURES)
    tightfit.estimate(job, tightfit.Plan(recompute="none", micro_batch=2))
    assert all(one is two for one, two in zip(FEATURES, real, strict=True))
    for one in (FEATURES, NESTED["features"], NESTED["known"][1], LATER):
        one.clear()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [lambda: OF_THE_USER["b"], lambda: WEIGHTS], ids=["in a dict", "global"])
def test_losses_that_read_tensors_of_a_module_are_predicted(weights: Any) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1], weight=weights())

    data = [(torch.zeros(8), number % 4) for number in range(8)]
    job = tightfit.Job(model=Remembers, data=data, loss=loss, train=tightfit.Train(batch=4, steps=1))
    assert tightfit.search(job, "l4")[0].fits
    assert len(list(tightfit.train(tightfit.build(job)))) == 1
    assert dry_run(job, tightfit.Plan()).total == pytest.approx(
        dry_run(job.replace(loss=nn.CrossEntropyLoss(reduction="mean")), tightfit.Plan()).total, rel=0.05
    )


HELD: dict[str, nn.Module] = {}
LATEST: nn.Module | None = None


def held_model() -> nn.Module:
    global LATEST
    LATEST = HELD["model"] = Remembers()
    return LATEST


def test_a_program_keeps_the_model_that_it_trains() -> None:
    """A loss may read the weights of the model that the job's function has created last."""

    def penalty(output: Tensor, batch: Any) -> Tensor:
        weights = sum(weight.square().sum() for weight in HELD["model"].parameters())
        return nn.functional.cross_entropy(output, batch[1]) + 0.01 * weights

    data = [(torch.zeros(8), number % 4) for number in range(8)]
    job = tightfit.Job(
        model=held_model, data=data, loss=penalty, train=tightfit.Train(batch=4, steps=2), allow=["offload"]
    )
    run = tightfit.build(job, tightfit.Plan(offload=("parameters",), offload_to="disk"))
    steps = tightfit.train(run)
    next(steps)
    tightfit.estimate(job, {}, "l4")
    dry_run(job, tightfit.Plan())
    assert HELD["model"] is run.model
    assert LATEST is run.model
    assert next(steps).loss > 0


def test_fake_tensors_in_a_training_are_explained() -> None:
    with (
        pytest.raises(InputError, match="let the loss read the model that it is given"),
        naming_failures(tightfit.Plan()),
    ):
        FakeTensorMode().from_tensor(torch.ones(1)).item()
