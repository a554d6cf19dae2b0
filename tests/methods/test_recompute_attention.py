"""recompute: attention saves everything but the attention core, which it finds in any module, and
recomputes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests.planner import cases
from tests.tiny import MODEL
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.measure.memory import sample_step
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.runtime.attention_core import Found, recompute_attention

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 16, 3
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def plain(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    scores = query @ key.transpose(-1, -2) * 0.3 + torch.full((LENGTH, LENGTH), -1e9).triu(1)
    probabilities = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return functional.dropout(probabilities, dropout) @ value


def with_bias_first(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """baddbmm computes the scores, as ALiBi models do, and dropout writes in place."""
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    scores = torch.zeros(1, 1, LENGTH).baddbmm(query, key.transpose(1, 2), alpha=0.3)
    probabilities = scores.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -1e9).softmax(-1)
    return (functional.dropout(probabilities, dropout) @ value).view(-1, HEADS, LENGTH, WIDTH // HEADS)


def relative(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """A second product of activations is added to the scores, as in DeBERTa."""
    positions = (
        torch.linspace(-1, 1, LENGTH * WIDTH // HEADS)
        .view(1, 1, WIDTH // HEADS, LENGTH)
        .expand(*query.shape[:2], -1, -1)
    )
    scores = query @ key.transpose(-1, -2) + torch.einsum("bhld,bhdm->bhlm", query, positions).tanh()
    return functional.dropout(scores.softmax(-1), dropout) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def fused_with_dropout(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


class Block(nn.Module):
    def __init__(self, attend: Attend = plain, dropout: float = 0.1) -> None:
        super().__init__()
        self.attend, self.dropout = attend, dropout
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y = self.norm(x)
        split = [part(y).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = self.attend(split[0], split[1], split[2], self.dropout)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(x)))


class Library(nn.Module):
    """PyTorch's own module, with and without a fused kernel, twice in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=True)[0]
        return x + self.second(x, x.tanh(), x, need_weights=False)[0]


