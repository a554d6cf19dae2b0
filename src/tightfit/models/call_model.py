"""Calls a model with the fields of a batch that it takes, and explains errors of its forward.

`call_model` decides which fields of a batch the model gets. `map_inputs` changes the tensors among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.models.batches import IGNORED, Batch, map_tensors

TARGETS = ("labels", "targets", "target")  # names of the field of a batch that one of torch's losses reads
_NOTED = "_tightfit_forward_parameters"  # attribute of a model: what `forward_parameters` returned
_HALF = ("BFloat16", "Half")  # as torch's messages name the 16-bit types
_WHOLE = ("Long", "long", "Int", "int", "Byte", "unsigned char")  # and the types of whole numbers


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call the model for a loss of the user's own, and return its output. If the batch is a pair or
    a list, the model gets its first item.

    If the batch is a dict, the model gets every field by name, except `labels`. A module of the
    user's own also gets `labels` if its forward has a parameter of that name; a model of
    transformers would compute a loss from them. The decoder of an encoder-decoder of transformers
    gets them shifted right, as it does without a loss of the user's own. A dict with the field `inputs` is different: the
    model gets this field, and by name those of the others that its forward has parameters for.

    Raises InputError if the model's forward does not accept the fields.
    """
    if not isinstance(batch, dict):
        return run_model(model, batch[0] if isinstance(batch, list | tuple) else batch)
    taken = forward_parameters(model)
    reads_labels = "labels" in taken and not is_of_transformers(model)
    fields = {name: value for name, value in batch.items() if name != "labels" or reads_labels}
    if is_of_transformers(model) and "labels" in batch and _lacks_decoder_input(model, batch):
        fields["decoder_input_ids"] = shifted_right(model, batch["labels"])
    if "inputs" in batch:
        others = {name: value for name, value in fields.items() if name in taken and name != "inputs"}
        return run_model(model, batch["inputs"], **others)
    return call_by_name(model, fields)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether the model is one of transformers: it has a config with a model_type."""
    return hasattr(getattr(model, "config", None), "model_type")


def _lacks_decoder_input(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Return whether the model is an encoder-decoder whose decoder's input is not in the batch."""
    given = {"decoder_input_ids", "decoder_inputs_embeds"}
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) and given.isdisjoint(batch)


