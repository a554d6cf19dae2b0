"""Imports LLaMA-Factory's configuration (YAML): its own keys, and those of transformers'
TrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.errors import InputError
from tightfit.importers import data_sources as data
from tightfit.importers import training_arguments as hf
from tightfit.importers.adapters import (
    EIGHT_BITS,
    NEW_ADAPTERS,
    OTHER_ADAPTERS,
    OTHER_BITS,
    combine_adapters,
)
from tightfit.importers.conversions import (
    chosen,
    count,
    existing,
    flag,
    lora_targets,
    module_names,
    number,
    positive,
    switched_on,
    text,
    whole,
    wide,
)
from tightfit.importers.data_sources import Source
from tightfit.importers.mapping import Draft, Importer, Key, Lacks, lacks, needless
from tightfit.importers.reading import read_settings

_IMAGES = "tightfit trains language models on text alone"
_INFO = "dataset_info.json"
_OWN_TEMPLATES = ("alpaca", "default", "empty", "vicuna")  # which hardly any tokenizer has
_TAGS = {
    "messages": ("role", "content", "user", "assistant", "system"),
    "sharegpt": ("from", "value", "human", "gpt", "system"),
}  # by tightfit's format: the keys of a message, and the names of the roles
_TAG_NAMES = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}  # of formatting: alpaca


def _names(value: Any) -> list[str]:
    """Return the names of the data sets, as a list; a text with commas is divided. A later step
    reads dataset_info.json in dataset_dir, which says where they are and what their rows hold.
    Several data sets become data.sources."""
    found = value if isinstance(value, list) else text(value).split(",")
    if not all(isinstance(one, str) and one.strip() for one in found):
        raise ValueError("names of data sets")
    return [one.strip() for one in found]


def _info(value: Any) -> dict[str, Any] | Lacks:
    """Return the content of dataset_info.json in this folder, which says where the data sets are. The
    key itself sets no field (Lacks, with the reason)."""
    if isinstance(value, dict):
        return value
    return Lacks(f"it has no {_INFO} here, or none that can be read", False)


def _stage(value: Any) -> str | Lacks:
    """Return "causal-lm" for sft and pt. The stages rm, ppo, dpo and kto are refused. Any other value
    is an error (ValueError)."""
    word = str(value).lower()
    if word in ("rm", "ppo", "dpo", "kto"):
        return Lacks(hf.PREFERENCES, is_refused=True)
    if word not in ("sft", "pt"):
        raise ValueError("one of: sft, pt, rm, ppo, dpo, kto")
    return "causal-lm"


def _targets(value: Any) -> str | list[str] | Lacks:
    """Return the names of layers, as a list; a text with commas is divided. "all" becomes
    "all-linear"."""
    names = value if isinstance(value, list) else [one.strip() for one in text(value).split(",")]
    return "all-linear" if names == ["all"] else lora_targets(names)


def _bits(value: Any) -> str | Lacks:
    """Return "nf4" for 4: the frozen linear layers are stored in 4 bits. For other numbers of bits,
    there is no counterpart (Lacks, with the reason)."""
    return "nf4" if whole(value) == 4 else Lacks(EIGHT_BITS)


def _probabilities(value: Any) -> list[float]:
    """Return the probabilities of the data sets, as a list; a text with commas is divided. A later
    step turns them into the weights of data.sources."""
    return [number(one) for one in (value if isinstance(value, list) else str(value).split(","))]


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
        _stage,
        "",
        "pt and sft are causal-lm; rm, ppo, dpo and kto are refused",
    ),
    Key(
        "finetuning_type",
        "model.lora",
        chosen(
            {
                "lora": "lora",
                "full": Lacks("all weights are trained, as in tightfit without model.lora", False),
                "freeze": Lacks("tightfit trains all weights, or adapters"),
            },
            OTHER_ADAPTERS,
        ),
        "finetuning",
    ),
    Key(
        "template",
        "data.chat_template",
        text,
        "template",
        "chatml is chatml; others are tokenizer, whose text may differ from LLaMA-Factory's, as in a default system message",
    ),
    *lacks(data.ONE_TEMPLATE, "tool_format", "default_system", "system_prompt"),
    *lacks(data.ONE_TEMPLATE, "enable_thinking", "preserve_thinking"),
    Key("dataset", "data.dataset", _names, "datasets"),
    Key("dataset_dir", "data.dataset", _info, "dataset_info"),
    *lacks(
        "name such data in evaluate.data; without it, the fraction data.held_out of the data is used",
        "eval_dataset",
        "eval_on_each_dataset",
    ),
    *needless("the folder of images, videos and audio", "media_dir"),
    Key("cutoff_len", "data.sequence_length", whole),
    Key("model_max_length", "", None, "", "data.sequence_length is the length", False),
    Key("packing", "data.packing", flag, "packing", "true is packed for stage pt, and separate for stage sft"),
    Key(
        "neat_packing",
        "data.packing",
        switched_on,
        "neat_packing",
        "true is separate: the texts of a sequence do not attend to one another",
    ),
    Key(
        "val_size",
        "data.held_out",
        lambda v: number(v) if number(v) < 1 else Lacks("data.held_out is a share of the samples"),
        "",
        "a share of the samples",
    ),
    *lacks("tightfit takes all texts of its source; data.split names a part, such as train[:1000]", "max_samples"),
    *needless("data.sources draws by weight", "mix_strategy"),
    Key("interleave_probs", "data.sources", _probabilities, "probabilities"),
    Key("train_on_prompt", "data.loss_on", flag, "train_on_prompt", "true is all, false is response"),
    *lacks(data.LAST_TURN, "mask_history"),
    Key(
        "ignore_pad_token_for_loss",
        "",
        lambda v: Lacks("tightfit does not train on padding", not flag(v)),
        "",
        "tightfit does not train on padding",
    ),
    *lacks("data.loss_on: [user] trains on the prompts", "learn_prompt_only"),
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
    Key("lora_rank", "model.lora.rank", whole, "lora_rank"),
    Key("lora_alpha", "model.lora.alpha", number, "lora_alpha"),
    Key("lora_dropout", "model.lora.dropout", number, "lora_dropout"),
    Key("lora_target", "model.lora.targets", _targets, "lora_targets"),
    Key("use_dora", "model.lora.dora", switched_on, "lora_dora"),
    Key("use_rslora", "model.lora.alpha", switched_on, "lora_rslora", "alpha times the square root of the rank"),
    Key("loraplus_lr_ratio", "train.groups", positive, "lora_plus", "the matrices B get this multiple of the rate"),
    *needless("the learning rate of adapters of embeddings, which tightfit does not have", "loraplus_lr_embedding"),
    *lacks(NEW_ADAPTERS, "adapter_name_or_path", "adapter_folder", "create_new_adapter"),
    Key("additional_target", "model.lora.modules_to_save", module_names, "lora_whole"),
    *lacks(OTHER_ADAPTERS, "pissa_*", "oft_*", "module_dropout", "lora_*", "loraplus_*"),
    *lacks("tightfit trains all weights, or adapters", "freeze_*"),
    Key("quantization_bit", "model.lora.quantize", _bits, "lora_quantize"),
    Key(
        "quantization_type",
        "model.lora.quantize",
        chosen({"nf4": Lacks("nf4 is the type of quantization_bit: 4", False)}, OTHER_BITS),
        "",
        "nf4; fp4 has no counterpart",
    ),
    Key(
        "quantization_method",
        "model.lora.quantize",
        chosen(
            {
                "bnb": Lacks("nf4 is the type of bitsandbytes, too", False),
                "bitsandbytes": Lacks("nf4 is the type of bitsandbytes, too", False),
            },
            OTHER_BITS,
        ),
        "",
        "bnb; others have no counterpart",
    ),
    *needless("tightfit always quantizes the scales of nf4, too", "double_quantization"),
    *needless("tightfit places the weights itself", "quantization_device_map"),
    *needless(
        "only for the stages rm, ppo, dpo and kto",
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
    Key(
        "early_stopping_steps",
        "train.early_stopping",
        count,
        "patience",
        "evaluations without an improvement of metric_for_best_model",
    ),
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
_KNOWN = {key.name for key in _OWN}
KEYS: tuple[Key, ...] = _OWN + tuple(key for key in hf.OWN_KEYS if key.name not in _KNOWN)


def _prepare(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of the imported file with an absolute path of the model. If it names a
    DeepSpeed or FSDP file that exists, the content of that file replaces the name. If dataset_dir
    (by default data) has a dataset_info.json, the descriptions of the used data sets in it replace
    the name of the folder.

    folder  the folder of the imported file
    """
    content = hf.prepare(content, folder)
    names, dataset_dir = content.get("dataset"), content.get("dataset_dir") or "data"
    if not names or not isinstance(dataset_dir, str):
        return content
    try:
        used = _names(names)
    except ValueError:
        return content  # the conversion of the key says what is wrong
    if dataset_dir == "ONLINE":
        return {**content, "dataset_dir": {name: {"hf_hub_url": name} for name in used}}
    where = Path(existing(dataset_dir, folder))
    try:
        known = read_settings(where / _INFO)
    except InputError:
        return content
    return {**content, "dataset_dir": {name: _whole(known[name], where) for name in used if name in known}}


