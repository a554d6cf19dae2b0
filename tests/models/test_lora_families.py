"""Adapters on models whose layers peft or the model's own code treats in another way, and peft's other adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tightfit
from tests import tiny
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.models import model_factory
from tightfit.models.lora import merge_adapters, target_names
from tightfit.models.nf4 import Nf4Linear
from tightfit.models.objective import TASKS
from tightfit.report.export import export

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:Model has .tie_word_embeddings:UserWarning",
)  # peft's
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DEEPSEEK = {
    **SIZES, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
FAMILIES = {"deepseek_v3": DEEPSEEK, "mamba": MAMBA, "falcon": SIZES}


def made(architecture: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(architecture, **sizes))
    return model


def make_job(architecture: str, sizes: dict[str, Any], **lora: Any) -> Job:
    content = tiny.content(steps=2)
    data = {"synthetic": "tokens", "sequence_length": 16, "samples": 16}
    model = {"architecture": architecture, **sizes, "lora": {"rank": 2, **lora}}
    return Job.parse({**content, "model": model, "data": data})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_named_layers_get_the_adapters_and_merge(architecture: str, tmp_path: Path) -> None:
    run = tightfit.build(make_job(architecture, FAMILIES[architecture]))
    names = target_names(made(architecture, FAMILIES[architecture]), "all-linear")
    adapted = [name for name, one in run.model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)]
    assert sorted(adapted) == sorted(names)
    list(tightfit.train(run))
    moved = {name for name, one in run.model.named_parameters() if ".lora_B." in name and one.any()}
    assert len(moved) == len(names)  # every adapter is trained
    tightfit.save(run, tmp_path / "checkpoints", 2)
    (tmp_path / "job.yaml").write_text(run.job.to_yaml())
    export(tmp_path, tmp_path / "merged", merge=True)
    tokens = torch.arange(8).unsqueeze(0)
    run.model.eval()
    with torch.no_grad():
        expected = run.model(input_ids=tokens).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "target", "said"),
    [
        ("deepseek_v3", "gate_proj", "peft adapts the experts of deepseek_v3"),
        ("mamba", "out_proj", "without calling the layers"),
    ],
)
def test_layers_that_get_no_adapter_are_refused(architecture: str, target: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        target_names(made(architecture, FAMILIES[architecture]), [target])


def test_layers_whose_weight_the_model_reads_stay_unquantized() -> None:
    model = model_factory(ModelSpec.parse({"architecture": "t5", **T5, "lora": {"rank": 2, "quantize": "nf4"}}))()
    quantized = [name for name, one in model.named_modules() if isinstance(one, Nf4Linear)]
    kinds = {name.removesuffix(".base_layer").rpartition(".")[2] for name in quantized}
    assert kinds == {"q", "k", "v", "o", "wi"}  # T5 reads the type of wo.weight
    tokens = torch.arange(8).unsqueeze(0)
    model(input_ids=tokens, labels=tokens).loss.backward()


class _Tied:
    value = False


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "architecture"}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=_Tied.value))


def _changed(model: nn.Module) -> Tensor:
    """Change all trained weights, and return the logits."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
        logits: Tensor = model.eval()(input_ids=torch.arange(8).unsqueeze(0)).logits
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm", "input_layernorm"]},
        {"trainable_token_indices": [1, 2, 3]},
    ],
    ids=str,
)
def test_all_parts_of_peft_s_models_are_merged(
    config: dict[str, Any], tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Tied, "value", tied)
    model = peft.get_peft_model(_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], **config))
    expected = _changed(model)
    merged: Any = merge_adapters(model)
    merged.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=torch.arange(8).unsqueeze(0)).logits, expected, rtol=1e-5, atol=1e-6)


def test_adapters_outside_of_layers_are_not_merged() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match="PREFIX_TUNING are no part of a layer's weights"):
        merge_adapters(peft.get_peft_model(_llama(), config))


def _own_job(make: Any) -> Job:
    content = tiny.content(steps=1)
    return Job.parse({**content, "data": {**content["data"], "vocabulary_size": 300}}).replace(
        model=make, loss=TASKS["causal-lm"]
    )


def _vera() -> nn.Module:
    return peft.get_peft_model(_llama(), peft.VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_shared_projections_are_saved(tmp_path: Path) -> None:
    run = tightfit.build(_own_job(_vera))
    list(tightfit.train(run))
    folder = tightfit.save(run, tmp_path, 1)
    loaded = peft.PeftModel.from_pretrained(_llama(), folder / "adapter").eval()
    tokens = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(loaded(input_ids=tokens).logits, run.model.eval()(input_ids=tokens).logits)


def _adalora() -> nn.Module:
    return peft.get_peft_model(_llama(), peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9))


def test_adapters_with_a_loss_of_their_own_are_refused() -> None:
    with pytest.raises(InputError, match="AdaLoRA, whose loss has a penalty"):
        tightfit.build(_own_job(_adalora))
