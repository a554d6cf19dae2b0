"""MultiTensor: update several parameters at a time, for devices on which each kernel launch costs
time.

MultiTensor is a PerParameter that updates batches of parameters. A batch contains parameters of one
type and of one parameter group. Their fp32 copies lie in a few flat buffers, so a cast, a
quantization or a rounding is one kernel for all parameters of the batch, and torch's update uses
its multi-tensor (foreach) kernels. The results equal those of one parameter at a time, bit for bit,
because each value is computed from the same elements in the same order.

Example: 48 bf16 norms of 4096 elements are 196,608 elements. If the model's largest parameter is at
least that large, they are one batch: one cast makes 768 KiB of fp32 weights, instead of 48 casts of
16 KiB each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.operations import foreach_copy_
from tightfit.optim.norms import copy_shard_mark
from tightfit.optim.own_writes import note_own_write
from tightfit.optim.per_parameter import MASTER, PerParameter, add_noise_, rounding_seed

# A batch may have this many elements even if all parameters are smaller. Each fp32 copy of such a
# batch takes 128 KiB.
ELEMENTS = 2**15
# Optimizers that update each element independently of the others.
ELEMENTWISE = ("adamw", "sgd", "lion")

# Maps the name of a state to the flat buffer of a batch, and to the views of this buffer that the
# optimizer updates, one for each parameter.
Wide = dict[str, tuple[Tensor, list[Tensor]]]


def update_batches(sizes: Sequence[int], largest: int) -> list[range]:
    """Divide consecutive parameters into batches that are updated together. Return one range for
    each batch: the indices of its parameters in `sizes`.

    sizes    number of elements of each parameter
    largest  number of elements of the model's largest parameter

    A batch has at most max(ELEMENTS, largest) elements. Example: sizes 20000, 20000, 40000 with
    largest 40000 give range(0, 2) and range(2, 3).
    """
    most, found, start, elements = max(ELEMENTS, largest), list[range](), 0, 0
    for number, size in enumerate(sizes):
        if elements + size > most and number > start:
            found.append(range(start, number))
            start, elements = number, 0
        elements += size
    return [*found, range(start, len(sizes))] if sizes else []


class MultiTensor(PerParameter):
    """Wraps a fresh elementwise optimizer (AdamW, SGD or Lion) and updates parameters in batches.
    The constructor takes the arguments of PerParameter.

    The wrapped optimizer uses torch's foreach kernels if it has them. An update in backward
    (`attach`) is not possible, because it frees each gradient before the next one exists, and a
    batch needs several gradients.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._largest = max(parameter.numel() for parameter in self._parameters())
        for group in self.param_groups:
            if "foreach" in group and not group.get("fused"):
                group["foreach"] = True

    def attach(self) -> None:
        raise AssertionError("the update in backward updates one parameter at a time")

    def _batches_of(self, group: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
        alike = defaultdict[tuple[torch.dtype, bool, bool], list[Tensor]](list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                states = self.state.get(parameter, {})
                alike[parameter.dtype, bool(states), self._carried in states].append(parameter)
        return [
            ([parameters[number] for number in numbers], group)
            for parameters in alike.values()
            for numbers in update_batches([parameter.numel() for parameter in parameters], self._largest)
        ]

    def _update_batch(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Run one step of the wrapped optimizer for a batch.

        Widen weights, gradients and states to fp32, update them, narrow the states to the width in
        which they are saved, and round the weights to 16 bits.
        """
        inner = self._inner
        before = [
            {name: self._fetch(value) for name, value in self.state.get(parameter, {}).items()}
            for parameter in parameters
        ]
        on_device = parameters
        if self._weight_store is not None:
            on_device = [copy_shard_mark(self._weight_store.bring(parameter), parameter) for parameter in parameters]
        backups = [self._backup(*one) for one in zip(parameters, on_device, before, strict=True)]
        carried = [states.pop(self._carried, None) for states in before]
        if self._masters:
            for one, place, master in zip(parameters, on_device, carried, strict=True):
                self._follow_changes(one, place, master)
        flat, weights = self._widen_weights(on_device, carried)
        states, wide = self._widen_states(before, weights)
        inner.param_groups = [{**group, "params": weights}]
        inner.state = defaultdict(dict, zip(weights, states, strict=True))
        inner.step()
        updated = [inner.state[weight] for weight in weights]
        inner.param_groups, inner.state, states = [], defaultdict(dict), []
        if weights is not on_device:
            for weight in weights:
                weight.grad = None
        self._save_states(parameters, before, updated, wide, backups)
        if flat is not None:
            self._round_weights(parameters, on_device, flat, carried, backups)
        elif weights is not on_device:
            self._save_masters(parameters, on_device, weights, backups)
        for one, old in zip(on_device, backups, strict=True):
            self._restore_if_skipped(one.detach(), old.get(""))
        if self._weight_store is not None:
            for parameter, one in zip(parameters, on_device, strict=True):
                self._weight_store.take_back(parameter, one)
        for parameter in parameters if self._masters else ():
            note_own_write(parameter)

    def _widen_weights(self, on_device: list[Tensor], carried: list[Any]) -> tuple[Tensor | None, list[Tensor]]:
        """Return a flat fp32 copy of 16-bit weights, and views of this copy, one for each weight,
        with fp32 gradients. With master weights, return None and the masters, with the gradients.
        If the update does not need fp32 weights, return None and the weights unchanged.

        on_device  the weights on the device
        carried    the master of each weight, None before its first update; or, with kahan rounding,
                   the rounding error of each weight from its last update, which is added to the
                   copy; other values are not read
        """
        if not self._is_widened(on_device[0]):
            return None, on_device
        if self._masters:
            masters = [
                saved if saved is not None else one.detach().float()
                for one, saved in zip(on_device, carried, strict=True)
            ]
            for master, one in zip(masters, on_device, strict=True):
                copy_shard_mark(master, one).grad = one.grad
            return None, masters
        flat = self._empty_flat(on_device, torch.float32)
        weights = _views_of(flat, on_device)
        foreach_copy_(weights, on_device)
        if isinstance(carried[0], Tensor):
            flat.add_(_concatenate(carried))
        flat_gradients = self._empty_flat(on_device, torch.float32)
        gradients = _views_of(flat_gradients, on_device)
        foreach_copy_(gradients, [one.grad for one in on_device if one.grad is not None])
        if self._factor is not None:
            flat_gradients.mul_(self._factor)
        for weight, one, gradient in zip(weights, on_device, gradients, strict=True):
            copy_shard_mark(weight, one).grad = gradient
        return flat, weights

    def _widen_states(self, before: list[dict[str, Any]], weights: list[Tensor]) -> tuple[list[dict[str, Any]], Wide]:
        """Dequantize states and convert them to the type of the weights, as the wrapped optimizer
        needs them.

        before   for each weight, a dict from the name of a state to its saved value on the device
        weights  the weights to update, in fp32 if they are widened

        Returns the same dicts with the converted states, and the flat buffers that contain these. A
        state that already has the type of the weight is returned unchanged and has no buffer.
        """
        states: list[dict[str, Any]] = [{} for _ in before]
        wide: Wide = {}
        for name in _names(before):
            with_state = [number for number, saved in enumerate(before) if name in saved]
            packed = [number for number in with_state if isinstance(before[number][name], dict)]
            for number in with_state:
                if number not in packed:
                    states[number][name] = before[number][name]
            narrow = [
                number
                for number in with_state
                if number not in packed and _is_narrower(states[number][name], weights[0])
            ]
            for numbers in (packed, narrow):
                if not numbers:
                    continue
                like = [weights[number] for number in numbers]
                if numbers is packed:
                    assert self._blocks is not None
                    parts = [before[number][name] for number in numbers]
                    codes, scale = (_concatenate([one[part] for one in parts]) for part in ("codes", "scale"))
                    flat = self._blocks.dequantize_flat(name, codes, scale).to(like[0].dtype)
                    del codes, scale
                    views = _views_of(flat, like)
                else:
                    flat = self._empty_flat(like, like[0].dtype)
                    views = _views_of(flat, like)
                    foreach_copy_(views, [states[number][name] for number in numbers])
                views = [_with_layout_of(weight, view) for weight, view in zip(like, views, strict=True)]
                wide[name] = flat, views
                for number, view in zip(numbers, views, strict=True):
                    states[number][name] = view
        return states, wide

    def _save_states(
        self,
        parameters: list[Tensor],
        before: list[dict[str, Any]],
        updated: list[dict[str, Any]],
        wide: Wide,
        backups: list[dict[str, Any]],
    ) -> None:
        """Narrow the updated states to the width in which they are saved, and save them. Tensors in
        which the states were saved before are overwritten.

        before   for each parameter, its saved states by name, as they were before the update
        updated  the same after the update, in fp32. The dicts are emptied
        wide     the buffers that `_widen_states` returned
        backups  copies of the state before the update, one dict for each parameter, as `_backup`
                 returned them; they undo the update if the step is skipped
        """
        saved: list[dict[str, Any]] = [{} for _ in parameters]
        for name in _names(updated):
            values = {number: states.pop(name) for number, states in enumerate(updated) if name in states}
            narrow = [number for number in values if self._is_narrowed(values[number])]
            narrowed = dict(values)
            if narrow and self._blocks is not None:
                flat, views = wide.pop(name, (None, []))
                tensors = [values[number] for number in narrow]
                same = len(views) == len(tensors) and all(
                    tensor is view for tensor, view in zip(tensors, views, strict=True)
                )
                whole = flat if same and flat is not None and _fills(flat, tensors) else _concatenate(tensors)
                narrowed.update(zip(narrow, self._quantize(name, whole, tensors), strict=True))
            elif narrow:
                wide.pop(name, None)
                narrowed.update((number, values[number]) for number in narrow)
            old = {number: before[number].get(name) for number in narrow}
            for number, value in self._into_own_tensors(narrowed, old).items():
                saved[number][name] = self._put(
                    parameters[number], name, self._restore_if_skipped(value, backups[number].get(name))
                )
        for parameter, states in zip(parameters, saved, strict=True):
            self.state[parameter] = states

    def _into_own_tensors(self, values: dict[int, Any], old: dict[int, Any]) -> dict[int, Any]:
        """Copy the narrowed values of one state out of the flat buffers of a batch. Return a dict
        from the number of a parameter to the tensor (or the codes and scales) with its copy.

        values  maps the number of a parameter in the batch to the new value of its state
        old     maps the numbers of the narrowed states to their values before the update. If there
                is no state store, these tensors are overwritten with the new values and returned.
                With a state store, codes and scales are not copied, because the store copies them
        """
        into: list[Tensor] = []
        source: list[Tensor] = []
        copies = dict(values)
        for number in old:
            value, previous = values[number], old[number]
            parts = value if isinstance(value, dict) else {"": value}
            olds = previous if isinstance(previous, dict) else {"": previous}
            if (
                self._state_store is None
                and isinstance(next(iter(olds.values())), Tensor)
                and olds.keys() == parts.keys()
            ):
                into += [olds[part] for part in parts]
                source += list(parts.values())
                copies[number] = previous
            elif isinstance(value, dict):
                copies[number] = (
                    value if self._state_store is not None else {part: one.clone() for part, one in value.items()}
                )
            else:
                copies[number] = value.to(torch.bfloat16)
        # a foreach kernel copies tensors of one type
        for dtype in dict.fromkeys(one.dtype for one in into):
            pairs = [pair for pair in zip(into, source, strict=True) if pair[0].dtype == dtype]
            foreach_copy_([one for one, _ in pairs], [one for _, one in pairs])
        return copies

    def _quantize(self, name: str, flat: Tensor, like: list[Tensor]) -> Iterable[dict[str, Tensor]]:
        """Quantize several states that lie one after another in `flat`. Return a dict with the keys
        "codes" and "scale" for each state, in order.

        name  the name of all these states, such as exp_avg
        like  one tensor for each state, with the size of the state
        """
        assert self._blocks is not None
        packed, bits, size = self._blocks.quantize(name, flat), self._blocks.bits, self._blocks.size
        codes = packed["codes"].split([tensor.numel() * bits // 8 for tensor in like])
        scales = packed["scale"].split([tensor.numel() // size for tensor in like])
        return [{"codes": code, "scale": scale} for code, scale in zip(codes, scales, strict=True)]

    def _is_narrowed(self, value: Any) -> bool:
        """Return whether a state is saved in fewer bits than the fp32 of the update."""
        if not isinstance(value, Tensor) or value.dim() == 0 or self._states == "fp32":
            return False
        return self._blocks is None or self._blocks.can_quantize(value)

    def _round_weights(
        self,
        parameters: list[Tensor],
        on_device: list[Tensor],
        flat: Tensor,
        carried: list[Any],
        backups: list[dict[str, Any]],
    ) -> None:
        """Round the updated fp32 weights in `flat` to 16 bits and write them to `on_device`, the
        weights on the device.

        carried  what the last rounding of each weight left: its rounding error (kahan) or the
                 number of its roundings (stochastic); None before the first update
        backups  copies of the state before the update, one dict for each parameter, as `_backup`
                 returned them; they undo the update if the step is skipped
        """
        weights = _views_of(flat, on_device)
        if self._generator is not None:
            counts = [carried_one or 0 for carried_one in carried]
            noise = self._empty_flat(on_device, torch.int32)
            for parameter, part, count in zip(parameters, _views_of(noise, on_device), counts, strict=True):
                self._generator.manual_seed(rounding_seed(self._seed, self._number.get(parameter, 0), count))
                torch.randint(0, 1 << 16, part.shape, out=part, generator=self._generator)
                self.state[parameter]["roundings"] = count + 1
            add_noise_(flat, noise)
            del noise
        if self._rounding != "kahan":
            foreach_copy_(on_device, weights)
            return
        narrow = flat.to(on_device[0].dtype)
        foreach_copy_(on_device, _views_of(narrow, on_device))
        flat.sub_(narrow)
        del narrow
        if isinstance(carried[0], Tensor):
            foreach_copy_(carried, weights)
        else:
            carried = [lost.to(weight.dtype) for lost, weight in zip(weights, on_device, strict=True)]
        for parameter, lost, old in zip(parameters, carried, backups, strict=True):
            lost = self._restore_if_skipped(lost, old.get("compensation"))
            self.state[parameter]["compensation"] = self._put(parameter, "compensation", lost)

    def _save_masters(
        self, parameters: list[Tensor], on_device: list[Tensor], masters: list[Tensor], backups: list[dict[str, Any]]
    ) -> None:
        """Round the updated master weights to 16 bits and write them to `on_device`, the weights on
        the device. Save the masters as states.

        backups  copies of the state before the update, one dict for each parameter, as `_backup`
                 returned them; they undo the update if the step is skipped
        """
        foreach_copy_(on_device, masters)
        for parameter, master, old in zip(parameters, masters, backups, strict=True):
            master = self._restore_if_skipped(master, old.get(MASTER))
            self.state[parameter][MASTER] = self._put(parameter, MASTER, master)

    def _empty_flat(self, like: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.empty(sum(tensor.numel() for tensor in like), dtype=dtype, device=self._device)


def _names(states: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for state in states for name in state))


def _is_narrower(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.dtype != weight.dtype


def _concatenate(tensors: list[Tensor]) -> Tensor:
    """Return the elements of all tensors, one after another, as a flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _views_of(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return consecutive views of `flat` with the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _with_layout_of(weight: Tensor, view: Tensor) -> Tensor:
    """Return `view` in the memory layout of `weight`, for kernels that read both element by
    element. This is a copy if the weight is not contiguous."""
    return view if weight.is_contiguous() else torch.empty_like(weight, requires_grad=False).copy_(view)


def _fills(flat: Tensor, views: list[Tensor]) -> bool:
    """Return whether the views of `flat` cover all of it and are contiguous."""
    return all(view.is_contiguous() for view in views) and sum(view.numel() for view in views) == flat.numel()


__all__ = ["ELEMENTWISE", "MultiTensor", "update_batches"]