def _whole(info: Any, folder: Path) -> dict[str, Any]:
    """Return a data set's description in dataset_info.json, with an absolute path of its file."""
    info = info if isinstance(info, dict) else {}
    return {**info, "file_name": str(folder / str(info["file_name"]))} if info.get("file_name") else info


def _data(draft: Draft, stage: str) -> None:
    """Set the source, the format, the template, the loss and the packing of the data."""
    parts = draft.parts
    names, known = parts.get("datasets", []), parts.get("dataset_info", {})
    draft.settle("dataset_info", "not needed", f"its {_INFO} says where the data sets are and what their rows hold")
    sources = [_source(draft, name, known[name], stage) for name in names if name in known]
    if names and len(sources) == len(names):
        weights = parts.get("probabilities", [])
        if len(weights) == len(sources) > 1:
            sources = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
        else:
            draft.settle("probabilities", "not needed", "it is for as many data sets")
        data.set_sources(draft, "datasets", sources)
        _template(draft, sources, stage)
        data.set_loss(
            draft,
            "train_on_prompt",
            sources,
            "all" if parts.get("train_on_prompt") else "response",
            "train_on_prompt",
            False,
        )
        return
    for part in ("probabilities", "template", "train_on_prompt"):
        if part in parts:
            draft.settle(part, "left open", "it goes with data.format, which depends on the rows")
    if not names:
        return
    draft.settle("datasets", "no counterpart", f"{_INFO} was not found, or does not have them all")
    form = ""
    if stage != "pt":
        template = "chatml" if parts.get("template") == "chatml" else "tokenizer"
        loss = "all" if parts.get("train_on_prompt") else "response"
        form = f", with data.format: alpaca or sharegpt, data.chat_template: {template} and data.loss_on: {loss}"
    draft.to_do.append(
        f"data: name the files of {', '.join(names)} in data.jsonl{form}; or import the file where its dataset_dir is, "
        f"with a {_INFO} that has them"
    )


