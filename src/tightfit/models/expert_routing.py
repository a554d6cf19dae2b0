"""Assume which tokens go to which expert, when a mixture of experts runs on fake tensors.

Fake tensors have no values, so a router on fake tensors chooses no experts. Many mixtures of
experts need the choice: a loop over the experts gathers the tokens of each expert, and their number
decides the shapes. `ExpertRouting` therefore assumes a choice: the tokens are spread evenly over
the experts, or one expert gets more than its share. These are the values of the indices that topk,
argmax and max return. From them, it computes the real values of all tensors that depend only on
the choice: one-hot masks, counts, offsets, the positions that nonzero finds.

Example: 6 tokens choose 2 of 4 experts each. The assumed choice is (0, 1), (2, 3), (0, 1), (2, 3),
(0, 1), (2, 3), so each expert gets 3 tokens. With an imbalance of 2, the last expert gets 6 tokens
and the other three get 2 each.

Values are computed only if an operation needs them. Experts that use grouped products need none:
their shapes depend only on the number of tokens.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.dispatch import OpOverload, TorchDispatchMode
from tightfit._torch.fake import unset_fake_temporarily
from tightfit._torch.operations import GROUPED_MM, LOCAL_SCALAR_DENSE, schema_of
from tightfit._torch.pytree import tree_leaves, tree_map
from tightfit.models.fake_kernels import grouped_mm_output

_ATEN = torch.ops.aten
_INDEX_OF_CHOICE = {_ATEN.topk.default: 1, _ATEN.max.dim: 1, _ATEN.argmax.default: 0}
_FILLED: dict[Any, Callable[[Any], Any]] = {  # operation -> the value of all elements, from its arguments
    _ATEN.zeros.default: lambda args: 0,
    _ATEN.zeros_like.default: lambda args: 0,
    _ATEN.new_zeros.default: lambda args: 0,
    _ATEN.ones.default: lambda args: 1,
    _ATEN.ones_like.default: lambda args: 1,
    _ATEN.new_ones.default: lambda args: 1,
    _ATEN.full.default: lambda args: args[1],
    _ATEN.full_like.default: lambda args: args[1],
    _ATEN.new_full.default: lambda args: args[2],
    _ATEN.scalar_tensor.default: lambda args: args[0],
}
_RANGES = frozenset({_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step})
# a factor that is unknown counts as 1: where a mask is 0, the product is 0 whatever the factor is
_PRODUCTS = frozenset({_ATEN.mul.Tensor, _ATEN.div.Tensor})
_NOTE = "expert_routing"  # attribute of a fake tensor that holds its _Value
# attribute of scores from which earlier choices are masked out: how many, so that the next choice
# is of other experts
_MASKED = "expert_routing_masked"

Choice = tuple[int, int]  # (number of experts, number that each token chooses)


class _Value:
    """Holds the real values that belong to a fake tensor. They are computed when `get` is first
    called.

    compute  a function that returns the values as a real tensor, or as several for an operation
             with several outputs
    choices  the assumed choices of experts on which the values depend; empty for constants
    base     a weak reference to the tensor of which the fake tensor is a view; None if it is no
             view
    """

    def __init__(
        self,
        compute: Callable[[], Any],
        choices: frozenset[Choice] = frozenset(),
        base: weakref.ref[Tensor] | None = None,
    ) -> None:
        self._compute: Callable[[], Any] | None = compute
        self.choices, self.base = choices, base
        self._result: Any = None

    def get(self) -> Any:
        if self._compute is not None:
            with unset_fake_temporarily():
                self._result = self._compute()
            self._compute = None
        return self._result


class ExpertRouting:
    """Runs operations on fake tensors, and assumes a routing: which experts each token chooses.

    imbalance  the number of tokens of the busiest expert, divided by the mean over all experts; 1
               spreads the tokens evenly
    choices    the choices of experts that mattered so far, because they decided a shape or went to
               a grouped matrix product: (number of experts, number that each token chooses)
    """

    def __init__(self, imbalance: float = 1.0) -> None:
        self.imbalance = imbalance
        self.choices: set[Choice] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation `func` on fake tensors and return its output. If the output's shape
        depends on values, and these follow from the assumed routing (which experts each token
        chooses), the output has the shape for these values."""
        if not isinstance(func, OpOverload) or func.namespace != "aten":
            return func(*args, **kwargs)
        if func is _ATEN.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        given = list(_tensors_of(args, kwargs))
        values = [_value_of(tensor) for tensor in given]
        choices = frozenset(choice for value in values if value is not None for choice in value.choices)
        if func is GROUPED_MM.default:
            self.choices |= choices
            return grouped_mm_output(*args, **kwargs)
        if choices and func is LOCAL_SCALAR_DENSE.default:
            return self._use(values[0], Tensor.item)
        if choices and func is _ATEN.masked_select.default and values[1] is not None:
            return args[0].new_empty(self._use(values[1], lambda mask: int(mask.sum())))
        if (
            func is _ATEN.masked_select.default and not args[0].is_floating_point()
        ):  # such as labels: none is masked out
            return args[0].new_empty(math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))
        known = bool(given) and (all(value is not None for value in values) or (func in _PRODUCTS and bool(choices)))
        computed = _Value(partial(_compute, func, *_without_tensors((args, kwargs))), choices) if known else None
        if computed is not None and choices and torch.Tag.dynamic_output_shape in func.tags:
            output = tree_map(partial(_empty_like, given[0]), self._use(computed))
        else:
            output = func(*args, **kwargs)
        _note_values(func, args, output, computed)
        if computed is None and func in _INDEX_OF_CHOICE:
            self._note_choice(func, args, output)
        elif computed is None and choices and func is _ATEN.masked_fill.Scalar:
            setattr(output, _MASKED, getattr(given[0], _MASKED, 0) + 1)
        return output

    def scalar(self, tensor: Tensor) -> bool | int | float:
        """Return the value of a fake tensor with one element, as .item() would.

        The value is known if it depends only on the assumed routing (which tokens go to which
        expert). For any other tensor, return True, 1 or 1.0, depending on its dtype.
        """
        value = _value_of(tensor)
        if value is not None and value.choices:
            return self._use(value, Tensor.item)  # type: ignore[no-any-return]
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the value of a fake tensor depends only on the assumed routing."""
        value = _value_of(tensor)
        return value is not None and bool(value.choices)

    def _use(self, value: _Value | None, read: Callable[[Any], Any] = lambda real: real) -> Any:
        """Return read(real values of `value`), and add the choices on which the values depend to
        `choices`."""
        assert value is not None
        self.choices |= value.choices
        with unset_fake_temporarily():
            return read(value.get())

    def _without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Return the indices of an indexing operation with each mask replaced by the positions that
        it selects. A mask that does not follow from the assumed routing (which experts each token
        chooses) is not replaced."""
        found: list[Any] = []
        for index in indices:
            value = _value_of(index) if isinstance(index, Tensor) else None
            if value is None or not value.choices or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            for positions in self._use(value, lambda mask: mask.nonzero().unbind(1)):
                fake = index.new_empty(positions.shape, dtype=torch.int64)
                _set(fake, _Value(partial(_real, positions), value.choices))
                found.append(fake)
        return found

    def _note_choice(self, func: Any, args: Any, output: Any) -> None:
        index = output if isinstance(output, Tensor) else output[_INDEX_OF_CHOICE[func]]
        position = 2 if func is _ATEN.topk.default else 1
        dim = args[position] if len(args) > position else -1 if func is _ATEN.topk.default else None
        if dim is None or args[0].dim() == 0:
            return
        experts, keeps = args[0].shape[dim], index.dim() == args[0].dim()
        chosen = index.shape[dim] if keeps else 1
        if chosen > experts or not experts:
            return
        begin = getattr(args[0], _MASKED, 0)
        spread = partial(spread_over_experts, tuple(args[0].shape), dim, chosen, keeps, self.imbalance, begin)
        _set(index, _Value(spread, frozenset({(experts, chosen)})))


