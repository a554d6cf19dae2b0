"""Defines the training objective: the sum of the losses of a batch, and the number of items in that
sum.

The engine, the loss methods and the dry run all read a job's loss through `Objective`. Sum and
count are kept apart so that the gradients do not depend on how a batch is split into micro-batches.
The step divides the sum by the count of the whole step, never by the number of micro-batches.

Example: a step has two micro-batches with 10 and 30 labels that count. The mean of the two
micro-batch means weights the first ten labels too much. (sum_1 + sum_2) / 40 is the mean over all
40 labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.fake import FakeTensor
from tightfit.errors import InputError
from tightfit.job import Job, LossSpec
from tightfit.job_sections.model import Task
from tightfit.models.loss_state import note_loss
from tightfit.models.losses import TorchLoss, class_numbers, explain_errors, torch_loss
from tightfit.models.python import load_python
from tightfit.models.tasks import task_of

# One batch as the data yields it: usually dict[str, Tensor], else what torch's default_collate
# returns.
Batch = Any
TARGETS = ("labels", "targets", "target")  # names of the field of a batch that one of torch's losses reads
IGNORED = -100  # the label of a position that does not count in the loss
_NOTED = "_tightfit_forward_parameters"  # attribute of a model: what `forward_parameters` returned
LABEL_COUNT_KEY = "tightfit: labelled"  # the key of a batch's LabelCount, once it is on the device


class LabelCount:
    """Holds how many labels of a batch count in the loss: `count` of `total` labels are not IGNORED
    (-100). The argument `of` becomes the attribute `total`.

    The host counts the labels before it copies the batch to the device, because reading the count
    from the device would make the host wait.

    This is a plain class, so torch.compile treats it as an opaque object and does not look at its
    numbers. A new count therefore causes no recompilation.
    """

    def __init__(self, count: int, of: int) -> None:
        self.count, self.total = count, of

    def scaled_to(self, labels: int) -> int:
        """Return how many of `labels` labels would count if their share were the same as in this
        batch, rounded up.

        Example: if 3 of 4 labels count, scaled_to(10) is 8.
        """
        return -(-labels * self.count // max(self.total, 1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count}, {self.total})"


@dataclass(frozen=True)
class Objective:
    """Defines a job's loss by two functions, a sum and a count, whose results can be added up over
    micro-batches and data ranks. The loss is the sum divided by the count: a mean over items, which
    are tokens or samples.

    total    (model, batch) -> the sum of the losses of all items that count, a scalar tensor
    count    batch -> how many items count, an int; it must not need the model
    unit     what an item is, in messages and logs: "tokens" or "samples"
    logits   (model, batch) -> logits of shape (..., classes); None if the loss is not a cross
             entropy
    targets  batch -> labels of shape (...), IGNORED (-100) where a position does not count; None if
             `logits` is None
    calls_model_itself  whether `total` may give the model any tensor of a batch; False: it calls the
             model as `call_model` does

    The method that computes the loss in chunks needs `logits` and `targets`; it does not use
    `total`.
    """

    total: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    unit: str = "samples"
    logits: Callable[[nn.Module, Batch], Tensor] | None = None
    targets: Callable[[Batch], Tensor] | None = None
    calls_model_itself: bool = True


def sample_count(batch: Batch) -> int:
    """Return how many samples a batch has: the size of dim 0 of its first tensor.

    Raises InputError if the batch contains no tensor.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    for value in values:
        if isinstance(value, Tensor | dict | list | tuple):
            return sample_count(value)
    raise InputError(
        "data", f"a batch of {type(batch).__name__} holds no tensor", "yield tensors, or dicts or tuples of tensors"
    )


