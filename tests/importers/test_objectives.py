"""Files that ask for another objective are refused; keys that change the training are in the job's
comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.errors import InputError
from tightfit.importers.importing import Imported, file_texts, import_file
from tightfit.report.importing import import_command

ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 2, "learning_rate": 1e-5}
AXOLOTL = {"base_model": "org/name", "micro_batch_size": 2, "sequence_len": 64, "learning_rate": 1e-5}
FACTORY = {"model_name_or_path": "org/name", "template": "llama3", "learning_rate": 1e-5}
TORCHTUNE = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}, "batch_size": 2}
LIGHTNING = {"max_epochs": 3, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}


def imported(content: dict[str, Any], folder: Path, tool: str | None = None) -> Imported:
    (folder / "file.yaml").write_text(yaml.safe_dump(content))
    return import_file(folder / "file.yaml", tool)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({**AXOLOTL, "rl": "dpo"}, "rl: dpo"),
        ({**AXOLOTL, "rl": "grpo"}, "rl: grpo"),
        ({**AXOLOTL, "reward_model": True}, "reward_model: true"),
        *(({**FACTORY, "stage": stage}, f"stage: {stage}") for stage in ("rm", "ppo", "dpo", "kto")),
        ({**ARGUMENTS, "beta": 0.1}, "beta: 0.1"),
        ({**ARGUMENTS, "loss_type": "sigmoid"}, "loss_type: sigmoid"),
        ({**ARGUMENTS, "loss_type": ["ipo", "sft"]}, "loss_type"),
        ({**ARGUMENTS, "num_generations": 8}, "num_generations: 8"),
        ({**ARGUMENTS, "center_rewards_coefficient": 0.01}, "center_rewards"),
        ({**TORCHTUNE, "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "loss._component_: torchtune.rlhf"),
        ({**TORCHTUNE, "policy_model": {"_component_": "a.b"}}, "policy_model"),
        ({**TORCHTUNE, "teacher_model": {"_component_": "a.b"}, "kd_ratio": 0.5}, "kd_ratio: 0.5"),
    ],
    ids=str,
)
def test_another_objective_is_refused(content: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        imported(content, tmp_path)
    assert f"file.yaml: {key}" in caught.value.asked
    assert "tightfit has no " in caught.value.found
    assert "without this key" in caught.value.fix


@pytest.mark.parametrize(
    "content",
    [
        {**AXOLOTL, "rl": None, "reward_model": False, "rl_beta": 0.1},
        {**FACTORY, "stage": "sft", "pref_beta": 0.1},
        {**ARGUMENTS, "loss_type": "nll"},
    ],
    ids=str,
)
def test_supervised_files_with_idle_keys_are_imported(content: dict[str, Any], tmp_path: Path) -> None:
    rows = {row.key: row.outcome for row in imported(content, tmp_path).rows}
    idle = {"rl", "reward_model", "rl_beta", "pref_beta", "loss_type"} & set(rows)
    assert {rows[key] for key in idle} == {"not needed"}


def test_a_mistyped_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of: sft, pt"):
        imported({**FACTORY, "stage": "stf"}, tmp_path)


def test_lost_keys_are_comments_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        **ARGUMENTS,
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5,
        "group_by_length": False,
        "wrong": 1,
    }
    text = file_texts(imported(content, tmp_path), Path("file.yaml"))["job.yaml"]
    lines = [line for line in text.splitlines() if line.startswith("# No counterpart: ")]
    assert [line.split(": ")[1] for line in lines] == ["label_smoothing_factor", "neftune_noise_alpha", "wrong"]
    assert "label_smoothing_factor: 0.1 (tightfit has no label smoothing" in lines[0]
    import_command(tmp_path / "file.yaml", None, tmp_path / "out", None, as_json=False)
    shown = capsys.readouterr().out.split("no counterpart: without these keys")[1]
    assert "neftune_noise_alpha: 5 (tightfit adds no noise to embeddings)" in shown
    assert (tmp_path / "out" / "job.yaml").read_text() == text


@pytest.mark.parametrize("section", [None, "trainer"])
@pytest.mark.parametrize(("algorithm", "clip"), [("value", None), ("norm", 0.5), (None, 0.5)])
def test_lightning_clips_by_value_or_norm(
    algorithm: str | None, clip: float | None, section: str | None, tmp_path: Path
) -> None:
    content: dict[str, Any] = {**LIGHTNING, "gradient_clip_algorithm": algorithm}
    found = imported({section: content} if section else content, tmp_path, "lightning")
    assert found.job["train"].get("clip") == clip
    row = next(row for row in found.rows if row.key.endswith("gradient_clip_val"))
    assert (row.outcome, "its value" in row.note) == (("no counterpart", True) if clip is None else ("mapped", False))
