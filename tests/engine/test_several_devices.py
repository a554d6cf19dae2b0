"""Several processes train like one: every optimizer, clipping, uneven shares, evaluation,
checkpoints."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import tightfit
from tests.contract import cases
from tests.pool import together
from tests.sweeps import part, spread
from tightfit import tensor_files
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import check_folder, save
from tightfit.errors import InputError, TightfitError
from tightfit.runtime.run import parameter_count

PLANS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2, "micro_batch": 2},
    {"zero": 3, "dp_shard": 2},
]
SLICED: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "dp_replicate": 2, "micro_batch": 2},
    {"tp": 2, "dp_shard": 2, "zero": 1},
    {"tp": 2, "dp_shard": 2, "zero": 2, "recompute": "full"},
    {"tp": 2, "dp_shard": 2, "zero": 3, "recompute": "full"},
]
HYBRID: list[dict[str, Any]] = [
    {"zero": stage, "dp_shard": 2, "dp_replicate": 2, "micro_batch": 1} for stage in (1, 2, 3)
]
PIPED: list[dict[str, Any]] = [
    {"pp": 2, "micro_batch": 2},
    {"pp": 4, "micro_batch": 1, "schedule": "zero-bubble"},
    {"pp": 2, "micro_batch": 1, "dp_replicate": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "micro_batch": 2, "dp_shard": 2, "zero": 1, "schedule": "zero-bubble", "recompute": "full"},
    {"pp": 2, "micro_batch": 1, "dp_shard": 2, "zero": 2, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 1, "dp_shard": 2, "zero": 3},
    {"pp": 2, "micro_batch": 2, "tp": 2},
]
RINGED: list[dict[str, Any]] = [
    {"cp": 2, "zero": 3, "recompute": "full"},
    {"cp": 2, "dp_replicate": 2, "micro_batch": 2},
    {"cp": 2, "dp_shard": 2, "zero": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "pp": 2, "micro_batch": 2},
]
RINGED_CUBE = {"pp": 2, "tp": 2, "sequence_parallel": True, "cp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"}
POSITIONS: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True, "micro_batch": 2},
    {"tp": 2, "sequence_parallel": True, "dp_shard": 2, "zero": 3, "recompute": "full"},
]
CUBE = {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2, "recompute": "full"}
HERE = "tests.engine.test_several_devices:"


def named(fields: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


def said(value: Any) -> str:
    return named(value) if isinstance(value, dict) else str(value)


def job_of(name: str, **train: Any) -> tightfit.Job:
    return cases.make_case(name, **train).job


def train(
    name: str, fields: dict[str, Any], **settings: Any
) -> tuple[list[tuple[float, float | None, int]], dict[str, Tensor]]:
    run = tightfit.build(job_of(name, **settings), tightfit.Plan(**fields))
    steps = [(step.loss, step.gradient_norm, step.items) for step in tightfit.train(run)]
    return steps, cases.state_of(run)


def hold(name: str, fields: dict[str, Any], bound: float = 1e-6, **settings: Any) -> None:
    alone, expected = train(name, {}, **settings)
    for steps, weights in together(tightfit.Plan(**fields).devices, HERE + "train", name, fields, **settings):
        assert cases.distance(weights, expected) <= bound
        for found, wanted in zip(steps, alone, strict=True):
            assert found[::2] == pytest.approx(wanted[::2], rel=max(2e-6, bound))
            assert found[1] == (wanted[1] and pytest.approx(wanted[1], rel=2e-6))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "fields"), spread(["gpt2", "bert", "vit"], [*PLANS, *HYBRID], 3, said))
def test_a_sharded_model_trains_like_the_whole_one(fields: dict[str, Any], name: str) -> None:
    hold(name, fields)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("name", "fields"), spread(["gpt2", "t5", "bert", "vit"], SLICED, 4, said))
def test_a_tensor_parallel_model_trains_like_the_whole_one(fields: dict[str, Any], name: str) -> None:
    hold(name, fields)


@pytest.mark.parametrize(("name", "fields"), spread(["gpt2", "bert", "vit"], POSITIONS, 3, said))
def test_sequence_parallel_positions_train_like_whole_ones(fields: dict[str, Any], name: str) -> None:
    hold(name, fields, clip=0.1)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "fields"), spread(["llama", "gpt2", "bert", "vit"], PIPED, 4, said))
def test_a_pipeline_trains_like_the_whole_model(fields: dict[str, Any], name: str) -> None:
    hold(name, fields)


@pytest.mark.parametrize(("name", "fields"), spread(["llama", "gpt2", "bert"], [*RINGED, RINGED_CUBE], 4, said))
def test_context_parallel_sequences_train_like_whole_ones(fields: dict[str, Any], name: str) -> None:
    hold(name, fields, clip=0.1 if name == "llama" else None)


@pytest.mark.parametrize("name", part(["gpt2", "vit", "llama", "bert"], 4))
@pytest.mark.slow
def test_pp_tp_and_zero_3_together_train_like_one_device(name: str) -> None:
    """Pipeline, tensor parallelism and ZeRO's third stage with recomputation, clipped: eight processes."""
    hold(name, CUBE, clip=0.1)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("optimizer", "fields"),
    spread(
        ["adafactor", "sgd", "lamb", "lars", "lion", "muon"],
        [*PLANS[1:], HYBRID[2], SLICED[0], SLICED[4], PIPED[0]],
        8,
        said,
    ),
)
def test_every_optimizer_updates_its_shard_like_the_whole(fields: dict[str, Any], optimizer: str) -> None:
    """Muon multiplies in bf16, where a difference of 1e-7 may be a rounding: micro-batches on one device move it as far."""
    hold("llama", fields, 3e-3 if optimizer == "muon" else 1e-6, optimizer=optimizer)