def processed_count(batch: Batch) -> int:
    """Return what a batch adds to the throughput: the number of its token positions, padding
    included, if it has `input_ids`; else the number of its samples."""
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return sample_count(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with `function` applied to each tensor in its nested dicts, lists and tuples.
    Other values do not change."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


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


def cross_entropy_objective(
    logits: Callable[[nn.Module, Batch], Tensor], targets: Callable[[Batch], Tensor], unit: str
) -> Objective:
    """Return the objective of a cross entropy. Its sum and its count are over the labels that are
    not IGNORED (-100).

    logits   (model, batch) -> logits of shape (..., classes)
    targets  batch -> labels of shape (...), of any integer type or bool
    unit     what a label is for: "tokens" or "samples"

    The loss is computed in fp32, whatever the type of the logits. The objective's `total` raises
    InputError if the model does not return logits for each label, if they may be those of images
    with the classes in dim 1, or if a label is not one of the model's classes.
    """

    def numbers(batch: Batch) -> Tensor:
        return class_numbers(targets(batch))

    def total(model: nn.Module, batch: Batch) -> Tensor:
        values, labels = logits(model, batch), numbers(batch)
        if values.dim() < 2 or values.shape[:-1].numel() != labels.numel() or _has_two_readings(values, labels):
            raise InputError(
                "job: model",
                f"returns logits of shape {tuple(values.shape)} for labels of shape {tuple(labels.shape)}",
                "let the model return logits of shape (*labels.shape, classes), or give the job its own loss, "
                "such as nn.CrossEntropyLoss() for classes in dim 1",
            )
        try:
            return functional.cross_entropy(
                values.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        except IndexError as error:  # only now is the number of classes of a user's model known
            raise InputError(
                "data",
                f"has labels outside of the model's {values.shape[-1]} classes ({error})",
                f"number the classes from 0 to {values.shape[-1] - 1}, or give the model's last layer one output per class",
            ) from error

    def count(batch: Batch) -> int:
        return int((numbers(batch) != IGNORED).sum())

    return Objective(total, count, unit, logits, numbers, calls_model_itself=False)


def _has_two_readings(logits: Tensor, labels: Tensor) -> bool:
    """Return whether logits of images may have their classes in the last dimension, as this module
    expects, or in dim 1, as torch does: there are as many classes as the images are wide."""
    rest = (logits.shape[0], *logits.shape[2:])
    return logits.dim() >= 4 and labels.shape == logits.shape[:-1] and labels.shape == rest


def next_token_targets(batch: Batch) -> Tensor:
    """Return the labels of a batch, (batch, sequence), shifted left by one: position t gets the
    label of position t + 1, and the last position gets IGNORED (-100), which does not count in the
    loss. Example: [5, 6, 7] becomes [6, 7, IGNORED]."""
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _labels(batch: Batch) -> Tensor:
    return batch["labels"]


def _model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model with every field of the batch except its labels, by name, and return the
    logits that it returns."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", LABEL_COUNT_KEY)}
    output = call_by_name(model, inputs)
    if getattr(output, "aux_loss", None) is not None:
        raise InputError(
            "job: model.output_router_logits",
            "the model returns a loss of its router (aux_loss), which the cross entropy does not contain",
            "set output_router_logits to false; or, in a model of your own, give the job a loss that adds it",
        )
    return _logits_of(output)


def _logits_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise InputError(
            "job: model",
            f"returns {type(output).__name__}, which has no logits",
            "let the model return logits, as a tensor or as the attribute .logits, or give the job its own loss",
        )
    return found


