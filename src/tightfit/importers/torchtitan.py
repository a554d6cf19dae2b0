"""Imports torchtitan's configuration (TOML)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.importers.conversions import (
    ScheduleChoice,
    chosen,
    count,
    existing,
    flag,
    number,
    offload_all,
    optimizer,
    positive,
    text,
    whole,
    wide,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless

PRESETS = {
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "8B"): "qwen3-8b",
}
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zero-bubble",
    "interleavedzerobubble": "zero-bubble",
    "dualpipev": "zero-bubble",
}
_OWN_LAYOUT = "tightfit splits the blocks evenly, or by plan.split"
_LOG = "only changes what is printed and logged; tightfit logs every step in metrics.jsonl"
_QUANT = "tightfit's float8 is chosen by plan.float8, for the blocks' linear layers"


def _batch(value: Any) -> int | Lacks:
    """Return the number of samples of a step on all devices. For -1, which means local_batch_size x
    data ranks, the field is left out (Lacks, with the reason): it is computed from these two."""
    found = whole(value)
    return found if found > 0 else Lacks("it follows from local_batch_size and the data ranks", is_lost=False)


def _data(value: Any) -> str | Lacks:
    """Return the hub id "allenai/c4" for "c4". Any other name is a data set of torchtitan's own:
    there is no counterpart (Lacks, with the reason)."""
    return "allenai/c4" if value == "c4" else Lacks(f"{value} is a data set of torchtitan's own")


def _shard(value: Any) -> int:
    """Return the number of ranks over which the parameters are sharded, unchanged. -1 means all
    ranks that the other degrees of parallelism leave."""
    return whole(value)


def _mode(value: Any) -> str | Lacks:
    """Return the mode of activation checkpointing: "none", "selective" or "full". For
    "memory_budget", there is no counterpart (Lacks, with the reason). Any other mode is an error
    (ValueError)."""
    word = str(value).lower()
    if word == "memory_budget":
        return Lacks("tightfit has none, selective and full; search chooses by memory")
    if word not in ("none", "selective", "full"):
        raise ValueError("none, selective, full or memory_budget")
    return word


def _pipeline(value: Any) -> str | Lacks:
    """Return tightfit's name of a pipeline schedule: "1f1b" for "1F1B", "gpipe" for "GPipe",
    "interleaved" for "Interleaved1F1B", and "zero-bubble" for "ZBVZeroBubble",
    "InterleavedZeroBubble" and "DualPipeV". For any other schedule, there is no counterpart (Lacks,
    with the reason)."""
    return SCHEDULES.get(str(value).lower()) or Lacks(f"tightfit has no schedule {value}")


def _converters(value: Any) -> str | Lacks:
    """Return "tensorwise" if the only converter is float8; if the file also names a float8 recipe,
    the recipe decides instead. An empty list sets no field (Lacks, with the reason). For other
    converters, there is no counterpart (Lacks, with the reason)."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    if not names:
        return Lacks("there are none", is_lost=False)
    other = [name for name in names if "float8" not in str(name)]
    if other:
        return Lacks(f"tightfit has no converter {', '.join(map(str, other))}")
    return "tensorwise"


def _recipe(value: Any) -> str:
    """Return "rowwise" if the recipe's name begins with "rowwise", else "tensorwise"."""
    return "rowwise" if str(value).startswith("rowwise") else "tensorwise"


def _decay(value: Any) -> str | Lacks:
    """Return "linear" or "cosine", the shape in which the learning rate decays until the end of the
    training. If the file also has a decay_ratio, the schedule becomes warmup-stable-decay. For any
    other shape, there is no counterpart (Lacks, with the reason)."""
    word = str(value).lower()
    return word if word in ("linear", "cosine") else Lacks(f"tightfit has no decay {value}")


def _reshard(value: Any) -> str:
    """Return "default", "always" or "never": whether the gathered parameters are freed after
    forward. "always" frees them (ZeRO stage 3) and "never" keeps them until backward (stage 2).
    "default" is "never" in a pipeline and "always" otherwise. Upper case is accepted; any other
    value raises ValueError."""
    word = str(value).lower()
    if word not in ("default", "always", "never"):
        raise ValueError("default, always or never")
    return word