@pytest.mark.parametrize("fields", part([*PLANS, *HYBRID, *SLICED, *PIPED], 5, named))
def test_clipping_uses_the_norm_over_all_devices(fields: dict[str, Any]) -> None:
    hold("gpt2" if "pp" in fields else "llama", fields, clip=0.1)


@pytest.mark.parametrize("fields", part([*PLANS, *HYBRID, PIPED[0], PIPED[2], PIPED[5], RINGED[1]], 5, named))
def test_uneven_shares_and_a_short_last_step_train_the_same(fields: dict[str, Any]) -> None:
    """40 samples in steps of 7: shares of 4 and 3, and a last step of 5; 41 would leave one device without any."""
    hold("llama", fields, batch=7, steps=None, epochs=1)
    hold("bert", fields, batch=13, steps=None, epochs=1)  # the last step has one sample


def counted(fields: dict[str, Any]) -> int:
    return parameter_count(tightfit.build(job_of("gpt2"), tightfit.Plan(**fields)))


@pytest.mark.parametrize("fields", [PLANS[0], PLANS[3], SLICED[0], PIPED[0]], ids=named)
def test_parameters_are_counted_over_the_whole_model(fields: dict[str, Any]) -> None:
    assert together(2, HERE + "counted", fields) == [counted({})] * 2


def saved_and_resumed(
    folder: str, first: dict[str, Any], then: dict[str, Any] | None, file_bytes: int, **settings: Any
) -> list[float]:
    """Train two of four steps with one plan, save in files of so many bytes, and go on with another; None leaves that to a later
    call."""
    tensor_files.FILE_BYTES = file_bytes
    job = job_of("llama", steps=4, **settings)
    if then is None:
        run = tightfit.build(job, tightfit.Plan(**first))
        losses = [step.loss for _, step in zip(range(2), tightfit.train(run), strict=False)]
        save(run, folder, 2)
        return losses
    run = tightfit.build(job, tightfit.Plan(**then))
    return [step.loss for step in tightfit.train(run, resume(run, folder))]


SMALL_FILES = 20_000  # bytes: several for each device
SAVED = [*PLANS, {**PLANS[1], "states": "8-bit"}, SLICED[0], SLICED[4], PIPED[5], RINGED[0]]


