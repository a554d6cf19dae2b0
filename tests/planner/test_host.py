"""Memory on the host, bytes on its disk, and the time that a step waits for its samples."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

import tightfit
from tests.planner import cases
from tests.pool import Pool
from tightfit import tensor_files
from tightfit.cost.entries import Message
from tightfit.errors import DoesNotFit
from tightfit.machine import Machine
from tightfit.methods.loader import SERVER_BYTES, WORKER_BYTES
from tightfit.methods.materialize import SLACK_BYTES
from tightfit.planner.estimator import HOST_PROCESS_BYTES, Estimator
from tightfit.planner.search import search
from tightfit.planner.time_model import EXPOSED_SHARE, TimeModel

GPU = Machine.named("a100-80gb")
ADAM, PLAIN = tightfit.Plan(materialize="device"), tightfit.Plan()


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(cases.job("llama"), GPU)


def parameters(estimator: Estimator) -> int:
    return sum(parameter.bytes for parameter in estimator.profiler.model.parameters(PLAIN))


def test_every_process_on_a_host_counts() -> None:
    job = cases.job("llama")
    one = Estimator(job, GPU).estimate(ADAM)
    four = Estimator(job, Machine.named("a100-80gb:4")).estimate(ADAM.replace(dp_replicate=4))
    assert one.host["processes"] == HOST_PROCESS_BYTES
    assert four.host["processes"] == 4 * HOST_PROCESS_BYTES


def test_a_model_created_on_the_host_takes_its_fp32_bytes(estimator: Estimator) -> None:
    usual, there = (
        estimator.estimate(tightfit.Plan(precision="bf16-true", materialize=where)) for where in ("host", "device")
    )
    assert usual.ledger.transient_host_bytes["materialize"] == parameters(
        estimator
    )  # in fp32, and on the device in half as much
    assert there.ledger.transient_host_bytes["materialize"] == pytest.approx(SLACK_BYTES, rel=0.2)  # and one parameter


def test_host_memory_includes_work_outside_steps(estimator: Estimator) -> None:
    size = parameters(estimator)
    fleeting = estimator.job.replace(train=estimator.job.train.replace(optimizer="sgd", momentum=0.0))
    none = Estimator(fleeting, GPU).estimate(tightfit.Plan(precision="bf16-true", materialize="host"))
    assert none.host["materialize"] == size  # a checkpoint has half of that, and no states
    adam = estimator.estimate(tightfit.Plan(precision="bf16-true", materialize="host"))
    assert adam.host["checkpoint"] == pytest.approx(1.5 * size, rel=0.01)


@pytest.mark.slow
def test_a_checkpoint_takes_at_most_two_files_per_process() -> None:
    job = tightfit.Job(
        model={"preset": "llama-2-70b"},
        data={"synthetic": "tokens", "sequence_length": 4096},
        train=tightfit.Train(batch=64, steps=10),
    )
    node = Estimator(job, Machine.named("h100-sxm:8x8"))
    plan = ADAM.replace(zero=3, dp_shard=64, precision="bf16-mixed", recompute="full")
    assert node.estimate(plan).host["checkpoint"] == 8 * 2 * tensor_files.FILE_BYTES
    assert node.estimate(plan).disk["checkpoints"] > 800e9


@pytest.mark.slow
def test_workers_and_their_prefetched_batches_are_counted(estimator: Estimator) -> None:
    plain = estimator.estimate(ADAM)
    batch = plain.ledger.batch_bytes * estimator.job.train.batch
    assert plain.host["loader"] == pytest.approx(batch)
    busy = estimator.estimate(ADAM.replace(loader_workers=3, prefetch=2, pin_memory=True))
    assert busy.host["loader"] == pytest.approx(SERVER_BYTES + 3 * WORKER_BYTES + 7 * batch)
    assert busy.host["pinned batches"] == pytest.approx(7 * batch)


def workers_bytes() -> list[int]:
    """The memory that the system counts as each worker's alone, in a run with two workers."""
    job = tightfit.Job(
        model=cases.job("llama").model,
        data={"synthetic": "tokens", "sequence_length": 16},
        train=tightfit.Train(batch=4, steps=6),
    )
    run = tightfit.build(job, tightfit.Plan(loader_workers=2))
    seen: list[int] = []
    for result in tightfit.train(run):
        if result.step == 4:
            seen = [psutil.Process(process.pid).memory_full_info().uss for process in multiprocessing.active_children()]
    return seen


@pytest.mark.slow
def test_a_worker_takes_the_predicted_memory() -> None:
    pool = Pool(1, "spawn")  # with a fork server of its own: that of tests has imported more
    try:
        (seen,) = pool.run("tests.planner.test_host:workers_bytes")
    finally:
        pool.close()
    assert len(seen) == 2
    assert max(seen) == pytest.approx(WORKER_BYTES, rel=0.25)


def test_offloaded_states_count_on_the_host_or_the_disk(estimator: Estimator) -> None:
    states = 2 * parameters(estimator)
    host = estimator.estimate(ADAM.replace(offload=("states",)))
    assert states <= host.host["offloaded states"] <= 2 * states  # page-locked memory comes in powers of two
    disk = estimator.estimate(ADAM.replace(offload=("states",), offload_to="disk"))
    assert disk.disk["offloaded states"] == pytest.approx(states, rel=0.01)
    assert "offloaded states" not in disk.host


