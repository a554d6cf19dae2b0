"""Imports torchtune's recipes (YAML)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tightfit.importers.conversions import (
    compiled,
    count,
    existing,
    flag,
    number,
    offload_all,
    optimizer,
    packed,
    positive,
    schedule,
    text,
    whole,
    wide,
)
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless
from tightfit.importers.training_arguments import CHAT, LOGS, LORA, MASKED, PREFERENCES, QUANTIZED, TOKENIZER

HUB_SOURCES = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}


def _component(value: Any) -> str | Lacks:
    """Return Lacks, with the reason: this key sets no field, because config.json in the folder of
    the weights describes the model. For a model builder with "lora" in its name, there is no
    counterpart, because adapters are not imported."""
    word = text(value).rpartition(".")[2]
    return Lacks(LORA) if "lora" in word else Lacks("config.json in the folder of model.from gives it", is_lost=False)


def _loss(value: Any) -> int | Lacks:
    """Return 1024, the tokens of a chunk (plan.chunked_loss), for "LinearCrossEntropyLoss" and
    "CEWithChunkedOutputLoss". "CrossEntropyLoss" sets no field (Lacks, with the reason): it is the
    loss of tightfit's language models, too. For any other loss, there is no counterpart (Lacks,
    with the reason)."""
    word = text(value).rpartition(".")[2]
    if word in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss"):
        return 1024
    if word == "CrossEntropyLoss":
        return Lacks("this is the loss of tightfit's language models, too", is_lost=False)
    return Lacks("tightfit uses the model's own loss or the job's loss (loss: {python: ...})")


def _recipe_step(value: Any) -> str | Lacks:
    """Return "full" (recompute every block) for true, and "none" for false. Any other value is an
    error (ValueError)."""
    return "full" if flag(value) else "none"


def _tracker(value: Any) -> list[str] | Lacks:
    """Return ["tensorboard"] for "TensorBoardLogger", ["wandb"] for "WandBLogger" and ["mlflow"]
    for "MLFlowLogger". Any other logger sets no field (Lacks, with the reason)."""
    word = text(value).rpartition(".")[2].lower()
    for name in ("tensorboard", "wandb", "mlflow"):
        if name in word:
            return [name]
    return Lacks("tightfit logs every step in metrics.jsonl", is_lost=False)


_TEMPLATE = "tightfit reads one field of text; " + CHAT.partition("yet: ")[2]
KEYS: tuple[Key, ...] = (
    Key("model._component_", "", _component),
    *lacks(
        LORA, "model.lora_*", "model.apply_lora_*", "model.use_dora", "model.quantize_base", "save_adapter_weights_only"
    ),
    *lacks("torchtune's own sizes: give them as config keys beside model.architecture", "model.*"),
    Key("checkpointer.checkpoint_dir", "model.from", text, "", "the folder with config.json and safetensors files"),
    *needless("the folder's index names its files", "checkpointer.*"),
    Key(
        "tokenizer.path",
        "data.tokenizer",
        lambda v: (
            str(Path(text(v)).parent)
            if str(v).endswith("tokenizer.json")
            else Lacks("tightfit reads tokenizer.json; the folder of the weights has it", False)
        ),
        "",
        "tokenizer.json; other forms are read from the folder of the weights",
    ),
    Key("tokenizer.max_seq_len", "data.sequence_length", whole),
    Key("tokenizer.prompt_template", "", None, "", CHAT),
    *needless(TOKENIZER, "tokenizer.*"),
    Key(
        "dataset._component_",
        "data.dataset",
        lambda v: HUB_SOURCES.get(text(v).rpartition(".")[2], text(v)),
        "dataset",
        "data sets that torchtune names have a hub id",
    ),
    Key("dataset.source", "data.dataset", text, "source", "json and parquet name data_files"),
    Key("dataset.data_files", "data.jsonl", lambda v: v, "data_files", "the files"),
    Key("dataset.column", "data.field", text),
    Key(
        "dataset.packed",
        "data.packing",
        packed,
        "",
        "true is packed; in a packed sequence, tokens attend to the texts before theirs, which torchtune prevents",
    ),
    *lacks(MASKED, "dataset.train_on_input", "dataset.masking_strategy"),
    *lacks(_TEMPLATE, "dataset.*"),
    *lacks(
        "name such data in evaluate.data; without it, the fraction data.held_out of the data is used",
        "dataset_val._component_",
        "dataset_val.*",
    ),
    *needless("tightfit draws samples in random order", "shuffle", "sampler.*"),
    *needless("tightfit collates by itself", "collate_fn", "batch_size_val", "packed"),
    Key("seed", "train.seed", whole),
    Key("batch_size", "plan.micro_batch", whole, "micro_batch", "samples of each device; a factor of train.batch"),
    Key("gradient_accumulation_steps", "train.batch", whole, "accumulation", "a factor of train.batch"),
    Key("epochs", "train.epochs", positive, "epochs"),
    Key("max_steps_per_epoch", "train.steps", count, "steps_per_epoch", "times the epochs"),
    Key("optimizer._component_", "train.optimizer", optimizer, "optimizer"),
    Key("optimizer.lr", "train.learning_rate", number),
    Key("optimizer.weight_decay", "train.weight_decay", number),
    Key("optimizer.betas", "train.betas", lambda v: [number(one) for one in v], "", "both numbers"),
    Key("optimizer.eps", "train.epsilon", number),
    Key("optimizer.momentum", "train.momentum", number),
    Key("optimizer.fused", "plan.fused_optimizer", flag),
    *lacks("tightfit has no counterpart of this optimizer setting", "optimizer.*"),
    Key("lr_scheduler._component_", "train.schedule", schedule, "schedule"),
    Key("lr_scheduler.num_warmup_steps", "train.warmup", whole, "warmup"),
    *lacks("tightfit's schedules have no such setting", "lr_scheduler.*"),
    Key("loss._component_", "plan.chunked_loss", _loss),
    *lacks("tightfit uses the model's own loss or the job's loss", "loss.*"),
    Key("clip_grad_norm", "train.clip", positive),
    Key("optimizer_in_bwd", "plan.update_in_backward", flag),
    Key("compile", "plan.compile", compiled),
    *needless("tightfit compiles blocks, or the model with its loss", "compile.*"),
    Key("enable_activation_checkpointing", "plan.recompute", _recipe_step),
    Key("ac_mode", "plan.recompute", lambda v: str(v), "ac_mode", "full or selective"),
    Key("ac_option", "plan.recompute", lambda v: v, "ac_option", "a number n is every-n"),
    Key(
        "enable_activation_offloading",
        "plan.offload",
        lambda v: ("activations",) if flag(v) else (),
        "offload_activations",
        "true adds activations",
    ),
    Key("activation_offloading_use_streams", "", None, "", "tightfit copies on a stream of its own", False),
    Key(
        "fsdp_cpu_offload",
        "plan.offload",
        lambda v: ("states", "gradients", "parameters") if flag(v) else (),
        "offload_all",
        "true is states, gradients and parameters",
    ),
    Key(
        "fsdp_reshard_after_forward",
        "plan.zero",
        lambda v: (3 if flag(v) else 2, False),
        "zero",
        "true is zero 3, false is zero 2",
    ),
    Key("custom_sharded_layers", "", None, "", "tightfit finds a model's blocks by itself", False),
    Key("tensor_parallel_dim", "plan.tp", whole, "tp"),
    *needless("tightfit knows how to shard its models", "tensor_parallel_plan._component_", "tensor_parallel_plan.*"),
    Key("context_parallel_dim", "plan.cp", whole, "cp"),
    Key("data_parallel_shard_dim", "plan.dp_shard", whole, "dp_shard"),
    Key("data_parallel_replicate_dim", "plan.dp_replicate", whole, "dp_replicate"),
    Key("dtype", "plan.precision", wide, "weights", "bf16 is bf16-true, with weights in bf16; fp32 is fp32"),
    Key("enable_fp8_training", "plan.float8", lambda v: "tensorwise" if flag(v) else "none", "", "true is tensorwise"),
    Key(
        "fp8_recipe_name",
        "plan.float8",
        lambda v: "rowwise" if "rowwise" in str(v) else "tensorwise",
        "float8",
        "tensorwise or rowwise",
    ),
    *lacks(QUANTIZED, "quantizer._component_", "quantizer.*"),
    Key("device", "", None, "", "tightfit takes the devices of the machine", False),
    *needless(
        "tightfit starts and connects its processes",
        "device_type",
        "backend",
        "fsdp_sharding_strategy",
        "cudnn_deterministic_mode",
        "low_cpu_ram",
    ),
    Key("run_val_every_n_steps", "train.evaluate_every", count),
    *needless("tightfit evaluates train.evaluate_samples samples", "max_val_steps"),
    Key("save_every_n_steps", "train.checkpoint_every", count),
    *lacks("train.checkpoint_every is a number of steps", "save_every_n_epochs"),
    *needless("tightfit train --out names the run's folder", "output_dir", "log_dir"),
    Key(
        "resume_from_checkpoint",
        "",
        None,
        "",
        "tightfit train --resume continues from tightfit's own checkpoints",
        False,
    ),
    *needless(
        "tightfit has one checkpoint format",
        "enable_async_checkpointing",
        "keep_last_n_checkpoints",
        "use_distributed_state_dict",
        "adapter_checkpoint",
    ),
    Key("metric_logger._component_", "train.trackers", _tracker),
    *needless("names and folders of a logger", "metric_logger.*"),
    *needless(LOGS, "log_every_n_steps", "log_peak_memory_stats", "log_level", "profiler._component_", "profiler.*"),
    *lacks(
        PREFERENCES,
        "teacher_*",
        "kd_*",
        "ref_*",
        "policy_*",
        "reward_*",
        "value_*",
        "ppo_*",
        "grpo_*",
        "num_generations",
    ),
    Key("fsdp.cpu_offload", "plan.offload", offload_all, "offload_all"),
    Key("dataloader.num_workers", "plan.loader_workers", whole),
    Key("dataloader.prefetch_factor", "plan.prefetch", count),
    Key("dataloader.pin_memory", "plan.pin_memory", flag),
    *needless("tightfit collates and shuffles by itself", "dataloader.*"),
    *needless(
        "only for generation and evaluation",
        "enable_kv_cache",
        "top_k",
        "temperature",
        "max_new_tokens",
        "max_generated_tokens",
        "prompt.*",
        "tasks",
        "limit",
        "max_seq_length",
        "inference.*",
    ),
    *needless("values that other keys refer to", "base_model_path", "model_name", "cache_dir", "expname"),
)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file. Each ${name} and ${section.name} in it is replaced
    by the value of that key, and the paths of the checkpoint and the data are made absolute if they
    exist.

    folder  the folder of the imported file, where relative paths start
    """

    def look_up(name: str) -> Any:
        value: Any = content
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def filled(value: Any, depth: int = 4) -> Any:
        if isinstance(value, dict):
            return {name: filled(one) for name, one in value.items()}
        if isinstance(value, list):
            return [filled(one) for one in value]
        if not isinstance(value, str) or "${" not in value or depth == 0:
            return value
        whole_value = re.fullmatch(r"\$\{([\w.]+)\}", value)
        if whole_value:
            found = look_up(whole_value[1])
            return value if found is None else filled(found, depth - 1)
        return re.sub(r"\$\{([\w.]+)\}", lambda one: str(look_up(one[1]) or one[0]), value)

    found = filled(content)
    for section, name in (("checkpointer", "checkpoint_dir"), ("dataset", "data_files")):
        if isinstance(found.get(section), dict) and name in found[section]:
            found = {**found, section: {**found[section], name: existing(found[section][name], folder)}}
    return found


