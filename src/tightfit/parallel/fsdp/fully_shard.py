"""Shard a model with torch's fully_shard (FSDP2), which gathers parameters only while their block
computes.

ZeRO-3 (`zero: 3`) and parameter offloading from a GPU use this module. Each block's parameters are
all-gathered from the other devices, or copied from host memory, before its forward and its
backward, while the block before it still computes. After the forward and after the backward they
are freed.

Example: a parameter of shape (10, 3) over 4 devices. fully_shard shards along dimension 0 as
torch's `chunk` does, in shards of ceil(10 / 4) = 3 rows:

    rank 0: rows 0, 1, 2    rank 1: rows 3, 4, 5    rank 2: rows 6, 7, 8    rank 3: row 9

An all-gather needs shards of equal size, so rank 3 pads its shard to 3 rows. The all-gather
returns 12 rows, of which the last two are ignored. If the parameter had 5 rows, the shards would
have 2, 2, 1 and 0 rows.

Source  Zhao et al. 2023, arXiv:2304.11277; Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tightfit._torch.distributed import local_shard, set_local_shard, sharded_like
from tightfit._torch.fsdp import (
    gathered_buffers,
    is_running,
    keep_reduced_dtype,
    model_records,
    padded_shard,
    padded_shard_size,
    parameter_groups,
    set_padded_shard,
    sharded_parameter,
    sharding_integers,
    take_new_shard,
)
from tightfit._torch.modules import Conversion, wrap_conversion
from tightfit.distributed.collectives import RowAllGather, RowReduceScatter, uses_row_collectives
from tightfit.distributed.mesh import DATA, Mesh
from tightfit.distributed.processes import local_device
from tightfit.distributed.replicas import ReplicatedBuffers
from tightfit.distributed.sharding import on_mesh_device, rows_of
from tightfit.errors import InputError
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.block_hooks import run_hooks_on_direct_calls
from tightfit.optim.gradient_dtype import copy_gradient_dtype, widen_gradients
from tightfit.parallel.fsdp.collective_order import CHECKED_BACKWARDS, CollectiveOrder
from tightfit.parallel.fsdp.planning import check_shardable, gather_dtype, model_blocks, split_by_autocast
from tightfit.parallel.fsdp.prefetch import prefetch_blocks
from tightfit.parallel.fsdp.unused_parameters import UsedParameters
from tightfit.plan import Plan
from tightfit.runtime.offload_store import Store, mark_stored
from tightfit.runtime.offloaded_gradients import OffloadedGradients
from tightfit.runtime.run import Run, refuse_hooks
from tightfit.target_device import has_own_memory


def _keep_dtype(module: nn.Module) -> None:
    """Make `module.to(dtype)` do nothing while the module's parameters are gathered.

    Some models convert a module in their forward, for example with `router.to(torch.float32)`. The
    conversion is not needed, because autocast decides in which dtype a matrix product runs. It
    would also do harm: fully_shard would not gather a converted weight again.
    """

    def unless_gathered(convert: Conversion) -> Conversion:
        def apply(fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
            gathered = any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
            return module if gathered else convert(fn, recurse)

        return apply

    wrap_conversion(module, unless_gathered)


def _has_values(parameter: nn.Parameter) -> bool:
    """Return whether a parameter holds real or complex numbers, not the integers of 4-bit layers."""
    return parameter.is_floating_point() or parameter.is_complex()


def _modules_of_other_dtype(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters whose dtype is not the most common dtype of the model,
    such as fp32 norms in a model of 16-bit weights.

    Only parameters that a module has directly count, not those of its child modules. fully_shard
    gathers each of the returned modules separately, because parameters that are gathered together
    must have one dtype. The integers of frozen layers in 4 bits do not count: they are gathered
    together with other parameters.

    blocks  the model's blocks

    Raises InputError if the model itself or a block directly has such a parameter, and also
    contains parameters of another dtype.
    """
    types = Counter(parameter.dtype for parameter in model.parameters() if _has_values(parameter))
    most = types.most_common(1)[0][0]
    found = [
        module
        for module in model.modules()
        if any(_has_values(p) and p.dtype != most for p in module.parameters(recurse=False))
    ]
    for whole in (model, *blocks):
        if whole in found:
            if len({parameter.dtype for parameter in whole.parameters() if _has_values(parameter)}) > 1:
                raise InputError(
                    "plan: zero=3",
                    f"{type(whole).__name__} has both {str(most).removeprefix('torch.')} parameters and parameters of another "
                    "dtype, and parameters that are gathered together must have one dtype",
                    "use zero: 2, or put the parameters of the other dtype into a submodule",
                )
            found.remove(whole)
    return found