def _source(draft: Draft, name: str, info: dict[str, Any], stage: str) -> Source:
    """Return tightfit's source for a data set that dataset_info.json describes, with the format of
    its rows."""
    hub_id = next((info[key] for key in ("hf_hub_url", "ms_hub_url", "om_hub_url") if info.get(key)), None)
    source = data.source_of(
        str(hub_id or info.get("script_url") or info.get("cloud_file_name") or info.get("file_name"))
    )
    lost = data.add_part(source, info.get("subset"), info.get("split"))
    columns = info.get("columns")
    columns = columns if isinstance(columns, dict) else {}
    used = {"prompt", "query", "response", "messages", *(["system"] if not columns.get("system") else [])}
    lost += [key for key in ("folder", "num_samples", "ranking") if info.get(key)]
    lost += sorted(key for key in set(columns) - used)
    if lost:
        draft.remark("datasets", f"no counterpart: {', '.join(lost)} of {name}")
    if stage == "pt":
        field = columns.get("prompt") or "instruction"
        return source if field == "text" else {**source, "field": field}
    if info.get("formatting", "alpaca") == "alpaca":
        named = columns or _COLUMNS
        if not named.get("query"):
            return data.with_format(source, "prompt-response", {key: named.get(key) for key in ("prompt", "response")})
        return data.with_format(source, "alpaca", {_COLUMNS[key]: named.get(key) for key in _COLUMNS})
    own = info.get("tags")
    own = own if isinstance(own, dict) else {}
    tags = tuple(own.get(key, usual) for key, usual in zip(_TAG_NAMES, _TAGS["sharegpt"], strict=True))
    kind = next((kind for kind, known in _TAGS.items() if known == tags), None)
    if kind is None:
        draft.to_do.append(f"{name}: write its messages with the keys role and content, for data.format: messages")
        return {**source, "format": "messages"}
    field = columns.get("messages", "conversations")
    return data.with_format(source, kind, {"messages": field, "conversations": field})


