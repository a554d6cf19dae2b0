"""Creates the model directly on the device where it is trained, in the type in which its weights
are stored. This avoids a full fp32 copy of the model in host memory.

Saves   the fp32 copy that the usual way creates in host memory, and again on the device before it
        is cast.
Costs   nothing during training; creation copies each parameter one or two more times.
When    the fp32 model does not fit where the trained one does, or host memory is short.
Order   first after the allocator: every other method edits this model's modules.
Source  like torchdistX's deferred_init, without its recording: initialisers run unchanged, one
        parameter at a time.

Both ways create the same model: the same names, types and ties, and the fp32 values rounded once.
One case differs. A parameter that is read and written again after other parameters were initialised
(for example, by a second pass that scales all of them) starts from its rounded value in the device
way. Initialisers that only write, such as those of torch and transformers, give identical values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tightfit._torch.modules import RunningNorm, own_buffers
from tightfit._torch.patches import after_deepcopy
from tightfit._torch.tensors import storage_use_count
from tightfit.cost.ledger import Ledger
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.sharding import move_shards_to_meta, shard_parameter, unshard_parameter
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.caches import isolated_model_caches
from tightfit.models.create import model_factory
from tightfit.parallel.fsdp.planning import uses_fully_shard
from tightfit.parallel.pipeline.boundaries import MAX_REPLICATED_SHARE
from tightfit.parallel.pipeline.stages import stage_ranges, stages_using
from tightfit.plan import Plan
from tightfit.runtime.method import Default
from tightfit.runtime.run import Run, refuse_hooks
from tightfit.target_device import kind_of

# host memory for staged parameters other than the largest: biases and norms stay with their weight
SLACK_BYTES = 2**20
# types that may be cast; a 64-bit tensor was widened for a reason
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
FIELDS = ("materialize",)
VARIANTS = ({"materialize": "device"},)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The memory that creating the model takes, on the device and on the host.

    materialize=device: the weights in their final type; on a CPU also one of them in fp32.
    materialize=host: all weights in fp32, which are moved and then cast one by one.
    """
    stored = [parameter.bytes for parameter in ledger.parameters]
    single = [max(4 * parameter.count, parameter.bytes) for parameter in ledger.parameters]  # in fp32
    cast = [(size, whole) for size, whole in zip(stored, single, strict=True) if size < whole]
    on_gpu = machine.device == "cuda"
    if plan.materialize == "device":
        # on a CPU, a parameter that is cast exists twice
        on_device = _kept_bytes(ledger, plan) + (0 if on_gpu else max((whole for _, whole in cast), default=0))
        on_host = float(max(single, default=0) + SLACK_BYTES) if on_gpu else 0.0
    else:
        on_device = sum(single) + max((size for size, _ in cast), default=0)
        on_host = float(sum(single)) if on_gpu else 0.0
    if on_gpu and "parameters" in plan.offload:
        on_device = 0
    return replace(
        ledger,
        phases={**ledger.phases, "materialize": float(on_device)},
        passing={**ledger.passing, "materialize": on_host},
    )


def _kept_bytes(ledger: Ledger, plan: Plan) -> int:
    """Bytes of the parameters that a device keeps when it creates the model itself."""
    if "parameters" in plan.offload:  # they stay in the store
        return 0
    sizes = [parameter.bytes for parameter in ledger.parameters]
    kept = sum(sizes)
    if plan.zero == 3:  # its shards, and one full parameter
        kept = math.ceil(kept / plan.shards) + max(sizes, default=0)
    if plan.pp > 1:
        stages = stage_ranges(plan, ledger.blocks)
        own = [
            parameter.bytes
            for parameter in ledger.parameters
            if any(stage % plan.pp == ledger.device for stage in stages_using(parameter.places, stages))
        ]
        kept = math.ceil(kept * sum(own) / max(sum(sizes), 1))
    return kept


def enabled(plan: Plan) -> bool:
    return True


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Create the model on the device."""
    yield Default("materialize", "device", "the model is created where and as it is used")


def apply(run: Run, plan: Plan) -> Run:
    """Create the job's model as the plan says and put it into the run."""
    offloads = "parameters" in plan.offload
    # offloaded parameters are sharded or copied to the device from the CPU
    device = torch.device("cpu") if offloads else run.device
    if plan.materialize == "device":
        divided = run.mesh if plan.zero == 3 else None
        mapped = offloads and not uses_fully_shard(plan, kind_of(run.device))
        put = run.store.put if mapped and run.store is not None else None
        own = own_parameters(run, plan)
        model = create_on_device(run.job.model, device, weights_dtype(plan), divided, own, put)
    else:
        model = create_on_host(run.job.model, device, weights_dtype(plan))
    return replace(run, model=model, loss_sum=functools.partial(run.objective.total, model))


