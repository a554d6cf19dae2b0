"""Keep fake tensors out of the caches of model code, so that real runs find none in them.

Some models cache a tensor that they compute once, such as BEiT's table of relative positions, in an
lru_cache or in a dict of their module or class. A trace puts fake tensors in such a cache, which a
training run cannot use. A training run puts real tensors in it; traces compute with their shapes.

A dict of a module, or a list, may also be the user's own data. So it keeps its entries, and their order.
A program may also hold on to the model that its function has created, by a global name or in such a dict:
a model on fake tensors does not take its place.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, lru_cache
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from tightfit._torch.fake import FakeTensor, unset_fake_temporarily
from tightfit.models.loss_state import keeping_losses

_PACKAGES_WITHOUT_MODELS = frozenset(sys.stdlib_module_names) | {
    "torch", "torchgen", "numpy", "tightfit", "pydantic", "pydantic_core", "sympy", "rich", "yaml", "tokenizers", "typer", "click",
    "matplotlib", "PIL", "pytest", "_pytest", "psutil", "triton", "hypothesis", "pandas", "pyarrow", "scipy", "torchao",
    "networkx", "regex", "mpmath", "dill", "huggingface_hub", "jinja2", "httpx", "httpcore", "httpx2", "httpcore2", "h11",
    "safetensors", "filelock", "typing_inspection", "typing_extensions", "idna", "packaging", "tqdm", "certifi",
    "requests", "urllib3", "fsspec", "datasets", "tensorboard", "accelerate", "anyio", "truststore", "markupsafe", "google",
    "annotated_types", "pip", "setuptools", "sklearn", "joblib", "xdist", "execnet", "coverage",
    "fontTools", "mpl_toolkits", "kiwisolver", "cycler", "pyparsing", "dateutil", "pytz", "multiprocess", "cloudpickle",
    "sortedcontainers", "torchmetrics", "xxhash",
    "pygments", "pluggy", "iniconfig", "py", "functorch", "markdown_it", "mdurl", "shellingham", "attr", "attrs",
}  # fmt: skip

_Cache = Any  # a function with an lru_cache
_ENDS = 1000  # values at each end of a long list, tuple or dict in which tensors are looked for
_HOLDERS = (Tensor, list, tuple, dict, nn.Module)
# most dicts are tables of names: the check of the type spares a call for each name
_PLAIN = frozenset({str, int, float, bool, type(None), type, FunctionType, BuiltinFunctionType, ModuleType})
_BUILTINS = "__builtins__"  # among the global names of every module: a table of Python's own functions


@contextmanager
def isolated_model_caches(on_meta: bool = False) -> Iterator[None]:
    """On exit from this context, remove the fake and meta tensors that code in it has put into the caches
    of model code. Dicts then have the entries that they had before; the entries of an lru_cache are
    computed again when they are needed. The jobs' losses have the attributes that they had before.

    on_meta  whether the code runs on the meta device, where it cannot use real tensors: those in caches
             are on the meta device meanwhile
    """
    with keeping_losses(), _isolated(on_meta):
        yield


@contextmanager
def _isolated(on_meta: bool) -> Iterator[None]:
    functions, dicts = _all_caches(len(sys.modules), next(reversed(sys.modules)))
    before = {id(mapping): _Entries(mapping) for mapping in dicts}
    if on_meta:
        _clear(functions, _is_real)
        with unset_fake_temporarily():
            for entries in before.values():
                entries.move_to_meta()
    try:
        yield
    finally:
        functions, dicts = _all_caches(len(sys.modules), next(reversed(sys.modules)))
        _clear(functions, _is_unreal)
        for mapping in dicts if _hold_unreal(value for each in dicts for value in _holders(each).values()) else ():
            if id(mapping) in before:
                before[id(mapping)].restore()
            else:  # of a module that was imported meanwhile
                for key in _with_unreal(mapping):
                    del mapping[key]
        if on_meta:
            for entries in before.values():
                entries.mapping.update(entries.with_tensors)


class _Entries:
    """The entries of a dict as they were when this object was made.

    mapping       the dict
    with_tensors  its entries that contained a tensor
    """

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self.mapping, self._all = mapping, dict(mapping)
        self.with_tensors: dict[Any, Any] = {}
        # the lists and dicts in the entries, and what those beside tensors contained
        self._containers: dict[int, Any] = {}
        self._contents: list[tuple[Any, Any]] = []
        holders = _holders(mapping)
        tensors, containers = _tensors_and_containers(holders.values())
        self._containers.update((id(container), container) for container in containers)
        for key, value in holders.items() if tensors else ():
            found, nested = _tensors_and_containers([value])
            if found:
                self.with_tensors[key] = value
                self._contents += [(container, container.copy()) for container in nested]

    def move_to_meta(self) -> None:
        """Replace the tensors in the entries by tensors on the meta device."""
        self.mapping.update({key: _moved_to_meta(value) for key, value in self.with_tensors.items()})

    def restore(self) -> None:
        """Remove the fake and meta tensors from the entries: each has its earlier value, without what
        was added to a list or a dict, and an entry that was not there is gone."""
        unreal = _with_unreal(self.mapping)
        if not unreal:
            return
        for container, content in self._contents:
            if _hold_unreal([container]):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        for key in unreal:
            if key not in self._all:
                del self.mapping[key]
                continue
            self.mapping[key] = value = self._all[key]
            self._prune(value)

    def _prune(self, value: Any) -> None:
        """Remove the fake and meta tensors from the lists and dicts in `value` that were there before,
        and the newer lists and dicts that contain such tensors."""

        def stays(item: Any) -> bool:
            if not _hold_unreal([item]):
                return True
            if id(item) in self._containers or isinstance(item, tuple):
                self._prune(item)
                return not _hold_unreal([item])
            return False

        if isinstance(value, list):
            value[:] = [item for item in value if stays(item)]
        elif isinstance(value, dict):
            for key in [key for key, item in value.items() if not stays(item)]:
                del value[key]
        elif isinstance(value, tuple):  # only lists and dicts in it can change
            for item in value:
                stays(item)


def _holders(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a dict that may contain a tensor."""
    return {
        key: value
        for key, value in list(mapping.items())
        if type(value) not in _PLAIN and isinstance(value, _HOLDERS) and key != _BUILTINS
    }


