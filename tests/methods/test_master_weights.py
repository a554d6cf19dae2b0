"""Master weights train as a loop of plain PyTorch with fp32 masters does, whatever else the plan
does, and take the bytes that the ledger says."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests import tiny
from tests.contract import cases
from tests.pool import together
from tightfit.engine.checkpoint.save import newest
from tightfit.errors import InputError, TightfitWarning
from tightfit.methods import master_weights, optimizer_states
from tightfit.optim import make_optimizer
from tightfit.optim.gradient_dtype import widen_gradients
from tightfit.optim.in_batches import MultiTensor
from tightfit.planner.candidates import candidates
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator
from tightfit.runtime.method import SearchFacts
from tightfit.tensor_files import Reader

DTYPES = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}
RATES = {"sgd": 0.5, "lars": 1.0, "lion": 1e-3}
SCALE = 128.0


def plan_of(precision: str = "bf16-true", **fields: Any) -> tightfit.Plan:
    scale = {"loss_scale": SCALE} if precision == "fp16-true" else {}
    return tightfit.Plan(**{"precision": precision, "master_weights": True, **scale, **fields})


def case_of(name: str = "llama", optimizer: str = "adamw", **train: Any) -> cases.Case:
    rate = {"learning_rate": RATES[optimizer]} if optimizer in RATES else {}
    return cases.make_case(name, optimizer=optimizer, **{**rate, **train})


def plain_loop(case: cases.Case, plan: tightfit.Plan) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, weights and masters of the job by a loop of plain PyTorch: the model in 16 bits, its
    gradients added up in fp32, an optimizer of fp32 masters, and their rounding into the model."""
    settings, dtype = case.job.train, DTYPES[plan.precision]
    run = tightfit.build(case.job)  # for its initial weights and its samples, no more
    model, scale = run.model, SCALE if dtype is torch.float16 else 1.0
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.data = parameter.data.to(dtype)
    masters = {parameter: nn.Parameter(parameter.detach().float()) for parameter in named.values()}
    optimizer = make_optimizer(model, settings, weights=masters)  # tightfit's optimizers update plain fp32 weights
    losses = []
    for _, (batch,) in zip(range(settings.steps or 0), run.data.steps(0, None), strict=False):
        items = int((batch["labels"][:, 1:] != -100).sum())
        losses.append(0.0)
        for piece in cases.split(batch, plan.micro_batch or settings.batch):
            total, _ = case.plain_loss(model, piece)
            losses[-1] += total.item() / items
            (total * (scale / items)).backward()
            for parameter, master in masters.items():
                if parameter.grad is not None:
                    wide = parameter.grad.float()
                    master.grad = wide if master.grad is None else master.grad + wide
                    parameter.grad = None
        for master in masters.values():
            if master.grad is not None:
                master.grad /= scale
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(list(masters.values()), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return losses, cases.state(model), {name: masters[p].detach() for name, p in named.items()}


def trained(case: cases.Case, plan: tightfit.Plan) -> tuple[tightfit.Run, list[float]]:
    run = tightfit.build(case.job, plan)
    return run, [step.loss for step in tightfit.train(run)]


def masters_of(run: tightfit.Run) -> dict[str, Tensor]:
    states = run.optimizer.state
    return {name: states[p]["master"] for name, p in run.model.named_parameters() if "master" in states.get(p, {})}


def hold(case: cases.Case, plan: tightfit.Plan, near: float = 0.0) -> None:
    losses, weights, masters = plain_loop(case, plan)
    run, found = trained(case, plan)
    assert cases.distance(masters_of(run), masters) <= near
    assert cases.distance(cases.state(run.model), weights) <= near
    assert found == pytest.approx(losses, rel=max(near, 1e-6))
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, masters_of(run)[name].to(parameter.dtype))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "lamb", "lars", "adafactor", "muon"])
def test_every_optimizer_updates_the_masters(optimizer: str) -> None:
    """Exactly as it updates plain fp32 weights: in bf16 with several micro-batches."""
    hold(case_of(optimizer=optimizer), plan_of(micro_batch=3))