def _load_shards(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Give values to the parameters that fully_shard has sharded on the meta device: the shards
    that were made when the model was created.

    rows  parameter name -> this device's shard of the parameter. Empty if the model was created
          with full parameters; then only fully_shard's references to the shards are updated
    """
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in rows:
            local = rows[name].view(local_shard(parameter).shape)
            filled[id(parameter)] = nn.Parameter(sharded_like(local, parameter), requires_grad=parameter.requires_grad)
    names = {name: filled[id(p)] for name, p in model.state_dict(keep_vars=True).items() if id(p) in filled}
    model.load_state_dict(names, strict=False, assign=True)
    for held in model_records(model):
        # before the optimizer is made, because this may replace the tensors that it updates
        take_new_shard(held)


def compute_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a model's forward reads as its weights.

    They are the parameters that are not sharded, and the buffers into which fully_shard all-gathers
    the sharded parameters.
    """
    yield from (parameter for parameter in model.parameters() if not isinstance(parameter, DTensor))
    for held in model_records(model):
        yield from gathered_buffers(held)


@torch.no_grad()
def _move_to_store(model: nn.Module, store: Store) -> None:
    """Move this device's shards of all trainable parameters to `store` (host memory or disk)."""
    for held in model_records(model):
        parameter: Any = sharded_parameter(held)
        if parameter.requires_grad:
            stored, local = store.put(padded_shard(held)), local_shard(parameter)
            set_padded_shard(held, stored)
            rows = stored.view(padded_shard_size(held)).narrow(0, 0, local.shape[0] if local.numel() else 0)
            set_local_shard(parameter, rows.view(local.shape))
            mark_stored(parameter)


def apply_fully_shard(run: Run, plan: Plan) -> Run:
    """Shard the model of `run` with fully_shard, and return the changed run.

    The model is changed in place. The returned run has a `reduction` (see `FullyShardReduction`),
    and its optimizer updates this device's shards.

    Raises InputError if fully_shard cannot shard the model, for example because several blocks
    share a parameter.
    """
    assert run.mesh is not None
    named = find_blocks(run.model, run.job.blocks_name)
    uses, parameters = parameter_uses(run.model, named), dict(run.model.named_parameters())
    check_shardable(((name, parameters[name].dim(), used) for name, used in uses.items()), len(named), plan)
    refuse_hooks(run.model, "plan: zero=3" if plan.zero == 3 else "plan: offload=parameters")
    store = run.store if "parameters" in plan.offload else None
    shards = FullyShardReduction(
        run.model,
        model_blocks(run),
        run.mesh,
        gather_dtype(plan),
        store,
        "gradients" in plan.offload,
        plan.master_weights,
        plan.gradient_sync == "micro-batch",
    )
    return replace(run, reduction=shards, optimizer_weights=shards.weights)


def _is_running(module: FSDPModule) -> bool:
    """Return whether fully_shard has gathered the module's parameters, for the module's forward or
    backward. Also returns True while torch.compile traces.
    """
    return torch.compiler.is_compiling() or is_running(module)


def _offload_policy(store: Store | None) -> OffloadPolicy:
    """Return the policy that tells fully_shard where to keep the shards.

    store  where the run keeps offloaded tensors. None, or the store of a run on CPUs: fully_shard
           does not offload. Otherwise fully_shard keeps the shards in host memory. This memory is
           page-locked, except with a store on disk: then the shards are moved to mapped files
           afterwards
    """
    if store is None or store.device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=not store.on_disk)


