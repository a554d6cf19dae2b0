"""Find out, by a forward on fake tensors where that is possible, three things about a user's own model:

- which of its own parameters and buffers its forward changes, such as weights that it normalises or the
  weights of a teacher that it averages;
- which parameters share their memory with others, or are read in another way than as parameters, such as
  from a list of tensors;
- whether it branches on the values of tensors.

A plan that keeps parameters in shards, or on a parameter server, loses a change: the forward writes to
a copy. It also makes copies of what was one tensor. `engine/refused_models.py` refuses these plans. A prediction
does not know values: `Profiler` says which line depends on one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit._torch.fake import DataDependentOutputException, FakeTensorMode
from tightfit._torch.modules import RunningNorm, own_parameters, plain_attributes
from tightfit._torch.operations import LOCAL_SCALAR_DENSE
from tightfit._torch.tensors import has_backward_hooks, in_backward, storage_id
from tightfit.errors import InputError
from tightfit.models.batches import Batch, map_tensors, sample_count
from tightfit.models.caches import isolated_model_caches
from tightfit.models.dataflow import describe_line, innermost_model_line, model_line
from tightfit.models.fake_kernels import without_fake_tensor_logs
from tightfit.models.guessed_values import GuessedValues
from tightfit.models.known_values import UNKNOWN, compute_known
from tightfit.models.tensors import tensors_in, written_tensors
from tightfit.models.value_reads import passing_value


@dataclass(frozen=True)
class UsesOfParameters:
    """What the forward of a model does with its parameters beside reading them, by their full names.

    in_place  parameters whose values are overwritten, as by weight.copy_(...)
    replaced  those that get another storage, as by weight.data = ..., or are replaced by another parameter
    from_batch  those of `in_place` whose new values depend on the batch, as in ActNorm's first forward
    aliases   sentences on parameters that are reached in another way: a buffer or another parameter has the
              same memory, or the forward reads them from an attribute that is no parameter
    attributes  numbers, bools and texts in attributes of modules that each forward changes
    buffers   buffers that each forward changes. Left out are those of norms with running statistics, and
              those that only a first forward changes, such as a table that it computes, and those that a
              forward replaces without having read them
    hooked    parameters with hooks on their gradients
    substituted  parameters in whose place a module was called with other tensors, as by
              torch.func.functional_call
    differentiates  whether the forward or the loss computes gradients itself, as by torch.autograd.grad
    floating  parameters and buffers of floating-point numbers that each forward changes
    unchecked  why the forward could not be run to its end, so that more may happen; empty if it could
    """

    in_place: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    from_batch: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    substituted: tuple[str, ...] = ()
    differentiates: bool = False
    floating: tuple[str, ...] = ()
    unchecked: str = ""

    @property
    def changed(self) -> tuple[str, ...]:
        """The parameters and buffers that a forward changes."""
        return (*self.in_place, *self.replaced, *self.buffers)


def uses_of_parameters(
    make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch
) -> UsesOfParameters:
    """Run two forwards of a new model and its loss, and return what they do with the model's parameters.
    They run as `checked_forwards` says. If a forward fails, it is what it did until then.

    make   creates the model
    total  (model, batch) -> the loss
    batch  a batch of samples

    The random number generators of torch, Python and NumPy are the same afterwards.
    """
    found, unchecked = checked_forwards(_uses, make, total, batch)
    names = [field.name for field in fields(UsesOfParameters) if field.name not in ("differentiates", "unchecked")]
    united = {name: tuple(dict.fromkeys(each for one in found for each in getattr(one, name))) for name in names}
    differentiates = any(one.differentiates for one in found)
    return UsesOfParameters(**united, differentiates=differentiates, unchecked=unchecked)


def _uses(model: nn.Module, forwards: Forwards) -> UsesOfParameters:
    given = dict(model.named_parameters(remove_duplicate=False))
    storages, written = {name: storage_id(one) for name, one in given.items()}, list[str]()
    shared = _sharing_memory(model)
    watch = _WatchedUses(
        _replace_held(model), {storage: name for name, storage in storages.items()}, tensors_in(forwards.batch)
    )
    with (
        _substitutions(model) as substituted,
        WatchedWrites(given, lambda name, _: written.append(name)),
        watch,
    ):
        forwards.run(model)
    now = dict(model.named_parameters(remove_duplicate=False))
    replaced = [name for name, one in given.items() if now.get(name) is not one or storage_id(one) != storages[name]]
    buffers, rewritten, attributes = _buffers_of(model), set[str](), _numbers_of(model)
    reads = _WatchedUses({storage_id(buffer): name for name, buffer in buffers.items()}, {}, [])
    with WatchedWrites(buffers, lambda name, _: rewritten.add(name)), reads:
        forwards.run(model)
    after = _buffers_of(model)
    rewritten |= {name for name in reads.read if after.get(name) is not buffers[name]}
    numbers = _numbers_of(model)
    tensors = {**given, **buffers}
    floating = (*written, *replaced, *rewritten)
    return UsesOfParameters(
        in_place=tuple(written),
        replaced=tuple(replaced),
        from_batch=tuple(watch.from_batch),
        aliases=(*shared, *sorted(watch.read)),
        buffers=tuple(name for name in buffers if name in rewritten),
        attributes=tuple(name for name, number in numbers.items() if attributes.get(name, number) != number),
        hooked=tuple(name for name, one in given.items() if has_backward_hooks(one)),
        substituted=tuple(substituted),
        differentiates=watch.differentiates,
        floating=tuple(sorted({name for name in floating if tensors[name].is_floating_point()})),
    )


def _numbers_of(model: nn.Module) -> dict[str, str]:
    """Return the modules' own attributes that are numbers, bools or texts, as text, by their full names."""
    return {
        f"{path}.{name}".lstrip("."): repr(value)
        for path, module in model.named_modules()
        for name, value in plain_attributes(module)
        if isinstance(value, bool | int | float | str)
    }


