"""Unused: modules that only some devices call, such as an expert without tokens or a conditional layer, in ZeRO's third stage.

fully_shard gathers a module's parameters when it is called, and sums its gradients after its backward. All devices have to do so
in the same order. `Calls` sees to it: before a module is called, those that the order has before it are passed by (gathered and
forgotten, as if they had been called on nothing), and at the end of a forward those that are left. A module that the order does
not have yet is agreed on, one after another, and the order has it from then on.

In backward everything follows from the graph: a number, zero, goes through all modules from call to call and is tied to the loss,
so backward reaches each of them on every device, last one first. `Made` notes which gradients are real.

Source  Zhao et al. 2023, arXiv:2304.11277 (fully_shard); static_graph and find_unused_parameters of Li et al. 2020, arXiv:2006.15704.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tightfit.methods.buckets import absent
from tightfit.models.objective import Batch


class Calls:
    """The calls of a model's sharded modules, in an order that all devices keep to.

    order   numbers of the modules, one for each call; at first as they are defined
    place   how many of these calls a forward has done; called: which of them really are calls of this device
    """

    def __init__(self, model: nn.Module, devices: DeviceMesh) -> None:
        self.modules = _outermost(model)
        self.nested = [_outermost(module) for module in self.modules]
        self.order = list(range(len(self.modules)))
        self.place, self.called, self.under_way = 0, set[int](), False
        self.token: Tensor | None = None
        self.device = next(model.parameters()).device
        if self.device.type == "meta":
            self.device = torch.device(devices.device_type)
        ranks = devices.mesh.flatten().tolist()
        on_host = devices.device_type == "cpu" or dist.get_backend() == "fake"
        own = None if len(ranks) == dist.get_world_size() and on_host else ranks
        # of processors, so that no GPU is waited for
        self.group = (
            dist.group.WORLD
            if own is None
            else dist.new_group(own, backend=_host_backend(), use_local_synchronization=True)
        )
        for number, module in enumerate(self.modules):
            state = module._get_fsdp_state()  # type: ignore[operator]
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            state._pre_forward_hook_handle = module.register_forward_pre_hook(
                partial(self._enter, number, state), prepend=True, with_kwargs=True
            )
            state._post_forward_hook_handle = module.register_forward_hook(partial(self._leave, state))
        root = model._get_fsdp_state()  # type: ignore[operator]
        model.register_forward_pre_hook(self._begin)
        root._post_forward_hook_handle.remove()
        root._post_forward_hook_handle = model.register_forward_hook(partial(self._end, root))

    def tied(self, loss_sum: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """`loss_sum` whose backward reaches every module."""

        def loss_sum_of_all(batch: Batch) -> Tensor:
            loss = loss_sum(batch)
            token, self.token = self.token, None
            return loss if token is None or not loss.requires_grad else Tied.apply(loss, token)

        return loss_sum_of_all

    @torch.compiler.disable
    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if active_fake_mode() is not None:  # one device by itself, in a prediction
            return
        self.place, self.under_way = 0, True
        self.called.clear()
        if self.token is None:
            self.token = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())

    @torch.compiler.disable
    def _enter(
        self, number: int, state: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.under_way:
            return state._pre_forward(module, args, kwargs)  # type: ignore[no-any-return]
        self._come_to(number)
        self.called.add(self.place - 1)
        (self.token, *args), kwargs = state._pre_forward(module, (self.token, *args), kwargs)  # type: ignore[assignment]
        return tuple(args), kwargs

    @torch.compiler.disable
    def _leave(self, state: Any, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.under_way:
            return state._post_forward(module, inputs, output)
        assert self.token is not None
        output, self.token = state._post_forward(module, inputs, (output, self.token.clone()))
        return output

    @torch.compiler.disable
    def _end(self, state: Any, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.under_way:
            return state._post_forward(module, inputs, output)
        known = len(self.order)
        self._come_to(None)
        self.under_way = False
        if len(self.order) > known:
            self._keep_what_is_called()
        # whatever was passed by at the end, backward begins with the model's own parameters
        assert self.token is not None
        output, self.token = state._post_forward(module, inputs, (output, self.token.clone()))
        return output

    def _come_to(self, number: int | None) -> None:
        """Pass by what comes before the next call of a module; None: what is left."""
        ahead = self.order[self.place :]
        for passed in ahead[: ahead.index(number)] if number in ahead else ahead:
            self._pass_by(passed)
        if number in ahead:
            self.place += 1
            return
        while (agreed := self._agree(number)) != number:
            assert agreed is not None
            self.order.append(agreed)
            self._pass_by(agreed)
        if number is not None:
            self.order.append(number)
            self.place += 1

    def _agree(self, number: int | None) -> int | None:
        """Of the modules that devices want to call next, the first; None where none does any more."""
        none = len(self.modules)
        wanted = torch.tensor(none if number is None else number)
        dist.all_reduce(wanted, dist.ReduceOp.MIN, group=self.group)
        return None if int(wanted) == none else int(wanted)

    def _keep_what_is_called(self) -> None:
        """The order was longer than known: leave out calls that no device did of modules that are called elsewhere in it."""
        called = torch.tensor([int(place in self.called) for place in range(len(self.order))])
        dist.all_reduce(called, dist.ReduceOp.MAX, group=self.group)
        somewhere = {number for number, there in zip(self.order, called.tolist(), strict=True) if there}
        self.order = [
            number
            for number, there in zip(self.order, called.tolist(), strict=True)
            if there or number not in somewhere
        ]

    def _pass_by(self, number: int) -> None:
        """Gather a module's parameters and forget them, as all devices do that call it."""
        self.place += 1
        module = self.modules[number]
        state = module._get_fsdp_state()  # type: ignore[operator]
        (token,), _ = state._pre_forward(module, (self.token,), {})
        for inner in self.nested[number]:
            within = inner._get_fsdp_state()  # type: ignore[operator]
            (token,), _ = within._pre_forward(inner, (token,), {})
            token = within._post_forward(inner, (token,), token.clone())
        self.token = state._post_forward(module, (token,), token.clone())


