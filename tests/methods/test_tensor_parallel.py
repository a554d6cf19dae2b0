"""Tensor parallelism beyond the contract: dropout, messages, indivisible positions, wrong tables."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.errors import InputError
from tightfit.runtime.run import to_device

HERE = "tests.methods.test_tensor_parallel:"
DROPPING = {**cases.GPT2, "resid_pdrop": 0.5, "attn_pdrop": 0.5}


class Sent(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            name = name.split(".")[1]
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def built(model: Any, fields: dict[str, Any], length: int = 16, **more: Any) -> Any:
    job = tightfit.Job(
        model=model,
        data=cases.language_samples(False) if length == 16 else {"synthetic": "tokens", "sequence_length": length},
        train=tightfit.Train(batch=4, steps=2, learning_rate=1e-2, epsilon=cases.EPSILON),
        **more,
    )
    return tightfit.build(job, tightfit.Plan(**fields))


def collectives(fields: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    run = built(cases.LLAMA, fields)
    batch = to_device(next(iter(run.data.steps(0, None)))[0], run)
    with Sent() as forward:
        loss = run.loss_sum(batch)
    with Sent() as backward:
        loss.backward()
    return forward.found, backward.found


def test_each_region_of_a_block_sends_one_sum_each_way() -> None:
    """However many products share an input, there is one sum after each region in forward and one
    before it in backward."""
    for forward, backward in together(2, HERE + "collectives", {"tp": 2}):
        assert forward == {"allreduce_": 2 * 4 + 3}  # with the embedding, and two for the loss
        assert backward == {"allreduce_": 2 * 4 + 1}  # with the head


def test_sequence_parallel_replaces_sums_by_gather_and_scatter() -> None:
    for forward, backward in together(2, HERE + "collectives", {"tp": 2, "sequence_parallel": True}):
        # each of two rows by itself: see distributed/collectives.py
        assert forward == {"allreduce_": 3, "broadcast_": 2 * (2 * 4 + 1), "reduce_": 2 * 2 * 4}
        assert backward == {"allreduce_": 1, "broadcast_": 2 * (2 * 8 + 1), "reduce_": 2 * 2 * 4}


def dropped(fields: dict[str, Any], name: str) -> Tensor:
    """Which of a dropout's outputs are zero in one forward."""
    run = built(DROPPING, fields)
    found: list[Tensor] = []
    run.model.get_submodule(name).register_forward_hook(lambda module, inputs, output: found.append(output == 0))
    torch.manual_seed(11)
    run.loss_sum(to_device(next(iter(run.data.steps(0, None)))[0], run))
    return found[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_is_equal_exactly_on_replicated_activations(recompute: str) -> None:
    """On sharded activations each device draws its own."""
    name = "transformer.h.1.mlp.dropout"
    one, other = together(2, HERE + "dropped", {"tp": 2, "recompute": recompute}, name)
    assert torch.equal(one, other)  # of the residual stream, which both have
    one, other = together(2, HERE + "dropped", {"tp": 2, "sequence_parallel": True, "recompute": recompute}, name)
    assert one.shape == (4, 8, 32)  # half of the positions
    assert 0.3 < float((one != other).float().mean()) < 0.7


def trained(model: Any, fields: dict[str, Any], length: int = 16, **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    run = built(model, fields, length, **more)
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_draws_the_same_dropout(recompute: str) -> None:
    """With recomputation the losses and updates of a step equal those without it."""
    for sequences in (False, True):
        fields = {"tp": 2, "sequence_parallel": sequences}
        kept = together(2, HERE + "trained", DROPPING, fields)[0]
        again = together(2, HERE + "trained", DROPPING, {**fields, "recompute": recompute})[0]
        assert again[0] == pytest.approx(kept[0], rel=1e-6)
        assert cases.distance(again[1], kept[1]) < 1e-6


SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PARTIAL: list[dict[str, Any]] = [
    {"architecture": "phi", **SIZES, "qk_layernorm": True, "resid_pdrop": 0.0},
    {"architecture": "apertus", **SIZES, "num_key_value_heads": 2},
    {
        **{"architecture": "glm4_moe", **SIZES, "num_key_value_heads": 2, "use_qk_norm": True, "head_dim": 8, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
]  # fmt: skip


@pytest.mark.parametrize("model", PARTIAL, ids=lambda model: model["architecture"])
def test_parameters_on_sharded_activations_get_whole_gradients(model: dict[str, Any]) -> None:
    """The tables of transformers do not have them: norms of heads, and an activation with parameters."""
    expected = trained(model, {})
    for losses, weights in together(2, HERE + "trained", model, {"tp": 2}):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert cases.distance(weights, expected[1]) < 1e-5


def refused(model: Any, fields: dict[str, Any]) -> str:
    try:
        built(model, fields)
    except InputError as error:
        return str(error)
    return ""


def test_norms_with_a_row_for_each_head_are_refused() -> None:
    model = {"architecture": "cohere", **SIZES, "use_qk_norm": True}
    for error in together(2, HERE + "refused", model, {"tp": 2}):
        assert "norm.weight, of 2 dimensions, is used on sharded activations" in error


def fails(model: Any, fields: dict[str, Any]) -> str:
    try:
        trained(model, fields)
    except InputError as error:
        return str(error)
    return ""


def test_a_model_that_computes_with_all_heads_is_named() -> None:
    """Doge adds a mask for all heads to the scores of a device's heads."""
    model = {"architecture": "doge", **SIZES, "num_key_value_heads": 2}
    for error in together(2, HERE + "fails", model, {"tp": 2}):
        assert error.startswith("plan: tp=2: sdpa_attention.py, line ")
        assert "fails where a device has only its part of the heads" in error


@pytest.mark.sweep(12)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "every-2"])
def test_indivisible_positions_are_padded(size: int, recompute: str) -> None:
    expected = trained(cases.LLAMA, {}, 13)
    fields = {"tp": size, "sequence_parallel": True, "recompute": recompute}
    model = {**cases.LLAMA, "num_key_value_heads": 4} if size == 4 else cases.LLAMA
    if size == 4:
        expected = trained(model, {}, 13)
    for losses, weights in together(size, HERE + "trained", model, fields, 13):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


def saved_sizes(fields: dict[str, Any]) -> list[int]:
    """How many elements each tensor has that autograd saves in the forward of a micro-batch."""
    run = built(cases.LLAMA, fields)
    batch = to_device(next(iter(run.data.steps(0, None)))[0], run)
    run.loss_sum(batch).backward()  # compiled without the hooks
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.loss_sum(batch).backward()
    return list(found.values())


@pytest.mark.sweep(8)
@pytest.mark.parametrize("length", [16, 13])
def test_compiled_blocks_gather_their_inputs_again(length: int) -> None:
    """They train as plain PyTorch does."""
    expected = trained(cases.LLAMA, {}, length)
    fields = {"tp": 2, "sequence_parallel": True, "compile": "block"}
    for losses, weights in together(2, HERE + "trained", cases.LLAMA, fields, length):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


def test_compiled_blocks_save_shards_of_their_inputs() -> None:
    """Of each of 4 blocks, the inputs of two norms and of two groups of products are shards."""
    whole, sharded = (
        together(2, HERE + "saved_sizes", {"tp": 2, "sequence_parallel": sequences, "compile": "block"})[0]
        for sequences in (False, True)
    )
    hidden = 4 * 16 * 32
    assert whole.count(hidden) - sharded.count(hidden) == 4 * 4
    assert sum(sharded) < sum(whole)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_indivisible_positions_are_padded_in_a_pipeline(schedule: str) -> None:
    expected = trained(cases.LLAMA, {}, 13)
    pipeline = {
        "pp": 2,
        "micro_batch": 1,
        "schedule": schedule,
        "virtual_stages": 2 if schedule == "interleaved" else 1,
    }
    for losses, weights in together(
        4, HERE + "trained", cases.LLAMA, {"tp": 2, "sequence_parallel": True, **pipeline}, 13
    ):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


def refused_in_training(fields: dict[str, Any], length: int) -> str:
    with pytest.raises(InputError) as refused:
        trained(cases.LLAMA, fields, length)
    return str(refused.value)


def test_recomputing_in_a_pipeline_needs_divisible_positions() -> None:
    """Every device refuses, so none waits for another."""
    fields = {"tp": 2, "sequence_parallel": True, "pp": 2, "micro_batch": 2, "recompute": "full"}
    for said in together(4, HERE + "refused_in_training", fields, 13):
        assert "recompute: none" in said


def test_padding_of_positions_is_finite_in_fp16() -> None:
    """ViT's norms add 1e-12 to the variance: for positions of zeros the inverse would overflow."""
    plan = tightfit.Plan(tp=2, sequence_parallel=True, precision="fp16-true", loss_scale=128.0)
    expected = cases.plain_training(cases.make_case("vit"))
    losses, weights = cases.training(cases.make_case("vit"), plan)
    assert losses == pytest.approx(expected[0], rel=2e-3)
    assert cases.distance(weights, expected[1]) < 2e-3


PRODUCTS = {f"*.{name}_proj": "colwise" for name in ("q", "k", "v", "gate", "up")} | {
    f"*.{name}_proj": "rowwise" for name in ("o", "down")
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("style", ["colwise", "colwise_gather_output", "whole"])
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}, {"chunked_loss": 8}])
def test_a_table_may_shard_the_head(style: str, more: dict[str, Any]) -> None:
    """Sharded by vocabulary, gathered, or whole on every device: the training is the same."""
    model = {**cases.LLAMA, "tie_word_embeddings": False}
    expected = trained(model, {})
    model["tensor_parallel"] = {**PRODUCTS, "lm_head": style}
    for losses, weights in together(2, HERE + "trained", model, {"tp": 2, **more}):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


