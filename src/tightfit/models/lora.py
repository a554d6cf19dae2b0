"""Adds low-rank adapters (LoRA, DoRA) to models, merges them and saves them, with the library peft.
For QLoRA, also stores the frozen layers in 4 bits.

The adapted model keeps its class and its modules' names. A layer of peft replaces each adapted
linear layer. It holds the frozen layer as `base_layer` and the trained matrices as `lora_A` and
`lora_B`. So every method works on an adapted model as on any partly frozen model.

Example: rank 16 adapters of a 4096 x 4096 layer train 2 x 16 x 4096 = 131,072 weights; the layer's
own 16.8 million weights get no gradients and no optimizer states.

Source  LoRA: Hu et al. 2021, arXiv:2106.09685. DoRA: Liu et al. 2024, arXiv:2402.09353.
        QLoRA: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tightfit.errors import InputError
from tightfit.job import LoraSpec, ModelSpec
from tightfit.models.python import as_input_error
from tightfit.optional_packages import import_optional

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER = "default"  # peft's name of an adapter that has no other name
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of the names in peft's files
# layers of architectures with a state space: peft refuses an adapter, or the model reads the layer's weight without
# calling the layer, so that an adapter would have no effect
_NOT_ADAPTED = {
    "mamba": ("dt_proj", "out_proj"), "falcon_mamba": ("dt_proj", "out_proj"), "mamba2": ("out_proj",), "jamba": ("dt_proj",),
    "falcon_h1": ("out_proj",), "nemotron_h": ("out_proj",),
}  # fmt: skip
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}


def lora_of(model: Any) -> LoraSpec | None:
    """Return the setting `model.lora` of a job: which adapters to train. None if it is not set, or
    if the job's model is the user's own callable."""
    return model.lora if isinstance(model, ModelSpec) else None


def quantizes(model: Any) -> bool:
    """Return whether a job's model stores its frozen layers in 4 bits."""
    lora = lora_of(model)
    return lora is not None and lora.quantize is not None


def add_adapters(model: nn.Module, spec: ModelSpec, task: str | None) -> nn.Module:
    """Freeze a transformers model and add trainable adapters to it, in place. Return the model.

    The modules of `spec.lora.modules_to_save` and a classifier's output layer are not frozen. They
    stand for themselves, without peft's wrapper, and are saved as peft saves them. With `spec.lora.quantize`, the frozen linear
    layers are also stored in 4 bits, except for the output layer.

    spec  the model's spec; `spec.lora` describes the adapters
    task  the model's task

    Raises InputError if a library is not installed, if a target matches no linear layer, if a name
    matches no module, or if no layer can be quantized.
    """
    lora = spec.lora
    assert lora is not None
    peft = import_optional("peft", "job: model.lora")
    heads = classifier_heads(model, bool(lora.modules_to_save)) if task == "classification" else []
    whole = _modules_named(model, [*(lora.modules_to_save or []), *heads])
    shared = _sharing_weights(model, whole)  # peft reads tied weights as two, so both are saved
    whole += shared
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=target_names(model, lora.targets, whole),
        base_model_name_or_path=spec.from_,
        task_type=_PEFT_TASKS.get(task or "") or _type_of_classifier(model, whole),
    )
    with warnings.catch_warnings(), as_input_error("job: model.lora", "choose other targets"):
        # peft reads a name that transformers renamed, and says that it transposes GPT-2's layers
        warnings.simplefilter("ignore")
        adapted: nn.Module = peft.inject_adapter_in_model(config, model, ADAPTER)
    config.modules_to_save = whole or None  # only now: peft would put a copy beside each module
    if shared and hasattr(config, "ensure_weight_tying"):  # not in older versions
        config.ensure_weight_tying = True
    for name in whole:
        adapted.get_submodule(name).requires_grad_(True)
    if lora.quantize is not None:
        _quantize_frozen_layers(adapted)
    return adapted


def _type_of_classifier(model: nn.Module, whole: list[str]) -> str | None:
    """Return peft's name of the task of a classifier of texts whose output layer is trained. With this name, peft
    reads the output layer with the adapters. Return None for any other model."""
    return "SEQ_CLS" if whole and type(model).__name__.endswith("ForSequenceClassification") else None


def classifier_heads(model: nn.Module, may_lack: bool = False) -> list[str]:
    """Return the names of the modules that a classifier has beside its base model: its output layer, and what comes
    directly before it. A pretrained folder may have no weights for them.

    may_lack  whether the result may be empty, because the job names the output layer

    Raises InputError if there are none, or if the model does not say which module is its base model.
    """
    base = getattr(model, "base_model_prefix", "")
    heads = [name for name, module in model.named_children() if name != base and any(True for _ in module.parameters())]
    if not hasattr(model, base) or not heads:
        if may_lack:
            return []
        raise InputError(
            "job: model.lora",
            f"would freeze all layers of {type(model).__name__}, also the output layer, which may be new",
            "name the output layer in model.lora.modules_to_save",
        )
    return heads


