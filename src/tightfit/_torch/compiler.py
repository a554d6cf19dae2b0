"""torch.compile: its errors, marks on its inputs, and what a backend is made of.

The functions import torch's compiler when they are called: the import takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile itself raised an error."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def is_compiler_file(path: str) -> bool:
    """Whether a source file belongs to the parts of the compiler that raise errors of any class."""
    return "_functorch/_aot_autograd" in path or "/_inductor/" in path


def may_be_dynamic(tensor: Tensor, dim: int) -> None:
    """Let compiled code take any size of a dimension, unless it is made for one size only."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def aot_backend(compile_graph: Callable[..., Any], decompositions: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """A backend for torch.compile that differentiates and partitions graphs as inductor does.

    compile_graph   makes a function of a forward or a backward graph
    decompositions  operations that are traced as several simpler ones
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
    """The operations that inductor traces as several simpler ones."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def import_inductor_lowerings() -> None:
    """Import inductor's lowerings. Some of its decompositions ask them what they support, and only
    inductor itself would import them."""
    importlib.import_module("torch._inductor.lowering")


def rng_state_wrappers() -> tuple[Any, Any]:
    """The operations around one that draws random numbers: in forward, they also return the
    generator's state; in backward, they draw from that state."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state


def takes_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a compiled function: it takes its arguments as one list, and empties the list so that
    they can be freed early."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


__all__ = [
    "aot_backend",
    "import_inductor_lowerings",
    "inductor_decompositions",
    "is_compiler_error",
    "is_compiler_file",
    "may_be_dynamic",
    "rng_state_wrappers",
    "takes_list",
]
