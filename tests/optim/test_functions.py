"""Optimizers and schedules that a function of the user's creates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tests.contract import cases
from tightfit.errors import InputError
from tightfit.job import Job, Train
from tightfit.optim.functions import kind_of_update, rate_by_function
from tightfit.optim.schedule import learning_rate
from tightfit.plan import Plan


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, eps=1e-3, momentum=0.5)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


class Normalized(torch.optim.Optimizer):
    """Gradient descent with a gradient of norm 1 over all parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in moved])
        for parameter in moved:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


def normalized(parameters: Any) -> torch.optim.Optimizer:
    return Normalized(parameters)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in a parameter group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step(closure)


class Factored(torch.optim.Optimizer):
    """Divides by row and column means of squares for matrices of at least `least` rows and columns."""

    def __init__(self, params: Any, least: int) -> None:
        super().__init__(params, {"lr": 0.1, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                squares = parameter.grad.square() + 1e-3
                if parameter.dim() == 2 and min(parameter.shape) >= group["least"]:
                    squares = squares.mean(1, keepdim=True) * squares.mean(0) / squares.mean()
                parameter.addcdiv_(parameter.grad, squares.sqrt(), value=-group["lr"])


class Late(torch.optim.Optimizer):
    """Divides gradients by their norm after 20 updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                gradient = parameter.grad
                if state["count"] > 20:
                    gradient = gradient / gradient.norm()
                parameter.sub_(gradient, alpha=group["lr"])


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda parameters: Factored(parameters, 128), "by parameter"),
        (lambda parameters: Factored(parameters, 1024), "by parameter"),
        (lambda parameters: Late(parameters), "by parameter"),
        (rmsprop, "elementwise"),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), "elementwise"),
        (lambda parameters: torch.optim.Rprop(parameters), "elementwise"),
        (adafactor, "by parameter"),
        (normalized, "together"),
    ],
)
def test_what_an_update_reads_is_found_out(function: Any, kind: str) -> None:
    assert kind_of_update(function) == kind


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda parameters: None, "returned NoneType(.|\n)*return a torch.optim.Optimizer"),
        (lambda parameters: torch.optim.SGD(list(parameters)[:1]), "or not all of them"),
        (lambda parameters: torch.optim.LBFGS(parameters), "computes the loss several times"),
        (lambda parameters: torch.optim.SGD(parameters, lr=-1.0), "Invalid learning rate"),
        (lambda parameters: Counting(parameters), "changes the value 'count' of its parameter groups"),
        (lambda parameters: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_functions_that_make_no_usable_optimizer_are_refused(function: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        kind_of_update(function)


def plain(groups: bool) -> dict[str, torch.Tensor]:
    """The llama job with RMSprop and a cosine schedule, by nothing but PyTorch."""
    case = cases.make_case("llama")
    run = tightfit.build(case.job)  # for its initial weights and its samples
    model = run.model
    named = list(model.named_parameters())
    own = {"lr": 1e-4, "weight_decay": 0.2}
    parts = [
        {"params": [p for name, p in named if "embed" in name], **own},
        {"params": [p for name, p in named if "embed" not in name]},
    ]
    optimizer = rmsprop(parts if groups else model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _, (batch,) in zip(range(cases.STEPS), run.data.steps(0, None), strict=False):
        total, count = case.plain_loss(model, batch)
        (total / count).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return cases.state(model)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def half_cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 10))


def make(groups: bool = False, **train: Any) -> cases.Case:
    case = cases.make_case("llama")
    more = {"groups": [{"match": "*embed*", "learning_rate": 1e-4, "weight_decay": 0.2}]} if groups else {}
    own = {"optimizer": rmsprop, "schedule": cosine, "batch": cases.BATCH, "steps": cases.STEPS, "seed": 5}
    return cases.Case("llama", case.job.replace(train=Train(**{**own, **more, **train})), case.plain_loss)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, False),
        ({}, True),
        ({"micro_batch": 3, "recompute": "full"}, True),
        ({"dp_replicate": 2}, False),
        ({"zero": 2, "dp_shard": 2}, True),
        ({"zero": 3, "dp_shard": 2}, False),
        ({"tp": 2}, False),
        ({"pp": 2}, True),
    ],
    ids=str,
)
def test_an_optimizer_of_the_users_matches_plain_pytorch(fields: dict[str, Any], groups: bool) -> None:
    _, weights = cases.training(make(groups), Plan(**fields))
    assert cases.distance(weights, plain(groups)) <= 1e-6


@pytest.mark.parametrize("fields", [{"zero": 2, "dp_shard": 2}, {"tp": 2}], ids=str)
def test_an_update_by_matrix_gets_full_parameters(fields: dict[str, Any]) -> None:
    case = make(optimizer=adafactor)
    _, expected = cases.training(case, Plan())
    _, weights = cases.training(case, Plan(**fields))
    assert cases.distance(weights, expected) <= 1e-6


def test_a_schedule_may_be_a_function_of_the_step() -> None:
    _, weights = cases.training(make(schedule=half_cosine), Plan())
    assert cases.distance(weights, plain(False)) <= 1e-6


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 8, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=0.1),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            ],
            [3],
        ),
    ],
)
def test_torch_s_schedulers_give_their_own_rates(make_scheduler: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25)
    scheduler, expected = make_scheduler(optimizer), []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < 8:
            scheduler.step()
    rate = learning_rate(Train(schedule=make_scheduler, learning_rate=0.25), None)
    assert [rate(step) for step in (7, *range(7))] == pytest.approx([expected[7], *expected[:7]])


def _own_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups with rates of their own; the optimizer's default, 1e-3, is the rate of none."""
    matrices, vectors = ([one for one in parameters if (one.dim() > 1) == large] for large in (True, False))
    return torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 0.1}])


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=5e-3),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.3], 4, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 1.0]),
    ],
)
@pytest.mark.parametrize("own_loop", [False, True])
def test_schedulers_get_the_groups_of_an_own_optimizer(make_scheduler: Any, own_loop: bool) -> None:
    reference = nn.Linear(4, 3)
    optimizer = _own_groups(list(reference.parameters()))
    scheduler, expected = make_scheduler(optimizer), []
    for _ in range(4):
        expected.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    train = Train(optimizer=_own_groups, schedule=make_scheduler, batch=2, steps=4)
    rates = []
    if own_loop:
        net = tightfit.prepare(lambda: nn.Linear(4, 3), train)
        for _ in range(4):
            net.backward(net(torch.randn(2, 4)).square().mean())
            net.step()
            rates.append([group["lr"] for group in net.optimizer.param_groups])
    else:
        data = [(torch.randn(4), number % 3) for number in range(8)]
        run = tightfit.build(tightfit.Job(model=lambda: nn.Linear(4, 3), data=data, train=train))
        rates = [[group["lr"] for group in run.optimizer.param_groups] for _ in tightfit.train(run)]
    assert [rate for step in rates for rate in step] == pytest.approx([rate for step in expected for rate in step])