def _modules_named(model: nn.Module, names: list[str]) -> list[str]:
    """Return the full names of the modules with these names: a name is a full name, or its last parts. Modules inside of
    others are left out. Raises InputError for a name that no module with parameters has."""
    found: list[str] = []
    trainable = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    for asked in names:
        matched = [name for name in trainable if name == asked or name.endswith(f".{asked}")]
        if not matched:
            known = sorted({name.rpartition(".")[2] for name in trainable if not name.rpartition(".")[2].isdigit()})
            raise InputError(
                f"job: model.lora.modules_to_save: {asked}",
                "matches no module with weights",
                f"use some of: {', '.join(known)}",
            )
        found += matched
    return [name for name in dict.fromkeys(found) if not _is_inside(name, set(found) - {name})]


def target_names(model: nn.Module, targets: str | list[str], whole: Sequence[str] = ()) -> list[str]:
    """Return the full names of the linear layers that get adapters.

    targets  "all-linear" for all linear layers but the output layer; or one or several names. A
             name such as q_proj selects the layers whose full name ends with .q_proj; a pattern
             with *, such as "*.mlp.*", selects those whose full name it matches
    whole    full names of modules that are trained whole. Their layers get no adapters

    Raises InputError for a target that matches no linear layer, or one that gets no adapters: see `_cannot_adapt`.
    """
    linear = {
        name: module for name, module in model.named_modules() if _is_linear(module) and not _is_inside(name, whole)
    }
    if targets == "all-linear":
        output = _output_layer(model)
        return [
            name for name, module in linear.items() if module is not output and not _cannot_adapt(model, name)
        ] or _refuse_target(targets, "matches no linear layer that can get an adapter", linear)
    names: list[str] = []
    for target in [targets] if isinstance(targets, str) else targets:
        matched = [name for name in linear if name == target or name.endswith(f".{target}") or _matches(name, target)]
        if not matched:
            _refuse_target(target, "matches no linear layer", linear)
        if why := next((why for name in matched if (why := _cannot_adapt(model, name))), ""):
            _refuse_target(target, why, [name for name in linear if not _cannot_adapt(model, name)])
        names += matched
    return list(dict.fromkeys(names))


def _sharing_weights(model: nn.Module, modules: list[str]) -> list[str]:
    """Return the full names of the other modules that have a weight of one of these modules, such as the embedding of
    an output layer with tied weights."""
    weights = {id(parameter) for name in modules for parameter in model.get_submodule(name).parameters()}
    return [
        name
        for name, module in model.named_modules()
        if not _is_inside(name, modules)
        and any(id(parameter) in weights for parameter in module.parameters(recurse=False))
    ]


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module or tensor with this full name is one of the modules, or inside one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _refuse_target(target: str, found: str, others: Iterable[str]) -> NoReturn:
    known = sorted({name.rpartition(".")[2] for name in others})
    raise InputError(f"job: model.lora.targets: {target}", found, f"use all-linear, or some of: {', '.join(known)}")


def _cannot_adapt(model: nn.Module, name: str) -> str:
    """Return why a linear layer gets no adapter, or "" if it gets one."""
    last, architecture = name.rpartition(".")[2], getattr(getattr(model, "config", None), "model_type", "")
    if last in _NOT_ADAPTED.get(architecture, ()):
        return f"names layers of {architecture} whose weights the model reads without calling the layers"
    if _is_moved_to_experts(model, name):
        return f"names layers for which peft adapts the experts of {architecture} in their place"
    return ""


def _is_moved_to_experts(model: nn.Module, name: str) -> bool:
    """Return whether peft takes the name of a layer for that of experts, whose weights transformers stacks.

    It does so for every layer with the name of an expert's, such as gate_proj of a layer without experts, and
    again where it loads the adapter."""
    import peft

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # an older peft, which does not
        return False
    config = peft.LoraConfig(target_modules=[name])
    try:
        convert(config, model, None)
    except ValueError:  # it wants the other layers of the experts, too
        return True
    return name not in (config.target_modules or ())