_DEGREE = "the same number"
KEYS: tuple[Key, ...] = (
    Key("model.name", "model.preset", text, "name", "with its flavor, a preset that starts from random weights"),
    Key("model.flavor", "model.preset", text, "flavor", "llama3 8B, 70B and 405B, qwen3 8B"),
    Key("model.hf_assets_path", "data.tokenizer", text, "tokenizer", "the folder with tokenizer.json"),
    Key("model.tokenizer_path", "data.tokenizer", text, "tokenizer", "the folder with tokenizer.json"),
    Key("model.converters", "plan.float8", _converters, "converters"),
    *needless(
        "a preset has the model's own norm",
        "model.norm_type",
        "model.print_after_conversion",
        "model.use_flex_attn",
        "model.attn_mask_type",
    ),
    Key("optimizer.name", "train.optimizer", optimizer, "optimizer", "AdamW is adamw; Adam has no counterpart"),
    Key("optimizer.lr", "train.learning_rate", number),
    Key("optimizer.beta1", "train.betas", number, "beta1", "the first of the two"),
    Key("optimizer.beta2", "train.betas", number, "beta2", "the second of the two"),
    Key("optimizer.eps", "train.epsilon", number),
    Key("optimizer.weight_decay", "train.weight_decay", number),
    Key(
        "optimizer.implementation",
        "plan.fused_optimizer",
        chosen({"fused": True, "fused_opt_states_bf16": True, "foreach": False, "for-loop": False}),
    ),
    Key("optimizer.fused", "plan.fused_optimizer", flag),
    Key("optimizer.early_step_in_backward", "plan.update_in_backward", flag),
    Key("lr_scheduler.warmup_steps", "train.warmup", whole, "warmup"),
    Key("training.warmup_steps", "train.warmup", whole, "warmup"),
    Key("lr_scheduler.decay_type", "train.schedule", _decay, "decay_type"),
    Key("lr_scheduler.lr_min", "train.final_learning_rate", number),
    Key("lr_scheduler.min_lr_factor", "train.final_learning_rate", number),
    Key(
        "lr_scheduler.decay_ratio",
        "train.decay",
        number,
        "decay_ratio",
        "the same share, with schedule: warmup-stable-decay; 0 is schedule: constant",
    ),
    *lacks("tightfit's schedules end with the training", "lr_scheduler.total_steps"),
    Key(
        "training.local_batch_size",
        "plan.micro_batch",
        whole,
        "local",
        "samples of each data rank; a factor of train.batch",
    ),
    Key(
        "training.batch_size", "plan.micro_batch", whole, "local", "samples of each data rank; a factor of train.batch"
    ),
    Key("training.global_batch_size", "train.batch", _batch, "batch"),
    Key("training.gradient_accumulation_steps", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key("training.seq_len", "data.sequence_length", whole),
    Key("training.steps", "train.steps", whole, "steps"),
    Key("training.max_norm", "train.clip", positive),
    Key("training.dataset", "data.dataset", _data),
    Key("training.dataset_path", "data.dataset", text, "dataset_path", "a folder, or a data set of the Hub"),
    Key("training.dtype", "plan.precision", wide, "weights", "the type of the weights; bfloat16 is bf16-true"),
    Key(
        "training.mixed_precision_param",
        "plan.precision",
        lambda v: wide(v) == "bf16",
        "bf16",
        "bfloat16 is bf16-mixed; float32 is fp32",
    ),
    Key(
        "training.mixed_precision_reduce",
        "",
        lambda v: Lacks("tightfit sums gradients in fp32", wide(v) != "fp32"),
        "",
        "tightfit sums gradients in fp32",
    ),
    Key("training.enable_cpu_offload", "plan.offload", offload_all, "offload_all"),
    Key("training.compile", "plan.compile", lambda v: "block" if flag(v) else "none", "", "true is block"),
    Key("training.seed", "train.seed", whole),
    Key("training.deterministic", "", None, "", "tightfit cannot request deterministic kernels"),
    Key("training.dataloader.num_workers", "plan.loader_workers", whole),
    Key("training.dataloader.pin_memory", "plan.pin_memory", flag),
    Key("training.dataloader.prefetch_factor", "plan.prefetch", count),
    *needless("tightfit's loader keeps its workers", "training.dataloader.persistent_workers"),
    *needless("plan.allocator decides how memory is freed", "training.gc_freq", "training.gc_debug"),
    Key("parallelism.data_parallel_shard_degree", "plan.dp_shard", _shard, "dp_shard"),
    Key("training.data_parallel_shard_degree", "plan.dp_shard", _shard, "dp_shard"),
    Key("training.data_parallel_degree", "plan.dp_shard", _shard, "dp_shard"),
    Key("parallelism.data_parallel_replicate_degree", "plan.dp_replicate", whole, "dp_replicate", _DEGREE),
    Key("training.data_parallel_replicate_degree", "plan.dp_replicate", whole, "dp_replicate", _DEGREE),
    Key("parallelism.fsdp_reshard_after_forward", "plan.zero", _reshard, "reshard"),
    Key(
        "parallelism.tensor_parallel_degree",
        "plan.tp",
        whole,
        "tp",
        "with plan.sequence_parallel: true, as torchtitan shards norms",
    ),
    Key(
        "training.tensor_parallel_degree",
        "plan.tp",
        whole,
        "tp",
        "with plan.sequence_parallel: true, as torchtitan shards norms",
    ),
    Key("parallelism.pipeline_parallel_degree", "plan.pp", whole, "pp", _DEGREE),
    Key("experimental.pipeline_parallel_degree", "plan.pp", whole, "pp", _DEGREE),
    Key("parallelism.context_parallel_degree", "plan.cp", whole, "cp", _DEGREE),
    Key("experimental.context_parallel_degree", "plan.cp", whole, "cp", _DEGREE),
    Key("parallelism.pipeline_parallel_schedule", "plan.schedule", _pipeline, "pp_schedule"),
    Key("experimental.pipeline_parallel_schedule", "plan.schedule", _pipeline, "pp_schedule"),
    Key(
        "parallelism.pipeline_parallel_microbatch_size",
        "plan.micro_batch",
        whole,
        "pp_micro",
        "in a pipeline, samples of a micro-batch",
    ),
    *lacks("tightfit has schedules of its own, not from a file", "parallelism.pipeline_parallel_schedule_csv"),
    *needless(
        _OWN_LAYOUT,
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_split_points",
        "parallelism.module_fqns_per_model_part",
        "experimental.pipeline_parallel_split_points",
    ),
    *needless(
        "tightfit always shards the loss by vocabulary and uses ring attention",
        "parallelism.disable_loss_parallel",
        "training.disable_loss_parallel",
        "parallelism.enable_async_tensor_parallel",
        "experimental.enable_async_tensor_parallel",
        "parallelism.context_parallel_*",
        "parallelism.enable_compiled_autograd",
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        "parallelism.expert_parallel_comm_backend",
    ),
    Key(
        "parallelism.expert_parallel_degree",
        "",
        lambda v: Lacks("tightfit has no expert parallelism", whole(v) > 1),
        "",
        "tightfit has no expert parallelism",
    ),
    Key(
        "parallelism.expert_tensor_parallel_degree",
        "",
        lambda v: Lacks("tightfit has no expert parallelism", whole(v) > 1),
        "",
        "tightfit has no expert parallelism",
    ),
    Key("activation_checkpoint.mode", "plan.recompute", _mode, "ac_mode"),
    Key(
        "activation_checkpoint.selective_ac_option",
        "plan.recompute",
        lambda v: str(v),
        "ac_option",
        "with mode selective: op is selective, a number n is every-n",
    ),
    *needless("plan.recompute has no such setting", "activation_checkpoint.*"),
    Key("compile.enable", "plan.compile", lambda v: "block" if flag(v) else "none", "", "true is block"),
    *needless("tightfit compiles blocks, or the model with its loss", "compile.*"),
    Key(
        "float8.enable_float8_linear",
        "plan.float8",
        lambda v: "tensorwise" if flag(v) else "none",
        "converters",
        "true is tensorwise",
    ),
    Key("float8.recipe_name", "plan.float8", _recipe, "recipe"),
    Key("quantize.linear.float8.recipe_name", "plan.float8", _recipe, "recipe"),
    *needless(_QUANT, "float8.*", "quantize.linear.float8.*"),
    *lacks("tightfit has no MX types and no quantized experts", "mx.*", "quantize.*"),
    Key(
        "checkpoint.enable",
        "train.checkpoint_every",
        lambda v: "steps" if flag(v) else "no",
        "save_strategy",
        "false is never",
    ),
    Key(
        "checkpoint.enable_checkpoint",
        "train.checkpoint_every",
        lambda v: "steps" if flag(v) else "no",
        "save_strategy",
        "false is never",
    ),
    Key("checkpoint.interval", "train.checkpoint_every", whole, "save_steps", "the same number"),
    Key("checkpoint.keep_latest_k", "train.keep_checkpoints", count),
    Key(
        "checkpoint.initial_load_path",
        "model.from",
        text,
        "initial",
        "with initial_load_in_hf, the folder of the weights",
    ),
    *needless("tightfit has one checkpoint format, which transformers can read", "checkpoint.*"),
    Key(
        "validation.enable",
        "train.evaluate_every",
        lambda v: "steps" if flag(v) else "no",
        "eval_strategy",
        "false evaluates nothing",
    ),
    Key("validation.freq", "train.evaluate_every", whole, "eval_steps", "the same number"),
    *needless("tightfit evaluates train.evaluate_samples samples of data.held_out", "validation.*"),
    Key("debug.seed", "train.seed", whole),
    *lacks(
        "tightfit cannot request deterministic kernels",
        "debug.deterministic",
        "debug.deterministic_warn_only",
        "debug.moe_force_load_balance",
    ),
    Key("job.dump_folder", "", None, "", "tightfit train --out names the run's folder", False),
    *needless(_LOG, "job.*", "profiling.*", "profiler.*", "metrics.*", "memory_estimation.*"),
    Key(
        "metrics.enable_wandb",
        "train.trackers",
        lambda v: ["tensorboard", "wandb"] if flag(v) else Lacks("it is off", False),
        "",
        "adds wandb",
    ),
    *needless("--timeout sets how long tightfit waits for a process", "comm.*"),
    *lacks("tightfit has no fault-tolerant replicas (torchft)", "fault_tolerance.*"),
    *lacks(
        "code of torchtitan's extensions",
        "experimental.custom_import",
        "experimental.custom_args_module",
        "experimental.custom_model_path",
    ),
)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file. The path of the tokenizer is made absolute if it
    exists.

    folder  the folder of the imported file, where relative paths start
    """
    model = content.get("model")
    if isinstance(model, dict):
        made = {
            name: existing(value, folder)
            if name in ("hf_assets_path", "tokenizer_path") and isinstance(value, str)
            else value
            for name, value in model.items()
        }
        return {**content, "model": made}
    return content


def _model(draft: Draft) -> None:
    parts = draft.parts
    name, flavor = parts.get("name"), parts.get("flavor")
    preset = PRESETS.get((str(name), str(flavor)))
    if preset:
        draft.fields["model.preset"] = preset
    elif name:
        for part in ("name", "flavor"):
            draft.settle(part, "no counterpart", "no preset of tightfit's has these sizes")
        draft.to_do.append(f"add the model: {{architecture: ..., hidden_size: ...}} with the sizes of {name} {flavor}")
    if parts.get("tokenizer"):
        path = Path(parts["tokenizer"])
        draft.fields["data.tokenizer"] = str(path.parent if path.suffix in (".model", ".json") else path)
    if parts.get("initial"):
        draft.settle("initial", "no counterpart", "name the weights' folder in model.from, in transformers' form")
    if parts.get("dataset_path"):
        draft.fields["data.dataset"] = parts["dataset_path"]
    elif draft.fields.get("data.dataset") == "allenai/c4":
        draft.fields |= {"data.subset": "en", "data.streaming": True}
        draft.remark("data.dataset", "torchtitan streams its subset en: data.subset and data.streaming")


def _split_batch(draft: Draft) -> None:
    """Set two of the draft's parts from local_batch_size: micro_batch (samples of one forward) and
    accumulation (forwards of a step).

    Without a pipeline, one forward takes all local_batch_size samples. In a pipeline, the samples
    are divided into forwards of pipeline_parallel_microbatch_size samples each; if that leaves a
    remainder, add a contradiction.
    """
    parts = draft.parts
    local, micro = parts.get("local"), parts.get("pp_micro", 1)
    if local is None:
        return
    is_default = "local" in draft.defaulted
    if parts.get("pp", 1) > 1 and local % micro == 0:
        draft.imply("micro_batch", micro, "pp_micro" if "pp_micro" in parts else "local")
        if "accumulation" in parts:
            parts["accumulation"] *= local // micro
        elif "batch" not in parts:
            draft.imply("accumulation", local // micro, "local")
        return
    if parts.get("pp", 1) > 1:
        draft.contradict(f"{draft.giver('local')} {local} is not a multiple of {draft.giver('pp_micro')} {micro}")
        return
    if "pp_micro" in parts:
        draft.settle("pp_micro", "not needed", "there is no pipeline")
    draft.imply("micro_batch", local, "local")
    if is_default:
        draft.defaulted.add("micro_batch")
    if "batch" not in parts:
        draft.imply("accumulation", 1, "local")


def _combine(draft: Draft) -> None:
    parts, fields = draft.parts, draft.fields
    if fields.get("train.weight_decay"):
        fields["train.no_decay"] = []
        draft.remark("train.weight_decay", "train.no_decay: [], because torchtitan decays all parameters")
    _model(draft)
    _split_batch(draft)
    if parts.get("warmup", 0) > parts.get("steps", parts.get("warmup", 0)):
        parts["warmup"] = parts["steps"]
        draft.remark("warmup", "cut to the steps of the training, as torchtitan does")
    decay = parts.get("decay_type")
    if decay:
        ratio = parts.get("decay_ratio")
        if ratio is None or ratio == 0:
            draft.imply("schedule", ScheduleChoice(decay if ratio is None else "constant"), "decay_type")
        elif decay == "linear":
            draft.imply("schedule", ScheduleChoice("warmup-stable-decay"), "decay_type")
            fields["train.decay"] = ratio
        else:
            draft.settle("decay_type", "no counterpart", "tightfit's warmup-stable-decay decays linearly")
            draft.imply("schedule", ScheduleChoice("warmup-stable-decay"), "decay_ratio")
            fields["train.decay"] = ratio
    if parts.get("pp_schedule"):
        if parts.get("pp", 1) > 1:
            fields["plan.schedule"] = parts["pp_schedule"]
            if parts["pp_schedule"] == "interleaved":
                fields["plan.virtual_stages"] = 2
                draft.remark("pp_schedule", "plan.virtual_stages: 2, torchtitan's stages of a rank")
        else:
            draft.settle("pp_schedule", "not needed", "there is no pipeline")
    mode, option = parts.get("ac_mode"), parts.get("ac_option", "2")
    if mode is not None:
        is_numbered = mode == "selective" and option != "op"
        fields["plan.recompute"] = ("full" if option == "1" else f"every-{option}") if is_numbered else mode
    if parts.get("tp", 1) > 1:
        fields["plan.sequence_parallel"] = True
    shard, cp = parts.get("dp_shard", -1), parts.get("cp", 1)
    if shard == 1 and cp == 1:
        draft.imply("zero", (0, False), "dp_shard")
        if "reshard" in parts:
            draft.settle("reshard", "not needed", "nothing is sharded over one data rank")
    else:
        word = parts.get("reshard", "default")
        keeps = word == "never" or (word == "default" and parts.get("pp", 1) > 1)
        draft.imply("zero", (2 if keeps else 3, False), "reshard" if "reshard" in parts else "dp_shard")
    if parts.get("converters") not in (None, "none"):
        fields["plan.float8"] = parts.get("recipe", "tensorwise")
    elif "recipe" in parts:
        draft.settle("recipe", "not needed", "model.converters does not name float8")
    elif "converters" in parts:
        fields["plan.float8"] = "none"


IMPORTER = Importer(
    name="torchtitan",
    title="torchtitan",
    marks=("model.flavor", "training.seq_len", "training.local_batch_size", "parallelism.*_degree", "job.dump_folder"),
    keys=KEYS,
    defaults={
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.steps": 10000,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.data_parallel_shard_degree": -1,
        "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
    },
    auto="torchtitan has no auto; -1 takes what remains",
    prepare=_prepare,
    combine=_combine,
)
