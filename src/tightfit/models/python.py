"""Load functions from the user's own Python code by name, check them, and turn their errors into
InputError.

`models/create.py` loads models with this module, and `data/user_samples.py` loads datasets.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tightfit.errors import InputError
from tightfit.values import nearest

if TYPE_CHECKING:
    from torch import nn


def load_python(reference: str) -> Any:
    """Return the function that `reference` names: "file.py:function" or "package.module:function".
    It may also name an Objective, for a loss.

    A file runs only once in each process, however often its functions are loaded. Raises InputError
    if the file, module or function does not exist, if the name is that of something else, or if
    running the file or importing the module fails.
    """
    from tightfit.models.objective import Objective

    source, colon, name = reference.rpartition(":")
    asked = f"python: {reference}"
    if not colon or not source or not name:
        raise InputError(asked, "names no function", "write it like file.py:function or package.module:function")
    module = _load_file(Path(source), asked) if source.endswith(".py") else _import_module(source, asked)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(
            asked,
            f"{source} has no function {name}",
            nearest(name, functions) if functions else f"define it: def {name}(): ...",
        )
    function = getattr(module, name)
    if not callable(function) and not isinstance(function, Objective):
        raise InputError(asked, f"{name} is a {type(function).__name__}, not a function", f"write def {name}(): ...")
    return function


def checked_model_function(function: Any, name: str) -> Callable[[], nn.Module]:
    """Return a function that calls `function`, checks that the result is an nn.Module, and returns
    it.

    function  a function without arguments that returns a model
    name      the function's name, for messages

    Raises InputError if `function` is not a function, such as a model itself, or needs arguments.
    The returned function raises InputError if `function` fails or does not return an nn.Module.
    """
    from torch import nn

    if isinstance(function, nn.Module) or not callable(function):
        made = type(function).__name__
        raise InputError(
            f"job: model={made}(...)" if isinstance(function, nn.Module) else f"job: model={function!r}",
            f"is a {made}, not a function that returns a model",
            f"give a function that makes the model, so that a plan can create it on any device: model=lambda: {made}(...)"
            if isinstance(function, nn.Module)
            else "give a function that returns the model",
        )
    asked = f"job: model ({name})"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            asked,
            f"cannot be called without arguments ({error})",
            "give defaults to the function's arguments, or wrap the function: lambda: make_model(...)",
        ) from None
    except ValueError:  # a builtin function without a signature
        pass

    def create() -> nn.Module:
        code = getattr(function, "__code__", None)
        with as_input_error(asked, "mend the function", code.co_filename if code else None):
            model = function()
        if not isinstance(model, nn.Module):
            raise InputError(asked, f"returned {type(model).__name__}, not an nn.Module", "return the model")
        if _returned_before(function, model):
            raise InputError(
                asked,
                "returns the same model each time, so a run would begin with the weights that another one has trained",
                "create the model inside of the function",
            )
        return model

    return create


@dataclass(frozen=True, eq=False)
class GivenModel:
    """Returns a model that the user has made. It stands for a function that makes one, and returns the
    same model each time."""

    model: Any

    def __call__(self) -> nn.Module:
        made: nn.Module = self.model
        return made


_LAST_MODELS: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()  # by the function that returned it


def _returned_before(function: Any, model: Any) -> bool:
    """Return whether the function has returned this very model the last time, too, and may not."""
    if isinstance(function, GivenModel):
        return False
    try:
        last = _LAST_MODELS.get(function)
        _LAST_MODELS[function] = weakref.ref(model)
    except TypeError:  # without a hash or without weak references
        return False
    return last is not None and last() is model


@contextmanager
def as_input_error(asked: str, fix: str, file: str | None = None) -> Iterator[None]:
    """Inside this context, every exception becomes an InputError, except an InputError itself and
    errors that say that memory ran out.

    asked  what the user asked for: the first part of the InputError's message
    fix    the remedy: the last part of its message
    file   the user's file; the message names the line of this file that failed. None names no line
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        described = f"{type(error).__name__}: {lines[0] if lines else ''}"
        message = next(
            (line for line in lines[1:2] if "Error: " in line), described
        )  # in a validation error, the second line names the cause
        line_numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        location = f" (line {line_numbers[-1]} of {file})" if line_numbers else ""
        raise InputError(asked, f"{message}{location}", fix) from error


def _load_file(path: Path, asked: str) -> Any:
    path = path.resolve()
    if not path.is_file():
        nearest_names = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        raise InputError(
            asked,
            f"there is no file {path}",
            f"did you mean {nearest_names[0]}?" if nearest_names else "check the path",
        )
    name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the file runs: its dataclasses look it up
    try:
        with as_input_error(asked, f"mend {path.name}", str(path)), _importable(path.parent), _with_values():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, asked: str) -> Any:
    with _importable(Path.cwd()), _with_values():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise InputError(
                    asked, f"{name} imports {error.name}, which is not installed", f"install {error.name}"
                ) from error
            raise InputError(
                asked,
                f"there is no module {error.name}",
                "start in the folder that contains the module, install the module, or name a file.py:function",
            ) from None
        except Exception as error:
            raise InputError(
                asked, f"importing the module raised {type(error).__name__}: {error}", f"mend {name}"
            ) from error


@contextmanager
def _with_values() -> Iterator[None]:
    """Inside this context, tensors have values, also where a model is created without. A user's module may make its
    samples when it is imported."""
    import torch

    from tightfit._torch.dispatch import without_dispatch_modes

    with without_dispatch_modes(), torch.device("cpu"), torch.enable_grad():
        yield


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Inside this context, modules in `folder` can be imported, as if Python had been started in
    `folder`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