@contextmanager
def _substitutions(model: nn.Module) -> Iterator[dict[str, None]]:
    """Context manager that yields a dict. Its keys become the names of the parameters in whose place a
    module is called with other tensors."""
    names: dict[str, None] = {}
    hooks = []

    def watch(path: str, own: dict[str, Tensor | None]) -> Callable[..., None]:
        given = dict(own)

        def note(module: nn.Module, inputs: Any) -> None:
            now = own_parameters(module)
            names.update(
                (f"{path}.{name}".lstrip("."), None) for name, one in given.items() if now.get(name) is not one
            )

        return note

    for path, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)  # which nobody calls with other tensors
        if not scripted and (own := own_parameters(module)):
            hooks.append(module.register_forward_pre_hook(watch(path, dict(own))))
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by their full names, without those of norms with running statistics."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        if not isinstance(module, RunningNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def _sharing_memory(model: nn.Module) -> list[str]:
    """Return sentences on different parameters, or parameters and buffers, of the same memory."""
    found, parameters = [], list(model.named_parameters())
    for number, (name, one) in enumerate(parameters):
        found += [
            f"the parameters {name} and {other} share their memory"
            for other, two in parameters[number + 1 :]
            if _overlap(one, two)
        ]
        found += [
            f"the buffer {other} has the memory of {name}" for other, two in model.named_buffers() if _overlap(one, two)
        ]
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0 or storage_id(one) != storage_id(other):
        return False
    (first, end), (second, last) = _extent(one), _extent(other)
    return first < last and second < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the number of the first byte of a tensor in its storage, and of the first one after it."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return int(begin * tensor.element_size()), int((begin + steps + 1) * tensor.element_size())