class Experts(nn.Module):
    """Batched products of expert weights: no attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6),
            nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(x.unsqueeze(1) @ self.up)
        return x + (inner @ self.down).mean(1)


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Found]:
    """Equal models: one plain, one whose blocks recompute their attention cores."""
    torch.manual_seed(1)
    model, found = Net(make), Found()
    again = copy.deepcopy(model)
    for block in again.blocks:  # type: ignore[union-attr]
        block.forward = recompute_attention(block.forward, found)
    return model, again, found


def gradients(model: nn.Module, narrow: bool = False, times: int = 1) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(BATCH, LENGTH, WIDTH).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = model(x).float().square().sum()
    drawn = torch.rand(1)
    for number in range(times):
        loss.backward(retain_graph=number + 1 < times)
    return [x.grad, drawn, torch.rand(1), *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


MAKES: dict[str, Callable[[], nn.Module]] = {
    **{
        one.__name__: lambda one=one: Block(one)
        for one in (plain, with_bias_first, relative, fused, fused_with_dropout)
    },
    "library": Library,
    "experts": Experts,
}


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_gradients_are_those_of_the_plain_model(name: str, narrow: bool) -> None:
    """To the last bit: dropout draws the same numbers, and backward leaves the generator as it was."""
    model, again, found = twins(MAKES[name])
    for one, other in zip(gradients(model, narrow), gradients(again, narrow), strict=True):
        assert torch.equal(one, other)
    assert (found.calls, found.cores) == (3, {"library": 6, "experts": 0}.get(name, 3))


@pytest.mark.parametrize("name", ["plain", "relative", "fused_with_dropout", "library"])
def test_a_graph_may_run_backward_twice(name: str) -> None:
    model, again, _ = twins(MAKES[name])
    for one, other in zip(gradients(model, times=2), gradients(again, times=2), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_gradients_flow_through_the_core() -> None:
    slopes = []
    for model in twins(lambda: Block(plain, 0.0))[:2]:
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        slopes.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*slopes, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-6)  # type: ignore[arg-type]


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("name", "more"), [("plain", {"bmm": 3, "_softmax": 3}), ("fused", {KERNEL: 3}), ("experts", {})]
)
def test_only_the_core_runs_again(name: str, more: dict[str, int]) -> None:
    """Of the two products of the core only the first, because the result of the second is saved."""
    counts = []
    for model in twins(MAKES[name])[:2]:
        with Operations() as seen:
            gradients(model)
        counts.append(seen.counts)
        assert all(getattr(block, "forwards", 1) == 1 for block in model.blocks)  # type: ignore[union-attr]
    for operation in ("mm", "addmm", "bmm", "_softmax", KERNEL, "native_layer_norm", "gelu", "tanh"):
        assert counts[1].get(operation, 0) == counts[0].get(operation, 0) + more.get(operation, 0), operation


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the storages that a forward saves for backward beside the weights and the output."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.ones(BATCH, LENGTH, WIDTH))
    assert output.requires_grad
    return sum(found.values())


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        # the probabilities; dropout's mask, and the probabilities after it
        ("plain", 3 * 4 * BATCH * HEADS * LENGTH**2),
        # the kernel's output and its log-sum-exps, in fp32
        ("fused", 4 * BATCH * LENGTH * (WIDTH + HEADS)),
    ],
)
def test_the_core_is_not_saved(name: str, fewer: int) -> None:
    model, again, _ = twins(MAKES[name])
    assert saved_bytes(again) == saved_bytes(model) - 3 * fewer


def job_of(attention: str, device_steps: int = 3) -> tightfit.Job:
    model = {**MODEL, "attn_implementation": attention, "attention_dropout": 0.0, "max_position_embeddings": 64}
    data = {"synthetic": "tokens", "sequence_length": 64, "samples": 64}
    return tightfit.Job(model=model, data=data, train=tightfit.Train(batch=8, steps=device_steps), allow=["bf16"])


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        ("eager", {}),
        ("eager", {"precision": "bf16-mixed", "micro_batch": 4}),
        ("sdpa", {}),
        ("sdpa", {"attention": "blocked"}),
    ],
)
def test_predicted_peak_is_measured(attention: str, fields: dict[str, Any]) -> None:
    job, plan = job_of(attention), tightfit.Plan(recompute="attention", **fields)
    run = tightfit.build(job, plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    measured = sample_step(run, next(steps), 1)[1].total
    estimator = Estimator(job, tightfit.Machine.detect())
    estimate, without = (estimator.estimate(one) for one in (plan, plan.replace(recompute="none")))
    predicted = sum(size for row, size in estimate.peak.rows.items() if row != "runtime")
    assert predicted == pytest.approx(measured, rel=0.02)
    assert dry_run(job, plan).total == pytest.approx(measured, rel=0.02)
    assert estimate.peak_bytes < without.peak_bytes
    assert estimate.time.step_s > without.time.step_s


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_every_kind_of_model_has_attention(name: str) -> None:
    job = cases.job(name)
    losses = [
        [result.loss for result in tightfit.train(tightfit.build(job, tightfit.Plan(recompute=recompute)))]
        for recompute in ("none", "attention")
    ]
    assert losses[0] == losses[1]


class Bare(nn.Module):
    """A model without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.only, self.head = Block(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.only(x).mean(1))


def own_job(model: Callable[[], nn.Module]) -> tightfit.Job:
    data = [(torch.randn(LENGTH, WIDTH), number % 4) for number in range(16)]
    return tightfit.Job(model=model, data=data, train=tightfit.Train(batch=4, steps=2))


def without_attention() -> nn.Module:
    return Net(Experts)


def test_a_model_needs_no_repeated_blocks() -> None:
    for found in tightfit.train(tightfit.build(own_job(Bare), tightfit.Plan(recompute="attention"))):
        assert found.loss > 0
    assert tightfit.estimate(own_job(Bare), tightfit.Plan(recompute="attention")).fits


@pytest.mark.parametrize("compiled", ["none", "model"])
def test_a_model_without_attention_is_refused(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    job, plan = own_job(without_attention), tightfit.Plan(recompute="attention", compile=compiled)
    with pytest.raises(InputError, match="computes no attention"):
        next(tightfit.train(tightfit.build(job, plan)))
    with pytest.raises(InputError, match="computes no attention"):
        tightfit.estimate(job, plan)


class Overwriting(Block):
    """Writes to a mask from which its attention would be recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        scores = x @ x.transpose(1, 2) + mask
        mask += 1.0
        return x + self.out(scores.softmax(-1) @ x)


def test_a_changed_mask_is_noticed() -> None:
    _, again, _ = twins(Overwriting)
    with pytest.raises(InputError, match="modifies in place"):
        gradients(again)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_compiled_blocks_recompute_it_too(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.methods import compile

    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch.compiler.reset()
    job = job_of(attention)
    plans = [tightfit.Plan(compile="block", recompute=recompute) for recompute in ("none", "attention")]
    losses = [[result.loss for result in tightfit.train(tightfit.build(job, plan))] for plan in plans]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    estimates = [tightfit.estimate(job, plan) for plan in plans]
    saved = [one.peak.rows["activations"] for one in estimates]
    assert saved[1] < saved[0]
