"""METHODS lists every technique once, in the order in which the techniques compose.

To estimate a plan, the planner calls each module's `cost` in this order. To construct a run, the
engine's `build` calls each module's `apply` in the same order. Both skip the methods that the plan
does not enable. The modules that create the model, the data and the optimizer are always enabled.

`tightfit.runtime.method` describes what each method module contains.
"""

from __future__ import annotations

from types import ModuleType

from tightfit.methods import (
    allocator,
    attention,
    compile,
    context_parallel,
    data_parallel,
    dropout,
    float8,
    loader,
    loss,
    master_weights,
    materialize,
    memory_format,
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
    allocator,         # first: it decides how all later memory is allocated
    materialize,       # creates the model in the weights' type; all methods below edit its modules
    loader,            # creates the data; methods below read its length and shapes
    microbatch,        # corrects BatchNorm's momentum on plain modules
    attention,         # set in the model's configuration, before anything wraps a block
    dropout,           # replaces dropout layers, before anything wraps a block
    memory_format,     # converts the inputs of convolutions, before anything wraps a block
    context_parallel,  # replaces attention; after the data, which it shards; before the loss
    float8,            # replaces linear layers while they are plain, before anything shards or wraps them
    tensor_parallel,   # shards modules, before anything wraps them
    loss,              # replaces the head's matrix product before anything wraps it
    recompute,         # wraps blocks; before compile, so that the recomputation is compiled too
    compile,           # compiles the loss and the recomputation; runs under autocast
    precision,         # puts autocast and loss scaling around the compiled function
    master_weights,    # sets the type of gradients, before the methods that hook gradients
    offload,           # wraps the forward, before the methods that shard the model
    pipeline,          # distributes the blocks that all methods above have changed
    data_parallel,     # hooks the gradients of the final parameters
    parameter_server,  # replaces data parallelism
    zero,              # hooks gradients, too, and shards the parameters that the optimizer gets
    optimizer_states,  # last: needs the final parameters, and the data's length for its schedule
)
# fmt: on
