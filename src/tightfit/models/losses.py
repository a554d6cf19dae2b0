"""torch's own losses as a job's loss: nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss, functional.mse_loss, on (input, target) samples.

Their means are over elements, over targets that count, or over samples. Sum and count are kept apart, so that micro-batches add
up to the same mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.errors import InputError

_BY_ELEMENT = (
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
_BY_SAMPLE = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss)
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
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
_OWN = "write def loss(output, batch), which returns the mean over the batch's samples, or give a tightfit.Objective"


@dataclass(frozen=True)
class TorchLoss:
    """A loss of torch's in two halves: the sum over what counts in (output, target), and how much that is, from the target."""

    total: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]


def torch_loss(loss: Any) -> TorchLoss | None:
    """The halves of one of torch's losses: its class, an instance of it, or its function; None where it is none of these.

    Raises InputError for one whose mean is no sum over a count.
    """
    kind = loss if isinstance(loss, type) else _FUNCTIONS.get(loss) if callable(loss) and _hashable(loss) else None
    if kind is not None and issubclass(kind, nn.modules.loss._Loss):
        loss = kind()
    if not isinstance(loss, nn.modules.loss._Loss):
        return None
    name, reduction = type(loss).__name__, loss.reduction
    if not isinstance(loss, (*_BY_ELEMENT, *_BY_SAMPLE, *_BY_CLASS)):
        raise InputError(f"job: loss={name}", "takes more than an output and a target", _OWN)
    if reduction not in ("mean", "batchmean"):
        raise InputError(
            f"job: loss={name}(reduction={reduction!r})",
            "is no mean, so it depends on the batch",
            "use reduction='mean'",
        )
    if isinstance(loss, _BY_CLASS) and loss.weight is not None:
        raise InputError(
            f"job: loss={name}(weight=...)",
            "divides by the weights that a batch happens to have",
            f"leave them out, or {_OWN}",
        )
    return TorchLoss(_Total(loss), _count_of(loss))


def _hashable(thing: Any) -> bool:
    return getattr(type(thing), "__hash__", None) is not None


class _Total:
    """The sum of a loss over what counts."""

    def __init__(self, loss: Any) -> None:
        self.name = type(loss).__name__
        self._loss = copy.copy(loss)
        self._loss.reduction = "sum"
        self._by_element = isinstance(loss, _BY_ELEMENT)
        self._constants = {name: value.tolist() for name, value in loss.named_buffers()}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self._by_element and output.shape != target.shape:
            raise InputError(
                f"job: loss={self.name}",
                f"the model makes {tuple(output.shape)}, and the targets are {tuple(target.shape)}",
                "let both have one shape, such as targets of shape (1,) for a model with one output",
            )
        loss = self._loss
        if self._constants:  # where the output is, and of its kind
            loss = copy.copy(loss)
            loss._buffers = {**loss._buffers, **{name: output.new_tensor(one) for name, one in self._constants.items()}}
        return loss(output, target.to(output.dtype) if self._by_element else target)


def _count_of(loss: Any) -> Callable[[Tensor], int]:
    if isinstance(loss, _BY_SAMPLE) or loss.reduction == "batchmean":
        return lambda target: target.shape[0]
    if isinstance(loss, _BY_ELEMENT):
        return lambda target: target.numel()
    ignored = loss.ignore_index

    def count(target: Tensor) -> int:
        if target.is_floating_point():  # probabilities of classes, in the second dim
            return target.numel() // target.shape[1]
        return int((target != ignored).sum())

    return count


def explained(call: Callable[[], Tensor], asked: str, fix: str) -> Tensor:
    """What `call` gives; what goes wrong in Python within becomes an InputError. The compiler sees only the call."""
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except InputError:
        raise
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise InputError(asked, f"raised {type(error).__name__}: {said}", fix) from error


__all__ = ["TorchLoss", "explained", "torch_loss"]
