"""Tiny versions of transformers' architectures, without dropout: their code, our sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tests.zoo.entry import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Entry,
    Kind,
    each_label,
    masked_texts,
    next_token,
    pictures,
    ragged_texts,
    texts,
    translation,
    translations,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "num_channels": 3,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NOISE = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop", "drop_path_rate", "jitter_noise")


@cache
def config_keys(architecture: str) -> dict[str, Any]:
    """SIZES under the names that the architecture's config has, and no dropout."""
    from transformers import CONFIG_MAPPING

    from tightfit.models.configs import config_defaults

    kind = CONFIG_MAPPING[architecture]
    known = config_defaults(kind)
    keys = {kind.attribute_map.get(key, key): value for key, value in SIZES.items()}
    keys = {key: value for key, value in keys.items() if key in known or key == "num_labels"}
    quiet = {key: 0.0 for key, default in known.items() if key.endswith(NOISE) and isinstance(default, float | int)}
    return keys | quiet


def tiny(architecture: str, own: dict[str, Any]) -> dict[str, Any]:
    keys = config_keys(architecture) | own
    return {"architecture": architecture, **keys}


def entry(
    architecture: str,
    kind: Kind,
    samples: Callable[[], list[Any]],
    plain: Any,
    name: str | None = None,
    together: bool = False,
    **own: Any,
) -> Entry:
    return Entry(name or architecture, kind, partial(tiny, architecture, own), samples, plain, together=together)


def text(architecture: str, kind: Kind = "decoder", **own: Any) -> Entry:
    return entry(architecture, kind, texts, next_token, **own)


def encoder(architecture: str, **own: Any) -> Entry:
    return entry(architecture, "encoder", masked_texts, each_label, task="masked-lm", **own)


def seq2seq(architecture: str, **own: Any) -> Entry:
    return entry(architecture, "encoder-decoder", translations, translation, **own)


def vision(architecture: str, size: int = 32, **own: Any) -> Entry:
    return entry(architecture, "vision", pictures(size), each_label, **own)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

