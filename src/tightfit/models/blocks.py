"""Finds a model's blocks: the repeated modules that hold most of its parameters, such as
transformer blocks.

Pipeline stages, recompute, FSDP units and per-block compilation all work on these blocks. This
module finds them in any nn.Module, unless the user names them (`model.blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tightfit.errors import InputError
from tightfit.values import nearest

if TYPE_CHECKING:
    from torch import nn

    Named = list[tuple[str, nn.Module]]

# Repeated modules of one class are blocks only if they have at least this share of the parameters
# of all repeated modules.
MIN_BLOCK_SHARE = 0.1


def find_blocks(model: nn.Module, name: str | None = None) -> Named:
    """Return the model's repeated blocks as (full name, module), in order of definition. The list
    is empty if no module repeats.

    name  the full name of the list that contains the blocks, such as "model.layers", or several
          names separated by commas. None searches for the blocks

    The search takes the members of the outermost lists (ModuleList, Sequential, ModuleDict; an
    encoder-decoder has several lists). If the model has no such list, it takes sibling modules of
    one class, provided that these hold more than half of the model's parameters. A single torch
    layer such as nn.Linear is not a block. Modules of a class with less than a tenth of all found
    parameters are left out.

    Example: a GPT-2 of 12 layers gives ("transformer.h.0", GPT2Block) to ("transformer.h.11",
    GPT2Block).

    Raises InputError if the model has no module `name`, or if that module contains no modules.
    """
    if name:
        return [block for part in name.split(",") for block in _members_of(model, part.strip())]
    found = _repeated(model, "", _members)
    if not found:
        siblings = _repeated(model, "", _siblings)
        found = siblings if 2 * sum(_parameter_count(block) for _, block in siblings) > _parameter_count(model) else []
    sizes: Counter[type] = Counter()
    for _, block in found:
        sizes[type(block)] += _parameter_count(block)
    return [(path, block) for path, block in found if sizes[type(block)] >= MIN_BLOCK_SHARE * sizes.total()]


def parameter_uses(model: nn.Module, blocks: Named) -> dict[str, tuple[int, ...]]:
    """Return {name of a parameter: the numbers of the blocks that use it}. The number -1 means
    before the first block, len(blocks) means after the last one.

    blocks: the model's blocks as (full name, module)

    A tied parameter has several names. It is listed under the first of them, with the blocks of all
    of them. A parameter outside of the blocks counts as used before the blocks if it is defined
    before them, else as used after them. A parameter that belongs directly to a module which
    contains the blocks counts as both.

    Example: a GPT-2 of 12 blocks with a tied embedding gives {"transformer.wte.weight": (-1, 12),
    "transformer.h.0.ln_1.weight": (0,), ..., "transformer.ln_f.weight": (12,)}.
    """
    names = {f"{name}.": number for number, (name, _) in enumerate(blocks)}
    above = {name[:cut] for name, _ in blocks for cut in (0, *(p for p, letter in enumerate(name) if letter == "."))}
    found: dict[int, set[int]] = {}
    first: dict[int, str] = {}
    begun = False
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        uses = found.setdefault(id(parameter), set())
        inside = [number for prefix, number in names.items() if name.startswith(prefix)]
        begun = begun or bool(inside)
        if inside:
            uses.update(inside)
        elif name.rpartition(".")[0] in above:
            uses.update((-1, len(blocks)))
        else:
            uses.add(len(blocks) if begun else -1)
    return {name: tuple(sorted(found[key])) for key, name in first.items()}


def _members_of(model: nn.Module, name: str) -> Named:
    """Return the members of the list `name`, which the user named, as (full name, module). Raises
    InputError if the model has no module of this name, or if it has no members."""
    modules = dict(model.named_modules())
    if name not in modules:
        lists = [path for path, module in modules.items() if path and _is_list(module)]
        raise InputError(
            f"job: model.blocks={name}", "the model has no such module", nearest(name, lists or list(modules)[1:])
        )
    blocks = [(f"{name}.{child}", module) for child, module in modules[name].named_children()]
    if not blocks:
        raise InputError(f"job: model.blocks={name}", "holds no modules", "name the list that holds the blocks")
    return blocks


def _repeated(parent: nn.Module, path: str, members: Callable[[nn.Module], list[nn.Module]]) -> Named:
    """Search the modules below `parent` for blocks, and return them as (full name, module). Modules
    inside a block are not searched.

    path     the full name of `parent`; "" if it is the model itself
    members  returns those children of a module that are blocks
    """
    taken = members(parent)
    found: Named = []
    for name, child in parent.named_children():
        full = f"{path}.{name}" if path else name
        found += [(full, child)] if child in taken else _repeated(child, full, members)
    return found


def _members(parent: nn.Module) -> list[nn.Module]:
    """Return the members of a list of modules that are blocks: in a ModuleList all members that
    `_is_block` accepts, in a Sequential or ModuleDict only those whose class occurs twice or more.
    Return [] if `parent` is none of these lists."""
    from torch import nn

    if not _is_list(parent):
        return []
    blocks = [child for child in parent.children() if _is_block(child)]
    return blocks if isinstance(parent, nn.ModuleList) else _of_repeated_class(blocks)


def _siblings(parent: nn.Module) -> list[nn.Module]:
    return _of_repeated_class([child for child in parent.children() if _is_block(child)])


def _of_repeated_class(modules: list[nn.Module]) -> list[nn.Module]:
    count = Counter(type(module) for module in modules)
    return [module for module in modules if count[type(module)] > 1]


def _is_list(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module can be a block: it has parameters, can be called, and is not a single
    torch layer such as nn.Linear."""
    from torch import nn

    layer = type(module).__module__.startswith("torch.nn") and not any(True for _ in module.children())
    return not layer and not isinstance(module, nn.ModuleList | nn.ModuleDict) and _parameter_count(module) > 0


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, the linear layer of GPT-2, also if it
    multiplies in float8. Its weight has shape (input features, output features)."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
