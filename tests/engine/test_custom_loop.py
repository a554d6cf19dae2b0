"""Loops of the user's own: with every plan that they can use, they train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.contract.cases import distance
from tests.pool import together
from tightfit.errors import InputError
from tightfit.plan import Plan

WIDTH, CLASSES, BATCH, STEPS = 16, 5, 8, 3
EVERYTHING = ["bf16", "fp16", "offload", "8-bit-states", "compressed-gradients"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def objective(net: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> Tensor:
    """A cross entropy, and a penalty of the gradient by the input, which needs a second backward."""
    x = x.clone().requires_grad_()
    logits = net(x)
    (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), x, create_graph=True)
    return functional.cross_entropy(logits, labels) + gradient.square().sum(-1).mean()


def cross_entropy(net: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), labels)


LOSSES = {"penalty": objective, "plain": cross_entropy}


def plain(
    loss: str,
    precision: torch.dtype | None = None,
    clip: float | None = None,
    rates: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> dict[str, Tensor]:
    net = Net()
    optimizer = adam(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=precision is torch.float16)
    for (x, labels), rate in zip(batches(), rates, strict=True):
        optimizer.param_groups[0]["lr"] = 1e-2 * rate

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
                return net(x).float()

        scaler.scale(LOSSES[loss](forward, x, labels)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(net)


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def trained(
    fields: dict[str, Any], loss: str = "penalty", pieces: int = 1, clip: float | None = None
) -> dict[str, Tensor]:
    """Weights after the steps on this process's share of each batch, in `pieces` backwards."""
    net = tightfit.prepare(Net, adam, Plan(**fields), allow=EVERYTHING)  # type: ignore[arg-type]
    for batch in batches():
        x, labels = (one.chunk(net.data_ranks)[net.data_rank] for one in batch)
        for part in zip(x.chunk(pieces), labels.chunk(pieces), strict=True):
            net.backward(LOSSES[loss](net, *part) / pieces)
        net.step(clip=clip)
    return weights(net.model)


@pytest.mark.parametrize(
    ("fields", "loss"),
    [
        ({}, "penalty"),
        ({"recompute": "full"}, "penalty"),
        ({"recompute": "selective"}, "plain"),
        ({"materialize": "device"}, "penalty"),
        ({"offload": ["states", "activations"], "offload_to": "disk"}, "plain"),
    ],
    ids=str,
)
def test_a_loop_of_ones_own_trains_as_in_plain_pytorch(fields: dict[str, Any], loss: str) -> None:
    if "states" in fields.get("offload", ()):
        net = tightfit.prepare(Net, tightfit.Train(**ADAM), Plan(**fields), allow=EVERYTHING)
        for x, labels in batches():
            net.backward(LOSSES[loss](net, x, labels))
            net.step()
        found = weights(net.model)
        assert distance(found, plain_without_decay(loss)) <= 1e-6
        return
    assert distance(trained(fields, loss), plain(loss)) <= 1e-6
    assert distance(trained(fields, loss, pieces=2, clip=0.1), plain(loss, clip=0.1)) <= 1e-6


ADAM: dict[str, Any] = {"learning_rate": 1e-2, "epsilon": 1e-3}