def _replace_held(model: nn.Module) -> dict[int, str]:
    """Replace parameters, and tensors of their memory such as `weight.data`, that modules hold in attributes
    that are no parameters, such as lists of tensors, by copies. Return storage of a copy -> a sentence on
    it."""
    names = {storage_id(parameter): name for name, parameter in model.named_parameters()}
    sentences: dict[int, str] = {}

    def replaced(value: Any, where: str, depth: int = 0) -> Any:
        if isinstance(value, Tensor):
            name = names.get(storage_id(value))
            if name is None:
                return value
            copy = value.detach().clone().requires_grad_(value.requires_grad)
            sentences[storage_id(copy)] = f"the forward reads {name} from {where}, which is no parameter"
            return copy
        if depth < MOST_NESTED and type(value) in (list, tuple):
            return type(value)(replaced(one, where, depth + 1) for one in value)
        if depth < MOST_NESTED and type(value) is dict:
            return {key: replaced(one, where, depth + 1) for key, one in value.items()}
        return value

    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):  # keeps its list of weights up to date
            continue
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, Tensor | list | tuple | dict):
                before = len(sentences)
                new = replaced(value, f"{path}.{name}" if path else name)
                if len(sentences) > before:
                    vars(module)[name] = new
    return sentences


def branch_on_values(make: Callable[[], nn.Module], total: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> str:
    """Run a forward like `uses_of_parameters`. Return the first line of the model that reads the value of a
    tensor in Python, usually for a branch, such as "net.py, line 12 (if error.max() < 0.1:)"; "" if
    none does, or if the forward fails for another reason. Checks that raise an error are passed."""
    with restoring_random_states(), fake_forwards():
        try:
            model = make()
            model.train()
            with _PassedChecks():
                total(model, fake_batch(batch))
        except DataDependentOutputException as error:
            return describe_line(innermost_model_line(error))
        except Exception:
            return ""
    return ""


class _PassedChecks(TorchDispatchMode):
    """A mode in which the model's checks of values pass: see `passing_value`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (result := compute_known(func, args, kwargs or {})) is not UNKNOWN:
            return result
        if func in (LOCAL_SCALAR_DENSE.default, torch.ops.aten.equal.default):
            value = passing_value(model_line())
            if value is not None and (func is torch.ops.aten.equal.default or args[0].dtype is torch.bool):
                return value
        return func(*args, **(kwargs or {}))


MOST_REAL_BYTES = 2**29  # of the parameters of a model that is created to run it on real tensors
MOST_REAL_SAMPLES = 4
Found = TypeVar("Found")


class Forwards:
    """Runs the forwards of a check, and notes the first error.

    batch    the batch that the model gets
    is_fake  whether tensors have no values
    failure  the first error of a forward; None if there was none
    """

    def __init__(self, total: Callable[[nn.Module, Batch], Tensor], batch: Batch, is_fake: bool) -> None:
        self.batch, self.is_fake = batch, is_fake
        self.failure: Exception | None = None
        self._total = total

    def run(self, model: nn.Module) -> None:
        try:
            self._total(model, self.batch)
        except Exception as error:
            self.failure = self.failure or error


def checked_forwards(
    check: Callable[[nn.Module, Forwards], Found],
    make: Callable[[], nn.Module],
    total: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
) -> tuple[list[Found], str]:
    """Call `check(model, forwards)` with a new model in training mode, and return (the results, why the
    forward could not be run to its end, "" if it could).

    - First on fake tensors. If the model reads values of tensors, they are guessed (`guessed_values.py`), and
      a second check guesses the opposite.
    - If the first forward fails, as one that needs the values in NumPy, a small model is created and runs on
      up to 4 real samples.

    check  runs the model by `forwards.run(model)`
    make   creates the model
    total  (model, batch) -> the loss
    batch  a batch of samples

    Raises InputError if the model or the loss raises it on real samples.
    """
    results: list[Found] = []
    size, failure = math.inf, None
    for answer in (True, False):
        values = GuessedValues(answer)
        try:
            with restoring_random_states(), fake_forwards(), values:
                model = make()
                size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
                model.train()
                forwards = Forwards(total, fake_batch(batch), is_fake=True)
                results.append(check(model, forwards))
            error = forwards.failure
        except Exception as raised:
            error = raised
        if answer:  # the opposite guess may be one that the model cannot run with
            failure = error
        if failure is not None or not values.asked:
            break
    if failure is None:
        return results, ""
    if size > MOST_REAL_BYTES:
        return results, _described(failure)
    try:
        with restoring_random_states(), isolated_model_caches(), torch.enable_grad():
            model = make()
            model.train()
            forwards = Forwards(total, _few_samples(batch), is_fake=False)
            results.append(check(model, forwards))
        failure = forwards.failure
    except Exception as error:
        failure = error
    if isinstance(failure, InputError):  # the training would end with it
        raise failure
    return results, "" if failure is None else _described(failure)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _few_samples(batch: Batch) -> Batch:
    """Return a copy of the first samples of a batch."""
    count = sample_count(batch)

    def few(tensor: Tensor) -> Tensor:
        whole = tensor.dim() == 0 or len(tensor) != count
        return (tensor if whole else tensor[:MOST_REAL_SAMPLES]).detach().clone()

    return map_tensors(few, batch)


MOST_NESTED = 3  # lists in lists in which parameters are looked for


@contextmanager
def restoring_random_states() -> Iterator[None]:
    """Inside this context, the random number generators of torch, Python and NumPy may be used: they are
    as before afterwards."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def fake_forwards() -> Iterator[None]:
    """Inside this context, models are created and run on fake tensors."""
    with (
        isolated_model_caches(),
        without_fake_tensor_logs(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.enable_grad(),
    ):
        yield


def fake_batch(batch: Batch) -> Batch:
    """Return a batch of tensors without values, with the shapes and types of those of `batch`."""
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), batch)