def _template(draft: Draft, sources: list[Source], stage: str) -> None:
    """Set data.chat_template, which LLaMA-Factory also uses for rows of the format alpaca."""
    if not data.has_format(sources):
        draft.settle("template", "not needed", f"stage {stage} uses no template")
        return
    name = draft.parts.get("template")
    if name in _OWN_TEMPLATES:
        draft.settle("template", "no counterpart", f"{name} is a text of LLaMA-Factory's")
        draft.to_do.append(f"template is {name}: {data.OTHER_TEMPLATE}")
    elif name:
        data.set_template(draft, "template", "chatml" if name == "chatml" else "tokenizer")
    else:
        draft.assume("template", None, "data.chat_template", "tokenizer")


def _packing(draft: Draft, stage: str) -> None:
    parts = draft.parts
    is_packed = parts.get("packing", stage == "pt") or "neat_packing" in parts
    if "neat_packing" in parts and stage == "pt":
        draft.contradict("neat_packing is for stage sft, and the stage is pt")
    value = "padded" if not is_packed else "packed" if stage == "pt" else "separate"
    data.set_packing(draft, "packing" if "packing" in parts else "neat_packing", value, "packing", stage == "pt")
    if parts.get("packing") and value == "separate" and "neat_packing" not in parts:
        draft.remark("packing", "in LLaMA-Factory, the texts of a sequence attend to one another without neat_packing")


def _adapters(draft: Draft) -> None:
    parts = draft.parts
    given = draft.value("finetuning_type") or "lora"
    why_off = "" if parts.get("finetuning") else f"finetuning_type is {given}"
    rank = parts.get("lora_rank", 8)
    for key, kept in (("quantization_type", ("nf4",)), ("quantization_method", ("bnb", "bitsandbytes"))):
        if "lora_quantize" in parts and draft.value(key) not in (None, *kept):
            draft.settle("lora_quantize", "no counterpart", OTHER_BITS)
            parts.pop("lora_quantize")
    if not why_off:
        for key in ("use_galore", "use_apollo", "use_badam"):
            if draft.value(key):
                draft.contradict(f"finetuning_type is lora, but {key} is for full training")
    if not parts.get("lora_alpha"):
        parts.pop("lora_alpha", None)
    defaults = {"rank": ("lora_rank", 8), "alpha": ("lora_alpha", 2 * rank), "dropout": ("lora_dropout", 0.0)}
    combine_adapters(draft, why_off, defaults)
    if not why_off and "lora_targets" not in parts and draft.value("lora_target") is None:
        draft.assume("lora_target", "all", "model.lora.targets", "all-linear")


def _combine(draft: Draft) -> None:
    hf.combine(draft)
    stage = str(draft.value("stage") or "sft").lower()
    _data(draft, stage)
    _packing(draft, stage)
    _adapters(draft)
    if draft.parts.get("train_on_prompt") and draft.value("mask_history"):
        draft.contradict("mask_history and train_on_prompt are both on, but a prompt is masked or not")
    if draft.parts.get("muon"):
        draft.parts.pop("optimizer", None)
        draft.fields["train.optimizer"] = "muon"


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
