"""Compiled once: another batch size, an evaluation or another length compiles nothing again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import tightfit
from tests import tiny
from tests.planner import cases
from tightfit.errors import InputError, TightfitWarning
from tightfit.machine import Machine
from tightfit.methods import compile as compile_method
from tightfit.planner.estimator import Estimator
from tightfit.rules import check

BLOCKS = tiny.MODEL["num_hidden_layers"]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what is handed to the compiler, which differentiates it and leaves it to eager kernels."""
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compile_method, "BACKEND", counted)
    torch.compiler.reset()
    yield counted
    torch.compiler.reset()


def ragged_samples() -> list[dict[str, torch.Tensor]]:
    """Samples of 5 to 15 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 300, (5 + index % 11,), generator=generator) for index in range(48)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def losses(job: tightfit.Job, plan: tightfit.Plan) -> list[float]:
    return [step.loss for step in tightfit.train(tightfit.build(job, plan))]


def job(data: Any = None, **train: Any) -> tightfit.Job:
    plain = tiny.job(**train).replace(model={**tiny.MODEL, "attention_dropout": 0.0})
    return plain if data is None else plain.replace(data=data)


@pytest.mark.parametrize("regions", ["block", "model"])
def test_short_micro_batches_and_evaluations_run_uncompiled(regions: str, counter: CompileCounterWithBackend) -> None:
    """Micro-batches have 3 and 1 of 4 samples. Those of 3 are compiled; those of 1 and evaluations
    are not."""
    run = tightfit.build(job(steps=3), tightfit.Plan(compile=regions, micro_batch=3))
    counts = []
    for _ in tightfit.train(run):
        tightfit.evaluate(run)
        counts.append(counter.frame_count)
    assert counts[0] >= 1
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("regions", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_ragged_data_is_compiled_once(regions: str, counter: CompileCounterWithBackend) -> None:
    uneven = job(ragged_samples(), steps=6)
    run = tightfit.build(uneven, tightfit.Plan(compile=regions))
    assert run.data.ragged
    counts, lengths = [], set()
    plain = run.loss_sum
    object.__setattr__(run, "loss_sum", lambda batch: (lengths.add(batch["input_ids"].shape), plain(batch))[1])
    for _ in tightfit.train(run):
        counts.append(counter.frame_count)
    assert len(lengths) > 1
    assert counts == [counts[0]] * 6


def test_blocks_of_one_kind_share_one_graph(counter: CompileCounterWithBackend) -> None:
    losses(job(steps=1), tightfit.Plan(compile="block"))
    assert counter.frame_count == 1


class Stacked(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(16, 16), nn.ModuleList(blocks), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def _layers() -> nn.Module:
    return Stacked(*(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)))


def _sequences() -> nn.Module:
    return Stacked(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)))


class Widening(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_more_blocks_than_torch_s_limit_are_all_compiled(counter: CompileCounterWithBackend) -> None:
    """Of one class, torch compiles 8 functions for different shapes, and runs the rest uncompiled."""
    count = torch._dynamo.config.recompile_limit + 2
    own = tightfit.Job(
        model=lambda: Stacked(*(Widening(4 * number + 4) for number in range(count))),
        data=[(torch.randn(6, 16), index % 3) for index in range(4)],
        train=tightfit.Train(batch=4, steps=1),
    )
    losses(own, tightfit.Plan(compile="block"))
    assert counter.frame_count == count


@pytest.mark.filterwarnings("ignore:.*reads the number")
def test_a_block_that_is_compiled_again_and_again_is_named(counter: CompileCounterWithBackend) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.calls):  # another graph each time
                x = x + 1
            return super().forward(x)

    own = tightfit.Job(
        model=lambda: Stacked(*(Counting(16, 16) for _ in range(2))),
        data=[(torch.randn(6, 16), index % 3) for index in range(4)],
        train=tightfit.Train(batch=4, steps=4),
    )
    run = tightfit.build(own, tightfit.Plan(compile="block"))

    def train() -> None:
        for _ in tightfit.train(run):
            for block in run.model.blocks:  # type: ignore[union-attr]
                block.calls += 1  # type: ignore[operator, union-attr, assignment]

    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(TightfitWarning, match="has compiled 'forward'"):
        train()


@pytest.mark.parametrize("model", [_layers, _sequences])
def test_blocks_that_are_modules_of_torch_are_compiled(
    model: Callable[[], nn.Module], counter: CompileCounterWithBackend
) -> None:
    data = [(torch.randn(6, 16), index % 3) for index in range(8)]
    own = tightfit.Job(model=model, data=data, train=tightfit.Train(batch=4, steps=2))
    expected = losses(own, tightfit.Plan())
    assert losses(own, tightfit.Plan(compile="block")) == pytest.approx(expected, rel=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("regions", [pytest.param("block", marks=pytest.mark.slow), "model"])
def test_losses_of_ragged_data_equal_eager_losses(regions: str, counter: CompileCounterWithBackend) -> None:
    uneven = job(ragged_samples(), steps=3)
    assert losses(uneven, tightfit.Plan(compile=regions)) == pytest.approx(losses(uneven, tightfit.Plan()), rel=1e-5)


def test_a_model_without_blocks_is_compiled_whole_or_refused(counter: CompileCounterWithBackend) -> None:
    flat = tightfit.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 3)),
        data=[(torch.randn(4), index % 3) for index in range(4)],
        train=tightfit.Train(batch=2, steps=1),
    )
    with pytest.raises(InputError, match="compile: model"):
        tightfit.build(flat, tightfit.Plan(compile="block"))
    assert losses(flat, tightfit.Plan(compile="model")) == pytest.approx(losses(flat, tightfit.Plan()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_whole_model_is_one_graph_without_a_mask(
    architecture: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torch.compile, transformers cannot see that a batch is not packed, and would mask each pair of tokens."""
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compile_method, "BACKEND", lambda graph, example: graphs.append(graph) or graph.forward)
    torch.compiler.reset()
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
    dropouts = ("attn_pdrop", "embd_pdrop", "resid_pdrop") if architecture == "gpt2" else ()
    asked = job(steps=2).replace(model={"architecture": architecture, **sizes, **dict.fromkeys(dropouts, 0.0)})
    expected = losses(asked, tightfit.Plan(chunked_loss=chunk))
    assert losses(asked, tightfit.Plan(compile="model", chunked_loss=chunk)) == pytest.approx(expected, rel=1e-5)
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(products) == BLOCKS
    assert all(node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] for node in products)


