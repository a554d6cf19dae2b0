"""Models of transformers that are given as a callable: audio, several modalities, and losses of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.zoo.entry import (
    CLASSES,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Entry,
    Kind,
    each_label,
    inputs_of,
    texts,
)

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKEN = 3
CONVOLUTIONS = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
HEARING = {
    **TEXT,
    **CONVOLUTIONS,
    "num_labels": CLASSES,
    "classifier_proj_size": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}


def make(model: str, config: str, keys: dict[str, Any]) -> nn.Module:
    """The class `model` of transformers, of the configuration class `config`."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**keys))


def given(name: str, kind: Kind, model: str, config: str, keys: dict[str, Any], samples: Any, **own: Any) -> Entry:
    return Entry(name, kind, partial(factory, model, config, keys), samples, own.pop("plain", each_label), **own)


def factory(model: str, config: str, keys: dict[str, Any]) -> Callable[[], nn.Module]:
    return partial(make, model, config, keys)


# Samples --------------------------------------------------------------------------------------------------------------


def sounds() -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    return [
        {"input_values": torch.randn(256, generator=generator), "labels": number * 7 % CLASSES}
        for number in range(SAMPLES)
    ]


def spectra(key: str, *shape: int) -> Callable[[], list[Any]]:
    def samples() -> list[Any]:
        generator = torch.Generator().manual_seed(12)
        return [
            {key: torch.randn(shape, generator=generator), "labels": number * 7 % CLASSES} for number in range(SAMPLES)
        ]

    return samples


def speech(key: str, *shape: int) -> Callable[[], list[Any]]:
    """What is heard, what the decoder reads, and what it is to say."""

    def samples() -> list[Any]:
        generator = torch.Generator().manual_seed(13)
        found = []
        for number in range(SAMPLES):
            said = torch.randint(4, VOCABULARY, (9,), generator=generator)
            labels = said[1:].clone()
            labels[8 - number % 3 :] = -100
            heard = torch.randn(shape, generator=generator)
            found.append({key: heard, "decoder_input_ids": said[:-1], "labels": labels})
        return found

    return samples


def captions(images: int = 4, size: int = 16) -> Callable[[], list[Any]]:
    """Texts that begin with an image's places, their labels moved by one already."""

    def samples() -> list[Any]:
        generator = torch.Generator().manual_seed(14)
        found = []
        for sample in texts():
            tokens = torch.cat([torch.full((images,), IMAGE_TOKEN), sample["input_ids"]])
            labels = torch.cat([torch.full((images,), -100), sample["labels"]])
            labels = torch.cat([labels[1:], torch.tensor([-100])])
            picture = torch.randn(3, size, size, generator=generator)
            found.append({"input_ids": tokens, "pixel_values": picture, "labels": labels})
        return found

    return samples


def pairs_of_both() -> list[Any]:
    generator = torch.Generator().manual_seed(15)
    return [
        {"input_ids": sample["input_ids"], "pixel_values": torch.randn(3, 16, 16, generator=generator)}
        for sample in texts()
    ]


def questions() -> list[Any]:
    return [{**sample, "labels": number * 7 % CLASSES} for number, sample in enumerate(pairs_of_both())]


def statements() -> list[Any]:
    return [{"input_ids": s["input_ids"], "labels": n * 7 % CLASSES} for n, s in enumerate(texts())]


def marked() -> list[Any]:
    return [{"input_ids": s["input_ids"], "labels": s["input_ids"] % CLASSES} for s in texts()]


def spans() -> list[Any]:
    return [{"input_ids": s["input_ids"], "start": n % LENGTH, "end": n * 5 % LENGTH} for n, s in enumerate(texts())]


def series() -> list[Any]:
    generator = torch.Generator().manual_seed(16)
    return [
        {"past_values": torch.randn(16, 2, generator=generator), "labels": number * 7 % CLASSES}
        for number in range(SAMPLES)
    ]


def clips() -> list[Any]:
    generator = torch.Generator().manual_seed(17)
    return [
        {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": number * 7 % CLASSES}
        for number in range(SAMPLES)
    ]


def maps() -> list[Any]:
    generator = torch.Generator().manual_seed(18)
    return [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=generator),
            "labels": torch.randint(0, CLASSES, (8, 8), generator=generator),
        }
        for _ in range(SAMPLES)
    ]


# Losses of their own --------------------------------------------------------------------------------------------------


def contrast(output: Any, batch: Any) -> Tensor:
    """Each text's image among those of the batch, and the reverse."""
    logits = output.logits_per_text
    places = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, places) + functional.cross_entropy(logits.t(), places)) / 2


