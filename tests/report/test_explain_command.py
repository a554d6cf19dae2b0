"""`tightfit explain` and `tightfit machine`, as people and scripts use them."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest

from tests import tiny
from tests.report.test_run_folder import command
from tightfit.machine import Machine
from tightfit.report.quiet import quiet_libraries

ROWS = {"parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "runtime", "peak"}
SECONDS = {"compute_s", "memory_s", "communication_s", "bubble_s", "input_s", "step_s"}
PINNED = ("--set", "plan.compile=none")


def test_json_output_has_the_documented_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "explain", str(tiny.write(tmp_path)), "--machine", "l4", "--json", *PINNED) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == 0
    assert told["machine"]["name"] == "l4"
    for place, plan in enumerate(told["plans"]):
        assert plan["memory"].keys() >= ROWS
        assert plan["time"].keys() >= SECONDS
        assert {"plan", "fits", "changes_math", "tokens_per_s", "mfu"} <= plan.keys()
        assert bool(plan["rejected_because"]) == bool(place)
        assert plan["memory"]["peak"] == pytest.approx(
            sum(size for row, size in plan["memory"].items() if row != "peak"), rel=0.02
        )


def test_text_output_has_all_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    picture = tmp_path / "memory.svg"
    job = str(tiny.write(tmp_path))
    assert (
        command(monkeypatch, "explain", job, "--machine", "t4", "--picture", str(picture), "--top", "3", *PINNED) == 0
    )
    shown = capsys.readouterr().out
    for words in ("one device, fp32, keep everything", "at the peak", "f forward", "why not", "numerics"):
        assert words in shown
    assert "<svg" in picture.read_text()


def test_predicted_is_shown_beside_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(tiny.write(tmp_path))
    assert command(monkeypatch, "explain", job, "--plan", "reference", "--analyze") == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if "predicted" in line and "measured" in line)
    peak = next(line for line in lines[head:] if line.startswith("peak"))
    assert abs(float(peak.rsplit(None, 1)[1].rstrip("%"))) <= 3
    assert any(line.startswith("step") for line in lines[head:])


@pytest.mark.parametrize(
    "arguments",
    [("explain", "--analyze"), pytest.param(("verify",), marks=pytest.mark.slow)],
    ids=lambda given: given[0],
)
@pytest.mark.slow
def test_single_process_commands_plan_for_one_device(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    several = Machine.detect().replace(devices_per_node=2)
    monkeypatch.setattr("tightfit.report.commands.this_machine", lambda say: several)
    name, *more = arguments
    assert command(monkeypatch, name, str(tiny.write(tmp_path)), *more, *PINNED) == 0
    assert "dp_replicate" not in capsys.readouterr().out


@pytest.mark.slow
def test_if_nothing_fits_the_exit_code_is_3_with_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(tiny.write(tmp_path))
    assert command(monkeypatch, "explain", job, "--machine", "t4", "--memory", "200MiB", *PINNED) == 3
    said = capsys.readouterr().err
    for words in ("needs", "largest:", "safety margin", "or limits.memory of"):
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--machine", "h101"], "did you mean"),
        (["--machine", "h200:0"], "write it like h200:8"),
        (["--machine", "h200", "--analyze"], "leave out --analyze or --machine"),
        (["--picture", "memory.gif"], "memory.svg"),
        (["--picture", "missing/memory.svg"], "its folder does not exist"),
        (["--memory", "much"], "24GiB"),
        (["--memory", "24"], "write the unit: 24GiB"),
    ],
)
def test_mistakes_name_their_remedy(
    arguments: list[str],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "explain", str(tiny.write(tmp_path)), *arguments) == 2
    assert remedy in capsys.readouterr().err


def test_machines_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "machine", "--list") == 0
    assert "mi300x" in capsys.readouterr().out
    assert command(monkeypatch, "machine", "h100-sxm:8x4", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["devices_per_node"], told["nodes"]) == (8, 4)
    assert told["matrix_flops_per_s"]["bf16"]["value"] < told["matrix_peak_flops_per_s"]["bf16"]["value"]
    assert command(monkeypatch, "machine", "h200", "--calibrate") == 2


@pytest.mark.slow
@pytest.mark.slow
def test_a_machine_without_bf16_uses_fp16_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ("--set", "model.hidden_size=1024", "--set", "model.intermediate_size=4096", "--set", "train.batch=32")
    for allow, precision in (("[bf16]", "fp32"), ("[fp16]", "fp16-mixed")):
        arguments = ("--machine", "t4", "--json", "--set", f"allow={allow}", *wide, *PINNED)
        assert command(monkeypatch, "explain", str(tiny.write(tmp_path)), *arguments) == 0
        assert json.loads(capsys.readouterr().out)["plans"][0]["plan"]["precision"] == precision


def test_the_explained_plan_is_the_trained_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = str(tiny.write(tmp_path, steps=4)), tmp_path / "out"
    assert command(monkeypatch, "explain", job, "--json", *PINNED) == 0
    explained = json.loads(capsys.readouterr().out)["plans"][0]
    assert command(monkeypatch, "train", job, "--out", str(out), *PINNED) == 0
    assert "predicted" in capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    assert record["plan"] == explained["plan"]
    assert json.loads((out / "predicted.json").read_text())["plan"] == explained["plan"]
    assert record["peak_bytes"]["predicted"] == pytest.approx(record["peak_bytes"]["measured"], rel=0.05)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = str(tiny.write(tmp_path, steps=4)), tmp_path / "out"
    first = ("--set", "plan.recompute=full", *PINNED)
    assert command(monkeypatch, "train", job, "--out", str(out), *first) == 0
    assert command(monkeypatch, "train", job, "--out", str(out), "--resume", "--set", "train.steps=6") == 0
    assert json.loads((out / "record.json").read_text())["plan"]["recompute"] == "full"


@pytest.mark.parametrize("name", ["torch._higher_order_ops.wrap", "torch.utils._pytree", "torchao", "torchao.kernel"])
def test_notes_of_libraries_are_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch warns about compiled selective recomputation, torchao about libraries that it cannot
    load."""
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    quiet_libraries()
    assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
