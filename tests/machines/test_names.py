"""What a machine is called: the table's names, drivers' names, clouds' instance types and machine files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import tightfit
from tests import tiny
from tests.report.test_run_folder import command
from tightfit.errors import InputError
from tightfit.machine import TYPES, Machine
from tightfit.machines import NETWORK_ACHIEVED, devices, instances

NEEDED = {
    "group",
    "called",
    "architecture",
    "memory",
    "bandwidth",
    "flops",
    "link",
    "host",
    "node",
    "network",
    "source",
}


@pytest.mark.parametrize("name", devices())
def test_every_row_has_its_figures_and_a_source(name: str) -> None:
    row = devices()[name]
    assert row.keys() >= NEEDED
    assert len(row["source"]) > 10
    assert {"fp32"} < row["flops"].keys() <= set(TYPES)
    wide, narrow = row["flops"]["fp32"], row["flops"].get("bf16") or row["flops"]["fp16"]
    assert wide <= narrow <= row["flops"].get("fp8", 2 * narrow)
    machine = Machine.named(name)
    assert machine.explain_only == bool(machine.training_caveat) == row.get("explain_only", False)


def test_no_two_devices_have_one_name() -> None:
    said = [name.lower() for row in devices().values() for name in row["called"]]
    said += [name.lower() for name in (*devices(), *instances())]
    assert len(said) == len(set(said))


@pytest.mark.parametrize("name", instances())
def test_instance_types_are_hosts_of_known_devices(name: str) -> None:
    machine, facts = Machine.named(name), instances()[name]
    assert (machine.name, machine.devices_per_node, machine.nodes) == (facts["device"], facts["count"], 1)
    assert machine.host_memory_bytes.value == pytest.approx(facts["memory"] * 2**30)
    assert machine.network_bytes_per_s is not None
    published = machine.network_bytes_per_s.value / NETWORK_ACHIEVED * 8 * facts["count"]
    assert published == pytest.approx(facts["network"] * 1e9)
    assert name in machine.network_bytes_per_s.detail


@pytest.mark.parametrize(
    ("text", "name", "per_node", "nodes"),
    [
        ("h100-sxm:8x4", "h100-sxm", 8, 4),
        ("NVIDIA H100 80GB HBM3", "h100-sxm", 1, 1),
        ("nvidia l40s:2", "l40s", 2, 1),
        ("AMD Instinct MI355X:8x2", "mi355x", 8, 2),
        ("p5.48xlarge", "h100-sxm", 8, 1),
        ("p5.48xlarge:4", "h100-sxm", 8, 4),
        ("Standard_NC24ads_A100_v4", "a100-pcie-80gb", 1, 1),
        ("nd96isr_h100_v5:2", "h100-sxm", 8, 2),
        ("a2-highgpu-4g", "a100-40gb", 4, 1),
    ],
)
def test_a_machine_by_any_of_its_names(text: str, name: str, per_node: int, nodes: int) -> None:
    machine = Machine.named(text)
    assert (machine.name, machine.devices_per_node, machine.nodes) == (name, per_node, nodes)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("h100", "did you mean 'h100-pcie' or 'h100-nvl' or 'h100-sxm'?"),
        ("p4d.42xlarge", "did you mean 'p4d.24xlarge'?"),
        ("p5.48xlarge:8x4", "write it like p5.48xlarge:4"),
        ("l40s:0", "write it like l40s:8"),
        ("l40s:many", "write it like l40s:8"),
        ("abacus", "tightfit machine --list"),
        ("", "tightfit machine --list"),
    ],
)
def test_a_wrong_name_names_its_remedy(text: str, remedy: str) -> None:
    with pytest.raises(InputError) as raised:
        Machine.named(text)
    assert remedy in raised.value.fix


def test_a_machine_file_is_a_machine_that_is_not_here(tmp_path: Path) -> None:
    here = Machine.detect()
    for name, text in (("here.json", here.to_json()), ("here.yaml", here.to_yaml())):
        path = tmp_path / name
        path.write_text(text)
        machine = Machine.named(str(path))
        assert not machine.is_here
        assert machine.memory_bytes.value == here.memory_bytes.value
        assert machine.rates == here.rates
    path = tmp_path / "short.yml"
    path.write_text("name: ours\ndevice: cuda\nmemory_bytes: {value: 24e9}\nhost_memory_bytes: {value: 64e9}\n")
    machine = Machine.named(str(path))
    assert (machine.memory_bytes.value, machine.memory_bytes.source) == (24e9, "given")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_bytes": {"value": -1}}, "memory_bytes.value: -1"),
        ({"memory_bytes": {"value": 1e9, "source": "hearsay"}}, "hearsay"),
        ({"memory_bytes": 24}, "memory_bytes"),
        ({"device": "tpu"}, "device"),
        ({"nodes": 0}, "nodes"),
        ({"bandwidth": 3}, "bandwidth"),
        ({"matrix_flops_per_s": {"bf-16": {"value": 1e12}}}, "did you mean 'bf16'"),
        ({"rates": {"product/float32": {1024: 0.0}}}, "product/float32"),
        ({"rates": {"product/float32": {}}}, "product/float32"),
    ],
)
def test_a_wrong_machine_file_is_refused_with_its_field(
    change: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = {"name": "ours", "device": "cuda", "memory_bytes": {"value": 24e9}, "host_memory_bytes": {"value": 64e9}}
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump({**good, **change}))
    assert command(monkeypatch, "machine", str(path)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "fix:" in error


def test_the_schema_describes_a_machine_file() -> None:
    schema = Machine.model_json_schema()
    assert schema["required"] == ["name", "device", "memory_bytes", "host_memory_bytes"]
    assert schema["$defs"]["Figure"]["required"] == ["value"]


def test_the_list_shows_every_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert command(monkeypatch, "machine", "--list") == 0
    shown = capsys.readouterr().out
    for word in (*devices(), *instances(), *(row["group"] for row in devices().values())):
        assert word in shown
    assert shown.count("explain only") == sum(row.get("explain_only", False) for row in devices().values())


@pytest.mark.slow
def test_what_is_only_explained_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(tiny.write(tmp_path))
    assert command(monkeypatch, "explain", job, "--machine", "tpu-v5e", "--plan", "reference") == 0
    assert "does not train on it" in capsys.readouterr().out
    assert command(monkeypatch, "explain", job, "--machine", "tpu-v5e", "--plan", "reference", "--json") == 0
    assert json.loads(capsys.readouterr().out)["machine"]["explain_only"]
    assert command(monkeypatch, "train", job, "--machine", "gaudi-3", "--out", str(tmp_path / "out")) == 2
    assert "tightfit cannot train on this device" in capsys.readouterr().err
    with pytest.raises(InputError, match="does not train on it"):
        tightfit.build(tiny.job(), tightfit.Plan(), Machine.named("apple-m3-max"))


def test_training_uses_a_machine_file_s_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, here, out = str(tiny.write(tmp_path, steps=4)), Machine.detect(), tmp_path / "out"
    path = tmp_path / "ours.json"
    path.write_text(here.replace(name="ours", cores=99).to_json())
    common = ("--out", str(out), "--plan", "reference")
    assert command(monkeypatch, "train", job, "--machine", str(path), *common) == 0
    machine = json.loads((out / "record.json").read_text())["machine"]
    assert (machine["name"], machine["cores"], machine["memory_bytes"]["source"]) == ("ours", here.cores, "system")
    assert command(monkeypatch, "train", job, "--machine", "l40s", *common) == 2
    assert "training runs on this machine" in capsys.readouterr().err
