"""What modules return from `get_extra_state` is saved without a pickle and restored, on one device
and on several, with the same plan and with another."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.pool import together
from tightfit.errors import InputError
from tightfit.report.export import load_trained

HERE = "tests.engine.checkpoint.test_extra_state:"
WIDTH, STEPS, BATCH = 8, 4, 8


class Counting(nn.Module):
    """A block that counts its forwards, and keeps the count and a tensor as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.seen = nn.Linear(WIDTH, WIDTH), 0, torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.seen = state["count"], state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = torch.full((2,), float(self.count))
        return x + self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Holder(nn.Linear):
    """A layer whose extra state is `held`."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


def job(model: Callable[[], nn.Module], **train: Any) -> tightfit.Job:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(WIDTH, generator=generator), number % 3) for number in range(32)]
    train = {"batch": BATCH, "steps": STEPS, "learning_rate": 1e-2, "trackers": [], **train}
    return tightfit.Job(model=model, data=samples, train=train)


def counts(run: tightfit.Run) -> dict[str, tuple[int, list[float]]]:
    found = {name: one for name, one in run.model.named_modules() if isinstance(one, Counting)}
    return {name: (one.count, one.seen.tolist()) for name, one in found.items()}


def trained(folder: str, fields: dict[str, Any]) -> None:
    run = tightfit.build(job(Net), fields)
    list(tightfit.train(run))
    tightfit.save(run, folder, STEPS)


def resumed(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    run = tightfit.build(job(Net), fields)
    assert tightfit.resume(run, folder) == STEPS
    return counts(run)


BOTH = {f"blocks.{number}": (STEPS, [STEPS, STEPS]) for number in range(2)}


def test_extra_states_are_restored_with_another_plan(tmp_path: Path) -> None:
    trained(str(tmp_path), {})
    assert resumed(str(tmp_path), {"allocator": "tuned", "materialize": "device"}) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"zero": 3, "dp_shard": 2}, {"zero": 1, "dp_shard": 2}], ids=str)
def test_extra_states_move_between_sharded_and_not(fields: dict[str, Any], tmp_path: Path) -> None:
    together(2, HERE + "trained", str(tmp_path / "two"), fields)
    assert resumed(str(tmp_path / "two"), {}) == BOTH
    trained(str(tmp_path / "one"), {})
    assert together(2, HERE + "resumed", str(tmp_path / "one"), fields) == [BOTH, BOTH]


def piped() -> nn.Module:
    model = nn.Sequential(Holder(WIDTH, WIDTH), Holder(WIDTH, WIDTH), Holder(WIDTH, 3))
    for number, layer in enumerate(model):
        layer.held = [number, torch.full((2,), float(number))]
    return model


def save_piped(folder: str) -> None:
    tightfit.save(tightfit.build(job(piped), {"pp": 2}), folder, 1)


def resume_piped(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    run = tightfit.build(job(piped), fields)
    holders = {name: one for name, one in run.model.named_modules() if isinstance(one, Holder)}
    for one in holders.values():
        one.held = None
    tightfit.resume(run, folder)
    return {name: (one.held[0], one.held[1].tolist()) for name, one in holders.items()}


def test_extra_states_of_all_pipeline_ranks_are_saved(tmp_path: Path) -> None:
    together(2, HERE + "save_piped", str(tmp_path))
    expected = {str(number): (number, [number, number]) for number in range(3)}
    assert resume_piped(str(tmp_path), {}) == expected
    parts = together(2, HERE + "resume_piped", str(tmp_path), {"pp": 2})
    assert {**parts[0], **parts[1]} == expected
    assert len(parts[0]) < 3


@pytest.mark.slow
def test_a_parameter_server_saves_a_worker_s_extra_state(tmp_path: Path) -> None:
    together(3, HERE + "trained", str(tmp_path), {"parameter_server": "sync", "dp_replicate": 2})
    assert resumed(str(tmp_path), {}) == BOTH


def test_every_kind_of_value_that_needs_no_pickle_returns(tmp_path: Path) -> None:
    held = {
        "none": None,
        "numbers": [True, 3, 0.1, float("inf")],
        (1, "key"): (b"\x00\xff", "text", ()),
        7: OrderedDict(a=torch.arange(3, dtype=torch.int64), b=[torch.tensor(True), {}]),
        "half": torch.ones(2, 3, dtype=torch.bfloat16).T,
    }
    run = tightfit.build(job(lambda: Holder(WIDTH, 3)))
    run.model.held = held
    path = tightfit.save(run, tmp_path, 1)
    assert not list(path.glob("*.pt"))
    again = tightfit.build(job(lambda: Holder(WIDTH, 3)))
    tightfit.resume(again, tmp_path)
    found: Any = again.model.held
    assert list(found) == list(held)
    assert type(found[7]) is OrderedDict
    assert torch.equal(found[7].pop("a"), torch.arange(3))
    assert found[7].pop("b") == [torch.tensor(True), {}]
    assert torch.equal(found.pop("half"), torch.ones(3, 2, dtype=torch.bfloat16))
    assert found.pop(7) == {}
    assert found == {name: held[name] for name in found}


def test_extra_state_that_needs_a_pickle_is_refused(tmp_path: Path) -> None:
    class Bad(Holder):
        held = (torch.device("cpu"),)

    with pytest.raises(InputError, match=r"get_extra_state of 0 \(Bad\): returns a device") as raised:
        tightfit.build(job(lambda: nn.Sequential(Bad(WIDTH, 3))))
    assert "return plain tensors, numbers" in raised.value.fix
    run = tightfit.build(job(lambda: nn.Sequential(Bad(WIDTH, 3)), checkpoint_every="never"))
    assert len(list(tightfit.train(run))) == STEPS
    with pytest.raises(InputError, match="returns a device"):
        tightfit.save(run, tmp_path, STEPS)
    run.model[0].held = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(InputError, match=r"a tensor of type Tensor, torch\.complex64"):
        tightfit.save(run, tmp_path, STEPS)
    assert not list(tmp_path.glob("*"))


def test_a_checkpoint_with_other_extra_states_is_refused(tmp_path: Path) -> None:
    tightfit.save(tightfit.build(job(lambda: nn.Linear(WIDTH, 3))), tmp_path / "without", 1)
    tightfit.save(tightfit.build(job(lambda: Holder(WIDTH, 3))), tmp_path / "with", 1)
    for folder, model, said in (
        ("without", Holder, "it has no extra state of Holder"),
        ("with", nn.Linear, "an extra state of the module '', and the model has none"),
    ):
        with pytest.raises(InputError, match=said):
            tightfit.resume(tightfit.build(job(lambda model=model: model(WIDTH, 3))), tmp_path / folder)


def test_an_altered_file_of_extra_states_is_named(tmp_path: Path) -> None:
    trained(str(tmp_path), {})
    file = tmp_path / f"step-{STEPS:08d}" / "extra_state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"extra_state\.safetensors is not as it was written"):
        resumed(str(tmp_path), {})


def samples() -> list[tuple[Tensor, int]]:
    return [(torch.ones(WIDTH), number % 3) for number in range(32)]


def test_an_exported_model_has_its_extra_state(tmp_path: Path) -> None:
    named = tightfit.Job(
        model={"python": HERE + "Net"},
        data={"python": HERE + "samples"},
        train={"batch": BATCH, "steps": STEPS, "trackers": []},
    )
    (tmp_path / "job.yaml").write_text(named.to_yaml())
    run = tightfit.build(named)
    list(tightfit.train(run))
    tightfit.save(run, tmp_path / "checkpoints", STEPS)
    loaded: Any = load_trained(tmp_path).model
    assert [block.count for block in loaded.blocks] == [STEPS, STEPS]


class Noisy(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.torch, self.python = torch.Generator().manual_seed(3), random.Random(3)
        self.old, self.new = numpy.random.RandomState(3), numpy.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        drawn = self.python.random() + self.old.rand() + self.new.random() + self.calls.item()
        return self.layer(x) * torch.rand(3, generator=self.torch) + drawn * x[:, :3]


def test_generators_of_modules_continue_in_a_resumed_run(tmp_path: Path) -> None:
    whole = [step.loss for step in tightfit.train(tightfit.build(job(Noisy, steps=2 * STEPS)))]
    run = tightfit.build(job(Noisy, steps=2 * STEPS))
    steps = iter(tightfit.train(run))
    first = [next(steps).loss for _ in range(STEPS)]
    tightfit.save(run, tmp_path, STEPS)
    again = tightfit.build(job(Noisy, steps=2 * STEPS))
    rest = [step.loss for step in tightfit.train(again, tightfit.resume(again, tmp_path))]
    assert first + rest == whole


def noisy_calls(folder: str) -> int:
    run = tightfit.build(job(Noisy), {"parameter_server": "sync", "dp_replicate": 2})
    list(tightfit.train(run))
    tightfit.save(run, folder, STEPS)
    return int(run.model.calls)


def test_a_parameter_server_gets_the_workers_integers(tmp_path: Path) -> None:
    assert together(3, HERE + "noisy_calls", str(tmp_path)) == [STEPS] * 3
    again = tightfit.build(job(Noisy))
    tightfit.resume(again, tmp_path)
    assert int(again.model.calls) == STEPS
