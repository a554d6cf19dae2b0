"""Imports the TrainingArguments of transformers (YAML or JSON), and the arguments of TRL that may
be in the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers import deepspeed
from tightfit.importers.conversions import (
    FSDP_STRATEGIES,
    chosen,
    compiled,
    count,
    existing,
    flag,
    number,
    offload_all,
    optimizer,
    packed,
    positive,
    recompute_all,
    report_to,
    reshard,
    schedule,
    seed,
    text,
    warmup,
    whole,
    wide,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless, under
from tightfit.importers.reading import read_settings

LORA = "adapters are not translated; add them to the job, such as model.lora: {rank: 16}, with quantize: nf4 for QLoRA"
CHAT = "prompts are not translated; set data.format (prompt-response, messages, alpaca or sharegpt) in the job"
PREFERENCES = "tightfit has no training on preferences or rewards (DPO, KTO, PPO, GRPO, ORPO)"
QUANTIZED = "tightfit quantizes the weights itself: for QLoRA, add model.lora: {quantize: nf4} to the job"
MASKED = "tightfit computes the loss over all tokens of a text"
TOKENIZER = "tightfit uses the tokenizer unchanged"
HUB = "tightfit does not upload"
LOGS = "only changes what is printed and logged; tightfit logs every step in metrics.jsonl"
SAVED = "tightfit's checkpoints always hold all that --resume needs"
EVALUATION = "tightfit evaluates in the plan's micro-batches; evaluate.metrics names metrics beside the loss"
DDP = "tightfit's gradient buckets have no such setting"
CODE = "tightfit runs no code of the hub"


def _steps(value: Any) -> int | Lacks:
    """Return the number of steps. For 0 or less (usually -1), the field is left out (Lacks, with
    the reason), and num_train_epochs decides the length."""
    found = whole(value)
    return found if found > 0 else Lacks("the epochs end the training", is_lost=False)


def _epochs(value: Any) -> float | Lacks:
    """Return the number of epochs. 0 or less sets no field (Lacks, with the reason)."""
    return positive(value)


def _warmup(value: Any) -> int | float:
    """Return the length of the warm-up. A number between 0 and 1 is a fraction of all steps, which
    a later step turns into a number of steps, rounded up. Any other number is a number of steps."""
    return warmup(value)


def _strategy(value: Any) -> str:
    """Return when to save or evaluate, in lower case: "no", "steps", "epoch" or "best". With
    "steps", another key gives the number of steps. Any other value is an error (ValueError)."""
    word = "no" if value is False else str(value).lower()
    if word not in ("no", "steps", "epoch", "best"):
        raise ValueError("no, steps or epoch")
    return word


def fsdp(value: Any) -> tuple[int, bool] | Lacks:
    """Return (ZeRO stage, whether the model is also replicated over nodes) for a value of `fsdp`.

    "full_shard" and True give stage 3, "shard_grad_op" gives stage 2. The hybrid strategies, such
    as "hybrid_shard", also replicate the model. Returns Lacks if the value switches FSDP off, such
    as "" or False. Raises ValueError for any other value.
    """
    words = value if isinstance(value, list) else str(value).lower().split()
    if value is True or str(value).lower() == "true":
        return 3, False
    found = [word for word in map(str, words) if word in FSDP_STRATEGIES]
    if not found and set(map(str, words)) <= {"", "false", "offload", "auto_wrap"}:
        return Lacks("FSDP is off", is_lost=False)
    if len(found) != 1:
        raise ValueError("full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or no_shard")
    return FSDP_STRATEGIES[found[0]]


def _version(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field, because tightfit chooses how it
    shards, and uses neither version of FSDP."""
    return Lacks("tightfit shards by itself, neither with FSDP 1 nor 2", is_lost=False)


def _min_rate(value: Any) -> float:
    """Return the final learning rate, unchanged: a fraction of the learning rate."""
    return number(value)


