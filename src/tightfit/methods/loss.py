"""Chunked loss: the head's product and the cross entropy together, a chunk of tokens at a time.

Saves   the logits and their gradient: (tokens, vocabulary) becomes (chunk, vocabulary). With a vocabulary of
        128k that is most of a language model's activations.
Costs   nothing in arithmetic: the gradient is taken while the chunk's logits are at hand, so nothing is recomputed.
        Keeps a gradient of the head's weight in fp32, and one of the hidden states, from forward to backward.
When    any causal or masked language model.
Order   before anything wraps the head.
Source  Hsu et al. 2024, arXiv:2410.10989 (Liger kernel, fused linear cross entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from tightfit.errors import InputError
from tightfit.ledger import traced
from tightfit.methods.run import Run, kind_of
from tightfit.methods.turns import turns
from tightfit.methods.vocabulary import divided_cross_entropy_with_gradient
from tightfit.models.objective import IGNORED, Batch, Objective
from tightfit.plan import Plan

ROWS_IN_CACHE = 64
ADDED = "final_logits_bias"  # what BART and its relatives call a buffer that they add to the logits
Divided = tuple[int, dist.ProcessGroup]  # the first class that is here, and the devices that have the others
cost = traced
VARIANTS = ({"chunked_loss": 5},)


def wanted(plan: Plan) -> bool:
    return plan.chunked_loss is not None


def apply(run: Run, plan: Plan) -> Run:
    assert plan.chunked_loss is not None
    rows = ROWS_IN_CACHE if kind_of(run.device) == "cpu" else plan.chunked_loss
    objective = chunked(run.objective, run.model, plan.chunked_loss, rows, _divided(run))
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model))


def _divided(run: Run) -> Divided | None:
    """How the head's classes are divided among devices."""
    head = find_head(run.objective, run.model).weight
    cuts = [run.slices[name] for name, weight in run.model.named_parameters() if weight is head and name in run.slices]
    return (cuts[0].range()[0], cuts[0].mesh.group("tp")) if cuts else None


@dataclass
class Head:
    """A model's last linear layer, whose product can be left out for the time of a forward.

    added    a buffer that the model adds to the logits (BART's final_logits_bias), which is zero for that time
    given    the hidden states of the last such forward; checked: whether the model has been seen to return them as they were
    """

    layer: nn.Linear
    model: nn.Module
    open: bool = False
    given: Tensor | None = None
    checked: bool = False

    def attach(self) -> None:
        product = self.layer.forward

        def forward(hidden: Tensor) -> Tensor:
            if not self.open:
                return product(hidden)
            self.given = hidden
            return hidden

        self.layer.forward = forward  # type: ignore[method-assign, assignment]

    @property
    def added(self) -> Tensor | None:
        return self.model._buffers.get(ADDED)

    def bias(self, first: int) -> Tensor | None:
        """What is added to the products, of the classes from `first` on."""
        if self.added is None:
            return self.layer.bias
        added = self.added.flatten()[first : first + len(self.layer.weight)]
        return added if self.layer.bias is None else self.layer.bias + added

    def hidden(self, logits: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
        """What the head is given when the model takes `batch`. Raises InputError where the model changes what the head returns."""
        added, self.given = self.added, None
        self.open = True
        if added is not None:
            self.model._buffers[ADDED] = added.new_zeros(1, 1)
        try:
            returned = logits(model, batch)
        except RuntimeError as error:
            if self.given is None or "must match the size" not in str(error):
                raise
            raise _changed() from error  # something as wide as the vocabulary was added to them
        finally:
            self.open = False
            if added is not None:
                self.model._buffers[ADDED] = added
        self._check(returned)
        self.given = None
        return returned

    @torch.compiler.disable
    def _check(self, returned: Tensor) -> None:
        """That what the model returned are the hidden states, but for their type: looked at once."""
        given = self.given
        if given is None or returned.shape[-1] != given.shape[-1] or returned.numel() != given.numel():
            raise _changed()
        if self.checked or returned is given or is_fake(returned):
            return
        self.checked = True
        if not torch.equal(returned.detach(), given.detach().to(returned.dtype).view_as(returned)):
            raise _changed()


def _changed() -> InputError:
    return InputError("plan: chunked_loss", "the model changes the logits after its head", "leave out chunked_loss")


def chunked(
    objective: Objective, model: nn.Module, chunk: int, rows: int = ROWS_IN_CACHE, divided: Divided | None = None
) -> Objective:
    """`objective` with its logits never whole: see linear_cross_entropy.

    Raises InputError where the logits are not the head's own output.
    """
    head = Head(find_head(objective, model), model)
    head.attach()
    assert objective.logits is not None
    assert objective.targets is not None
    logits, targets = objective.logits, objective.targets

    def total(model: nn.Module, batch: Batch) -> Tensor:
        hidden = head.hidden(logits, model, batch)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            head.layer.weight,
            head.bias(divided[0] if divided else 0),
            targets(batch).flatten(),
            chunk,
            rows,
            divided,
        )

    return replace(objective, total=total)


