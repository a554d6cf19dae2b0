"""Which blocks are recomputed, which activations are kept, and that the second forward equals the
first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tightfit.engine import refused_models
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.methods.recompute import recomputed_blocks
from tightfit.models.block_state import StateOfBlocks
from tightfit.planner.defaults import complete
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search
from tightfit.planner.tracing.live_storages import track_peak
from tightfit.planner.variants import estimate_candidates
from tightfit.runtime.run import Run

LAYERS, WIDTH, BATCH = 9, 16, 32


class Block(nn.Module):
    """Counts how often its forward runs, and has a buffer of each kind: one that forward changes, one it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.tensor(0.5))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        with torch.no_grad():
            self.seen += 1
        return x + self.scale * self.outer(self.dropout(torch.tanh(self.inner(x)))) / self.seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


class Doubling(Net):
    """Does something between its blocks, which a segment of them cannot know."""

    def between(self, x: Tensor) -> Tensor:
        return 2 * x


class Blockless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def build(recompute: str, model: Callable[[], nn.Module] = Net) -> Run:
    torch.manual_seed(1)
    samples = [(torch.randn(WIDTH), index % 4) for index in range(BATCH)]
    train = tightfit.Train(batch=BATCH, steps=2)
    return tightfit.build(tightfit.Job(model=model, data=samples, train=train), tightfit.Plan(recompute=recompute))


def batch() -> Any:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2)), torch.arange(BATCH) % 4


def gradients(run: Run) -> list[Tensor]:
    torch.manual_seed(3)
    run.loss_sum(batch()).backward()
    return [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", [1] * 9),
        ("full", [2] * 9),
        ("selective", [2] * 9),
        ("selective-2", [2] * 9),
        ("every-2", [2, 1] * 4 + [2]),
        ("every-20", [2] + [1] * 8),
        ("first-4", [2] * 4 + [1] * 5),
        ("first-9", [2] * 9),
        ("sqrt", [2] * 9),
    ],
)
def test_the_right_blocks_run_twice_with_equal_gradients(recompute: str, again: list[int]) -> None:
    run, reference = build(recompute), build("none")
    for found, expected in zip(gradients(run), gradients(reference), strict=True):
        assert torch.equal(found, expected)  # dropout drew the same numbers
    assert [block.forwards for block in run.model.blocks] == again  # type: ignore[union-attr]
    assert all(block.seen == 1 for block in run.model.blocks)  # type: ignore[union-attr]


def activations(recompute: str) -> int:
    """Bytes that a forward leaves for backward."""
    run = build(recompute)
    peak = track_peak(run, [batch()], lambda watched: watched.loss_sum(batch()))[1]
    return peak.timeline[-1][1]


def test_more_recomputation_keeps_fewer_activations() -> None:
    kept = {
        recompute: activations(recompute)
        for recompute in ("none", "selective", "selective-2", "every-2", "first-1", "first-8", "full", "sqrt")
    }
    assert kept["none"] > kept["selective"] > kept["selective-2"] > kept["full"]
    assert kept["none"] - kept["first-1"] == kept["first-8"] - kept["full"] > 0  # a block's activations
    assert kept["none"] > kept["every-2"] > kept["full"] > kept["sqrt"]
    assert kept["full"] - kept["sqrt"] == (LAYERS - 3) * 4 * BATCH * WIDTH  # inputs of 9 blocks, of 3 segments


def test_selective_recomputes_no_matrix_product() -> None:
    counts = {}
    for recompute in ("none", "selective", "selective-2", "full"):
        run = build(recompute)
        with Products() as products:
            gradients(run)
        counts[recompute] = products.count
    assert counts["selective"] == counts["none"]
    assert counts["selective-2"] == counts["none"] + LAYERS  # one of a block's two
    assert counts["full"] == counts["none"] + 2 * LAYERS


def test_an_evaluation_recomputes_nothing() -> None:
    run = build("full")
    with torch.no_grad():
        run.loss_sum(batch())
    assert {block.forwards for block in run.model.blocks} == {1}  # type: ignore[union-attr]


