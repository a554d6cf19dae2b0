"""Sequences sharded over devices train like whole ones, with padding, uneven lengths and grouped
heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests.contract import cases
from tests.devices import on_each_device
from tests.pool import together
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.models.batches import IGNORED
from tightfit.parallel.context import ring_attention, sequence_chunks
from tightfit.planner.estimator import Estimator

HERE = "tests.methods.test_context_parallel:"


def samples(length: int, padding: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(cases.SAMPLES):
        tokens = torch.randint(1, 160, (length,), generator=generator)
        labels, mask = tokens.clone(), torch.ones(length, dtype=torch.int64)
        hidden = slice(length - index % 7, None) if padding == "right" else slice(0, index % 7)
        labels[hidden], mask[hidden] = IGNORED, 0
        found.append({"input_ids": tokens, "labels": labels} | ({"attention_mask": mask} if padding != "none" else {}))
    return found


def trained(
    model: dict[str, Any], length: int, padding: str, fields: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    settings = tightfit.Train(batch=4, steps=3, learning_rate=1e-2, epsilon=cases.EPSILON)
    job = tightfit.Job(model=model, data=samples(length, padding), train=settings, allow=["bf16"])
    run = tightfit.build(job, tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("model", "length", "padding", "fields"),
    [
        (cases.LLAMA, 16, "right", {"cp": 2}),
        (cases.LLAMA, 15, "left", {"cp": 2}),
        (cases.LLAMA, 13, "none", {"cp": 4}),
        ({**cases.LLAMA, "num_key_value_heads": 1}, 16, "none", {"cp": 3}),
        (cases.BERT, 16, "right", {"cp": 2}),
        (cases.BERT, 13, "none", {"cp": 2}),
        (cases.BERT, 14, "right", {"cp": 4, "recompute": "full"}),
        (cases.GPT2, 14, "right", {"cp": 2, "pp": 2, "micro_batch": 2}),
    ],
)
def test_a_sharded_sequence_trains_like_the_whole_one(
    model: dict[str, Any], length: int, padding: str, fields: dict[str, Any]
) -> None:
    losses, expected = trained(model, length, padding, {})
    for found, weights in together(tightfit.Plan(**fields).devices, HERE + "trained", model, length, padding, fields):
        assert found == pytest.approx(losses, rel=2e-6)
        assert cases.distance(weights, expected) < 1e-6


def test_low_precision_is_as_accurate_as_on_one_device() -> None:
    _, expected = trained(cases.LLAMA, 16, "none", {})
    _, alone = trained(cases.LLAMA, 16, "none", {"precision": "bf16-mixed"})
    fields = {"cp": 2, "precision": "bf16-mixed"}
    for _, weights in together(2, HERE + "trained", cases.LLAMA, 16, "none", fields):
        assert cases.distance(weights, expected) < 1.5 * cases.distance(alone, expected)


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_shards_cover_the_sequence_and_labels_are_shifted(pieces: int) -> None:
    tokens = torch.arange(2 * 25).view(2, 25)
    cuts = [
        sequence_chunks.shard_batch({"input_ids": tokens, "labels": tokens}, True, piece, pieces)
        for piece in range(pieces)
    ]
    positions = torch.cat([cut["position_ids"] for cut in cuts], 1)
    assert sorted(positions[0].tolist()) == list(range(-(-25 // (2 * pieces)) * 2 * pieces))
    for cut in cuts:
        for row in range(2):
            counted = cut["labels"][row] != IGNORED
            assert torch.equal(cut["labels"][row][counted], cut["input_ids"][row][counted] + 1)
    assert sum(int((cut["labels"] != IGNORED).sum()) for cut in cuts) == 2 * 24


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_causal_mask_gives_all_devices_equal_work(size: int) -> None:
    work = []
    for rank in range(size):
        ring = ring_attention.Ring.__new__(ring_attention.Ring)
        ring.rank, ring.size = rank, size
        parts = [ring_attention.visible_slices(step, ring, True, 64) for step in range(1, size)]
        work.append([len(range(64)[rows]) * len(range(64)[columns]) for rows, columns in parts])
    assert all(area == 64 * 32 for areas in work for area in areas)


def test_the_ring_sends_keys_values_and_their_gradients() -> None:
    """Keys and values are passed on n-1 times in forward and in backward, their gradients n times,
    in fp32."""
    job = tightfit.Job(
        model=cases.LLAMA, data={"synthetic": "tokens", "sequence_length": 32}, train=tightfit.Train(batch=4, steps=9)
    )
    for size in (2, 4):
        plan = tightfit.Plan(cp=size)
        ledger = Estimator(job, Machine.named("a100-80gb:4")).estimate(plan).ledger
        (sent,) = [message.bytes for message in ledger.messages if message.name == "keys and values"]
        pair = 4 * 2 * 4 * (32 / size) * 2 * 8  # samples x (key, value) x bytes x positions x heads x width
        assert sent == pytest.approx(4 * pair * (3 * size - 2))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (cases.VIT, "no loss for each position"),
        (cases.T5, "no loss for each position"),
        ({**cases.GPT2, "attn_pdrop": 0.1}, "attn_pdrop: 0.0"),
        ({**cases.BERT, "architecture": "roberta", "pad_token_id": 1}, "computes positions from the padding"),
        ({**cases.LLAMA, "architecture": "mistral", "sliding_window": 8}, "window"),
    ],
)
def test_sequences_that_cannot_be_sharded_are_refused(model: dict[str, Any], words: str) -> None:
    for result in together(2, HERE + "refusal", model):
        assert words in result


def refusal(model: dict[str, Any]) -> str:
    vit = model["architecture"] == "vit"
    data = {"synthetic": "images"} if vit else {"synthetic": "tokens", "sequence_length": 16}
    job = tightfit.Job(model=model, data=data, train=tightfit.Train(batch=4, steps=1))
    with pytest.raises(InputError) as refused:
        tightfit.build(job, tightfit.Plan(cp=2))
    return str(refused.value)


def test_unsupported_attention_is_refused() -> None:
    heads = torch.zeros(1, 2, 4, 8)
    for fields in ({"softcap": 50.0}, {"s_aux": heads}, {"dropout": 0.1}):
        with pytest.raises(InputError, match=next(iter(fields))):
            ring_attention.attend(torch.nn.Identity(), heads, heads, heads, None, **fields)


def test_position_ids_in_the_data_are_refused() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(InputError, match="the batches have position_ids"):
        sequence_chunks.shard_batch({"input_ids": tokens, "labels": tokens, "position_ids": tokens}, True, 0, 2)


@on_each_device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_shards_equals_plain_attention(causal: bool, masked: bool, device: str) -> None:
    """Output, sums and gradients of one device's attention to another's keys; on a GPU with its own
    kernel."""
    hold_a_part(causal, masked, device, 40)


def hold_a_part(causal: bool, masked: bool, device: str, keys: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, keys, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2)
    )
    seen = (torch.rand(2, 1, 1, keys, generator=generator) > 0.3).to(device)
    seen[..., 0] = True
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.25
    if masked:
        scores = scores.masked_fill(~seen, float("-inf"))
    if causal:
        scores = scores + torch.full((keys, keys), float("-inf"), device=device).triu(1)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    bias = seen if masked else None
    found, sums = ring_attention.attention(query, key, value, bias, causal, 0.25)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    gradient = torch.randn(expected.shape, generator=generator).to(device)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    with torch.no_grad():
        gradients = ring_attention.attention_backward(gradient, query, key, value, bias, found, sums, causal, 0.25)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class KernelsOfCuda:
    """PyTorch's kernels on CUDA, written out as products: what they take, and how they lay out their sums."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    @staticmethod
    def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        scores = query @ key.mT * scale + (0.0 if bias is None else bias)
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, float("-inf")) if causal else scores

    def _checked(self, name: str, *given: Tensor, bias: Tensor | None = None) -> None:
        self.called.add(name)
        assert all(one.shape[-1] % 8 == 0 and one.stride(-1) == 1 for one in given)
        if bias is not None:
            assert all(stride % 8 == 0 for stride in bias.stride()[:-1])

    def _gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, scores: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        shares = (scores - sums.unsqueeze(-1)).exp()
        inner = shares * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)) * scale
        return inner @ key, inner.mT @ query, shares.mT @ gradient

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, mask: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        self._checked("flash", query, key, value)
        groups = query.shape[1] // key.shape[1]
        scores = self._scores(query, key.repeat_interleave(groups, 1), None, causal, scale)
        return scores.softmax(-1) @ value.repeat_interleave(groups, 1), scores.logsumexp(-1), query

    def _scaled_dot_product_flash_attention_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, first: None,
        last: None, queries: int, keys: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self._checked("flash backward", gradient, query, key, value)
        assert (queries, keys) == (query.shape[2], key.shape[2])
        assert sums.is_contiguous()
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = self._scores(query, wide_key, None, causal, scale)
        found = self._gradients(gradient, query, wide_key, wide_value, output, sums, scores, scale)
        of_key, of_value = (part.unflatten(1, (key.shape[1], groups)).sum(2) for part in found[1:])
        return found[0], of_key, of_value

    def _scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_sums: bool, dropout: float,
        causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self._checked("efficient", query, key, value, bias=bias)
        assert query.shape[1] == key.shape[1]
        scores = self._scores(query, key, bias, causal, scale)
        padded = torch.nn.functional.pad(scores.logsumexp(-1), (0, -scores.shape[2] % 32), value=float("inf"))
        return scores.softmax(-1) @ value, padded, query, query

    def _scaled_dot_product_efficient_attention_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, output: Tensor,
        sums: Tensor, seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
        self._checked("efficient backward", gradient, query, key, value, bias=bias)
        assert sums.shape[-1] % 32 == 0
        scores = self._scores(query, key, bias, causal, scale)
        own = sums[..., : query.shape[2]]
        return *self._gradients(gradient, query, key, value, output, own, scores, scale), None


