"""Creates the model directly on the device where it is trained, in the type in which its weights
are stored. This avoids a full fp32 copy of the model in host memory.

Saves   two copies of the model in fp32, which exist with `host`: one in host memory, and one on the
        device before it is cast.
Costs   nothing during training; creation copies each parameter once or twice more.
When    the fp32 model does not fit the device's memory, although the 16-bit weights do; or host
        memory is short.
Order   first after the allocator: every other method edits this model's modules.
Source  like torchdistX's deferred_init, but nothing is recorded: initialisers run unchanged, one
        parameter at a time.

`device` and `host` create the same model: the same names, types and ties, and the same fp32 values,
rounded once. There is one exception: a parameter that is modified again after other parameters were
initialised (for example, by a second pass that scales all parameters). With `device`, the second
pass reads the rounded value. Initialisers that only write, such as those of torch and transformers,
give identical values.
"""

from __future__ import annotations

import functools
import gc
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
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.caches import isolated_model_caches
from tightfit.models.create import model_factory
from tightfit.models.lora import quantizes
from tightfit.models.nf4 import Nf4Linear, element_count, is_quantized_part, quantizing_bytes
from tightfit.parallel.fsdp.planning import uses_fully_shard
from tightfit.parallel.pipeline.boundaries import MAX_REPLICATED_SHARE
from tightfit.parallel.pipeline.stages import stage_ranges, stages_using
from tightfit.plan import Plan
from tightfit.runtime.method import Default
from tightfit.runtime.offload_store import mark_stored
from tightfit.runtime.run import Run, refuse_hooks
from tightfit.target_device import kind_of

# bytes of host memory for staged parameters besides the largest one, such as biases and norms
SLACK_BYTES = 2**20
# types that may be cast; 64-bit tensors keep their type, because the model's author chose it
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
FIELDS = ("materialize",)
VARIANTS = ({"materialize": "device"},)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the peak memory of creating
    the model, on the device and on the host.

    materialize=device: the device holds the weights in their final type. In addition, one parameter
    at a time is in fp32, in host memory.
    materialize=host: all weights are created in fp32 on the host, moved to the device, and cast
    there one by one. The frozen layers of QLoRA are quantized on the host, before the model moves.
    """
    stored = [parameter.bytes for parameter in ledger.parameters]
    single = [  # in fp32; layers in 4 bits are moved and stored as they are
        parameter.bytes if is_quantized_part(parameter.name) else max(4 * parameter.count, parameter.bytes)
        for parameter in ledger.parameters
    ]
    cast = [(size, whole) for size, whole in zip(stored, single, strict=True) if size < whole]
    on_gpu = machine.device == "cuda"
    if plan.materialize == "device":
        # on a CPU, a parameter that is cast exists twice
        on_device = _kept_bytes(ledger, plan) + (0 if on_gpu else max((whole for _, whole in cast), default=0))
        on_host = float(max(single, default=0) + SLACK_BYTES) if on_gpu else 0.0
    else:
        on_device = sum(single) + max((size for size, _ in cast), default=0)
        quantizing = _bytes_before_quantizing(ledger, single)
        if not on_gpu:
            on_device = max(on_device, quantizing)
        on_host = float(max(sum(single), quantizing)) if on_gpu else 0.0
    if on_gpu and "parameters" in plan.offload:
        on_device = 0
    return replace(
        ledger,
        phases={**ledger.phases, "materialize": float(on_device)},
        transient_host_bytes={**ledger.transient_host_bytes, "materialize": on_host},
    )


def _bytes_before_quantizing(ledger: Ledger, single: list[int]) -> int:
    """Return the peak bytes of the model while its first layer is quantized to 4 bits, when all other
    weights are still in fp32; 0 for a model without such layers.

    single  the bytes of each parameter in fp32, and those of each part of a layer in 4 bits
    """
    found = [
        (parameter, size, element_count(parameter.name, parameter.shape))
        for parameter, size in zip(ledger.parameters, single, strict=True)
    ]
    weights = [count for one, _, count in found if is_quantized_part(one.name)]
    if not weights:
        return 0
    others = sum(size for one, size, _ in found if not is_quantized_part(one.name))
    return others + 4 * sum(weights) + quantizing_bytes(max(weights))


def _kept_bytes(ledger: Ledger, plan: Plan) -> int:
    """Return the peak bytes of parameters on the device while the model is created with
    materialize=device. Only the parameters that this device keeps count: its shards with ZeRO-3,
    those of its stages in a pipeline. They have their final type.
    """
    if "parameters" in plan.offload:  # parameters are in the store
        return 0
    sizes = [parameter.bytes for parameter in ledger.parameters]
    kept = sum(sizes)
    if plan.zero == 3:  # this device's shards, and one full parameter
        kept = math.ceil(kept / plan.shards) + max(sizes, default=0)
    if plan.pp > 1:
        stages = stage_ranges(plan, ledger.blocks)
        own_uses = {
            block_numbers
            for block_numbers in {parameter.used_by_blocks for parameter in ledger.parameters}
            if any(stage % plan.pp == ledger.pipeline_rank for stage in stages_using(block_numbers, stages))
        }
        own = [parameter.bytes for parameter in ledger.parameters if parameter.used_by_blocks in own_uses]
        kept = math.ceil(kept * sum(own) / max(sum(sizes), 1))
    return kept


def enabled(plan: Plan) -> bool:
    return True


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Yield the default materialize=device: the model is created directly on its device. A model
    whose layers are quantized on the host has no such default.
    """
    if quantizes(job.model):
        return
    yield Default("materialize", "device", "the model is created on its device, in its final type")