def _seq2seq_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of an encoder-decoder for a batch. Its decoder reads the labels shifted
    right by one position (teacher forcing), or the batch's decoder_input_ids if the batch has
    them."""
    if "decoder_input_ids" not in batch:
        batch = {**batch, "decoder_input_ids": _shifted_right(model, batch["labels"])}
    return _model_logits(model, batch)


def _shifted_right(model: nn.Module, labels: Tensor) -> Tensor:
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


def _class_logits(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, dict):
        return _model_logits(model, batch)
    return _logits_of(_run(model, batch[0]))


def _class_targets(batch: Batch) -> Tensor:
    if isinstance(batch, dict) and "labels" not in batch:
        raise InputError(
            "data",
            f"each batch is {_describe(batch)}, without labels",
            "add the key 'labels' to the samples, or give the job its own loss",
        )
    if not isinstance(batch, dict) and (isinstance(batch, Tensor) or len(batch) != 2):
        raise InputError(
            "data",
            f"each batch is {_describe(batch)}, so it is not known which of them are the labels",
            "let samples be (input, label), or dicts with the key 'labels'; or give the job its own loss",
        )
    return batch["labels"] if isinstance(batch, dict) else batch[1]


TASKS: dict[str, Objective] = {
    "causal-lm": cross_entropy_objective(_model_logits, next_token_targets, "tokens"),
    "masked-lm": cross_entropy_objective(_model_logits, _labels, "tokens"),
    "seq2seq-lm": cross_entropy_objective(_seq2seq_logits, _labels, "tokens"),
    "classification": cross_entropy_objective(_class_logits, _class_targets, "samples"),
}
assert set(TASKS) == set(get_args(Task))


def objective_of_job(job: Job) -> Objective:
    """Return the objective for a job's loss and its model's task, without any method of a plan. Raises
    InputError as `objective_of` does."""
    loss = load_python(job.loss.python) if isinstance(job.loss, LossSpec) else job.loss
    return objective_of(loss, task_of(job.model))


def objective_of(loss: Any, task: str | None) -> Objective:
    """Return the objective for a job's loss and its model's task.

    loss  an Objective; one of torch's losses (a class, an instance or a function); a callable
          loss(output, batch); or None, which selects the objective of `task`
    task  the model's task (a key of TASKS); None means classification

    A callable must return the mean loss over the samples of `batch`, which is one micro-batch. Its
    `output` is what the model returns for batch[0], or for a batch that is a dict as `call_model`
    calls it. For a mean over anything but samples, such as the tokens that count, give an Objective:
    the mean of the micro-batches' means would depend on how a batch is split.

    Raises InputError for one of torch's losses that cannot be split into a sum and a count, and for a
    loss with trainable parameters. The objective's `total` raises InputError if the loss is not a
    scalar tensor or does not require gradients.
    """
    note_loss(loss.total if isinstance(loss, Objective) else loss)
    if isinstance(loss, Objective):
        return replace(loss, total=partial(_require_graph, loss.total), count=partial(_whole_count, loss.count))
    if loss is None:
        return TASKS[task or "classification"]
    if isinstance(loss, nn.Module) and any(weight.requires_grad for weight in loss.parameters()):
        raise InputError(
            f"job: loss={type(loss).__name__}",
            "has trainable parameters, which only the model's optimizer would train",
            "put the module into the model, and let forward return what the loss needs",
        )
    standard = torch_loss(loss)
    if standard is not None:
        return _torch_objective(standard)

    def total(model: nn.Module, batch: Batch) -> Tensor:
        output = call_model(model, batch)
        value = explain_errors(
            lambda: loss(output, batch),
            "job: loss",
            f"correct the loss; it is called as loss(output, batch), and the data gives {_describe(batch)} as batch",
        )
        if value is None and _is_of_transformers(model):
            raise InputError(
                "loss",
                "returned None: a model of transformers gets no labels, so its output has no loss",
                "leave out the loss to train with the model's own; or compute one from output.logits and batch['labels']",
            )
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(
                "loss",
                f"returned {_kind_of(value)}, not a scalar tensor",
                "return the mean over the batch's samples, or give a tightfit.Objective",
            )
        return value * sample_count(batch)

    return Objective(partial(_require_graph, total), sample_count, "samples", calls_model_itself=False)


def _whole_count(count: Callable[[Batch], Any], batch: Batch) -> int:
    """Return what an objective's `count` returns for a batch, as an int. Raise InputError if it is no whole
    number: devices add their counts up as integers."""
    value = count(batch)
    if isinstance(value, FakeTensor):
        return value  # type: ignore[return-value]
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Integral) or (isinstance(number, float) and number.is_integer()):
        return int(number)
    raise InputError(
        "job: loss",
        f"its count returned {_kind_of(value) if isinstance(number, Tensor) else number}, and items are whole numbers",
        "count samples or tokens, and multiply each item's loss by its weight in total; for a mean over weights, let those of "
        "the data have a mean of 1",
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _require_graph(total: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss, total(model, batch). Raises InputError if gradients are enabled, but the
    loss has no autograd graph, so that backward is not possible."""
    value = total(model, batch)
    if torch.is_grad_enabled() and isinstance(value, Tensor) and not value.requires_grad:
        raise InputError(
            "job: loss",
            "has no graph for backward, so it does not depend on the model's trainable weights",
            "compute it from the model's output without .item(), .detach(), numpy or no_grad, and let some weights require gradients",
        )
    return value


def _torch_objective(loss: TorchLoss) -> Objective:
    def total(model: nn.Module, batch: Batch) -> Tensor:
        target = _target(batch)
        inputs = batch
        if isinstance(batch, dict):
            inputs = {name: value for name, value in batch.items() if value is not target}
        output = _logits_of(call_model(model, inputs))
        fix = "give targets that this loss accepts for the model's output, or write your own loss: def loss(output, batch)"
        return explain_errors(lambda: loss.total(output, target), "job: loss", fix)

    counted = partial(_require_graph, total)
    return Objective(counted, lambda batch: loss.count(_target(batch)), "samples", calls_model_itself=False)


def _target(batch: Batch) -> Tensor:
    """Return the target in a batch, which one of torch's losses needs: its field labels, targets or
    target if it is a dict, or its second element if it is a pair. Raises InputError if the batch
    has no such tensor."""
    if isinstance(batch, dict):
        named = [name for name in TARGETS if isinstance(batch.get(name), Tensor)]
        if len(named) > 1:
            raise InputError(
                "data",
                f"each batch has the fields {' and '.join(named)}, so it is not known which one is the target",
                "rename the others; or write your own loss: def loss(output, batch)",
            )
        if named:
            return batch[named[0]]
    elif isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1]
    raise InputError(
        "data",
        f"each batch is {_describe(batch)}, without a target, which the loss or the metric needs",
        "let samples be (input, target), or dicts with a 'labels' key; or write your own loss: def loss(output, batch)",
    )


