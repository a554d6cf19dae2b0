"""The chunked cross entropy, compared with torch's own on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tightfit
from tests import tiny
from tests.contract import cases
from tests.pool import together
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.methods.loss import default_chunk
from tightfit.models.batches import IGNORED, LABEL_COUNT_KEY, LabelCount
from tightfit.models.objective import TASKS
from tightfit.planner.defaults import complete
from tightfit.planner.dry_run import dry_run
from tightfit.planner.tracing.live_storages import StorageTracker
from tightfit.planner.tracing.profiler import Profiler
from tightfit.runtime.linear_cross_entropy import computed_rows, cross_entropy_with_gradient, linear_cross_entropy
from tightfit.runtime.loss_kernels import LossKernels, add_product, compiled_loss, loss_and_gradient, padded
from tightfit.runtime.output_head import find_output_head
from tightfit.runtime.run import to_device

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
def test_loss_and_gradients_equal_those_of_whole_logits(chunk: int, bias: bool) -> None:
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
def test_only_needed_gradients_are_computed(frozen: tuple[str, ...], products: int) -> None:
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


def test_an_evaluation_computes_no_gradient() -> None:
    """It computes one product instead of four, and allocates no gradients."""
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


def test_an_evaluation_computes_the_head_s_product_once() -> None:
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


def test_only_one_chunk_of_logits_is_alive_at_a_time() -> None:
    """Its softmax in fp32 is alive too."""
    tokens, width, vocabulary = 512, 8, 1000
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with StorageTracker([hidden, weight]) as tracker:
        linear_cross_entropy(hidden, weight, None, targets, 64).backward()
    assert tracker.peak().total < 2.5 * 4 * 64 * vocabulary


def test_a_model_that_caps_its_logits_is_refused() -> None:
    class Config:
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.config = nn.Linear(4, 8), Config()

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model: Any = Model()
    assert find_output_head(TASKS["causal-lm"], model) is model.head
    model.config.final_logit_softcapping = None
    assert find_output_head(TASKS["causal-lm"], model) is model.head
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(InputError, match="final_logit_softcapping"):
        find_output_head(TASKS["causal-lm"], model)


SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 7.0},
    "cohere": {"logit_scale": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {},
}


@pytest.mark.parametrize("evaluates", [False, True])  # before the first step, where no gradient shows what was done
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", list(SCALED))
def test_logits_times_a_number_are_computed_in_chunks(name: str, precision: str, evaluates: bool) -> None:
    sizes = {key: value for key, value in tiny.LLAMA.items() if key != "architecture"}
    job = tiny.job(steps=3).replace(model={"architecture": name, **sizes, **SCALED[name]})
    found = []
    for chunk in (None, 8):
        run = tightfit.build(job, tightfit.Plan(chunked_loss=chunk, precision=precision))  # type: ignore[arg-type]
        before = [tightfit.evaluate(run)] if evaluates else []
        found.append([*before, *(step.loss for step in tightfit.train(run))])
    assert found[1] == pytest.approx(found[0], rel=1e-6 if precision == "fp32" else 2e-3)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="output head"):
        find_output_head(TASKS["causal-lm"], nn.Linear(4, 8))


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


def test_bart_s_logit_bias_is_added() -> None:
    """The bias is a buffer: zero in a new model, and perhaps not in a pretrained one."""
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
def test_a_model_that_changes_logits_after_the_head_is_refused(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    model = {"python": "tests.methods.test_loss:Tempered", "task": "causal-lm"}
    job = tightfit.Job(model=model, data=samples, train=tightfit.Train(batch=4, steps=1))
    run = tightfit.build(job, tightfit.Plan(chunked_loss=4, compile=compiled))
    with pytest.raises(InputError, match="changes the logits after its output head"):
        next(tightfit.train(run))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("vocabulary", "device", "memory_bytes", "tokens"),
    [
        (32_000, "cuda", 80e9, 8192),
        (50_257, "cuda", 80e9, 5248),
        (128_256, "cuda", 80e9, 2048),
        (262_144, "cuda", 80e9, 1024),
        (1_000_000, "cuda", 80e9, 1024),
        (50_257, "cuda", 8e9, 2432),
        (None, "cuda", 80e9, 1024),
        (320, "cpu", 8e9, 1024),
        (128_256, "cpu", 8e9, 1024),
        (262_144, "cpu", 8e9, 512),
        (10**9, "cpu", 8e9, 128),
    ],
)
def test_the_chunk_size_is_chosen_by_bytes(
    vocabulary: int | None, device: str, memory_bytes: float, tokens: int
) -> None:
    assert default_chunk(vocabulary, device, memory_bytes) == tokens


def test_the_chunk_size_depends_on_device_and_vocabulary() -> None:
    job = tiny.job().replace(model={**tiny.MODEL, "vocab_size": 50_257})
    for name, tokens in (("a100-80gb", 5248), ("v100-32gb", 5248)):
        for pins in ({}, {"chunked_loss": True}):
            assert complete(job, Machine.named(name), pins)[0].chunked_loss == tokens
    assert complete(job, Machine.named("a100-80gb"), {"chunked_loss": 7})[0].chunked_loss == 7
    assert complete(job, Machine.detect(), {})[0].chunked_loss == 1024


AS_ON_CUDA = LossKernels(1000, pads=True, accumulates_fp32=True, fused=loss_and_gradient, row_multiple=8)


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_the_cuda_variant_computes_the_same(chunk: int, bias: bool, counted: bool) -> None:
    """It pads rows of logits, skips rows without a label, and uses one function for softmax, loss
    and gradient."""
    results = []
    for pads in (None, True):
        hidden, weight, offset, targets = inputs(bias)
        targets[::2] = IGNORED
        labelled = LabelCount(int((targets != IGNORED).sum()), TOKENS) if counted else None
        if pads is None:
            loss = whole(hidden, weight[:37], None if offset is None else offset[:37], targets.clamp(max=36))
        else:
            part = weight[:37], None if offset is None else offset[:37]
            loss = linear_cross_entropy(hidden, *part, targets.clamp(max=36), chunk, AS_ON_CUDA, labelled=labelled)
        (loss * 0.25).backward()
        results.append([loss.detach(), hidden.grad, weight.grad, *([] if offset is None else [offset.grad])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_head_with_an_unaligned_number_of_classes_is_padded() -> None:
    weight, bias = torch.randn(30, 8), torch.randn(30)
    longer = padded(weight, torch.bfloat16, pads=True)
    assert longer.shape == (64, 8)
    assert torch.equal(longer[:30], weight.to(torch.bfloat16))
    assert not longer[30:].any()
    assert padded(bias, torch.float32, pads=True).tolist() == [*bias.tolist(), *[0.0] * 34]
    assert padded(weight, torch.float32, pads=False) is weight
    assert len(padded(weight[:24], torch.bfloat16, pads=True)) == 24


def test_products_of_a_padded_head_have_aligned_dims() -> None:
    """Fast kernels need 30 classes as 64, in the products of the logits and of the gradient of the hidden states."""
    seen: list[list[tuple[int, ...]]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                seen.append([tuple(one.shape) for one in args if isinstance(one, Tensor)])
            return func(*args, **(kwargs or {}))

    hidden = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.bfloat16)
    with Shapes():
        linear_cross_entropy(hidden, weight, None, torch.randint(0, 30, (16,)), 1000, AS_ON_CUDA)
    assert seen[0] == [(16, 8), (8, 64)]
    assert [(16, 64), (64, 8)] in seen


def test_a_sum_of_products_in_fp32_is_not_rounded_to_16_bits() -> None:
    """Compared with fp64, chunk products rounded to bf16 are off by 2^-9, and products summed in
    fp32 by 2^-24."""
    generator = torch.Generator().manual_seed(1)
    chunks = [[torch.randn(64, 8, generator=generator).bfloat16() for _ in range(2)] for _ in range(4)]
    exact = sum(left.double().t() @ right.double() for left, right in chunks)
    rounded, added = torch.zeros(8, 8), torch.full((8, 8), torch.nan)
    for number, (left, right) in enumerate(chunks):
        rounded += left.t() @ right
        add_product(left.t(), right, added, number == 0)
    assert float((added - exact).abs().max()) < 1e-4
    assert float((rounded - exact).abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_equals_the_separate_operations(dtype: torch.dtype) -> None:
    """One graph is compiled for two numbers of rows, over padded rows."""
    graphs = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    kernel = compiled_loss(backend)
    for rows in (6, 9, 4):
        buffer = torch.randn(rows, 64).to(dtype)
        labels = torch.randint(0, 50, (rows,))
        labels[1] = IGNORED
        expected = buffer[:, :50].clone()
        loss, gradient = cross_entropy_with_gradient(expected, labels)
        padding = buffer[:, 50:].clone()
        found = kernel(buffer[:, :50], labels)
        torch.testing.assert_close(found, loss)
        there = labels != IGNORED
        torch.testing.assert_close(
            buffer[:, :50][there], gradient[there], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6
        )
        assert not buffer[1, :50].any()
        assert torch.equal(buffer[:, 50:], padding)
    assert len(graphs) == 1
    torch.compiler.reset()


def test_the_fused_kernel_is_finite_on_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]])
    assert float(loss_and_gradient(logits, torch.tensor([0, 1]))) == 0.0
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("labelled", "multiple", "taken"),
    [
        (None, 1, None),
        (LabelCount(150, 1000), 1, 150),
        (LabelCount(150, 1000), 128, 256),
        (LabelCount(0, 1000), 1, 1),
        (LabelCount(899, 1000), 1, 899),
        (LabelCount(900, 1000), 1, None),
        (LabelCount(1000, 1000), 128, None),
        (LabelCount(3, 20), 1, 150),
    ],
)
def test_unlabelled_rows_are_skipped_above_a_tenth(
    labelled: LabelCount | None, multiple: int, taken: int | None
) -> None:
    assert computed_rows(labelled, 1000, multiple) == taken


BERT: dict[str, Any] = {
    "architecture": "bert",
    "vocab_size": 320,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert_job() -> tightfit.Job:
    data = {"synthetic": "tokens", "sequence_length": 32, "samples": 64}
    return tightfit.Job(model=BERT, data=data, train=tightfit.Train(batch=8, steps=2))


class Rows(TorchDispatchMode):
    """How many rows the products with a head of so many classes have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.found = classes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and output.shape[-1] == self.classes:
            self.found += output.shape[0]
        return output


