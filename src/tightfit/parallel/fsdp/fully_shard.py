"""Parameters that are unsharded only while their block computes, by torch's fully_shard (FSDP2).

ZeRO-3 (`zero: 3`) and parameter offloading from a GPU use this module. Each block's parameters are
all-gathered from the other devices, or copied from host memory, before its forward and its
backward. Meanwhile the block before it computes. Afterwards they are freed.

Example: a parameter of shape (10, 3) over 4 devices. fully_shard shards along dimension 0 as
torch's `chunk` does, in shards of ceil(10 / 4) = 3 rows:

    rank 0: rows 0, 1, 2    rank 1: rows 3, 4, 5    rank 2: rows 6, 7, 8    rank 3: row 9

An all-gather needs shards of equal size, so rank 3 pads its own to 3 rows. It gathers 12 rows, of
which the last two are ignored. With 5 rows, the shards have 2, 2, 1 and 0 rows.

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
    model_records,
    padded_shard,
    padded_shard_size,
    parameter_groups,
    set_padded_shard,
    sharded_parameter,
    take_new_shard,
)
from tightfit._torch.modules import Conversion, wrap_conversion
from tightfit.distributed.collectives import RowAllGather, RowReduceScatter, uses_row_collectives
from tightfit.distributed.mesh import DATA, Mesh
from tightfit.distributed.processes import local_device
from tightfit.distributed.replicas import ReplicatedBuffers
from tightfit.distributed.sharding import on_mesh_device
from tightfit.errors import InputError
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.block_hooks import run_hooks_on_direct_calls
from tightfit.models.dataflow import describe_line, innermost_model_line
from tightfit.models.objective import Batch
from tightfit.parallel.fsdp.collective_order import CHECKED_BACKWARDS, CollectiveOrder
from tightfit.parallel.fsdp.planning import check_shardable, gather_dtype, model_blocks, split_by_autocast
from tightfit.parallel.fsdp.prefetch import prefetch_blocks
from tightfit.parallel.fsdp.unused_parameters import UsedParameters
from tightfit.plan import Plan
from tightfit.runtime.offload_store import OffloadedGradients, Store
from tightfit.runtime.run import Run, refuse_hooks
from tightfit.target_device import has_own_memory


def _keep_dtype(module: nn.Module) -> None:
    """Make `module.to(dtype)` do nothing while the module's parameters are gathered.

    Some models convert a module in their forward, such as `router.to(torch.float32)`. Autocast
    decides in which dtype a product runs. A converted weight would not be gathered again.
    """

    def unless_gathered(convert: Conversion) -> Conversion:
        def apply(fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
            gathered = any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
            return module if gathered else convert(fn, recurse)

        return apply

    wrap_conversion(module, unless_gathered)


def _modules_of_other_dtype(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules with parameters that are not of the model's most common dtype, such as fp32 norms
    among 16-bit weights. They are gathered apart, because parameters that are gathered together
    must have one dtype.

    Raises InputError when the model itself, or a block itself, has such parameters beside others.
    """
    types = Counter(parameter.dtype for parameter in model.parameters())
    most = types.most_common(1)[0][0]
    found = [m for m in model.modules() if any(p.dtype != most for p in m.parameters(recurse=False))]
    for whole in (model, *blocks):
        if whole in found:
            if len({parameter.dtype for parameter in whole.parameters()}) > 1:
                raise InputError(
                    "plan: zero=3",
                    f"{type(whole).__name__} has parameters of its own that are not {str(most).removeprefix('torch.')}, beside "
                    "others; parameters that are gathered together must have one dtype",
                    "use zero: 2, or put them into a module of their own",
                )
            found.remove(whole)
    return found


