"""Imports the TrainingArguments of transformers (YAML or JSON), and the arguments of TRL that may
be in the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers import data_sources as data
from tightfit.importers import deepspeed
from tightfit.importers.adapters import (
    EIGHT_BITS,
    OTHER_BITS,
    combine_adapters,
    peft_targets,
)
from tightfit.importers.conversions import (
    FSDP_STRATEGIES,
    SPLIT,
    chosen,
    compiled,
    count,
    existing,
    flag,
    four_bits,
    lora_targets,
    module_names,
    number,
    offload_all,
    optimizer,
    positive,
    recompute_all,
    report_to,
    reshard,
    schedule,
    seed,
    switched_on,
    sync_each_batch,
    text,
    warmup,
    whole,
    wide,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless, objective, under
from tightfit.importers.reading import read_settings

PREFERENCES = "tightfit has no training on preferences or rewards (DPO, KTO, PPO, GRPO, ORPO)"
DISTILLATION = "tightfit has no distillation from a teacher; a loss of the job's own can have it"
_PREFERENCE_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco", "bco_pair", "sppo_hard", "aot", "aot_pair", "aot_unpaired",
    "apo_down", "apo_zero", "apo_zero_unpaired", "discopop", "sft", "sigmoid_norm", "kto", "simpo", "alphapo", "grpo", "bnpo",
    "dr_grpo", "dapo", "cispo", "sapo",
)  # fmt: skip
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


def _loss_type(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field. nll is the loss of tightfit, too. The
    losses of preferences and rewards, such as those of DPO, are refused."""
    words = value if isinstance(value, list) else [value]
    if {str(word) for word in words} <= {"nll", "chunked_nll"}:
        return Lacks("the same loss", is_lost=False)
    if any(str(word) in _PREFERENCE_LOSSES for word in words):
        return Lacks(PREFERENCES, is_refused=True)
    return Lacks("tightfit uses the model's own loss or the job's loss")