OF_MATRICES = ((SLICED[4], "muon"), (PIPED[5], "lamb"))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("fields", "optimizer"),
    [
        pytest.param(
            fields,
            optimizer,
            marks=[]
            if (fields, optimizer) in [*((one, "adamw") for one in SAVED[::4]), *OF_MATRICES]
            else pytest.mark.slow,
            id=f"{named(fields)}-{optimizer}",
        )
        for fields in SAVED
        for optimizer in ("adamw", "lamb", "muon")
    ],
)
def test_any_number_of_devices_resumes_a_checkpoint(fields: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    if optimizer != "adamw" and "states" in fields:
        pytest.skip("one optimizer is enough")
    states = {"states": fields["states"]} if "states" in fields else {}
    run = tightfit.build(job_of("llama", steps=4, optimizer=optimizer), tightfit.Plan(**states))
    wanted = [step.loss for step in tightfit.train(run)]
    near = 1e-4 if optimizer == "muon" or states else 2e-6
    where = HERE + "saved_and_resumed"
    for number, (first, then) in enumerate([(fields, fields), (fields, states), (states, fields)]):
        folder = str(tmp_path / str(number))
        for plan, again in ((first, None), (then, then)):
            size = tightfit.Plan(**plan).devices
            arguments = (folder, first, again, tensor_files.FILE_BYTES if number else SMALL_FILES)
            losses = (
                together(size, where, *arguments, optimizer=optimizer)[-1]
                if size > 1
                else saved_and_resumed(*arguments, optimizer=optimizer)
            )
            assert losses == pytest.approx(wanted[2:] if again is not None else wanted[:2], rel=near)


def resumed_from_altered(folder: str, fields: dict[str, Any], alter: str | None) -> tuple[list[str], str]:
    """(files whose checksums this device took, what it says of a checkpoint of which the first device has altered a file)."""
    tensor_files.FILE_BYTES = SMALL_FILES
    run = tightfit.build(job_of("llama"), tightfit.Plan(**fields))
    path = save(run, folder, 1)
    if alter is not None and dist.get_rank() == 0:
        content = bytearray((path / alter).read_bytes())
        content[-5] ^= 1
        (path / alter).write_bytes(content)
    dist.barrier()
    taken: list[str] = []

    def noted(file: Path) -> str:
        taken.append(file.name)
        return tensor_files.checksum(file)

    module = sys.modules["tightfit.engine.checkpoint.resume"]
    module.checksum = noted  # type: ignore[attr-defined]
    try:
        resume(run, folder)
    except InputError as error:
        return taken, str(error)
    finally:
        module.checksum = tensor_files.checksum  # type: ignore[attr-defined]
    return taken, ""


@pytest.mark.parametrize("fields", [PLANS[0], PLANS[3], PIPED[0]], ids=named)
def test_all_devices_refuse_a_file_that_is_altered_for_one(fields: dict[str, Any], tmp_path: Path) -> None:
    where = HERE + "resumed_from_altered"
    found = together(2, where, str(tmp_path / "whole"), fields, None)
    assert [said for _, said in found] == ["", ""]
    there = {path.name for path in (tmp_path / "whole" / "step-00000001").iterdir()}
    both = [name for taken, _ in found for name in taken if name.endswith(".safetensors")]
    assert len(both) == len(set(both))  # this host reads each once
    assert {name for taken, _ in found for name in taken} == there - {"checksums.json"}
    altered = max(both)
    (_, one), (_, other) = together(2, where, str(tmp_path / "altered"), fields, altered)
    assert one == other
    assert f"{altered} is not as it was written" in one


def filled_disk(folder: str, fields: dict[str, Any]) -> str:
    """A second checkpoint of which the last device cannot write its files."""
    tensor_files.FILE_BYTES = SMALL_FILES
    run = tightfit.build(job_of("llama"), tightfit.Plan(**fields))
    save(run, folder, 1)

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == dist.get_world_size() - 1:
        tensor_files.save_file = full
    try:
        save(run, folder, 2)
    except TightfitError as error:
        return str(error)
    finally:
        tensor_files.save_file = save_file
    return ""


@pytest.mark.parametrize("fields", [PLANS[0], PLANS[3], PIPED[0]], ids=named)
def test_no_checkpoint_is_left_if_one_device_cannot_write(fields: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint before stays."""
    for said in together(2, HERE + "filled_disk", str(tmp_path), fields):
        assert "step 2" in said
        assert "No space left" in said
        assert "keep_checkpoints" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def wrote(folder: str, fields: dict[str, Any]) -> list[str]:
    """Names of the files that this device wrote."""
    tensor_files.FILE_BYTES = SMALL_FILES
    found: list[str] = []

    def noted(tensors: dict[str, Tensor], path: Path, **named: Any) -> None:
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_FILES
        found.append(path.name)
        save_file(tensors, path, **named)

    tensor_files.save_file = noted
    try:
        save(tightfit.build(job_of("llama"), tightfit.Plan(**fields)), folder, 1)
    finally:
        tensor_files.save_file = save_file
    return found


@pytest.mark.parametrize("fields", [PLANS[0], PLANS[3], SLICED[0], PIPED[0]], ids=named)
def test_devices_write_files_together(fields: dict[str, Any], tmp_path: Path) -> None:
    found = together(2, HERE + "wrote", str(tmp_path), fields)
    there = {path.name for path in (tmp_path / "step-00000001").glob("*.safetensors")}
    assert sorted([*found[0], *found[1]]) == sorted(there)
    assert all(len([name for name in names if name.startswith("model")]) > 1 for names in found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-00000001")
    fresh = tightfit.build(job_of("llama")).model
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def refused_folder(folder: str, fields: dict[str, Any]) -> str:
    """What is said of a folder that the last device's host does not have."""
    run = tightfit.build(job_of("llama"), tightfit.Plan(**fields))
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        check_folder(run, Path(folder) / "elsewhere" if last else Path(folder))
    except InputError as error:
        return str(error)
    return ""


def test_a_folder_that_a_stage_cannot_see_is_refused_early(tmp_path: Path) -> None:
    for said in together(2, HERE + "refused_folder", str(tmp_path), PIPED[0]):
        assert "a folder that all hosts share" in said
    assert together(2, HERE + "refused_folder", str(tmp_path), PLANS[3]) == [
        "",
        "",
    ]  # the first has all that is divided


def evaluated(fields: dict[str, Any]) -> float:
    job = job_of("llama").replace(data=HELD_OUT)
    return tightfit.evaluate(tightfit.build(job, tightfit.Plan(**fields)), 5)


HELD_OUT = tightfit.Job(
    model=cases.LLAMA, data={"synthetic": "tokens", "sequence_length": 16, "held_out": 0.1, "samples": 64}
).data


@pytest.mark.parametrize("fields", [*PLANS, SLICED[0], PIPED[0], RINGED[0]], ids=named)
def test_evaluation_equals_that_of_one_device(fields: dict[str, Any]) -> None:
    alone = evaluated({})
    assert together(2, HERE + "evaluated", fields) == pytest.approx([alone] * 2, rel=1e-6)


def trained_between_evaluations(fields: dict[str, Any]) -> list[float]:
    run = tightfit.build(job_of("llama").replace(data=HELD_OUT), tightfit.Plan(**fields))
    losses = []
    for step in tightfit.train(run):
        losses += [step.loss, tightfit.evaluate(run, 8)]
    return losses


@pytest.mark.parametrize(
    "fields", [{"pp": 2, "schedule": "naive"}, {"pp": 2}, {"pp": 2, "schedule": "gpipe", "micro_batch": 4}], ids=named
)
def test_a_pipeline_continues_training_after_an_evaluation(fields: dict[str, Any]) -> None:
    """The evaluation's batches have the shapes of micro-batches, and no backward follows."""
    alone = trained_between_evaluations({})
    assert together(2, HERE + "trained_between_evaluations", fields) == [pytest.approx(alone, rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("name", "fields"),
    spread(
        ["llama", "gpt2", "batchnorm"],
        [PLANS[3], SLICED[4], {**PLANS[3], "precision": "bf16-true"}, PIPED[0], PIPED[5], CUBE],
        9,
        said,
    ),
)
def test_a_sharded_model_is_created_like_the_whole_one(fields: dict[str, Any], name: str) -> None:
    """Each shard has the rows that one device draws."""
    if name == "batchnorm" and "tp" in fields:
        pytest.skip("has no table")
    precision = {"precision": fields["precision"]} if "precision" in fields else {}
    expected = created(name, {"materialize": "device", **precision})
    for found in together(tightfit.Plan(**fields).devices, HERE + "created", name, {**fields, "materialize": "device"}):
        assert cases.distance(found, expected) == 0


def created(name: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    return cases.state_of(tightfit.build(job_of(name), tightfit.Plan(**fields)))


class Gathered(TorchDispatchMode):
    """Bytes that are gathered, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d.broadcast_"):  # by gloo, row by row
            for row in args[0]:
                self.found[row.dtype] += row.nbytes
        return func(*args, **(kwargs or {}))


def gathered(precision: str) -> Counter[torch.dtype]:
    run = tightfit.build(job_of("llama"), tightfit.Plan(zero=3, dp_shard=2, precision=precision))
    with Gathered() as seen:
        next(tightfit.train(run))
    return seen.found


def test_mixed_precision_gathers_matrix_weights_in_16_bits() -> None:
    """Weights of the blocks' matrix products are gathered in 16 bits; norms, embedding and head
    stay in fp32."""
    wide, mixed = together(2, HERE + "gathered", "fp32")[0], together(2, HERE + "gathered", "bf16-mixed")[0]
    assert set(wide) == {torch.float32}
    saved = wide[torch.float32] - mixed[torch.float32]
    assert mixed[torch.bfloat16] == saved // 2
    assert saved > 0.5 * wide[torch.float32]