def _load_shards(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Replace fully_shard's parameters, which are on the meta device, by the values that were
    sharded when the model was created.

    rows  a parameter's name -> this device's shard
    """
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in rows:
            local = rows[name].view(local_shard(parameter).shape)
            filled[id(parameter)] = nn.Parameter(sharded_like(local, parameter), requires_grad=parameter.requires_grad)
    names = {name: filled[id(p)] for name, p in model.state_dict(keep_vars=True).items() if id(p) in filled}
    model.load_state_dict(names, strict=False, assign=True)
    for held in model_records(model):
        # now, because it may replace the tensors that the optimizer gets next
        take_new_shard(held)


def compute_weights(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that a model computes with: its parameters, and the buffers in which sharded
    parameters are gathered.
    """
    yield from (parameter for parameter in model.parameters() if not isinstance(parameter, DTensor))
    for held in model_records(model):
        yield from gathered_buffers(held)


@torch.no_grad()
def _move_to_store(model: nn.Module, store: Store) -> None:
    """Move this device's shards of all trained parameters to the store."""
    for held in model_records(model):
        parameter: Any = sharded_parameter(held)
        if parameter.requires_grad:
            there, local = store.put(padded_shard(held)), local_shard(parameter)
            set_padded_shard(held, there)
            rows = there.view(padded_shard_size(held)).narrow(0, 0, local.shape[0] if local.numel() else 0)
            set_local_shard(parameter, rows.view(local.shape))
            parameter.stored = True


def apply_fully_shard(run: Run, plan: Plan) -> Run:
    """`run` with its model sharded by fully_shard.

    Raises InputError for a model that fully_shard cannot shard.
    """
    assert run.mesh is not None
    named = find_blocks(run.model, run.job.blocks_name)
    places, parameters = parameter_uses(run.model, named), dict(run.model.named_parameters())
    check_shardable(((name, parameters[name].dim(), used) for name, used in places.items()), len(named), plan)
    refuse_hooks(run.model, "plan: zero=3" if plan.zero == 3 else "plan: offload=parameters")
    store = run.store if "parameters" in plan.offload else None
    shards = FullyShardReduction(
        run.model, model_blocks(run), run.mesh, gather_dtype(plan), store, "gradients" in plan.offload
    )
    loss_sum = _refuse_sharded_use(run.loss_sum, "plan: zero=3" if plan.zero == 3 else "plan: offload=parameters")
    return replace(run, loss_sum=loss_sum, reduction=shards, optimizer_weights=shards.weights)


def _is_running(module: FSDPModule) -> bool:
    """Whether fully_shard has gathered a module's parameters for its forward."""
    return torch.compiler.is_compiling() or is_running(module)


def _refuse_sharded_use(loss_sum: Callable[[Batch], Tensor], asked: str) -> Callable[[Batch], Tensor]:
    """`loss_sum`, which raises InputError when the model uses a layer's sharded parameters without
    calling the layer.
    """

    def computed(batch: Batch) -> Tensor:
        try:
            return loss_sum(batch)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise InputError(
                asked,
                f"{describe_line(innermost_model_line(error))} uses parameters of a layer that is not called there: they are "
                "gathered for its call only",
                "use zero: 2, or call the layer with what is to be computed",
            ) from error

    return computed


def _offload_policy(store: Store | None) -> OffloadPolicy:
    """Where fully_shard keeps the shards of a run with this store."""
    if store is None or store.device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=not store.on_disk)


def _shard_modules(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, gather_dtype: torch.dtype | None, offload: OffloadPolicy
) -> None:
    """Apply fully_shard to each block, and then to the rest of the model.

    gather_dtype  the dtype in which weights of products are gathered; None: their own
    """
    # the warning concerns the logits, which nobody writes to
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
        if others:  # such as norms: parameters that are gathered together must have one dtype
            shard(others, reshard_after_forward=True, mp_policy=policy)
        for module in products:
            _keep_dtype(module)
        halved = replace(policy, param_dtype=gather_dtype, reduce_dtype=torch.float32)
        shard(block, reshard_after_forward=True, mp_policy=halved)
    shard(model, mp_policy=policy)


def _sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Make fully_shard sum gradients instead of averaging them: the step divides by the count of
    targets over all devices. gloo gets collectives that send whole rows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.size("dp_shard") > 1 and uses_row_collectives(mesh.group("dp_shard")):
                module.set_custom_reduce_scatter(RowReduceScatter())  # type: ignore[arg-type]
                module.set_custom_all_gather(RowAllGather())  # type: ignore[arg-type]


