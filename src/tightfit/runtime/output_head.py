"""Runs a model without the matrix product of its output head.

The chunked loss computes the logits itself, from the hidden states that the head would multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import is_fake
from tightfit._torch.modules import own_buffers
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.models.objective import Objective
from tightfit.models.replaced_forward import replace_forward

LOGITS_BIAS = "final_logits_bias"  # a buffer that BART and similar models add to the logits
# backwards of operations that give the numbers of one tensor as they are, in another shape or type
_COPIES = (
    "ToCopyBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "AliasBackward", "CloneBackward",
    "SliceBackward", "SqueezeBackward", "UnsqueezeBackward", "TransposeBackward", "PermuteBackward", "TBackward", "AsStridedBackward",
)  # fmt: skip
_SCALINGS = ("MulBackward", "DivBackward")


def find_output_head(objective: Objective, model: nn.Module) -> nn.Linear:
    """Return the output head: the linear layer that produces a language model's logits. Raises
    InputError if the model does not name one, or if its configuration says that it changes the
    logits after the head.
    """
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else None
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        raise InputError(
            "plan: chunked_loss",
            f"the model's output head is a {type(layer).__name__}, whose forward is not that of nn.Linear",
            "leave out chunked_loss",
        )
    if not isinstance(layer, nn.Linear) or objective.logits is None:
        raise InputError(
            "plan: chunked_loss",
            f"{type(model).__name__} does not say which nn.Linear is its output head",
            "leave out chunked_loss, or give the model a method get_output_embeddings() that returns this layer",
        )
    config: Any = getattr(model, "config", None)
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise InputError(
            "plan: chunked_loss",
            "the model changes the logits after its output head (final_logit_softcapping)",
            "leave out chunked_loss",
        )
    return layer


@dataclass
class OutputHead:
    """Runs a model without the matrix product of its output head, so that the model returns hidden
    states instead of logits. The chunked loss computes the logits from the hidden states.

    layer          the output head
    model          the model; it may have a buffer that it adds to the logits
    skips_product  True while a forward without the product runs
    hidden_states  the input of the output head in this forward; None outside of it
    checked        True after a check that the model returns the hidden states as they are, or times a number

    Example: Granite divides its logits by `logits_scaling`. The model then returns the hidden states
    divided by it, and their product with the head's weight is the same.
    """

    layer: nn.Linear
    model: nn.Module
    skips_product: bool = False
    hidden_states: Tensor | None = None
    checked: bool = False

    def attach(self) -> None:
        """Replace the forward of the output head by one that returns its input while
        `skips_product` is True."""
        product = self.layer.forward

        def forward(hidden: Tensor) -> Tensor:
            if not self.skips_product:
                return product(hidden)
            self.hidden_states = hidden
            return hidden

        replace_forward(self.layer, forward)

    @property
    def logits_bias(self) -> Tensor | None:
        """The buffer that the model adds to the logits (BART's final_logits_bias); None if the
        model has no such buffer.
        """
        return own_buffers(self.model).get(LOGITS_BIAS)

    def bias(self, first: int) -> Tensor | None:
        """Return the sum of the head's bias and the model's logits bias, or None if there is
        neither.

        first  number of the layer's first class; more than 0 if the layer is a shard of the head
        """
        if self.logits_bias is None:
            return self.layer.bias
        added = self.logits_bias.flatten()[first : first + len(self.layer.weight)]
        return added if self.layer.bias is None else self.layer.bias + added

    def hidden(self, logits: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
        """Run the model on `batch` without the head's product, and return the hidden states, which
        are the head's input. If the model multiplies the head's output by a number, they are
        multiplied by it. Raises InputError if the model changes the head's output in another way.

        logits  the function `Objective.logits`, which calls the model on the batch
        """
        added, self.hidden_states = self.logits_bias, None
        self.skips_product = True
        if added is not None:
            own_buffers(self.model)[LOGITS_BIAS] = added.new_zeros(1, 1)
        try:
            returned = logits(model, batch)
        except RuntimeError as error:
            if self.hidden_states is None or "must match the size" not in str(error):
                raise
            # the model added a tensor with one element per class to the hidden states
            raise _changed() from error
        finally:
            self.skips_product = False
            if added is not None:
                own_buffers(self.model)[LOGITS_BIAS] = added
        if returned is not self.hidden_states:  # most models return it itself: a check would split their compiled code
            self._check(returned)
        self.hidden_states = None
        return returned

    def compile(self, **options: Any) -> None:
        """Compile the computation of the hidden states. options: those of torch.compile."""
        self.hidden = torch.compile(self.hidden, **options)  # type: ignore[method-assign]

    @torch.compiler.disable
    def _check(self, returned: Tensor) -> None:
        """Raise InputError if `returned`, the model's output, differs from the hidden states in
        more than its type and a factor. The values are compared only in the first forward, the
        shapes in each.
        """
        given = self.hidden_states
        if given is None or returned.shape[-1] != given.shape[-1] or returned.numel() != given.numel():
            raise _changed()
        if self.checked or is_fake(returned):
            return
        self.checked = True
        if returned.requires_grad and self.logits_bias is None and not _is_scaled_copy_of(given, returned):
            raise _changed()  # by something that changes no value yet, such as a weight that begins at 1
        before, after = given.detach().float(), returned.detach().view_as(given).float()
        factor = (before * after).sum() / before.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
        is_same = torch.equal(after, before)
        rounding = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (given, returned))
        if not is_same and not torch.allclose(after, factor * before, rtol=rounding, atol=0.0):
            raise _changed()
        if not is_same and (self.layer.bias is not None or self.logits_bias is not None):
            raise _changed()  # the bias is multiplied, too


def _is_scaled_copy_of(given: Tensor, returned: Tensor) -> bool:
    """Return whether autograd says that `returned` was made from `given` by copies, casts, views and
    multiplications by something that has no gradient."""
    node = returned.grad_fn
    while node is not None and node is not given.grad_fn:
        sources = [source for source, _ in node.next_functions if source is not None]
        if not node.name().startswith((*_COPIES, *_SCALINGS)) or len(sources) != 1:
            return False
        node = sources[0]
    return node is given.grad_fn


def _changed() -> InputError:
    return InputError(
        "plan: chunked_loss", "the model changes the logits after its output head", "leave out chunked_loss"
    )