def _with_unreal(mapping: dict[Any, Any]) -> list[Any]:
    """Return the keys of the entries of a dict that contain fake or meta tensors."""
    return [key for key, value in _holders(mapping).items() if _hold_unreal([value])]


def _hold_unreal(values: Iterable[Any]) -> bool:
    return any(map(_is_unreal, _tensors_and_containers(values)[0]))


def _is_unreal(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _is_real(tensor: Tensor) -> bool:
    return not _is_unreal(tensor)


def _moved_to_meta(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a copy of nested lists, tuples and dicts with their real tensors on the meta device.

    inside  the ids of the containers around `value`: one that contains itself is not copied again
    """
    if isinstance(value, Tensor):
        return value if _is_unreal(value) else value.to("meta")
    if not isinstance(value, list | tuple | dict) or id(value) in inside:
        return value
    containers = (*inside, id(value))
    if isinstance(value, dict):
        return {key: _moved_to_meta(one, containers) for key, one in value.items()}
    moved = [_moved_to_meta(one, containers) for one in value]
    return moved if isinstance(value, list) else type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)


def clear_tensor_caches() -> None:
    """Clear every lru_cache of model code that contains a tensor. The next caller of the cached
    function computes the tensor again."""
    _clear(_all_caches(len(sys.modules), next(reversed(sys.modules)))[0], lambda tensor: True)


def _clear(functions: list[_Cache], unwanted: Any) -> None:
    for function in functions:
        if function.cache_info().currsize and any(map(unwanted, _results(function))):
            function.cache_clear()


@lru_cache(1)
def _all_caches(count: int, last: str) -> tuple[list[_Cache], list[dict[Any, Any]]]:
    """Return (the functions with an lru_cache, the dicts) in all modules that may define models.

    count, last  the number of imported modules and the name of the last one. They are only the key
                 of this function's own lru_cache: after a new import, the modules are searched
                 again
    """
    modules = {name: module for name, module in list(sys.modules.items()) if _may_define_models(name)}
    found = [_caches_of(module) for module in modules.values() if isinstance(module, ModuleType)]
    own = (module for name, module in modules.items() if not name.startswith("transformers"))
    global_names = [vars(one) for one in own if isinstance(one, ModuleType)]
    dicts = [*(mapping for _, dicts in found for mapping in dicts), *global_names]
    # several modules may import the same one
    return [function for functions, _ in found for function in functions], list(
        {id(mapping): mapping for mapping in dicts}.values()
    )


def _may_define_models(name: str) -> bool:
    package = name.partition(".")[0]
    if package.startswith("_sysconfigdata"):  # Python's build options; the name differs by machine
        return False
    return package not in _PACKAGES_WITHOUT_MODELS and (package != "transformers" or "modeling" in name)


@lru_cache(None)
def _caches_of(module: ModuleType) -> tuple[list[_Cache], list[dict[Any, Any]]]:
    """Return (the functions with an lru_cache, the dicts) that a Python module and its classes have
    as attributes."""
    functions: list[_Cache] = []
    dicts: list[dict[Any, Any]] = []
    classes = [attribute for attribute in vars(module).values() if isinstance(attribute, type)]
    for owner in (module, *(kind for kind in classes if vars(kind).get("__module__") == module.__name__)):
        for name, value in list(vars(owner).items()):
            if type(value) is dict and not name.startswith("__"):
                dicts.append(value)
            functions += _cached_functions(value)
    return functions, dicts


def _cached_functions(value: Any) -> list[_Cache]:
    """Return the functions with an lru_cache that belong to an attribute of a module or class: the
    function, method or property itself, or functions in its closure, such as the one that a
    decorator wraps."""
    if isinstance(value, _lru_cache_wrapper):
        return [value]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
    found = [cell.cell_contents for cell in cells if _is_filled(cell)] + [value]
    return [one for one in found if isinstance(one, _lru_cache_wrapper)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _results(function: _Cache) -> Iterator[Tensor]:
    """Yield the tensors in the lru_cache of a function. They are found through the garbage
    collector, because an lru_cache cannot list its entries."""
    for held in gc.get_referents(function):
        yield from _tensors_and_containers([held])[0]


def _tensors_and_containers(values: Iterable[Any]) -> tuple[list[Tensor], list[Any]]:
    """Return (the tensors, the lists and dicts) in nested lists, tuples, dicts and modules. A container may
    contain itself.

    Each level of nesting is read in one call of the garbage collector: a library may have ten thousand lists
    of names.
    """
    tensors: list[Tensor] = []
    containers, visited, level = [], set[int](), list(values)
    while level:
        found = [value for value in level if isinstance(value, list | tuple | dict)]
        if len(found) < len(level):
            tensors += [value for value in level if isinstance(value, Tensor)]
            modules = [value for value in level if isinstance(value, nn.Module)]
            tensors += [each for module in modules for each in (*module.parameters(), *module.buffers())]
        fresh = list({id(one): one for one in found if id(one) not in visited}.values())
        visited.update(map(id, fresh))
        containers += [container for container in fresh if not isinstance(container, tuple)]
        short = [container for container in fresh if len(container) <= 2 * _ENDS]
        held = gc.get_referents(*short)
        if len(short) < len(fresh):
            held += [each for container in fresh if len(container) > 2 * _ENDS for each in _ends(container)]
        level = [value for value in held if type(value) not in _PLAIN and isinstance(value, _HOLDERS)]
    return tensors, containers


def _ends(container: Any) -> list[Any]:
    """Return the first and the last values of a long list, tuple or dict, such as a data set: what a forward
    adds is at the end."""
    values = container.values() if isinstance(container, dict) else container
    return [*islice(values, _ENDS), *islice(reversed(values), _ENDS)]


__all__ = ["clear_tensor_caches", "isolated_model_caches"]
