"""Splits torch's own losses (nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss, functional.mse_loss and
others) into a sum and a count, so that they can be a job's loss.

Each of these losses compares an output with a target, and is a mean over items: elements, targets
other than ignore_index, or samples. With a sum and a count, micro-batches add up to the mean of the
whole batch. `models/objective.py` calls `torch_loss`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.modules import Loss, own_buffers, set_own_buffers
from tightfit.errors import InputError

_PER_ELEMENT = (
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.SoftMarginLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
)
_PER_SAMPLE = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss)
_PER_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}
_CUSTOM_LOSS_FIX = (
    "write def loss(output, batch), which returns the mean over the batch's samples, or give a tightfit.Objective"
)


@dataclass(frozen=True)
class TorchLoss:
    """One of torch's losses, split into two functions. The loss of torch is a mean over items
    (elements, targets or samples): total / count.

    total  (output, target) -> the sum of the losses of all items, a scalar tensor
    count  target -> the number of items; targets equal to ignore_index are not counted
    """

    total: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]


def torch_loss(loss: Any) -> TorchLoss | None:
    """Split one of torch's losses into a sum and a count. Return None if `loss` is not one of
    torch's.

    loss: a class (nn.MSELoss), an instance (nn.MSELoss()), a function (functional.mse_loss), or a
    functools.partial of such a function with keyword arguments. A class of the user's own that
    extends torch's base class of losses is not one of torch's.

    Raises InputError for a loss that is not a mean of independent items (elements, targets or
    samples). This is a loss whose reduction is not a mean, that has class weights, that takes more
    than an output and a target, or that has a forward of the user's own.
    """
    options: dict[str, Any] = {}
    if isinstance(loss, partial) and not loss.args:
        loss, options = loss.func, loss.keywords
    kind = loss if isinstance(loss, type) else _FUNCTIONS.get(loss) if callable(loss) and _hashable(loss) else None
    if kind is not None and issubclass(kind, Loss):
        try:
            loss = kind(**options)
        except TypeError as error:
            raise InputError(
                f"job: loss={kind.__name__}", f"cannot be split into a sum and a count: {error}", _CUSTOM_LOSS_FIX
            ) from error
    if not isinstance(loss, Loss):
        return None
    name, reduction = type(loss).__name__, loss.reduction
    if not isinstance(loss, (*_PER_ELEMENT, *_PER_SAMPLE, *_PER_CLASS)):
        if type(loss).__module__ != nn.MSELoss.__module__:
            return None
        raise InputError(f"job: loss={name}", "takes more than an output and a target", _CUSTOM_LOSS_FIX)
    if type(loss).forward.__module__ != nn.MSELoss.__module__:
        raise InputError(
            f"job: loss={name}",
            "extends one of torch's losses with a forward of its own, so its sum over samples is not known",
            f"{_CUSTOM_LOSS_FIX}; for samples (input, target), def loss(output, batch): return {name}()(output, batch[1])",
        )
    if reduction not in ("mean", "batchmean"):
        raise InputError(
            f"job: loss={name}(reduction={reduction!r})",
            "is not a mean, so the loss depends on how many samples a micro-batch has",
            "use reduction='mean'",
        )
    if isinstance(loss, _PER_CLASS) and loss.weight is not None:
        raise InputError(
            f"job: loss={name}(weight=...)",
            "divides by the weights of the targets in a batch, so the mean depends on how the batch is split into micro-batches",
            f"leave out weight, or {_CUSTOM_LOSS_FIX}",
        )
    return TorchLoss(_Total(loss), _count_of(loss))


def _hashable(thing: Any) -> bool:
    return getattr(type(thing), "__hash__", None) is not None


class _Total:
    """A function (output, target) -> the sum of one of torch's losses over all items (elements,
    targets or samples) of a micro-batch. The loss is computed in fp32 if the output has 16 bits, as
    under autocast.

    It raises InputError if the loss compares element by element, and output and target have
    different shapes, or if the loss is one of classes, and the targets are neither class numbers
    nor probabilities.
    """

    def __init__(self, loss: Any) -> None:
        self.name = type(loss).__name__
        self._loss = copy.copy(loss)
        self._loss.reduction = "sum"
        self._is_per_element = isinstance(loss, _PER_ELEMENT)
        self._is_per_class = isinstance(loss, _PER_CLASS)
        self._constants = {name: value.tolist() for name, value in loss.named_buffers()}
        self._shapes = {name: value.shape for name, value in loss.named_buffers()}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self._is_per_element and output.shape != target.shape:
            raise InputError(
                f"job: loss={self.name}",
                f"the model's output has shape {tuple(output.shape)}, and the targets have shape {tuple(target.shape)}",
                "give both the same shape; for a model with one output, let the target of each sample have shape (1,)",
            )
        if self._is_per_element:
            self._refuse_weights_of_samples(output)
        if output.is_floating_point() and output.dtype.itemsize < 4:
            output = output.float()
        if self._is_per_element:
            target = target.to(output.dtype)
        elif self._is_per_class and (not target.is_floating_point() or output.shape != target.shape):
            target = class_numbers(target, f"job: loss={self.name}")
        loss = self._loss
        if self._constants:  # copy them to the device and type of the output
            loss = copy.copy(loss)
            constants = {name: output.new_tensor(constant) for name, constant in self._constants.items()}
            set_own_buffers(loss, {**own_buffers(loss), **constants})
        return loss(output, target)

    def _refuse_weights_of_samples(self, output: Tensor) -> None:
        for name, shape in self._shapes.items():
            if len(shape) == output.dim() and shape[0] != 1:
                raise InputError(
                    f"job: loss={self.name}({name}=...)",
                    f"has the shape {tuple(shape)}, with a weight for each sample of one batch, and micro-batches have other "
                    "samples",
                    f"give weights of the outputs alone, or {_CUSTOM_LOSS_FIX}",
                )


def class_numbers(labels: Tensor, asked: str = "data") -> Tensor:
    """Return labels of any integer type or bool as int64, the type that torch's losses of classes
    need. Raises InputError for other types.

    asked  what the user asked for: the first part of the InputError's message
    """
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(
            asked,
            f"labels have the type {str(labels.dtype).removeprefix('torch.')}, and a cross entropy needs class numbers",
            "give integers from 0; for a regression set loss to nn.MSELoss(), for several labels to nn.BCEWithLogitsLoss()",
        )
    return labels if labels.dtype == torch.int64 else labels.long()


def _count_of(loss: Any) -> Callable[[Tensor], int]:
    if isinstance(loss, _PER_SAMPLE) or loss.reduction == "batchmean":
        return lambda target: target.shape[0]
    if isinstance(loss, _PER_ELEMENT):
        return lambda target: target.numel()
    ignored = loss.ignore_index

    def count(target: Tensor) -> int:
        if target.is_floating_point() and target.dim() > 1:  # class probabilities, with the classes in dim 1
            return target.numel() // target.shape[1]
        return int((class_numbers(target, f"job: loss={type(loss).__name__}") != ignored).sum())

    return count


def explain_errors(call: Callable[[], Tensor], asked: str, fix: str) -> Tensor:
    """Return call(). If it raises a TypeError, AttributeError, KeyError, IndexError or ValueError,
    as wrong code of the user does, raise an InputError instead.

    asked  what the user asked for: the first part of the InputError's message
    fix    the remedy: the last part of its message

    Under torch.compile no errors are caught, so that only `call` itself is compiled.
    """
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except InputError:
        raise
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        message = (str(error).strip().splitlines() or [""])[0]
        raise InputError(asked, f"raised {type(error).__name__}: {message}", fix) from error


__all__ = ["TorchLoss", "class_numbers", "explain_errors", "torch_loss"]
