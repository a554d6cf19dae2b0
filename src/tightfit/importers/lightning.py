"""Imports the keys of Lightning's Trainer and Fabric (YAML), alone or in the file of a
LightningCLI."""

from __future__ import annotations

from typing import Any

from tightfit.importers import deepspeed
from tightfit.importers.conversions import (
    OptimizerChoice,
    count,
    flag,
    number,
    optimizer,
    positive,
    reshard,
    seed,
    whole,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless

PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "16-true": "fp16-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
}
STRATEGIES = {
    "auto": (0, False),
    "ddp": (0, False),
    "ddp_spawn": (0, False),
    "ddp_fork": (0, False),
    "ddp_notebook": (0, False),
    "ddp_find_unused_parameters_true": (0, False),
    "ddp_find_unused_parameters_false": (0, False),
    "ddpstrategy": (0, False),
    "singledevicestrategy": (0, False),
    "dp": (0, False),
    "fsdp": (3, False),
    "fsdp_cpu_offload": (3, False),
    "fsdpstrategy": (3, False),
    "modelparallelstrategy": (3, False),
    "deepspeed": (2, False),
    "deepspeedstrategy": (2, False),
    "deepspeed_stage_1": (1, False),
    "deepspeed_stage_1_offload": (1, False),
    "deepspeed_stage_2": (2, False),
    "deepspeed_stage_2_offload": (2, False),
    "deepspeed_stage_3": (3, False),
    "deepspeed_stage_3_offload": (3, False),
    "deepspeed_stage_3_offload_nvme": (3, False),
}
_CODE = "it is code of yours: name it in model.python, or call it in your own training loop"
_DEBUGGING = "for debugging; tightfit train --set train.steps=5 is a short run, explain needs none"
_EVALUATION = "tightfit evaluates train.evaluate_samples samples every train.evaluate_every steps"


def _precision(value: Any) -> str | Lacks:
    """Return tightfit's name of a precision: "fp32" for "32-true", "fp16-mixed" for "16-mixed", and
    "fp16-true" for "16-true". "bf16-mixed" and "bf16-true" keep their names. For 64 bits and
    "transformer-engine", there is no counterpart (Lacks, with the reason). Any other value is an
    error (ValueError)."""
    word = str(value).lower()
    if word in PRECISIONS:
        return PRECISIONS[word]
    if word in ("64", "64-true", "transformer-engine", "transformer-engine-float16"):
        return Lacks(f"tightfit has no {word}; plan.float8 has torchao's 8-bit products")
    raise ValueError("one of: " + ", ".join(PRECISIONS))


def _strategy(value: Any) -> tuple[int, bool] | Lacks:
    """Return (ZeRO stage, False) for the name of a strategy: stage 0 for "ddp", 3 for "fsdp", and
    1, 2 and 3 for "deepspeed_stage_1", "_2" and "_3". False says that the model is not also
    replicated over nodes. For any other strategy, there is no counterpart (Lacks, with the reason).
    """
    word = str(value).rpartition(".")[2].lower()
    return STRATEGIES.get(word) or Lacks(f"tightfit has no strategy {value}")


def _devices(value: Any) -> int | Lacks:
    """Return the number of devices of a node; for a list of devices, its length. "auto" and -1 mean
    all devices of the machine. They set no field (Lacks, with the reason): --nproc gives the
    number."""
    if isinstance(value, list):
        return len(value)
    word = str(value)
    if word in ("auto", "-1"):
        return Lacks("it takes all devices of the machine, as tightfit train --nproc N takes N", is_lost=False)
    if "," in word:
        return len([one for one in word.split(",") if one.strip()])
    return whole(value)


def _interval(value: Any) -> int | Lacks:
    """Return the number of steps between two evaluations. For a fraction of an epoch, there is no
    counterpart (Lacks, with the reason)."""
    found = number(value)
    if found < 1 or isinstance(value, float):
        return Lacks("train.evaluate_every is a number of steps, not a share of an epoch")
    return whole(value)