def _shard_modules(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, gather_dtype: torch.dtype | None, offload: OffloadPolicy
) -> None:
    """Apply fully_shard to each block, and then to the rest of the model.

    mesh          the devices. Parameters are sharded over dp_shard, and replicated over
                  dp_replicate
    gather_dtype  the dtype in which the weights of matrix products are gathered. None: the dtype in
                  which they are stored
    offload       the policy that tells fully_shard where to keep the shards
    """
    # the warning concerns writes in place to the logits, and no code writes to them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    devices = mesh.axes[DATA if mesh.size("dp_replicate") > 1 else "dp_shard"]
    narrow = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=devices, offload_policy=offload)
    for module in _modules_of_other_dtype(model, blocks):
        shard(module, reshard_after_forward=True, mp_policy=policy)
    for block in blocks:
        products, others = split_by_autocast(block)
        if gather_dtype is None or not products or block in others:
            shard(block, reshard_after_forward=True, mp_policy=policy)
            continue
        if others:  # such as norms: a group of parameters that are gathered together has one dtype
            shard(others, reshard_after_forward=True, mp_policy=policy)
        for module in products:
            _keep_dtype(module)
        halved = replace(policy, param_dtype=gather_dtype, reduce_dtype=torch.float32)
        shard(block, reshard_after_forward=True, mp_policy=halved)
    shard(model, mp_policy=policy)


def _sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Make fully_shard sum gradients over the devices instead of averaging them.

    The sum is right, because the step divides the loss by the number of targets on all devices. On
    gloo, this function also replaces fully_shard's collectives by those of
    `distributed/collectives.py`, which send fewer bytes.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.size("dp_shard") > 1 and uses_row_collectives(mesh.group("dp_shard")):
                module.set_custom_reduce_scatter(RowReduceScatter())  # type: ignore[arg-type]
                module.set_custom_all_gather(RowAllGather())  # type: ignore[arg-type]


def _shards_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return trainable parameter -> this device's shard of it. The optimizer updates the shard, a
    plain nn.Parameter that shares memory with the DTensor.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            shards[parameter] = nn.Parameter(local_shard(parameter).detach())
            copy_gradient_dtype(shards[parameter], parameter)
    return shards