@pytest.mark.parametrize("style", ["colwise_gather_output", "whole"])
def test_a_pipeline_accepts_a_head_not_sharded_by_vocabulary(style: str) -> None:
    model = {**cases.LLAMA, "tie_word_embeddings": False}
    expected = trained(model, {})
    model["tensor_parallel"] = {**PRODUCTS, "lm_head": style}
    for losses, weights in together(4, HERE + "trained", model, {"tp": 2, "pp": 2, "micro_batch": 1}):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


def widths(style: str) -> tuple[int, int]:
    """Columns of the head's weight here, and of the logits."""
    run = built(
        {**cases.LLAMA, "tie_word_embeddings": False, "tensor_parallel": {**PRODUCTS, "lm_head": style}}, {"tp": 2}
    )
    batch = to_device(next(iter(run.data.steps(0, None)))[0], run)
    return run.model.lm_head.weight.shape[0], run.objective.logits(run.model, batch).shape[-1]


def test_the_local_width_of_the_head_is_found() -> None:
    size = cases.LLAMA["vocab_size"]
    assert together(2, HERE + "widths", "colwise") == [(size // 2, size // 2)] * 2
    assert together(2, HERE + "widths", "colwise_gather_output") == [(size // 2, size)] * 2
    assert together(2, HERE + "widths", "whole") == [(size, size)] * 2


class Layer(nn.Module):
    """A user's block, whose products are its own children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Own(nn.Module):
    tensor_parallel: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.ModuleList(Layer(16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def own_trained(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    train = tightfit.Train(batch=4, steps=3, learning_rate=1e-2, epsilon=cases.EPSILON)
    run = tightfit.build(tightfit.Job(model=Own, data=cases.image_samples(False), train=train), tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


@pytest.mark.parametrize("sequences", [False, True])
def test_a_user_s_model_is_sharded_by_its_own_table(sequences: bool) -> None:
    expected = own_trained({})
    for losses, weights in together(2, HERE + "own_trained", {"tp": 2, "sequence_parallel": sequences}):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


class FusedAttention(nn.Module):
    """Attention of four heads with one product for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head_width = width // 4

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Fused(Own):
    tensor_parallel: ClassVar = {"blocks.*.qkv": "qkv", "blocks.*.out": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FusedAttention(16) for _ in range(3))


def fused_trained(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    train = tightfit.Train(batch=4, steps=3, learning_rate=1e-2, epsilon=cases.EPSILON)
    job = tightfit.Job(model=Fused, data=cases.image_samples(False), train=train)
    run = tightfit.build(job, tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


def test_a_user_s_fused_projection_is_sharded_matrix_by_matrix() -> None:
    expected = fused_trained({})
    for losses, weights in together(2, HERE + "fused_trained", {"tp": 2}):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 1e-6


def refusal(model: Any, fields: dict[str, Any]) -> str:
    job = tightfit.Job(model=model, data=cases.language_samples(True), train=tightfit.Train(batch=4, steps=1))
    with pytest.raises(InputError) as refused:
        tightfit.build(job, tightfit.Plan(**fields))
    assert dist.is_initialized()
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        (cases.T5, {"tp": 2, "sequence_parallel": True}, "two different sequences"),
        (
            {**cases.LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            {"tp": 2},
            "do not divide evenly",
        ),
        (
            {"architecture": "phi3", **SIZES, "num_key_value_heads": 2, "pad_token_id": None},
            {"tp": 2, "sequence_parallel": True},
            "which is for layers that get all positions",
        ),
        ({**cases.LLAMA, "tensor_parallel": {"*.mlp.up": "sideways"}}, {"tp": 2}, "not a known style of sharding"),
        ({**cases.LLAMA, "tensor_parallel": {"*.mlp.sideways": "colwise"}}, {"tp": 2}, "no module of the model"),
        (
            {**cases.LLAMA, "tensor_parallel": {"*.mlp.up_proj": "colwise", "*.mlp.down_prj": "rowwise"}},
            {"tp": 2},
            "*.mlp.down_prj: names no module of the model\n  fix: leave it out, or use *.mlp.down_proj",
        ),
        (
            {**cases.GPT2, "tensor_parallel": {"lm_head": "colwise_gather_output"}},
            {"tp": 2},
            "shares its weight with another module",
        ),
        (
            {**cases.LLAMA, "tensor_parallel": {"*.mlp.up_proj": "colwise", "*.mlp.down_proj": "rowwise"}},
            {"tp": 2, "sequence_parallel": True},
            "is not sharded, but lies in a module whose other parameters are sharded",
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(model: Any, fields: dict[str, Any], words: str) -> None:
    for said in together(2, HERE + "refusal", model, fields):
        assert words in said


SMALL: dict[str, Any] = {
    "vocab_size": cases.LLAMA["vocab_size"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}
NORMED = {**SMALL, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {  # whose tables have styles that Llama's has not
    "qwen3": NORMED,  # norms of each head
    "gemma3_text": {**NORMED, "sliding_window": 8},
    "exaone4": SMALL,
    "phi3": SMALL,  # fused products
    "glm4": {**NORMED, "partial_rotary_factor": 0.5},
    "olmo2": SMALL,  # norms of all heads together
    "olmo3": SMALL,
    "gpt_neox": {name: value for name, value in SMALL.items() if name != "num_key_value_heads"},
    "gptj": {
        "vocab_size": cases.LLAMA["vocab_size"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "rotary_dim": 4,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {
        **SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{**SMALL, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16},
        **{"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}
IN_PART = {"phi3", "olmo2", "olmo3", *EXPERTS}  # some of their activations are whole on each device


@pytest.mark.sweep(12)
@pytest.mark.parametrize("sequences", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_models_with_other_tables_train_like_one_device(name: str, sequences: bool) -> None:
    model = {"architecture": name, **{**FAMILIES, **EXPERTS}[name]}
    fields = {"tp": 2, "sequence_parallel": sequences}
    if sequences and name in IN_PART:
        with pytest.raises(InputError, match=r"sequence.parallel"):
            together(2, HERE + "trained", model, fields)
        return
    expected = trained(model, {})
    for losses, weights in together(2, HERE + "trained", model, fields):
        assert losses == pytest.approx(expected[0], rel=2e-6)
        assert cases.distance(weights, expected[1]) < 2e-6


@pytest.mark.parametrize("name", ["qwen3", "phi3", "mixtral"])
@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                {"compile": "block"},
                {"zero": 3, "dp_shard": 2},
                {"pp": 2, "micro_batch": 2},
                {"chunked_loss": 5},
            )
        ),
    ],
    ids=str,
)
def test_other_tables_compose_with_other_methods(name: str, fields: dict[str, Any]) -> None:
    model = {"architecture": name, **{**FAMILIES, **EXPERTS}[name]}
    alone = {"micro_batch": 2} if fields.keys() & {"pp", "dp_shard"} else {}
    expected = trained(model, alone)
    plan = tightfit.Plan(tp=2).replace(**fields)
    for losses, weights in together(plan.devices, HERE + "trained", model, {"tp": 2, **fields}):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert cases.distance(weights, expected[1]) < 1e-5


class Gated(nn.Module):
    """Two layers, between which a function runs on the features."""

    width = 16

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(self.width, 64), nn.Linear(32 if between == "chunk" else 64, self.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.between == "softmax":
            y = y.softmax(-1)
        elif self.between == "chunk":
            first, second = y.chunk(2, -1)
            y = first * torch.sigmoid(second)
        else:
            y = torch.nn.functional.dropout(torch.tanh(y), 0.1, self.training)
        return x + self.down(y)


class Stacked(nn.Module):
    between = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(self.between) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WithSoftmax(Stacked):
    between = "softmax"


class WithChunk(Stacked):
    between = "chunk"


def by_own_table(name: str, fields: dict[str, Any], check: str) -> str:
    samples = [(torch.randn(6, 16, generator=torch.Generator().manual_seed(one)), one % 6) for one in range(16)]
    table = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    job = tightfit.Job(
        model={"python": HERE + name, "tensor_parallel": table},
        data=[(x, x.roll(1, 0)) for x, _ in samples],
        loss=torch.nn.functional.mse_loss,
        train=tightfit.Train(batch=4, steps=2, check_split=check),  # type: ignore[arg-type]
    )
    try:
        list(tightfit.train(tightfit.build(job, tightfit.Plan(**fields))))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.sweep(8)
@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 2, "zero": 3, "dp_shard": 2}], ids=str)
def test_a_table_that_changes_the_loss_is_refused(fields: dict[str, Any]) -> None:
    count = fields["tp"] * fields.get("dp_shard", 1)
    for name in ("WithSoftmax", "WithChunk"):
        for said in together(count, HERE + "by_own_table", name, fields, "auto"):
            assert "computes something else than the undivided model" in said
            assert "leave such modules out of the table" in said
    assert set(together(count, HERE + "by_own_table", "Stacked", fields, "always")) == {""}
    assert set(together(count, HERE + "by_own_table", "WithSoftmax", fields, "never")) == {""}