def _steps(value: Any) -> int | Lacks:
    """Return the number of steps. For 0 or less (usually -1), the field is left out (Lacks, with
    the reason), and max_epochs decides the length."""
    found = whole(value)
    return found if found > 0 else Lacks("the epochs end the training", is_lost=False)


def _epochs(value: Any) -> float | Lacks:
    """Return the number of epochs. 0 or less (usually -1) means training without end: there is no
    counterpart (Lacks, with the reason)."""
    found = number(value)
    return found if found > 0 else Lacks("training without end: set train.steps")


def _clip_by(value: Any) -> Lacks:
    """Return Lacks, with the reason: this key sets no field. "norm" needs no counterpart, because
    tightfit also clips by norm. For "value" (clipping by value), there is no counterpart."""
    return (
        Lacks("as in tightfit", False)
        if str(value) == "norm"
        else Lacks("tightfit clips the norm of the whole gradient")
    )


def _trackers(value: Any) -> list[str] | Lacks:
    """Return those of "tensorboard", "wandb" and "mlflow" that the value names. true, false and
    null set no field (Lacks, with the reason). For only other loggers, there is no counterpart
    (Lacks, with the reason)."""
    if value in (True, False, None):
        return Lacks("tightfit writes TensorBoard's files unless train.trackers says otherwise", False)
    shown = str(value).lower()
    found = [word for word in ("tensorboard", "wandb", "mlflow") if word in shown]
    return found or Lacks("tightfit logs to metrics.jsonl, TensorBoard, wandb and MLflow")


