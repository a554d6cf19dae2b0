"""METHODS: every technique once, in the order in which they compose. Build folds `apply` over it.

Each room has a card (its docstring), `wanted(plan)`, `apply(run, plan) -> run` and VARIANTS, the plan fields that turn
it on, which the contract tests try alone and in pairs. A method that a plan does not
want is absent, not disabled; the rooms that make what every run needs (a model, data, an optimizer) always take part.
"""

from __future__ import annotations

from types import ModuleType

from tightfit.methods import (
    allocator,
    attention,
    compile,
    context_parallel,
    data_parallel,
    float8,
    loader,
    loss,
    materialize,
    microbatch,
    offload,
    optimizer_states,
    parameter_server,
    pipeline,
    precision,
    recompute,
    tensor_parallel,
    zero,
)

# fmt: off
METHODS: tuple[ModuleType, ...] = (
    allocator,         # first: it decides how every later byte is allocated
    materialize,       # the model, in the precision its weights are kept in; all below edit its modules
    loader,            # the data; its length and shapes are asked for below
    microbatch,        # corrects BatchNorm on plain modules
    attention,         # chosen by the model's configuration, before anything wraps a block
    context_parallel,  # in its place; after the data and before the loss, which it cuts by positions
    tensor_parallel,   # cuts modules, before anything wraps or replaces them
    float8,            # replaces linear layers while they are plain, before anything wraps a block
    loss,              # swaps the head's product before anything wraps it
    recompute,         # wraps blocks; before compile, so that the recomputation is compiled too
    compile,           # sees the loss and the recomputation, and is entered under autocast
    precision,         # around the compiled function: autocast and loss scaling
    offload,           # around the forward, before what divides it
    pipeline,          # divides the blocks that all above has changed
    data_parallel,     # watches the gradients of the final parameters
    parameter_server,  # in its place
    zero,              # the same, and divides what the optimizer will hold
    optimizer_states,  # last: needs the final parameters, and the data's length for its schedule
)
# fmt: on
