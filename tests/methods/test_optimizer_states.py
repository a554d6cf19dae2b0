"""Optimizers with the plan's states, rounding and kernels give the reference weights where they
should."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.job import Job, Train
from tightfit.methods import optimizer_states
from tightfit.models.objective import objective_of
from tightfit.optim.in_batches import MultiTensor
from tightfit.optim.per_parameter import PerParameter
from tightfit.plan import Plan
from tightfit.runtime.run import Run


@dataclass
class Data:
    """All that optimizer_states reads of a run's data."""

    samples: int | None = 100


def make_run(train: Train, samples: int | None = 100, dtype: torch.dtype = torch.float32) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4)).to(dtype)
    unset = cast(Any, None)
    return Run(
        job=Job(model=lambda: model, data=[1], train=train),
        plan=Plan(),
        device=torch.device("cpu"),
        objective=objective_of(None, None),
        model=model,
        loss_sum=unset,
        data=cast(Any, Data(samples)),
        optimizer=unset,
        learning_rate=unset,
    )


def three_steps(run: Run) -> list[torch.Tensor]:
    for step in range(3):
        for group in run.optimizer.param_groups:
            group["lr"] = run.learning_rate(step)
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        run.model(inputs.to(next(run.model.parameters()).dtype)).float().square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return [parameter.detach().float() for parameter in run.model.parameters()]


def test_the_reference_plan_uses_the_plain_optimizer() -> None:
    assert optimizer_states.enabled(Plan())
    run = optimizer_states.apply(make_run(Train(steps=10)), Plan())
    assert type(run.optimizer) is torch.optim.AdamW
    assert not run.optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "fields",
    [{"fused_optimizer": True}, {"update_in_backward": True}, {"update_in_backward": True, "fused_optimizer": True}],
)
def test_exact_methods_give_the_reference_weights(fields: dict[str, bool]) -> None:
    train = Train(steps=10, schedule="cosine", warmup=2, learning_rate=0.01, weight_decay=0.1)
    expected = three_steps(optimizer_states.apply(make_run(train), Plan()))
    found = three_steps(optimizer_states.apply(make_run(train), Plan(**fields)))
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_update_in_backward_leaves_no_gradient() -> None:
    run = optimizer_states.apply(make_run(Train(steps=10)), Plan(update_in_backward=True))
    run.model(torch.randn(8, 64)).square().mean().backward()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert len(run.optimizer.state) == 4


@pytest.mark.parametrize(("states", "nbytes"), [("bf16", 4), ("8-bit", 2 + 8 / 256), ("4-bit", 1 + 8 / 128)])
def test_states_have_the_plan_s_width(states: str, nbytes: float) -> None:
    run = optimizer_states.apply(make_run(Train(steps=10)), Plan(states=states))
    three_steps(run)
    parts = [state[name] for state in run.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")][:2]
    tensors = [tensor for part in parts for tensor in (part.values() if isinstance(part, dict) else [part])]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == nbytes * 64 * 128


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_plan_s_rounding_is_applied_to_the_weights(rounding: str) -> None:
    train = Train(steps=10, learning_rate=1e-6)
    run = optimizer_states.apply(make_run(train, dtype=torch.bfloat16), Plan(precision="bf16-true", rounding=rounding))
    assert isinstance(run.optimizer, PerParameter)
    three_steps(run)
    assert set(run.optimizer.state[run.model[0].weight]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        {"kahan": "compensation", "stochastic": "roundings"}[rounding],
    }


def test_the_noise_uses_the_job_s_seed() -> None:
    plan = Plan(precision="bf16-true", rounding="stochastic")
    ends = [
        three_steps(optimizer_states.apply(make_run(Train(steps=10, seed=seed), dtype=torch.bfloat16), plan))[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_the_schedule_ends_with_the_last_epoch() -> None:
    train = Train(epochs=2, batch=10, schedule="linear", learning_rate=1.0)
    rate = optimizer_states.apply(make_run(train, samples=100), Plan()).learning_rate
    assert [rate(step) for step in (0, 10, 20)] == [1.0, 0.5, 0.0]


def test_endless_data_needs_steps_or_a_constant_schedule() -> None:
    constant = optimizer_states.apply(make_run(Train(learning_rate=0.5), samples=None), Plan())
    assert constant.learning_rate(10**6) == 0.5
    with pytest.raises(InputError, match=r"train\.steps"):
        optimizer_states.apply(make_run(Train(schedule="cosine"), samples=None), Plan())


@pytest.mark.parametrize(
    ("fields", "optimizer", "fix"),
    [
        ({"fused_optimizer": True}, "sgd", "fused_optimizer: false"),
        ({"precision": "bf16-true"}, "adamw", "precision: fp32 or bf16-mixed"),
        ({"states": "8-bit"}, "adamw", "states: fp32"),
        ({}, "lion", "optimizer: adamw or sgd"),
    ],
    ids=lambda one: one if isinstance(one, str) else "+".join(one),
)
def test_real_only_options_are_refused_for_complex_parameters(fields: dict[str, Any], optimizer: str, fix: str) -> None:
    model = nn.ParameterDict({"wave": torch.randn(4, 4, dtype=torch.complex64), "bias": torch.zeros(4)})
    with pytest.raises(InputError, match=r"complex parameters \(wave\)") as raised:
        optimizer_states.optimizer_of(model, Train(optimizer=optimizer), Plan(**fields))
    assert fix in raised.value.fix
    optimizer_states.optimizer_of(model, Train(optimizer="sgd"), Plan())


@pytest.mark.parametrize(
    ("fields", "optimizer", "kind"),
    [
        ({"states": "8-bit"}, "adamw", MultiTensor),
        ({"states": "bf16"}, "lion", MultiTensor),
        ({"states": "8-bit", "fused_optimizer": True}, "sgd", MultiTensor),
        ({"states": "8-bit", "update_in_backward": True}, "adamw", PerParameter),
        ({"states": "8-bit"}, "lamb", PerParameter),
        ({"fused_optimizer": True}, "adamw", torch.optim.AdamW),
    ],
    ids=str,
)
def test_a_gpu_batches_elementwise_updates(
    fields: dict[str, Any], optimizer: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Train(steps=10, optimizer=optimizer, learning_rate=1e-3, weight_decay=0.1)
    expected = three_steps(optimizer_states.apply(make_run(train), Plan(**fields)))
    monkeypatch.setattr(optimizer_states, "kind_of", lambda device: "cuda")
    run = optimizer_states.apply(make_run(train), Plan(**fields))
    assert type(run.optimizer) is kind
    for one, two in zip(expected, three_steps(run), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