def test_states_are_copied_both_ways_during_the_update(estimator: Estimator) -> None:
    """The step waits only for copies that outlast the update; on a disk and in a backward, for all."""
    ledger, clock = estimator.estimate(ADAM).ledger, TimeModel(GPU)
    assert not ledger.messages
    update_s = clock.step_time(ledger).optimizer_s

    def waited_s(seconds: float, *ways: str, during: str = "update") -> float:
        messages = [Message("states", seconds * 1e9, 1e9, overlaps=True, during=during, way=way) for way in ways]
        return clock.step_time(replace(ledger, messages=tuple(messages))).communication_s

    assert waited_s(3 * update_s, "in") == pytest.approx(2 * update_s)
    assert waited_s(3 * update_s, "in", "out") == pytest.approx(2 * update_s)
    assert waited_s(3 * update_s, "in", "in") == pytest.approx(5 * update_s)
    assert waited_s(0.5 * update_s, "in", "out") == pytest.approx(0.5 * update_s * EXPOSED_SHARE)
    work = [waited_s(1.0, "out", during=during) for during in ("forward", "backward")]
    whole = clock.step_time(ledger)
    assert 2 - sum(work) == pytest.approx(whole.compute_s + whole.memory_s + whole.launch_s)
    for fields, hides in (({}, True), ({"offload_to": "disk"}, False), ({"update_in_backward": True}, False)):
        moves = estimator.estimate(ADAM.replace(offload=("states",), **fields)).ledger.messages
        assert [(one.during, one.way, one.overlaps) for one in moves] == [
            ("update", way, hides) for way in ("in", "out")
        ]


def test_offloaded_activations_overlap_forward_and_backward(estimator: Estimator) -> None:
    plan = ADAM.replace(offload=("activations",))
    moves = estimator.estimate(plan).ledger.messages
    assert [(one.name, one.during, one.way, one.overlaps) for one in moves] == [
        ("activations", "forward", "out", True),
        ("activations", "backward", "in", True),
    ]
    assert moves[0].bytes == moves[1].bytes > 0


def test_checkpoints_contain_the_model_and_its_states(estimator: Estimator) -> None:
    kept = estimator.job.train.keep_checkpoints + 1
    assert estimator.estimate(ADAM).disk["checkpoints"] == pytest.approx(kept * 3 * parameters(estimator), rel=0.01)
    train = estimator.job.train.replace(checkpoint_every="never")
    never = Estimator(estimator.job.replace(train=train), estimator.machine).estimate(ADAM)
    assert never.disk["checkpoints"] == never.host.get("checkpoint", 0.0) == 0.0


def test_non_blocking_copies_keep_a_second_micro_batch(estimator: Estimator) -> None:
    plan = ADAM.replace(micro_batch=1, pin_memory=True)
    blocking = estimator.estimate(plan)
    beside = estimator.estimate(plan.replace(non_blocking=True))
    more = sum(beside.ledger.peak().rows.values()) - sum(blocking.ledger.peak().rows.values())
    assert more == pytest.approx(blocking.ledger.batch_bytes)
    assert more > 0


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        pytest.param("host_memory", "of host memory at least", marks=pytest.mark.slow),
        ("disk", "keep_checkpoints"),
    ],
)
@pytest.mark.slow
def test_a_host_that_is_too_small_is_refused(limit: str, said: str) -> None:
    job = cases.job("llama").replace(limits=tightfit.Limits(**{limit: 2**20}))
    with pytest.raises(DoesNotFit, match=said):
        search(job, GPU, {"compile": "none"})


@pytest.mark.slow
def test_images_are_decoded_before_or_during_a_step(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(4):
            pixels = noise.integers(0, 255, (240, 320, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.jpg")
    job = tightfit.Job(
        model={
            "architecture": "vit",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_labels": 2,
        },
        data={"images": str(tmp_path)},
        train=tightfit.Train(batch=64, steps=1000),
    )
    estimator = Estimator(job, GPU)
    alone, beside = (estimator.estimate(ADAM.replace(loader_workers=workers)) for workers in (0, 4))
    assert alone.ledger.host_work_s["prepare"] > 64 * 1e-4
    assert alone.time.input_s >= alone.ledger.host_work_s["prepare"]
    assert beside.time.input_s < 0.5 * alone.time.input_s
    assert search(job, GPU, {"compile": "none"})[0].plan.loader_workers > 0
    assert search(job, GPU, {"compile": "none", "loader_workers": 0})[0].plan.loader_workers == 0


def test_offloaded_activations_are_rounded_to_powers_of_two(estimator: Estimator) -> None:
    plan = ADAM.replace(offload=("activations",))
    moved = estimator.estimate(plan).ledger.messages[0].bytes
    rounded = estimator.estimate(plan).host["offloaded activations"]
    assert moved < rounded <= 2 * moved
    on_disk = estimator.estimate(plan.replace(offload_to="disk"))
    assert on_disk.disk["offloaded activations"] == pytest.approx(moved)


@pytest.mark.parametrize(("schedule", "in_flight"), [("naive", 1), ("1f1b", 2), ("gpipe", 4)])
def test_each_micro_batch_in_flight_keeps_its_activations(estimator: Estimator, schedule: str, in_flight: int) -> None:
    samples = estimator.job.train.batch // 4
    plan = ADAM.replace(offload=("activations",), micro_batch=samples, pp=2, schedule=schedule, split=(3, 2))
    of_all_stages = estimator.estimate(plan.replace(pp=1, split=None, schedule="1f1b")).host["offloaded activations"]
    one = Estimator(estimator.job, Machine.named("a100-80gb:2"), estimator.profiler).estimate(plan)
    assert one.host["offloaded activations"] / 2 == pytest.approx(of_all_stages * in_flight / 2)  # of two devices


def test_a_host_that_is_too_small_is_named() -> None:
    job = cases.job("llama").replace(limits=tightfit.Limits(host_memory=2**20))
    line = next(line for line in tightfit.explain(job, ADAM, GPU).splitlines() if line.startswith("memory"))
    assert "of host memory, 1 MiB are available" in line
    assert "does not fit" not in line
