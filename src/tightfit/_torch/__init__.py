"""Every private name of torch that tightfit uses.

A private name is one that torch may change without notice: a module, function, class or attribute
that starts with an underscore, and the members of private classes. No other package of tightfit
uses one. `tests/test_torch_names.py` checks that.

names          a table of all of them: what each is used for, and what would replace it
fake           fake tensors, which have shapes and no values
dispatch       dispatch modes, which see each operation, and torch's dispatcher
pytree         the leaves of nested containers
operations     operations without a public name, and what is known of an operation
tensors        storages, version counters, hooks and the autograd graph of tensors
modules        the dicts of an nn.Module, and base classes of layers
compiler       torch.compile's errors and what a backend is made of
devices        CUDA's allocator and spin kernel, the choice of an attention kernel
distributed    process groups and DTensor
fsdp           fully_shard (FSDP2)
patches        functions of torch that are replaced for a while
loggers        names of torch's loggers

`compiler` imports torch's compiler only when its functions are called, and `distributed` the fake
process group. `fsdp` is imported by `parallel/fsdp` alone. `names` and `loggers` import no torch.
"""