def find_head(objective: Objective, model: nn.Module) -> nn.Linear:
    """The linear layer that gives a language model's logits. Raises InputError."""
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else None
    if not isinstance(layer, nn.Linear) or objective.logits is None:
        raise InputError(
            "plan: chunked_loss",
            f"{type(model).__name__} has no linear layer that it calls its output embedding",
            "leave out chunked_loss, or give the model get_output_embeddings() returning its last nn.Linear",
        )
    config: Any = getattr(model, "config", None)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise InputError(
                "plan: chunked_loss", f"the model changes the logits after its head ({name})", "leave out chunked_loss"
            )
    return layer


@torch.compiler.disable  # a loop over chunks is no gain compiled: it is unrolled, and its chunks then live together
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    rows: int = ROWS_IN_CACHE,
    divided: Divided | None = None,
) -> Tensor:
    """Sum over the targets that count of the cross entropy of `hidden @ weight.T + bias`, `chunk` rows at a time.

    The softmax goes over `rows` of them at a time: on a processor few, so that their fp32 copy stays in its cache.
    hidden (tokens, width), weight (vocabulary, width), bias (vocabulary) or None, targets (tokens) with IGNORED.
    divided: weight and bias have a part of the vocabulary, and other devices the rest; of which hidden's gradients are sums.
    Products run in the type of autocast, or of `hidden`; the softmax and the sum in fp32. Returns an fp32 scalar.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # within a Function's forward gradients look disabled, and its inputs look as if they needed one: asked here
    return LinearCrossEntropy.apply(
        hidden, weight, bias, targets, (chunk, rows), divided, dtype, torch.is_grad_enabled()
    )


class LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in forward, while a chunk's logits are there, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        pieces: tuple[int, int],
        divided: Divided | None,
        dtype: torch.dtype,
        learning: bool,
    ) -> Tensor:
        wanted = [learning and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _sum_and_gradients(hidden, weight, bias, targets, pieces, divided, dtype, wanted)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [  # in place, of which autograd keeps count: a second backward through the same graph raises
            None if gradient is None else gradient.mul_(gradients[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        ]
        return *scaled, None, None, None, None, None


def _sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    pieces: tuple[int, int],
    divided: Divided | None,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The loss, and its gradients for hidden, weight and bias, those that are `wanted`; the last two in fp32."""
    chunk, at_a_time = pieces
    narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for_hidden = torch.empty_like(hidden, dtype=dtype) if wanted[0] else None
    one = len(hidden) <= chunk and weight.dtype == dtype  # a single product, which is in the weight's type anyway
    wide = torch.promote_types(dtype, torch.float32)
    for_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] and not one else None
    for_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    loss = torch.zeros((), dtype=wide, device=hidden.device)

    def take(here: slice) -> None:  # whose tensors are gone at its end, before the next chunk's logits come
        nonlocal for_weight
        rows, labels = hidden[here].to(dtype), targets[here]
        logits = functional.linear(rows, narrow_weight, narrow_bias)
        if divided is None:
            part, gradient = cross_entropy_with_gradient(logits, labels, at_a_time)
        else:
            part, gradient = divided_cross_entropy_with_gradient(logits, labels, *divided)
        loss.add_(part)
        counts = (labels != IGNORED).to(dtype).unsqueeze(1)
        if for_hidden is not None:
            torch.mm(gradient, narrow_weight, out=for_hidden[here]).mul_(counts)
        if wanted[1] and one:
            for_weight = gradient.t() @ (rows * counts)
        elif for_weight is not None and dtype == wide:
            for_weight.addmm_(gradient.t(), rows * counts)
        elif for_weight is not None:
            for_weight += gradient.t() @ (rows * counts)
        if for_bias is not None:
            for_bias.add_((gradient.t() @ counts).squeeze(1))

    for start in turns(range(0, len(hidden), chunk)):
        take(slice(start, start + chunk))
    return loss, (for_hidden, for_weight, for_bias)


def cross_entropy_with_gradient(logits: Tensor, labels: Tensor, rows: int = ROWS_IN_CACHE) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in fp32 of (rows, classes) logits, and the gradient of each row, written over the logits.

    The gradient is softmax less one at the label; in rows whose label is IGNORED it means nothing.
    """
    loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for start in turns(range(0, len(logits), rows)):
        here = slice(start, start + rows)
        loss += _loss_and_gradient_within(logits[here], labels[here])
    return loss, logits


def _loss_and_gradient_within(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORED
    safe = labels.where(counts, 0).unsqueeze(1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    chosen, largest = logits.gather(1, safe).to(wide), logits.amax(-1, keepdim=True).to(wide)
    probability = functional.softmax(logits, -1, dtype=wide)
    log_sum = largest - probability.amax(-1, keepdim=True).log()
    gradient_there = probability.gather(1, safe).sub_(1).to(logits.dtype)
    logits.copy_(probability).scatter_(1, safe, gradient_there)
    return ((log_sum - chosen) * counts.unsqueeze(1)).sum()
