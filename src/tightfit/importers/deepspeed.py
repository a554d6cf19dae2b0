"""Imports DeepSpeed's configuration (JSON)."""

from __future__ import annotations

from typing import Any

from tightfit.importers.conversions import (
    OptimizerChoice,
    chosen,
    count,
    flag,
    number,
    optimizer,
    positive,
    schedule,
    seed,
    text,
    whole,
    wide,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless


def _stage(value: Any) -> tuple[int, bool]:
    """Return (ZeRO stage, False). The stage is the value, 0, 1, 2 or 3. False says that the model
    is not also replicated over nodes."""
    stage = whole(value)
    if stage not in (0, 1, 2, 3):
        raise ValueError("a stage: 0, 1, 2 or 3")
    return stage, False


def _pair(value: Any) -> list[float]:
    """Return the value, a list of two numbers. Any other value is an error (ValueError)."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(one) for one in value]


def _offloaded(*words: str) -> Any:
    def convert(value: Any) -> tuple[str, ...]:
        device = str(value).lower()
        if device not in ("none", "cpu", "nvme"):
            raise ValueError("none, cpu or nvme")
        return () if device == "none" else words

    convert.__doc__ = f"cpu and nvme add {' and '.join(words)}. nvme also sets plan.offload_to: disk."
    return convert


def _loss_scale(value: Any) -> float | str:
    """Return "dynamic" for 0, and any other number unchanged, as a fixed loss scale."""
    return number(value) or "dynamic"


def _optimizer(value: Any) -> OptimizerChoice | Lacks:
    """Return the tightfit optimizer for the name of DeepSpeed's. "Adam" becomes adamw, because
    DeepSpeed's Adam decouples weight decay. "AdamW", "Lamb", "Lion", "Muon" and "SGD" become the
    optimizers of these names. For an optimizer that tightfit does not have, such as "OneBitAdam",
    there is no counterpart (Lacks, with the reason)."""
    return OptimizerChoice("adamw") if str(value).lower() == "adam" else optimizer(value)


def _interval(value: Any) -> str | Lacks:
    """Return "full" for 1 (each layer is recomputed by itself), and "none" for 0. For a larger
    interval, whose layers are recomputed together, there is no counterpart (Lacks, with the
    reason)."""
    layers = whole(value)
    if layers > 1:
        return Lacks("use plan.recompute: full, which recomputes each block by itself, or sqrt without a pipeline")
    return "full" if layers else "none"


def _batch(value: Any) -> int:
    """Return the number of samples, a whole number. A number below 1 is an error (ValueError)."""
    found = whole(value)
    if found < 1:
        raise ValueError("a number of 1 or more")
    return found


def _least_rate(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field. A warm-up from 0 needs no counterpart,
    because tightfit also warms up from 0. For a warm-up from another rate, there is no counterpart.
    """
    return Lacks("tightfit warms up from 0", number(value) > 0)


def _total_steps(value: Any) -> int | Lacks:
    """Return the number of steps. For 0 or less, the field is left out (Lacks, with the reason).
    This is the length of the schedule; the training script may end the training earlier."""
    return count(value)


def _wide(value: Any) -> bool:
    """Return whether the master weights are in fp32: false for true, which keeps them in 16 bits."""
    return not flag(value)


def _states(value: Any) -> str | Lacks:
    """Return "bf16" for true. false sets no field (Lacks, with the reason)."""
    return "bf16" if flag(value) else Lacks("it is off", False)


def _sum_dtype(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field. fp32 needs no counterpart, because
    master weights have fp32 gradients. For another dtype, there is no counterpart."""
    return Lacks("with master weights, tightfit sums gradients in fp32", value is not None and wide(value) != "fp32")


_NARROW = "true is false: without fp32 masters"
_BUCKETS = "tightfit chooses the sizes of its buckets and when it gathers"
_KERNELS = "the plan chooses the kernel"
_LOG = "only changes what is printed"

KEYS: tuple[Key, ...] = (
    Key("train_batch_size", "train.batch", _batch, "batch"),
    Key("train_micro_batch_size_per_gpu", "plan.micro_batch", _batch, "micro_batch"),
    Key("train_micro_batch_size_per_device", "plan.micro_batch", _batch, "micro_batch"),
    Key("gradient_accumulation_steps", "train.batch", _batch, "accumulation", "a factor of train.batch"),
    Key("gradient_clipping", "train.clip", positive),
    Key("optimizer.type", "train.optimizer", _optimizer, "optimizer"),
    Key("optimizer.params.lr", "train.learning_rate", number),
    Key("optimizer.params.betas", "train.betas", _pair),
    Key("optimizer.params.eps", "train.epsilon", number),
    Key("optimizer.params.weight_decay", "train.weight_decay", number),
    Key("optimizer.params.momentum", "train.momentum", number),
    Key("optimizer.params.adam_w_mode", "train.optimizer", flag, "adam_w_mode", "true is adamw"),
    *needless(_KERNELS, "optimizer.params.torch_adam", "optimizer.params.fused"),
    *needless("the optimizer has the defaults of its paper", "optimizer.params.bias_correction"),
    *lacks("tightfit has no counterpart of this optimizer setting", "optimizer.params.*", "optimizer.legacy_fusion"),
    Key("scheduler.type", "train.schedule", schedule, "schedule"),
    Key("scheduler.params.warmup_num_steps", "train.warmup", whole, "warmup"),
    Key("scheduler.params.warmup_max_lr", "train.learning_rate", number, "", "the rate after the warm-up"),
    Key("scheduler.params.total_num_steps", "train.steps", _total_steps, "steps"),
    Key("scheduler.params.cos_min_ratio", "train.final_learning_rate", number),
    Key("scheduler.params.warmup_min_lr", "", _least_rate),
    Key(
        "scheduler.params.warmup_type",
        "",
        chosen(
            {"linear": Lacks("as tightfit warms up", False), "log": Lacks("tightfit warms up linearly")},
        ),
    ),
    *lacks("tightfit has no counterpart of this schedule's setting", "scheduler.params.*"),
    Key("bf16.enabled", "plan.precision", flag, "bf16", "true is bf16-true with plan.master_weights: true"),
    Key("bfloat16.enabled", "plan.precision", flag, "bf16", "true is bf16-true with plan.master_weights: true"),
    Key("fp16.enabled", "plan.precision", flag, "fp16", "true is fp16-true with plan.master_weights: true"),
    Key("fp16.loss_scale", "plan.loss_scale", _loss_scale),
    *needless("tightfit adapts a dynamic loss scale in its own steps", "fp16.loss_scale_window", "fp16.hysteresis"),
    *needless("tightfit's dynamic loss scale finds its own start", "fp16.initial_scale_power", "fp16.min_loss_scale"),
    *needless("tightfit casts inputs to the dtype of the weights", "fp16.auto_cast", "bf16.auto_cast"),
    Key("fp16.fp16_master_weights_and_grads", "plan.master_weights", _wide, "masters", _NARROW),
    Key("bf16.bf16_master_weights_and_grads", "plan.master_weights", _wide, "masters", _NARROW),
    Key("bf16.bf16_optimizer_states", "plan.states", _states, "", "true is bf16"),
    *needless("tightfit adds each gradient to its fp32 sum at once", "bf16.immediate_grad_update"),
    Key("data_types.grad_accum_dtype", "", _sum_dtype, "", "with master weights, tightfit sums gradients in fp32"),
    *lacks("tightfit has autocast without Apex", "amp.enabled", "amp.*"),
    Key("zero_optimization.stage", "plan.zero", _stage, "zero"),
    Key("zero_optimization.offload_optimizer.device", "plan.offload", _offloaded("states"), "offload_states"),
    Key(
        "zero_optimization.offload_param.device",
        "plan.offload",
        _offloaded("gradients", "parameters"),
        "offload_parameters",
    ),
    Key(
        "zero_optimization.cpu_offload",
        "plan.offload",
        lambda value: ("states",) if flag(value) else (),
        "offload_all",
        "the old form: true adds states",
    ),
    Key("zero_optimization.offload_optimizer.nvme_path", "plan.offload_folder", text, "states_folder"),
    Key("zero_optimization.offload_param.nvme_path", "plan.offload_folder", text, "parameters_folder"),
    *needless(
        "tightfit pins the host memory that it offloads to",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
    ),
    *needless(
        "tightfit chooses its own buffers for offload",
        "zero_optimization.offload_optimizer.*",
        "zero_optimization.offload_param.*",
        "aio.*",
    ),
    *needless(
        "tightfit's checkpoints contain full tensors, in the dtype of the weights",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.load_from_fp32_weights",
    ),
    *lacks(
        "ZeRO++ is not in tightfit; dp_replicate with dp_shard shards within a node",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "zero_optimization.zero_quantized_gradients",
        "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
    ),
    *needless(
        _BUCKETS,
        "zero_optimization.contiguous_gradients",
        "zero_optimization.overlap_comm",
        "zero_optimization.*_bucket_size*",
        "zero_optimization.*prefetch_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.sub_group_size",
        "zero_optimization.allgather_partitions",
        "zero_optimization.stage3_*",
        "zero_optimization.max_*",
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.param_persistence_threshold",
        "zero_optimization.model_persistence_threshold",
        "zero_optimization.module_granularity_threshold",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.legacy_stage1",
        "zero_optimization.override_module_apply",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "disable_allgather",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
        "seq_parallel_communication_data_type",
        "graph_harvesting",
    ),
    Key("pipeline.stages", "plan.pp", whole, "pp"),
    Key("pipeline.micro_batches", "", None, "", "the micro-batches of a step follow from batch and micro_batch", False),
    *needless(
        "tightfit balances stages by predicted time, or takes plan.split",
        "pipeline.partition",
        "pipeline.partition_method",
    ),
    Key("pipeline.activation_checkpoint_interval", "plan.recompute", _interval),
    *needless("tightfit's pipelines have no such setting", "pipeline.*"),
    Key("tensor_parallel.autotp_size", "plan.tp", whole, "tp"),
    Key("tensor_parallel.tp_size", "plan.tp", whole, "tp"),
    *needless("tightfit knows how to shard its models", "tensor_parallel.*"),
    Key("sequence_parallel_size", "plan.cp", whole, "cp", "Ulysses exchanges heads, tightfit's cp keys and values"),
    *needless(
        "the training script calls it; tightfit decides by plan.recompute, whose blocks are not sharded again",
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.contiguous_memory_optimization",
        "activation_checkpointing.number_checkpoints",
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "activation_checkpointing.profile",
    ),
    Key(
        "activation_checkpointing.cpu_checkpointing",
        "plan.offload",
        lambda value: ("activations",) if flag(value) else (),
        "offload_activations",
        "true adds activations",
    ),
    Key("compile.enabled", "plan.compile", lambda value: "block" if flag(value) else "none", "", "true is block"),
    *needless("tightfit compiles with torch's default backend", "compile.*"),
    Key("seed", "train.seed", seed),
    Key(
        "dataloader_drop_last",
        "",
        None,
        "",
        "in tightfit, a batch that the epoch does not fill continues with samples of the next epoch",
        False,
    ),
    *needless(
        _LOG,
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "flops_profiler.*",
        "comms_logger.*",
        "comms_config.*",
        "csv_monitor.*",
        "comet.*",
        "monitor_config.*",
        "timers.*",
    ),
    Key(
        "tensorboard.enabled",
        "",
        None,
        "",
        "tightfit writes TensorBoard's files unless train.trackers says otherwise",
        False,
    ),
    Key("wandb.enabled", "", None, "", "add wandb to train.trackers", False),
    *needless("tightfit names its trackers' runs, and writes them to the run's folder", "tensorboard.*", "wandb.*"),
    *needless(
        "tightfit has one checkpoint format",
        "checkpoint.*",
        "load_universal_checkpoint",
        "use_data_before_expert_parallel_parallelism",
    ),
    *lacks("tightfit does not find batch sizes and devices at run time", "elasticity.*", "autotuning.*"),
    *lacks("tightfit has no curriculum, layer drop or token drop", "curriculum_learning.*", "data_efficiency.*"),
    *lacks("tightfit has no progressive layer drop", "progressive_layer_drop.*"),
    *lacks("tightfit does not compress or quantize models", "compression_training.*", "quantize_training.*"),
    *lacks("tightfit has no sparse attention", "sparse_attention.*"),
    *lacks("tightfit has no eigenvalue schedule", "eigenvalue.*"),
    *needless("only for inference", "hybrid_engine.*"),
)


def _combine(draft: Draft) -> None:
    parts = draft.parts
    for part in ("states_folder", "parameters_folder"):
        if part in parts:
            if "plan.offload_to" in draft.fields:
                draft.fields["plan.offload_folder"] = parts[part]
            else:
                draft.settle(part, "not needed", "nothing is offloaded to NVMe")
    if parts.get("adam_w_mode") is False and parts.get("optimizer"):
        draft.settle("adam_w_mode", "no counterpart", "tightfit's weight decay is decoupled (AdamW)")
    choice = parts.get("optimizer")
    if isinstance(choice, OptimizerChoice) and choice.name == "sgd" and "train.momentum" not in draft.fields:
        draft.fields["train.momentum"] = 0.0
        draft.remark("optimizer", "train.momentum: 0, its default")
    if draft.fields.get("train.weight_decay"):
        draft.remark("train.weight_decay", "give train.no_decay: [] if your script passes all parameters in one group")
    _warmup(draft)
    check_stage(draft)


def places(draft: Draft) -> None:
    """Set plan.offload_to, the one place to which tightfit offloads everything: "host" for
    DeepSpeed's "cpu", "disk" for "nvme". If the file offloads optimizer and parameters to different
    places, add a contradiction."""
    devices = {
        row.key: str(row.value).lower()
        for row in draft.rows
        if row.key.endswith(
            ("offload_optimizer.device", "offload_param.device", "offload_optimizer_device", "offload_param_device")
        )
    }
    offload_devices = {value for value in devices.values() if value in ("cpu", "nvme")}
    if len(offload_devices) == 2:
        draft.contradict(
            f"{' and '.join(devices)} name cpu and nvme, and plan.offload_to is one place for all: host is taken"
        )
    elif offload_devices == {"nvme"}:
        draft.fields["plan.offload_to"] = "disk"


# DeepSpeed's defaults (runtime/lr_schedules.py)
WARMUP_MAX_LR, COS_MIN_RATIO = 0.001, 0.0001


def _warmup(draft: Draft) -> None:
    """If the file names a DeepSpeed schedule, set DeepSpeed's defaults for what it does not name: 1,000
    steps of warm-up; a learning rate after it of 0.001, which replaces that of the optimizer; and a final
    rate of 0.0001 times that for WarmupCosineLR. If it names no type of warm-up, note that DeepSpeed's
    default is logarithmic and tightfit's warm-up linear."""
    keys = {row.key.rpartition(".")[2] for row in draft.rows}
    if not draft.giver("schedule").endswith("scheduler.type"):
        return
    kind = next(str(row.value).rpartition(".")[2].lower() for row in draft.rows if row.key == draft.giver("schedule"))
    if kind in ("warmuplr", "warmupdecaylr") and "warmup_max_lr" not in keys:
        draft.settle("train.learning_rate", "not needed", "the scheduler's warmup_max_lr replaces it")
        draft.fields["train.learning_rate"] = WARMUP_MAX_LR
        draft.remark("schedule", f"train.learning_rate: {WARMUP_MAX_LR}, the default of warmup_max_lr")
    if kind == "warmupcosinelr" and "cos_min_ratio" not in keys:
        draft.fields["train.final_learning_rate"] = COS_MIN_RATIO
        draft.remark("schedule", f"train.final_learning_rate: {COS_MIN_RATIO}, the default of cos_min_ratio")
    if "warmup_num_steps" not in keys:
        draft.imply("warmup", 1000, "schedule")
        draft.remark("schedule", "train.warmup: 1000, its default")
    if "warmup_type" not in keys:
        draft.remark("schedule", "DeepSpeed warms up along a logarithm by default, tightfit linearly")


def check_stage(draft: Draft) -> None:
    """Add a contradiction if DeepSpeed itself would refuse the ZeRO stage: stages 2 and 3 in a
    pipeline, and offloaded parameters without stage 3."""
    stage = draft.parts.get("zero", (0, False))[0]
    if stage >= 2 and draft.parts.get("pp", 1) > 1:
        draft.contradict(
            f"{draft.giver('zero')} {stage} and {draft.giver('pp')} {draft.parts['pp']}: DeepSpeed's pipelines take "
            "ZeRO stage 0 or 1 only, as stages 2 and 3 shard the gradients that a pipeline accumulates"
        )
    if draft.parts.get("offload_parameters") and "zero" in draft.parts and stage != 3:
        draft.contradict(f"{draft.giver('offload_parameters')} is for ZeRO stage 3, and the stage is {stage}")


def combine_deepspeed(draft: Draft) -> None:
    """Set the fields that depend on several of DeepSpeed's keys. The importers of tools whose files
    may contain DeepSpeed's keys call this function, too."""
    places(draft)
    if any(row.key.endswith(("bf16.enabled", "bfloat16.enabled", "fp16.enabled")) for row in draft.rows):
        draft.parts.setdefault("masters", True)  # DeepSpeed's mixed precision
    _combine(draft)


def _combine_alone(draft: Draft) -> None:
    """Do `combine_deepspeed` for a DeepSpeed file that is imported by itself, not as part of
    another tool's file. If such a file has neither train_batch_size nor
    gradient_accumulation_steps, a step has one micro-batch, as in DeepSpeed."""
    keys = {row.key for row in draft.rows}
    if "micro_batch" in draft.parts and not {"train_batch_size", "gradient_accumulation_steps"} & keys:
        draft.imply("accumulation", 1, "micro_batch")
    combine_deepspeed(draft)


IMPORTER = Importer(
    name="deepspeed",
    title="DeepSpeed",
    marks=(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.*",
        "zero_allow_untested_optimizer",
        "fp16.enabled",
        "bf16.enabled",
        "bfloat16.enabled",
        "optimizer.type",
    ),
    keys=KEYS,
    defaults={"bf16.enabled": False, "fp16.enabled": False},
    auto="auto is filled in by the transformers Trainer from its own arguments: import the file that has them",
    combine=_combine_alone,
)