def test_sqrt_refuses_a_model_with_work_between_blocks() -> None:
    with pytest.raises(InputError, match="recompute: full"):
        build("sqrt", Doubling).loss_sum(batch())
    assert gradients(build("full", Doubling))


def test_more_blocks_than_the_model_has_are_refused() -> None:
    with pytest.raises(InputError, match="has 9 blocks"):
        build("first-10")
    with pytest.raises(InputError, match="has 9 blocks"):
        tightfit.estimate(build("none").job, tightfit.Plan(recompute="first-10"))


def test_first_blocks_are_counted_in_each_stage() -> None:
    plan = tightfit.Plan(recompute="first-2", pp=2, split=(4, 2))
    assert recomputed_blocks(plan, 6) == [0, 1, 4, 5]
    assert recomputed_blocks(plan.replace(recompute="first-3"), 6) == [0, 1, 2, 4, 5]
    assert recomputed_blocks(plan.replace(pp=1, split=None), 6) == [0, 1]
    with pytest.raises(InputError, match="at most 4 of them in a pipeline stage"):
        recomputed_blocks(plan.replace(recompute="first-5"), 6)
    interleaved = plan.replace(schedule="interleaved", virtual_stages=2, split=(2, 1, 2, 1))
    assert recomputed_blocks(interleaved.replace(recompute="first-1"), 6) == [0, 2, 3, 5]


@pytest.mark.slow
def test_search_finds_the_fewest_blocks_that_fit() -> None:
    """The limit is what 4 of 9 blocks need, with all of their gradients."""
    job = build("none").job
    job = job.replace(train=tightfit.Train(batch=4096, steps=2), model=Net)
    pins = {"micro_batch": 4096, "compile": "none", "update_in_backward": False, "allocator": "default"}
    machine = tightfit.Machine.named("a100-80gb")
    estimator = Estimator(job, machine)
    start = complete(job, machine, pins)[0]
    needs = {n: estimator.estimate(start.replace(recompute=f"first-{n}")) for n in (3, 4)}
    limit = needs[4].peak_bytes + needs[4].margin_bytes
    assert needs[3].peak_bytes + needs[3].margin_bytes > limit + 1
    limited = job.replace(limits={"memory": math.ceil(limit)})
    full = tightfit.Plan(**{**start.model_dump(), "recompute": "full"})
    found = estimate_candidates(Estimator(limited, machine), start, pins)
    assert any(one.plan == full for one in found)
    tried = [one for one in found if one.plan.recompute.startswith("first-")]
    assert "first-4" in {one.plan.recompute for one in tried}
    assert all(one.fits for one in tried)
    assert len(tried) <= 4
    assert not any(
        one.plan.recompute.startswith("first-")
        for one in estimate_candidates(Estimator(limited, machine), full, {**pins, "recompute": "full"})
    )


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="no repeated blocks to recompute"):
        build("full", Blockless)


def test_an_estimate_refuses_what_a_build_refuses() -> None:
    data = [(torch.zeros(WIDTH), 0)] * 4
    job = tightfit.Job(model=Blockless, data=data, train=tightfit.Train(batch=2, steps=1))
    unsupported, plain = tightfit.Plan(recompute="first-3"), tightfit.Plan()
    assert tightfit.search(job, "l4", choices=[unsupported, plain])[0].plan == plain
    with pytest.raises(InputError, match="first-3"):
        tightfit.search(job, "l4", choices=[unsupported])
    for value in ("full", "sqrt", "every-2", "selective"):
        with pytest.raises(InputError, match="the model has no repeated blocks to recompute"):
            tightfit.estimate(job, tightfit.Plan(recompute=value))


class Alone(Net):
    """Calls its first block by itself before all blocks, as a model does that computes its own targets."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[0](x)
        return super().forward(x) + target.mean()


class Backwards(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("model", [Alone, Backwards])
def test_sqrt_refuses_blocks_called_out_of_order(model: type[Net]) -> None:
    with pytest.raises(InputError, match="recompute: full"):
        build("sqrt", model).loss_sum(batch())
    assert gradients(build("full", model))


class Masked(Net):
    """Gives every second of its blocks a mask of another shape, which the others cannot use."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.forward = partial(self.masked, block.forward, (1, WIDTH) if number % 2 else (1, WIDTH + 1))

    def masked(self, forward: Any, shape: tuple[int, int], x: Tensor, mask: Tensor) -> Tensor:
        return forward(x + (mask if shape[1] == WIDTH else mask[:, 1:]))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, torch.ones(1, WIDTH) if number % 2 else torch.ones(1, WIDTH + 1))
        return self.head(x)


