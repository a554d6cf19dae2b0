"""The chunked cross entropy, against torch's own on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tightfit
from tightfit.errors import InputError
from tightfit.methods.loss import cross_entropy_with_gradient, find_head, linear_cross_entropy
from tightfit.models.objective import TASKS
from tightfit.planner.storages import StorageTracker

from .. import tiny

TOKENS, WIDTH, VOCABULARY = 23, 16, 40


class Products(TorchDispatchMode):
    """Counts matrix products, those in place too, which torch's counter of FLOPs does not see."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def inputs(bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight, bias and targets, of which every third is IGNORED."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[::3] = -100
    return hidden, weight, torch.randn(VOCABULARY, requires_grad=True) if bias else None, targets


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias), targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool) -> None:
    results = []
    for function in (whole, lambda *arguments: linear_cross_entropy(*arguments, chunk)):
        hidden, weight, offset, targets = inputs(bias)
        loss = function(hidden, weight, offset, targets)
        (loss * 0.25).backward()
        results.append([loss.detach(), hidden.grad, weight.grad, *([] if offset is None else [offset.grad])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_extreme_logits_give_finite_losses_and_gradients() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]])
    loss, gradient = cross_entropy_with_gradient(logits.clone(), torch.tensor([0, 1]))
    assert float(loss) == 0.0
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("frozen", "products"), [((), 4), (("weight", "bias"), 2), (("hidden",), 3), (("hidden", "weight", "bias"), 1)]
)
def test_only_gradients_that_something_needs_are_made(frozen: tuple[str, ...], products: int) -> None:
    tensors = dict(zip(("hidden", "weight", "bias"), inputs()[:3], strict=True))
    for name in frozen:
        tensors[name].requires_grad_(False)  # type: ignore[union-attr]
    with Products() as counted:
        loss = linear_cross_entropy(*tensors.values(), inputs()[3], TOKENS)
    assert counted.count == products
    assert loss.requires_grad == (len(frozen) < 3)
    if loss.requires_grad:
        loss.backward()
        expected = inputs()
        whole(*expected).backward()
        for (name, tensor), value in zip(tensors.items(), expected[:3], strict=True):
            assert tensor is not None
            assert value is not None
            assert (tensor.grad is None) == (name in frozen)
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, value.grad, rtol=1e-5, atol=1e-5)


def test_an_evaluation_takes_no_gradient() -> None:
    """One product in place of four, and not a byte for the gradients."""
    hidden, weight, bias, targets = inputs()
    with torch.no_grad(), Products() as counted:
        value = linear_cross_entropy(hidden, weight, bias, targets, TOKENS)
    assert counted.count == 1
    with torch.no_grad(), StorageTracker([]) as tracker:
        linear_cross_entropy(hidden, weight, bias, targets, 5)
    gradients = hidden.nbytes + weight.nbytes
    made = tracker.peak().total - sum(tensor.untyped_storage().nbytes() for tensor in (hidden, weight, bias, targets))  # type: ignore[union-attr]
    assert made < gradients
    torch.testing.assert_close(value, whole(hidden, weight, bias, targets).detach())


def test_the_evaluation_of_a_job_computes_one_product_of_the_head() -> None:
    job = tiny.job()
    plain, chunked = tightfit.build(job), tightfit.build(job, tightfit.Plan(chunked_loss=8))
    counts = []
    for run in (plain, chunked):
        with FlopCounterMode(display=False) as counter:
            counts.append((tightfit.evaluate(run), counter.get_total_flops()))
    assert counts[0][0] == pytest.approx(counts[1][0], rel=1e-6)
    assert counts[0][1] == counts[1][1]


def test_backward_runs_once() -> None:
    loss = linear_cross_entropy(*inputs(), 5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_one_chunk_of_logits_lives_at_once() -> None:
    """That, and its softmax in fp32."""
    tokens, width, vocabulary = 512, 8, 1000
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with StorageTracker([hidden, weight]) as tracker:
        linear_cross_entropy(hidden, weight, None, targets, 64).backward()
    assert tracker.peak().total < 2.5 * 4 * 64 * vocabulary


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_model_that_changes_its_logits_is_refused(name: str) -> None:
    class Config:
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.config = nn.Linear(4, 8), Config()

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model: Any = Model()
    assert find_head(TASKS["causal-lm"], model) is model.head
    setattr(model.config, name, 1.0)
    assert find_head(TASKS["causal-lm"], model) is model.head
    setattr(model.config, name, 30.0)
    with pytest.raises(InputError, match=name):
        find_head(TASKS["causal-lm"], model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="output embedding"):
        find_head(TASKS["causal-lm"], nn.Linear(4, 8))


BART: dict[str, Any] = {
    "architecture": "bart",
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}


def test_what_bart_adds_to_its_logits_is_added() -> None:
    """A buffer, which is zero in a new model and may not be in a pretrained one."""
    samples = [{"input_ids": torch.arange(4, 12), "labels": torch.arange(10, 18) + n} for n in range(8)]
    job = tightfit.Job(model=BART, data=samples, train=tightfit.Train(batch=4, steps=1))
    losses = []
    for plan in (tightfit.Plan(), tightfit.Plan(chunked_loss=5)):
        run = tightfit.build(job, plan)
        bias: Any = run.model.final_logits_bias
        bias.copy_(torch.linspace(-2, 2, 40).unsqueeze(0))
        losses.append(next(tightfit.train(run)).loss)
        assert torch.equal(bias, torch.linspace(-2, 2, 40).unsqueeze(0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Tempered(nn.Module):
    """Changes its logits in a way that no configuration names; as wide as its vocabulary, so that shapes say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)) * 3.0


@pytest.mark.parametrize("compiled", ["none", "model"])
def test_logits_that_are_changed_behind_the_head_are_refused(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    model = {"python": "tests.methods.test_loss:Tempered", "task": "causal-lm"}
    job = tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=4, steps=1))
    run = tightfit.build(job, tightfit.Plan(chunked_loss=4, compile=compiled))
    with pytest.raises(InputError, match="changes the logits after its head"):
        next(tightfit.train(run))
    torch.compiler.reset()