def apply(run: Run, plan: Plan) -> Run:
    """Create the job's model as the plan's `materialize` says, and return the run with this
    model."""
    offloads = "parameters" in plan.offload
    # offloaded parameters are sharded or copied to the device from the CPU
    device = torch.device("cpu") if offloads else run.device
    if plan.materialize == "device":
        divided = run.mesh if plan.zero == 3 else None
        mapped = offloads and not uses_fully_shard(plan, kind_of(run.device))
        put = run.store.put if mapped and run.store is not None else None
        own = own_parameters(run, plan)
        model = create_on_device(run.job.model, device, weights_dtype(plan), divided, own, put)
        if own is not None:
            _check_values(run, plan, model)
    else:
        model = create_on_host(run.job.model, device, weights_dtype(plan))
    return replace(run, model=model, loss_sum=functools.partial(run.objective.total, model))


def _check_values(run: Run, plan: Plan, model: nn.Module) -> None:
    """Raise TightfitError if a block of this pipeline rank has a parameter without values of its own,
    which would mean that parameters were numbered wrongly."""
    assert run.mesh is not None
    blocks = find_blocks(model, run.job.blocks_name)
    for piece, numbers in enumerate(stage_ranges(plan, len(blocks))):
        for path, block in [blocks[number] for number in numbers] if piece % plan.pp == run.mesh.rank("pp") else []:
            for name, parameter in block.named_parameters():
                if parameter.numel() > 1 and not any(parameter.stride()):
                    raise TightfitError(
                        f"materialize: device left {path}.{name} without values on pipeline rank {run.mesh.rank('pp')}\n"
                        "  fix: use materialize: host, and please report this model"
                    )