class RoutedExperts(TorchDispatchMode):
    """A dispatch mode inside which mixtures of experts run on fake tensors: it assumes which
    experts each token chooses, and lets grouped matrix products accept fake tensors of every type.

    imbalance  the number of tokens of the busiest expert, divided by the mean over all experts
    """

    def __init__(self, imbalance: float = 1.0) -> None:
        super().__init__()
        self.routing = ExpertRouting(imbalance)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.routing.run(func, args, kwargs or {})


def spread_over_experts(
    shape: Sequence[int], dim: int, chosen: int, keeps_dim: bool, imbalance: float = 1.0, begin: int = 0
) -> Tensor:
    """Return the experts that each token is assumed to choose, in the form of the indices that topk
    returns for the router's scores.

    shape      shape of the scores: dimension `dim` has one score for each expert; the other
               dimensions together have one entry for each token
    dim        the dimension of the experts
    chosen     number of experts that each token chooses
    keeps_dim  whether the result has dimension `dim`, of size `chosen`; otherwise `chosen` is 1
    imbalance  the number of tokens of the busiest expert, which is the last one, divided by the
               mean over all experts. 1 spreads the tokens evenly. If it is too large, the busiest
               expert gets all tokens
    begin      the first expert that the first token chooses, if the tokens are spread evenly

    Example: shape (3, 4), dim 1, chosen 2 gives [[0, 1], [2, 3], [0, 1]].
    """
    dim %= len(shape)
    experts = shape[dim]
    others = [size for axis, size in enumerate(shape) if axis != dim]
    tokens = torch.Size(others).numel()
    if imbalance == 1.0 or chosen == experts:
        index = (torch.arange(tokens * chosen) + begin).view(tokens, chosen) % experts
    else:
        busiest = min(round(imbalance * tokens * chosen / experts), tokens)
        token = torch.arange(tokens)
        chooses = (token + 1) * busiest // max(tokens, 1) > token * busiest // max(tokens, 1)
        count = chosen - chooses.long()  # experts that a token chooses among all but the busiest
        before = count.cumsum(0) - count
        index = (before[:, None] + torch.arange(chosen)) % (experts - 1)
        index[chooses, chosen - 1] = experts - 1
    index = index.view(*others, chosen).movedim(-1, dim)
    return index if keeps_dim else index.squeeze(dim)


