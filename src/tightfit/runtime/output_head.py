"""Runs a model without the matrix product of its output head.

The chunked loss computes the logits itself, from the hidden states that the head would multiply.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.fake import active_fake_mode, is_fake
from tightfit._torch.modules import own_buffers
from tightfit._torch.tensors import saved_factor, storage_id, version_of
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
_WRITES_LOGITS = re.compile(r"\blogits\s*(\[[^\]]*\]\s*=[^=]|[-+*/]=|\.\w+_\()")


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
    version        how often the input of the output head had been written in place; -1 if it is not known
    checked        True after a forward with gradients showed that the model returns the hidden states as they are, or
                   times a number

    Example: Granite divides its logits by `logits_scaling`. The model then returns the hidden states
    divided by it, and their product with the head's weight is the same.
    """

    layer: nn.Linear
    model: nn.Module
    skips_product: bool = False
    hidden_states: Tensor | None = None
    version: int = -1
    checked: bool = False

    def attach(self) -> None:
        """Replace the forward of the output head by one that returns its input while
        `skips_product` is True."""
        product = self.layer.forward

        def forward(hidden: Tensor) -> Tensor:
            if not self.skips_product:
                return product(hidden)
            self.hidden_states = hidden
            self.version = _version(hidden)
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
        if self.hidden_states is None or _version(self.hidden_states) != self.version:
            raise _changed()
        if returned is not self.hidden_states:  # most models return it itself: a check would split their compiled code
            self._check(returned)
        elif not torch.compiler.is_compiling():
            self.checked |= returned.requires_grad
        self.hidden_states = None
        return returned

    def compile(self, **options: Any) -> None:
        """Compile the computation of the hidden states. What a model of the user's own does with them is seen in its
        first forward with gradients, which is not compiled. options: those of torch.compile."""
        eager, compiled, is_known = self.hidden, torch.compile(self.hidden, **options), self._is_of_transformers

        def hidden(logits: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
            may_compile = is_known or self.checked or active_fake_mode() is not None
            return (compiled if may_compile else eager)(logits, model, batch)

        self.hidden = hidden  # type: ignore[method-assign]

    @property
    def _is_of_transformers(self) -> bool:
        """Whether the model is one of transformers that does not write to its logits in place, as Chameleon does."""
        kind: Any = type(self.model)
        return kind.__module__.startswith("transformers.") and not _WRITES_LOGITS.search(
            inspect.getsource(kind.forward)
        )

    @torch.compiler.disable
    def _check(self, returned: Tensor) -> None:
        """Raise InputError if `returned`, the model's output, differs from the hidden states in
        more than its type and a constant factor. The shapes are compared in each forward, the rest until a
        forward with gradients has shown what the model does.
        """
        given = self.hidden_states
        if given is None or returned.shape[-1] != given.shape[-1] or returned.numel() != given.numel():
            raise _changed()
        if self.checked or is_fake(returned):
            return
        before, after = given.detach().float(), returned.detach().view_as(given).float()
        factor = (before * after).sum() / before.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
        rounding = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (given, returned))
        if not torch.equal(after, before) and not torch.allclose(after, factor * before, rtol=rounding, atol=0.0):
            raise _changed()
        if returned.requires_grad and self.logits_bias is None:
            compiled = given.grad_fn is returned.grad_fn and self._is_of_transformers  # in one graph
            is_scaled = not torch.equal(after, before) if compiled else self._is_scaled(given, returned)
            self.checked = True
        else:  # an evaluation: autograd does not show what the model may do later
            is_scaled = not torch.equal(after, before)
        if is_scaled and (self.layer.bias is not None or self.logits_bias is not None):
            raise _changed()  # the bias is multiplied, too

    def _is_scaled(self, given: Tensor, returned: Tensor) -> bool:
        """Return whether autograd says that `given` was multiplied by numbers, or by buffers or frozen weights of the
        model. Raise InputError if `returned` was made from it by more than that and by copies, casts and views."""
        own = {storage_id(one) for one in (*self.model.buffers(), *self.model.parameters()) if not one.requires_grad}
        node, is_scaled = returned.grad_fn, False
        while node is not None and node is not given.grad_fn:
            sources = [source for source, _ in node.next_functions if source is not None]
            scales = node.name().startswith(_SCALINGS)
            if len(sources) != 1 or not (scales or node.name().startswith(_COPIES)):
                raise _changed()
            if scales:
                factor = saved_factor(node)
                is_number = factor is not None and factor.dim() == 0 and factor.dtype in (torch.float64, torch.int64)
                # a number of Python is of one of these types; a factor of the logits' type may depend on the logits
                if factor is None or not (storage_id(factor) in own or (is_number and factor.dtype != given.dtype)):
                    raise _changed()
                is_scaled = True
            node = sources[0]
        if node is not given.grad_fn:
            raise _changed()
        return is_scaled


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; -1 if that is not counted, as in compiled code."""
    return -1 if torch.compiler.is_compiling() or tensor.is_inference() else version_of(tensor)


def _changed() -> InputError:
    return InputError(
        "plan: chunked_loss", "the model changes the logits after its output head", "leave out chunked_loss"
    )