def plain_without_decay(loss: str) -> dict[str, Tensor]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    for x, labels in batches():
        LOSSES[loss](net, x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_autocast_and_loss_scaling_are_those_of_torch(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    assert distance(trained({"precision": precision}, "plain"), plain("plain", dtype)) <= 1e-5


def test_a_compiled_model_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    torch.compiler.reset()
    for regions in ("block", "model"):
        assert distance(trained({"compile": regions}, "plain", pieces=2), plain("plain")) <= 1e-6
    torch.compiler.reset()


SEVERAL: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"zero": 1, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2},
    {"zero": 2, "dp_shard": 2, "recompute": "full"},
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("fields", SEVERAL, ids=str)
def test_two_processes_train_as_one(fields: dict[str, Any]) -> None:
    for arguments in (("penalty",), ("plain", 2, 0.1)):
        expected = plain(arguments[0], clip=arguments[2] if len(arguments) > 1 else None)  # type: ignore[misc]
        for found in together(2, "tests.engine.test_custom_loop:trained", fields, *arguments):
            assert distance(found, expected) <= 1e-6


def joint(fields: dict[str, Any]) -> dict[str, Tensor]:
    """Two models with one loss: the backward of one of them gives the other its gradients."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    plan = Plan(**fields)
    encoder = tightfit.prepare(first, torch.optim.AdamW(first.parameters(), lr=1e-2, eps=1e-3), plan)
    head = tightfit.prepare(second, torch.optim.SGD(second.parameters(), lr=1e-1), plan)
    for batch in batches():
        x, labels = (one.chunk(head.data_ranks)[head.data_rank] for one in batch)
        head.backward(functional.cross_entropy(head(encoder(x)), labels))
        head.step()
        encoder.step()
    return {**weights(encoder.model), **{f"head.{name}": one for name, one in weights(head.model).items()}}


def plain_joint() -> dict[str, Tensor]:
    torch.manual_seed(0)
    encoder, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    optimizers = (
        torch.optim.AdamW(encoder.parameters(), lr=1e-2, eps=1e-3),
        torch.optim.SGD(head.parameters(), lr=1e-1),
    )
    for x, labels in batches():
        functional.cross_entropy(head(encoder(x)), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(encoder), **{f"head.{name}": one for name, one in weights(head).items()}}


@pytest.mark.parametrize("fields", [{}, *SEVERAL[:3]], ids=str)
def test_two_models_may_share_a_loss(fields: dict[str, Any]) -> None:
    expected = plain_joint()
    where = "tests.engine.test_custom_loop:joint"
    for found in together(2, where, fields) if fields else [joint(fields)]:
        assert distance(found, expected) <= 1e-6


def test_gradients_that_are_dropped_are_not_used() -> None:
    """zero_grad between a backward and the step, also of gradients that ZeRO-2 has reduced."""
    for found in together(2, "tests.engine.test_custom_loop:dropped", {"zero": 2, "dp_shard": 2}):
        assert distance(found, plain("plain")) <= 1e-6


def dropped(fields: dict[str, Any]) -> dict[str, Tensor]:
    net = tightfit.prepare(Net, adam, Plan(**fields))
    for batch in batches():
        x, labels = (one.chunk(net.data_ranks)[net.data_rank] for one in batch)
        net.backward(net(x).square().sum())
        net.zero_grad()
        net.backward(cross_entropy(net, x, labels))
        net.step()
    return weights(net.model)


def test_a_scheduler_of_the_users_sets_the_rates() -> None:
    net = Net()
    optimizer = adam(net.parameters())
    ours = tightfit.prepare(net, optimizer)
    assert ours.optimizer is optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.5, 0.1, 0.0)[step])
    for x, labels in batches():
        ours.backward(cross_entropy(ours, x, labels))
        ours.step()
        schedule.step()
    assert distance(weights(net), plain("plain", rates=(1.0, 0.5, 0.1))) <= 1e-6


def test_a_train_brings_its_groups_schedule_and_clip() -> None:
    train = tightfit.Train(
        **ADAM, clip=0.1, steps=STEPS, schedule="linear", groups=[{"match": "head.*", "learning_rate": 1e-3}]
    )
    ours = tightfit.prepare(Net, train)
    net = Net()
    groups = [
        {"params": net.blocks.parameters(), "lr": 1e-2},
        {"params": net.head.parameters(), "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups, eps=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for x, labels in batches():
        ours.backward(cross_entropy(ours, x, labels))
        ours.step()
        cross_entropy(net, x, labels).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert distance(weights(ours.model), weights(net)) <= 1e-6


def test_a_checkpoint_goes_on_exactly(tmp_path: Path) -> None:
    def steps(net: tightfit.Prepared, numbers: range) -> None:
        for number in numbers:
            net.backward(cross_entropy(net, *batches()[number]))
            net.step()

    whole, first, second = (tightfit.prepare(Net, adam) for _ in range(3))
    steps(whole, range(3))
    steps(first, range(2))
    first.save(tmp_path)
    assert second.resume(tmp_path) == 2
    steps(second, range(2, 3))
    assert distance(weights(second.model), weights(whole.model)) == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pp": 2}, "a pipeline's schedule runs(.|\n)*use pp: 1"),
        ({"dp_replicate": 2, "parameter_server": "sync"}, "a server runs(.|\n)*parameter_server: none"),
        ({"zero": 3, "dp_shard": 2}, "gathers a block's parameters(.|\n)*use zero: 2"),
        ({"tp": 2}, "the loss is yours(.|\n)*use tp: 1"),
        ({"update_in_backward": True}, "several backwards(.|\n)*update_in_backward: false"),
        ({"offload": ["gradients"], "offload_to": "disk"}, "copied for the one backward"),
        ({"chunked_loss": 8}, "the loss is yours"),
        ({"micro_batch": 2}, "decides how many samples"),
        ({"recompute": "sqrt"}, "recompute: full or every-2"),
        ({"loader_workers": 2}, "in your loader"),
        ({"states": "8-bit"}, "an optimizer whose arithmetic|keeps its states"),
    ],
    ids=str,
)
def test_what_a_plan_cannot_do_here_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tightfit.prepare(Net, adam, Plan(**fields), allow=EVERYTHING)  # type: ignore[arg-type]


def test_only_optimizers_are_taken() -> None:
    with pytest.raises(InputError, match=r"is of type str(.|\n)*a function of the parameters"):
        tightfit.prepare(Net, "adamw")  # type: ignore[arg-type]


def test_the_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tightfit.prepare(nn.Sequential(nn.Flatten(), Frozen()), adam)
    assert torch.equal(torch.get_rng_state(), before)


class Frozen(nn.Module):
    """A layer without random initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def looped(plan: Plan) -> Callable[[Tensor, Tensor], None]:
    net = tightfit.prepare(Net, tightfit.Train(**ADAM), plan, allow=EVERYTHING)  # type: ignore[arg-type]

    def step(x: Tensor, labels: Tensor) -> None:
        net.backward(cross_entropy(net, x, labels))
        net.step()

    return step


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "rounding": "kahan"},
        {"recompute": "full"},
        {"states": "8-bit"},
        {"fused_optimizer": True},
        {"offload": ["states"], "offload_to": "disk"},
    ],
    ids=str,
)
def test_the_memory_of_a_loop_is_predicted(fields: dict[str, Any]) -> None:
    plan, (x, labels) = Plan(**fields), batches()[0]
    wide = x.repeat(64, 1), labels.repeat(64)
    explained, measured = tightfit.explain_loop(looped, plan, wide), tightfit.measure_loop(looped, plan, wide)
    assert explained.total == pytest.approx(measured.total, rel=0.05)
    assert "peak" in str(explained)
    assert sum(explained.peak.rows.values()) == explained.total


