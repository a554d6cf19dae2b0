"""PerParameter: any optimizer, one parameter at a time, so that what is wide exists for one parameter only.

Source  Kahan and stochastic rounding of bf16 weights: Zamirai et al. 2020, arXiv:2010.06192. Narrow states: see
        `blocks`. Update in backward: Lv et al. 2023 (LOMO), arXiv:2306.09782, by torch's post-accumulate hook.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.errors import InputError
from tightfit.optim.blocks import Bits, Blocks, bits_of
from tightfit.optim.hooks import when_complete
from tightfit.optim.norms import mark_alike

States = Literal["fp32", "bf16", "8-bit", "4-bit"]
Rounding = Literal["nearest", "kahan", "stochastic"]

CARRIED = {"kahan": "compensation", "stochastic": "roundings"}  # the state that each rounding adds: a tensor, a count
_KERNEL = ("fused", "foreach", "capturable")  # options that choose a kernel, and no mathematics


class Elsewhere(Protocol):
    """A memory beside the device's: puts a parameter's state there, always in the same place, and fetches it back.

    fetch_ahead  begins to fetch while the device works on
    next_update  an update begins: what those before the last one have put there has to have left the device
    end_updates  no more updates follow; settle: the host waits until all is there
    """

    def put_state(self, parameter: Tensor, name: str, value: Tensor) -> Tensor: ...

    def fetch_ahead(self, value: Tensor) -> None: ...

    def fetch(self, value: Tensor) -> Tensor: ...

    def next_update(self) -> None: ...

    def end_updates(self) -> None: ...

    def settle(self) -> None: ...


class Brought(Protocol):
    """Weights that lie in such a memory, or whose gradients do: `bring` gives one with its gradient on the device, and
    `take_back` takes it when it is updated. `bring_ahead` begins to bring it."""

    device: torch.device

    def bring_ahead(self, weight: Tensor) -> None: ...

    def bring(self, weight: Tensor) -> Tensor: ...

    def take_back(self, weight: Tensor, here: Tensor) -> None: ...

    def next_update(self) -> None: ...

    def end_updates(self) -> None: ...

    def settle(self) -> None: ...


class PerParameter(Optimizer):
    """Wraps a fresh optimizer and updates one parameter at a time.

    states    width in which states are kept between updates; the update itself is in fp32. States of fewer than 4096
              elements, or not a whole number of blocks (256 elements in 8 bits, 128 in 4), stay fp32 in place of 8-bit
              and 4-bit. "fp32" leaves all as the wrapped optimizer makes them.
    rounding  how an update of a 16-bit weight is rounded: nearest, kahan (a second 16-bit tensor carries what was
              lost), or stochastic (bf16: up or down, with the probability that keeps the mean)
    seed      of the stochastic rounding
    keep      another memory than the device's, in which states are kept
    apart     where the weights given lie, or their gradients, if that is not on the device that updates them
    wide      the states and updates of 16-bit weights are in fp32 whatever `states` and `rounding` say
    undoes    whether a step may be told to change nothing by a number that only the device knows: see `leave_out`

    Learning rates and the other options are read from `param_groups` at each update. The memory needed beyond what is
    kept is that of one parameter: its fp32 copy, gradient and states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: States = "fp32",
        rounding: Rounding = "nearest",
        seed: int = 0,
        wide: bool = False,
        keep: Elsewhere | None = None,
        apart: Brought | None = None,
        undoes: bool = False,
    ) -> None:
        assert not optimizer.state, "wrap an optimizer before its first step"
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._inner = optimizer
        self._inner.param_groups = []
        self._device = device = self.param_groups[0]["params"][0].device if apart is None else apart.device
        self._states, self._rounding = states, rounding
        self._keep, self._apart = keep, apart
        self._wide = wide or states != "fp32" or rounding != "nearest"
        self._blocks = Blocks(cast(Bits, int(states[0])), device) if states in ("8-bit", "4-bit") else None
        self._generator, self._seed = torch.Generator(device) if rounding == "stochastic" else None, seed
        self._number = {parameter: number for number, parameter in enumerate(self._parameters())}
        self._updated: set[Tensor] = set()  # by backward, since the last step()
        self.undoes = undoes
        self._left_out: Tensor | None = None  # whether the next step changes nothing: a bool scalar on the device
        self._asks: Callable[[], bool] | None = None  # for the same number of the last step, on the host
        self._counts: list[tuple[Tensor, dict[str, Any]]] = []  # before the last step, of what the host counts

    def attach(self) -> None:
        """From now on backward updates each parameter once its gradient is complete, and frees the gradient."""
        for number, group in enumerate(self.param_groups):
            when_complete(group["params"], self._update_in_backward, number)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient: none, where backward has updated them all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._correct_counts()
        updates = [one for group in self.param_groups for one in self._updates(group)]
        for parameters, _ in updates[:1]:
            self._fetch_ahead(parameters)
        for number, (parameters, group) in enumerate(updates):
            self._next_update()
            for following, _ in updates[number + 1 : number + 2]:  # comes while this update runs
                self._fetch_ahead(following)
            self._update_all(parameters, group)
        self._end_updates()
        self._updated.clear()
        self._left_out = None
        if self._apart is not None:  # weights, which others read wherever they lie
            self._apart.settle()
        return loss

    def can_leave_out(self) -> bool:
        """Whether `leave_out` may be called: what a first update would make cannot be undone."""
        return self.undoes and all(one in self.state for one in self._parameters() if one.grad is not None)

    def leave_out(self, found_inf: Tensor, asks: Callable[[], bool]) -> None:
        """The next step changes neither weights nor states where `found_inf`, a bool scalar on the device, holds. No host waits:
        each update is made, and what it has changed is put back where that holds. What the host counts, such as steps, it
        corrects before the step after that, when it asks for the number with `asks`."""
        assert self.can_leave_out()
        self._correct_counts()
        self._left_out, self._asks = found_inf, asks

    def _correct_counts(self) -> None:
        """Put back what the host counted in the last step, if that was left out."""
        counts, self._counts = self._counts, []
        if counts and self._asks is not None and self._asks():
            for parameter, before in counts:
                self.state[parameter].update(before)

    def _noted(self, parameter: Tensor, here: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Copies of what an update may have to put back: the weight, named "", and its states as they are kept."""
        if self._left_out is None:
            return {}
        counts = {name: value for name, value in states.items() if not _lies_on(value, self._left_out)}
        self._counts.append((parameter, {name: _copied(value) for name, value in counts.items()}))
        kept = {name: _copied(value) for name, value in states.items() if name not in counts}
        return {"": here.detach().clone(), **kept}

    def _undone(self, value: Any, before: Any) -> Any:
        """`value`, in place, as it was before where the step is left out. None: there is nothing to put back."""
        if self._left_out is None or before is None:
            return value
        if isinstance(value, dict):
            return {part: self._undone(one, before[part]) for part, one in value.items()}
        return value.copy_(torch.where(self._left_out, before, value))

    def _updates(self, group: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
        """The parameters that are updated together, in order, and their group."""
        return [([parameter], group) for parameter in group["params"] if parameter.grad is not None]

    def _update_all(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _fetch_ahead(self, parameters: list[Tensor]) -> None:
        """Begin to bring what an update of these needs."""
        for parameter in parameters:
            if self._apart is not None:
                self._apart.bring_ahead(parameter)
            if self._keep is not None:
                for value in self.state.get(parameter, {}).values():
                    for part in value.values() if isinstance(value, dict) else (value,):
                        if isinstance(part, Tensor) and part.dim() > 0:
                            self._keep.fetch_ahead(part)

    def _next_update(self) -> None:
        there = self._keep or self._apart  # one memory, where both are there
        if there is not None:
            there.next_update()

    def _end_updates(self) -> None:
        there = self._keep or self._apart
        if there is not None:
            there.end_updates()

    def _update_in_backward(self, parameter: Tensor, group: int) -> None:
        if parameter in self._updated:
            raise InputError(
                "update in backward",
                "a second gradient of a weight before step()",
                "give the whole batch as one micro-batch, and call step() after each backward",
            )
        with torch.no_grad():
            self._update(parameter, self.param_groups[group])
            self._end_updates()
        parameter.grad = None
        self._updated.add(parameter)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """One step of the wrapped optimizer for one parameter: widen, update, narrow and round again."""
        kept = {name: self._fetched(value) for name, value in self.state.get(parameter, {}).items()}
        here = parameter if self._apart is None else mark_alike(self._apart.bring(parameter), parameter)
        before, inner = self._noted(parameter, here, kept), self._inner
        carried = kept.pop(CARRIED.get(self._rounding, ""), None)
        weight = self._widen_weight(here, carried)
        states = {name: self._widen(name, value, weight) for name, value in kept.items()}
        inner.param_groups = [{**group, "params": [weight]}]
        inner.state = defaultdict(dict, {weight: states})
        inner.step()
        states = inner.state[weight]
        inner.param_groups, inner.state = [], defaultdict(dict)
        self.state[parameter] = {
            name: self._put(parameter, name, self._undone(self._narrow(name, states.pop(name)), before.get(name)))
            for name in list(states)
        }
        if weight is not here:
            self._round(parameter, here, weight, carried, before)
        self._undone(here.detach(), before.get(""))
        if self._apart is not None:
            self._apart.take_back(parameter, here)

    def _is_widened(self, parameter: Tensor) -> bool:
        """Whether the wrapped optimizer gets an fp32 copy in place of the parameter."""
        return parameter.dtype.itemsize < 4 and self._wide

    def _widen_weight(self, parameter: Tensor, carried: Any) -> Tensor:
        if not self._is_widened(parameter):
            return parameter
        assert parameter.grad is not None
        weight = mark_alike(parameter.detach().float(), parameter)
        weight.grad = parameter.grad.float()
        return weight.add_(carried) if isinstance(carried, Tensor) else weight

    def _round(self, parameter: Tensor, here: Tensor, weight: Tensor, carried: Any, before: dict[str, Any]) -> None:
        """Write the fp32 `weight` back into its 16-bit parameter, as that is `here` on the device."""
        if self._generator is not None:
            assert here.dtype is torch.bfloat16
            count = carried or 0
            number = self._number.get(parameter, 0)  # a planner's trace puts others in the place of the weights
            self._generator.manual_seed(seed_of(self._seed, number, count))
            round_stochastically_(weight, self._generator)
            self.state[parameter]["roundings"] = count + 1
        here.copy_(weight)
        if self._rounding == "kahan":
            lost = self._undone(weight.sub_(here).to(here.dtype), before.get("compensation"))
            self.state[parameter]["compensation"] = self._put(parameter, "compensation", lost)

    def _narrow(self, name: str, value: Any) -> Any:
        """A state as it is kept. Counters (numbers, tensors without dims) are kept as they are."""
        if not isinstance(value, Tensor) or value.dim() == 0 or self._states == "fp32":
            return value
        if self._blocks is None:
            return value.to(torch.bfloat16)
        return self._blocks.pack(name, value) if self._blocks.divide(value) else value

    def _put(self, parameter: Tensor, name: str, value: Any) -> Any:
        """A narrowed state where it is kept."""
        if self._keep is None:
            return value
        if isinstance(value, dict):
            return {part: self._keep.put_state(parameter, f"{name}.{part}", tensor) for part, tensor in value.items()}
        return self._keep.put_state(parameter, name, value) if isinstance(value, Tensor) and value.dim() > 0 else value

    def _widen(self, name: str, value: Any, weight: Tensor) -> Any:
        """A kept state as the wrapped optimizer wants it: on the device and in the type of the weight."""
        if isinstance(value, dict):
            assert self._blocks is not None
            return self._blocks.unpack(name, value, weight)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value.to(weight.dtype)

    def _fetched(self, value: Any) -> Any:
        """A kept state on the device. Counters stay where they are."""
        if isinstance(value, dict):
            return {part: self._fetched(one) for part, one in value.items()}
        if self._keep is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._keep.fetch(value)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly where a PerParameter like this one was, or from states of another kind, made this one's.

        What state_dict() gives is plain tensors and numbers; a packed state is {"codes", "scale"}.
        """
        super().load_state_dict({**with_kernels_of(self, state_dict), "state": {}})
        self._counts.clear()
        groups = [group for group in self.param_groups for _ in group["params"]]
        parameters, others = self._parameters(), set(CARRIED.values()) - {CARRIED.get(self._rounding)}
        for number, states in state_dict["state"].items():
            parameter, group = parameters[number], groups[number]
            loaded = {
                name: self._load(name, value, parameter, group) for name, value in states.items() if name not in others
            }
            self._next_update()
            self.state[parameter] = {name: self._put(parameter, name, value) for name, value in loaded.items()}
        self._end_updates()
        if self._keep is not None:
            self._keep.settle()

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer. The host waits for the last step, where states are kept elsewhere or it may have been left out."""
        self._correct_counts()
        if self._keep is not None:
            self._keep.settle()
        return super().state_dict()

    def _load(self, name: str, value: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            value = {part: tensor.to(self._device, copy=True) for part, tensor in value.items()}
            if self._blocks is not None and self._blocks.bits == bits_of(value, parameter):
                return value
            value = unpack(name, value, parameter)
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:  # a counter: on the host, but for kernels that read it on the device
            return value.to(self._device if group.get("fused") or group.get("capturable") else "cpu", copy=True)
        if name == "compensation":
            return value.to(self._device, parameter.dtype, copy=True)
        dtype = torch.float32 if self._is_widened(parameter) else parameter.dtype
        return self._narrow(name, value.to(self._device, dtype, copy=True))


def _lies_on(value: Any, scalar: Tensor) -> bool:
    """Whether a state is a tensor, or several, on the device of `scalar`."""
    one = next(iter(value.values())) if isinstance(value, dict) else value
    return isinstance(one, Tensor) and one.device == scalar.device


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {part: one.clone() for part, one in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def round_stochastically_(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values in place to ones that bf16 holds: up with the probability that keeps the mean, else down.

    Random bits are added to the 16 bits that bf16 lacks, carrying into the others; then those are cut off.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return add_noise_(values, noise)


def add_noise_(values: Tensor, noise: Tensor) -> Tensor:
    """Add random bits, of an int32 for each value, and cut off what bf16 does not hold."""
    values.view(torch.int32).add_(noise).bitwise_and_(-(1 << 16))
    return values


def seed_of(seed: int, number: int, count: int) -> int:
    """Of the noise of a parameter's next rounding: a function of the job's seed, the parameter's number and how often it was
    rounded, so that neither a resume nor the order of the updates changes the noise."""
    return abs(hash((seed, number, count)))


def unpack(name: str, packed: dict[str, Tensor], parameter: Tensor) -> Tensor:
    """The fp32 state of `parameter` that `packed` stands for, whatever its width."""
    device = packed["codes"].device  # where the parameter itself is not, if that is offloaded
    like = torch.empty_like(parameter, dtype=torch.float32, device=device, requires_grad=False)
    return Blocks(bits_of(packed, parameter), device).unpack(name, packed, like)


def load_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook for a plain optimizer's load_state_dict: takes what any PerParameter around it has saved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    carried = set(CARRIED.values())

    def plain(name: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, dict):
            return value
        return unpack(name, {part: tensor.to(parameter.device) for part, tensor in value.items()}, parameter)

    states = {
        number: {name: plain(name, value, parameters[number]) for name, value in saved.items() if name not in carried}
        for number, saved in state_dict["state"].items()
    }
    return {**with_kernels_of(optimizer, state_dict), "state": states}


def with_kernels_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with the kernels that `optimizer` was made with: those are the plan's, not the checkpoint's."""
    groups = [
        {**saved, **{option: group[option] for option in _KERNEL if option in group}}
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}
