"""InBatches: as PerParameter, several parameters at a time, for devices on which each kernel costs a launch.

A batch holds parameters of one type and of one parameter group. What is wide of them lies in a few flat buffers, so that
casts, packing and rounding are one kernel for all, and torch's own update is one of its kernels over lists. The numbers
are those of one parameter at a time, bit for bit: each is computed from its own elements, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit.optim.norms import mark_alike
from tightfit.optim.per_parameter import CARRIED, PerParameter, add_noise_, seed_of

ELEMENTS = 2**15  # that a batch may have at least, of a model without large parameters: 128 KiB of each wide copy
ELEMENTWISE = ("adamw", "sgd", "lion")  # optimizers that look at no more of a parameter than each of its elements

Wide = dict[str, tuple[Tensor, list[Tensor]]]  # by state: a flat buffer, and the views of it that the optimizer updates


def batches(sizes: Sequence[int], largest: int) -> list[range]:
    """Numbers of consecutive parameters that are updated together: as many elements as ELEMENTS, or as the largest
    parameter of all has, so that batches need no more memory than that one does. sizes: elements of each parameter."""
    most, found, start, elements = max(ELEMENTS, largest), list[range](), 0, 0
    for number, size in enumerate(sizes):
        if elements + size > most and number > start:
            found.append(range(start, number))
            start, elements = number, 0
        elements += size
    return [*found, range(start, len(sizes))] if sizes else []


class InBatches(PerParameter):
    """Options as of PerParameter. The wrapped optimizer is element by element, and takes torch's kernels over lists where
    it has them. There is no update in backward, whose point is that one gradient exists at a time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._largest = max(parameter.numel() for parameter in self._parameters())
        for group in self.param_groups:
            if "foreach" in group and not group.get("fused"):
                group["foreach"] = True

    def attach(self) -> None:
        raise AssertionError("an update in backward is of one parameter at a time")

    def _updates(self, group: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
        alike = defaultdict[tuple[torch.dtype, bool], list[Tensor]](list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.dtype, bool(self.state.get(parameter))].append(parameter)
        return [
            ([parameters[number] for number in numbers], group)
            for parameters in alike.values()
            for numbers in batches([parameter.numel() for parameter in parameters], self._largest)
        ]

    def _update_all(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of the wrapped optimizer for a batch: widen, update, narrow and round again."""
        inner = self._inner
        before = [
            {name: self._fetched(value) for name, value in self.state.get(parameter, {}).items()}
            for parameter in parameters
        ]
        here = parameters
        if self._apart is not None:
            here = [mark_alike(self._apart.bring(parameter), parameter) for parameter in parameters]
        noted = [self._noted(*one) for one in zip(parameters, here, before, strict=True)]
        carried = [states.pop(CARRIED.get(self._rounding, ""), None) for states in before]
        flat, weights = self._widen_weights(here, carried)
        states, wide = self._widen_states(before, weights)
        inner.param_groups = [{**group, "params": weights}]
        inner.state = defaultdict(dict, zip(weights, states, strict=True))
        inner.step()
        made = [inner.state[weight] for weight in weights]
        inner.param_groups, inner.state, states = [], defaultdict(dict), []
        if flat is not None:
            for weight in weights:
                weight.grad = None
        self._keep_states(parameters, before, made, wide, noted)
        if flat is not None:
            self._round_all(parameters, here, flat, carried, noted)
        for one, old in zip(here, noted, strict=True):
            self._undone(one.detach(), old.get(""))
        if self._apart is not None:
            for parameter, one in zip(parameters, here, strict=True):
                self._apart.take_back(parameter, one)

    def _widen_weights(self, here: list[Tensor], carried: list[Any]) -> tuple[Tensor | None, list[Tensor]]:
        """Flat fp32 copies of 16-bit weights, and the views of it that have their gradients; others are updated where they are."""
        if not self._is_widened(here[0]):
            return None, here
        flat = self._flat(here, torch.float32)
        weights = _parts(flat, here)
        torch._foreach_copy_(weights, here)
        if isinstance(carried[0], Tensor):
            flat.add_(_joined(carried))
        gradients = _parts(self._flat(here, torch.float32), here)
        torch._foreach_copy_(gradients, [one.grad for one in here if one.grad is not None])
        for weight, one, gradient in zip(weights, here, gradients, strict=True):
            mark_alike(weight, one).grad = gradient
        return flat, weights

    def _widen_states(self, before: list[dict[str, Any]], weights: list[Tensor]) -> tuple[list[dict[str, Any]], Wide]:
        """Kept states as the wrapped optimizer wants them."""
        states: list[dict[str, Any]] = [{} for _ in before]
        wide: Wide = {}
        for name in _names(before):
            there = [number for number, kept in enumerate(before) if name in kept]
            packed = [number for number in there if isinstance(before[number][name], dict)]
            for number in there:
                if number not in packed:
                    states[number][name] = before[number][name]
            narrow = [
                number for number in there if number not in packed and _is_narrower(states[number][name], weights[0])
            ]
            for numbers in (packed, narrow):
                if not numbers:
                    continue
                like = [weights[number] for number in numbers]
                if numbers is packed:
                    assert self._blocks is not None
                    parts = [before[number][name] for number in numbers]
                    codes, scale = (_joined([one[part] for one in parts]) for part in ("codes", "scale"))
                    flat = self._blocks.decode(name, codes, scale).to(like[0].dtype)
                    del codes, scale
                    views = _parts(flat, like)
                else:
                    flat = self._flat(like, like[0].dtype)
                    views = _parts(flat, like)
                    torch._foreach_copy_(views, [states[number][name] for number in numbers])
                views = [_lying_as(weight, view) for weight, view in zip(like, views, strict=True)]
                wide[name] = flat, views
                for number, view in zip(numbers, views, strict=True):
                    states[number][name] = view
        return states, wide

    def _keep_states(
        self,
        parameters: list[Tensor],
        before: list[dict[str, Any]],
        made: list[dict[str, Any]],
        wide: Wide,
        noted: list[dict[str, Any]],
    ) -> None:
        """Put the updated states where they are kept, as narrow as they are kept: in the place of those of the last update."""
        kept: list[dict[str, Any]] = [{} for _ in parameters]
        for name in _names(made):
            values = {number: states.pop(name) for number, states in enumerate(made) if name in states}
            narrow = [number for number in values if self._is_narrowed(values[number])]
            found = dict(values)
            if narrow and self._blocks is not None:
                flat, views = wide.pop(name, (None, []))
                tensors = [values[number] for number in narrow]
                same = len(views) == len(tensors) and all(one is view for one, view in zip(tensors, views, strict=True))
                whole = flat if same and flat is not None and _is_all_of(flat, tensors) else _joined(tensors)
                found.update(zip(narrow, self._packed(name, whole, tensors), strict=True))
            elif narrow:
                wide.pop(name, None)
                found.update((number, values[number]) for number in narrow)
            old = {number: before[number].get(name) for number in narrow}
            for number, value in self._narrowed(found, old).items():
                kept[number][name] = self._put(parameters[number], name, self._undone(value, noted[number].get(name)))
        for parameter, states in zip(parameters, kept, strict=True):
            self.state[parameter] = states

    def _narrowed(self, values: dict[int, Any], old: dict[int, Any]) -> dict[int, Any]:
        """`values` in tensors of their own: those of the last update where they are there, on the device."""
        into: list[Tensor] = []
        source: list[Tensor] = []
        kept = dict(values)
        for number in old:
            value, there = values[number], old[number]
            parts = value if isinstance(value, dict) else {"": value}
            olds = there if isinstance(there, dict) else {"": there}
            if self._keep is None and isinstance(next(iter(olds.values())), Tensor) and olds.keys() == parts.keys():
                into += [olds[part] for part in parts]
                source += list(parts.values())
                kept[number] = there
            elif isinstance(value, dict):
                kept[number] = value if self._keep is not None else {part: one.clone() for part, one in value.items()}
            else:
                kept[number] = value.to(torch.bfloat16)
        for dtype in dict.fromkeys(one.dtype for one in into):  # a kernel over a list is of one type
            pairs = [pair for pair in zip(into, source, strict=True) if pair[0].dtype == dtype]
            torch._foreach_copy_([one for one, _ in pairs], [one for _, one in pairs])
        return kept

    def _packed(self, name: str, flat: Tensor, like: list[Tensor]) -> Iterable[dict[str, Tensor]]:
        """Codes and scales of each of the states that lie behind each other in `flat`."""
        assert self._blocks is not None
        packed, bits, size = self._blocks.pack(name, flat), self._blocks.bits, self._blocks.size
        codes = packed["codes"].split([one.numel() * bits // 8 for one in like])
        scales = packed["scale"].split([one.numel() // size for one in like])
        return [{"codes": code, "scale": scale} for code, scale in zip(codes, scales, strict=True)]

    def _is_narrowed(self, value: Any) -> bool:
        """Whether a state of the wrapped optimizer is kept in fewer bits."""
        if not isinstance(value, Tensor) or value.dim() == 0 or self._states == "fp32":
            return False
        return self._blocks is None or self._blocks.divide(value)

    def _round_all(
        self,
        parameters: list[Tensor],
        here: list[Tensor],
        flat: Tensor,
        carried: list[Any],
        noted: list[dict[str, Any]],
    ) -> None:
        """Write the fp32 weights in `flat` back into the 16-bit ones, `here` on the device."""
        weights = _parts(flat, here)
        if self._generator is not None:
            counts = [carried_one or 0 for carried_one in carried]
            noise = self._flat(here, torch.int32)
            for parameter, part, count in zip(parameters, _parts(noise, here), counts, strict=True):
                self._generator.manual_seed(seed_of(self._seed, self._number.get(parameter, 0), count))
                torch.randint(0, 1 << 16, part.shape, out=part, generator=self._generator)
                self.state[parameter]["roundings"] = count + 1
            add_noise_(flat, noise)
            del noise
        if self._rounding != "kahan":
            torch._foreach_copy_(here, weights)
            return
        narrow = flat.to(here[0].dtype)
        torch._foreach_copy_(here, _parts(narrow, here))
        flat.sub_(narrow)
        del narrow
        if isinstance(carried[0], Tensor):
            torch._foreach_copy_(carried, weights)
        else:
            carried = [lost.to(one.dtype) for lost, one in zip(weights, here, strict=True)]
        for parameter, lost, old in zip(parameters, carried, noted, strict=True):
            lost = self._undone(lost, old.get("compensation"))
            self.state[parameter]["compensation"] = self._put(parameter, "compensation", lost)

    def _flat(self, like: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.empty(sum(one.numel() for one in like), dtype=dtype, device=self._device)


def _names(states: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for one in states for name in one))


def _is_narrower(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.dtype != weight.dtype


def _joined(tensors: list[Tensor]) -> Tensor:
    """Their elements, one tensor's behind the other's."""
    return torch.cat([one.reshape(-1) for one in tensors])


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of `flat`, behind each other, of the shapes of `like`."""
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _lying_as(weight: Tensor, view: Tensor) -> Tensor:
    """`view` laid out as `weight` is, for kernels that take both element by element."""
    return view if weight.is_contiguous() else torch.empty_like(weight, requires_grad=False).copy_(view)


def _is_all_of(flat: Tensor, views: list[Tensor]) -> bool:
    """Whether the views are laid out in `flat` behind each other."""
    return all(view.is_contiguous() for view in views) and sum(view.numel() for view in views) == flat.numel()


__all__ = ["ELEMENTWISE", "InBatches", "batches"]
