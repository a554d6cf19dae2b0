"""The package seen from outside: its names, the cost of importing it, the direction of its imports;
and the layout of its tests."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import tightfit

ROOT = Path(__file__).parent.parent
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_public_names_are_sorted_complete_and_importable() -> None:
    assert tightfit.__all__ == sorted(tightfit.__all__) == dir(tightfit)
    for name in tightfit.__all__:
        assert getattr(tightfit, name).__name__ == name


def test_importing_job_plan_and_machine_imports_no_torch() -> None:
    """The host shows no GPU: for a GPU torch is imported to ask about it."""
    assert not {"torch", "transformers", "numpy"} & modules_after(
        "import tightfit; from tightfit.machines import gpus; gpus.shows_signs = lambda: False; "
        "tightfit.Job, tightfit.Plan, tightfit.Machine.detect(), tightfit.Record"
    )


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['tightfit', '--help']\nfrom tightfit.__main__ import main\ntry: main()\nexcept SystemExit: pass"
    assert not {"torch", "transformers", "pydantic", "numpy", "yaml"} & modules_after(code)


def test_commands_show_their_plan_before_importing_torch() -> None:
    assert "torch" not in modules_after("import tightfit.report.commands")


TRAIN_ON_ONE_DEVICE = """
import torch
import tightfit

samples = [(torch.randn(4), torch.randn(2)) for _ in range(8)]
train = tightfit.Train(optimizer="sgd", learning_rate=0.1, batch=4, steps=1, trackers=[])
job = tightfit.Job(model=lambda: torch.nn.Linear(4, 2), data=samples, loss=torch.nn.MSELoss(), train=train)
print(*[type(step).__name__ for step in tightfit.train(tightfit.build(job, tightfit.Plan()))])
"""


def test_training_on_one_device_imports_no_internals_of_several() -> None:
    """torch itself imports its fully_shard and its fake process group in the first update of any
    optimizer, so this looks at the modules of tightfit that use them."""
    imported = modules_after(TRAIN_ON_ONE_DEVICE)
    assert "Step" in imported  # what the code printed
    assert "tightfit._torch.modules" in imported
    assert not {
        "tightfit._torch.fsdp",
        "tightfit.parallel.fsdp.collective_order",
        "tightfit.parallel.fsdp.fully_shard",
        "tightfit.parallel.fsdp.prefetch",
        "tightfit.parallel.fsdp.unused_parameters",
        "tightfit.planner.tracing.device_emulation",
    } & set(imported)


def test_imports_point_one_way() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "import_directions.py"))
    assert script["violations"]() == []
    packages = {script["package_of"](path) for path in script["SOURCE"].rglob("*.py")}
    assert packages <= set(script["RANK"]), "a package that the layers do not place"


def test_test_names_are_unique_and_under_60_characters() -> None:
    for path in TEST_FILES:
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        names = [name for name in names if name.startswith("test_")]
        assert len(set(names)) == len(names), path
        assert [name for name in names if len(name) >= 60] == [], path


def test_test_folders_mirror_the_package() -> None:
    """Beside the folders of the package there are only the suites that test several of its parts together."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in TEST_FILES}
    own = {folder for folder in folders if not (ROOT / "src" / "tightfit" / folder).is_dir()}
    assert own <= {Path("benchmarks"), Path("contract"), Path("fuzz"), Path("journeys"), Path("zoo")}
