"""A deep model without most of its blocks is traced like the whole one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tests.planner import cases
from tests.sweeps import spread
from tightfit.cost.recorded_step import Segment
from tightfit.job import ModelSpec
from tightfit.machine import Machine
from tightfit.models import find_blocks, model_factory, with_fewer_blocks
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.planner.tracing import fake_model
from tightfit.planner.tracing.profiler import Profiler
from tightfit.planner.tracing.repeated_blocks import BlockMap, create_without_repeated_blocks, remove_repeated_blocks

DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "gpt2": {"n_layer": 6},
    "bert": {"num_hidden_layers": 6},
    "vit": {"num_hidden_layers": 6},
    "t5": {"num_layers": 5, "num_decoder_layers": 6},
}


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """A compiler leaves objects in cycles, which Python may collect at any moment of a trace."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def job(name: str) -> tightfit.Job:
    known = cases.job(name, batch=2)
    return known.replace(model={**known.model.content(), **DEEP[name]}, train=known.train.replace(clip=1.0))


def told(segments: tuple[Segment, ...]) -> list[Any]:
    return [
        (
            (one.part, one.phase, one.block),
            [(buffer.size, buffer.row, buffer.maker, buffer.parameter, sign) for buffer, sign in one.timeline.events],
            one.timeline.operations,
            one.timeline.recompute_end,
        )
        for one in segments
    ]


def seen(name: str, plan: tightfit.Plan) -> list[Any]:
    profiler = Profiler(job(name), "cuda")
    training, inference = (profiler._trace(plan, 2, phase) for phase in (True, False))
    return [
        told(training.segments),
        told(inference.segments),
        training.parameters,
        training.blocks,
        profiler.model.parameters(plan),
        list(profiler.model.updates(plan).items()),
        profiler.model.clipping(plan),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"), spread(DEEP, [{}, {"compile": "block"}, {"tp": 2, "sequence_parallel": True}], 9)
)
def test_a_reduced_model_is_traced_like_the_whole_one(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "t5" and "sequence_parallel" in fields:
        fields = {"tp": 2}
    taken: list[int] = []

    def noted(spec: ModelSpec, create: Any, whole: bool) -> tuple[nn.Module, BlockMap]:
        model, depth = create_without_repeated_blocks(spec, create, whole)
        taken.append(len(depth.removed))
        return model, depth

    monkeypatch.setattr(fake_model, "create_without_repeated_blocks", noted)
    thin = seen(name, tightfit.Plan(**fields))
    assert taken
    assert min(taken) >= 3
    monkeypatch.setattr(
        fake_model,
        "create_without_repeated_blocks",
        lambda spec, create, whole: create_without_repeated_blocks(spec, create, True),
    )
    assert thin == seen(name, tightfit.Plan(**fields))


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "made"), [("llama", [4]), ("vit", [4]), ("t5", [4, 5])])
def test_only_the_blocks_needed_for_comparison_are_created(name: str, made: list[int]) -> None:
    """T5's configuration has two layer counts, so all of its blocks are created."""
    spec = job(name).model
    assert isinstance(spec, ModelSpec)
    asked: list[int] = []

    def create(model: ModelSpec) -> nn.Module:
        whole = model_factory(model)()
        asked.append(whole.config.num_hidden_layers)
        return whole

    model, depth = create_without_repeated_blocks(spec, create, False)
    assert asked == made
    there = [found for found, _ in find_blocks(model, None)]
    assert there == [depth.names[number] for number in depth.numbers]
    assert depth.names == tuple(found for found, _ in find_blocks(model_factory(spec)(), None))


FEW = [{}, {"recompute": "sqrt"}, {"recompute": "every-2"}, {"compile": "block"}, {"update_in_backward": True}]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), spread(("llama", "gpt2", "bert", "vit"), FEW, 10))
def test_a_ledger_of_few_blocks_equals_a_shallow_model_s(name: str, fields: dict[str, Any]) -> None:
    whole = job(name).replace(train=job(name).train.replace(clip=None))
    plan, machine = tightfit.Plan(**fields), Machine.named("a100-80gb")
    few = with_fewer_blocks(whole.model, 4)
    assert few is not None
    found = Estimator(whole, machine).peak_with_blocks(plan, 4)
    expected = Estimator(whole.replace(model=few), machine).estimate(plan).peak
    assert found == expected.total - expected.rows["runtime"]
    assert found == pytest.approx(dry_run(whole.replace(model=few), plan, "cuda").total, rel=0.01)


@pytest.mark.slow
def test_recomputed_groups_of_a_deep_model_are_dry_run() -> None:
    """Their blocks do not run alone, so no block can be skipped."""
    whole, plan = job("llama").replace(train=job("llama").train.replace(clip=None)), tightfit.Plan(recompute="sqrt")
    found = Estimator(whole, Machine.named("a100-80gb")).estimate(plan).peak
    assert dry_run(whole, plan, "cuda").total == pytest.approx(found.total - found.rows["runtime"], rel=2e-3)


def test_names_of_the_remaining_layers_stay() -> None:
    model = model_factory(job("llama").model)()
    whole = [name for name, _ in model.named_parameters()]
    depth = remove_repeated_blocks(model, None)
    assert depth.numbers == [0, 1, 5]
    assert depth.removed == {2: 1, 3: 1, 4: 1}
    there = {name: name for name, _ in model.named_parameters()}
    assert set(there) < set(whole)
    assert list(depth.expand(there, lambda value, name, number: name)) == whole
    assert list(depth.expand(there, lambda value, name, number: name).values()) == whole


@pytest.mark.slow
def test_a_model_that_counts_its_blocks_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    expected = seen("llama", tightfit.Plan())
    forward = LlamaModel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert [self.layers[number] for number in range(self.config.num_hidden_layers)]
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    assert seen("llama", tightfit.Plan()) == expected


def test_alternating_layers_are_not_removed() -> None:
    model: Any = model_factory(job("llama").model)()
    model.config.layer_types = ["full_attention", "sliding_attention"] * 3
    assert remove_repeated_blocks(model, None).removed == {}
    assert len(find_blocks(model)) == 6


def test_no_layers_are_removed_if_blocks_would_be_mistaken() -> None:
    class Two(nn.Module):
        """Large blocks, and small ones that count only beside few of those."""

        def __init__(self) -> None:
            super().__init__()
            self.large = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(20))
            self.small = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))

    model = Two()
    before = [name for name, _ in model.named_modules()]
    assert {name.partition(".")[0] for name, _ in find_blocks(model)} == {"large"}
    assert remove_repeated_blocks(model, None).removed == {}
    assert [name for name, _ in model.named_modules()] == before


class Energy(nn.Module):
    """Its output is the gradient of an energy, through all of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(6)
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (score,) = torch.autograd.grad(self.head(y).sum(), x, create_graph=True)
        return score


@pytest.mark.parametrize("fields", [{}, {"micro_batch": 2}], ids=str)
def test_blocks_that_a_forward_differentiates_are_all_traced(fields: dict[str, Any]) -> None:
    data = [(torch.randn(128, 32), torch.randn(128, 32)) for _ in range(8)]
    energy = tightfit.Job(model=Energy, data=data, loss=nn.functional.mse_loss, train=tightfit.Train(batch=8, steps=1))
    plan = tightfit.Plan(**fields)
    peak = tightfit.estimate(energy, plan).peak
    tensors = peak.total - peak.rows["runtime"] - peak.rows["allocator"]
    assert tensors == pytest.approx(dry_run(energy, plan).total, rel=1e-4)