@pytest.mark.parametrize(
    ("name", "train", "fields"),
    [
        ("llama", {}, {"precision": "fp16-true", "micro_batch": 2}),
        ("llama", {"clip": 0.05, "optimizer": "sgd"}, {"precision": "fp16-true"}),
        ("llama", {"groups": [{"match": "*.layers.2.*", "learning_rate": 4e-2, "weight_decay": 0.5}]}, {}),
        ("llama", {}, {"update_in_backward": True}),
        ("llama", {}, {"offload": ("states",), "offload_to": "disk", "micro_batch": 3}),
        ("llama", {}, {"offload": ("states", "gradients", "parameters"), "offload_to": "disk", "micro_batch": 3}),
        ("llama", {}, {"recompute": "full", "micro_batch": 3}),
    ],
    ids=str,
)
def test_masters_equal_those_of_a_plain_loop(name: str, train: dict[str, Any], fields: dict[str, Any]) -> None:
    hold(case_of(name, **train), plan_of(**fields))


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"fused_optimizer": True}, 1e-4),
        ({"states": "bf16"}, 2e-3),
        ({"states": "8-bit"}, 5e-3),
        ({"chunked_loss": 5}, 2e-3),
    ],
    ids=str,
)
def test_other_arithmetic_stays_near_the_plain_loop(fields: dict[str, Any], near: float) -> None:
    hold(case_of(), plan_of(micro_batch=3, **fields), near)


def test_clipping_uses_the_norm_of_fp32_gradients() -> None:
    """The norm is summed in another order than the loop's."""
    case = case_of(clip=0.05)
    hold(case, plan_of(micro_batch=3), 1e-4)
    _, losses = trained(case, plan_of(micro_batch=3))
    assert losses != pytest.approx(trained(case_of(), plan_of(micro_batch=3))[1], rel=1e-6)


def test_tied_weights_have_one_master() -> None:
    """torch sums the gradients of the two uses in bf16, and tightfit in fp32."""
    case, plan = case_of("gpt2"), plan_of(micro_batch=3)
    hold(case, plan, 5e-4)
    names = masters_of(trained(case, plan)[0])
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names