@pytest.mark.parametrize(
    "own",
    [
        {"architecture": "mistral", "sliding_window": 4},
        {"architecture": "bert", "task": "masked-lm"},
        {
            "architecture": "qwen3",
            "use_sliding_window": True,
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 4,
        },
    ],
    ids=["mistral", "bert", "qwen3"],
)
def test_other_masks_are_the_same_in_a_compiled_model(own: dict[str, Any], counter: CompileCounterWithBackend) -> None:
    """A window hides more than a causal mask, and an encoder hides nothing."""
    sizes = {key: tiny.MODEL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    more = dropouts if "task" in own else {"num_key_value_heads": 2}
    asked = job(steps=2).replace(model={**sizes, "num_hidden_layers": BLOCKS, **more, **own})
    expected = losses(asked, tightfit.Plan())
    assert losses(asked, tightfit.Plan(compile="model")) == pytest.approx(expected, rel=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("regions", ["block", "model"])
@pytest.mark.parametrize("attention", ["sdpa", "blocked"])
def test_dropout_does_not_split_compiled_code(regions: str, attention: str, counter: CompileCounterWithBackend) -> None:
    dropping = job(steps=2).replace(model={**tiny.MODEL, "attention_dropout": 0.1})
    losses(dropping, tightfit.Plan(compile=regions, attention=attention))
    assert counter.frame_count == 1


def test_packed_sequences_stay_apart_in_a_compiled_model(counter: CompileCounterWithBackend) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (8, 16))
    starts = torch.tensor([[*range(10), *range(6)]]).expand(8, -1)
    packed = [{"input_ids": one, "labels": one, "position_ids": at} for one, at in zip(tokens, starts, strict=True)]
    expected = losses(job(packed, steps=2), tightfit.Plan())
    assert losses(job(packed, steps=2), tightfit.Plan(compile="model")) == pytest.approx(expected, rel=1e-5)


class Counting(nn.Module):
    """A block whose output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.scale * self.inner(x) / self.calls


class Constant(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Counted(nn.Module):
    def __init__(self, block: type[Counting]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.sweep(8)
@pytest.mark.parametrize("regions", ["block", "model"])
def test_the_compiler_does_not_recompute_buffer_updates(regions: str, counter: CompileCounterWithBackend) -> None:
    samples = [(torch.randn(8), index % 8) for index in range(8)]
    train = tightfit.Train(batch=4, steps=2, trackers=())
    plan = tightfit.Plan(compile=regions, recompute="full")
    with pytest.raises(InputError, match=r"forward changes the buffer blocks.0.calls"):
        losses(tightfit.Job(model=lambda: Counted(Counting), data=samples, train=train), plan)
    constant = tightfit.Job(model=lambda: Counted(Constant), data=samples, train=train)
    assert losses(constant, plan) == pytest.approx(losses(constant, tightfit.Plan()), rel=1e-6)


def fails(*unused: Any) -> Any:
    raise RuntimeError("view size is not compatible")


FAILING = {
    "while compiling": fails,
    "backward, while compiling": aot_autograd(fw_compiler=nop, bw_compiler=fails),
    "forward": aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(fails), bw_compiler=nop),
    "backward": aot_autograd(fw_compiler=nop, bw_compiler=lambda graph, inputs: make_boxed_func(fails)),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Wrong(Small):
    """Adds what does not fit together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :3] + torch.ones(5)


