"""What fully_shard (FSDP2) keeps of a sharded model.

A model that fully_shard shards has parameter groups: parameters that are gathered together. Each
group has a record of each of its parameters. Both are private classes of torch, so their members
are reached through the functions below only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as ParameterRecord
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as ParameterGroup


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """A model's parameter groups, in the order of its modules."""
    for state in [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]:
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]  # until torch 2.12
        yield from (group for group in groups if group is not None)


def model_records(model: nn.Module) -> Iterator[ParameterRecord]:
    """The records of all of a model's parameters."""
    for group in parameter_groups(model):
        yield from records(group)


def is_running(module: FSDPModule) -> bool:
    """Whether fully_shard has gathered a module's parameters for its forward or its backward."""
    return module._get_fsdp_state()._training_state is not TrainingState.IDLE


# parameter groups


def records(group: ParameterGroup) -> Sequence[ParameterRecord]:
    """The records of a group's parameters."""
    return group.fsdp_params


def modules_of(group: ParameterGroup) -> Sequence[nn.Module]:
    """The modules whose calls gather a group."""
    return group.modules


def is_unsharded(group: ParameterGroup) -> bool:
    """Whether a group's parameters are gathered now."""
    return group.is_unsharded


def reduces_gradients(group: ParameterGroup) -> bool:
    """Whether a group's gradients are reduce-scattered after this backward."""
    return group.reduce_grads


def has_pending_gather(group: ParameterGroup) -> bool:
    """Whether the gather of a group has begun and its result is not used yet."""
    return group._all_gather_result is not None


def wrap_all_gather(group: ParameterGroup, wrap: Callable[[Any], Any]) -> None:
    """Replace the object that all-gathers a group by `wrap` of it. It needs the methods `allocate`
    and `__call__` of the original."""
    group._all_gather_comm = wrap(group._all_gather_comm)


def add_to_gather(
    group: ParameterGroup, begun: Callable[[], None], ending: Callable[[], AbstractContextManager[None]]
) -> None:
    """Call the functions `begun` and `ending` during each all-gather of a group.

    begun   called after the all-gather has begun
    ending  returns a context manager, in which the all-gather ends and the gathered parameters are
            allocated
    """
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

    def begin(async_op: bool = False) -> None:
        unshard(async_op)
        begun()

    def end() -> None:
        with ending():
            wait_for_unshard()

    group.unshard, group.wait_for_unshard = begin, end  # type: ignore[method-assign]


def before_reduction(group: ParameterGroup, call: Callable[[], None]) -> None:
    """Call `call` after each backward of a group, before the group's gradients are reduced."""
    post_backward = group.post_backward

    def call_and_reduce(*unused: Any) -> None:
        call()
        post_backward(*unused)

    group.post_backward = call_and_reduce  # type: ignore[method-assign]


# records of parameters


def sharded_parameter(record: ParameterRecord) -> nn.Parameter:
    """The model's parameter while it is sharded: a DTensor."""
    return record.sharded_param


def is_gathered_once(record: ParameterRecord) -> bool:
    """Whether a parameter has ever been gathered, so that `gathered_parameter` exists."""
    return hasattr(record, "_unsharded_param")


def gathered_parameter(record: ParameterRecord) -> nn.Parameter:
    """The full parameter, which exists while the group is gathered."""
    return record.unsharded_param


def has_gradient(record: ParameterRecord) -> bool:
    """Whether the gathered parameter has a gradient, from this or an earlier micro-batch."""
    return record.unsharded_param.grad is not None or record.unsharded_accumulated_grad is not None


def gathered_buffers(record: ParameterRecord) -> Sequence[Tensor]:
    """Return the buffers into which fully_shard all-gathers a parameter."""
    return record.all_gather_outputs


def padded_shard(record: ParameterRecord) -> Tensor:
    """This device's shard in the form that is all-gathered: flattened, and padded to the size of
    the largest shard of all devices."""
    return record._sharded_param_data


def set_padded_shard(record: ParameterRecord, shard: Tensor) -> None:
    """Replace the tensor that is gathered by one of the same size."""
    record._sharded_param_data = shard


def padded_shard_size(record: ParameterRecord) -> torch.Size:
    """The shape of `padded_shard` before it is flattened."""
    return record.padded_sharded_param_size


def take_new_shard(record: ParameterRecord) -> None:
    """Make fully_shard use the parameter that the model holds now. It may replace its tensor by a
    padded copy."""
    record.reset_sharded_param()


__all__ = [
    "ParameterGroup",
    "ParameterRecord",
    "add_to_gather",
    "before_reduction",
    "gathered_buffers",
    "gathered_parameter",
    "has_gradient",
    "has_pending_gather",
    "is_gathered_once",
    "is_running",
    "is_unsharded",
    "model_records",
    "modules_of",
    "padded_shard",
    "padded_shard_size",
    "parameter_groups",
    "records",
    "reduces_gradients",
    "set_padded_shard",
    "sharded_parameter",
    "take_new_shard",
    "wrap_all_gather",
]
