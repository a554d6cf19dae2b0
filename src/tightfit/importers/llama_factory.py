"""Imports LLaMA-Factory's configuration (YAML): its own keys, and those of transformers'
TrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers import training_arguments as hf
from tightfit.importers.conversions import chosen, flag, number, packed, text, whole, wide
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless

_IMAGES = "tightfit trains language models on text alone"
_OWN: tuple[Key, ...] = (
    Key("model_name_or_path", "model.from", text, "", "a folder, or a hub id that must be downloaded"),
    Key(
        "train_from_scratch",
        "",
        lambda v: Lacks("model: {architecture: ...} starts from random weights", flag(v)),
        "",
        "model: {architecture: ...} starts from random weights",
    ),
    Key(
        "stage",
        "model.task",
        chosen({"sft": "causal-lm", "pt": "causal-lm"}, hf.PREFERENCES),
        "",
        "pt and sft are causal-lm; tightfit computes the loss over all tokens, also of a prompt",
    ),
    Key(
        "finetuning_type",
        "",
        chosen(
            {
                "full": Lacks("all weights are trained, as in tightfit", False),
                "freeze": Lacks("tightfit trains all weights"),
            },
            hf.LORA,
        ),
    ),
    Key("template", "", None, "", hf.CHAT),
    *lacks(hf.CHAT, "tool_format", "default_system", "enable_thinking", "preserve_thinking", "system_prompt"),
    Key(
        "dataset",
        "",
        None,
        "",
        "names in LLaMA-Factory's dataset_info.json: write the texts as JSON lines and name them in data.jsonl",
    ),
    *lacks(
        "name such data in evaluate.data; without it, the fraction data.held_out of the data is used",
        "eval_dataset",
        "eval_on_each_dataset",
    ),
    *needless("belongs to dataset_info.json", "dataset_dir", "media_dir"),
    Key("cutoff_len", "data.sequence_length", whole),
    Key("model_max_length", "", None, "", "data.sequence_length is the length", False),
    Key(
        "packing",
        "data.packing",
        packed,
        "",
        "true is packed; in a packed sequence, tokens attend to the texts before theirs",
    ),
    Key(
        "neat_packing",
        "",
        lambda v: Lacks("in tightfit's packed sequences, tokens attend to the texts before theirs", flag(v)),
        "",
        "in tightfit's packed sequences, tokens attend to the texts before theirs",
    ),
    Key(
        "val_size",
        "data.held_out",
        lambda v: number(v) if number(v) < 1 else Lacks("data.held_out is a share of the samples"),
        "",
        "a share of the samples",
    ),
    *lacks("tightfit takes all texts of its source", "max_samples", "mix_strategy", "interleave_probs"),
    *lacks(hf.MASKED, "train_on_prompt", "mask_history", "ignore_pad_token_for_loss", "learn_prompt_only"),
    *needless(
        "tightfit prepares its tokens in a cache of its own",
        "preprocessing_num_workers",
        "preprocessing_batch_size",
        "overwrite_cache",
        "tokenized_path",
        "streaming",
        "buffer_size",
        "data_shared_file_system",
        "cache_dir",
        "disable_shuffling",
        "eval_num_beams",
    ),
    *needless(
        hf.TOKENIZER,
        "use_fast_tokenizer",
        "resize_vocab",
        "split_special_tokens",
        "add_tokens",
        "add_special_tokens",
        "new_special_tokens_config",
        "init_special_tokens",
        "model_revision",
    ),
    *needless(
        "tightfit reads local folders and needs no token of a hub",
        "hf_hub_token",
        "ms_hub_token",
        "om_hub_token",
        "use_modelscope",
    ),
    *lacks(hf.CODE, "trust_remote_code"),
    *lacks("tightfit uses the positions of the model's config unchanged", "rope_scaling"),
    *needless(
        "the plan chooses the kernels",
        "flash_attn",
        "enable_liger_kernel",
        "use_unsloth",
        "use_v1_kernels",
        "low_cpu_mem_usage",
        "compute_dtype",
        "device_map",
    ),
    *lacks(
        "tightfit has no such change of a model",
        "shift_attn",
        "mixture_of_depths",
        "moe_aux_loss_coef",
        "use_llama_pro",
        "block_diag_attn",
    ),
    Key(
        "disable_gradient_checkpointing",
        "plan.recompute",
        lambda v: "none" if flag(v) else "full",
        "",
        "true is none, false is full",
    ),
    Key(
        "use_unsloth_gc",
        "",
        lambda v: Lacks("use plan.recompute: full with plan.offload: [activations]", flag(v)),
        "",
        "plan.recompute: full with plan.offload: [activations]",
    ),
    *needless("tightfit recomputes without reentrant autograd", "use_reentrant_gc"),
    *needless("norms and the loss compute in fp32 under autocast", "upcast_layernorm", "upcast_lmhead_output"),
    *needless(
        "only for inference and export",
        "infer_*",
        "use_cache",
        "use_kv_cache",
        "offload_folder",
        "export_*",
        "vllm_*",
        "sglang_*",
        "print_param_status",
    ),
    *needless(
        "only for generation",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "num_beams",
        "max_length",
        "max_new_tokens",
        "repetition_penalty",
        "length_penalty",
        "skip_special_tokens",
    ),
    Key(
        "pure_bf16",
        "plan.precision",
        lambda v: "bf16" if flag(v) else Lacks("it is off", False),
        "weights",
        "true is bf16-true",
    ),
    Key("infer_dtype", "", None, "", "only for inference", False),
    Key("torch_dtype", "plan.precision", lambda v: wide(v), "weights", "the type of the weights"),
    *lacks(
        hf.LORA,
        "adapter_name_or_path",
        "adapter_folder",
        "additional_target",
        "create_new_adapter",
        "lora_*",
        "loraplus_*",
        "use_rslora",
        "use_dora",
        "pissa_*",
        "oft_*",
        "module_dropout",
    ),
    *lacks("tightfit trains all weights", "freeze_*"),
    *lacks(hf.QUANTIZED, "quantization_*", "double_quantization"),
    *lacks(
        hf.PREFERENCES,
        "pref_*",
        "dpo_*",
        "kto_*",
        "simpo_*",
        "ppo_*",
        "ref_model",
        "ref_model_*",
        "reward_model",
        "reward_model_*",
        "ld_alpha",
    ),
    *lacks(
        "tightfit has no such optimizer",
        "use_galore",
        "galore_*",
        "use_apollo",
        "apollo_*",
        "use_badam",
        "badam_*",
        "use_adam_mini",
    ),
    Key(
        "use_muon",
        "train.optimizer",
        lambda v: "muon" if flag(v) else Lacks("it is off", False),
        "muon",
        "true is muon",
    ),
    *lacks(
        "tightfit uses the model's own loss or the job's loss",
        "use_dft_loss",
        "use_asft_loss",
        "asft_alpha",
        "use_eaft_loss",
        "eaft_alpha",
    ),
    *needless("tightfit has its own engine", "use_mca", "use_megatron_bridge", "use_hyper_parallel", "use_kt", "kt_*"),
    Key("fp8", "plan.float8", lambda v: "tensorwise" if flag(v) else "none", "", "true is tensorwise"),
    *needless("tightfit's float8 is torchao's", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    *needless(
        hf.LOGS,
        "plot_loss",
        "include_effective_tokens_per_second",
        "compute_accuracy",
        "enable_torch_profiler",
        "profile*",
        "use_swanlab",
        "swanlab_*",
    ),
    *lacks("train.early_stopping ends a training early; the import does not set it", "early_stopping_steps"),
    *lacks(_IMAGES, "image_*", "video_*", "audio_*", "crop_to_patches", "use_audio_in_video"),
    *needless(
        "tightfit starts and connects its processes",
        "ray_*",
        "master_addr",
        "master_port",
        "use_ray",
        "resources_per_worker",
        "resources_per_worker.*",
        "placement_strategy",
    ),
)
_NAMES = {key.name for key in _OWN}
KEYS: tuple[Key, ...] = _OWN + tuple(key for key in hf.KEYS if key.name not in _NAMES)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file with an absolute path of the model. If it names a
    DeepSpeed or FSDP file that exists, the content of that file replaces the name.

    folder  the folder of the imported file
    """
    return hf.prepare(content, folder)


def _combine(draft: Draft) -> None:
    hf.combine(draft)
    if draft.parts.get("muon"):
        draft.parts.pop("optimizer", None)
        draft.fields["train.optimizer"] = "muon"
    for row in draft.rows:
        if row.key == "dataset" and row.value:
            draft.to_do.append(
                f"data: write the texts of {row.value} as JSON lines, with the template, and name them in data.jsonl"
            )
        if row.key == "finetuning_type" and row.value not in ("full", "freeze"):
            draft.to_do.append(f"finetuning_type is {row.value}: {hf.LORA}; the plan is for training all weights")


IMPORTER = Importer(
    name="llama-factory",
    title="LLaMA-Factory",
    marks=("finetuning_type", "stage", "template", "cutoff_len", "dataset_dir"),
    keys=KEYS,
    defaults={
        **{name: value for name, value in hf.DEFAULTS.items() if name not in ("bf16", "fp16")},
        "finetuning_type": "lora",
        "stage": "sft",
        "cutoff_len": 2048,
    },
    auto="auto is filled in by the Trainer from its own arguments, which are in this file or have its defaults",
    prepare=_prepare,
    combine=_combine,
)