def predictions_and_targets(objective: Objective, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return (predictions, targets) of a batch, the arguments of a metric.

    objective  the job's loss
    outputs    what the model returned for `batch`

    If the loss is a cross entropy with `targets`, as for every task, return the logits, (items,
    classes), and the labels, (items,). They are those of the items (tokens or samples) that count
    in the loss. Otherwise return the model's output, or its `logits` if it has them, and the target
    of the batch. 16-bit predictions become fp32. Raises InputError if the batch has no target.
    """
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor) and found.is_floating_point():
        found = found.float()
    if objective.targets is None:
        return found, _target(batch)
    logits, labels = _logits_of(found).flatten(0, -2), objective.targets(batch).flatten()
    counts = labels != IGNORED
    return logits[counts], labels[counts]


def _describe(batch: Batch) -> str:
    if isinstance(batch, dict):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"


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
        return _run(model, batch[0] if isinstance(batch, list | tuple) else batch)
    taken = forward_parameters(model)
    reads_labels = "labels" in taken and not _is_of_transformers(model)
    fields = {name: value for name, value in batch.items() if name != "labels" or reads_labels}
    if _is_of_transformers(model) and "labels" in batch and _lacks_decoder_input(model, batch):
        fields["decoder_input_ids"] = _shifted_right(model, batch["labels"])
    if "inputs" in batch:
        others = {name: value for name, value in fields.items() if name in taken and name != "inputs"}
        return _run(model, batch["inputs"], **others)
    return call_by_name(model, fields)


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "model_type")


def _lacks_decoder_input(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Return whether the model is an encoder-decoder whose decoder's input is not in the batch."""
    given = {"decoder_input_ids", "decoder_inputs_embeds"}
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) and given.isdisjoint(batch)


def _run(model: nn.Module, *inputs: Any, **fields: Any) -> Any:
    """Call the model and return its output. Raises InputError if the model fails on the types of its
    inputs, which NumPy's default type float64 and images in bytes are not meant for, on types that it
    mixes itself, or on gradients of its own that recomputed or offloaded activations do not allow."""
    if torch.compiler.is_compiling():
        return model(*inputs, **fields)
    try:
        return model(*inputs, **fields)
    except RuntimeError as error:
        given = [one for one in [*inputs, *fields.values()] if isinstance(one, Tensor)]
        explained = _explained(error, given, list(model.parameters()))
        if explained is None:
            raise
        raise explained from error


def _explained(error: RuntimeError, inputs: list[Tensor], parameters: list[nn.Parameter]) -> InputError | None:
    """Return an InputError for some errors of a model's forward, or None for any other error.

    inputs      the tensors that forward got
    parameters  the model's parameters
    """
    message = str(error).partition("\n")[0]
    if "saved tensor hooks" in message:
        return InputError(
            "plan: recompute or offload",
            f"the model's forward computes gradients with torch.func, which does not work with either ({message})",
            "use recompute: none, and leave activations out of offload; or call torch.autograd.grad in forward",
        )
    if "not implemented for" in message and any(kind in message for kind in _HALF):
        return InputError(
            "plan: precision",
            f"the model uses an operation that PyTorch does not have in 16 bits on this device ({message})",
            "use precision: fp32",
        )
    if "type" not in message and "not implemented for" not in message:
        return None
    types = {one.dtype for one in inputs}
    names = ", ".join(sorted(str(one).removeprefix("torch.") for one in types))
    stored = {one.dtype for one in parameters if one.is_floating_point()}
    if torch.float64 in stored and torch.float64 not in types:
        return InputError(
            "job: model",
            f"has parameters of float64, gets inputs of the types {names}, and fails ({message})",
            "create the model in float32, which is PyTorch's default",
        )
    real = {one for one in types if one.is_floating_point}
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


_HALF = ("BFloat16", "Half")  # as torch's messages name the 16-bit types
_WHOLE = ("Long", "long", "Int", "int", "Byte", "unsigned char")  # and the types of whole numbers


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


def call_by_name(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model with keyword arguments, model(**inputs), and return its output. Raises
    InputError if the model's forward does not accept these names."""
    if torch.compiler.is_compiling():
        return model(**inputs)
    try:
        return _run(model, **inputs)
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