class Frozen(nn.Module):
    """A network of which one layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_frozen_weights_have_neither_masters_nor_gradients() -> None:
    samples = [(torch.randn(4), index % 3) for index in range(8)]
    job = tightfit.Job(model=Frozen, data=samples, train=tightfit.Train(batch=4, steps=2))
    run = tightfit.build(job, plan_of())
    before = run.model.first.weight.detach().clone()
    list(tightfit.train(run))
    assert set(masters_of(run)) == {"last.weight", "last.bias"}
    assert torch.equal(run.model.first.weight, before)


def test_small_updates_are_not_lost() -> None:
    """Each is far below half of the distance between two bf16 numbers; together they move the weights."""
    train = {"learning_rate": 1e-5, "weight_decay": 0.0, "steps": 60, "epsilon": 1e-8}
    case = case_of(**train)
    start = cases.state(tightfit.build(case.job, plan_of()).model)
    exact = cases.state(trained(case, tightfit.Plan())[0].model)
    kept, lost = (
        cases.state(trained(case, plan)[0].model) for plan in (plan_of(), tightfit.Plan(precision="bf16-true"))
    )
    moved = cases.distance(exact, start)
    assert cases.distance(kept, exact) < cases.distance(lost, exact)
    run, _ = trained(case, plan_of())
    masters = {name: master for name, master in masters_of(run).items() if name in exact}
    begun = {name: value.bfloat16().float() for name, value in start.items() if name in masters}
    assert cases.distance(masters, begun) == pytest.approx(moved, rel=0.2)


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    """256 + 1 is no bf16 number: a sum in bf16 would lose each of the small gradients."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model = nn.Module()
    model.register_parameter("weight", weight)
    widen_gradients(model.parameters())
    for factor in (256.0, 1.0, 1.0):
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert weight.grad.tolist() == [258.0] * 3


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("fields", [{}, {"states": "8-bit"}, {"fused_optimizer": True}], ids=str)
def test_a_gpu_updates_batches_of_masters(
    optimizer: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fields.get("fused_optimizer") and optimizer == "lion":
        pytest.skip("torch has no fused kernel for Lion")
    case, plan = case_of(optimizer=optimizer), plan_of(micro_batch=3, **fields)
    expected, losses = trained(case, plan)
    monkeypatch.setattr(optimizer_states, "kind_of", lambda device: "cuda")
    run = tightfit.build(case.job, plan)
    assert isinstance(run.optimizer, MultiTensor)
    assert [step.loss for step in tightfit.train(run)] == pytest.approx(losses, rel=1e-6)
    assert cases.distance(masters_of(run), masters_of(expected)) <= 1e-6


def test_a_skipped_step_leaves_masters_and_weights() -> None:
    """As on a GPU, where the device undoes the update of a step that overflowed."""
    for kind in (optimizer_states.PerParameter, MultiTensor):
        weights = [nn.Parameter(torch.randn(40, dtype=torch.float16)) for _ in range(2)]
        optimizer = kind(torch.optim.AdamW(weights, lr=0.1), can_undo=True, masters=True)
        for skipped in (False, True, False):
            for weight in weights:
                weight.grad = torch.randn(40)
            before = [
                (weight.detach().clone(), {name: value.clone() for name, value in optimizer.state[weight].items()})
                for weight in weights
            ]
            if skipped:
                optimizer.skip_step_if(torch.tensor(True), lambda: True)
            optimizer.step()
            states = optimizer.state_dict()["state"]
            for number, (weight, (old, kept)) in enumerate(zip(weights, before, strict=True)):
                assert torch.equal(weight, old) == skipped
                assert torch.equal(weight, states[number]["master"].half())
                assert not skipped or all(torch.equal(states[number][name], value) for name, value in kept.items())


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({}, 2 + 4 + 12),
        ({"states": "bf16"}, 2 + 4 + 4 + 4),
        ({"zero": 1, "dp_shard": 4}, 2 + (4 + 12) / 4),
        ({"zero": 2, "dp_shard": 4}, 2 + (4 + 12) / 4),
        ({"zero": 3, "dp_shard": 4}, 18 / 4),
        ({"tp": 2}, 18 / 2),
    ],
    ids=str,
)
def test_the_ledger_has_18_bytes_for_a_parameter(fields: dict[str, Any], each: float) -> None:
    """At the update, when ZeRO-1 has reduced the gradients to shards."""
    machine, job = tightfit.Machine.named("h100-sxm").replace(devices_per_node=4), tiny.job(batch=8)
    ledger = tightfit.estimate(job, plan_of(micro_batch=1, **fields), machine).ledger
    count = sum(p.numel() for p in tightfit.build(job).model.parameters())
    rows = [rows for phase, part, rows in ledger.instants() if (phase, part) == ("optimizer", "update")][-1]
    assert (rows["parameters"] + rows["gradients"] + rows["optimizer"]) / count == pytest.approx(each, rel=0.03)


def test_a_checkpoint_moves_between_plans(tmp_path: Path) -> None:
    """The masters are the weights of a plan in fp32, and the weights of such a plan are the masters."""
    case = case_of()
    first, _ = trained(case, plan_of())
    tightfit.save(first, tmp_path / "masters", 3)
    with Reader(newest(tmp_path / "masters"), "optimizer") as saved:
        assert saved.get("master:model.norm.weight").dtype is torch.float32
    wide = tightfit.build(case.job, tightfit.Plan(precision="bf16-mixed"))
    tightfit.resume(wide, tmp_path / "masters")
    assert all(torch.equal(p, masters_of(first)[name]) for name, p in wide.model.named_parameters())
    tightfit.save(wide, tmp_path / "fp32", 3)
    again = tightfit.build(case.job, plan_of())
    tightfit.resume(again, tmp_path / "fp32")
    assert all(torch.equal(master, masters_of(first)[name]) for name, master in masters_of(again).items())
    assert len(masters_of(again)) == len(masters_of(first))


def _resumed(folder: str, fields: dict[str, Any]) -> list[float]:
    case = case_of()
    run = tightfit.build(case.job.replace(train=case.job.train.replace(steps=6)), plan_of(**fields))
    return [step.loss for step in tightfit.train(run, tightfit.resume(run, folder))]