class WatchedWrites(TorchDispatchMode):
    """A mode that calls `before_write(name, tensor)` before the first operation that writes to one of
    some tensors, or to a view of it.

    tensors       name -> tensor
    before_write  a function that gets the name and the tensor
    """

    def __init__(self, tensors: Mapping[Any, Tensor], before_write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.by_storage = {storage_id(tensor): (name, tensor) for name, tensor in tensors.items()}
        self.before_write = before_write
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            storage = storage_id(tensor) if isinstance(tensor, Tensor) else None
            if storage in self.by_storage and storage not in self.written:
                self.written.add(storage)
                self.before_write(*self.by_storage[storage])
        return func(*args, **(kwargs or {}))


class _WatchedUses(TorchDispatchMode):
    """A mode that notes the texts of the storages that operations read, which parameters are written with
    values that depend on the batch, and whether a backward runs.

    texts       storage -> its text
    parameters  storage -> name of the parameter
    batch       the tensors of the batch
    """

    def __init__(self, texts: Mapping[int, str], parameters: Mapping[int, str], batch: list[Tensor]) -> None:
        super().__init__()
        self.texts, self.parameters = texts, parameters
        self.read, self.from_batch, self.differentiates = set[str](), list[str](), False
        self._kept = list(batch)  # so that no other storage gets the place of a freed one
        self._dependent = set(map(storage_id, batch))  # storages with values that depend on the batch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differentiates = self.differentiates or in_backward()
        storages = [storage_id(tensor) for tensor in tensors_in((args, kwargs or {}))]
        self.read.update(self.texts[storage] for storage in storages if storage in self.texts)
        output = func(*args, **(kwargs or {}))
        if not self._dependent.isdisjoint(storages):
            changed = [tensor for tensor in written_tensors(func, args, kwargs or {}) if isinstance(tensor, Tensor)]
            self.from_batch += [
                self.parameters[storage] for storage in map(storage_id, changed) if storage in self.parameters
            ]
            made = [*changed, *tensors_in(output)]
            self._kept += made
            self._dependent.update(map(storage_id, made))
        return output


__all__ = [
    "Forwards",
    "UsesOfParameters",
    "WatchedWrites",
    "branch_on_values",
    "checked_forwards",
    "fake_batch",
    "fake_forwards",
    "restoring_random_states",
    "uses_of_parameters",
]