def _shards_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """For each trained parameter, this device's shard of it, which the optimizer updates."""
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            shards[parameter] = nn.Parameter(local_shard(parameter).detach())
    return shards


class FullyShardReduction:
    """The `Reduction` of a model that fully_shard shards. fully_shard gathers the parameters and
    reduce-scatters the gradients.

    model        the model; sharded in place
    blocks       its blocks, each of which is gathered on its own
    mesh         the devices: sharded over dp_shard, replicated over dp_replicate (HSDP)
    gather_dtype  the dtype in which weights of products are gathered; None: their own
    store        where this device's shards are stored; None: in the device's memory
    offloads_gradients  whether their gradients are offloaded to the store too
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        mesh: Mesh,
        gather_dtype: torch.dtype | None,
        store: Store | None = None,
        offloads_gradients: bool = False,
    ) -> None:
        self.mesh, self.model, self.device = mesh, model, local_device(mesh.axes["dp_shard"].device_type)
        self.shard_axes: tuple[str, ...] = ("dp_shard",) if mesh.size("dp_shard") > 1 else ()
        rows = {name: p.rows for name, p in model.named_parameters() if hasattr(p, "rows")}
        policy = _offload_policy(store)
        _shard_modules(model, blocks, mesh, gather_dtype, policy)
        _sum_gradients(model, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule) and module is not model:
                run_hooks_on_direct_calls(module, partial(_is_running, module))
        self.statistics = ReplicatedBuffers(model, mesh)
        _load_shards(model, rows)
        # fully_shard itself offloads shards and gradients to page-locked memory
        in_store = store is not None and not (isinstance(policy, CPUOffloadPolicy) and policy.pin_memory)
        if store is not None and in_store:
            _move_to_store(model, store)
        if store is not None and has_own_memory(store.device) and mesh.size("dp_shard") == 1:
            prefetch_blocks(model, blocks, parameter_groups(model), store.device)
        self.weights = _shards_of(model)
        self.owner = {weight: parameter for parameter, weight in self.weights.items()}
        self.collective_order: CollectiveOrder | None = None
        self.used_parameters: UsedParameters | None = None
        if mesh.size("dp_shard") * mesh.size("dp_replicate") > 1:
            checked = None if self.device.type == "cpu" else CHECKED_BACKWARDS
            groups = list(parameter_groups(model))
            self.collective_order = CollectiveOrder(model, groups, mesh.p2p_groups["layers"], checked)
            self.used_parameters = UsedParameters(parameter_groups(model), self.collective_order)
        self.offloaded_gradients: OffloadedGradients | None = None
        if offloads_gradients and store is not None and in_store:
            self.offloaded_gradients = OffloadedGradients(self.weights, store)

    def begin(self, last: bool) -> None:
        """Call before a micro-batch. last: whether it is the step's last one, after which HSDP's
        replicas all-reduce.
        """
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(last)

    def end(self, last: bool) -> None:
        """Call after a micro-batch's backward. After the last one, the gradients are set on the
        optimizer's weights.
        """
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
            for place in self.used_parameters.missing_everywhere(
                [parameter for parameter, _ in weights], total, self.device
            ):
                weights[place][1].grad = None

    def updated(self) -> None:
        """Nothing to do: the next forward gathers the updated shards."""
        pass

    def wait(self) -> None:
        """Nothing to wait for: each block gathers its parameters when it needs them."""
        pass

    def states(self) -> list[Tensor]:
        """No state of its own to save in a checkpoint."""
        return []

    def unshard(self, weight: Tensor, value: Tensor) -> Tensor:
        """The full tensor of `value`, this device's shard of a tensor like `weight`. All devices
        must call it.
        """
        owner: Any = self.owner[weight]  # type: ignore[index]
        return on_mesh_device(sharded_like(value, owner)).full_tensor()

    def shard(self, weight: Tensor, value: Tensor) -> Tensor:
        """This device's shard of `value`, a tensor of the full parameter's shape."""
        size, rank = self.mesh.size("dp_shard"), self.mesh.rank("dp_shard")
        rows = value if value.dim() else value.view(1)
        pieces = list(rows.chunk(size))
        return pieces[rank] if rank < len(pieces) else rows[:0]
