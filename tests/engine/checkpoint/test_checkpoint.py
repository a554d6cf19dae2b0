"""A resumed run equals the uninterrupted run: the same losses and weights, bit for bit, on one
device in fp32."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tests import devices, tiny
from tests.devices import on_each_device
from tightfit import tensor_files
from tightfit.engine.checkpoint.save import checkpoints
from tightfit.engine.rng import random_states, set_random_states
from tightfit.errors import InputError, TightfitWarning

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adamw", {}, {}),
    ("sgd", {"optimizer": "sgd"}, {"micro_batch": 3}),
    ("lamb", {"optimizer": "lamb"}, {}),
    ("lars", {"optimizer": "lars"}, {}),
    ("lion", {"optimizer": "lion"}, {}),
    ("muon", {"optimizer": "muon"}, {}),
    ("adafactor", {"optimizer": "adafactor"}, {}),
    ("cosine with warm-up", {"schedule": "cosine", "warmup": 2}, {"chunked_loss": 7}),
    ("8-bit states", {}, {"states": "8-bit"}),
    ("kahan", {}, {"precision": "bf16-true", "rounding": "kahan"}),
    ("stochastic", {}, {"precision": "bf16-true", "rounding": "stochastic"}),
    ("master weights", {}, {"precision": "bf16-true", "master_weights": True, "micro_batch": 3}),
    ("fp16 masters", {"optimizer": "sgd"}, {"precision": "fp16-true", "master_weights": True, "states": "8-bit"}),
    ("loss scale", {}, {"precision": "fp16-mixed", "loss_scale": "dynamic"}),
    ("fused", {}, {"fused_optimizer": True, "update_in_backward": True}),
    ("recompute", {}, {"recompute": "full"}),
]


@pytest.mark.sweep(4)
@on_each_device
@pytest.mark.parametrize(("train", "plan"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resumed_run_equals_the_uninterrupted_run(
    train: dict[str, Any], plan: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """With dropout, so that the device's own generator has to be where it was."""
    job, fitted, machine = tiny.job(**train), tightfit.Plan(**plan), devices.machine(device)
    whole = tightfit.build(job, fitted, machine)
    expected = [step.loss for step in tightfit.train(whole)]
    first = tightfit.build(job, fitted, machine)
    before = [step.loss for step in itertools.islice(tightfit.train(first), 5)]
    tightfit.save(first, tmp_path, 5)
    torch.manual_seed(99)  # what a new process would have
    second = tightfit.build(job, fitted, machine)
    start = tightfit.resume(second, tmp_path)
    after = [step.loss for step in tightfit.train(second, start)]
    assert start == 5
    assert before + after == expected
    for name, value in whole.model.state_dict().items():
        assert value.device.type == device
        assert torch.equal(value, second.model.state_dict()[name]), name


