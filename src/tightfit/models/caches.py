"""Caches of a model's code: tensors without values neither come out of them nor stay in them.

Models keep what they compute once, such as BEiT's table of relative positions, in an lru_cache or in a dict of their module or
class. What a trace on fake tensors leaves there, a training would find; what a training leaves there, a trace cannot use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, lru_cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_NO_MODELS = frozenset(sys.stdlib_module_names) | {
    "torch", "torchgen", "numpy", "tightfit", "pydantic", "pydantic_core", "sympy", "rich", "yaml", "tokenizers", "typer", "click",
    "matplotlib", "PIL", "pytest", "_pytest", "psutil", "triton", "hypothesis", "pandas", "pyarrow", "scipy", "torchao",
}  # fmt: skip

_Cache = Any  # an lru_cache's function


@contextmanager
def tensors_kept_out() -> Iterator[None]:
    """Within, caches of models' code hold no tensors from before, and afterwards none without values. Those in dicts come back."""
    taken = _take_real()
    try:
        yield
    finally:
        _drop(lambda tensor: isinstance(tensor, FakeTensor) or tensor.is_meta)
        for cache, entries in taken:
            cache.update(entries)


def _take_real() -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Take tensors out of all caches; what was in dicts, with the dict."""
    return _drop(lambda tensor: not isinstance(tensor, FakeTensor))


def _drop(unwanted: Any) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Clear functions' caches, and remove entries of dicts, that hold a tensor that is `unwanted`."""
    taken = []
    functions, dicts = _all_caches(len(sys.modules), next(reversed(sys.modules)))
    _clear(functions, unwanted)
    for one in dicts:
        held = {key: value for key, value in list(one.items()) if any(map(unwanted, _tensors(value)))}
        for key in held:
            del one[key]
        if held:
            taken.append((one, held))
    return taken


def forget_tensors() -> None:
    """Clear functions' caches that hold a tensor: who asks next makes it again."""
    _clear(_all_caches(len(sys.modules), next(reversed(sys.modules)))[0], lambda tensor: True)


def _clear(functions: list[_Cache], unwanted: Any) -> None:
    for function in functions:
        if function.cache_info().currsize and any(map(unwanted, _results(function))):
            function.cache_clear()


@lru_cache(1)
def _all_caches(count: int, last: str) -> tuple[list[_Cache], list[dict[Any, Any]]]:
    """The caches of all modules that may hold models; found again when more have been imported: `count`, `last`."""
    modules = [module for name, module in list(sys.modules.items()) if _may_hold_models(name)]
    found = [_caches(module) for module in modules if isinstance(module, ModuleType)]
    return [one for functions, _ in found for one in functions], [one for _, dicts in found for one in dicts]


def _may_hold_models(name: str) -> bool:
    package = name.partition(".")[0]
    return package not in _NO_MODELS and (package != "transformers" or "modeling" in name)


@lru_cache(None)
def _caches(module: ModuleType) -> tuple[list[_Cache], list[dict[Any, Any]]]:
    """The functions with a cache, and the dicts, of a module and its classes."""
    functions: list[_Cache] = []
    dicts: list[dict[Any, Any]] = []
    classes = [one for one in vars(module).values() if isinstance(one, type)]
    for owner in (module, *(one for one in classes if vars(one).get("__module__") == module.__name__)):
        for name, value in list(vars(owner).items()):
            if type(value) is dict and not name.startswith("__"):
                dicts.append(value)
            functions += _cached_functions(value)
    return functions, dicts


def _cached_functions(value: Any) -> list[_Cache]:
    """The lru_caches of a function, a method or a property, itself or within what decorates it."""
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
    """The tensors among what an lru_cache holds, which only the collector knows."""
    for held in gc.get_referents(function):
        yield from _tensors(held)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, which may hold themselves."""
    found, seen, left = [], set(), [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | dict) and id(one) not in seen:
            seen.add(id(one))
            left += one.values() if isinstance(one, dict) else one
    return found


__all__ = ["forget_tensors", "tensors_kept_out"]