def small(model: Any) -> tightfit.Job:
    samples: list[Any] = [(torch.randn(4), 0) for _ in range(4)]
    return tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=2, steps=1))


@pytest.mark.parametrize(("when", "regions"), [*((when, "block") for when in FAILING), ("backward", "model")])
def test_a_model_that_the_compiler_fails_on_is_refused(
    when: str, regions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_method, "BACKEND", FAILING[when])
    torch.compiler.reset()
    with pytest.raises(
        InputError, match=rf"compile={regions}: torch.compile fails on this model .*view size(.|\n)*compile: none"
    ):
        losses(small(Small), tightfit.Plan(compile=regions))
    torch.compiler.reset()


def test_a_model_s_own_error_is_raised_unchanged(counter: CompileCounterWithBackend) -> None:
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        losses(small(Wrong), tightfit.Plan(compile="block"))
    assert not isinstance(raised.value, InputError)


@pytest.mark.parametrize(
    ("plan", "device", "fix"),
    [
        ({"compile": "none", "compile_mode": "max-autotune-no-cudagraphs"}, "cuda", "compile: block or model"),
        ({"compile": "model", "compile_mode": "max-autotune-no-cudagraphs"}, "cpu", "compile_mode: default"),
        ({"compile": "block", "compile_mode": "reduce-overhead"}, "cuda", "compile: model"),
        ({"compile": "model", "compile_mode": "reduce-overhead"}, "cpu", "compile_mode: default"),
        ({"compile": "model", "compile_mode": "reduce-overhead", "micro_batch": 1}, "cuda", "one micro-batch"),
        (
            {"compile": "model", "compile_mode": "reduce-overhead", "update_in_backward": True},
            "cuda",
            "without offload",
        ),
        ({"compile": "model", "compile_mode": "reduce-overhead", "offload": ["states"]}, "cuda", "without offload"),
        ({"compile": "model", "compile_mode": "reduce-overhead", "dp_replicate": 2}, "cuda", "on one device"),
        ({"compile": "model", "compile_mode": "reduce-overhead"}, "cuda", ""),
        ({"compile": "model", "compile_mode": "reduce-overhead", "micro_batch": 4}, "cuda", ""),
        ({"compile": "block", "compile_mode": "max-autotune-no-cudagraphs", "dp_replicate": 2}, "cuda", ""),
    ],
    ids=str,
)
def test_compile_modes_are_refused_where_they_do_not_work(plan: dict[str, Any], device: str, fix: str) -> None:
    asked, allowing = tightfit.Plan(**plan), job().replace(allow=["offload"])
    if not fix:
        check(asked, allowing, device)
        return
    with pytest.raises(InputError) as raised:
        check(asked, allowing, device)
    assert fix in raised.value.fix


