"""Tensors outside the device's memory are copied when they are needed, as by a GPU, and train as if
they had stayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import save
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.parallel.fsdp import prefetch
from tightfit.rules import check
from tightfit.target_device import TARGET

ALL = ("states", "gradients", "parameters")
EVERYTHING = (*ALL, "activations")


@pytest.fixture
def apart() -> Iterator[None]:
    """The processor as a device that computes only with its own memory: what is offloaded is copied to and fro."""
    meant = TARGET.set("cuda")
    yield
    TARGET.reset(meant)
    if dist.is_initialized():  # a group of one, that other tests would find
        dist.destroy_process_group()


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "batchnorm"])
@pytest.mark.parametrize(
    "words", [("gradients",), ("states", "gradients"), ("gradients", "parameters"), EVERYTHING], ids="+".join
)
@pytest.mark.parametrize("fields", [{}, {"micro_batch": 2}], ids=str)
def test_offloaded_training_equals_plain_pytorch(name: str, words: tuple[str, ...], fields: dict[str, Any]) -> None:
    case = cases.make_case(name)
    plan = tightfit.Plan(offload=words, offload_to="disk", **fields)
    losses, weights = cases.training(case, plan)
    plain_losses, plain = cases.plain_training(case, plan.micro_batch if name == "batchnorm" else None)
    assert cases.distance(weights, plain) <= 1e-6
    assert losses == pytest.approx(plain_losses, rel=2e-6)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("optimizer", ["lamb", "lars", "lion", "adafactor", "sgd"])
@pytest.mark.parametrize("words", [("gradients",), ALL], ids="+".join)
def test_every_optimizer_updates_offloaded_states(optimizer: str, words: tuple[str, ...]) -> None:
    same_as_on_the_device(cases.make_case("llama").replace(optimizer=optimizer), {}, words)


@pytest.mark.sweep(12)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "bf16-true", "rounding": "stochastic"},
        {"precision": "fp16-mixed"},
        {"states": "8-bit"},
        {"states": "bf16", "micro_batch": 4},
        {"recompute": "full", "fused_optimizer": True},
        {"recompute": "selective"},
        {"chunked_loss": 64},
        {"materialize": "device"},
        {"compile": "block"},
    ],
    ids=str,
)
@pytest.mark.parametrize("words", [("gradients",), EVERYTHING], ids="+".join)
def test_every_other_method_works_with_offloading(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    same_as_on_the_device(cases.make_case("llama").replace(clip=0.5), fields, words)


def same_as_on_the_device(case: cases.Case, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    offloaded = tightfit.Plan(**fields, offload=words, offload_to="disk")
    alone = tightfit.Plan(**fields)
    losses, weights = cases.training(case, offloaded)
    plain_losses, plain = cases.training(case, alone)
    # sums of a narrow gather are rounded where autocast rounds; the default kernels go over all parameters in another order
    bound = 1e-3 if offloaded.computes_in_16_bits or offloaded.states != "fp32" else 1e-6
    assert cases.distance(weights, plain) <= bound
    assert losses == pytest.approx(plain_losses, rel=max(bound, 2e-6))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("words", [("gradients",), ALL], ids="+".join)
def test_offloaded_tensors_are_saved_and_resumed(words: tuple[str, ...], tmp_path: Path) -> None:
    """A run may resume without offloading: a checkpoint does not record where tensors were."""
    case = cases.make_case("llama")
    plan = tightfit.Plan(offload=words, offload_to="disk", states="8-bit")
    whole, _ = cases.training(case, plan)
    run = tightfit.build(case.job, plan)
    steps = run.data.steps(0, None)
    first = [take_step(run, next(steps), 0).loss]
    save(run, tmp_path, 1)
    for going_on in (plan, tightfit.Plan(states="8-bit")):
        again = tightfit.build(case.job, going_on)
        assert resume(again, tmp_path) == 1
        steps = again.data.steps(case.job.train.batch, None)
        rest = [take_step(again, next(steps), step).loss for step in range(1, cases.STEPS)]
        assert first + rest == pytest.approx(whole, rel=1e-6)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("words", [("gradients",), ALL], ids="+".join)
def test_an_offloading_plan_is_verified(words: tuple[str, ...]) -> None:
    plan = tightfit.Plan(offload=words, offload_to="disk", micro_batch=2)
    assert tightfit.verify(cases.make_case("llama").job, plan).passed


@pytest.mark.usefixtures("apart")
def test_the_device_keeps_no_parameters_between_steps() -> None:
    """It keeps no gradients either."""
    run = tightfit.build(cases.make_case("llama").job, tightfit.Plan(offload=ALL, offload_to="disk"))
    take_step(run, next(run.data.steps(0, None)), 0)
    assert run.store is not None
    count = sum(parameter.numel() for parameter in run.model.parameters())
    assert run.store.stored_bytes >= 4 * 4 * count  # weights, gradients, two moments
    assert all(isinstance(parameter, DTensor) and parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("apart_from_it", [False, True])
def test_each_device_offloads_its_own_rows(apart_from_it: bool) -> None:
    plan = {"zero": 3, "dp_shard": 2, "offload": ALL, "offload_to": "disk", "micro_batch": 2}
    (losses, weights), _ = together(2, "tests.methods.test_offload:in_a_process", plan, "llama", apart_from_it)
    plain_losses, plain = cases.plain_training(cases.make_case("llama"), None)
    assert cases.distance(weights, plain) <= 1e-6
    assert losses == pytest.approx(plain_losses, rel=2e-6)


def in_a_process(fields: dict[str, Any], name: str, apart_from_it: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    meant = TARGET.set("cuda" if apart_from_it else None)
    try:
        return cases._training(name, cases.make_case(name).job.train, tightfit.Plan(**fields), None)
    finally:
        TARGET.reset(meant)


@pytest.mark.parametrize(
    ("fields", "device", "remedy"),
    [
        ({"offload": ("parameters",)}, "cuda", "add gradients"),
        ({"offload": ("parameters", "gradients"), "dp_replicate": 2}, "cuda", "zero: 3"),
        ({"offload": ("gradients",), "zero": 3, "dp_shard": 2}, "cuda", "both parameters and gradients"),
        ({"offload": ("parameters", "gradients"), "compile": "model"}, "cuda", "compile: block"),
        ({"offload": ("states",)}, "cpu", "offload_to: disk"),
    ],
    ids=str,
)
def test_impossible_plans_are_refused_with_a_remedy(fields: dict[str, Any], device: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        check(tightfit.Plan(**fields), cases.make_case("llama").job, device)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("words", [("states",), ("gradients",), ("states", "gradients"), ALL, EVERYTHING], ids="+".join)
@pytest.mark.parametrize("fields", [{}, {"micro_batch": 2, "precision": "bf16-mixed"}], ids=str)
def test_offloading_on_a_gpu_equals_training_without_it(
    words: tuple[str, ...], where: str, fields: dict[str, Any]
) -> None:
    case = cases.make_case("llama")
    losses, weights = cases.training(case, tightfit.Plan(**fields, offload=words, offload_to=where), device="cuda")
    plain_losses, plain = cases.training(case, tightfit.Plan(**fields), device="cuda")
    bound = 1e-3 if fields else 1e-5
    assert cases.distance(weights, plain) <= bound
    assert losses == pytest.approx(plain_losses, rel=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize(
    "fields",
    [
        {"states": "8-bit"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"precision": "fp16-mixed"},
        {"states": "bf16", "update_in_backward": True},
    ],
    ids=str,
)
def test_overlapped_state_copies_on_a_gpu_train_the_same(optimizer: str, fields: dict[str, Any]) -> None:
    """Updates run one by one or in batches, in either case."""
    case = cases.make_case("llama").replace(optimizer=optimizer)
    losses, weights = cases.training(case, tightfit.Plan(**fields, offload=("states",)), device="cuda")
    plain_losses, plain = cases.training(case, tightfit.Plan(**fields), device="cuda")
    assert cases.distance(weights, plain) <= 1e-7
    assert losses == pytest.approx(plain_losses, rel=1e-6)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parameters_are_prefetched_during_the_block_before(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in forward and in backward the prefetched copy is the one that is used, and it is freed
    then."""
    seen: list[str] = []
    begin, using_copies = prefetch._Prefetch.begin, prefetch._Prefetch.using_copies

    def name_of(one: Any) -> str:
        return str(one.group._module_fqn or "model")

    def begins(one: Any) -> None:
        before = len(one.prefetched)
        begin(one)
        if len(one.prefetched) > before:
            seen.append(f"{name_of(one)} comes")

    @contextmanager
    def ends(one: Any) -> Iterator[None]:
        had = bool(one.prefetched)
        with using_copies(one):
            yield
        if had:
            seen.append(f"{name_of(one)} is there")
        assert not one.prefetched

    monkeypatch.setattr(prefetch._Prefetch, "begin", begins)
    monkeypatch.setattr(prefetch._Prefetch, "using_copies", ends)
    plan = tightfit.Plan(offload=("gradients", "parameters"), offload_to="disk", recompute=recompute)
    run = tightfit.build(cases.make_case("llama").job, plan)
    take_step(run, next(iter(run.data.steps(0, None))), 0)
    blocks = [f"model.layers.{number}" for number in range(4)]
    order = [line for line in seen if line.split()[0] in blocks]
    forward = order[: order.index(f"{blocks[3]} is there") + 1]
    backward = order[len(forward) :]
    for number in range(3):
        assert forward.index(f"{blocks[number + 1]} comes") < forward.index(f"{blocks[number + 1]} is there")
        assert forward.index(f"{blocks[number + 1]} comes") == forward.index(f"{blocks[number]} is there") + 1
    for number in (2, 1):  # of the last block nothing is known before, and all others come while their successors work
        assert backward.index(f"{blocks[number - 1]} comes") == backward.index(f"{blocks[number]} is there") + 1
