"""Imports Axolotl's configuration (YAML)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers import data_sources as data
from tightfit.importers import deepspeed
from tightfit.importers import training_arguments as hf
from tightfit.importers.adapters import (
    EIGHT_BITS,
    NEW_ADAPTERS,
    OTHER_ADAPTERS,
    OTHER_BITS,
    SINGLE_TOKENS,
    WHOLE_ADAPTERS,
    combine_adapters,
    without_rank,
)
from tightfit.importers.axolotl_data import combine_data
from tightfit.importers.conversions import (
    SPLIT,
    ScheduleChoice,
    chosen,
    compiled,
    count,
    existing,
    flag,
    four_bits,
    lora_targets,
    module_names,
    number,
    optimizer,
    positive,
    schedule,
    seed,
    shuffled,
    switched_on,
    sync_each_batch,
    text,
    warmup,
    whole,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless, objective, under

_SPLICED = "tightfit packs texts one after another, in the order that train.seed gives"


def _bf16(value: Any) -> bool | str:
    """Return true, false or "full". true becomes bf16-mixed, and "full" becomes bf16-true. "auto"
    counts as true, because axolotl switches bf16 on for GPUs since Ampere."""
    word = str(value).lower()
    return word if word == "full" else True if word == "auto" else flag(value)


def _tf32(value: Any) -> bool | Lacks:
    """Return true or false: true asks for tf32 in the products that do not run in bf16 or fp16.
    "auto" sets no field (Lacks, with the reason), so the plan decides."""
    return Lacks("tightfit uses tf32 where the plan says so", False) if value == "auto" else flag(value)


def _recompute(value: Any) -> str | Lacks:
    """Return "full" (recompute every block) for true, and "none" for false. For values that also
    offload the activations ("offload", "offload_disk", "unsloth"), there is no counterpart (Lacks,
    with the reason)."""
    if str(value).lower() in ("offload", "offload_disk", "unsloth"):
        return Lacks("use plan.recompute: full with plan.offload: [activations]")
    return "full" if flag(value) else "none"


def _datasets(value: Any) -> list[dict[str, Any]]:
    """Return the list of data sets unchanged; each must be a mapping. A later step turns a single
    data set into data.jsonl, data.parquet, data.text or data.dataset, depending on its files, and
    several into data.sources. The types alpaca, chat_template and sharegpt set data.format, and
    completion is plain text; for other types, there is no counterpart."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("a list of data sets, each with a path")
    return value


def _share(value: Any) -> float | Lacks:
    """Return the fraction of the samples that is held out for evaluation, a number below 1; 0 holds
    out none. For 1 or more, a number of samples, there is no counterpart (Lacks, with the reason).
    """
    found = number(value)
    return found if found < 1 else Lacks("data.held_out is a share of the samples, not a number of them")


