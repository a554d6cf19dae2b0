"""Imports torchtune's recipes (YAML)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tightfit.importers import data_sources as data
from tightfit.importers.adapters import OTHER_BITS, combine_adapters
from tightfit.importers.conversions import (
    chosen,
    compiled,
    count,
    existing,
    flag,
    four_bits,
    number,
    offload_all,
    optimizer,
    positive,
    schedule,
    shuffled,
    switched_on,
    text,
    whole,
    wide,
)
from tightfit.importers.data_sources import Source
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless, objective
from tightfit.importers.training_arguments import DISTILLATION, LOGS, PREFERENCES, TOKENIZER

HUB_SOURCES = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}


PLAIN_COLUMNS = {
    "text_completion_dataset": "text",
    "wikitext_dataset": "page",
    "cnn_dailymail_articles_dataset": "article",
}  # builders of plain texts: the column with the text
PAIR_COLUMNS = {
    "instruct_dataset": ("input", "output"),
    "samsum_dataset": ("dialogue", "summary"),
    "grammar_dataset": ("input", "output"),
}  # builders of prompts with responses: their columns
_PREFERENCE_LOSSES = ("DPOLoss", "RSOLoss", "SimPOLoss", "PPOLoss", "GRPOLoss", "GRPOSimpleLoss")
_ALPACA = ("alpaca_dataset", "alpaca_cleaned_dataset")
_CHAT = "torchtune's tokenizer writes the messages, which can differ from the tokenizer's chat template"
_WRAPPED = "torchtune's tokenizers of chat models also write the prompt and the answer as messages"
_SYSTEM = "put the system message into the rows, as a message, or into a chat template"
_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_JOINED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def _component(value: Any) -> str | Lacks:
    """Return Lacks, with the reason: this key sets no field, because config.json in the folder of
    the weights describes the model. But if the builder's name has "lora" in it, a later step sets
    model.lora, and if it has "qlora" in it, model.lora.quantize: nf4."""
    text(value)
    return Lacks("config.json in the folder of model.from gives it", is_lost=False)


def _attention_layers(value: Any) -> list[str]:
    """Return the names of layers in transformers' models: "output_proj" becomes "o_proj"."""
    if not isinstance(value, list) or not value or any(str(one) not in _LAYERS for one in value):
        raise ValueError(f"a list of: {', '.join(_LAYERS)}")
    return [_LAYERS[one] for one in value]


def _several(value: Any) -> Lacks:
    """Return Lacks, with the reason: a list of data sets, which torchtune joins, sets no field."""
    return Lacks("name several data sets in data.sources, with weights in proportion to their sizes")


def _columns(value: Any) -> dict[str, str]:
    """Return the names of the columns, a mapping. A later step turns them into data.fields."""
    if not isinstance(value, dict) or not all(isinstance(one, str) and one for one in value.values()):
        raise ValueError("a mapping of columns' names")
    return dict(value)


def _loss(value: Any) -> int | Lacks:
    """Return 1024, the tokens of a chunk (plan.chunked_loss), for "LinearCrossEntropyLoss" and
    "CEWithChunkedOutputLoss". "CrossEntropyLoss" sets no field (Lacks, with the reason): it is the
    loss of tightfit's language models, too. The losses of preferences, such as DPOLoss, are refused.
    For any other loss, there is no counterpart (Lacks, with the reason)."""
    word = text(value).rpartition(".")[2]
    if word in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss"):
        return 1024
    if "rlhf" in str(value) or word in _PREFERENCE_LOSSES:
        return Lacks(PREFERENCES, is_refused=True)
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