@pytest.mark.parametrize("fields", [{"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"tp": 2}], ids=str)
def test_masters_resume_on_other_devices(fields: dict[str, Any], tmp_path: Path) -> None:
    case = case_of()
    run = tightfit.build(case.job.replace(train=case.job.train.replace(steps=6)), plan_of())
    steps = tightfit.train(run)
    list(itertools.islice(steps, 3))
    tightfit.save(run, tmp_path, 3)
    expected = [step.loss for step in steps]
    for losses in together(2, "tests.methods.test_master_weights:_resumed", str(tmp_path), fields):
        assert losses == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"precision": "bf16-mixed"}, "precision: bf16-true or fp16-true"),
        ({"precision": "fp32"}, "precision: bf16-true or fp16-true"),
        ({"rounding": "kahan"}, "rounding: nearest"),
    ],
    ids=str,
)
def test_what_has_no_masters_is_refused(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(InputError) as raised:
        tightfit.build(tiny.job(), plan_of().replace(**fields))
    assert fix in raised.value.fix


def test_an_optimizer_of_the_users_own_has_no_masters() -> None:
    train = tightfit.Train(optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3), steps=1)
    job = tiny.job().replace(train=train)
    with pytest.raises(InputError, match="own"):
        tightfit.build(job, plan_of())


def test_search_tries_masters_beside_kahan() -> None:
    machine = tightfit.Machine.named("l4")
    estimator = Estimator(tiny.job(), machine)
    start, _ = complete(tiny.job(), machine, {})
    assert start.precision == "bf16-mixed"
    facts = SearchFacts(False, lambda: True)
    assert master_weights.candidates(start, tiny.job(), facts) == {"master_weights": [False, True]}
    assert master_weights.candidates(start, tiny.job(), SearchFacts(False, lambda: False)) == {
        "master_weights": [False]
    }
    pinned = {"precision": "bf16-true"}
    kinds = {
        (plan.rounding, plan.master_weights)
        for plans in candidates(estimator, complete(tiny.job(), machine, pinned)[0], pinned)
        for plan in plans
    }
    assert kinds == {("kahan", False), ("nearest", True)}


def test_pinned_masters_imply_16_bit_weights() -> None:
    plan, reasons = complete(tiny.job(), tightfit.Machine.named("l4"), {"master_weights": True})
    assert (plan.precision, plan.rounding) == ("bf16-true", "nearest")
    assert "precision" in reasons


def _line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


@pytest.mark.parametrize("change", ["load_state_dict", "clamp_", "data.clamp_"])
@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_masters_follow_weights_that_the_loop_changes(change: str, optimizer: str) -> None:
    """The losses are those of a loop in fp32, up to the rounding of the weights."""
    inputs, targets = torch.randn(16, 6), torch.randn(16, 3)

    def losses(fields: dict[str, Any]) -> list[float]:
        train = tightfit.Train(optimizer=optimizer, learning_rate=0.1)
        net = tightfit.prepare(_line, train, fields, allow=["bf16", "nearest-rounding"])
        start = {name: value.clone() for name, value in net.model.state_dict().items()}
        found = []
        for step in range(8):
            loss = (net(inputs) - targets).float().square().mean()
            net.backward(loss)
            net.step()
            found.append(loss.item())
            if change == "load_state_dict" and step == 3:
                net.model.load_state_dict(start)
            for weight in net.model.parameters() if change.endswith("clamp_") else ():
                with torch.no_grad():
                    (weight.data if change.startswith("data") else weight).clamp_(-0.125, 0.125)
        return found

    fields = {"precision": "bf16-true", "master_weights": True}
    assert losses(fields) == pytest.approx(losses({}), rel=0.01)


def test_masters_follow_the_norms_that_an_embedding_keeps() -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(32, 16, max_norm=0.2), nn.Flatten(), nn.Linear(48, 32))

    data = [(torch.randint(0, 32, (3,)), number % 32) for number in range(16)]
    train = tightfit.Train(optimizer="adamw", learning_rate=3e-2, no_decay=[], batch=16, steps=60)
    job = tightfit.Job(model=model, data=data, train=train, allow=["bf16"])
    norms = []
    for fields in ({}, {"precision": "bf16-true", "master_weights": True}):
        with pytest.warns(TightfitWarning) if fields else nullcontext():
            run = tightfit.build(job, tightfit.Plan(**fields))
        list(tightfit.train(run))
        (embedding,) = (one for one in run.model.modules() if isinstance(one, nn.Embedding))
        norms.append(embedding.weight.detach().float().norm(dim=1).max().item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