@pytest.mark.parametrize("regions", ["block", "model"])
def test_the_compile_mode_is_passed_to_the_compiler(regions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compiled(function: Any, **options: Any) -> Any:
        asked.append(options["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    for mode, wanted in (("default", None), ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs")):
        asked.clear()
        compile_method.apply(tightfit.build(job()), tightfit.Plan(compile=regions, compile_mode=mode))
        assert asked == [wanted] * (BLOCKS if regions == "block" else 1)


def test_a_graphs_loss_is_copied_out_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This compiled function writes each loss to the same memory, as a graph's replay does."""
    begun: list[bool] = []
    place = torch.zeros(1)
    monkeypatch.setattr(torch, "compile", lambda *_, **options: lambda batch: place.copy_(batch["loss"]))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    run = compile_method.apply(
        tightfit.build(job(batch=1)), tightfit.Plan(compile="model", compile_mode="reduce-overhead")
    )
    losses = [run.loss_sum({"loss": torch.tensor([value])}) for value in (1.0, 2.0)]
    assert [float(loss) for loss in losses] == [1.0, 2.0]
    assert len(begun) == 2


def test_a_cuda_graph_has_one_shape() -> None:
    ragged = tightfit.build(job(ragged_samples()))
    with pytest.raises(InputError, match="fixed shapes"):
        compile_method.apply(ragged, tightfit.Plan(compile="model", compile_mode="reduce-overhead"))


@pytest.mark.slow
def test_cuda_graphs_keep_their_memory_between_steps() -> None:
    """The memory of a step stays during updates and evaluations."""
    estimator = Estimator(cases.job("llama"), Machine.named("a100-80gb"))
    plain = tightfit.Plan(compile="model")
    without, kept = (estimator.estimate(plain.replace(compile_mode=mode)) for mode in ("default", "reduce-overhead"))
    rows = ("activations", "temporaries", "gradients")
    pool = max(
        sum(sizes[row] for row in rows)
        for phase, _, sizes in without.ledger.instants()
        if phase in ("forward", "backward")
    )
    lives = without.ledger.row_bytes()
    states = sum(lives.values())
    assert kept.phases["optimizer"] >= states + pool
    assert kept.phases["evaluation"] == pytest.approx(without.phases["evaluation"] + pool)
    assert kept.phases["backward"] == without.phases["backward"]
    assert kept.peak_bytes >= kept.phases["evaluation"]
    tuned = estimator.estimate(plain.replace(compile_mode="max-autotune-no-cudagraphs"))
    assert tuned.compile_s > kept.compile_s == without.compile_s
    assert tuned.phases == without.phases


@pytest.mark.slow
def test_each_block_takes_time_to_compile_in_a_whole_model() -> None:
    shallow, deep = (
        Estimator(
            cases.job("llama").replace(model={**cases.SPECS["llama"], "num_hidden_layers": count}),
            Machine.named("a100-80gb"),
        )
        for count in (2, 4)
    )
    whole, blocks = tightfit.Plan(compile="model"), tightfit.Plan(compile="block")
    seconds = [one.estimate(whole).compile_s for one in (shallow, deep)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * compile_method.MODEL_COMPILE_S)
    assert shallow.estimate(blocks).compile_s == deep.estimate(blocks).compile_s < seconds[0]


def test_fields_that_forward_does_not_take_are_named() -> None:
    data = [{"x": torch.randn(5), "extra": torch.randn(2), "y": torch.randn(3)} for _ in range(8)]
    train = tightfit.Train(batch=4, steps=1, trackers=())
    job = tightfit.Job(model=lambda: torch.nn.Linear(5, 3), data=data, loss=lambda made, batch: made.sum(), train=train)
    with pytest.raises(InputError, match="forward does not take the fields of the samples"):
        next(iter(tightfit.train(tightfit.build(job, {"compile": "model"}))))


class Logging(nn.Module):
    """Reads a number between its blocks, so that each block is compiled by itself. One of them may have a
    hook on its inner layer."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Constant() for _ in range(3))
        self.largest = 0.0
        if hooked:
            self.blocks[1].inner.register_forward_hook(lambda module, inputs, output: 3 * output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.largest = float(x.detach().max())
        return x


@pytest.mark.parametrize("regions", ["block", "model"])
def test_code_of_a_module_without_hooks_does_not_serve_one_with(
    regions: str, counter: CompileCounterWithBackend
) -> None:
    def losses_of(hooked: bool, compiled: str) -> list[float]:
        data = [(torch.linspace(0, index, 8), index % 3) for index in range(4)]
        train = tightfit.Train(optimizer="sgd", learning_rate=0.1, batch=4, steps=3)
        return losses(
            tightfit.Job(model=lambda: Logging(hooked), data=data, train=train), tightfit.Plan(compile=compiled)
        )

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # torch's default
        for hooked in (False, True, False):
            assert losses_of(hooked, regions) == pytest.approx(losses_of(hooked, "none"), rel=1e-5)
    assert counter.frame_count > 0