@pytest.mark.gpu
def test_random_generators_of_a_gpu_are_resumed() -> None:
    """Generators that no training here uses are restored too: each gives the same next number."""
    before = random_states()
    drawn = [torch.rand(8, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    torch.manual_seed(7)
    set_random_states(before)
    again = [torch.rand(8, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    assert all(map(torch.equal, drawn, again))


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda")], ids="to".join)
def test_a_checkpoint_moves_between_kinds_of_devices(kinds: tuple[str, str], tmp_path: Path) -> None:
    """Weights and moments are the same; rounding and dropout are another device's from there on."""
    first = tightfit.build(tiny.job(), machine=devices.machine(kinds[0]))
    list(itertools.islice(tightfit.train(first), 5))
    tightfit.save(first, tmp_path, 5)
    second = tightfit.build(tiny.job(), machine=devices.machine(kinds[1]))
    assert tightfit.resume(second, tmp_path) == 5
    for name, value in first.model.state_dict().items():
        assert torch.equal(value.cpu(), second.model.state_dict()[name].cpu()), name
    assert len(list(tightfit.train(second, 5))) == 3


def test_resumes_mid_epoch_with_a_short_last_step(tmp_path: Path) -> None:
    job = tiny.job(steps=None, epochs=2)  # 45 samples an epoch in batches of 4
    whole = tightfit.build(job)
    steps = list(tightfit.train(whole))
    assert [step.samples for step in steps[-2:]] == [4, 2]
    first = tightfit.build(job)
    list(itertools.islice(tightfit.train(first), 13))
    tightfit.save(first, tmp_path, 13)
    second = tightfit.build(job)
    after = [step.loss for step in tightfit.train(second, tightfit.resume(second, tmp_path))]
    assert after == [step.loss for step in steps[13:]]


@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [("adamw", "weight_decay", 2.0), ("adamw", "betas", (0.3, 0.5)), ("sgd", "momentum", 0.1)],
)
def test_options_that_a_loop_changes_survive_a_resume(optimizer: str, option: str, value: Any, tmp_path: Path) -> None:
    job, losses = tiny.job(optimizer=optimizer), []
    run = tightfit.build(job)
    for step in tightfit.train(run):
        losses.append(step.loss)
        if step.step == 2:
            for group in run.optimizer.param_groups:
                group[option] = value
        if step.step == 3:
            tightfit.save(run, tmp_path, 4)
    again = tightfit.build(job)
    assert [step.loss for step in tightfit.train(again, tightfit.resume(again, tmp_path))] == losses[4:]
    assert all(group[option] == value for group in again.optimizer.param_groups)
    assert losses[4:] != [step.loss for step in tightfit.train(tightfit.build(job))][4:]


def test_old_checkpoints_are_deleted_and_partial_ones_ignored(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job(keep_checkpoints=2))
    for step in (1, 2, 3):
        tightfit.save(run, tmp_path, step)
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert tightfit.resume(run, tmp_path) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [({"learning_rate": 1e-3}, "train.learning_rate"), ({"batch": 8}, "train.batch"), ({"seed": 4}, "train.seed")],
)
def test_another_job_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    tightfit.save(tightfit.build(tiny.job()), tmp_path, 1)
    with pytest.raises(InputError, match=field):
        tightfit.resume(tightfit.build(tiny.job(**change)), tmp_path)


def test_data_with_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def run(samples: int) -> Any:
        file.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(samples)))
        return tightfit.build(tiny.job().replace(data={"jsonl": str(file), "packing": "padded", "sequence_length": 32}))

    tightfit.save(run(20), tmp_path, 1)
    with pytest.raises(InputError, match="the data had 20 samples and now has 19, so their order is another one"):
        tightfit.resume(run(19), tmp_path)
    assert tightfit.resume(run(20), tmp_path) == 1


def test_a_finished_training_resumes_with_more_steps(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job())
    list(tightfit.train(run))
    tightfit.save(run, tmp_path, 8)
    longer = tightfit.build(tiny.job(steps=10))
    assert len(list(tightfit.train(longer, tightfit.resume(longer, tmp_path)))) == 2


def test_a_longer_training_says_how_its_learning_rate_changes(tmp_path: Path) -> None:
    def run(**train: Any) -> Any:
        return tightfit.build(tiny.job(schedule="cosine", learning_rate=1e-3, **train))

    tightfit.save(run(steps=8), tmp_path, 4)
    assert tightfit.resume(run(steps=8), tmp_path) == 4
    with pytest.warns(TightfitWarning, match=r"learning rate of step 5 is 0.000854 and not 0.0005"):
        tightfit.resume(run(steps=16), tmp_path)
    with pytest.warns(TightfitWarning, match=r"after 8 steps and now ends after 16"):
        tightfit.resume(run(steps=None, epochs=64 / 45), tmp_path)


