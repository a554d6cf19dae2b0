"""What only some jobs need is installed by extras, which errors name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import tiny
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.optional_packages import EXTRA_OF, import_optional
from tightfit.report import trackers

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WITHOUT = f"""
import importlib.machinery
import sys

hidden = ({", ".join(repr(name.partition(".")[0]) for name in EXTRA_OF)}, "tensorboard", "torchao", "torchmetrics", "wandb", "mlflow")


find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in hidden else find(name, path, target)
)
from tightfit.__main__ main as tightfit

sys.argv = ["tightfit", *sys.argv[1:]]
tightfit()
""".replace("__main__ main", "__main__ import main")


@pytest.mark.parametrize("module", sorted(EXTRA_OF))
def test_a_missing_package_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"tightfit\[{EXTRA_OF[module]}\]"):
        import_optional(module, "job: data")


def test_every_extra_that_is_named_exists() -> None:
    assert {*EXTRA_OF.values(), "trackers", "tensorboard", "float8", "lora", "qlora", "metrics"} <= set(EXTRAS)


def test_training_needs_no_optional_package(tmp_path: Path) -> None:
    content = tiny.content(steps=2, checkpoint_every="never")
    del content["train"]["trackers"]  # the default is TensorBoard, if it is installed
    content["plan"] = {"compile": "none", "precision": "fp32"}
    path = tmp_path / "job.yaml"
    path.write_text(Job.parse(content).to_yaml())
    command = [sys.executable, "-c", WITHOUT, "train", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "record.json").exists()
    assert not (tmp_path / "out" / "tensorboard").exists()


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.check_trackers(Job.parse(tiny.content(trackers=["tensorboard"])))
    with pytest.raises(InputError, match=r"wandb.*\n.*tightfit\[trackers\]"):
        trackers.check_trackers(Job.parse(tiny.content(trackers=["wandb"])))