def test_what_a_loop_keeps_beside_its_models_counts() -> None:
    def keeping(plan: Plan) -> Callable[[Tensor, Tensor], None]:
        kept, step = torch.zeros(1000, 1000), looped(plan)

        def more(x: Tensor, labels: Tensor) -> None:
            step(x, labels)
            kept.add_(1.0)

        return more

    inputs = batches()[0]
    more = tightfit.explain_loop(keeping, Plan(), inputs).total - tightfit.explain_loop(looped, Plan(), inputs).total
    assert more == 4_000_000


def test_a_prepared_model_refuses_an_unfrozen_parameter() -> None:
    model = Net()
    model.head.requires_grad_(False)
    net = tightfit.prepare(model, adam)
    for number in range(2):
        net.backward(net(torch.ones(2, WIDTH)).sum())
        if number == 0:
            net.step()
    model.head.bias.requires_grad_(True)
    with pytest.raises(InputError, match=r"head\.bias\.requires_grad: was set to True after the run was built"):
        net.step()


def test_a_resume_restores_all_options_of_the_groups(tmp_path: Path) -> None:
    """Schedulers and loops change more than the rate."""

    def prepared() -> Any:
        return tightfit.prepare(lambda: nn.Linear(3, 2), lambda parameters: torch.optim.AdamW(parameters, lr=0.05))

    net, changed = prepared(), {"lr": 0.075, "betas": (0.6, 0.8), "weight_decay": 0.3}
    net.backward(net(torch.ones(4, 3)).sum())
    net.optimizer.param_groups[0].update(changed)
    net.step()
    net.save(tmp_path)
    again = prepared()
    assert again.resume(tmp_path) == 1
    found = again.optimizer.param_groups[0]
    assert {name: found[name] for name in changed} == changed
    for one in (net, again):
        one.zero_grad()
        one.backward(one(torch.ones(4, 3)).sum())
        one.step()
    assert torch.equal(net.run.model.weight, again.run.model.weight)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="prepare: model: is of type NoneType"):
        tightfit.prepare(None, tightfit.Train())  # type: ignore[arg-type]
