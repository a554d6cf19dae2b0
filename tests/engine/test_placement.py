"""Steps of every method mix no tensors of host and device: on a CUDA device without values, in a
process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cuda import stand_in
from tests.sweeps import part

ROOT = Path(__file__).parents[2]
STEPS_APART: dict[str, Any] = {"pp": 2, "micro_batch": 2}
ALL_OFFLOADED: dict[str, Any] = {"offload": ["states", "gradients", "parameters"]}

ALONE: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "tf32"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"precision": "fp16-mixed"},
    {"precision": "bf16-mixed", "float8": "tensorwise"},
    {"precision": "bf16-true", "float8": "rowwise", "recompute": "full"},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "sqrt"},
    {"chunked_loss": 5},
    {"fused_optimizer": True},
    {"states": "bf16"},
    {"update_in_backward": True},
    {"micro_batch": 3},
    {"attention": "blocked"},
    {"materialize": "device"},
    {"offload": ["states"]},
    {"offload": ["states"], "precision": "bf16-true", "rounding": "kahan"},
    {"offload": ["states"], "precision": "fp16-mixed"},
    {"offload": ["activations"]},
    {"offload": ["gradients"]},
    ALL_OFFLOADED,
    {**ALL_OFFLOADED, "offload_to": "disk"},
    {**ALL_OFFLOADED, "offload_to": "disk", "micro_batch": 1},
    {"offload": ["activations"], "offload_to": "disk"},
    {"offload": ["activations"], "recompute": "full", "micro_batch": 2},
)
SEVERAL: tuple[tuple[dict[str, Any], int], ...] = (
    ({"dp_replicate": 2}, 0),
    ({"dp_replicate": 2, "compressed_gradients": "bf16"}, 0),
    ({"dp_replicate": 2, "compressed_gradients": "powersgd"}, 0),
    ({"zero": 1, "dp_shard": 2}, 0),
    ({"zero": 2, "dp_shard": 2, "micro_batch": 2}, 1),
    ({"zero": 3, "dp_shard": 2}, 1),
    ({"zero": 3, "dp_shard": 2, "precision": "bf16-mixed"}, 1),
    ({"zero": 3, "dp_shard": 2, **ALL_OFFLOADED}, 1),
    (STEPS_APART, 0),
    (STEPS_APART, 1),
    ({**STEPS_APART, "schedule": "zero-bubble"}, 1),
    ({**STEPS_APART, "schedule": "interleaved", "virtual_stages": 2}, 1),
    ({**STEPS_APART, "schedule": "pipedream"}, 1),
    ({**STEPS_APART, "zero": 3, "dp_shard": 2}, 3),
    ({**STEPS_APART, "zero": 3, "dp_shard": 2, "offload": ["gradients", "parameters"]}, 0),
    ({**STEPS_APART, "zero": 3, "dp_shard": 2, "offload": ["gradients", "parameters"]}, 3),
    ({"tp": 2}, 0),
    ({"tp": 2, "sequence_parallel": True}, 1),
    ({"tp": 2, "precision": "bf16-mixed", "float8": "tensorwise"}, 1),
    ({"tp": 2, "sequence_parallel": True, "zero": 3, "dp_shard": 2, **ALL_OFFLOADED}, 1),
    ({**STEPS_APART, "zero": 3, "dp_shard": 2, **ALL_OFFLOADED}, 3),
    ({"cp": 2}, 0),
    ({"cp": 2, "zero": 3, "precision": "bf16-mixed"}, 1),
    ({"parameter_server": "sync", "dp_replicate": 2}, 1),
)


class Device:
    """A process whose tensors lie on the device."""

    def __init__(self, library: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.cuda.stand_in", str(library)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def says(self, name: str, fields: dict[str, Any], rank: int = 0, fault: str = "") -> str:
        """The traceback of a build and a few steps; "" where nothing was raised. fault: see `stand_in`."""
        into = self._pipe(self._process.stdin)
        into.write(json.dumps([name, fields, rank, fault]) + "\n")
        into.flush()
        said = self._pipe(self._process.stdout).readline()
        assert said, "the process has ended"
        return str(json.loads(said))

    def end(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    library = stand_in.compile_library(tmp_path_factory.mktemp("stand_in"))
    if library is None:
        pytest.skip("no C++ compiler or no CPU build of torch is here")
    made = Device(library)
    yield made
    made.end()


def named(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) or "plain" if isinstance(value, dict) else str(value)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", part(ALONE, 4, named))
def test_one_device_mixes_no_host_and_device_tensors(device: Device, fields: dict[str, Any]) -> None:
    assert device.says("llama", fields) == ""


@pytest.mark.sweep(12)
@pytest.mark.parametrize("plan", part(SEVERAL, 4, lambda plan: f"{named(plan[0])}-{plan[1]}"))
def test_several_devices_mix_no_host_and_device_tensors(device: Device, plan: tuple[dict[str, Any], int]) -> None:
    fields, rank = plan
    assert device.says("llama", fields, rank) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "vit", "batchnorm"])
def test_other_models_mix_no_host_and_device_tensors(device: Device, name: str) -> None:
    assert device.says(name, {}) == ""


@pytest.mark.parametrize(
    ("fault", "fields", "said"),
    [
        ("batch", {}, "cpu"),
        ("sum", {"dp_replicate": 2}, "NCCL"),
    ],
)
def test_misplaced_tensors_are_detected(device: Device, fault: str, fields: dict[str, Any], said: str) -> None:
    """A batch that stays on the host, and a sum of what lies there."""
    assert said in device.says("llama", fields, 0, fault).splitlines()[-1]