def plain_contrast(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits = model(**batch).logits_per_text
    places = torch.arange(len(logits))
    total = functional.cross_entropy(logits, places) + functional.cross_entropy(logits.t(), places)
    return total / 2 * len(logits), len(logits)


def span(output: Any, batch: Any) -> Tensor:
    ends = functional.cross_entropy(output.end_logits, batch["end"])
    return functional.cross_entropy(output.start_logits, batch["start"]) + ends


def span_total(model: nn.Module, batch: Any) -> Tensor:
    return span(model(batch["input_ids"]), batch) * len(batch["input_ids"])


def plain_span(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(input_ids=batch["input_ids"])
    starts = functional.cross_entropy(output.start_logits, batch["start"], reduction="sum")
    return starts + functional.cross_entropy(output.end_logits, batch["end"], reduction="sum"), len(batch["start"])


def dense(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output.logits, batch["labels"])


def plain_dense(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    loss = functional.cross_entropy(model(**inputs_of(batch)).logits, batch["labels"])
    return loss * len(batch["labels"]), len(batch["labels"])


def series_class(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output.prediction_logits, batch["labels"])


def plain_series(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(past_values=batch["past_values"])
    loss = functional.cross_entropy(output.prediction_logits, batch["labels"], reduction="sum")
    return loss, len(batch["labels"])


VIT_TEXT = {key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**VIT_TEXT, **QUIET, "num_hidden_layers": 4, "num_labels": CLASSES}
BOTH = {"text_config": VIT_TEXT, "vision_config": SIGHT, "projection_dim": 16}
WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}

OTHERS = [
    given("wav2vec2", "audio", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", HEARING, sounds),
    given("hubert", "audio", "HubertForSequenceClassification", "HubertConfig", HEARING, sounds),
    given("wavlm", "audio", "WavLMForSequenceClassification", "WavLMConfig", HEARING, sounds),
    given("unispeech", "audio", "UniSpeechForSequenceClassification", "UniSpeechConfig", HEARING, sounds),
    given("sew", "audio", "SEWForSequenceClassification", "SEWConfig", {**HEARING, "squeeze_factor": 2}, sounds),
    given(
        "audio-spectrogram",
        "audio",
        "ASTForAudioClassification",
        "ASTConfig",
        {**SIGHT, "num_labels": CLASSES, "max_length": 32, "num_mel_bins": 16, **QUIET},
        spectra("input_values", 32, 16),
    ),
    given(
        "whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, speech("input_features", 8, 32)
    ),
    given(
        "speech-to-text",
        "audio",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {**WHISPER, "input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 2, "max_source_positions": 64},
        speech("input_features", 32, 8),
    ),
    given(
        "llava",
        "multimodal",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGHT, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_layer": -1,
            "image_seq_length": 4,
        },
        captions(),
    ),
    given(
        "paligemma",
        "multimodal",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {**TEXT, "model_type": "gemma", "head_dim": 8},
            "vision_config": {
                **SIGHT,
                "model_type": "siglip_vision_model",
                "projection_dim": 32,
                "vision_use_head": False,
            },
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": 32,
        },
        captions(),
    ),
    given(
        "clip",
        "multimodal",
        "CLIPModel",
        "CLIPConfig",
        BOTH,
        pairs_of_both,
        plain=plain_contrast,
        loss=contrast,
        together=True,
    ),
    given(
        "siglip-both",
        "multimodal",
        "SiglipModel",
        "SiglipConfig",
        BOTH,
        pairs_of_both,
        plain=plain_contrast,
        loss=contrast,
        together=True,
    ),
    given(
        "blip-contrast",
        "multimodal",
        "BlipModel",
        "BlipConfig",
        {
            **BOTH,
            "text_config": {
                **VIT_TEXT,
                "encoder_hidden_size": 32,
                "attention_probs_dropout_prob": 0.0,
                "hidden_dropout_prob": 0.0,
            },
        },
        pairs_of_both,
        plain=plain_contrast,
        loss=contrast,
        together=True,
    ),
    given(
        "vilt",
        "multimodal",
        "ViltForQuestionAnswering",
        "ViltConfig",
        {**ENCODER, "image_size": 16, "patch_size": 8, "max_image_length": -1},
        questions,
    ),
    given(
        "vision-encoder-decoder",
        "multimodal",
        "VisionEncoderDecoderModel",
        "VisionEncoderDecoderConfig",
        {
            "encoder": {**SIGHT, **QUIET, "model_type": "vit"},
            "decoder": {**VIT_TEXT, **QUIET, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        },
        speech("pixel_values", 3, 16, 16),
    ),
    given("bert-sequences", "encoder", "BertForSequenceClassification", "BertConfig", ENCODER, statements),
    given("roberta-sequences", "encoder", "RobertaForSequenceClassification", "RobertaConfig", ENCODER, statements),
    given("bert-tokens", "encoder", "BertForTokenClassification", "BertConfig", ENCODER, marked),
    given(
        "bert-spans",
        "encoder",
        "BertForQuestionAnswering",
        "BertConfig",
        {**ENCODER, "num_labels": 2},
        spans,
        plain=plain_span,
        loss=tightfit.Objective(span_total, lambda batch: len(batch["input_ids"])),
    ),
    given(
        "llama-sequences",
        "decoder",
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**TEXT, "num_labels": CLASSES},
        statements,
    ),
    given(
        "patchtst",
        "custom",
        "PatchTSTForClassification",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "num_targets": CLASSES,
            "d_model": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
            "ffn_dim": 32,
            "use_cls_token": True,
            "attention_dropout": 0.0,
            "norm_type": "layernorm",
        },
        series,
        plain=plain_series,
        loss=series_class,
    ),
    given(
        "videomae",
        "vision",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        {**SIGHT, **QUIET, "num_labels": CLASSES, "num_frames": 4, "tubelet_size": 2},
        clips,
    ),
    given(
        "segformer-dense",
        "vision",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_labels": CLASSES,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "mlp_ratios": [2, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "decoder_hidden_size": 16,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
        },
        maps,
        plain=plain_dense,
        loss=dense,
        together=True,
    ),
]
