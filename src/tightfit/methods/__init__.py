"""METHODS lists every technique once, in the order in which the techniques compose.

The planner runs `cost` of each module in this order to estimate a plan. The engine's build runs
`apply` in the same order to construct the run.

Each method module has a docstring, `enabled(plan)`, `apply(run, plan) -> run` and VARIANTS: the
plan fields that turn it on, which the contract tests try alone and in pairs. A method that a plan
does not enable is absent from the run, not merely switched off. Modules that create what every run
needs (a model, data, an optimizer) are always enabled.
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
    materialize,       # creates the model in its weights' precision; all methods below edit its modules
    loader,            # creates the data; methods below read its length and shapes
    microbatch,        # corrects BatchNorm's momentum on plain modules
    attention,         # set in the model's configuration, before anything wraps a block
    context_parallel,  # replaces attention; after the data, which it shards by positions, and before the loss
    tensor_parallel,   # shards modules, before anything wraps or replaces them
    float8,            # replaces linear layers while they are plain, before anything wraps a block
    loss,              # replaces the head's matrix product before anything wraps it
    recompute,         # wraps blocks; before compile, so that the recomputation is compiled too
    compile,           # compiles the loss and the recomputation; runs under autocast
    precision,         # around the compiled function: autocast and loss scaling
    offload,           # wraps the forward, before the methods that shard the model
    pipeline,          # distributes the blocks that all methods above have changed
    data_parallel,     # hooks the gradients of the final parameters
    parameter_server,  # takes the place of data parallelism
    zero,              # hooks gradients too, and shards what the optimizer will hold
    optimizer_states,  # last: needs the final parameters, and the data's length for its schedule
)
# fmt: on