def shifted_right(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the input from which an encoder-decoder's decoder predicts `labels`, (B, M): the
    decoder's start token, followed by all labels but the last.

    If the model has the method prepare_decoder_input_ids_from_labels, return the result of this
    method. Otherwise do what transformers does for models without it (M2M100, NLLB-MoE,
    Blenderbot); this raises InputError if the model's config has no decoder_start_token_id.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    config: Any = getattr(model, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    if prepare is not None and (start is not None or not hasattr(config, "model_type")):
        return prepare(labels=labels)
    if start is None:
        raise InputError(
            "job: model",
            f"{type(model).__name__} has no config.decoder_start_token_id, the first token of the decoder's input",
            "add the field decoder_input_ids to the samples, or give the model a config with decoder_start_token_id",
        )
    padding = getattr(config, "pad_token_id", None) or 0
    moved = functional.pad(labels[:, :-1], (1, 0), value=start)
    return moved.masked_fill(moved == IGNORED, padding)


def call_by_name(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model with keyword arguments, model(**inputs), and return its output. Raises
    InputError if the model's forward does not accept these names."""
    if torch.compiler.is_compiling():
        return model(**inputs)
    try:
        return run_model(model, **inputs)
    except TypeError as error:
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as wrong:
            raise InputError(
                "data",
                f"samples have the fields {', '.join(inputs)}, and the model's forward does not take these ({wrong})",
                "name the fields as forward names its arguments, or let samples be (input, target)",
            ) from error
        raise


def run_model(model: nn.Module, *inputs: Any, **fields: Any) -> Any:
    """Call the model and return its output. Raises InputError if the model fails on the types of its
    inputs, which NumPy's default type float64 and images in bytes are not meant for, on types that it
    mixes itself, or on gradients of its own that recomputed or offloaded activations do not allow."""
    if torch.compiler.is_compiling():
        return model(*inputs, **fields)
    try:
        return model(*inputs, **fields)
    except RuntimeError as error:
        given = [tensor for tensor in [*inputs, *fields.values()] if isinstance(tensor, Tensor)]
        explained = _explained(error, given, list(model.parameters()))
        if explained is None:
            raise
        raise explained from error


def refused_by_hooks(error: RuntimeError, what: str) -> InputError | None:
    """Return an InputError for an error of torch.func in code that runs with recomputed or offloaded activations, or
    None for any other error. what: the code, for the message."""
    message = str(error).partition("\n")[0]
    if "saved tensor hooks" not in message:
        return None
    return InputError(
        "plan: recompute or offload",
        f"the {what} computes gradients with torch.func, which does not work with either ({message})",
        "use recompute: none, and leave activations out of offload; or call torch.autograd.grad instead",
    )


def _explained(error: RuntimeError, inputs: list[Tensor], parameters: list[nn.Parameter]) -> InputError | None:
    """Return an InputError for some errors of a model's forward, or None for any other error.

    inputs      the tensors that forward got
    parameters  the model's parameters
    """
    message = str(error).partition("\n")[0]
    if refused := refused_by_hooks(error, "model's forward"):
        return refused
    if "not implemented for" in message and any(kind in message for kind in _HALF):
        return InputError(
            "plan: precision",
            f"the model uses an operation that PyTorch does not have in 16 bits on this device ({message})",
            "use precision: fp32",
        )
    if "type" not in message and "not implemented for" not in message:
        return None
    types = {tensor.dtype for tensor in inputs}
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
    stored = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    if torch.float64 in stored and torch.float64 not in types:
        return InputError(
            "job: model",
            f"has parameters of float64, gets inputs of the types {names}, and fails ({message})",
            "create the model in float32, which is PyTorch's default",
        )
    real = {dtype for dtype in types if dtype.is_floating_point}
    if "indices" in message and real:
        return InputError(
            "data",
            f"the model gets inputs of the types {names}, and fails ({message})",
            "let the dataset return ids as whole numbers, for example with array.astype('int64') or tensor.long()",
        )
    if real - stored - {torch.float32} or (types and not real and any(kind in message for kind in _WHOLE)):
        return InputError(
            "data",
            f"the model gets inputs of the types {names}, and fails ({message})",
            "let the dataset return real numbers as float32, for example with array.astype('float32') or tensor.float()",
        )
    if any(kind in message for kind in _HALF):
        return InputError(
            "job: model",
            f"fails on types that do not match ({message}); plan.precision gives all parameters the same type",
            "leave .bfloat16(), .half() and .float() out of the model, and create its tensors in the type of its inputs "
            "(dtype=x.dtype); or use precision: bf16-mixed, in which each operation casts its inputs",
        )
    return None


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of the model's forward. They are noted on the model, because
    compiled code cannot look at a signature: call this function before the model is compiled."""
    known: frozenset[str] | None = getattr(model, _NOTED, None)
    if known is None:
        if torch.compiler.is_compiling():
            return frozenset()
        try:
            known = frozenset(inspect.signature(model.forward).parameters)
        except ValueError:  # a module of torch.jit.trace has no signature
            known = frozenset()
        setattr(model, _NOTED, known)
    return known


def map_inputs(function: Callable[[Tensor], Tensor], batch: Batch, model: nn.Module, calls_model_itself: bool) -> Batch:
    """Return a batch with `function` applied to the tensors that the model may read, and not to those
    that only the loss reads: the target of a pair, and the fields of a dict that `call_model` does not
    pass to the model.

    calls_model_itself  as in `Objective`. If it is true, only the fields labels, targets and target
                        of a dict are known to be read by the loss alone
    """
    if isinstance(batch, dict):
        taken = forward_parameters(model)
        kept = {name for name in batch if name in TARGETS and name not in taken}
        if "inputs" in batch and not calls_model_itself:
            kept = {name for name in batch if name != "inputs" and name not in taken}
        return {name: value if name in kept else map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and not calls_model_itself:
        items = [map_tensors(function, batch[0]), *batch[1:]]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return map_tensors(function, batch)
