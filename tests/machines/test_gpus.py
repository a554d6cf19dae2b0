"""Which GPUs are found, what is reported about unused ones, and the estimated speed of unknown
ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.report.test_run_folder import command
from tightfit.achieved_rates import achieved
from tightfit.capabilities import has_fast_bf16
from tightfit.machine import Figure, Machine
from tightfit.machines import devices, gpus

Host = Callable[..., None]
PEAKS = {  # processors and boost clock as torch says them
    "v100-16gb": (80, 1.53e9),
    "t4": (40, 1.59e9),
    "l4": (58, 2.04e9),
    "a10": (72, 1.695e9),
    "rtx-3090": (82, 1.695e9),
    "rtx-4090": (128, 2.52e9),
    "rtx-5090": (170, 2.407e9),
    "a100-80gb": (108, 1.41e9),
    "h100-sxm": (132, 1.98e9),
    "b200": (148, 1.965e9),
    "mi300x": (304, 2.1e9),
    "l40s": (142, 2.52e9),
    "rtx-a6000": (84, 1.8e9),
    "rtx-6000-ada": (142, 2.505e9),
    "rtx-5080": (84, 2.617e9),
    "rtx-pro-6000": (188, 2.617e9),
    "rtx-pro-6000-server": (188, 2.494e9),
    "a30": (56, 1.44e9),
    "gh200": (132, 1.98e9),
    "mi250x": (110, 1.7e9),
    "mi325x": (304, 2.1e9),
    "mi355x": (256, 2.4e9),
    "v100-pcie-16gb": (80, 1.38e9),
    "v100s-32gb": (80, 1.597e9),
    "a40": (84, 1.74e9),
    "a100-pcie-40gb": (108, 1.41e9),
    "a800-80gb": (108, 1.41e9),
    "h800-sxm": (132, 1.98e9),
    "quadro-rtx-6000": (72, 1.77e9),
    "titan-rtx": (72, 1.77e9),
    "rtx-a4000": (48, 1.56e9),
    "rtx-a5000": (64, 1.695e9),
    "rtx-4000-ada": (48, 2.175e9),
    "rtx-4500-ada": (60, 2.58e9),
    "rtx-5000-ada": (100, 2.55e9),
    "rtx-2080-ti": (68, 1.545e9),
    "rtx-3060": (28, 1.777e9),
    "rtx-3060-ti": (38, 1.665e9),
    "rtx-3070": (46, 1.725e9),
    "rtx-3080": (68, 1.71e9),
    "rtx-3080-ti": (80, 1.665e9),
    "rtx-3090-ti": (84, 1.86e9),
    "rtx-4060": (24, 2.46e9),
    "rtx-4060-ti-8gb": (34, 2.535e9),
    "rtx-4070": (46, 2.475e9),
    "rtx-4070-super": (56, 2.475e9),
    "rtx-4070-ti": (60, 2.61e9),
    "rtx-4070-ti-super": (66, 2.61e9),
    "rtx-4080": (76, 2.505e9),
    "rtx-4080-super": (80, 2.55e9),
    "rtx-4090-d": (114, 2.52e9),
    "rtx-5060": (30, 2.497e9),
    "rtx-5060-ti-8gb": (36, 2.572e9),
    "rtx-5070": (48, 2.512e9),
    "rtx-5070-ti": (70, 2.452e9),
    "mi210": (104, 1.7e9),
    "mi250": (104, 1.7e9),
}


def properties(name: str, capability: tuple[int, int] = (9, 0), memory: int = 79 * 2**30, **more: Any) -> Any:
    given = {"multi_processor_count": 132, "clock_rate": 1_980_000, **more}
    return SimpleNamespace(name=name, total_memory=memory, major=capability[0], minor=capability[1], **given)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A host whose /dev has the given names, and of which torch says that it has these GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(names: list[str], *found: Any, cuda: str | None = "13.0") -> None:
        folder = tmp_path / "dev"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        monkeypatch.setattr(gpus, "DEVICES", folder)
        monkeypatch.setattr(gpus, "DRIVER", tmp_path / "no driver")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])

    return make


@pytest.mark.parametrize("sign", ["nvidia0", "nvidia3", "dxg", "kfd"])
def test_every_sign_of_a_gpu_finds_it(host: Host, sign: str) -> None:
    host([sign], properties("NVIDIA H100 80GB HBM3"))
    assert Machine.detect().device == "cuda"


def test_without_a_sign_of_a_gpu_torch_is_not_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(["null", "nvidia-caps"])

    def refuse() -> bool:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    assert Machine.detect().device == "cpu"
    assert gpus.unused() == ""


def test_a_known_gpu_has_table_rates_and_its_own_memory(host: Host) -> None:
    host(["nvidia0"], *[properties("NVIDIA H100 80GB HBM3")] * 2)
    known, table = Machine.detect(), Machine.named("h100-sxm")
    assert known.matrix_flops_per_s == table.matrix_flops_per_s
    assert known.matrix_peak_flops_per_s == table.matrix_peak_flops_per_s
    assert (known.name, known.devices_per_node, known.architecture) == ("NVIDIA H100 80GB HBM3", 2, "sm_90")
    assert known.memory_bytes.value == 79 * 2**30
    assert known.is_here
    assert not table.is_here
    assert not known.speed_caveat


def test_of_different_gpus_the_smallest_memory_counts(host: Host) -> None:
    host(["nvidia0"], properties("NVIDIA H100 80GB HBM3"), properties("NVIDIA L4", (8, 9), 22 * 2**30))
    found = Machine.detect()
    assert (found.name, found.devices_per_node, found.memory_bytes.value) == ("NVIDIA L4", 2, 22 * 2**30)
    assert found.memory_bytes.detail == "device memory, the least of NVIDIA H100 80GB HBM3, NVIDIA L4"


def test_a_calibration_keeps_gpu_count_and_peaks_current(host: Host) -> None:
    host(["nvidia0"], *[properties("NVIDIA H100 80GB HBM3")] * 8)
    rates = {"bf16": Figure(value=7e14, source="measured")}
    Machine.detect().replace(matrix_flops_per_s=rates, matrix_peak_flops_per_s={}).keep()
    host(["nvidia0"], properties("NVIDIA H100 80GB HBM3"))
    found = Machine.detect()
    assert (found.devices_per_node, found.matrix_flops_per_s) == (1, rates)
    assert found.peak("bf16-mixed") == 989e12


def test_an_unknown_gpu_is_estimated_and_reported_as_such(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"memory_clock_rate": 6_251_000, "memory_bus_width": 384}
    host(["nvidia0"], properties("NVIDIA RTX A5500", (8, 6), multi_processor_count=80, clock_rate=1_710_000, **clocks))
    found = Machine.detect()
    assert "an estimate" in found.speed_caveat
    assert "--calibrate" in found.speed_caveat
    assert found.matrix_flops_per_s["bf16"].value == pytest.approx(0.7 * 140e12, rel=0.01)
    assert found.memory_bytes_per_s is not None
    assert found.memory_bytes_per_s.value == pytest.approx(0.85 * 600e9, rel=0.01)
    figures = [*found.matrix_flops_per_s.values(), found.memory_bytes_per_s]
    assert {figure.source for figure in figures} == {"estimated"}
    assert found.peak("bf16-mixed") is None  # nobody has printed it
    assert has_fast_bf16(found)


def test_an_unknown_geforce_reaches_its_slower_tensor_cores(host: Host) -> None:
    name = "NVIDIA GeForce RTX 4070 Laptop GPU"
    host(["nvidia0"], properties(name, (8, 9), multi_processor_count=36, clock_rate=2_175_000))
    rates = Machine.detect().matrix_flops_per_s
    # products of 10,240 x 10,240 reached 15.1, 41.2 and 42.0 TFLOP/s on one
    assert rates["fp32"].value == pytest.approx(0.7 * 20e12, rel=0.02)
    assert rates["fp16"].value == rates["bf16"].value == pytest.approx(40.1e12, rel=0.02)
    assert rates["fp16"].detail.startswith("100% of what 36 processors")


def test_two_memories_of_one_name_are_the_smaller_by_name(host: Host) -> None:
    name = "NVIDIA GeForce RTX 4060 Ti"
    assert Machine.named(name).name == "rtx-4060-ti-8gb"  # a promise that both keep
    host(["nvidia0"], properties(name, (8, 9), 16 * 2**30))
    assert Machine.detect().memory_bytes.value == 16 * 2**30


def test_a_gpu_of_an_unknown_architecture_is_a_guess(host: Host) -> None:
    host(["kfd"], properties("Radeon", gcnArchName="gfx1100:sramecc-"))
    found = Machine.detect()
    assert found.architecture == "gfx1100"
    assert "a guess" in found.speed_caveat
    assert achieved(found, "product", "float32", 1e12) == 1e13


@pytest.mark.parametrize("name", PEAKS)
def test_multiprocessors_and_clock_give_the_peaks_of_the_table(name: str) -> None:
    row, (processors, clock) = devices()[name], PEAKS[name]
    gpu = gpus.Gpu(row["called"][0], row["architecture"], 2**34, processors, clock)
    found = gpus.estimated_flops_per_s(gpu)
    kinds = found.keys() & row["flops"].keys()
    assert {"fp32", "fp16"} <= kinds
    assert {kind: found[kind] / 1e12 for kind in kinds} == pytest.approx(
        {kind: row["flops"][kind] for kind in kinds}, rel=0.1
    )


def test_every_device_of_the_table_is_of_a_known_architecture() -> None:
    trains = [row for row in devices().values() if not row.get("explain_only")]
    assert len(trains) > 30
    assert {row["architecture"] for row in trains} <= gpus.GENERATIONS.keys()


@pytest.mark.parametrize(
    ("cuda", "variables", "said"),
    [
        (None, {}, "it is a CPU build"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides every GPU"),
        ("13.0", {}, "the driver reports none"),
    ],
)
def test_an_unused_gpu_is_reported(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str | None,
    variables: dict[str, str],
    said: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    host(["nvidia0"], cuda=cuda)
    assert Machine.detect().device == "cpu"
    assert said in gpus.unused()
    assert command(monkeypatch, "machine") == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_used_gpu_is_not_reported(host: Host) -> None:
    host(["nvidia0"], properties("NVIDIA L4", (8, 9)))
    assert gpus.unused() == ""
