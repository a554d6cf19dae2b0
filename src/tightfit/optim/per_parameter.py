"""PerParameter: run any optimizer one parameter at a time, so that fp32 copies exist for one
parameter only.

`methods/optimizer_states.py` wraps the job's optimizer in a PerParameter for low-bit states (bf16,
8-bit, 4-bit), 16-bit weights with or without fp32 master weights, offloaded states and the update
in backward.

Example: a bf16 weight of 16M elements with 8-bit AdamW states. One update makes fp32 copies of the
weight, its gradient and its two states, 4 x 64 MiB, and frees them before the next parameter is
updated. Between updates only the bf16 weight (32 MiB) and the 8-bit states (2 x 16 MiB, plus one
fp32 scale for each 256 elements) stay in memory.

Source  Kahan and stochastic rounding of bf16 weights: Zamirai et al. 2020, arXiv:2010.06192. 8-bit
        and 4-bit states: see `blockwise_quantization`. Update in backward: Lv et al. 2023 (LOMO),
        arXiv:2306.09782, implemented with torch's post-accumulate hook.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.errors import InputError
from tightfit.optim.blockwise_quantization import Bits, BlockQuantizer, bits_of
from tightfit.optim.counters import is_counter
from tightfit.optim.gradient_dtype import widen_gradients
from tightfit.optim.gradient_hooks import on_gradient_ready
from tightfit.optim.nested_states import is_nested
from tightfit.optim.norms import copy_shard_mark
from tightfit.optim.one_by_one import Closure, loss_of
from tightfit.optim.own_writes import note_own_write, written_by_others

States = Literal["fp32", "bf16", "8-bit", "4-bit"]
Rounding = Literal["nearest", "kahan", "stochastic"]

# The state that each rounding mode adds: kahan a tensor with the rounding errors, stochastic the
# number of roundings so far.
ROUNDING_STATES = {"kahan": "compensation", "stochastic": "roundings"}
MASTER = "master"  # the state that holds the fp32 master weights of a 16-bit parameter
# options that choose a kernel and do not change the mathematics
_KERNEL_OPTIONS = ("fused", "foreach", "capturable")


class StateStore(Protocol):
    """Stores optimizer states in a memory other than the device's, such as host memory.

    put_state    store the state `name` of a parameter, always at the same address; returns the
                 stored tensor
    fetch_ahead  begin to copy a stored tensor to the device, while the device computes
    fetch        return a copy of the stored tensor on the device
    next_update  must be called before the update of each parameter. The device waits until the
                 states of earlier updates are copied to the store, except those of the latest one
    end_updates  must be called after the last update of a step. The device waits until the states
                 of all updates are copied to the store
    settle       make the host wait until all copies to the store have ended
    """

    def put_state(self, parameter: Tensor, name: str, value: Tensor) -> Tensor: ...

    def fetch_ahead(self, value: Tensor) -> None: ...

    def fetch(self, value: Tensor) -> Tensor: ...

    def next_update(self) -> None: ...

    def end_updates(self) -> None: ...

    def settle(self) -> None: ...


class WeightStore(Protocol):
    """Stores weights, or only their gradients, in a memory other than the device's (offloading).

    device       the device that updates the weights
    bring_ahead  start an asynchronous copy of a weight to the device, before it is updated
    bring        return the weight on the device, with its gradient in `grad`, for the update
    take_back    copy `on_device`, the updated weight on the device, back to the store
    next_update  must be called before the update of each parameter
    end_updates  must be called after the last update of a step
    settle       make the host wait until all copies to the store have ended
    """

    device: torch.device

    def bring_ahead(self, weight: Tensor) -> None: ...

    def bring(self, weight: Tensor) -> Tensor: ...

    def take_back(self, weight: Tensor, on_device: Tensor) -> None: ...

    def next_update(self) -> None: ...

    def end_updates(self) -> None: ...

    def settle(self) -> None: ...


class PerParameter(Optimizer):
    """Wraps an optimizer and updates one parameter at a time.

    optimizer     a new optimizer, without states
    states        width of the states between updates; the update itself is in fp32. With 8-bit and
                  4-bit, a state stays fp32 if it has fewer than 4096 elements, or if its size is
                  not a multiple of the quantization block (256 elements in 8 bits, 128 in 4).
                  "fp32" leaves all states as the wrapped optimizer makes them.
    rounding      how an update of a 16-bit weight is rounded: nearest; kahan (a second 16-bit
                  tensor carries the rounding error to the next update); or stochastic (bf16 only:
                  up or down, with the probability that keeps the mean)
    seed          the seed of the stochastic rounding
    names         parameter -> its name, by which the noise of stochastic rounding is drawn: copies of a
                  parameter on several pipeline ranks are rounded alike. None: its place
    fp32_updates  whether 16-bit weights are updated in fp32 with fp32 states even if `states` is
                  "fp32" and `rounding` is nearest. Any other `states` or `rounding` implies it
    masters       whether fp32 master weights of 16-bit weights are kept among the states. Updates
                  change the masters, which are then rounded into the weights, so no update is lost.
                  The gradients of these weights are fp32, too. `rounding` must be nearest
    state_store   the memory that holds the states; None keeps them on the device
    weight_store  the memory that holds the weights or their gradients; None if both are on the
                  device
    can_undo      whether `skip_step_if` may be called, which skips a step if a flag on the device is
                  true

    follows_data  whether masters also follow changes of `weight.data`, of which torch keeps no count, so that each
                  update has to compare all masters with their weights; False at first

    Learning rates and the other options are read from `param_groups` at each update. An update
    needs memory for the fp32 copy, the gradient and the fp32 states of one parameter, in addition
    to what stays between updates. With a `state_store`, saved states of three parameters are on the
    device during an update: those of this parameter, of the next one, which are copied in, and of
    the previous one, which are copied out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: States = "fp32",
        rounding: Rounding = "nearest",
        seed: int = 0,
        fp32_updates: bool = False,
        state_store: StateStore | None = None,
        weight_store: WeightStore | None = None,
        can_undo: bool = False,
        masters: bool = False,
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        assert not optimizer.state, "wrap an optimizer before its first step"
        assert rounding == "nearest" or not masters
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._inner = optimizer
        self._inner.param_groups = []
        self._device = device = (
            self.param_groups[0]["params"][0].device if weight_store is None else weight_store.device
        )
        self._states, self._rounding = states, rounding
        self._state_store, self._weight_store = state_store, weight_store
        self._fp32_updates = fp32_updates or states != "fp32" or rounding != "nearest" or masters
        self._masters = masters
        self._factor: float | Tensor | None = None  # by which 16-bit gradients are multiplied in the next step
        # The name of the state that belongs to the weight and not to the wrapped optimizer.
        self._carried = MASTER if masters else ROUNDING_STATES.get(rounding, "")
        self._blocks = BlockQuantizer(cast(Bits, int(states[0])), device) if states in ("8-bit", "4-bit") else None
        self._generator, self._seed = torch.Generator(device) if rounding == "stochastic" else None, seed
        self._number = {
            parameter: zlib.crc32(names[parameter].encode()) if names and parameter in names else number
            for number, parameter in enumerate(self._parameters())
        }
        if masters:
            widen_gradients(self._parameters())
        self.follows_data = False
        # Parameters that backward has updated since the last step().
        self._updated: set[Tensor] = set()
        self.can_undo = can_undo
        # Whether the next step must change nothing: a bool scalar on the device.
        self._skip_step: Tensor | None = None
        # Returns on the host whether the last step was skipped.
        self._was_skipped: Callable[[], bool] | None = None
        # Each parameter's counters on the host (such as step), as they were before the last step.
        self._host_counters: list[tuple[Tensor, dict[str, Any]]] = []

    def attach(self) -> None:
        """Make backward update each parameter as soon as its gradient is complete, and then free
        the gradient.

        A second gradient of a parameter before `step()` then raises InputError.
        """
        for number, group in enumerate(self.param_groups):
            on_gradient_ready(group["params"], self._update_in_backward, number)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that still has a gradient. After an update in backward no
        parameter has one.

        closure  computes the loss again and returns it, as in torch

        Returns the closure's loss, or None without a closure.
        """
        loss = loss_of(closure)
        self._restore_counters()
        updates = [one for group in self.param_groups for one in self._batches_of(group)]
        for parameters, _ in updates[:1]:
            self._fetch_ahead(parameters)
        for number, (parameters, group) in enumerate(updates):
            self._next_update()
            for following, _ in updates[number + 1 : number + 2]:  # copied during this update
                self._fetch_ahead(following)
            self._update_batch(parameters, group)
        self._end_updates()
        self._updated.clear()
        self._skip_step = self._factor = None
        # Other code reads offloaded weights in the store, so the host waits for the copies.
        if self._weight_store is not None:
            self._weight_store.settle()
        return loss

    def multiply_narrow_gradients(self, factor: float | Tensor) -> None:
        """Multiply the 16-bit gradients of the next step by `factor`, a number or a scalar fp32
        tensor on the device, when they are widened to fp32."""
        self._factor = factor

    def can_skip_step(self) -> bool:
        """Return whether `skip_step_if`, which skips the next step, may be called now.

        A skipped step is computed and then undone: weights and states are restored from copies. The
        first update of a parameter cannot be undone, because it creates the parameter's states. So
        every parameter with a gradient must have states already.
        """
        return self.can_undo and all(
            parameter in self.state for parameter in self._parameters() if parameter.grad is not None
        )

    def skip_step_if(self, found_inf: Tensor, was_skipped: Callable[[], bool]) -> None:
        """Skip the next step if `found_inf` is true: it then changes neither weights nor states.

        found_inf    bool scalar on the device
        was_skipped  a function that returns the same value on the host; it may wait for the device

        The host does not wait for `found_inf`. Each update is made, and if `found_inf` is true, the
        device then restores the weight and its saved states from copies. Counters on the host, such
        as the step count, are corrected later: the following step or `state_dict()` calls `was_skipped`
        and restores them if it returns True.
        """
        assert self.can_skip_step()
        self._restore_counters()
        self._skip_step, self._was_skipped = found_inf, was_skipped

    def _restore_counters(self) -> None:
        """Restore the counters on the host, such as Adam's step count, if the last step was
        skipped."""
        counters, self._host_counters = self._host_counters, []
        if counters and self._was_skipped is not None and self._was_skipped():
            for parameter, backup in counters:
                self.state[parameter].update(backup)

    def _backup(self, parameter: Tensor, on_device: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Return copies of the tensors that must be restored if the step is skipped: a dict with
        the weight under the key "", and each saved state under its name. The dict is empty unless
        `skip_step_if` was called.

        on_device  the weight on the device, which differs from `parameter` if weights are offloaded
        states     the parameter's saved states by name, on the device

        States that are not on the device are counters. Their copies are added to `_host_counters`
        instead.
        """
        if self._skip_step is None:
            return {}
        counters = {name: value for name, value in states.items() if not _is_on_device_of(value, self._skip_step)}
        self._host_counters.append((parameter, {name: _clone(value) for name, value in counters.items()}))
        saved = {name: _clone(value) for name, value in states.items() if name not in counters}
        return {"": on_device.detach().clone(), **saved}

    def _restore_if_skipped(self, value: Any, backup: Any) -> Any:
        """Overwrite `value` in place with `backup` if the step is skipped, and return it. `backup`
        is a copy of `value` before the update; None leaves `value` unchanged.
        """
        if self._skip_step is None or backup is None:
            return value
        if isinstance(value, dict):
            return {part: self._restore_if_skipped(one, backup[part]) for part, one in value.items()}
        return value.copy_(torch.where(self._skip_step, backup, value))

    def _batches_of(self, group: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
        """Return a list of (parameters, group) in the order of updates. The parameters of one entry
        are updated together; in this class, each entry has one parameter. Parameters without a
        gradient are left out."""
        return [([parameter], group) for parameter in group["params"] if parameter.grad is not None]

    def _update_batch(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _fetch_ahead(self, parameters: list[Tensor]) -> None:
        """Begin to copy to the device the weights and states that an update of these parameters
        needs."""
        for parameter in parameters:
            if self._weight_store is not None:
                self._weight_store.bring_ahead(parameter)
            if self._state_store is not None:
                for value in self.state.get(parameter, {}).values():
                    for part in value.values() if isinstance(value, dict) else (value,):
                        if isinstance(part, Tensor) and part.dim() > 0:
                            self._state_store.fetch_ahead(part)

    def _next_update(self) -> None:
        store = self._state_store or self._weight_store  # if both exist, they are the same store
        if store is not None:
            store.next_update()

    def _end_updates(self) -> None:
        store = self._state_store or self._weight_store
        if store is not None:
            store.end_updates()

    def _update_in_backward(self, parameter: Tensor, group: int) -> None:
        if parameter in self._updated:
            raise InputError(
                "update in backward",
                "a weight got a second gradient before step()",
                "give the whole batch as one micro-batch, and call step() after each backward",
            )
        with torch.no_grad():
            self._update(parameter, self.param_groups[group])
            self._end_updates()
        parameter.grad = None
        self._updated.add(parameter)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Run one step of the wrapped optimizer for one parameter.

        Widen the weight, gradient and states to fp32, update them, narrow the states to the width
        in which they are saved, and round the weight to 16 bits.
        """
        saved = {name: self._fetch(value) for name, value in self.state.get(parameter, {}).items()}
        on_device = (
            parameter if self._weight_store is None else copy_shard_mark(self._weight_store.bring(parameter), parameter)
        )
        backup, inner = self._backup(parameter, on_device, saved), self._inner
        carried = saved.pop(self._carried, None)
        if self._masters:
            self._follow_changes(parameter, on_device, carried)
        weight = self._widen_weight(on_device, carried)
        states = {name: self._widen(name, value, weight) for name, value in saved.items()}
        inner.param_groups = [{**group, "params": [weight]}]
        inner.state = defaultdict(dict, {weight: states})
        inner.step()
        states = inner.state[weight]
        inner.param_groups, inner.state = [], defaultdict(dict)
        self.state[parameter] = {
            name: self._put(
                parameter, name, self._restore_if_skipped(self._narrow(name, states.pop(name)), backup.get(name))
            )
            for name in list(states)
        }
        if weight is not on_device:
            self._round(parameter, on_device, weight, carried, backup)
        self._restore_if_skipped(on_device.detach(), backup.get(""))
        if self._weight_store is not None:
            self._weight_store.take_back(parameter, on_device)
        if self._masters:
            note_own_write(parameter)

    def _is_widened(self, parameter: Tensor) -> bool:
        """Return whether the wrapped optimizer updates an fp32 copy of the parameter instead of the
        parameter itself."""
        return parameter.dtype.itemsize < 4 and self._fp32_updates

    def _follow_changes(self, parameter: Tensor, on_device: Tensor, master: Tensor | None) -> None:
        """Set the elements of a master to those of the weight that something else than the optimizer has
        changed since the last update, such as load_state_dict or a clipping of weights.

        on_device  the weight on the device
        master     its master; None before the first update
        """
        if master is None or not (self.follows_data or written_by_others(parameter)):
            return
        weight = on_device.detach()
        torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype), out=master)

    def _widen_weight(self, parameter: Tensor, carried: Any) -> Tensor:
        if not self._is_widened(parameter):
            return parameter
        assert parameter.grad is not None
        wide = carried if self._masters and isinstance(carried, Tensor) else parameter.detach().float()
        weight = copy_shard_mark(wide, parameter)
        weight.grad = parameter.grad.float()
        if self._factor is not None and parameter.grad.dtype.itemsize < 4:
            weight.grad.mul_(self._factor)
        return weight.add_(carried) if isinstance(carried, Tensor) and not self._masters else weight

    def _round(
        self, parameter: Tensor, on_device: Tensor, weight: Tensor, carried: Any, backup: dict[str, Any]
    ) -> None:
        """Round the fp32 `weight` to the 16-bit type of `parameter`, and write the result to
        `on_device`.

        on_device  the parameter's copy on the device, or the parameter itself if it is on the
                   device
        weight     the updated weight; with kahan, it is overwritten with the rounding error. With
                   master weights, it is saved as the parameter's master
        carried    with stochastic rounding, the number of earlier roundings of this parameter
                   (None: 0); not read otherwise
        backup     copies of the state before the update, as `_backup` returned them; they undo the
                   update if the step is skipped
        """
        if self._generator is not None:
            assert on_device.dtype is torch.bfloat16
            count = carried or 0
            # The planner's trace replaces the weights by other tensors, which have no number.
            number = self._number.get(parameter, 0)
            self._generator.manual_seed(rounding_seed(self._seed, number, count))
            round_stochastically_(weight, self._generator)
            self.state[parameter]["roundings"] = count + 1
        on_device.copy_(weight)
        if self._masters:
            weight.grad = None
            master = self._restore_if_skipped(weight, backup.get(MASTER))
            self.state[parameter][MASTER] = self._put(parameter, MASTER, master)
        if self._rounding == "kahan":
            lost = self._restore_if_skipped(weight.sub_(on_device).to(on_device.dtype), backup.get("compensation"))
            self.state[parameter]["compensation"] = self._put(parameter, "compensation", lost)

    def _narrow(self, name: str, value: Any) -> Any:
        """Return an updated state in the form in which it is saved: in fp32 or bf16, or quantized
        to 8 or 4 bits. Counters (numbers, tensors without dims) are returned unchanged.

        name  the state's name, such as exp_avg
        """
        if not isinstance(value, Tensor) or value.dim() == 0 or self._states == "fp32":
            return value
        if self._blocks is None:
            return value.to(torch.bfloat16)
        return self._blocks.quantize(name, value) if self._blocks.can_quantize(value) else value

    def _put(self, parameter: Tensor, name: str, value: Any) -> Any:
        """Store the state `name` of a parameter in the state store, and return the stored tensor.
        Without a state store, and for counters, return `value` itself."""
        if self._state_store is None:
            return value
        if isinstance(value, dict):
            return {
                part: self._state_store.put_state(parameter, f"{name}.{part}", tensor) for part, tensor in value.items()
            }
        return (
            self._state_store.put_state(parameter, name, value)
            if isinstance(value, Tensor) and value.dim() > 0
            else value
        )

    def _widen(self, name: str, value: Any, weight: Tensor) -> Any:
        """Return a saved state as the wrapped optimizer needs it: dequantized, in the type of
        `weight`. Counters are returned unchanged.

        name   the state's name, such as exp_avg
        value  the saved state, on the device
        """
        if isinstance(value, dict):
            assert self._blocks is not None
            return self._blocks.dequantize(name, value, weight)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value.to(weight.dtype)

    def _fetch(self, value: Any) -> Any:
        """Return a saved optimizer state on the device: copied there from the state store, if the
        optimizer has one. Counters are returned unchanged."""
        if isinstance(value, dict):
            return {part: self._fetch(one) for part, one in value.items()}
        if self._state_store is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._state_store.fetch(value)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that a PerParameter or a plain torch optimizer returned.

        If the state dict comes from a PerParameter with the same options, training continues
        exactly. States that were saved in another width are converted. A state is a tensor, a
        number, or, if quantized, a dict {"codes": ..., "scale": ...}.
        """
        super().load_state_dict({**with_kernel_options_of(self, state_dict), "state": {}})
        self._host_counters.clear()
        groups = [group for group in self.param_groups for _ in group["params"]]
        parameters, others = self._parameters(), {*ROUNDING_STATES.values(), MASTER} - {self._carried}
        for number, states in state_dict["state"].items():
            parameter, group = parameters[number], groups[number]
            loaded = {
                name: self._load(name, value, parameter, group) for name, value in states.items() if name not in others
            }
            self._next_update()
            self.state[parameter] = {name: self._put(parameter, name, value) for name, value in loaded.items()}
        self._end_updates()
        if self._state_store is not None:
            self._state_store.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as torch's optimizers do.

        The host waits for the last step if states are offloaded or if that step may have been
        skipped.
        """
        self._restore_counters()
        if self._state_store is not None:
            self._state_store.settle()
        return super().state_dict()

    def _load(self, name: str, value: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            value = {part: tensor.to(self._device, copy=True) for part, tensor in value.items()}
            if self._blocks is not None and self._blocks.bits == bits_of(value, parameter):
                return value
            value = dequantize_state(name, value, parameter)
        if not isinstance(value, Tensor):
            return value
        if name == MASTER:
            return value.to(self._device, torch.float32, copy=True)
        # A counter stays on the host, except for kernels that read it on the device.
        if is_counter(name, value, parameter.dim()):
            return value.to(self._device if group.get("fused") or group.get("capturable") else "cpu", copy=True)
        if name == "compensation":
            return value.to(self._device, parameter.dtype, copy=True)
        dtype = torch.float32 if self._is_widened(parameter) else parameter.dtype
        return self._narrow(name, value.to(self._device, dtype, copy=True))


def _is_on_device_of(value: Any, scalar: Tensor) -> bool:
    """Return whether a state is a tensor, or a dict of tensors, on the device of `scalar`."""
    one = next(iter(value.values())) if isinstance(value, dict) else value
    return isinstance(one, Tensor) and one.device == scalar.device


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {part: one.clone() for part, one in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def round_stochastically_(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values, in place, up or down to a bf16 value, with the probability that keeps the
    mean.

    Random bits are added to the lower 16 bits, which bf16 does not have, and may carry into the
    upper 16. Then the lower 16 bits are cleared.

    Example: 1.0 + 2**-9 lies a quarter of the way from 1.0 to the next bf16 value, 1.0 + 2**-7. It
    becomes 1.0 + 2**-7 with probability 1/4, and 1.0 with probability 3/4.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return add_noise_(values, noise)


def add_noise_(values: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 `values`, in place, up or down to a bf16 value, and return them.

    noise  an int32 in [0, 2**16) for each value. It is added to the bits of the value, and then the
           lower 16 bits, which bf16 does not have, are cleared

    Example: the lower 16 bits of 1.0 + 2**-9 are 2**14. It is rounded up, to 1.0 + 2**-7, if the
    noise is at least 2**16 - 2**14, and otherwise down to 1.0.
    """
    values.view(torch.int32).add_(noise).bitwise_and_(-(1 << 16))
    return values


def rounding_seed(seed: int, number: int, count: int) -> int:
    """Return the seed of the noise for a parameter's next rounding.

    seed    the job's seed
    number  a number of the parameter, which does not depend on the plan
    count   number of earlier roundings of this parameter

    The noise depends on nothing else, so neither a resume nor the order of the updates changes it. Shards
    of a parameter get the same noise.
    """
    return abs(hash((seed, number, count)))


def dequantize_state(name: str, packed: dict[str, Tensor], parameter: Tensor) -> Tensor:
    """Return a state of `parameter` in fp32, with the parameter's shape.

    name    the state's name, such as exp_avg
    packed  the state in 8 or 4 bits: {"codes": ..., "scale": ...}
    """
    device = packed["codes"].device  # not the parameter's device if the parameter is offloaded
    like = torch.empty_like(parameter, dtype=torch.float32, device=device, requires_grad=False)
    return BlockQuantizer(bits_of(packed, parameter), device).dequantize(name, packed, like)


def load_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a PerParameter's state dict in a form that a plain optimizer can load. A plain
    optimizer's own state dict stays as it is.

    This function is a pre-hook for the plain optimizer's `load_state_dict`. It dequantizes states,
    and drops the states that a rounding mode or master weights added.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    carried = {*ROUNDING_STATES.values(), MASTER}

    def plain(name: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, dict) or is_nested(value):
            return value
        return dequantize_state(name, {part: tensor.to(parameter.device) for part, tensor in value.items()}, parameter)

    states = {
        number: {name: plain(name, value, parameters[number]) for name, value in saved.items() if name not in carried}
        for number, saved in state_dict["state"].items()
    }
    return {**with_kernel_options_of(optimizer, state_dict), "state": states}


def with_kernel_options_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with the kernel options of `optimizer`, such as fused. The plan sets
    these options, not the checkpoint."""
    groups = [
        {**saved, **{option: group[option] for option in _KERNEL_OPTIONS if option in group}}
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}
