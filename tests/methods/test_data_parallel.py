"""Compressed gradients: PowerSGD carries its error to later steps, and gradients of low rank are
sent exactly."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.distributed.mesh import make_mesh
from tightfit.distributed.processes import rank
from tightfit.errors import InputError, TightfitWarning
from tightfit.methods.data_parallel import PowerSGD
from tightfit.rules import check

HERE = "tests.methods.test_data_parallel:"
STEPS = 5


def sent(low: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(what this process gave, what came back, what is left here) of a matrix's gradients in some steps."""
    mesh = make_mesh(tightfit.Plan(dp_replicate=2), torch.device("cpu"))
    assert mesh is not None
    matrix, vector = nn.Parameter(torch.zeros(24, 16)), nn.Parameter(torch.zeros(7))
    reducer = PowerSGD([matrix, vector], mesh.group("dp_replicate"), rank=2)
    generator = torch.Generator().manual_seed(rank())
    left, right = (
        torch.randn(24, 1, generator=torch.Generator().manual_seed(9)),
        torch.randn(1, 16, generator=generator),
    )
    given, got = [], []
    for step in range(STEPS):
        gradient = left @ right * (step + 1) if low else torch.randn(24, 16, generator=generator)
        matrix.grad, vector.grad = gradient.clone(), torch.full((7,), float(rank() + 1))
        reducer.begin(True)
        reducer.finish()
        assert torch.equal(vector.grad, torch.full((7,), 3.0))  # vectors travel whole
        given.append(gradient)
        got.append(matrix.grad.clone())
    return given, got, reducer.errors[matrix]


def test_the_compression_error_is_carried_to_later_steps() -> None:
    (mine, got, left), (others, same, waiting) = together(2, HERE + "sent", False)
    for one, other in zip(got, same, strict=True):
        assert torch.equal(one, other)
    whole = torch.stack([*mine, *others]).sum(0)
    assert torch.allclose(torch.stack(got).sum(0) + left + waiting, whole, atol=1e-4)
    assert left.norm() > 0.1 * whole.norm()


def test_low_rank_gradients_are_sent_exactly() -> None:
    (mine, got, _), (others, _, _) = together(2, HERE + "sent", True)
    for one, other, sum_of_both in zip(mine, others, got, strict=True):
        assert torch.allclose(sum_of_both, one + other, atol=1e-4)


def trained(compressed: str) -> list[float]:
    case = cases.make_case("llama", steps=12)
    run = tightfit.build(case.job, tightfit.Plan(dp_replicate=2, compressed_gradients=compressed, powersgd_rank=8))
    losses = [step.loss for step in tightfit.train(run)]
    assert dist.is_initialized()
    return losses


@pytest.mark.parametrize("compressed", ["bf16", "powersgd"])
def test_compressed_training_learns_like_full_gradients(compressed: str) -> None:
    """Gradients sent in bf16, or as 8 of 32 columns, give the same loss within a tenth."""
    whole, found = together(2, HERE + "trained", "none")[0], together(2, HERE + "trained", compressed)[0]
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert found[-1] == pytest.approx(whole[-1], rel=0.1)
    assert found[-1] < found[0]


def without_gradients() -> tuple[bool, bool]:
    """(whether a step without a gradient keeps the error and Q, whether gradients of two types are summed)"""
    mesh = make_mesh(tightfit.Plan(dp_replicate=2), torch.device("cpu"))
    assert mesh is not None
    matrix, vector = nn.Parameter(torch.zeros(24, 16)), nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    reducer = PowerSGD([matrix, vector, single := nn.Parameter(torch.zeros(3))], mesh.group("dp_replicate"), rank=2)
    for number in range(3):
        generator = torch.Generator().manual_seed(2 * number + rank())
        matrix.grad = torch.randn(24, 16, generator=generator)
        vector.grad, single.grad = torch.ones_like(vector), torch.ones_like(single)
        reducer.finish()
    error, columns = reducer.errors[matrix].clone(), reducer.columns[matrix].clone()
    matrix.grad = None
    reducer.finish()
    kept = torch.equal(reducer.errors[matrix], error) and torch.equal(reducer.columns[matrix], columns)
    return kept and matrix.grad is None, bool((vector.grad == 4).all() and (single.grad == 4).all())


def test_a_step_without_a_gradient_keeps_its_error() -> None:
    assert together(2, HERE + "without_gradients") == [(True, True), (True, True)]


def resumed(folder: str) -> list[str]:
    case = cases.make_case("llama")
    plan = tightfit.Plan(dp_replicate=2, compressed_gradients="powersgd", powersgd_rank=8)
    run = tightfit.build(case.job, plan)
    next(iter(tightfit.train(run)))
    tightfit.save(run, folder, 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", TightfitWarning)
        tightfit.resume(tightfit.build(case.job, plan), folder)
    return [str(one.message) for one in found]


def test_a_resume_says_that_errors_are_not_saved(tmp_path: Path) -> None:
    first, other = together(2, HERE + "resumed", str(tmp_path))
    assert any("what PowerSGD has not sent yet" in said for said in first)
    assert not any("PowerSGD" in said for said in other)


def test_powersgd_is_refused_in_fp16() -> None:
    plan = tightfit.Plan(dp_replicate=2, compressed_gradients="powersgd", precision="fp16-mixed")
    with pytest.raises(InputError, match="PowerSGD adds to each gradient what it did not send before"):
        check(plan, cases.make_case("llama").job, "cuda")