def own_parameters(run: Run, plan: Plan) -> frozenset[int] | None:
    """The parameters that this pipeline rank keeps, numbered in the order of creation; None for all
    of them.

    They are found on a copy of the model without values (on the meta device). Raises InputError for
    a model that cannot be created so.
    """
    if plan.pp == 1 or run.mesh is None:
        return None
    created: list[nn.Parameter] = []

    def see(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in known:
            known.add(id(parameter))
            created.append(parameter)

    known: set[int] = set()
    hook = registration.register_module_parameter_registration_hook(see)
    try:
        with isolated_model_caches(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = model_factory(run.job.model)()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise InputError(
            "plan: materialize=device with pp",
            f"this model cannot be created on the meta device, to find each device's parameters ({error})",
            "use materialize: host, which creates the full model first and prunes it then",
        ) from error
    finally:
        hook.remove()
    blocks = find_blocks(model, run.job.blocks_name)
    pieces, parameters = stage_ranges(plan, len(blocks)), dict(model.named_parameters())
    small = MAX_REPLICATED_SHARE * sum(parameter.numel() for parameter in parameters.values())
    # small parameters outside the blocks may be used on another stage: known once the model exists
    own = {
        id(parameters[name])
        for name, places in parameter_uses(model, blocks).items()
        if any(piece % plan.pp == run.mesh.rank("pp") for piece in stages_using(places, pieces))
        or (parameters[name].numel() <= small and not any(0 <= place < len(blocks) for place in places))
    }
    return frozenset(number for number, parameter in enumerate(created) if id(parameter) in own)


def weights_dtype(plan: Plan) -> torch.dtype:
    """The type in which weights are stored. The -mixed precisions store them in fp32."""
    return {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}.get(plan.precision, torch.float32)


def storage_dtype(module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type in which a parameter or buffer of `module` is stored, in a model whose weights are
    `dtype`.

    Only floating-point tensors of up to 32 bits are cast. Two kinds stay in fp32, because 16 bits
    would lose their purpose: the frequencies of rotary embeddings, which are multiplied by
    positions; and normalisations with running statistics, whose small updates would be rounded
    away. These normalisations keep their weight and bias in fp32 too: torch's batch_norm takes
    16-bit inputs with either everything else in 16 bits or everything else in fp32.
    """
    if tensor.dtype not in CASTABLE:
        return tensor.dtype
    if name.endswith("inv_freq"):
        return torch.float32
    if isinstance(module, RunningNorm) and module.track_running_stats:
        return torch.float32
    return dtype


def create_on_host(model: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The usual way: create the whole model on the CPU in fp32, move it to `device`, then cast it.

    model: a ModelSpec or a callable that returns the model. Raises InputError for lazy modules.
    """
    return _finished(model_factory(model)(), device, dtype)


def create_on_device(
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    owned: frozenset[int] | None = None,
    store_values: Callable[[Tensor], Tensor] | None = None,
) -> nn.Module:
    """Create the model on `device` in `dtype`. Host memory holds about one fp32 parameter at any
    time.

    model         a ModelSpec or a callable that returns the model
    mesh          the mesh over which each parameter is sharded, as in ZeRO stage 3: only this
                  device's shard is kept, so no device ever holds the full model (None: no sharding)
    owned         the parameters whose values are kept, numbered in the order of creation; the
                  others keep only their shape (None: all)
    store_values  a function that moves values into another memory and returns them there (None:
                  they stay on the device)

    Under torch.device("meta"), tensors stay on the meta device and are only cast. The same holds
    under FakeTensorMode, except where torch itself mixes modes (a deepcopy in the constructor).
    Raises InputError for lazy modules, and for hooked modules where the parameters are sharded.
    """
    factory = model_factory(model, sequential=True)
    with _Staging(device, dtype, mesh, owned, store_values):
        created = factory()
    if mesh is not None:
        refuse_hooks(created, "plan: zero=3")
        move_shards_to_meta(created)
    return _finished(created, device, dtype)


def _finished(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move and cast the tensors that are not yet on `device` in their final type. Ties between
    parameters stay.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise InputError(
            "job: model",
            "has lazy modules, whose shapes are not known yet",
            "call the model once on a small batch before returning it",
        )
    if any(tensor.device != device and not tensor.is_meta for tensor in tensors):
        model.to(device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != (kept := storage_dtype(module, name, parameter, dtype)):
                parameter.data = parameter.data.to(kept)
        for name, buffer in module.named_buffers(recurse=False):
            own_buffers(module)[name] = buffer.to(storage_dtype(module, name, buffer, dtype))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model


# functions that read only a parameter's shape and flags, which do not depend on its device
_SHAPE_ONLY = frozenset(
    (
        *(
            getattr(Tensor, name)
            for name in ("size", "dim", "numel", "nelement", "requires_grad_", "__len__", "__hash__")
        ),
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "requires_grad", "grad", "is_leaf", "is_meta")),
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    )
)


class _Staging(TorchFunctionMode):
    """While a model is created, keeps a parameter in host memory, as its constructor made it, only
    while an initialiser works on it.

    A parameter is tracked from its registration on. When the initialisers go on to other parameters
    it is placed: its data is replaced by a copy on the device in its final type. When an operation
    uses it again it is staged: its data is copied back to its original device and type. So every
    initialiser runs unchanged and draws the same random numbers. A parameter whose storage is also
    referenced elsewhere (a view, `weight.data` in a variable) is placed only when that reference is
    gone.

    Example: a model of 100 matrices of 40 MB in fp32, created for bf16 on a GPU. While matrix 7 is
    initialised, matrices 1 to 6 are on the GPU with 20 MB each, and host memory holds only matrix
    7.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        divided: Mesh | None = None,
        own: frozenset[int] | None = None,
        put: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.own, self.count = own, 0
        self.put = put
        self.stored = WeakIdKeyDictionary()  # parameter -> its stored values
        self.foreign: set[int] = set()
        self.device, self.dtype, self.divided = device, dtype, divided
        self.kept = WeakIdKeyDictionary()  # parameter -> its final dtype
        # placed parameter -> the device and dtype it was created in
        self.placed = WeakIdKeyDictionary()
        # by id, as tensors compare by value; the most recently used is last
        self.staged: dict[int, nn.Parameter] = {}

    def __enter__(self) -> Self:
        self.hook = registration.register_module_parameter_registration_hook(self._on_register)
        self.deepcopies = after_deepcopy(self._track_copy)
        self.deepcopies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.deepcopies.__exit__(None, None, None)
        self.hook.remove()
        for parameter in list(self.staged.values()):
            self._place(parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SHAPE_ONLY:
            touched = {
                id(item): item for item in _flat((args, kwargs)) if isinstance(item, nn.Parameter) and item in self.kept
            }
            for parameter in touched.values():
                self._stage(parameter)
            self._place_idle(touched)
        return func(*args, **(kwargs or {}))

    def _on_register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Called by torch when `module` registers `parameter` under `name`."""
        if parameter not in self.kept and not parameter.is_meta and not nn.parameter.is_lazy(parameter):
            if self.own is not None and self.count not in self.own:
                self.foreign.add(id(parameter))
            self.count += 1
            self._keep(parameter, storage_dtype(module, name, parameter, self.dtype))

    def _track_copy(self, parameter: nn.Parameter, copy: nn.Parameter) -> None:
        """Track a copy of a tracked parameter too: a copy is registered nowhere."""
        if parameter in self.kept and copy not in self.kept:
            self._keep(copy, self.kept[parameter])

    def _keep(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        elsewhere = parameter.device != self.device or parameter.dtype != dtype
        if elsewhere or self.divided is not None or self.own is not None or self.put is not None:
            self.kept[parameter] = dtype
            self.staged[id(parameter)] = parameter

    def _stage(self, parameter: nn.Parameter) -> None:
        if parameter in self.placed:
            device, dtype = self.placed.pop(parameter)
            # another rank's: its random numbers are drawn, its values are dropped
            if id(parameter) in self.foreign:
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
                self.staged[id(parameter)] = parameter
                return
            whole = parameter.data if self.divided is None else unshard_parameter(parameter, self.divided)
            parameter.data = whole.to(device, dtype)
        self.staged.pop(id(parameter), None)
        self.staged[id(parameter)] = parameter

    def _place(self, parameter: nn.Parameter) -> None:
        del self.staged[id(parameter)]
        self.placed[parameter] = parameter.device, parameter.dtype
        # a parameter of another type was widened after its registration
        dtype = self.kept[parameter] if parameter.dtype in CASTABLE else parameter.dtype
        if id(parameter) in self.foreign:
            nothing = torch.zeros((), dtype=dtype, device=self.device)
            parameter.data = nothing.expand(parameter.shape)
            return
        values = parameter.data.to(self.device, dtype)
        if self.put is not None:
            there = self.stored.get(parameter)
            self.stored[parameter] = self.put(values) if there is None else there.copy_(values)
            parameter.data = self.stored[parameter]
            parameter.stored = True  # type: ignore[attr-defined]
        elif self.divided is None:
            parameter.data = values
        else:
            shard_parameter(parameter, self.divided, values)

    def _place_idle(self, touched: dict[int, nn.Parameter]) -> None:
        """Place the least recently used parameters until those staged, except the largest, take at
        most SLACK_BYTES.
        """
        sizes = {key: parameter.nbytes for key, parameter in self.staged.items()}
        for key, parameter in list(self.staged.items()):
            if sum(sizes.values()) - max(sizes.values()) <= SLACK_BYTES:
                break
            if key not in touched and not _is_shared(parameter):
                self._place(parameter)
                del sizes[key]


def _is_shared(parameter: nn.Parameter) -> bool:
    """Whether another tensor uses the parameter's storage. Two references always exist: the
    parameter, and this call's.
    """
    return storage_use_count(parameter) > 2


def _flat(arguments: Any) -> Iterator[Any]:
    """All items in nested lists, tuples and dicts."""
    if isinstance(arguments, list | tuple):
        for item in arguments:
            yield from _flat(item)
    elif isinstance(arguments, dict):
        yield from _flat(list(arguments.values()))
    else:
        yield arguments