def _matches(name: str, pattern: str) -> bool:
    return "*" in pattern and fnmatch.fnmatchcase(name, pattern)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear, or Conv1D as in GPT-2."""
    from torch import nn
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
    from transformers.pytorch_utils import Conv1D

    # nn.MultiheadAttention reads the weight of its output layer without calling the layer
    return isinstance(module, nn.Linear | Conv1D) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _output_layer(model: nn.Module) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def _quantize_frozen_layers(model: nn.Module) -> None:
    """Replace the frozen nn.Linear layers of an adapted model by layers in 4 bits, one by one, except
    for the output layer. Raises InputError if there is no layer to replace."""
    from torch import nn

    from tightfit.models.nf4 import Nf4Linear, can_quantize

    output = _output_layer(model)
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    layers = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not output
        and uses[id(module.weight)] == 1
        and can_quantize(module)
        and not _weight_is_read(model, name)
    ]
    if not layers:
        raise InputError(
            "job: model.lora.quantize",
            f"{type(model).__name__} has no frozen nn.Linear layer whose number of weights is a multiple of 64",
            "leave out quantize",
        )
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(name, Nf4Linear(layer))


def _weight_is_read(model: nn.Module, name: str) -> bool:
    """Return whether the code around a layer reads its weight or the weight's type, as T5's blocks do, rather than
    only calling the layer. Such a layer has to keep its weight."""
    parent, _, attribute = name.removesuffix(".base_layer").rpartition(".")
    kind: Any = type(model.get_submodule(parent))
    return f"self.{attribute}.weight" in _code_of(kind)


@cache
def _code_of(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters of peft, which were added for `model.lora` or by the
    user's own code."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def plain_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel, the wrapper of peft. Return any other model as it is."""
    from torch import nn

    base = getattr(model, "get_base_model", None)
    found = base() if base is not None and has_adapters(model) else model
    assert isinstance(found, nn.Module)
    return found


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge each adapter into the weight that it adapts, so that the layer computes the same
    without the adapter, and remove the adapters, in place. Return the model, without the wrapper of
    peft if it has one. Layers in 4 bits are dequantized to fp32 first.

    Raises InputError for adapters that are no part of a layer, such as those of prefix tuning.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    from tightfit.models.nf4 import Nf4Linear

    plain = plain_model(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, Nf4Linear):
            plain.set_submodule(name, module.dequantized())
    if isinstance(model, PeftModel):
        if not hasattr(model.base_model, "merge_and_unload"):
            kind = str(next(iter(model.peft_config.values())).peft_type).rpartition(".")[2]
            raise InputError(
                "--merge", f"adapters of the kind {kind} are no part of a layer's weights", "leave out --merge"
            )
        with warnings.catch_warnings(), as_input_error("--merge", "leave out --merge"):
            warnings.simplefilter("ignore")  # embeddings that were tied are saved apart
            merged: nn.Module = model.merge_and_unload()
        return merged
    for name, module in list(plain.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            plain.set_submodule(name, module.get_base_layer())
    if hasattr(plain, "peft_config"):
        del plain.peft_config
    return plain


def save_adapters(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters of a model into a folder, in the format that `PeftModel.from_pretrained`
    reads.

    model    the model with adapters; only its structure is used, its tensors are not read
    tensors  {name in the model: full tensor}: the tensors to save. Those that do not belong to an
             adapter are left out
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import ModulesToSaveWrapper
    from safetensors.torch import save_file

    adapter = _adapter_name(model)
    found = get_peft_model_state_dict(model, dict(tensors), adapter_name=adapter, save_embedding_layers=False)
    config: Any = model.peft_config[adapter]  # type: ignore[index, union-attr]
    if not any(isinstance(module, ModulesToSaveWrapper) for module in model.modules()):
        whole = config.modules_to_save or []
        found |= {name: tensor for name, tensor in tensors.items() if _is_inside(name, whole)}
    prefix = "" if isinstance(model, PeftModel) else PREFIX
    folder.mkdir(parents=True, exist_ok=True)
    kept = {f"{prefix}{name}": tensor.cpu().contiguous() for name, tensor in found.items()}
    written: set[int] = set()
    for name, tensor in kept.items():  # a file has no shared weights
        kept[name] = tensor.clone() if tensor.data_ptr() in written else tensor
        written.add(tensor.data_ptr())
    save_file(kept, folder / ADAPTER_FILE, metadata={"format": "pt"})
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    content["inference_mode"] = True
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def _adapter_name(model: nn.Module) -> str:
    names = list(model.peft_config)  # type: ignore[arg-type, union-attr]
    return ADAPTER if ADAPTER in names else names[0]


__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "add_adapters",
    "classifier_heads",
    "has_adapters",
    "lora_of",
    "merge_adapters",
    "plain_model",
    "quantizes",
    "save_adapters",
    "target_names",
]
