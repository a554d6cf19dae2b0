"""Parts of torch.compile: its errors, marks on its inputs, and what a backend consists of.

The functions import torch's compiler only when they are called, because the import takes seconds.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile itself has raised `error`, not the code that it compiles."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def operation_error(error: BaseException) -> str | None:
    """Return what an operation of the model says if it cannot run on the shapes or types of its
    inputs, which the compiler finds on fake tensors. Return None if `error` is another one."""
    if not isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        return None
    found = re.search(r"got \w+\((['\"])(.*)\1\)$", str(error), re.MULTILINE)
    return found and found.group(2)


def is_compiler_file(path: str) -> bool:
    """Return whether a source file belongs to certain parts of torch's compiler. These parts raise
    exceptions of any class. So if the compiler has failed there, only the files in the traceback
    show it.

    path  path of the source file
    """
    return "_functorch/_aot_autograd" in path or "/_inductor/" in path


def guard_hooks() -> None:
    """Let torch.compile distinguish modules of one class by their forward hooks, from now on in this
    process. By default, torch compiles code for the first module of a class, with its hooks, and runs
    the others with this code. Code that was compiled before is forgotten, because it does not look at hooks."""
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch.compiler.reset()
        torch._dynamo.config.skip_nnmodule_hook_guards = False


class _Compilations:
    """Says whether compilations are kept, and for which kind of run the present ones were made."""

    kept = False
    key: Hashable = None


_COMPILATIONS = _Compilations()
MAX_COMPILATIONS = 10_000  # of one function, while compilations are kept


@contextmanager
def keeping_compilations() -> Iterator[None]:
    """Return a context manager inside which `forget_compilations` keeps what torch.compile has
    compiled for runs of the same kind, so that the same region is not compiled again for the next
    model that has it. At the end, all compilations are forgotten: they would count against torch's
    limit of recompilations in a later training.

    Inside, torch does not measure how long a compilation's guards take, for which it would empty the
    processor's caches. (It must collect garbage after each compilation: what is left of the
    compilation holds tensors of the model, which would count as memory in use.)"""
    if _COMPILATIONS.kept:
        yield
        return
    config = importlib.import_module("torch.compiler.config")
    limits = {"recompile_limit": MAX_COMPILATIONS, "accumulated_recompile_limit": MAX_COMPILATIONS}
    _COMPILATIONS.kept, _COMPILATIONS.key = True, None
    try:
        with config.patch(**limits), _without_timing_guards():
            yield
    finally:
        _COMPILATIONS.kept = False
        torch.compiler.reset()


@contextmanager
def _without_timing_guards() -> Iterator[None]:
    from torch._dynamo import guards

    timed = guards.profile_guard_manager
    guards.profile_guard_manager = lambda guard_manager, f_locals, n_iters: 0.0
    try:
        yield
    finally:
        guards.profile_guard_manager = timed


def forget_compilations(key: Hashable) -> None:
    """Forget what torch.compile has compiled in this process. Inside `keeping_compilations`, keep
    it if it was compiled for the same `key`.

    key  all that a compilation depends on and that torch's guards do not check, such as the device
         that fake tensors emulate. The guards check the code, the shapes and dtypes of tensors, and
         the values that the code reads
    """
    if not _COMPILATIONS.kept or key != _COMPILATIONS.key:
        torch.compiler.reset()
    _COMPILATIONS.key = key


def allow_compilations(more: int) -> None:
    """Let torch.compile compile each function `more` times more often in this process, before it gives up and runs
    the function uncompiled. All blocks of a class are one function."""
    config: Any = importlib.import_module("torch.compiler.config")
    config.recompile_limit += more
    config.accumulated_recompile_limit += more


class _GivenUp(logging.Filter):
    """Replaces torch's log messages that a function was compiled too often, by calls of `say`."""

    def __init__(self, say: Callable[[int, str], None]) -> None:
        super().__init__()
        self.say = say

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("torch._dynamo hit config.") or not isinstance(record.args, tuple):
            return True
        _, limit, function, *_ = record.args
        self.say(int(str(limit)), str(function))
        return False


def when_compiling_ends(say: Callable[[int, str], None]) -> None:
    """Call `say` (number of compilations, name and place of the function) each time that torch.compile gives up
    compiling a function, in place of torch's log message. Only the first call of this function has an effect."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(known, _GivenUp) for known in logger.filters):
        logger.addFilter(_GivenUp(say))


def may_be_dynamic(tensor: Tensor, dim: int) -> None:
    """Let compiled code accept any size of dimension `dim` of `tensor` without recompilation. If
    the code works for one size only, the mark has no effect."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def aot_backend(compile_graph: Callable[..., Any], decompositions: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a backend for torch.compile that differentiates graphs and divides them into forward
    and backward as inductor does.

    compile_graph   gets a forward or backward graph and example inputs, and returns a function that
                    runs the graph
    decompositions  operation -> a function that computes it with several simpler operations. The
                    graphs contain the simpler ones
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        decompositions=decompositions,
        partition_fn=min_cut_rematerialization_partition,
    )


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return inductor's table of decompositions: operation -> a function that computes it with
    several simpler operations."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_read_limits(device: str) -> tuple[int, int]:
    """Return (limit of a value that is used several times, limit of any other value): how many
    buffers inductor's code for this device reads at most to compute a value again where it is used.
    A value that needs more buffers is stored.

    device  the type of the device, such as "cpu" or "cuda". PyTorch 2.13 has a limit of its own for
            CPUs; 2.11 has the same one for all devices
    """
    from torch._inductor import config

    names = ["realize_acc_reads_threshold", "_realize_acc_reads_threshold_default"]  # None: the next one decides
    if device == "cpu":
        names.insert(1, "realize_cpu_acc_reads_threshold")
    limits = (getattr(config, name, None) for name in names)
    return config.realize_reads_threshold, next(limit for limit in limits if limit is not None)


def import_inductor_lowerings() -> None:
    """Import inductor's lowerings. Some of inductor's decompositions ask the lowerings which cases
    they support. If inductor itself does not run, nothing else imports them."""
    importlib.import_module("torch._inductor.lowering")


def rng_state_wrappers() -> tuple[Any, Any]:
    """Return the two operations with which torch's partitioner wraps an operation that draws random
    numbers. The first, in forward, also returns the state of the random number generator. The
    second, in backward, draws the same numbers from that state."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state


def takes_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a compiled function as one that takes its arguments as a single list, and return it. The
    function empties the list, so that its arguments can be freed early."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


__all__ = [
    "allow_compilations",
    "aot_backend",
    "forget_compilations",
    "import_inductor_lowerings",
    "inductor_decompositions",
    "inductor_read_limits",
    "is_compiler_error",
    "is_compiler_file",
    "keeping_compilations",
    "may_be_dynamic",
    "operation_error",
    "rng_state_wrappers",
    "takes_list",
    "when_compiling_ends",
]