def test_sqrt_refuses_blocks_needing_arguments_of_their_own() -> None:
    """They fail when they are called with the first block's arguments."""
    with pytest.raises(InputError, match="recompute: full"):
        build("sqrt", Masked).loss_sum(batch())
    assert gradients(build("full", Masked))


def test_a_block_s_own_error_does_not_blame_the_order() -> None:
    run = build("sqrt")
    run.loss_sum(batch())
    run.model.blocks[1].inner.register_forward_pre_hook(_failing)  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="by itself"):
        run.loss_sum(batch())


def _failing(*arguments: Any) -> None:
    raise ValueError("by itself")


class Slopes(Net):
    """Takes a gradient within its forward, through its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = super().forward(x)
        if not torch.is_grad_enabled():
            return out
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().mean()


def test_a_forward_may_compute_gradients_itself() -> None:
    plain, again = gradients(build("none", Slopes)), gradients(build("full", Slopes))
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other)


class AlwaysSlopes(Slopes):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(Net.forward(self, x).sum(), x, create_graph=True)[0]


def test_sqrt_refuses_a_forward_that_computes_gradients() -> None:
    with pytest.raises(InputError, match=r"computes gradients in its forward(.|\n)*recompute: full"):
        gradients(build("sqrt", AlwaysSlopes))


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.outer = nn.Sequential(block.outer, nn.ReLU(inplace=True))


def test_selective_says_what_it_cannot_keep() -> None:
    with pytest.raises(InputError, match="writes in place"):
        gradients(build("selective", InPlace))
    assert gradients(build("full", InPlace))


class Recurrent(Net):
    """A cell writes to halves of its products, which moves no version counter of the whole."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.cell(x, torch.tanh(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Cell() for _ in self.blocks)


def test_writes_into_kept_tensors_are_detected() -> None:
    with pytest.raises(InputError, match="recurrent cell"):
        gradients(build("selective", Recurrent))
    for one, other in zip(gradients(build("none", Recurrent)), gradients(build("full", Recurrent)), strict=True):
        torch.testing.assert_close(one, other)


class WritesToItsInput(Net):
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x.add_(1.0)
            return torch.tanh(self.linear(x)) * 0.5

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Shifts() for _ in self.blocks)


@pytest.mark.parametrize("recompute", ["full", "selective", "every-2", "sqrt"])
def test_a_block_that_modifies_its_input_is_refused(recompute: str) -> None:
    assert gradients(build("none", WritesToItsInput))
    with pytest.raises(InputError, match="would be recomputed from these inputs"):
        gradients(build(recompute, WritesToItsInput))