FSDP_NAMES: tuple[Key, ...] = (
    Key("sharding_strategy", "plan.zero", lambda value: reshard(value), "zero", reshard.__doc__ or ""),
    Key("reshard_after_forward", "plan.zero", reshard, "zero"),
    Key("offload_params", "plan.offload", offload_all, "offload_all"),
    Key("activation_checkpointing", "plan.recompute", recompute_all),
    Key("version", "", _version),
    *needless(
        "tightfit finds a model's blocks by itself; model.blocks names them where it does not",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "min_num_params",
        "ignored_modules",
        "ignored_params",
        "custom_sharded_layers",
    ),
    *needless(
        "tightfit gathers parameters ahead of their use, and creates them sharded",
        "backward_prefetch",
        "backward_prefetch_policy",
        "forward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
        "sync_module_states",
        "cpu_ram_efficient_loading",
        "cpu_offload_pin_memory",
        "mixed_precision_policy",
    ),
    *needless(
        "tightfit has one checkpoint format, which any number of devices can load",
        "state_dict_type",
        "final_state_dict_type",
    ),
    *needless("for XLA devices, on which tightfit does not train", "xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"),
)
FSDP_KEYS = FSDP_NAMES + tuple(
    Key(f"fsdp_{key.name}", key.field, key.convert, key.part, key.reason, key.is_lost) for key in FSDP_NAMES
)