KEYS: tuple[Key, ...] = (
    Key("model._component_", "", _component),
    Key("model.lora_rank", "model.lora.rank", whole, "lora_rank"),
    Key("model.lora_alpha", "model.lora.alpha", number, "lora_alpha"),
    Key("model.lora_dropout", "model.lora.dropout", number, "lora_dropout"),
    Key("model.lora_attn_modules", "model.lora.targets", _attention_layers, "lora_attention"),
    Key(
        "model.apply_lora_to_mlp",
        "model.lora.targets",
        switched_on,
        "lora_mlp",
        "true adds gate_proj, up_proj and down_proj",
    ),
    Key("model.apply_lora_to_output", "model.lora.targets", switched_on, "lora_output", "true adds lm_head"),
    Key("model.use_dora", "model.lora.dora", switched_on, "lora_dora"),
    Key("model.quantize_base", "model.lora.quantize", four_bits, "lora_quantize"),
    *lacks("tightfit has no counterpart of this setting of adapters", "model.lora_*", "model.apply_lora_*"),
    *needless("tightfit export writes the adapters, or with --merge the whole model", "save_adapter_weights_only"),
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
    *lacks(
        "tightfit writes prompts by data.chat_template; name a file with this template, in Jinja",
        "tokenizer.prompt_template",
        "tokenizer.prompt_template.*",
    ),
    *needless(TOKENIZER, "tokenizer.*"),
    Key(
        "dataset._component_",
        "data.dataset",
        lambda v: text(v).rpartition(".")[2],
        "dataset",
        "data sets that torchtune names have a hub id; alpaca, instruct and chat builders set data.format",
    ),
    Key("dataset", "data.sources", _several),
    Key("dataset.source", "data.dataset", text, "source", "json and parquet name data_files"),
    Key("dataset.data_files", "data.jsonl", lambda v: v, "data_files", "the files"),
    Key("dataset.split", "data.split", text, "split", "train needs no field"),
    Key("dataset.name", "data.subset", text, "subset"),
    Key("dataset.subset", "data.subset", text, "subset"),
    Key("dataset.column", "data.field", text, "column"),
    Key("dataset.column_map", "data.fields", _columns, "columns"),
    Key("dataset.conversation_column", "data.fields", text, "conversation_column"),
    Key(
        "dataset.conversation_style",
        "data.format",
        chosen({"sharegpt": "sharegpt", "openai": "messages"}, "tightfit reads conversations of sharegpt and openai"),
        "style",
    ),
    Key(
        "dataset.packed",
        "data.packing",
        flag,
        "packing",
        "true is separate: the texts of a sequence do not attend to one another; false is padded",
    ),
    *needless("a text longer than a sequence is cut in any case", "dataset.split_across_pack"),
    Key("dataset.train_on_input", "data.loss_on", flag, "train_on_input", "true is all, false is response"),
    Key(
        "dataset.masking_strategy",
        "data.loss_on",
        chosen({"train_on_all": True, "train_on_assistant": False}, data.LAST_TURN),
        "train_on_input",
        "train_on_all is all, train_on_assistant is response",
    ),
    *lacks(_SYSTEM, "dataset.new_system_prompt"),
    *lacks("tightfit takes all rows, as they are", "dataset.*"),
    *lacks(
        "name such data in evaluate.data; without it, the fraction data.held_out of the data is used",
        "dataset_val._component_",
        "dataset_val.*",
    ),
    Key("shuffle", "", shuffled, "", "true is what tightfit does"),
    *needless("tightfit draws samples in random order", "sampler.*"),
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
    *lacks(OTHER_BITS, "quantizer._component_", "quantizer.*"),
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
    *objective(DISTILLATION, "teacher_*", "kd_*"),
    *objective(
        PREFERENCES,
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
    """Set the source, the format, the loss and the packing of the data."""
    parts = draft.parts
    builder = str(parts.get("dataset", ""))
    source, lost = _source(draft, builder)
    if not source:
        _settle_rest(draft, "a builder of torchtune's: write its rows as JSON lines")
        if builder:
            draft.settle("dataset", "no counterpart", "a builder of torchtune's: write its texts as JSON lines")
            draft.to_do.append(f"write the rows of {builder} as prompts and responses, and name them in data.jsonl")
        return
    source = _with_format(draft, builder, source)
    for name in lost:
        draft.settle(name, "no counterpart", "only a data set of the Hub, or a folder, has it")
    part = "dataset" if "source" not in parts else "source" if "dataset" in source else "data_files"
    data.set_sources(draft, part, [source])
    _rows_of_source(draft, source)
    default = builder in _ALPACA
    value = "all" if parts.get("train_on_input", default) else "response"
    data.set_loss(draft, "train_on_input", [source], value, "dataset.train_on_input", default)
    data.set_packing(draft, "packing", "separate" if parts.get("packing") else "padded", "dataset.packed", False)
    chats = builder in PAIR_COLUMNS or builder in ("chat_dataset", "slimorca_dataset")
    if chats:
        draft.fields["data.chat_template"] = "tokenizer"
        draft.remark("dataset", f"data.chat_template: tokenizer; {_CHAT}")
        if draft.value("tokenizer.prompt_template") is not None:
            draft.to_do.append(f"tokenizer.prompt_template: {data.OTHER_TEMPLATE}")


def _source(draft: Draft, builder: str) -> tuple[Source, list[str]]:
    """Return tightfit's source for the data set, empty if it is not known, and the parts that it
    cannot have.

    builder: the name of torchtune's builder, without its module
    """
    parts = draft.parts
    source = parts.get("source") or HUB_SOURCES.get(builder)
    if not source:
        return {}, []
    found = data.source_of(source, parts.get("data_files"))
    return found, data.add_part(found, parts.get("subset"), parts.get("split"))


def _with_format(draft: Draft, builder: str, source: Source) -> Source:
    """Return a copy of the source with the format of its rows, which the builder decides."""
    parts = draft.parts
    columns = parts.get("columns", {})
    if builder in _ALPACA:
        draft.remark("dataset", f"{data.ALPACA_PROMPT}; {_WRAPPED}")
        return data.with_format(source, "alpaca", columns)
    if builder in PAIR_COLUMNS:
        prompt, response = PAIR_COLUMNS[builder]
        names = {"prompt": columns.get("input", prompt), "response": columns.get("output", response)}
        return data.with_format(source, "prompt-response", names)
    if builder == "slimorca_dataset":
        return data.with_format(source, "sharegpt", columns)
    if builder == "chat_dataset" and "style" in parts:
        field = parts.get("conversation_column")
        return data.with_format(source, parts["style"], {"messages": field, "conversations": field})
    if builder in PLAIN_COLUMNS:
        field = parts.get("column", PLAIN_COLUMNS[builder])
        return source if field == "text" and "column" not in parts else {**source, "field": field}
    draft.to_do.append(
        f"set data.format and data.fields for the rows of {builder or 'the data set'}, whose form the file does not say"
    )
    return source


def _rows_of_source(draft: Draft, source: Source) -> None:
    """Settle the rows of keys that belong to the source's format or place."""
    shown = {"columns": "data.fields", "conversation_column": "data.fields", "column": "data.field"}
    for part, field in shown.items():
        if field not in draft.fields:
            draft.settle(part, "not needed", "these are the format's own names")
    if "dataset" not in source:
        draft.settle("source", "not needed", "the files say what they are")
    if "dataset" in source and "data_files" in draft.parts:
        draft.settle("data_files", "no counterpart", "only JSON, parquet and text files can be named")
    if draft.parts.get("split") == "train":
        draft.settle("split", "not needed", "train is the default")
    if "source" in draft.parts:
        draft.settle("dataset", "not needed", "it says what the rows hold")


def _settle_rest(draft: Draft, why: str) -> None:
    for part in ("split", "subset", "column", "columns", "conversation_column", "style", "packing", "train_on_input"):
        draft.settle(part, "left open", why)


def _adapters(draft: Draft) -> None:
    """Set model.lora if the model's builder has lora in its name."""
    parts, component = draft.parts, str(draft.value("model._component_") or "")
    builder = component.rpartition(".")[2]
    has_lora = "lora" in builder
    for row in draft.rows:
        if has_lora and row.key == "model._component_":
            row.note += "; its adapters are model.lora"
    why_off = "" if has_lora else f"the model's builder is {builder or 'not given'}"
    if has_lora and "qlora" in builder:
        parts.setdefault("lora_quantize", "nf4")
    layers = list(parts.get("lora_attention", ()))
    layers += _MLP if "lora_mlp" in parts else ()
    if "phi" in builder:
        joined = [_JOINED.get(name, name) for name in layers]
        if joined != layers:
            draft.remark("lora_attention", "transformers joins some of these layers, and each gets one adapter")
        layers = list(dict.fromkeys(joined))
    layers += ["lm_head"] if "lora_output" in parts else []
    for part in ("lora_attention", "lora_mlp", "lora_output"):
        if why_off:
            draft.settle(part, "not needed", f"no adapters are trained: {why_off}")
    defaults = {
        "rank": ("model.lora_rank", 8),
        "alpha": ("model.lora_alpha", 16),
        "dropout": ("model.lora_dropout", 0.0),
    }
    combine_adapters(draft, why_off, defaults)
    if has_lora and layers:
        draft.fields["model.lora.targets"] = layers
    elif has_lora:
        draft.to_do.append("set model.lora.targets: the file has no model.lora_attn_modules")


def _combine(draft: Draft) -> None:
    parts, fields = draft.parts, draft.fields
    _data(draft)
    if any(row.key == "tokenizer.max_seq_len" and row.value is None for row in draft.rows):
        draft.to_do.append(
            "set data.sequence_length: torchtune cuts no sample without max_seq_len, tightfit to 256 tokens"
        )
    _adapters(draft)
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