def forget_values(tensor: Tensor) -> Tensor:
    """Forget the known values of a fake tensor, and of the tensor of which it is a view. Return the
    tensor. Example: the planner makes a batch of zeros, but the values of a real batch differ, so
    it forgets the zeros."""
    value = vars(tensor).pop(_NOTE, None)
    base = None if value is None or value.base is None else value.base()
    if base is not None:
        forget_values(base)
    return tensor


def _note_values(func: Any, args: Any, output: Any, computed: _Value | None) -> None:
    """Attach the values of an operation's output to the output, if they are known.

    computed  the values, if they can be computed from those of the arguments; None if not. The
              values of constants, such as zeros and arange, are then found from `func` and `args`
    """
    if schema_of(func).is_mutable:
        _note_change(func, args, output, computed)
    elif computed is not None:
        outputs = tree_leaves(output)
        for index, one in enumerate(outputs):
            if isinstance(one, Tensor):
                base = weakref.ref(args[0]) if func.is_view and isinstance(args[0], Tensor) else None
                _set(one, _Value(partial(_part, computed, index), computed.choices, base))
    elif func in _FILLED:
        value = _FILLED[func](args)
        if not isinstance(value, Tensor):
            _set(output, _Value(partial(torch.full, tuple(output.shape), value, dtype=output.dtype)))
    elif func in _RANGES:
        _set(output, _Value(partial(torch.arange, *args, dtype=output.dtype)))


def _note_change(func: Any, args: Any, output: Any, computed: _Value | None) -> None:
    changed = args[0] if args and isinstance(args[0], Tensor) else None
    if changed is None:
        return
    forget_values(changed)
    if computed is not None and schema_of(func).name.endswith("_"):
        _set(changed, computed)
        if isinstance(output, Tensor):
            _set(output, computed)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on the CPU, with each _Value in its arguments replaced by the real values, and
    return its output. The values of the arguments do not change, even if `func` works in place."""
    args, kwargs = tree_map(_real, args), tree_map(_real, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if schema_of(func).is_mutable:
        args = (args[0].clone(), *args[1:])
    return func(*args, **kwargs)


def _without_tensors(arguments: Any) -> Any:
    """Return the arguments of an operation with each fake tensor replaced by its _Value, so that
    keeping the arguments keeps no fake tensor alive. Unknown values become ones."""

    def value(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return _value_of(one) or _Value(partial(torch.ones, tuple(one.shape), dtype=one.dtype))

    return tree_map(value, arguments)


def _real(argument: Any) -> Any:
    return argument.get() if isinstance(argument, _Value) else argument


def _part(value: _Value, index: int) -> Any:
    return tree_leaves(value.get())[index]


def _empty_like(device_of: Tensor, value: Any) -> Any:
    return device_of.new_empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _tensors_of(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from (inner for inner in argument if isinstance(inner, Tensor))


def _value_of(tensor: Tensor) -> _Value | None:
    found: _Value | None = vars(tensor).get(_NOTE)
    return found


def _set(tensor: Tensor, value: _Value) -> None:
    vars(tensor)[_NOTE] = value


__all__ = ["Choice", "ExpertRouting", "RoutedExperts", "forget_values", "spread_over_experts"]