DECODERS = [
    text("gpt2"),
    text("gpt_neo", attention_types=[[["global", "local"], 2]], window_size=4),
    text("gpt_neox"),
    text("gptj", rotary_dim=4),
    text("gpt_bigcode"),
    text("openai-gpt"),
    text("codegen", rotary_dim=4),
    text("opt", ffn_dim=48, word_embed_proj_dim=32),
    entry("opt", "decoder", texts, next_token, name="opt-projected", ffn_dim=48, word_embed_proj_dim=16),
    text("bloom"),
    text("falcon"),
    text("llama"),
    entry("llama", "decoder", ragged_texts, next_token, name="llama-ragged"),
    entry("llama", "decoder", texts, next_token, name="llama-tied", tie_word_embeddings=True),
    text("mistral", sliding_window=4),
    text("qwen2"),
    text("qwen3", head_dim=8),
    text("gemma", head_dim=8),
    text("gemma2", head_dim=8, sliding_window=4),
    text("gemma3_text", head_dim=8, sliding_window=4),
    text("phi"),
    text("phi3"),
    text("starcoder2"),
    text("stablelm"),
    text("cohere"),
    text("cohere2", sliding_window=4),
    text("olmo"),
    text("olmo2"),
    text("granite"),
    text("mpt"),
    text("biogpt"),
    text("ctrl", dff=48),
    text("xglm", ffn_dim=48, attention_heads=4),
    text("persimmon"),
    text("glm", head_dim=8),
    text("nemotron"),
    text("smollm3"),
    text("helium", head_dim=8),
    text("ernie4_5", head_dim=8),
    text("modernbert-decoder", cls_token_id=1, sep_token_id=2, local_attention=4),
]
MIXTURES = [
    text("mixtral", "experts", num_local_experts=4),
    text("qwen2_moe", "experts", **EXPERTS, shared_expert_intermediate_size=24),
    text("qwen3_moe", "experts", **EXPERTS),
    text("olmoe", "experts", num_experts=4, num_experts_per_tok=2),
    text("granitemoe", "experts", num_local_experts=4),
    text("phimoe", "experts", num_local_experts=4),
    text("deepseek_v2", "experts", **DEEPSEEK),
    text("deepseek_v3", "experts", **DEEPSEEK),
    text("gpt_oss", "experts", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    text("minimax", "experts", num_local_experts=4, head_dim=8, block_size=4),
    text("jetmoe", "experts", num_local_experts=4, kv_channels=8, num_key_value_heads=4),
    text(
        "glm4_moe",
        "experts",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
]
STATE_SPACES = [
    text("mamba", "state-space", state_size=4, expand=2),
    text("mamba2", "state-space", state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4, expand=2),
    text("falcon_mamba", "state-space", state_size=4),
    text("rwkv", "state-space", context_length=32, attention_hidden_size=32),
    text("recurrent_gemma", "state-space", lru_width=32, attention_window_size=4, num_hidden_layers=3),
    text("jamba", "state-space", num_experts=2, mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False),
    text(
        "bamba",
        "state-space",
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    text("lfm2", "state-space", layer_types=["conv", "full_attention", "conv", "full_attention"]),
    text(
        "qwen3_next",
        "state-space",
        **EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=24,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    text(
        "falcon_h1",
        "state-space",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
]
ENCODERS = [
    encoder("bert"),
    encoder("roberta"),
    encoder("distilbert", dim=32, hidden_dim=48),
    encoder("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("electra", embedding_size=16),
    encoder("modernbert", local_attention=4, cls_token_id=1, sep_token_id=2),
    encoder("albert", embedding_size=16, num_hidden_groups=1),
    encoder("mobilebert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
    encoder("esm", mask_token_id=3, position_embedding_type="rotary", token_dropout=False),
    encoder("convbert", embedding_size=16),
    encoder("fnet"),
    encoder("nystromformer", num_landmarks=4, conv_kernel_size=3, segment_means_seq_len=LENGTH),
    encoder("squeezebert", embedding_size=32),
    encoder("longformer", attention_window=4),
    encoder("big_bird", attention_type="original_full"),
    encoder("rembert", input_embedding_size=16, output_embedding_size=16),
    encoder("mpnet"),
    encoder("roformer", embedding_size=32),
    encoder("megatron-bert"),
    encoder("ibert", together=True),
    encoder("layoutlm"),
    encoder("data2vec-text"),
]
ENCODER_DECODERS = [
    seq2seq("t5", **T5),
    seq2seq("mt5", **T5),
    seq2seq("umt5", **T5),
    seq2seq("longt5", **T5, local_radius=4),
    seq2seq(
        "switch_transformers",
        **T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=32,
    ),
    seq2seq("bart", **TWO_STACKS),
    seq2seq("mbart", **TWO_STACKS),
    seq2seq("pegasus", **TWO_STACKS),
    seq2seq("marian", **TWO_STACKS, decoder_vocab_size=VOCABULARY),
    seq2seq("plbart", **TWO_STACKS),
    seq2seq(
        "led", **TWO_STACKS, attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64
    ),
    seq2seq("m2m_100", **TWO_STACKS),
    seq2seq(
        "nllb-moe",
        **TWO_STACKS,
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=16,  # of all tokens of a forward
        together=True,
    ),
    seq2seq("blenderbot", **TWO_STACKS),
    seq2seq("blenderbot-small", **TWO_STACKS),
    seq2seq("bigbird_pegasus", **TWO_STACKS, attention_type="original_full"),
    seq2seq(
        "prophetnet",
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        decoder_start_token_id=2,
        task="seq2seq-lm",  # the loss of its class is another one
    ),
]
VISIONS = [
    vision("vit"),
    vision("swin", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, patch_size=4),
    vision("swinv2", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, patch_size=4),
    vision("beit"),
    entry("beit", "vision", pictures(), each_label, name="beit-relative", use_relative_position_bias=True),
    entry(
        "beit", "vision", pictures(), each_label, name="beit-shared-relative", use_shared_relative_position_bias=True
    ),
    vision("dinov2"),
    vision("vit_msn"),
    vision("data2vec-vision"),
    vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", together=True),
    vision("regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, together=True),
    vision("convnext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=4),
    vision("convnextv2", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=4),
    vision("mobilenet_v2", depth_multiplier=0.25, together=True),
    vision(
        "efficientnet", width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, depth_divisor=8, together=True
    ),
    vision("mobilevit", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], together=True),
    vision(
        "poolformer",
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    vision(
        "pvt",
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sequence_reduction_ratios=[2, 1],
        mlp_ratios=[2, 2],
        patch_sizes=[4, 2],
        strides=[4, 2],
    ),
    vision(
        "segformer",
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        mlp_ratios=[2, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
    ),
    vision("focalnet", embed_dim=8, depths=[2, 2], focal_levels=[1, 1], focal_windows=[3, 3], patch_size=4),
    vision(
        "cvt",
        embed_dim=[8, 16],
        depth=[1, 2],
        num_heads=[1, 2],
        patch_sizes=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[2, 1],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"],
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
        together=True,
    ),
    vision(
        "hiera",
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        query_stride=[2, 2],
        patch_size=[4, 4],
        patch_stride=[4, 4],
        patch_padding=[0, 0],
        image_size=[32, 32],
        masked_unit_size=[4, 4],
    ),
    vision("bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_groups=2),
    vision(
        "siglip",
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "vocab_size": 96,
        },
    ),
]

ARCHITECTURES = [*DECODERS, *MIXTURES, *STATE_SPACES, *ENCODERS, *ENCODER_DECODERS, *VISIONS]