_TRAINER: tuple[Key, ...] = (
    Key("precision", "plan.precision", _precision, "precision"),
    Key("devices", "plan.dp_shard", _devices, "devices_per_node", takes_auto=True),
    Key("num_nodes", "plan.dp_shard", whole, "nodes", "a factor of the devices"),
    Key("strategy", "plan.zero", _strategy, "zero", takes_auto=True),
    Key("strategy.class_path", "plan.zero", _strategy, "strategy", takes_auto=True),
    Key("strategy.init_args.stage", "plan.zero", lambda value: (whole(value), False), "zero", "the same stage"),
    Key(
        "strategy.init_args.sharding_strategy", "plan.zero", lambda value: reshard(value), "zero", reshard.__doc__ or ""
    ),
    Key(
        "strategy.init_args.cpu_offload",
        "plan.offload",
        lambda value: ("states", "gradients", "parameters") if flag(value) else (),
        "offload_all",
        "true is states, gradients and parameters",
    ),
    Key(
        "strategy.init_args.offload_optimizer",
        "plan.offload",
        lambda value: ("states",) if flag(value) else (),
        "offload_states",
        "true adds states",
    ),
    Key(
        "strategy.init_args.offload_parameters",
        "plan.offload",
        lambda value: ("gradients", "parameters") if flag(value) else (),
        "offload_parameters",
        "true adds gradients and parameters",
    ),
    Key(
        "strategy.init_args.data_parallel_size",
        "plan.dp_shard",
        whole,
        "dp_shard",
        reason="the same number",
    ),
    Key("strategy.init_args.tensor_parallel_size", "plan.tp", whole, "tp", reason="the same number"),
    Key(
        "strategy.init_args.activation_checkpointing_policy",
        "plan.recompute",
        lambda value: "full",
        reason="full: every block",
    ),
    Key(
        "strategy.init_args.activation_checkpointing",
        "plan.recompute",
        lambda value: "full",
        reason="full: every block",
    ),
    *needless("tightfit finds a model's blocks and sizes its buckets by itself", "strategy.init_args.*"),
    Key("accumulate_grad_batches", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key("gradient_clip_val", "train.clip", positive),
    Key("gradient_clip_algorithm", "", _clip_by),
    Key("max_steps", "train.steps", _steps, "steps"),
    Key("max_epochs", "train.epochs", _epochs, "epochs"),
    Key("val_check_interval", "train.evaluate_every", _interval),
    *lacks("tightfit ends at train.steps or train.epochs alone", "min_epochs", "min_steps", "max_time"),
    Key("logger", "train.trackers", _trackers),
    Key("loggers", "train.trackers", _trackers),
    *needless("tightfit names its loggers' runs, and writes them to the run's folder", "logger.*"),
    *needless(
        "only changes what is printed and logged; tightfit logs every step in metrics.jsonl",
        "log_every_n_steps",
        "enable_progress_bar",
        "enable_model_summary",
        "enable_autolog_hparams",
        "profiler",
        "profiler.*",
        "barebones",
    ),
    Key(
        "enable_checkpointing", "train.checkpoint_every", lambda v: "end" if flag(v) else "never", "", "false is never"
    ),
    *needless("tightfit train --out names the run's folder", "default_root_dir", "model_registry"),
    *needless(_EVALUATION, "limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps"),
    *lacks(_EVALUATION, "check_val_every_n_epoch"),
    *needless("tightfit has no evaluation under autograd", "inference_mode"),
    *needless(_DEBUGGING, "fast_dev_run", "overfit_batches", "detect_anomaly"),
    *lacks("tightfit trains on all samples; data names fewer", "limit_train_batches"),
    *lacks("callbacks are code: call them in a Python training loop of your own", "callbacks", "callbacks.*"),
    *lacks("tightfit has no plugins of Lightning's", "plugins", "plugins.*"),
    Key("accelerator", "", None, "", "tightfit takes the devices of the machine", False, True),
    *needless("cuDNN's search for kernels is torch's own setting", "benchmark"),
    *lacks("tightfit cannot request deterministic kernels", "deterministic"),
    *lacks("tightfit has no synchronized BatchNorm", "sync_batchnorm"),
    *needless(
        "tightfit divides the samples over devices by itself",
        "use_distributed_sampler",
        "replace_sampler_ddp",
        "reload_dataloaders_every_n_epochs",
        "move_metrics_to_cpu",
    ),
)
_REST: tuple[Key, ...] = (
    Key(
        "seed_everything",
        "train.seed",
        lambda v: Lacks("no seed is asked for", False) if v is True else seed(v),
        "",
        "the same number",
    ),
    Key("ckpt_path", "", None, "", "tightfit train --resume continues from tightfit's own checkpoints", False),
    Key("optimizer.class_path", "train.optimizer", optimizer, "optimizer"),
    Key("optimizer.init_args.lr", "train.learning_rate", number),
    Key("optimizer.init_args.weight_decay", "train.weight_decay", number),
    Key("optimizer.init_args.betas", "train.betas", lambda v: [number(one) for one in v], "", "both numbers"),
    Key("optimizer.init_args.eps", "train.epsilon", number),
    Key("optimizer.init_args.momentum", "train.momentum", number),
    Key("optimizer.init_args.fused", "plan.fused_optimizer", flag),
    *lacks("tightfit has no counterpart of this optimizer setting", "optimizer.init_args.*"),
    *lacks(
        "a schedule of torch's counts calls; give train.schedule and train.warmup in steps",
        "lr_scheduler.class_path",
        "lr_scheduler.init_args.*",
    ),
    Key("model.init_args.learning_rate", "train.learning_rate", number, "", "if your module calls it so"),
    Key("model.init_args.lr", "train.learning_rate", number, "", "if your module calls it so"),
    Key("model.learning_rate", "train.learning_rate", number, "", "if your module calls it so"),
    Key("model.lr", "train.learning_rate", number, "", "if your module calls it so"),
    Key("model.init_args.weight_decay", "train.weight_decay", number, "", "if your module calls it so"),
    Key("model.init_args.warmup_steps", "train.warmup", whole, "warmup", "if your module calls it so"),
    Key("model.init_args.model_name_or_path", "model.from", lambda v: str(v), "", "if your module calls it so"),
    *lacks("a LightningModule is code: name a function that returns the nn.Module in model.python", "model.*", "model"),
    Key(
        "data.init_args.batch_size",
        "plan.micro_batch",
        whole,
        "micro_batch",
        "samples of each device; a factor of train.batch",
    ),
    Key("data.batch_size", "plan.micro_batch", whole, "micro_batch", "samples of each device; a factor of train.batch"),
    Key("data.init_args.train_batch_size", "plan.micro_batch", whole, "micro_batch", "a factor of train.batch"),
    Key("data.init_args.num_workers", "plan.loader_workers", whole),
    Key("data.num_workers", "plan.loader_workers", whole),
    Key("data.init_args.pin_memory", "plan.pin_memory", flag),
    Key("data.init_args.max_seq_length", "data.sequence_length", count, "", "if your module calls it so"),
    *lacks("a LightningDataModule is code: name a function that returns the dataset in data.python", "data.*", "data"),
)
KEYS = _TRAINER + _REST


def _combine(draft: Draft) -> None:
    strategies = {
        row.key: str(row.value).lower() for row in draft.rows if row.key.endswith(("strategy", "strategy.class_path"))
    }
    draft.imply("zero", draft.parts.get("strategy", (0, False)), "strategy")
    words = " ".join(strategies.values())
    if "offload" in words:
        stage = draft.parts["zero"][0]
        every = ("states", "gradients", "parameters") if stage == 3 else ("states",)
        draft.parts.setdefault("offload_all", every)
        draft.remark("zero", f"plan.offload: {', '.join(every)}")
        if "nvme" in words:
            draft.fields["plan.offload_to"] = "disk"
    precision = draft.parts.get("precision", "")
    if "deepspeed" in words and precision.endswith("-mixed"):
        draft.parts["precision"] = precision.replace("mixed", "true")
        draft.fields["plan.master_weights"] = True
        draft.remark("precision", "plan.master_weights: true, DeepSpeed's mixed precision")
    deepspeed.check_stage(draft)
    clips = [row for row in draft.rows if row.key.endswith("gradient_clip_algorithm") and str(row.value) != "norm"]
    if "train.clip" in draft.fields and any(row.value is not None for row in clips):
        draft.settle(
            "train.clip", "no counterpart", "it clips each gradient by its value, and train.clip is of the norm"
        )
        del draft.fields["train.clip"]
    _optimizer_defaults(draft)


def _optimizer_defaults(draft: Draft) -> None:
    """Set what torch's optimizers have by default, and tightfit's have not. LightningCLI gives them all
    parameters in one group."""
    choice, fields = draft.parts.get("optimizer"), draft.fields
    if not isinstance(choice, OptimizerChoice):
        return
    if choice.name == "adamw" and "train.weight_decay" not in fields:
        fields["train.weight_decay"] = 0.01
        draft.remark("optimizer", "train.weight_decay: 0.01, its default")
    if choice.name == "sgd" and "train.momentum" not in fields:
        fields["train.momentum"] = 0.0
        draft.remark("optimizer", "train.momentum: 0, its default")
    if fields.get("train.weight_decay"):
        fields["train.no_decay"] = []
        draft.remark("optimizer", "train.no_decay: [], because LightningCLI decays all parameters")


IMPORTER = Importer(
    name="lightning",
    title="Lightning's Trainer and Fabric",
    marks=(
        "trainer.*",
        "fabric.*",
        "accumulate_grad_batches",
        "max_epochs",
        "num_nodes",
        "strategy",
        "accelerator",
        "precision",
        "seed_everything",
    ),
    keys=KEYS,
    sections=("trainer.init_args", "trainer", "fabric.init_args", "fabric"),
    defaults={"accumulate_grad_batches": 1, "precision": "32-true", "strategy": "auto"},
    auto="auto lets Lightning look at the machine, as tightfit does",
    combine=_combine,
)