def _data(draft: Draft) -> None:
    parts = draft.parts
    source, files, component = parts.get("source"), parts.get("data_files"), str(parts.get("dataset", ""))
    if source in ("json", "parquet", "text") and files:
        name = {"json": "jsonl"}.get(source, source)
        draft.fields[f"data.{name}"] = files
        draft.settle("source", "not needed", f"data.{name} names the files")
    elif source:
        draft.fields["data.dataset"] = source
    elif component and "." not in component:
        draft.fields["data.dataset"] = component
    elif component:
        draft.settle(
            "dataset", "no counterpart", "a builder of torchtune's: write its texts as JSON lines, in data.jsonl"
        )
    if component and not component.endswith("text_completion_dataset"):
        draft.remark("dataset", _TEMPLATE)
        draft.to_do.append(
            "write the texts that the data set's template makes into one field, and name it in data.field"
        )


def _combine(draft: Draft) -> None:
    parts, fields = draft.parts, draft.fields
    _data(draft)
    if parts.get("dataset") and str(parts["dataset"]).endswith("text_completion_dataset"):
        draft.settle("dataset", "not needed", "plain texts, as tightfit reads them")
    if parts.get("steps_per_epoch") and parts.get("epochs"):
        parts["steps"] = int(parts["steps_per_epoch"] * parts["epochs"])
    if parts.get("ac_mode") == "selective" and fields.get("plan.recompute") != "full":
        option = str(parts.get("ac_option", "op"))
        fields["plan.recompute"] = "selective" if option == "op" else "full" if option == "1" else f"every-{option}"
    several = {"tp", "dp_shard", "dp_replicate", "offload_all"} & set(parts)
    if several or parts.get("devices", 1) > 1:
        draft.imply("zero", (3, False), "devices")
    choice = parts.get("optimizer")
    if choice and choice.name == "adamw" and "train.weight_decay" not in fields:
        fields["train.weight_decay"] = 0.01
        draft.remark("optimizer", "train.weight_decay: 0.01, its default")
    if fields.get("train.weight_decay"):
        fields["train.no_decay"] = []
        draft.remark("train.weight_decay", "train.no_decay: [], because torchtune decays all parameters")
    if fields.get("plan.update_in_backward") and parts.get("accumulation", 1) > 1:
        draft.contradict(
            "optimizer_in_bwd is on, but gradient_accumulation_steps is more than 1: an update in backward cannot wait"
        )
        draft.drop("plan.update_in_backward")
    if fields.get("plan.update_in_backward") and "train.clip" in fields:
        draft.contradict(
            "optimizer_in_bwd is on, but clip_grad_norm needs the norm of all gradients before the first update"
        )
        draft.drop("plan.update_in_backward")


IMPORTER = Importer(
    name="torchtune",
    title="torchtune",
    marks=(
        "model._component_",
        "checkpointer._component_",
        "optimizer._component_",
        "dataset._component_",
        "tokenizer._component_",
    ),
    keys=KEYS,
    defaults={"gradient_accumulation_steps": 1, "dtype": "fp32"},
    auto="torchtune has no auto; null leaves a value to its default",
    prepare=_prepare,
    combine=_combine,
)
