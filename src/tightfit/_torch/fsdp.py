"""Access to the private objects with which fully_shard (FSDP2) tracks a sharded model.

fully_shard divides a model's parameters into groups that are all-gathered together
(`ParameterGroup`). A group has one record for each of its parameters (`ParameterRecord`). Both are
private classes of torch, so other code reaches their members only through the functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as ParameterRecord
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as ParameterGroup


@contextmanager
def sharding_integers() -> Iterator[None]:
    """Context manager in which fully_shard also shards parameters of integers, such as weights in 4
    bits. torch 2.11 creates each shard as a parameter with requires_grad, which integers cannot
    have; later versions do not."""
    before = _fsdp_param.nn

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)

    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param.nn = before


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Yield the parameter groups of a model that fully_shard has sharded, in the order of its
    modules."""
    for state in [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]:
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]  # until torch 2.12
        yield from (group for group in groups if group is not None)


def model_records(model: nn.Module) -> Iterator[ParameterRecord]:
    """Yield the record of each parameter of a model that fully_shard has sharded."""
    for group in parameter_groups(model):
        yield from records(group)


def is_running(module: FSDPModule) -> bool:
    """Return whether `module` is in its forward or backward, for which fully_shard has gathered its
    parameters."""
    return module._get_fsdp_state()._training_state is not TrainingState.IDLE


# parameter groups


def records(group: ParameterGroup) -> Sequence[ParameterRecord]:
    """Return the records of the parameters in a group."""
    return group.fsdp_params


def modules_of(group: ParameterGroup) -> Sequence[nn.Module]:
    """Return the modules to which fully_shard assigned a group. Before one of them runs, the
    group's parameters are all-gathered."""
    return group.modules


def is_unsharded(group: ParameterGroup) -> bool:
    """Return whether the parameters of a group are gathered now, so that this device has them in
    full."""
    return group.is_unsharded


def reduces_gradients(group: ParameterGroup) -> bool:
    """Return whether the current backward will reduce-scatter the gradients of a group. False if
    gradients of several micro-batches are accumulated first."""
    return group.reduce_grads


def has_pending_gather(group: ParameterGroup) -> bool:
    """Return whether an all-gather of a group has begun whose result was not used yet."""
    return group._all_gather_result is not None


def wrap_all_gather(group: ParameterGroup, wrap: Callable[[Any], Any]) -> None:
    """Replace the object that all-gathers a group by `wrap(object)`. The new object needs the
    methods `allocate` and `__call__` of the original."""
    group._all_gather_comm = wrap(group._all_gather_comm)


def add_to_gather(
    group: ParameterGroup, begun: Callable[[], None], ending: Callable[[], AbstractContextManager[None]]
) -> None:
    """Make fully_shard call two functions during each all-gather of a group.

    begun   called just after the all-gather has begun
    ending  returns a context manager. Inside it, fully_shard waits for the all-gather to end and
            allocates the gathered parameters
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
    """Make fully_shard call `call` after each backward of a group, before it reduces the group's
    gradients."""
    post_backward = group.post_backward

    def call_and_reduce(*unused: Any) -> None:
        call()
        post_backward(*unused)

    group.post_backward = call_and_reduce  # type: ignore[method-assign]


def keep_reduced_dtype(group: ParameterGroup) -> None:
    """Make fully_shard leave the reduced gradients of a group in the dtype in which it reduces them.
    By default it casts them to the dtype of the parameters."""
    lazy_init = group.lazy_init

    def init() -> None:
        lazy_init()
        group._orig_dtype = None  # the dtype to which the reduced gradients are cast

    group.lazy_init = init  # type: ignore[method-assign]


# records of parameters


def sharded_parameter(record: ParameterRecord) -> nn.Parameter:
    """Return the parameter that the model has while it is sharded: a DTensor."""
    return record.sharded_param


def is_gathered_once(record: ParameterRecord) -> bool:
    """Return whether a parameter was all-gathered at least once. Only then can `gathered_parameter`
    be called."""
    return hasattr(record, "_unsharded_param")


def gathered_parameter(record: ParameterRecord) -> nn.Parameter:
    """Return the full parameter. Its data exists only while its group is gathered."""
    return record.unsharded_param


def has_gradient(record: ParameterRecord) -> bool:
    """Return whether the gathered parameter has a gradient, from this or an earlier micro-batch."""
    return record.unsharded_param.grad is not None or record.unsharded_accumulated_grad is not None


def has_new_gradient(record: ParameterRecord) -> bool:
    """Return whether the gathered parameter has a gradient that is not yet reduced."""
    return record.unsharded_param.grad is not None


def gathered_buffers(record: ParameterRecord) -> Sequence[Tensor]:
    """Return the buffers into which fully_shard all-gathers the shards of a parameter."""
    return record.all_gather_outputs


def padded_shard(record: ParameterRecord) -> Tensor:
    """Return this device's shard as it is sent in the all-gather: flattened, and padded to the size
    of the largest shard of all devices."""
    return record._sharded_param_data


def set_padded_shard(record: ParameterRecord, shard: Tensor) -> None:
    """Replace the tensor that is sent in the all-gather (see `padded_shard`) by `shard`, which must
    have the same size."""
    record._sharded_param_data = shard


def padded_shard_size(record: ParameterRecord) -> torch.Size:
    """Return the shape of this device's padded shard before it is flattened."""
    return record.padded_sharded_param_size


def take_new_shard(record: ParameterRecord) -> None:
    """Make fully_shard use the parameter that the model has now. Call this after a parameter has
    been replaced.

    If the shard is smaller than fully_shard's padded size, this call replaces the parameter's data
    by a padded copy. So take references to the data only after this call.
    """
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
    "keep_reduced_dtype",
    "model_records",
    "modules_of",
    "padded_shard",
    "padded_shard_size",
    "parameter_groups",
    "records",
    "reduces_gradients",
    "set_padded_shard",
    "sharded_parameter",
    "sharding_integers",
    "take_new_shard",
    "wrap_all_gather",
]