@pytest.mark.parametrize("kernel", ["flash", "efficient", "plain"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_kernels_get_valid_arguments(
    kernel: str, causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 keys, of half as many heads as queries: with each kernel the attention of plain products."""
    if kernel == "flash" and masked:
        return  # which takes none
    kernels = KernelsOfCuda()
    monkeypatch.setattr(ring_attention, "select_kernel", lambda query, mask: kernel)
    for name in ("flash_attention", "efficient_attention"):
        for part in (name, f"{name}_backward"):
            monkeypatch.setattr(ring_attention, part.upper(), getattr(kernels, f"_scaled_dot_product_{part}"))
    monkeypatch.setattr(ring_attention, "_is_on_accelerator", lambda tensor: True)
    hold_a_part(causal, masked, "cpu", 13)
    assert kernels.called == (set() if kernel == "plain" else {kernel, f"{kernel} backward"})


OPT: dict[str, Any] = {
    "architecture": "opt", "vocab_size": 160, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip


def padded_refusal(padding: str) -> str:
    job = tightfit.Job(model=OPT, data=samples(16, padding), train=tightfit.Train(batch=4, steps=1))
    try:
        tightfit.build(job, tightfit.Plan(cp=2))
    except InputError as error:
        return str(error)
    return ""


def test_positions_counted_by_a_mask_are_refused() -> None:
    assert all(
        "counts positions by the attention mask" in said for said in together(2, HERE + "padded_refusal", "left")
    )
    assert together(2, HERE + "padded_refusal", "none") == ["", ""]


def test_a_mask_for_each_query_is_refused() -> None:
    heads, mask = torch.zeros(2, 2, 4, 8), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(InputError, match="one for each query"):
        ring_attention.attend(torch.nn.Identity(), heads, heads, heads, mask)