def test_a_schedule_that_fails_says_how() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step=3)  # type: ignore[call-arg]

    with pytest.raises(InputError, match=r"returns a scheduler \(TypeError: .*'step'"):
        learning_rate(Train(schedule=schedule), None)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda step: -1.0, "the factor is -1.0"),
        (lambda step: None, "TypeError"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "needs a metric of your loop"),
    ],
)
def test_functions_that_make_no_schedule_are_refused(schedule: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        learning_rate(Train(schedule=schedule), None)


REFUSED: list[dict[str, Any]] = [
    {"states": "8-bit"},
    {"update_in_backward": True},
    {"offload": ["states"], "offload_to": "disk"},
    {"precision": "bf16-true", "rounding": "kahan"},
    {"fused_optimizer": True},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_plans_that_an_own_optimizer_cannot_join(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"one of the optimizers|tightfit's optimizers|fused_optimizer: false"):
        tightfit.build(make().job, Plan(**fields))


def test_updates_of_all_parameters_together_are_not_sharded() -> None:
    case = make(optimizer=normalized)
    cases.training(case, Plan())
    for fields in ({"zero": 2, "dp_shard": 2}, {"pp": 2}):
        with pytest.raises(InputError, match="with the gradients of others"):
            cases.training(case, Plan(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rate": 1e-2}, r"train\.learning_rate=0\.01: has no effect(.|\n)*set lr in the function"),
        ({"weight_decay": 0.1}, r"train\.weight_decay=0\.1: has no effect"),
        ({"schedule": half_cosine, "warmup": 3}, r"train\.warmup=3: has no effect(.|\n)*warm up"),
    ],
)
def test_settings_that_a_function_replaces_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Train(optimizer=rmsprop, **fields)


def test_a_job_file_names_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef optimizer(parameters):\n    return torch.optim.RMSprop(parameters, lr=0.5)\n"
        "def schedule(step):\n    return 1 / (1 + step)\n"
    )
    (tmp_path / "job.yaml").write_text(
        "model: {preset: gpt2}\ndata: {synthetic: tokens}\n"
        + "train: {optimizer: {python: 'mine.py:optimizer'}, schedule: {python: 'mine.py:schedule'}, steps: 2}\n"
    )
    job = Job.load(tmp_path / "job.yaml")
    assert Job.parse(job.content()).train == job.train
    assert job.content()["train"]["optimizer"] == {"python": f"{tmp_path}/mine.py:optimizer"}
    assert kind_of_update(job.train.optimizer) == "elementwise"
    rate = learning_rate(job.train, 2, 0.5)
    assert [rate(step) for step in range(3)] == pytest.approx([0.5, 0.25, 0.5 / 3])
    with pytest.raises(InputError, match="use one of: 'adamw'"):
        Train(optimizer="rmsprop")


def test_the_ledger_has_the_states_of_an_own_optimizer() -> None:
    """RMSprop with momentum keeps two tensors for each weight; plain SGD none."""
    ledgers = {name: tightfit.profile(make(optimizer=function).job) for name, function in OWN.items()}
    weights = sum(parameter.bytes for parameter in ledgers["sgd"].parameters if parameter.trainable)
    states = {name: sum(update.state_bytes for update in one.updates.values()) for name, one in ledgers.items()}
    assert states["sgd"] == 0
    assert 2 * weights <= states["rmsprop"] <= 2.01 * weights
    estimated, ran = tightfit.estimate(make().job, Plan()).peak, tightfit.dry_run(make().job, Plan())
    rows = {row: size for row, size in estimated.rows.items() if row in ran.rows}
    assert rows["optimizer"] == ran.rows["optimizer"]
    assert sum(rows.values()) == pytest.approx(ran.total, rel=0.02)


OWN: dict[str, Any] = {"rmsprop": rmsprop, "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    job = make().job
    whole = tightfit.build(job)
    list(tightfit.train(whole))
    first = tightfit.build(job)
    for step in tightfit.train(first):
        if step.step == 1:
            break
    tightfit.save(first, tmp_path, 2)
    second = tightfit.build(job)
    list(tightfit.train(second, tightfit.resume(second, tmp_path)))
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_verify_compares_an_own_optimizer_with_the_reference() -> None:
    result = tightfit.verify(make(groups=True).job, Plan(micro_batch=2, recompute="full"))
    assert result.passed
    assert result.weights < 1e-5


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 8),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5),
    ],
)
def test_a_scheduler_that_moves_the_momentum_is_refused(make_scheduler: Any) -> None:
    with pytest.raises(InputError, match="also changes momentum") as caught:
        rate_by_function(make_scheduler, 0.5)
    assert caught.value.fix == "use cycle_momentum=False"


class Boxed(torch.Tensor):
    """A tensor of a class of its own, as torchao's quantized states are."""


def test_states_of_another_class_of_tensors_are_refused() -> None:
    """Small weights may have plain states all the same."""

    class Boxing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for weight in self.param_groups[0]["params"]:
                state = torch.zeros_like(weight)
                self.state[weight]["average"] = state.as_subclass(Boxed) if weight.numel() > 4096 else state
            return super().step(closure)

    job = Job(
        model=lambda: nn.Linear(4, 2),
        data=[(torch.zeros(4), 0)] * 4,
        train=Train(batch=2, steps=1, optimizer=lambda weights: Boxing(weights, lr=0.1)),
    )
    with pytest.raises(InputError, match=r"'average' in a Boxed(.|\n)*plan\.states: 8-bit"):
        tightfit.build(job)