def own_parameters(run: Run, plan: Plan) -> frozenset[int] | None:
    """Return the numbers of the parameters that this pipeline rank keeps, or None without a
    pipeline, where every rank keeps all parameters. Parameters are numbered from 0 in the order of
    their creation.

    To find these numbers, the model is created on the meta device, without values. Raises
    InputError if that is not possible.
    """
    if plan.pp == 1 or run.mesh is None:
        return None
    created: list[nn.Parameter] = []

    def see(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in known:
            known.add(id(parameter))
            created.append(parameter)

    known: set[int] = set()
    factory = model_factory(run.job.model)  # which may create models to compare their sizes
    hook = registration.register_module_parameter_registration_hook(see)
    try:
        with isolated_model_caches(on_meta=True), torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = factory()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise InputError(
            "plan: materialize=device with pp",
            "this model cannot be created on the meta device, which is needed to find each "
            f"device's parameters ({error})",
            "use materialize: host, which creates the full model and then prunes it",
        ) from error
    finally:
        hook.remove()
    blocks = find_blocks(model, run.job.blocks_name)
    pieces, parameters = stage_ranges(plan, len(blocks)), dict(model.named_parameters())
    small = MAX_REPLICATED_SHARE * sum(parameter.numel() for parameter in parameters.values())
    # Every rank keeps small parameters outside the blocks: which stages use them is known only
    # after the model exists.
    own = {
        id(parameters[name])
        for name, block_numbers in parameter_uses(model, blocks).items()
        if any(piece % plan.pp == run.mesh.rank("pp") for piece in stages_using(block_numbers, pieces))
        or (parameters[name].numel() <= small and not any(0 <= block < len(blocks) for block in block_numbers))
    }
    return frozenset(number for number, parameter in enumerate(created) if id(parameter) in own)


def weights_dtype(plan: Plan) -> torch.dtype:
    """Return the type in which weights are stored: 16 bits for the -true precisions, else fp32."""
    return {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}.get(plan.precision, torch.float32)


def storage_dtype(module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which `tensor`, a parameter or buffer with this name in `module`, is
    stored if the plan stores weights in `dtype`.

    Only floating-point tensors of up to 32 bits are cast to `dtype`. Three kinds are stored in fp32,
    because 16 bits are not precise enough:

    - the factors of layers in 4 bits, from which weights are computed
    - the frequencies of rotary embeddings (inv_freq), which are multiplied by positions
    - running statistics of normalisations such as BatchNorm, whose small updates would be rounded
      away. The weight and bias of such a normalisation are in fp32, too, because torch's batch_norm
      requires its weight, bias and statistics to have the same type
    """
    if tensor.dtype not in CASTABLE or (isinstance(module, Nf4Linear) and name != "bias"):
        return tensor.dtype
    if name.endswith("inv_freq"):
        return torch.float32
    if isinstance(module, RunningNorm) and module.track_running_stats:
        return torch.float32
    return dtype


def create_on_host(model: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Create the full model on the CPU in fp32, move it to `device`, then cast it to `dtype`, and
    return it.

    model  a ModelSpec (the job's description of a model) or a callable that returns the model

    Raises InputError if the model has lazy modules, whose shapes are not known yet.
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
    """Create the model on `device` in `dtype`, and return it. Host memory holds about one fp32
    parameter at any time.

    model         a ModelSpec (the job's description of a model) or a callable that returns the
                  model
    mesh          the mesh over which each parameter is sharded, as in ZeRO-3: this device keeps
                  only its own shards, so no device ever holds the full model. None: no sharding
    owned         numbers of the parameters whose values are kept, counted from 0 in the order of
                  their creation. All other parameters keep only their shape. None: all values are
                  kept
    store_values  a function that moves a parameter's values to other memory, such as a mapped file,
                  and returns them as a tensor in that memory. None: values stay on the device

    Under torch.device("meta"), tensors stay on the meta device and are only cast. Under
    FakeTensorMode, they stay fake and are only cast, unless the model's constructor calls deepcopy.

    Raises InputError if the model has lazy modules, if parameters are sharded and one of them has a
    hook on its gradient, or if parameters are sharded or left out and the model holds some that are
    not registered.
    """
    factory = model_factory(model, sequential=True)
    with _Staging(device, dtype, mesh, owned, store_values) as staging:
        created = factory()
    if mesh is not None or owned is not None:
        _refuse_unregistered(created, staging)
    if mesh is not None:
        refuse_hooks(created, "plan: zero=3")
        move_shards_to_meta(created)
    return _finished(created, device, dtype)


def _refuse_unregistered(model: nn.Module, staging: _Staging) -> None:
    """Raise InputError if parameters of modules that `model` does not register are still alive, such
    as those of modules in a Python list. They were sharded or left out like the others, and nothing
    would ever gather them."""
    registered = {id(parameter) for parameter in model.parameters()}

    def others() -> list[nn.Parameter]:
        return [parameter for parameter in staging.kept if id(parameter) not in registered]

    if others() and gc.collect() >= 0 and (found := others()):
        raise InputError(
            "plan: materialize=device",
            f"the model holds modules that it does not register, such as in a Python list, with {len(found)} parameters (one "
            f"of shape {list(found[0].shape)})",
            "put them into an nn.ModuleList, or use materialize: host",
        )


def _finished(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move all tensors of the model to `device`, cast them to their final type (see
    `storage_dtype`), and return the model. Tied parameters stay tied. Raises InputError if the
    model has lazy modules.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise InputError(
            "job: model",
            "the model has lazy modules, whose shapes are not known yet",
            "call the model on a small batch before its function returns it",
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


# functions that read only a parameter's shape and flags, which are the same on all devices
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
    """A context in which a model is created on `device`: each parameter is in host memory, in fp32,
    only while an initialiser uses it.

    A parameter is tracked from its registration on, and is in one of two states:

    - staged: its data is on the device and in the type of its creation (mostly the CPU and fp32).
      It is staged when it is created, and again when an operation uses it.
    - placed: its data is on `device` in its final type. It is placed when initialisers go on to
      other parameters.

    So every initialiser runs unchanged and draws the same random numbers. A parameter whose storage
    has another reference (a view, or `weight.data` in a variable) is placed only after this
    reference is deleted.

    Example: a model of 100 matrices of 40 MB in fp32, created for bf16 on a GPU. While matrix 7 is
    initialised, matrices 1 to 6 are on the GPU with 20 MB each, and host memory holds only matrix
    7.

    divided  the mesh over which each parameter is sharded, as in ZeRO-3; None: no sharding
    own      numbers of the parameters whose values are kept, counted from 0 in the order of their
             creation. All other parameters keep only their shape. None: all values are kept
    put      a function that moves a parameter's values to other memory, such as a mapped file, and
             returns them as a tensor in that memory. None: values stay on `device`
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
        # transformers creates a pretrained model without values first. It then replaces each parameter by
        # one with values, in the order of the files. So these dictionaries have the numbers of parameters
        # without values: by their module and name, and by the parameter
        self.numbers = WeakIdKeyDictionary()
        self.empty = WeakIdKeyDictionary()
        self.put = put
        self.stored = WeakIdKeyDictionary()  # parameter -> its values in the store
        self.foreign: set[int] = set()
        self.device, self.dtype, self.divided = device, dtype, divided
        self.kept = WeakIdKeyDictionary()  # parameter -> its final dtype
        # placed parameter -> the device and dtype of its creation
        self.placed = WeakIdKeyDictionary()
        # id -> staged parameter, the most recently used last; ids, because == compares values
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
        """Begin to track a new parameter. torch calls this hook when `module` registers the
        parameter under `name`."""
        if parameter in self.kept or nn.parameter.is_lazy(parameter):
            return
        number = self._number_of(module, name, parameter)
        if not parameter.is_meta:
            self.foreign.discard(id(parameter))  # that of a parameter that is gone
            if self.own is not None and number not in self.own:
                self.foreign.add(id(parameter))
            self._keep(parameter, storage_dtype(module, name, parameter, self.dtype))

    def _number_of(self, module: nn.Module, name: str, parameter: nn.Parameter) -> int:
        """Return the number of a parameter that `module` registers under `name`, counted from 0 in the
        order in which parameters were created. One that replaces a parameter without values has the
        number of that one."""
        waiting = self.numbers.setdefault(module, {})
        if not parameter.is_meta and name in waiting:
            return waiting.pop(name)
        if parameter in self.empty:  # tied to one that was created before
            number = self.empty[parameter]
        else:
            number, self.count = self.count, self.count + 1
        if parameter.is_meta:
            waiting[name] = self.empty[parameter] = number
        return number

    def _track_copy(self, parameter: nn.Parameter, copy: nn.Parameter) -> None:
        """Begin to track `copy`, the deep copy of a tracked parameter, because torch calls no hook
        for copies."""
        if parameter in self.kept and copy not in self.kept:
            self._keep(copy, self.kept[parameter])

    def _keep(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        is_changed = parameter.device != self.device or parameter.dtype != dtype
        if is_changed or self.divided is not None or self.own is not None or self.put is not None:
            self.kept[parameter] = dtype
            self.staged[id(parameter)] = parameter

    def _stage(self, parameter: nn.Parameter) -> None:
        if parameter in self.placed:
            device, dtype = self.placed.pop(parameter)
            # This parameter belongs to another rank: the initialiser draws its random numbers, and
            # its values are dropped.
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
        # a parameter of a type that is not in CASTABLE was cast after its registration
        dtype = self.kept[parameter] if parameter.dtype in CASTABLE else parameter.dtype
        if id(parameter) in self.foreign:
            nothing = torch.zeros((), dtype=dtype, device=self.device)
            parameter.data = nothing.expand(parameter.shape)
            return
        values = parameter.data.to(self.device, dtype)
        if self.put is not None:
            stored = self.stored.get(parameter)
            self.stored[parameter] = self.put(values) if stored is None else stored.copy_(values)
            parameter.data = self.stored[parameter]
            mark_stored(parameter)
        elif self.divided is None:
            parameter.data = values
        else:
            shard_parameter(parameter, self.divided, values)

    def _place_idle(self, touched: dict[int, nn.Parameter]) -> None:
        """Move the least recently used parameters from staged to placed, until all staged
        parameters but the largest take at most SLACK_BYTES together.

        touched  parameters that the next operation uses, by id; they stay staged
        """
        sizes = {key: parameter.nbytes for key, parameter in self.staged.items()}
        for key, parameter in list(self.staged.items()):
            if sum(sizes.values()) - max(sizes.values()) <= SLACK_BYTES:
                break
            if key not in touched and not _is_shared(parameter):
                self._place(parameter)
                del sizes[key]


def _is_shared(parameter: nn.Parameter) -> bool:
    """Return whether another tensor uses the parameter's storage: whether the storage has more than
    two references. The parameter and this call always have one reference each.
    """
    return storage_use_count(parameter) > 2


def _flat(arguments: Any) -> Iterator[Any]:
    """Yield all values inside nested lists, tuples and dicts, such as the arguments of a call."""
    if isinstance(arguments, list | tuple):
        for item in arguments:
            yield from _flat(item)
    elif isinstance(arguments, dict):
        yield from _flat(list(arguments.values()))
    else:
        yield arguments
