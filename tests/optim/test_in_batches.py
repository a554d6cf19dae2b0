"""Batched updates give the results of updates of one parameter at a time, with fewer kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.optim.test_per_parameter import Model, assert_same, bytes_per_element, steps, train
from tightfit.optim import in_batches, make_optimizer
from tightfit.optim.in_batches import ELEMENTWISE, MultiTensor, update_batches
from tightfit.optim.per_parameter import PerParameter
from tightfit.plan import Plan
from tightfit.runtime.offload_store import Store

WIDTHS = ["fp32", "bf16", "8-bit", "4-bit"]
KINDS = [
    *itertools.product([torch.bfloat16], ["nearest", "kahan", "stochastic"], WIDTHS),
    *itertools.product([torch.float32], ["nearest"], WIDTHS),
]


def both(
    name: str, dtype: torch.dtype, fused: bool = False, **options: Any
) -> list[tuple[Model, torch.optim.Optimizer]]:
    """The same model twice, updated in batches and one by one, by torch's kernels over lists in both."""
    found = []
    for kind in (MultiTensor, PerParameter):
        model = Model(dtype)
        optimizer = kind(make_optimizer(model, train(name), fused), **options)
        for group in optimizer.param_groups:
            if "foreach" in group and not fused:
                group["foreach"] = True
        found.append((model, optimizer))
    return found


def assert_same_states(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same_states(value, two[name])
        elif isinstance(value, Tensor):
            assert value.dtype == two[name].dtype, name
            assert torch.equal(value, two[name]), name
        else:
            assert value == two[name], name


@pytest.mark.sweep(12)
@pytest.mark.parametrize("elements", [2**24, 5000, 1], ids=["one batch", "some", "each alone"])
@pytest.mark.parametrize(("dtype", "rounding", "width"), KINDS, ids=lambda one: str(one).removeprefix("torch."))
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_batches_give_the_same_bits_as_one_parameter_at_a_time(
    name: str, dtype: torch.dtype, rounding: str, width: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_batches, "ELEMENTS", elements)
    (model, together), (other, alone) = both(name, dtype, states=width, rounding=rounding)
    for seed in range(4):
        for one, optimizer in ((model, together), (other, alone)):
            one.unused.weight.grad = torch.ones_like(one.unused.weight) if seed > 1 else None  # which comes late
            steps(one, optimizer, range(seed, seed + 1))
        assert_same(model, other)
        for parameter, like in zip(model.parameters(), other.parameters(), strict=True):
            assert_same_states(together.state[parameter], alone.state[like])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernels_give_the_same_bits_in_batches(name: str) -> None:
    (model, together), (other, alone) = both(name, torch.bfloat16, True, states="8-bit", rounding="kahan")
    for one, optimizer in ((model, together), (other, alone)):
        steps(one, optimizer, range(3))
    assert_same(model, other)


@pytest.mark.parametrize("width", ["fp32", "8-bit"])
def test_stored_states_give_the_same_bits_in_batches(width: str) -> None:
    (model, together), (other, alone) = (
        both("adamw", torch.bfloat16, states=width, rounding="kahan", state_store=store)[one]
        for one, store in enumerate(Store(Plan(), torch.device("cpu")) for _ in range(2))
    )
    for one, optimizer in ((model, together), (other, alone)):
        steps(one, optimizer, range(3))
    assert_same(model, other)


def test_fp32_updates_of_fp16_weights_are_the_same_in_batches() -> None:
    (model, together), (other, alone) = both("adamw", torch.float16, fp32_updates=True)
    for one, optimizer in ((model, together), (other, alone)):
        one.float()(torch.zeros(2, 2, dtype=torch.long)).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
        one.half()
        for name, parameter in one.named_parameters():
            parameter.grad = None if gradients[name] is None else gradients[name].half()
        optimizer.step()
    assert_same(model, other)
    assert {state["exp_avg"].dtype for state in together.state.values() if state} == {torch.float32}


def test_non_contiguous_weights_are_updated_the_same() -> None:
    ends = []
    for kind, fused in itertools.product((MultiTensor, PerParameter), (False, True)):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(16, 32, 3, 3).to(memory_format=torch.channels_last)) for _ in "ab"]
        optimizer = kind(torch.optim.AdamW(weights, lr=0.1, fused=fused), "8-bit")
        optimizer.param_groups[0]["foreach"] = not fused
        for _ in range(3):
            for number, weight in enumerate(weights):
                weight.grad = (number + 1) * torch.ones_like(weight).cumsum(1)
            optimizer.step()
        ends.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])


def test_batches_keep_no_more_bytes_and_no_fp32_tensors() -> None:
    for width, expected in {"fp32": 8 + 2, "bf16": 4 + 2, "8-bit": 2 + 8 / 256 + 2, "4-bit": 1 + 8 / 128 + 2}.items():
        model, optimizer = both("adamw", torch.bfloat16, states=width, rounding="kahan")[0]
        steps(model, optimizer, range(3))
        assert bytes_per_element(optimizer, model.up.weight) == expected
        assert not optimizer._inner.state
        assert not optimizer._inner.param_groups


def test_a_run_resumes_in_batches_and_back() -> None:
    for first, second in itertools.permutations((0, 1)):
        (model, before), (same, whole) = (
            both("adamw", torch.bfloat16, states="8-bit", rounding="stochastic")[first] for _ in "ab"
        )
        steps(model, before, range(2))
        steps(same, whole, range(4))
        resumed, after = both("adamw", torch.bfloat16, states="8-bit", rounding="stochastic")[second]
        resumed.load_state_dict(model.state_dict())
        after.load_state_dict(before.state_dict())
        steps(resumed, after, range(2, 4))
        assert_same(resumed, same)


def test_rounding_errors_that_only_some_weights_have() -> None:
    """A run that resumes with kahan rounding has none yet, and a weight may get its first gradient later than others."""
    ends = []
    for which in range(2):
        model, before = both("adamw", torch.bfloat16, states="bf16")[which]
        model.unused.weight.grad = torch.ones_like(model.unused.weight)
        steps(model, before, range(2))
        resumed, after = both("adamw", torch.bfloat16, states="bf16", rounding="kahan")[which]
        resumed.load_state_dict(model.state_dict())
        after.load_state_dict(before.state_dict())
        for seed in range(2, 5):
            resumed.unused.weight.grad = torch.ones_like(resumed.unused.weight) if seed > 2 else None
            steps(resumed, after, range(seed, seed + 1))
        ends.append(resumed)
    assert_same(*ends)


def test_a_batch_holds_the_largest_parameter_or_a_fixed_count() -> None:
    large = 3 * in_batches.ELEMENTS
    assert update_batches([large, 10, large - 10, 1], large) == [range(1), range(1, 3), range(3, 4)]
    assert update_batches([1, 2, 3], 3) == [range(3)]
    assert update_batches([], 0) == []


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view
        return func(*args, **(kwargs or {}))


def test_runs_on_fake_tensors_with_far_fewer_kernels() -> None:
    counts = []
    for kind in (MultiTensor, PerParameter):
        with FakeTensorMode():
            model = Model(torch.bfloat16)
            optimizer = kind(make_optimizer(model, train("adamw"), True), "8-bit", "kahan")
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                with Counted() as counted:
                    optimizer.step()
        counts.append(counted.count)
    assert counts[0] < counts[1] / 2  # with nine parameters; one more adds none to the batch, and twelve to the others
