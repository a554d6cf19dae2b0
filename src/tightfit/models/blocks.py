"""Blocks: the repeated modules that hold most of a model, found in any nn.Module or named by the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tightfit.errors import InputError
from tightfit.values import nearest

if TYPE_CHECKING:
    from torch import nn

    Named = list[tuple[str, nn.Module]]

MINOR_SHARE = 0.1  # repetitions of a class that hold less of the repeated parameters are not what the model is made of


def find_blocks(model: nn.Module, name: str | None = None) -> Named:
    """The model's repeated blocks with their full names, in order of definition; empty if nothing repeats.

    name  the list that holds them, such as "model.layers"; several are separated by commas

    Found by themselves, blocks are the members of the outermost lists (ModuleList, Sequential, ModuleDict; several, as
    in an encoder-decoder), or where there is none, the siblings of one class that hold most of the parameters. A lone
    layer such as nn.Linear is no block. Raises InputError if there is no module `name`, or nothing in it.
    """
    if name:
        return [block for part in name.split(",") for block in _named(model, part.strip())]
    found = _repeated(model, "", _members)
    if not found:
        siblings = _repeated(model, "", _siblings)
        found = siblings if 2 * sum(_size(block) for _, block in siblings) > _size(model) else []
    sizes: Counter[type] = Counter()
    for _, block in found:
        sizes[type(block)] += _size(block)
    return [(path, block) for path, block in found if sizes[type(block)] >= MINOR_SHARE * sizes.total()]


def places_of(model: nn.Module, blocks: Named) -> dict[str, tuple[int, ...]]:
    """Where each of the model's parameters is used: the numbers of blocks, -1 for before them, their count for after.

    By the first name of each; one that is known by several names (tied) is used at each of them. What is in no block counts
    as before or after by where it is defined; what a module holds itself that has the blocks in it, as both.
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


def _named(model: nn.Module, name: str) -> Named:
    """The members of the list that the user named."""
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
    """The outermost repetitions below `parent`: what `members` takes is not searched further."""
    taken = members(parent)
    found: Named = []
    for name, child in parent.named_children():
        full = f"{path}.{name}" if path else name
        found += [(full, child)] if child in taken else _repeated(child, full, members)
    return found


def _members(parent: nn.Module) -> list[nn.Module]:
    """The blocks of a list: all of a ModuleList, whatever its length; of other lists those whose class repeats."""
    from torch import nn

    if not _is_list(parent):
        return []
    blocks = [child for child in parent.children() if _is_block(child)]
    return blocks if isinstance(parent, nn.ModuleList) else _alike(blocks)


def _siblings(parent: nn.Module) -> list[nn.Module]:
    return _alike([child for child in parent.children() if _is_block(child)])


def _alike(modules: list[nn.Module]) -> list[nn.Module]:
    count = Counter(type(module) for module in modules)
    return [module for module in modules if count[type(module)] > 1]


def _is_list(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _is_block(module: nn.Module) -> bool:
    """Whether it has parameters, can be called, and is more than one of torch's own layers."""
    from torch import nn

    layer = type(module).__module__.startswith("torch.nn") and not any(True for _ in module.children())
    return not layer and not isinstance(module, nn.ModuleList | nn.ModuleDict) and _size(module) > 0


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