def test_masked_language_models_compute_only_labelled_logits() -> None:
    runs = [tightfit.build(bert_job(), plan) for plan in (tightfit.Plan(), tightfit.Plan(chunked_loss=16))]
    batch = next(runs[0].data.steps(0, None))[0]
    counted = int((batch["labels"] != IGNORED).sum())
    assert 0 < counted < batch["labels"].numel() / 3
    results = []
    for run, rows in zip(runs, (batch["labels"].numel(), counted), strict=True):
        with Rows(320) as products:
            loss = run.loss_sum(to_device(batch, run))
        assert products.found == rows
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in run.model.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_without_labels_has_zero_loss_and_gradients() -> None:
    hidden, weight, bias, targets = inputs()
    targets.fill_(IGNORED)
    loss = linear_cross_entropy(hidden, weight, bias, targets, 5, labelled=LabelCount(0, TOKENS))
    loss.backward()
    assert float(loss.detach()) == 0.0
    for tensor in (hidden, weight, bias):
        assert tensor is not None
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_predictions_count_logits_for_the_share_of_labels(device: str) -> None:
    """The share is the data's mask_probability, in the ledger as in the dry run; the fused kernel
    adds no tensor."""
    job, plan = bert_job(), tightfit.Plan(chunked_loss=16)
    chunks = -(-round(8 * 32 * 0.15) // 16)
    profiler = Profiler(job, device)
    names = [
        operation.name
        for segment in profiler.ledger(plan).training
        if segment.phase == "forward"
        for operation in segment.timeline.operations
        for _ in range(round(operation.count.at(8)))
    ]
    assert names.count("compiled") == (chunks if device == "cuda" else 0)
    assert ("aten._softmax" in names) == (device == "cpu")
    every = job.replace(data={**job.data.model_dump(exclude_none=True), "mask_probability": 0.99})
    assert dry_run(job, plan, device).total < dry_run(every, plan, device).total


@pytest.mark.sweep(8)
@pytest.mark.parametrize("compiled", ["block", "model"])
def test_another_number_of_labels_compiles_nothing_again(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    run = tightfit.build(bert_job(), tightfit.Plan(chunked_loss=16, compile=compiled))
    plain = tightfit.build(bert_job(), tightfit.Plan())
    batches = [next(run.data.steps(8 * number, None))[0] for number in range(3)]
    assert len({int((batch["labels"] != IGNORED).sum()) for batch in batches}) == 3
    run.loss_sum(to_device(batches[0], run)).backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in batches[1:]:
            loss = run.loss_sum(to_device(batch, run))
            torch.testing.assert_close(loss, plain.loss_sum(to_device(batch, plain)), rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("count", [0, TOKENS])
def test_the_gradient_of_fp32_weights_from_16_bit_products(chunk: int, count: int) -> None:
    """The sum of CUDA devices is nearer to fp64, for the same rounded factors, than a sum of
    rounded products."""
    hidden, weight, _, targets = inputs()
    narrow = hidden.detach().bfloat16()[:count]
    found = []
    for kernels in (LossKernels(accumulates_fp32=True), LossKernels()):
        weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(narrow, weight, None, targets[:count], chunk, kernels).backward()
        assert weight.grad is not None
        found.append(weight.grad.double())
    exact = weight.detach().bfloat16().double().requires_grad_()
    whole(narrow.double(), exact, None, targets[:count]).backward()
    assert exact.grad is not None
    added, rounded = (float((one - exact.grad).norm()) for one in found)
    assert added <= rounded
    assert added <= 5e-3 * float(exact.grad.norm())


def trained_on_some_labels(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and weights of a masked language model, and how many rows its first loss left out here."""
    job = bert_job().replace(train=tightfit.Train(batch=8, steps=2, learning_rate=1e-2, epsilon=cases.EPSILON))
    run = tightfit.build(job, tightfit.Plan(**fields))
    batch = next(run.data.steps(0, None))[0]
    labelled = to_device(batch, run).get(LABEL_COUNT_KEY)
    left_out = 0 if labelled is None else labelled.total - labelled.count
    return [result.loss for result in tightfit.train(run)], cases.state_of(run), left_out


@pytest.mark.slow
@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields", [{"tp": 2}, {"pp": 2, "micro_batch": 4}, {"dp_shard": 2, "zero": 3}, {"cp": 2}], ids=str
)
def test_unlabelled_rows_are_skipped_on_several_devices(fields: dict[str, Any]) -> None:
    losses, weights, left_out = trained_on_some_labels({})
    assert left_out == 0
    for found, others, fewer in together(
        2, "tests.methods.test_loss:trained_on_some_labels", {"chunked_loss": 8, **fields}
    ):
        assert fewer > 50
        assert found == pytest.approx(losses, rel=1e-5)
        assert cases.distance(others, weights) < 1e-5


class Language(nn.Module):
    """Predicts each token from the one before."""

    def __init__(self, head: nn.Module, words: int = 12) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, 8), head

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(input_ids)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(input_ids)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.normalize(x, dim=-1), functional.normalize(self.weight, dim=-1))


class LearnedScale(Language):
    """Changes no logit before the first update."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(input_ids) * self.scale


class LearnedBias(Language):
    """Has as many words as hidden states, so the bias also fits these."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(input_ids) + self.bias


class Scaled(Language):
    bias = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12, bias=self.bias))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(input_ids) * 3.0 / 0.7


class ScaledBias(Scaled):
    bias = True


class Cast(Language):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.logits(input_ids).double().contiguous()
        return logits[:, :, :].view(*input_ids.shape, -1)


class Padded(Language):
    """Hides words of a padded vocabulary in place, so that the model returns what the head returned."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12, bias=False))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.logits(input_ids)
        logits[..., 7:] = -1e4
        return logits


class Standardized(Padded):
    """Divides the logits by something that depends on them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.logits(input_ids)
        return logits / logits.detach().abs().max()


class Clamped(Padded):
    """Changes nothing yet."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(input_ids).clamp(-50, 50)


class Annealed(Language):
    """Its factor begins at 1, and would multiply the bias, too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12))
        self.register_buffer("factor", torch.ones(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.logits(input_ids) * self.factor
        if self.training:
            self.factor = self.factor * 0.9
        return logits


class WithCosine(Language):
    def __init__(self) -> None:
        super().__init__(Cosine(8, 12, bias=False))


@pytest.mark.filterwarnings("ignore:the forward changes")
@pytest.mark.parametrize("compiled", ["none", "model"])
@pytest.mark.parametrize("evaluates", [False, True])  # before the training, where autograd shows nothing
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithCosine", "is a Cosine, whose forward is not that of nn.Linear"),
        ("LearnedScale", "changes the logits after its output head"),
        ("LearnedBias", "changes the logits after its output head"),
        ("ScaledBias", "changes the logits after its output head"),
        ("Padded", "changes the logits after its output head"),
        ("Standardized", "changes the logits after its output head"),
        ("Clamped", "changes the logits after its output head"),
        ("Annealed", "changes the logits after its output head"),
        ("Scaled", ""),
        ("Cast", ""),
    ],
)
def test_heads_that_do_more_than_a_product_are_refused(
    name: str, words: str, evaluates: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.methods.compile.BACKEND", "aot_eager")
    ids = torch.arange(48).view(4, 12) % 8
    job = tightfit.Job(
        model={"python": f"{__name__}:{name}", "task": "causal-lm"},
        data=[{"input_ids": one, "labels": one.clone()} for one in ids],
        train=tightfit.Train(batch=4, steps=2),
    )

    def trained(plan: tightfit.Plan) -> list[float]:
        torch.compiler.reset()
        run = tightfit.build(job, plan)
        if evaluates:
            with torch.no_grad():
                run.loss_sum(next(run.data.steps(0, None))[0])
        return [step.loss for step in tightfit.train(run)]

    chunked = tightfit.Plan(chunked_loss=5, compile=compiled)
    if not words:
        assert trained(chunked) == pytest.approx(trained(tightfit.Plan()), rel=1e-6)
        return
    with pytest.raises(InputError, match=words):
        trained(chunked)


def test_a_chunked_loss_in_micro_batches_needs_no_warning() -> None:
    """Warnings are errors in tests."""
    ids = torch.arange(48).view(4, 12) % 8
    job = tightfit.Job(
        model={"python": f"{__name__}:Cast", "task": "causal-lm"},
        data=[{"input_ids": one, "labels": one.clone()} for one in ids],
        train=tightfit.Train(batch=4, steps=1),
    )
    tightfit.build(job, tightfit.Plan(chunked_loss=5, micro_batch=2))
