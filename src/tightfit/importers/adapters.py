"""Sets model.lora, the low-rank adapters of a job, from the keys of another tool.

Source  rank-stabilized LoRA: Kalajdzievski 2023, arXiv:2312.03732; LoRA+: Hayou et al. 2024,
        arXiv:2402.12354; peft's default targets: `peft.utils.constants`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tightfit.importers.conversions import EMBEDDINGS, NO_EMBEDDINGS
from tightfit.importers.mapping import Draft
from tightfit.importers.reading import read_settings

SINGLE_TOKENS = "tightfit trains all of an embedding (model.lora.modules_to_save), or nothing of it"
NEW_ADAPTERS = "tightfit begins with new adapters; merge older ones into the model first"
OTHER_ADAPTERS = "tightfit's adapters are LoRA and DoRA, which start with no change of the model"
EIGHT_BITS = "tightfit stores frozen weights in 4 bits (model.lora.quantize: nf4), not in 8"
OTHER_BITS = "tightfit quantizes weights to nf4 alone (model.lora.quantize)"
WHOLE_ADAPTERS = "model.lora has one rank and one alpha, for all layers that model.lora.targets names"

_PARTS = ("rank", "alpha", "dropout", "targets", "whole", "dora", "rslora", "quantize", "plus")
_SWITCHES = ("dora", "rslora", "quantize", "plus")  # parts that ask for something that needs adapters
_Q_AND_V = ("q_proj", "v_proj")
PEFT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "llama": _Q_AND_V,
    "mistral": _Q_AND_V,
    "mixtral": _Q_AND_V,
    "qwen2": _Q_AND_V,
    "qwen3": _Q_AND_V,
    "gemma": _Q_AND_V,
    "gemma2": _Q_AND_V,
    "gemma3_text": _Q_AND_V,
    "opt": _Q_AND_V,
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",),
    "falcon": ("query_key_value",),
    "bloom": ("query_key_value",),
}  # by transformers' model type: the layers that get adapters if peft's target_modules is not set


def combine_adapters(draft: Draft, why_off: str, defaults: Mapping[str, tuple[str, float]]) -> None:
    """Set the fields of model.lora from the parts lora_rank, lora_alpha and so on.

    why_off   why no adapters are trained, such as "use_peft is off"; empty if adapters are trained
    defaults  the tool's keys and defaults of rank, alpha and dropout, as {"rank": ("lora_r", 16)};
              a name is missing if the tool has no default for it

    Adds a contradiction if the file asks for something that needs adapters, but has none.
    """
    if why_off:
        _without_adapters(draft, why_off)
        return
    parts, fields = draft.parts, draft.fields
    for name in ("rank", "alpha", "dropout"):
        if f"lora_{name}" in parts:
            fields[f"model.lora.{name}"] = parts[f"lora_{name}"]
        elif name in defaults:
            key, value = defaults[name]
            draft.assume(key, value, f"model.lora.{name}", value)
    if "lora_targets" in parts:
        fields["model.lora.targets"] = parts["lora_targets"]
        asked = draft.value(draft.giver("lora_targets"))
        lost = [name for name in EMBEDDINGS if isinstance(asked, list) and name in asked]
        if lost:
            draft.remark("lora_targets", f"without {', '.join(lost)}: {NO_EMBEDDINGS}")
    if "lora_whole" in parts:
        fields["model.lora.modules_to_save"] = parts["lora_whole"]
    if "lora_dora" in parts:
        fields["model.lora.dora"] = True
    _scale(draft)
    _quantize(draft)
    _faster_b(draft)


def _without_adapters(draft: Draft, why_off: str) -> None:
    for name in _PARTS:
        part = f"lora_{name}"
        if part not in draft.parts:
            continue
        if name in _SWITCHES:
            draft.contradict(f"{draft.giver(part)} needs adapters, but {why_off}")
            draft.settle(part, "contradiction", "see the contradictions")
        else:
            draft.settle(part, "not needed", f"no adapters are trained: {why_off}")


def _scale(draft: Draft) -> None:
    """Multiply alpha by the square root of the rank for rank-stabilized LoRA, which scales adapters
    by alpha / sqrt(rank) instead of alpha / rank."""
    rank, alpha = draft.fields.get("model.lora.rank"), draft.fields.get("model.lora.alpha")
    if "lora_rslora" not in draft.parts:
        return
    if rank and alpha and rank > 0:
        draft.fields["model.lora.alpha"] = alpha * math.sqrt(rank)
        note = f"alpha {alpha:g} x sqrt({rank}), because adapters are scaled by alpha / sqrt(rank)"
        draft.remark("lora_rslora", note)
    else:
        draft.settle("lora_rslora", "no counterpart", "multiply model.lora.alpha by the square root of the rank")


def _quantize(draft: Draft) -> None:
    if "lora_quantize" not in draft.parts:
        return
    if draft.fields.get("model.lora.dora"):
        draft.settle("lora_quantize", "no counterpart", "tightfit's DoRA needs the full weights")
        return
    draft.fields["model.lora.quantize"] = draft.parts["lora_quantize"]


def _faster_b(draft: Draft) -> None:
    """Give the second matrix of each adapter (B) a learning rate of its own, as LoRA+ does."""
    times = draft.parts.get("lora_plus")
    rate = draft.fields.get("train.learning_rate")
    if times is None:
        return
    if not rate:
        draft.settle("lora_plus", "no counterpart", "a multiple of the learning rate, which the file does not have")
        return
    names = ["*.lora_B.*", *(["*.lora_magnitude_vector.*"] if draft.fields.get("model.lora.dora") else [])]
    draft.fields["train.groups"] = [{"match": name, "learning_rate": rate * times} for name in names]


def peft_targets(draft: Draft) -> tuple[str, ...]:
    """Return the layers that get adapters if no targets are given, by peft's default for the model.
    If the model's config.json is not on this machine, or its type is unknown, return q_proj and
    v_proj, and add a sentence to the to-do list."""
    folder = Path(str(draft.fields.get("model.from", "")))
    kind = ""
    if (folder / "config.json").is_file():
        kind = str(read_settings(folder / "config.json").get("model_type", ""))
    if kind not in PEFT_TARGETS:
        draft.to_do.append(
            "compare model.lora.targets with the model's layers: without targets peft chooses them by the type of the model, "
            "which is not known here; q_proj and v_proj are those of llama, mistral, qwen and gemma"
        )
    return PEFT_TARGETS.get(kind, _Q_AND_V)


def without_rank(draft: Draft, key: str) -> None:
    """Add a sentence to the to-do list if the file has adapters without a rank, which the tool does
    not accept."""
    if "model.lora.rank" not in draft.fields:
        draft.to_do.append(f"set model.lora.rank and model.lora.alpha: the file has no {key}")