class TwoWidths(nn.Module):
    """Two lists of blocks, called by turns: a block is handed what a later one of the other list made, and has another width."""

    class Layer(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(WIDTH * before, WIDTH * after), nn.LayerNorm(WIDTH * after)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x))

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.ModuleList([self.Layer(1, 2), self.Layer(2, 4)])
        self.blocks = nn.ModuleList([self.Layer(2, 2), self.Layer(4, 4)])
        self.head = nn.Linear(WIDTH * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for widen, block in zip(self.widen, self.blocks, strict=True):
            x = block(widen(x))
        return self.head(x)


class LeftOut(Net):
    """Its last block is never called."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("model", [TwoWidths, LeftOut])
def test_the_first_step_refuses_segments_called_out_of_order(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(InputError, match="between its blocks, the model does more"):
        gradients(build("sqrt", model))


class SumOfAll(Net):
    """Adds up what its blocks return, while they are called."""

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for block in self.blocks:
            x = block(x)
            total = total + x
        return self.head(total)


class SumAtTheEnd(Net):
    """The same, when all have been called."""

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states[1:]).sum(0))


@pytest.mark.parametrize("model", [SumOfAll, SumAtTheEnd])
@pytest.mark.parametrize("compile", ["none", "model"])
def test_sqrt_refuses_a_model_that_uses_inner_outputs(model: Callable[[], nn.Module], compile: str) -> None:
    job = build("none", model).job
    with pytest.raises(InputError, match="between its blocks, the model does more"):
        tightfit.build(job, tightfit.Plan(recompute="sqrt", compile=compile))


@pytest.mark.slow
@pytest.mark.sweep(16)
@pytest.mark.parametrize("model", [Net, Doubling, Alone, Backwards, Masked, SumOfAll, SumAtTheEnd])
def test_explain_offers_sqrt_where_training_accepts_it(model: type[nn.Module]) -> None:
    job, plan, said = build("none", model).job, tightfit.Plan(recompute="sqrt"), ""
    try:
        next(tightfit.train(tightfit.build(job, plan)))
    except InputError as error:
        said = str(error)
    assert bool(said) == (model is not Net)
    if not said:
        assert search(job, pins={"recompute": "sqrt"})[0].plan.recompute == "sqrt"
        return
    for ask in (lambda: tightfit.estimate(job, plan), lambda: search(job, pins={"recompute": "sqrt"})):
        with pytest.raises(InputError) as refused:
            ask()
        assert str(refused.value) == said


class Forgetful(nn.Module):
    """Blocks that are wider each time they run."""

    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.times += bool(x.isfinite().all())
            return self.linear(x.unsqueeze(1).expand(-1, self.times, -1)).tanh().sum(1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wider() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_differs_when_recomputed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [(torch.randn(4), number % 4) for number in range(8)]
    job = tightfit.Job(model=Forgetful, data=samples, train=tightfit.Train(batch=4, steps=1))
    with pytest.raises(InputError, match=r"blocks\.0 computes something else when it runs again"):
        tightfit.build(job, tightfit.Plan(recompute="full"))
    monkeypatch.setattr(refused_models, "changed_after_forward", lambda *arguments: StateOfBlocks())
    run = tightfit.build(job, tightfit.Plan(recompute="full"))
    with pytest.raises(InputError, match=r"plan: recompute=full: a block's recomputation differs from its forward"):
        next(tightfit.train(run))


class Remembering(nn.Module):
    """Its blocks compute a table in their first forward, and keep it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is not None:
                return self.linear(x * self.table[: x.shape[1]])
            self.table = torch.arange(4.0).cos()
            return self.linear(x * self.table)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_keeps_what_it_computed_is_recomputed() -> None:
    samples = [(torch.randn(4), number % 4) for number in range(8)]
    job = tightfit.Job(model=Remembering, data=samples, train=tightfit.Train(batch=4, steps=2))
    expected = [step.loss for step in tightfit.train(tightfit.build(job))]
    full = tightfit.build(job, tightfit.Plan(recompute="full"))
    assert [step.loss for step in tightfit.train(full)] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(InputError, match=r"recompute=selective: a block's recomputation differs from its forward"):
        list(tightfit.train(tightfit.build(job, tightfit.Plan(recompute="selective"))))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("recompute", ["full", "selective-2"])
def test_compiled_blocks_are_compiled_in_both_forwards(recompute: str) -> None:
    """The estimate's first forward of a recomputed block runs the kernels of a compiled block, not those of
    an evaluation, which is not compiled."""
    job = tightfit.Job(
        model={"architecture": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128},
        data={"synthetic": "tokens", "sequence_length": 32},
        train=tightfit.Train(batch=4, steps=10),
    )
    estimator = Estimator(job, Machine.named("a100-80gb"))

    def forwards(plan: tightfit.Plan) -> list[list[str]]:
        blocks = [one for one in estimator.estimate(plan).ledger.training if one.block is not None]
        return [[operation.name for operation in one.timeline.operations] for one in blocks if one.phase == "forward"]

    compiled = forwards(tightfit.Plan(compile="block"))
    assert forwards(tightfit.Plan(compile="block", recompute=recompute)) == compiled
    assert not any("compiled" in names for names in forwards(tightfit.Plan(recompute=recompute)))
    assert all("compiled" in names for names in compiled)
