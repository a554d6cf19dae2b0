"""Random generators: each process has its own, and that of its own device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightfit.distributed.processes import local_device
from tightfit.engine.rng import random_states, rng_preserved, seed_all, set_random_states
from tightfit.errors import InputError


class Devices:
    """Replaces CUDA devices, each with a generator's state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(count)]
        self.current = current
        for name, function in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: self.current,
            "get_rng_state": lambda device=None: self.states[self.current if device is None else device],
            "set_rng_state": self.put,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def put(self, state: torch.Tensor, device: Any = None) -> None:
        self.states[self.current if device is None else device] = state


def test_random_state_moves_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, 4, 3)
    saved = random_states()
    assert saved["cuda"] == ["03"]
    devices = Devices(monkeypatch, 2, 1)  # as on a host with fewer of them
    set_random_states(saved)
    assert [int(state) for state in devices.states] == [0, 3]
    set_random_states({**saved, "cuda": ["07", "08", "09"]})  # of all that a process saw, as was once saved
    assert [int(state) for state in devices.states] == [0, 8]


def test_a_run_without_a_device_saves_no_device_state() -> None:
    seed_all(3)
    saved = random_states()
    assert saved["cuda"] == []
    with rng_preserved():
        drawn = torch.rand(2)
    assert torch.equal(torch.rand(2), drawn)
    set_random_states(saved)
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize(("visible", "number", "expected"), [(4, 3, 3), (1, 0, 0), (1, 3, 0)])
def test_a_process_uses_its_own_device(
    monkeypatch: pytest.MonkeyPatch, visible: int, number: int, expected: int
) -> None:
    """A process that sees a single GPU uses it, whatever its number on the host."""
    Devices(monkeypatch, visible, 0)
    monkeypatch.setenv("LOCAL_RANK", str(number))
    assert local_device("cuda") == torch.device("cuda", expected)
    assert local_device("cpu") == torch.device("cpu")


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, 2, 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="2 CUDA devices are visible"):
        local_device("cuda")