def test_another_plan_resumes_the_same_job(tmp_path: Path) -> None:
    job = tiny.job()
    expected = [step.loss for step in tightfit.train(tightfit.build(job))]
    first = tightfit.build(job)
    list(itertools.islice(tightfit.train(first), 5))
    tightfit.save(first, tmp_path, 5)
    plan = tightfit.Plan(
        micro_batch=2, update_in_backward=False, fused_optimizer=True, materialize="device", chunked_loss=9
    )
    second = tightfit.build(job.replace(model={**tiny.MODEL}), plan)
    after = [step.loss for step in tightfit.train(second, tightfit.resume(second, tmp_path))]
    assert after == pytest.approx(expected[5:], rel=1e-2)  # attention's dropout falls on other numbers


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = tightfit.build(tiny.job())
    path = tightfit.save(run, tmp_path, 1)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_a_large_checkpoint_is_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(tensor_files, "FILE_BYTES", 20_000)
    run = tightfit.build(tiny.job())
    list(itertools.islice(tightfit.train(run), 2))
    path = tightfit.save(run, tmp_path, 2)
    for kind in ("model", "optimizer"):
        names = sorted(one.name for one in path.glob(f"{kind}-*"))
        assert len(names) > 2
        assert names[0] == f"{kind}-00001-of-{len(names):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    again = tightfit.build(tiny.job())
    assert tightfit.resume(again, tmp_path) == 2
    for one, other in zip(run.optimizer.state.values(), again.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def flip(file: Path) -> None:
    """Turn one bit of a file over."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def refusal(run: tightfit.Run, folder: Path) -> InputError:
    with pytest.raises(InputError) as raised:
        tightfit.resume(run, folder)
    return raised.value


def test_a_file_that_is_missing_or_altered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 20_000)  # several of each kind, with indices
    run = tightfit.build(tiny.job())
    taken = list(itertools.islice(tightfit.train(run), 2))
    first, path = tightfit.save(run, tmp_path, 1), tightfit.save(run, tmp_path, 2)
    names = sorted(one.name for one in path.iterdir())
    assert {"state.json", "checksums.json", "config.json", "model.safetensors.index.json"} <= set(names)
    assert len([name for name in names if name.endswith(".safetensors")]) > 4
    for name in names:
        whole = (path / name).read_bytes()
        flip(path / name)
        error = refusal(run, tmp_path)
        assert path.name in error.asked
        if name != "checksums.json":  # of which a bit may belong to another file
            assert error.found.startswith(f"{name} is not as it was written")
        assert f"delete {path}" in error.fix
        assert str(first) in error.fix
        (path / name).unlink()
        assert refusal(run, tmp_path).found == f"{name} is missing"
        (path / name).write_bytes(whole)
    assert tightfit.resume(run, tmp_path) == 2
    assert len(taken) == 2


def test_error_without_an_earlier_checkpoint_suggests_a_restart(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job())
    flip(tightfit.save(run, tmp_path, 1) / "model.safetensors")
    error = refusal(run, tmp_path)
    assert error.exit_code == 2
    assert "another --out" in error.fix


def test_a_checkpoint_contains_only_tensors_and_json(tmp_path: Path) -> None:
    path = tightfit.save(tightfit.build(tiny.job()), tmp_path, 1)
    for file in path.iterdir():
        if file.suffix == ".safetensors":
            tensor_files.Reader(path, file.name.removesuffix(".safetensors"))
        else:
            json.loads(file.read_text())
    assert not list(path.glob("*.pt"))


def test_a_checkpoint_of_an_earlier_version_is_reported(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "state.pt").write_bytes(b"PK")
    assert "earlier version" in refusal(tightfit.build(tiny.job()), tmp_path).found


def test_a_resumed_run_writes_nothing_into_the_checkpoint(tmp_path: Path) -> None:
    run = tightfit.build(tiny.job())
    list(itertools.islice(tightfit.train(run), 2))
    path = tightfit.save(run, tmp_path, 2)
    before = {file: file.read_bytes() for file in path.iterdir()}
    again = tightfit.build(tiny.job())
    list(tightfit.train(again, tightfit.resume(again, tmp_path)))
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def test_at_most_two_files_are_in_memory_at_once(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def fetch(name: str) -> torch.Tensor:
        nonlocal most
        made = torch.ones(1000)
        alive.append(weakref.ref(made))
        most = max(most, sum(one() is not None for one in alive))
        return made

    names = {f"{number}.safetensors": [f"{number}.{place}" for place in range(5)] for number in range(8)}
    with tensor_files.Writer() as writer:
        writer.fill(tmp_path, names, fetch, names)
    assert not writer.errors
    assert len(list(tmp_path.iterdir())) == 8
    assert most <= 11  # of ten in two files, and the one under way
