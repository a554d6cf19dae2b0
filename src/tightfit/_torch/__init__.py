"""Every private name of torch that tightfit uses.

A private name is one that torch may change without notice: a module, function, class or attribute
that starts with an underscore, and the members of private classes. Only this package uses private
names, and `tests/test_torch_names.py` checks that.

names        a table of all of them: what each is used for, and what would replace it
fake         fake tensors, which have shapes and no values
dispatch     dispatch modes, which see each operation, and torch's dispatcher
pytree       the leaves of nested containers
operations   operations without a public name, and the schema of an operation
tensors      storages, version counters, hooks and the autograd graph of tensors
modules      the dicts of an nn.Module, and base classes of layers
compiler     errors of torch.compile, and the parts that a backend for it consists of
devices      CUDA's allocator, a kernel that keeps a GPU busy, the choice of an attention kernel
distributed  process groups and DTensor
fsdp         fully_shard (FSDP2)
patches      context managers that replace a function of torch for a while
loggers      names of torch's loggers

`compiler` imports torch's compiler only when its functions are called, and so does `distributed`
with the fake process group. Only `parallel/fsdp` imports `fsdp`. `names` and `loggers` do not
import torch.
"""