class Tied(torch.autograd.Function):
    """A tensor as it is; backward goes on to `token` too, with zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])


class Made:
    """Gives zeros to the parameters of a module that has been through backward and got no gradient, for all devices have to send the
    same; and notes which gradients of a step are real.

    groups  fully_shard's, whose parameters are gathered together
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self.made: set[Tensor] = set()
        for group in groups:
            group.post_backward = partial(self._after_backward, group, group.post_backward)

    def _after_backward(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        for held in group.fsdp_params:
            if not held.sharded_param.requires_grad or not hasattr(held, "_unsharded_param"):
                continue
            if held.unsharded_param.grad is not None or held.unsharded_accumulated_grad is not None:
                self.made.add(held.sharded_param)
            elif group.is_unsharded:
                held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
        post_backward(*unused)

    def missing(
        self, parameters: list[nn.Parameter], total: Callable[[Tensor], object], device: torch.device
    ) -> list[int]:
        """Places of the parameters that no device made a gradient of in this step. total: sums over the devices, in place."""
        counts = torch.tensor([float(parameter in self.made) for parameter in parameters], device=device)
        missed = [place for place, parameter in enumerate(parameters) if parameter not in self.made]
        self.made.clear()
        total(counts)
        return absent(counts, missed)


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The sharded modules within one, in the order of their definition, without those within them. Of several that are gathered
    together the first stands for them."""
    found: list[nn.Module] = []
    states: list[Any] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if not isinstance(child, FSDPModule):
                look(child)
            elif (state := child._get_fsdp_state()) not in states:
                states.append(state)
                found.append(child)

    look(model)
    return found


def _host_backend() -> str:
    return "fake" if dist.get_backend() == "fake" else "gloo"


__all__ = ["Calls", "Made", "Tied"]