KEYS: tuple[Key, ...] = (
    Key("model_name_or_path", "model.from", text, "", "TRL's; a folder with config.json and safetensors files"),
    Key("dataset_name", "data.dataset", text, "", "TRL's; a folder, or a data set of the Hub"),
    Key("torch_dtype", "plan.precision", lambda value: wide(value), "weights", "TRL's; the type of the weights"),
    Key("dtype", "plan.precision", lambda value: wide(value), "weights", "TRL's; the type of the weights"),
    Key("per_device_train_batch_size", "plan.micro_batch", whole, "micro_batch", "also a factor of train.batch"),
    Key("per_gpu_train_batch_size", "plan.micro_batch", whole, "micro_batch", "also a factor of train.batch"),
    Key("gradient_accumulation_steps", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key("num_train_epochs", "train.epochs", _epochs, "epochs"),
    Key("max_steps", "train.steps", _steps, "steps"),
    Key("learning_rate", "train.learning_rate", number),
    Key("lr_scheduler_type", "train.schedule", schedule, "schedule"),
    Key("warmup_steps", "train.warmup", _warmup, "warmup"),
    Key("warmup_ratio", "train.warmup", number, "warmup_ratio", "this share of train.steps, rounded up"),
    Key(
        "lr_scheduler_kwargs.min_lr", "train.final_learning_rate", number, "final_rate", "divided by the learning rate"
    ),
    Key("lr_scheduler_kwargs.min_lr_rate", "train.final_learning_rate", _min_rate),
    Key("lr_scheduler_kwargs.num_decay_steps", "train.decay", whole, "decay_steps", "divided by train.steps"),
    Key("lr_scheduler_kwargs.min_lr_ratio", "train.final_learning_rate", _min_rate),
    *lacks("tightfit has no counterpart of this schedule's setting", "lr_scheduler_kwargs", "lr_scheduler_kwargs.*"),
    Key("optim", "train.optimizer", optimizer, "optimizer"),
    Key(
        "adafactor",
        "",
        lambda value: Lacks("write optim: adafactor", flag(value)),
        "",
        "the old form of optim: adafactor",
    ),
    Key("weight_decay", "train.weight_decay", number),
    Key("adam_beta1", "train.betas", number, "beta1", "the first of the two"),
    Key("adam_beta2", "train.betas", number, "beta2", "the second of the two"),
    Key("adam_epsilon", "train.epsilon", number),
    Key("max_grad_norm", "train.clip", positive),
    *lacks("settings of an optimizer that tightfit does not have", "optim_args", "optim_target_modules"),
    Key("bf16", "plan.precision", flag, "bf16", "true is bf16-mixed: weights in fp32, autocast"),
    Key("fp16", "plan.precision", flag, "fp16", "true is fp16-mixed with a dynamic loss scale"),
    Key("tf32", "plan.precision", flag, "tf32", "tf32, if neither bf16 nor fp16 is on"),
    *needless("tightfit's autocast is PyTorch's", "fp16_opt_level", "half_precision_backend", "fp16_backend"),
    *needless("evaluation has the plan's precision", "bf16_full_eval", "fp16_full_eval"),
    Key("gradient_checkpointing", "plan.recompute", recompute_all),
    Key("activation_checkpointing", "plan.recompute", recompute_all),
    *needless(
        "tightfit recomputes without reentrant autograd",
        "gradient_checkpointing_kwargs",
        "gradient_checkpointing_kwargs.*",
        "activation_checkpointing_kwargs",
        "activation_checkpointing_kwargs.*",
    ),
    Key(
        "activation_offloading",
        "plan.offload",
        lambda v: ("activations",) if flag(v) else (),
        "offload_activations",
        "true adds activations",
    ),
    Key("torch_compile", "plan.compile", compiled),
    Key(
        "torch_compile_mode",
        "plan.compile_mode",
        chosen(
            {
                "default": "default",
                "reduce-overhead": "reduce-overhead",
                "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
            },
            "tightfit has max-autotune-no-cudagraphs and reduce-overhead",
        ),
    ),
    *needless(
        "tightfit compiles with torch's default backend", "torch_compile_backend", "torchdynamo", "jit_mode_eval"
    ),
    Key(
        "use_liger_kernel",
        "plan.chunked_loss",
        lambda v: 1024 if flag(v) else Lacks("it is off", False),
        "",
        "Liger's fused loss is chunked_loss: 1024; its other kernels have no counterpart",
    ),
    *needless("the plan chooses the kernels", "liger_kernel_config", "attn_implementation", "use_liger"),
    Key("use_cache", "", None, "", "tightfit trains without a KV cache", False),
    *lacks("tightfit adds no noise to embeddings", "neftune_noise_alpha"),
    Key(
        "label_smoothing_factor",
        "",
        lambda v: Lacks("tightfit has no label smoothing; give the job a loss", number(v) > 0),
        "",
        "tightfit has no label smoothing: a loss of the job's own can have it",
    ),
    Key("auto_find_batch_size", "", None, "", "tightfit predicts which micro-batch fits", False),
    *needless("plan.allocator decides how memory is freed", "torch_empty_cache_steps"),
    Key(
        "average_tokens_across_devices",
        "",
        lambda v: Lacks("tightfit always divides by the tokens of all devices", False),
        "",
        "tightfit always divides by the tokens of all devices",
    ),
    Key("seed", "train.seed", seed),
    Key("data_seed", "", None, "", "train.seed orders the samples", False),
    *lacks("tightfit cannot request deterministic kernels", "full_determinism"),
    Key("save_strategy", "train.checkpoint_every", _strategy, "save_strategy"),
    Key("save_steps", "train.checkpoint_every", number, "save_steps", "below 1, this share of train.steps"),
    Key("save_total_limit", "train.keep_checkpoints", count),
    *needless(
        SAVED, "save_only_model", "save_safetensors", "save_on_each_node", "save_on_interrupt", "enable_jit_checkpoint"
    ),
    Key(
        "resume_from_checkpoint",
        "",
        None,
        "",
        "tightfit train --resume continues from tightfit's own checkpoints",
        False,
    ),
    *needless("given with --resume", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    Key("eval_strategy", "train.evaluate_every", _strategy, "eval_strategy"),
    Key("evaluation_strategy", "train.evaluate_every", _strategy, "eval_strategy"),
    Key("eval_steps", "train.evaluate_every", number, "eval_steps", "below 1, this share of train.steps"),
    *needless(
        EVALUATION,
        "per_device_eval_batch_size",
        "per_gpu_eval_batch_size",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_on_start",
        "eval_on_end",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "include_for_metrics",
        "include_inputs_for_metrics",
        "batch_eval_metrics",
        "prediction_loss_only",
        "do_eval",
        "do_predict",
        "label_names",
        "predict_with_generate",
        "generation_max_length",
        "generation_num_beams",
        "generation_config",
    ),
    *lacks(
        "train.keep_best keeps the best checkpoint; the import does not set it",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    Key("do_train", "", None, "", "tightfit train trains", False),
    Key("output_dir", "", None, "", "tightfit train --out names the run's folder", False),
    *needless("tightfit refuses a folder that holds another run", "overwrite_output_dir"),
    Key("report_to", "train.trackers", report_to),
    *needless("names of a tracker; tightfit's are the job's name", "run_name", "project", "logging_dir", "trackio_*"),
    *needless(
        LOGS,
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "log_on_each_node",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "include_num_input_tokens_seen",
        "include_tokens_per_second",
        "skip_memory_metrics",
        "debug",
        "past_index",
        "mp_parameters",
    ),
    *needless(HUB, "push_to_hub", "hub_*", "push_to_hub_*"),
    Key("dataloader_num_workers", "plan.loader_workers", whole),
    Key("dataloader_prefetch_factor", "plan.prefetch", count),
    Key("dataloader_pin_memory", "plan.pin_memory", flag),
    *needless(
        "tightfit's data loader always keeps its workers and its order of samples",
        "dataloader_persistent_workers",
        "dataloader_drop_last",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "length_column_name",
        "accelerator_config",
        "accelerator_config.*",
    ),
    *lacks("tightfit draws samples in random order, not by length", "group_by_length", "sortish_sampler"),
    Key(
        "train_sampling_strategy",
        "",
        chosen({"random": Lacks("as in tightfit", False)}, "tightfit draws samples in random order, not by length"),
    ),
    Key("use_cpu", "", None, "", "tightfit takes the devices of the machine", False),
    *needless("tightfit takes the devices of the machine", "no_cuda", "use_mps_device", "place_model_on_device"),
    *needless(
        "tightfit starts and connects its processes (--nproc, --timeout, --interface)",
        "local_rank",
        "ddp_backend",
        "ddp_timeout",
        "tpu_num_cores",
        "tpu_metrics_debug",
        "ray_scope",
    ),
    *needless(
        DDP,
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "split_batches",
    ),
    Key(
        "fsdp", "plan.zero", fsdp, "zero", "full_shard is zero 3, shard_grad_op zero 2; the word offload in it is lost"
    ),
    *under("fsdp_config", FSDP_KEYS),
    Key(
        "fsdp_config",
        "",
        None,
        "",
        "the file was not found; put it in the folder of this file, or import it separately",
    ),
    *needless("tightfit finds a model's blocks by itself", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
    Key("parallelism_config", "", None, "", "name its sizes: dp_shard_size, dp_replicate_size, tp_size, cp_size"),
    Key("parallelism_config.dp_shard_size", "plan.dp_shard", whole, "dp_shard"),
    Key("parallelism_config.dp_replicate_size", "plan.dp_replicate", whole, "dp_replicate"),
    Key("parallelism_config.tp_size", "plan.tp", whole, "tp"),
    Key("parallelism_config.cp_size", "plan.cp", whole, "cp"),
    *under("deepspeed", deepspeed.KEYS),
    Key(
        "deepspeed", "", None, "", "the file was not found; put it in the folder of this file, or import it separately"
    ),
    # TRL's SFTConfig, ModelConfig and ScriptArguments
    Key("max_seq_length", "data.sequence_length", whole, "", "TRL's"),
    Key("max_length", "data.sequence_length", whole, "", "TRL's"),
    Key("dataset_text_field", "data.field", text, "", "TRL's"),
    Key("packing", "data.packing", packed, "", "TRL's; in a packed sequence, tokens attend to the texts before theirs"),
    *lacks("tightfit can only pack texts one after another", "packing_strategy", "padding_free", "eval_packing"),
    *lacks(MASKED, "assistant_only_loss", "completion_only_loss", "loss_type"),
    *lacks(CHAT, "chat_template", "chat_template_path", "dataset_kwargs", "dataset_kwargs.*"),
    *lacks(LORA, "use_peft", "lora_*", "use_rslora", "use_dora", "peft_config", "peft_config.*"),
    *lacks(QUANTIZED, "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_*"),
    *lacks(PREFERENCES, "beta", "max_prompt_length", "max_completion_length", "num_generations", "reward_*"),
    *lacks(
        "name them with data.sources, data.subset, data.split and data.streaming",
        "dataset_mixer",
        "dataset_mixer.*",
        "dataset_mixture",
        "dataset_config",
        "dataset_config_name",
        "dataset_train_split",
        "dataset_test_split",
        "dataset_splits",
        "dataset_streaming",
    ),
    *needless(
        TOKENIZER,
        "eos_token",
        "pad_token",
        "pad_to_multiple_of",
        "model_revision",
        "dataset_num_proc",
        "dataset_batch_size",
    ),
    *lacks(CODE, "trust_remote_code"),
)
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "optim": "adamw_torch",
    "bf16": False,
    "fp16": False,
    "seed": 42,
}


def read_file(content: dict[str, Any], folder: Path, *names: str) -> dict[str, Any]:
    """Return a copy of the content in which names of files are replaced by the content of these
    files. A name is kept if the file is not found.

    folder  the folder of the imported file, where relative paths start
    names   the keys whose value may be the name of a file
    """
    for name in names:
        value = content.get(name)
        if isinstance(value, str):
            for start in (folder, Path.cwd()):
                if (start / value).is_file():
                    content = {**content, name: read_settings(start / value)}
                    break
    return content


def prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file with an absolute path of the model, if that exists.
    If it names a DeepSpeed or FSDP file that exists, the content of that file replaces the name.

    folder  the folder of the imported file
    """
    if "model_name_or_path" in content:
        content = {**content, "model_name_or_path": existing(content["model_name_or_path"], folder)}
    return read_file(content, folder, "deepspeed", "fsdp_config")


def combine(draft: Draft) -> None:
    """Set the fields that depend on several keys of transformers and DeepSpeed. Adds a
    contradiction if both fsdp and deepspeed shard the model."""
    deepspeed.combine_deepspeed(draft)
    words = next((str(row.value).lower() for row in draft.rows if row.key == "fsdp"), "")
    if "offload" in words:
        draft.parts.setdefault("offload_all", ("states", "gradients", "parameters"))
        draft.remark("zero", "the word offload adds states, gradients and parameters to plan.offload")
    shards = [row.key for row in draft.rows if row.field and row.key in ("fsdp", "deepspeed.zero_optimization.stage")]
    if len(shards) == 2:
        draft.contradict("fsdp and deepspeed are both given, but a run shards its model in one way")
    for name in ("deepspeed", "fsdp_config"):
        for row in draft.rows:
            if row.key == name and isinstance(row.value, str) and row.value:
                draft.parts["unread_sharding"] = True
                draft.to_do.append(
                    f"{name} names {row.value}, which was not found; import it, or put it in the folder of the imported file"
                )


IMPORTER = Importer(
    name="transformers",
    title="transformers TrainingArguments",
    marks=(
        "per_device_train_batch_size",
        "num_train_epochs",
        "output_dir",
        "lr_scheduler_type",
        "gradient_checkpointing",
        "optim",
    ),
    keys=KEYS,
    defaults=DEFAULTS,
    auto="auto is filled in by the Trainer from its own arguments, which are in this file or have its defaults",
    prepare=prepare,
    combine=combine,
)
