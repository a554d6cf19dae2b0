"""Find the parameters that tensor parallelism does not shard, and that are used on sharded activations,
such as the norm of each head's queries. Each device computes a part of their gradients, and the parts
have to be summed. Many tables of transformers leave them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.tensors import storage_id
from tightfit.errors import InputError
from tightfit.models.batches import Batch
from tightfit.models.fake_forward import fake_batch, fake_forwards, restoring_random_states
from tightfit.models.tensors import tensors_in, written_tensors

# styles of modules whose outputs are sharded, and of those that make full outputs from sharded inputs
SPLITS, JOINS = ("colwise", "qkv", "gate_up", "heads"), ("rowwise", "moe_tp_experts")


def may_be_partial(model: nn.Module, styles: Mapping[str, str]) -> bool:
    """Return whether a module that lies in the parent of a column-parallel module has parameters without
    a style. Only such parameters may be used on sharded activations. Example: in an attention with q_proj and
    k_norm, those of k_norm.

    styles  module name -> its style, of the modules that the table names
    """
    for name, style in styles.items():
        if style not in SPLITS:
            continue
        parent = name.rpartition(".")[0]
        for path, module in model.get_submodule(parent).named_modules():
            whole = f"{parent}.{path}" if parent and path else path or parent
            if whole not in styles and next(module.parameters(recurse=False), None) is not None:
                return True
    return False


def partial_parameters(
    make: Callable[[], nn.Module],
    total: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    styles: Mapping[str, str],
) -> frozenset[str]:
    """Run a forward of a new, undivided model on fake tensors, and return the names of the parameters
    without a style that an operation reads together with a sharded activation. If the forward fails on fake tensors,
    they are those until then.

    make    creates the model
    total   (model, batch) -> the loss
    batch   a batch; only the shapes and types of its tensors are used
    styles  module name -> its style, of the modules that the table names

    Raises InputError if such a parameter has more than one dimension: it would have to be sharded.
    """
    try:
        with restoring_random_states(), fake_forwards():
            model = make()
            model.train()
            given = fake_batch(batch)
            watch = _ShardedActivations(model, styles, tensors_in(given))
            try:
                with watch:
                    total(model, given)
            except Exception:  # the forward needs values
                pass
    except Exception:  # the model cannot be created on fake tensors
        return frozenset()
    kinds = {_kind(name) for name in watch.found}  # the forward may have failed before it came to the other blocks
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in watch.names}
    found = frozenset(name for name in parameters if _kind(name) in kinds)
    for name in sorted(found):
        if parameters[name].dim() > 1:
            raise InputError(
                "plan: tp",
                f"{name}, of {parameters[name].dim()} dimensions, is used on sharded activations, and the table of modules "
                "to shard does not have it",
                "use tp: 1, or give a table of your own in the job (model.tensor_parallel)",
            )
    return found


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class _ShardedActivations(TorchDispatchMode):
    """A mode that follows which tensors would be sharded, from the outputs of column-parallel modules to
    those of row-parallel ones, and notes the other parameters that operations read with them. A
    parameter is read, too, where an operation reads what was computed from parameters alone.

    names  the parameters of modules without a style
    found  those of them that are read with sharded tensors
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, str], batch: list[Tensor]) -> None:
        super().__init__()
        styled = {id(parameter) for name in styles for parameter in model.get_submodule(name).parameters()}
        parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in styled}
        self.names, self.found = set(parameters), set[str]()
        # by storages: parameters, and what was computed from them alone -> their names
        self._read = {storage_id(parameter): {name} for name, parameter in parameters.items()}
        self._sharded = set[int]()
        self._active = set(map(storage_id, batch))  # computed from the batch
        self._kept = list(batch)  # so that no other storage gets the place of a freed one
        for name, style in styles.items():
            if style in SPLITS:
                model.get_submodule(name).register_forward_hook(self._begin)
            elif style in JOINS:
                model.get_submodule(name).register_forward_hook(self._end)

    def _begin(self, module: nn.Module, given: Any, output: Any) -> None:
        self._sharded.update(map(storage_id, tensors_in(output)))

    def _end(self, module: nn.Module, given: Any, output: Any) -> None:
        self._sharded.difference_update(map(storage_id, tensors_in(output)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = {storage_id(tensor) for tensor in tensors_in((args, kwargs or {}))}
        output = func(*args, **(kwargs or {}))
        read = set[str]().union(*(self._read.get(storage, ()) for storage in storages))
        changed = [tensor for tensor in written_tensors(func, args, kwargs or {}) if isinstance(tensor, Tensor)]
        made = [*changed, *tensors_in(output)]
        self._kept += made
        results = set(map(storage_id, made))
        if not self._sharded.isdisjoint(storages):
            self.found |= read
            self._sharded |= results
        if not self._active.isdisjoint(storages):
            self._active |= results
        elif read:
            for storage in results - storages:
                self._read[storage] = read
        return output


__all__ = ["may_be_partial", "partial_parameters"]