class FullyShardReduction:
    """The `Reduction` of a run whose model fully_shard shards. fully_shard gathers the parameters
    and reduce-scatters the gradients; this class sets it up and gives the optimizer its shards.

    model               the model, which is sharded in place
    blocks              the model's blocks. Each block is gathered on its own
    mesh                the devices. Parameters are sharded over dp_shard and replicated over
                        dp_replicate (HSDP)
    gather_dtype        the dtype in which the weights of matrix products are gathered. None: the
                        dtype in which they are stored
    store               where this device's shards are kept: host memory or disk. None: in the
                        device's memory
    offloads_gradients  whether the gradients of the shards are offloaded to the store, too
    wide_gradients      whether the gradients of shards of 16-bit parameters are kept in fp32, in
                        which they are reduced
    every_micro_batch   whether gradients are reduced in each micro-batch. False: full gradients
                        accumulate, and are reduced in a step's last micro-batch
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        mesh: Mesh,
        gather_dtype: torch.dtype | None,
        store: Store | None = None,
        offloads_gradients: bool = False,
        wide_gradients: bool = False,
        every_micro_batch: bool = True,
    ) -> None:
        self.every_micro_batch = every_micro_batch
        self.mesh, self.model, self.device = mesh, model, local_device(mesh.axes["dp_shard"].device_type)
        self.shard_axes: tuple[str, ...] = ("dp_shard",) if mesh.size("dp_shard") > 1 else ()
        rows = {name: rows for name, p in model.named_parameters() if (rows := rows_of(p)) is not None}
        policy = _offload_policy(store)
        with sharding_integers():
            _shard_modules(model, blocks, mesh, gather_dtype, policy)
        _sum_gradients(model, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule) and module is not model:
                run_hooks_on_direct_calls(module, partial(_is_running, module))
        self.statistics = ReplicatedBuffers(model, mesh)
        _load_shards(model, rows)
        # if the host memory is page-locked, fully_shard itself offloads shards and gradients
        in_store = store is not None and not (isinstance(policy, CPUOffloadPolicy) and policy.pin_memory)
        if store is not None and in_store:
            _move_to_store(model, store)
        if store is not None and has_own_memory(store.device) and mesh.size("dp_shard") == 1:
            prefetch_blocks(model, blocks, parameter_groups(model), store.device)
        if wide_gradients:
            widen_gradients(model.parameters())
            for group in parameter_groups(model):
                keep_reduced_dtype(group)
        self.weights = _shards_of(model)
        self.owner = {weight: parameter for parameter, weight in self.weights.items()}
        self.collective_order: CollectiveOrder | None = None
        self.used_parameters: UsedParameters | None = None
        if mesh.size("dp_shard") * mesh.size("dp_replicate") > 1:
            checked = None if self.device.type == "cpu" else CHECKED_BACKWARDS
            groups = list(parameter_groups(model))
            self.collective_order = CollectiveOrder(model, groups, mesh.other_groups["layers"], checked)
            self.used_parameters = UsedParameters(parameter_groups(model), self.collective_order)
        self.offloaded_gradients: OffloadedGradients | None = None
        if offloads_gradients and store is not None and in_store:
            self.offloaded_gradients = OffloadedGradients(self.weights, store)

    def begin(self, last: bool) -> None:
        """Prepare for a micro-batch. Call this before its forward.

        last  whether this is the step's last micro-batch. Only after the last one do the replicas
              (HSDP) all-reduce their gradients; without `every_micro_batch`, gradients are also
              reduce-scattered only then
        """
        assert isinstance(self.model, FSDPModule)
        if not self.every_micro_batch:
            self.model.set_requires_gradient_sync(last)
        self.model.set_requires_all_reduce(last)

    def end(self, last: bool) -> None:
        """Finish a micro-batch. Call this after its backward.

        last  whether this is the step's last micro-batch. If so, this sets the gradients of the
              shards that the optimizer updates

        Raises InputError if the devices have called different layers (see `CollectiveOrder`), or if a
        gradient was completed after it had been reduced.
        """
        if self.used_parameters is not None:
            self.used_parameters.refuse_unreduced()
        if self.collective_order is not None:
            self.collective_order.end_backward(last)
        if not last:
            return
        self.statistics.average()
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.end()
        else:
            for parameter, weight in self.weights.items():
                gradient: Any = parameter.grad
                weight.grad = None if gradient is None else local_shard(gradient)
                parameter.grad = None
        if self.used_parameters is not None:
            weights = list(self.weights.items())
            total = partial(self.mesh.all_reduce, axes=DATA)
            for index in self.used_parameters.missing_everywhere(
                [parameter for parameter, _ in weights], total, self.device
            ):
                weights[index][1].grad = None

    def updated(self) -> None:
        """Do nothing after an update: the next forward gathers the updated shards."""
        pass

    def forget(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def wait(self) -> None:
        """Do nothing. Each block gathers its parameters when it is called, so there is no gather to
        wait for.
        """
        pass

    def states(self) -> list[Tensor]:
        """Return an empty list: this reduction has no state that a checkpoint must save."""
        return []

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor:
        """All-gather a sharded tensor and return the full tensor. All devices must call this.

        weight  this device's shard of a parameter, as the optimizer updates it
        value   this device's shard of a tensor with the parameter's shape, such as an optimizer
                state of `weight`
        """
        owner: Any = self.owner[weight]  # type: ignore[index]
        return on_mesh_device(sharded_like(value, owner)).full_tensor()

    def shard(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return this device's shard of `value`. All devices have the same `value`.

        weight  this device's shard of the parameter; it is not used
        value   a tensor with the full shape of the parameter
        """
        size, rank = self.mesh.size("dp_shard"), self.mesh.rank("dp_shard")
        rows = value if value.dim() else value.view(1)
        pieces = list(rows.chunk(size))
        return pieces[rank] if rank < len(pieces) else rows[:0]