def _version(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field, because tightfit chooses how it
    shards, and uses neither version of FSDP."""
    return Lacks("tightfit shards by itself, neither with FSDP 1 nor 2", is_lost=False)


def _min_rate(value: Any) -> float:
    """Return the final learning rate, unchanged: a fraction of the learning rate."""
    return number(value)


def _metric(value: Any) -> str:
    """Return the name of the metric, without "eval_" before it."""
    return text(value).removeprefix("eval_")


SELECTION: tuple[Key, ...] = (
    Key(
        "load_best_model_at_end",
        "train.keep_best",
        switched_on,
        "keep_best",
        "true keeps the checkpoint of the best evaluation",
    ),
    Key("metric_for_best_model", "train.keep_best", _metric, "best_metric", "loss, or a metric of evaluate.metrics"),
    Key("greater_is_better", "train.keep_best", flag, "best_greater", "true is mode: max, false is mode: min"),
)

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

OWN_KEYS: tuple[Key, ...] = (
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
    *SELECTION,
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
    Key("accelerator_config.split_batches", "plan.micro_batch", switched_on, "split_batches", SPLIT),
    Key(
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        "plan.gradient_sync",
        sync_each_batch,
        "gradient_sync",
        "true is micro-batch, false is step",
    ),
    Key(
        "dataloader_drop_last",
        "",
        lambda v: Lacks("tightfit trains the last, shorter batch of the data, too", is_lost=flag(v)),
        "",
        "tightfit trains the last, shorter batch of the data, too",
    ),
    *needless(
        "tightfit's data loader always keeps its workers and its order of samples",
        "dataloader_persistent_workers",
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
    ),
    Key("split_batches", "plan.micro_batch", switched_on, "split_batches", SPLIT),
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
)
TRL_KEYS: tuple[Key, ...] = (  # of SFTConfig, ModelConfig and ScriptArguments
    Key("model_name_or_path", "model.from", text, "", "TRL's; a folder with config.json and safetensors files"),
    Key("dataset_name", "data.dataset", text, "", "TRL's; a folder, or a data set of the Hub"),
    Key("torch_dtype", "plan.precision", lambda value: wide(value), "weights", "TRL's; the type of the weights"),
    Key("dtype", "plan.precision", lambda value: wide(value), "weights", "TRL's; the type of the weights"),
    Key("max_seq_length", "data.sequence_length", whole, "", "TRL's"),
    Key("max_length", "data.sequence_length", whole, "", "TRL's"),
    Key("dataset_text_field", "data.field", text, "", "TRL's"),
    Key("dataset_config", "data.subset", text, "subset", "TRL's"),
    Key("dataset_config_name", "data.subset", text, "subset", "TRL's"),
    Key("dataset_train_split", "data.split", text, "split", "TRL's; train needs no field"),
    Key("dataset_streaming", "data.streaming", switched_on, "streaming", "TRL's"),
    *lacks("name such data in evaluate.data; without it, data.held_out is used", "dataset_test_split"),
    *lacks("name them with data.sources", "dataset_mixer", "dataset_mixer.*", "dataset_mixture", "dataset_splits"),
    Key(
        "packing",
        "data.packing",
        flag,
        "packing",
        "TRL's; true is separate: the texts of a sequence do not attend to one another; false is padded",
    ),
    Key(
        "packing_strategy",
        "data.packing",
        chosen({"bfd": "separate", "bfd_split": "separate", "bfd-requeue": "separate", "wrapped": "packed"}),
        "packing_strategy",
    ),
    *needless("the loss of padded sequences is the same", "padding_free"),
    *needless("tightfit evaluates as it trains", "eval_packing"),
    Key(
        "assistant_only_loss",
        "data.loss_on",
        flag,
        "assistant_only",
        "TRL's; true is response, with data.format: messages",
    ),
    Key(
        "completion_only_loss",
        "data.loss_on",
        flag,
        "completion_only",
        "TRL's; true is response, with data.format: prompt-response",
    ),
    Key("loss_type", "", _loss_type, "", "nll is the same loss; losses of preferences are refused"),
    Key("chat_template_path", "data.chat_template", text, "template_path", "TRL's; the file of a Jinja template"),
    Key("chat_template", "data.chat_template", text, "template_text", "the text of a Jinja template, as a new file"),
    *lacks("tightfit prepares all rows itself", "dataset_kwargs", "dataset_kwargs.*", "formatting_func"),
    Key("use_peft", "model.lora", flag, "use_peft", "TRL's; true trains adapters"),
    Key("lora_r", "model.lora.rank", whole, "lora_rank"),
    Key("lora_alpha", "model.lora.alpha", number, "lora_alpha"),
    Key("lora_dropout", "model.lora.dropout", number, "lora_dropout"),
    Key("lora_target_modules", "model.lora.targets", lora_targets, "lora_targets"),
    Key("use_dora", "model.lora.dora", switched_on, "lora_dora"),
    Key("use_rslora", "model.lora.alpha", switched_on, "lora_rslora", "alpha times the square root of the rank"),
    Key("lora_modules_to_save", "model.lora.modules_to_save", module_names, "lora_whole"),
    *lacks("tightfit adds adapters to linear layers only", "lora_target_parameters"),
    *needless("model.task is the task", "lora_task_type"),
    *lacks("give lora_r, lora_alpha and lora_target_modules", "peft_config", "peft_config.*", "lora_*"),
    Key("load_in_4bit", "model.lora.quantize", four_bits, "lora_quantize"),
    *lacks(EIGHT_BITS, "load_in_8bit"),
    Key(
        "bnb_4bit_quant_type",
        "model.lora.quantize",
        lambda v: Lacks("nf4 is the type of load_in_4bit", False) if v == "nf4" else Lacks(OTHER_BITS),
        "",
        "nf4; fp4 has no counterpart",
    ),
    *needless(
        "tightfit always quantizes the scales of nf4, too, and multiplies in the plan's precision",
        "use_bnb_nested_quant",
        "bnb_4bit_*",
        "bnb_*",
    ),
    *objective(PREFERENCES, "max_prompt_length", "max_completion_length", "num_generations", "reward_*"),
    *objective(PREFERENCES, "beta", "desirable_weight", "undesirable_weight", "rpo_alpha", "reference_free"),
    *objective(PREFERENCES, "ref_model_*", "sync_ref_model", "precompute_ref_log_probs", "center_rewards_coefficient"),
    *objective(PREFERENCES, "num_ppo_epochs", "kl_coef", "cliprange", "scale_rewards", "use_vllm"),
    *objective(DISTILLATION, "teacher_model_name_or_path"),
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
KEYS: tuple[Key, ...] = OWN_KEYS + TRL_KEYS
SFT_KEYS = (
    "packing",
    "packing_strategy",
    "padding_free",
    "eval_packing",
    "assistant_only_loss",
    "completion_only_loss",
    "chat_template_path",
    "dataset_text_field",
    "max_seq_length",
)  # by which a file for TRL's SFTTrainer is recognized
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
    """Return the content of the imported file with absolute paths of the model, the data and the chat
    template, if they exist. If it names a DeepSpeed or FSDP file that exists, the content of that
    file replaces the name.

    folder  the folder of the imported file
    """
    for name in ("model_name_or_path", "dataset_name", "chat_template_path"):
        if name in content:
            content = {**content, name: existing(content[name], folder)}
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


def _combine(draft: Draft) -> None:
    combine(draft)
    is_sft = any(row.key in SFT_KEYS for row in draft.rows)
    if is_sft:
        _defaults_of_sft(draft)
    _adapters(draft)
    _conversations(draft, is_sft)


def _defaults_of_sft(draft: Draft) -> None:
    """Replace the defaults of transformers by those of TRL's SFTConfig, where they differ."""
    defaulted = {row.key: row for row in draft.rows if row.outcome == "default"}
    if "learning_rate" in defaulted:
        draft.assume("learning_rate", 2e-5, "train.learning_rate", 2e-5)
    if "bf16" in defaulted and not draft.parts.get("fp16"):
        draft.parts["bf16"] = defaulted["bf16"].value = True
    if draft.value("gradient_checkpointing") is None and "plan.recompute" not in draft.fields:
        draft.assume("gradient_checkpointing", True, "plan.recompute", "full")
    if "data.sequence_length" not in draft.fields:
        draft.assume("max_length", 1024, "data.sequence_length", 1024)


def _adapters(draft: Draft) -> None:
    parts = draft.parts
    if parts.get("lora_quantize") and draft.value("load_in_8bit"):
        draft.contradict("load_in_4bit and load_in_8bit are both on, but weights have one type")
    if "lora_quantize" in parts and str(draft.value("bnb_4bit_quant_type") or "nf4") != "nf4":
        draft.settle("lora_quantize", "no counterpart", OTHER_BITS)
        parts.pop("lora_quantize")
    why_off = "" if parts.get("use_peft") else "use_peft is off"
    combine_adapters(
        draft, why_off, {"rank": ("lora_r", 16), "alpha": ("lora_alpha", 32), "dropout": ("lora_dropout", 0.05)}
    )
    if why_off:
        draft.settle("use_peft", "not needed", "it is off")
    elif "lora_targets" not in parts:
        draft.assume("lora_target_modules", None, "model.lora.targets", list(peft_targets(draft)), "peft's default")


def _conversations(draft: Draft, is_sft: bool) -> None:
    """Set the format, the template, the loss and the packing of TRL's data."""
    parts = draft.parts
    source = {"dataset": draft.fields.get("data.dataset")}
    lost = data.add_part(source, parts.get("subset"), parts.get("split")) if source["dataset"] else []
    draft.fields |= {f"data.{name}": value for name, value in source.items() if value and name not in lost}
    draft.settle("split", "not needed", "train is the default") if parts.get("split") == "train" else None
    if parts.get("streaming") and source["dataset"]:
        draft.fields["data.streaming"] = True
    kind = ""
    if parts.get("assistant_only") or _set_template(draft):
        kind = "messages"
    elif parts.get("completion_only"):
        kind = "prompt-response"
        draft.fields["data.fields"] = {"response": "completion"}
    if kind:
        draft.fields["data.format"] = kind
        _set_loss(draft, kind)
    else:
        draft.settle("assistant_only", "not needed", "it is off")
        draft.settle("completion_only", "not needed", "it is off: all tokens count, as in plain texts")
        if is_sft and draft.value("dataset_text_field") is None:
            draft.to_do.append(
                "if the rows have messages, set data.format: messages with data.loss_on: all; if they have prompt and completion, "
                "set data.format: prompt-response with data.fields: {response: completion}: TRL looks at the rows to know"
            )
    _set_packing(draft, is_sft, kind)


def _set_template(draft: Draft) -> bool:
    """Set data.chat_template. Return whether the file gives a template."""
    written, path = draft.parts.get("template_text"), draft.parts.get("template_path")
    if written and ("{" in written or written == "chatml"):
        data.set_template(draft, "template_text", written)
    elif written:
        draft.settle("template_text", "no counterpart", f"it is no Jinja template; {data.OTHER_TEMPLATE}")
    elif path:
        file = Path(path) / "chat_template.jinja" if Path(path).is_dir() else Path(path)
        if file.is_file() or file.suffix in (".jinja", ".j2"):
            data.set_template(draft, "template_path", str(file))
        else:
            draft.settle("template_path", "no counterpart", "the folder has no chat_template.jinja, or is not here")
            draft.to_do.append(f"chat_template_path is {path}: {data.OTHER_TEMPLATE}")
    return bool(written or path)


def _set_loss(draft: Draft, kind: str) -> None:
    part, other = ("assistant_only", "completion_only") if kind == "messages" else ("completion_only", "assistant_only")
    value = "response" if draft.parts.get(part) else "all"
    data.set_loss(draft, part, [{"format": kind}], value, "assistant_only_loss", False)
    draft.settle(other, "not needed", f"the rows are those of {kind}")


def _set_packing(draft: Draft, is_sft: bool, kind: str) -> None:
    parts = draft.parts
    if not parts.get("packing"):
        draft.settle("packing_strategy", "not needed", "packing is off")
        if is_sft:
            data.set_packing(draft, "packing", "padded", "packing", False)
        return
    value = parts.get("packing_strategy", "separate")
    if value == "packed" and kind:
        value = "separate"
        draft.remark("packing_strategy", "tightfit keeps conversations whole, and apart from one another")
    data.set_packing(draft, "packing", value, "packing", True)


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
    combine=_combine,
)