KEYS: tuple[Key, ...] = (
    Key("base_model", "model.from", text, reason="a folder, or a hub id that must be downloaded"),
    *needless(
        "config.json in the folder of model.from gives it",
        "model_type",
        "tokenizer_type",
        "base_model_config",
        "is_*_derived_model",
    ),
    *needless(
        hf.TOKENIZER,
        "tokenizer_use_fast",
        "tokenizer_legacy",
        "tokenizer_config",
        "processor_type",
        "revision_of_model",
    ),
    *needless(
        hf.TOKENIZER, "resize_token_embeddings_to_32x", "shrink_embeddings", "mean_resizing_embeddings", "tokenizer_*"
    ),
    *lacks(
        "tightfit uses tokenizers and embeddings unchanged",
        "special_tokens.*",
        "tokens",
        "added_tokens_overrides.*",
    ),
    *lacks(
        "tightfit uses the config in the model's folder unchanged",
        "overrides_of_model_config.*",
        "overrides_of_model_kwargs.*",
    ),
    *lacks(hf.CODE, "trust_remote_code"),
    Key("datasets", "data.dataset", _datasets, "datasets"),
    Key("pretraining_dataset", "data.dataset", _datasets, "datasets"),
    *lacks(
        "name such data in evaluate.data; without it, the fraction data.held_out of the data is used", "test_datasets"
    ),
    Key("val_set_size", "data.held_out", _share),
    Key("sequence_len", "data.sequence_length", whole),
    Key(
        "sample_packing",
        "data.packing",
        flag,
        "packing",
        "true is separate: the texts of a sequence do not attend to one another; false is padded",
    ),
    Key(
        "pretrain_multipack_attn",
        "data.packing",
        flag,
        "packing_apart",
        "false is packed, if pretraining_dataset is packed; true is separate",
    ),
    Key("pretraining_sample_concatenation", "data.packing", flag, "concatenation", "true is packed"),
    *needless("tightfit evaluates as it trains", "eval_sample_packing", "eval_sequence_len"),
    *needless(
        _SPLICED,
        "sample_packing_*",
        "pad_to_sequence_len",
        "multipack_real_batches",
        "pretrain_multipack_*",
        "streaming_multipack_*",
    ),
    *needless(
        "tightfit prepares its tokens in a cache of its own",
        "dataset_prepared_path",
        "dataset_processes",
        "dataset_num_proc",
    ),
    *needless(
        "tightfit prepares its tokens in a cache of its own",
        "dataset_keep_in_memory",
        "skip_prepare_dataset",
        "num_dataset_shards_to_save",
        "streaming",
        "is_preprocess",
        "preprocess_iterable",
    ),
    Key("shuffle_merged_datasets", "", shuffled, "", "true is what tightfit does"),
    *needless("tightfit draws samples in random order", "shuffle_before_merging_datasets"),
    *lacks(
        "tightfit takes all texts of its source",
        "dataset_shard_*",
        "dataset_exact_deduplication",
        "min_sample_len",
        "excess_length_strategy",
        "max_prompt_len",
    ),
    Key("chat_template", "data.chat_template", text, "template", "tokenizer_default is tokenizer; chatml is chatml"),
    Key("chat_template_jinja", "data.chat_template", text, "template_text", "the path of the file, or a new file"),
    *lacks(data.ONE_TEMPLATE, "chat_template_kwargs", "chat_template_kwargs.*", "default_system_message"),
    *lacks("the end of an answer counts in the loss, as the template writes it", "eot_tokens"),
    Key("train_on_inputs", "data.loss_on", flag, "train_on_inputs", "true is all, false is response"),
    *lacks("tightfit draws samples in random order, not by length", "group_by_length", "curriculum_sampling"),
    Key("micro_batch_size", "plan.micro_batch", whole, "micro_batch", "also a factor of train.batch"),
    Key("gradient_accumulation_steps", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key(
        "batch_size", "train.batch", whole, "device_batch", "micro_batch_size x gradient_accumulation_steps of a device"
    ),
    Key("eval_batch_size", "", None, "", hf.EVALUATION, False),
    Key("auto_find_batch_size", "", None, "", "tightfit predicts which micro-batch fits", False),
    Key("num_epochs", "train.epochs", positive, "epochs"),
    Key("max_steps", "train.steps", lambda v: count(v), "steps", "the same number"),
    Key("learning_rate", "train.learning_rate", number),
    Key("weight_decay", "train.weight_decay", number),
    Key("optimizer", "train.optimizer", optimizer, "optimizer"),
    Key("adam_beta1", "train.betas", number, "beta1", "the first of the two"),
    Key("adam_beta2", "train.betas", number, "beta2", "the second of the two"),
    Key("adam_epsilon", "train.epsilon", number),
    Key("adam_eps", "train.epsilon", number),
    *lacks(
        "settings of an optimizer that tightfit does not have",
        "optim_args",
        "optim_args.*",
        "optim_target_modules",
        "adam_beta3",
        "adam_epsilon2",
        "dion_*",
        "qgalore_*",
        "torchdistx_path",
    ),
    *lacks(
        "learning rates of single weights are not translated; set train.groups in the job",
        "embedding_lr",
        "embedding_lr_scale",
        "lr_groups",
    ),
    Key("max_grad_norm", "train.clip", positive),
    Key("lr_scheduler", "train.schedule", schedule, "schedule"),
    Key("warmup_steps", "train.warmup", warmup, "warmup"),
    Key("warmup_ratio", "train.warmup", number, "warmup_ratio", "this share of train.steps, rounded up"),
    Key("cosine_min_lr_ratio", "train.final_learning_rate", number),
    *lacks(
        "tightfit's schedules have no such setting",
        "lr_scheduler_kwargs",
        "lr_scheduler_kwargs.*",
        "lr_quadratic_warmup",
        "cosine_constant_lr_ratio",
        "lr_div_factor",
        "jagged_restart_*",
        "eta_min",
        "relora",
        "relora_*",
    ),
    Key("bf16", "plan.precision", _bf16, "axolotl_bf16", takes_auto=True),
    Key("fp16", "plan.precision", flag, "fp16", "true is fp16-mixed"),
    Key(
        "bfloat16",
        "plan.precision",
        lambda v: "bf16" if flag(v) else Lacks("it is off", False),
        "weights",
        "true is bf16-true",
    ),
    Key(
        "float16",
        "plan.precision",
        lambda v: "fp16" if flag(v) else Lacks("it is off", False),
        "weights",
        "true is fp16-true",
    ),
    Key(
        "float32",
        "plan.precision",
        lambda v: Lacks("fp32 follows where no other type is on", False),
        "",
        "fp32 follows where no other type is on",
    ),
    Key("tf32", "plan.precision", _tf32, "tf32", takes_auto=True),
    Key("fp8", "plan.float8", lambda v: "tensorwise" if flag(v) else "none", "", "true is tensorwise"),
    Key("fp8_enable_fsdp_float8_all_gather", "", None, "", "tightfit gathers weights in 16 bits", False),
    Key("gradient_checkpointing", "plan.recompute", _recompute),
    *needless(
        "tightfit recomputes without reentrant autograd",
        "gradient_checkpointing_kwargs",
        "gradient_checkpointing_kwargs.*",
    ),
    Key(
        "selective_checkpointing",
        "plan.recompute",
        lambda v: "selective",
        "",
        "selective, which saves expensive products",
    ),
    *needless("recompute: selective has its own choice", "selective_checkpointing.*"),
    Key(
        "activation_offloading",
        "plan.offload",
        lambda v: ("activations",) if str(v).lower() not in ("false", "none") else (),
        "offload_activations",
        "true adds activations",
    ),
    *lacks("plan.offload moves states, gradients, parameters and activations", "layer_offloading"),
    Key("torch_compile", "plan.compile", compiled, takes_auto=False),
    *needless(
        "tightfit compiles with torch's default backend",
        "torch_compile_backend",
        "torch_compile_options",
        "deepcompile",
    ),
    next(key for key in hf.KEYS if key.name == "torch_compile_mode"),
    *needless(
        "the plan chooses the kernels; PyTorch's attention uses its flash kernel if possible",
        "flash_attention",
        "flash_attn_*",
        "sdp_attention",
        "xformers_attention",
        "flex_attention",
        "flex_attn_*",
        "eager_attention",
        "sage_attention",
        "s2_attention",
        "attn_implementation",
        "fused_attn_kernel",
        "sdpa_varlen",
        "liger_*",
        "use_kernels",
        "lora_*_kernel",
    ),
    *needless("plan.chunked_loss computes the loss in chunks", "cut_cross_entropy", "chunked_cross_entropy*"),
    *needless(
        "the plan chooses the kernels",
        "experts_implementation",
        "flash_optimum",
        "use_scattermoe",
        "use_sonicmoe",
        "use_dsv4_kernels",
        "use_glm_dsa_kernels",
        "llama4_linearized_experts",
        "gemma4_hybrid_attn_impl",
    ),
    *lacks("plugins are code of axolotl's", "plugins", "diffusion.*", "llmcompressor.*"),
    *lacks(
        "tightfit uses the config in the model's folder unchanged", "model_config.*", "num_labels", "cls_model_config"
    ),
    *lacks("tightfit has no expert parallelism", "expert_parallel_*"),
    *lacks("tightfit uses the model's own loss or the job's loss", "use_eaft", "eaft_*", "center_rewards_coefficient"),
    *needless("the length is data.sequence_length", "max_packed_sequence_len", "total_num_tokens"),
    *lacks("tightfit does not cut MLPs into tiles", "tiled_mlp", "tiled_mlp_*"),
    *lacks("tightfit adds no noise to embeddings", "neftune_noise_alpha", "noisy_embedding_alpha"),
    Key(
        "adapter",
        "model.lora",
        chosen({"lora": "lora", "qlora": "qlora", "none": Lacks("it is off", False)}, OTHER_ADAPTERS),
        "adapter",
        "lora; qlora with load_in_4bit",
    ),
    Key("lora_r", "model.lora.rank", whole, "lora_rank"),
    Key("lora_alpha", "model.lora.alpha", number, "lora_alpha"),
    Key("lora_dropout", "model.lora.dropout", number, "lora_dropout"),
    Key("lora_target_linear", "model.lora.targets", switched_on, "lora_all_linear", "true is all-linear"),
    Key("lora_target_modules", "model.lora.targets", lora_targets, "lora_targets"),
    Key("peft_use_dora", "model.lora.dora", switched_on, "lora_dora"),
    Key("peft_use_rslora", "model.lora.alpha", switched_on, "lora_rslora", "alpha times the square root of the rank"),
    Key("load_in_4bit", "model.lora.quantize", four_bits, "lora_quantize"),
    Key("load_in_8bit", "", None, "", EIGHT_BITS),
    Key("loraplus_lr_ratio", "train.groups", positive, "lora_plus", "the matrices B get this multiple of the rate"),
    *needless("the learning rate of adapters of embeddings, which tightfit does not have", "loraplus_lr_embedding"),
    *lacks(NEW_ADAPTERS, "lora_model_dir"),
    Key("lora_modules_to_save", "model.lora.modules_to_save", module_names, "lora_whole"),
    *lacks(SINGLE_TOKENS, "peft_trainable_token_indices"),
    *lacks(WHOLE_ADAPTERS, "lora_rank_pattern", "lora_alpha_pattern", "lora_rank_pattern.*", "lora_alpha_pattern.*"),
    *lacks(
        "name the layers, or patterns such as '*.layers.0.*', in model.lora.targets",
        "peft_layers_to_transform",
        "peft_layers_pattern",
        "lora_exclude_modules",
    ),
    *lacks("tightfit adds adapters to linear layers only", "lora_target_parameters"),
    Key(
        "peft_init_lora_weights",
        "",
        chosen({True: Lacks("as in tightfit", False), "true": Lacks("as in tightfit", False)}, OTHER_ADAPTERS),
        "",
        "true is tightfit's start, too; " + OTHER_ADAPTERS,
    ),
    *lacks(OTHER_ADAPTERS, "peft.*", "peft_*", "loftq_config", "lisa_*", "lora_*"),
    *needless(
        "peft decides it by the type of the layer, and plan.precision gives the type of the weights",
        "lora_fan_in_fan_out",
        "peft_autocast_adapter_dtype",
    ),
    *needless("tightfit export --merge merges adapters", "merge_lora", "merge_method", "lora_on_cpu"),
    *needless("tightfit shards 4-bit weights as all others", "qlora_sharded_model_loading"),
    Key(
        "bnb_config_kwargs.bnb_4bit_quant_type",
        "model.lora.quantize",
        lambda v: Lacks("nf4 is the type of load_in_4bit", False) if v == "nf4" else Lacks(OTHER_BITS),
        "",
        "nf4; fp4 has no counterpart",
    ),
    *needless(
        "tightfit always quantizes the scales of nf4, too, and multiplies in the plan's precision",
        "bnb_config_kwargs.*",
    ),
    *lacks(
        OTHER_BITS,
        "gptq",
        "gptq_*",
        "use_onebitllms",
        "model_quantization_config",
        "model_quantization_config_kwargs.*",
        "bnb_config_kwargs",
        "qat.*",
        "quantization.*",
        "quantize_moe_experts",
    ),
    *lacks(
        "tightfit trains all weights",
        "unfrozen_parameters",
        "freeze_mm_modules",
        "fix_untrained_tokens",
        "reinit_weights",
    ),
    *objective(hf.PREFERENCES, "rl", "reward_model", "process_reward_model"),
    *needless(
        "only with rl, which the file does not have",
        "rl_beta",
        "trl.*",
        "dpo_*",
        "orpo_*",
        "simpo_*",
        "cpo_*",
        "kto_*",
        "vllm.*",
        "ebft.*",
    ),
    Key(
        "save_strategy",
        "train.checkpoint_every",
        lambda v: str(v).lower(),
        "save_strategy",
        "no, steps or epoch; with steps, the number counts",
    ),
    Key("save_steps", "train.checkpoint_every", number, "save_steps", "below 1, this share of train.steps"),
    Key("saves_per_epoch", "", None, "", "train.checkpoint_every is a number of steps", True),
    Key("save_total_limit", "train.keep_checkpoints", count),
    *needless(hf.SAVED, "save_only_model", "save_safetensors", "save_first_step"),
    Key(
        "eval_strategy",
        "train.evaluate_every",
        lambda v: str(v).lower(),
        "eval_strategy",
        "no, steps or epoch; with steps, the number counts",
    ),
    Key("eval_steps", "train.evaluate_every", number, "eval_steps", "below 1, this share of train.steps"),
    Key("evaluation_strategy", "train.evaluate_every", lambda v: str(v).lower(), "eval_strategy", "no, steps or epoch"),
    Key("evals_per_epoch", "", None, "", "train.evaluate_every is a number of steps", True),
    *needless(
        hf.EVALUATION,
        "do_causal_lm_eval",
        "eval_causal_lm_metrics",
        "eval_table_size",
        "eval_max_new_tokens",
        "do_bench_eval",
        "bench_*",
    ),
    *hf.SELECTION,
    Key(
        "early_stopping_patience",
        "train.early_stopping",
        count,
        "patience",
        "evaluations without an improvement; the metric is that of metric_for_best_model",
    ),
    *lacks("tightfit ends a training early by train.early_stopping alone", "loss_watchdog_*"),
    *needless(
        "tightfit train --resume continues from tightfit's own checkpoints",
        "resume_from_checkpoint",
        "auto_resume_from_checkpoints",
    ),
    *needless("tightfit train --out names the run's folder", "output_dir"),
    Key(
        "use_tensorboard",
        "",
        None,
        "",
        "tightfit writes TensorBoard's files unless train.trackers says otherwise",
        False,
    ),
    Key(
        "wandb_project",
        "train.trackers",
        lambda v: ["tensorboard", "wandb"] if v else Lacks("it is off", False),
        "",
        "adds wandb",
    ),
    Key("use_mlflow", "", None, "", "add mlflow to train.trackers", False),
    *needless(
        "names of a tracker; tightfit's are the job's name",
        "wandb_*",
        "use_wandb",
        "mlflow_*",
        "hf_mlflow_*",
        "comet_*",
        "use_comet",
        "trackio_*",
        "swanlab_*",
        "use_swanlab",
        "use_trackio",
        "gradio_*",
    ),
    *needless(
        hf.LOGS,
        "logging_steps",
        "profiler_steps",
        "profiler_steps_start",
        "include_*",
        "debug",
        "strict",
        "use_otel_metrics",
        "otel_*",
        "generate_samples",
        "generation_*",
        "num_generation_samples",
    ),
    *needless(hf.HUB, "hub_*", "push_dataset_to_hub", "hf_use_auth_token"),
    Key("dataloader_num_workers", "plan.loader_workers", whole),
    Key("dataloader_prefetch_factor", "plan.prefetch", count),
    Key("dataloader_pin_memory", "plan.pin_memory", flag),
    Key("accelerator_config.split_batches", "plan.micro_batch", switched_on, "split_batches", SPLIT),
    Key(
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        "plan.gradient_sync",
        sync_each_batch,
        "gradient_sync",
        "true is micro-batch, false is step",
    ),
    *needless(
        "tightfit's loader keeps its order of samples",
        "dataloader_drop_last",
        "remove_unused_columns",
        "accelerator_config",
        "accelerator_config.*",
    ),
    Key("seed", "train.seed", seed),
    *needless(
        "tightfit takes the devices of the machine and connects its processes",
        "device",
        "device_map",
        "local_rank",
        "ddp",
        "ddp_*",
        "max_memory",
        "use_ray",
        "ray_*",
        "resources_per_worker.*",
    ),
    Key("world_size", "plan.dp_shard", count, "devices", "all devices"),
    Key(
        "gpu_memory_limit",
        "limits.memory",
        lambda v: v if isinstance(v, str) else f"{whole(v)}GiB",
        "",
        "a number is of GiB",
    ),
    *needless(
        "plan.allocator decides how memory is freed",
        "gc_steps",
        "gc_collect_steps",
        "torch_empty_cache_steps",
    ),
    *needless("tightfit reads weights one by one", "low_cpu_mem_usage", "experimental_skip_move_to_device"),
    Key(
        "deepspeed", "", None, "", "the file was not found; put it in the folder of this file, or import it separately"
    ),
    *under("deepspeed", deepspeed.KEYS),
    Key("fsdp", "plan.zero", hf.fsdp, "zero", "full_shard is zero 3, shard_grad_op zero 2"),
    *under("fsdp_config", hf.FSDP_KEYS),
    Key("fsdp_version", "", None, "", "tightfit shards by itself, neither with FSDP 1 nor 2", False),
    *needless("tightfit has one checkpoint format", "fsdp_final_state_dict_type"),
    *needless("norms compute in fp32 under autocast", "fp32_norms", "fp32_norm_classes"),
    Key("dp_shard_size", "plan.dp_shard", whole, "dp_shard"),
    Key("dp_replicate_size", "plan.dp_replicate", whole, "dp_replicate"),
    Key("tensor_parallel_size", "plan.tp", whole, "tp"),
    Key("context_parallel_size", "plan.cp", whole, "cp"),
    Key("sequence_parallel_degree", "plan.cp", whole, "cp"),
    *needless("tightfit's context parallelism always uses ring attention", "heads_k_stride", "ring_attn_func"),
    *lacks(
        "tightfit has no processors of images in language models", "image_*", "processor_kwargs.*", "role_boundaries"
    ),
)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file with `datasets` as a list, and with absolute paths of
    the model and the data sets that exist. If it names a DeepSpeed or FSDP file that exists, the
    content of that file replaces the name.

    folder  the folder of the imported file
    """
    content = hf.prepare(content, folder)
    prepared = dict(content)
    for name in ("datasets", "pretraining_dataset"):
        if isinstance(content.get(name), str):
            prepared[name] = [{"path": content[name], "type": "pretrain"}]
        elif isinstance(content.get(name), dict):
            prepared[name] = [content[name]]
    for name in ("base_model", "chat_template_jinja"):
        if name in prepared:
            prepared[name] = existing(prepared[name], folder)
    for name in ("datasets", "pretraining_dataset"):
        if isinstance(prepared.get(name), list):
            prepared[name] = [_whole_paths(one, folder) for one in prepared[name]]
    return prepared


def _whole_paths(one: Any, folder: Path) -> Any:
    """Return a copy of a data set's mapping in which the paths that exist are absolute. Anything
    but a mapping is returned unchanged.

    folder  the folder of the imported file, where relative paths start
    """
    if not isinstance(one, dict):
        return one
    return {
        name: existing(v, folder) if name in ("path", "data_files", "chat_template_jinja") else v
        for name, v in one.items()
    }


def _adapters(draft: Draft) -> None:
    parts = draft.parts
    kind = parts.get("adapter")
    if parts.get("lora_all_linear"):
        if "lora_targets" in parts:
            draft.settle("lora_targets", "not needed", "lora_target_linear names all linear layers")
        parts["lora_targets"] = "all-linear"
    why_off = "" if kind else f"adapter is {draft.value('adapter') or 'not given'}"
    if kind == "qlora" and "lora_quantize" not in parts:
        draft.contradict("adapter is qlora, but load_in_4bit is off")
    if kind == "qlora" and draft.value("load_in_8bit"):
        draft.contradict("adapter is qlora, but load_in_8bit is on")
    if kind and draft.value("unfrozen_parameters"):
        draft.contradict(f"adapter is {kind}, but unfrozen_parameters trains weights of the model")
    combine_adapters(draft, why_off, {"dropout": ("lora_dropout", 0.0)})
    if kind:
        without_rank(draft, "lora_r")
    else:
        draft.settle("lora_all_linear", "not needed", f"no adapters are trained: {why_off}")
    if kind and "lora_targets" not in parts:
        draft.to_do.append("set model.lora.targets: the file has neither lora_target_linear nor lora_target_modules")


def _combine(draft: Draft) -> None:
    parts = draft.parts
    combine_data(draft)
    _adapters(draft)
    hf.combine(draft)
    sharded = any(row.key.startswith(("fsdp_config.", "fsdp_version")) for row in draft.rows)
    if sharded or parts.get("dp_shard", 1) > 1:
        draft.imply("zero", (3, False), "fsdp_version")  # FSDP reshards after forward if nothing is said
    bf16 = parts.get("axolotl_bf16")
    is_default = "axolotl_bf16" in draft.defaulted
    if bf16 == "full":
        draft.imply("weights", "bf16", "axolotl_bf16")
    elif bf16 and is_default and (parts.get("fp16") or parts.get("weights")):
        draft.settle("axolotl_bf16", "not needed", "another type is given")
    elif bf16 is not None:
        draft.imply("bf16", bf16, "axolotl_bf16")
        if bf16:
            draft.remark(
                "axolotl_bf16", "weights are kept in fp32; without FSDP and DeepSpeed axolotl keeps them in bf16"
            )
    if "device_batch" in parts and parts.get("micro_batch"):
        if parts["device_batch"] % parts["micro_batch"]:
            draft.contradict(
                f"batch_size {parts['device_batch']} is not a multiple of micro_batch_size {parts['micro_batch']}"
            )
        elif "accumulation" in draft.defaulted or "accumulation" not in parts:
            parts["accumulation"] = parts["device_batch"] // parts["micro_batch"]
        else:
            draft.contradict("batch_size and gradient_accumulation_steps are both given, and axolotl takes one of them")
    schedule = parts.get("schedule")
    if (
        "train.final_learning_rate" in draft.fields
        and isinstance(schedule, ScheduleChoice)
        and schedule.name != "cosine"
    ):
        draft.settle("train.final_learning_rate", "not needed", "axolotl reads it for a cosine schedule only")
        del draft.fields["train.final_learning_rate"]
    if "warmup" not in parts and "warmup_ratio" not in parts:
        steps = parts.get("steps")
        if steps:
            draft.fields["train.warmup"] = min(int(0.03 * steps), 100)
        else:
            draft.to_do.append("set train.warmup: without a number axolotl warms up for 3 % of the steps, at most 100")


IMPORTER = Importer(
    name="axolotl",
    title="axolotl",
    marks=("base_model", "micro_batch_size", "sequence_len", "sample_packing"),
    keys=KEYS,
    defaults={
        "gradient_accumulation_steps": 1,
        "micro_batch_size": 1,
        "num_epochs": 1.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "max_grad_norm": 1.0,
        "sequence_len": 512,
        "bf16": "auto",
        "seed": 42,
    },
    auto="auto lets axolotl look at the GPU; for bf16 it is on since Ampere",
    prepare=_prepare,
    combine=_combine,
)
