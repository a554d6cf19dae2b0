"""Thin: of a deep model's blocks that are alike, all but the first two and the last are taken out before it is traced.

A trace would pass through them anyway; taken out, they need not be copied, cut or wrapped for each trace either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from tightfit.models import find_blocks
from tightfit.planner.passing import stand_ins

Value = TypeVar("Value")


@dataclass(frozen=True)
class Depth:
    """What a thinned model stands for: the names of all blocks, and by its number for each that was taken out the one that is
    there in its place."""

    names: tuple[str, ...] = ()
    missing: dict[int, int] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """Of the blocks that are there."""
        return [number for number in range(len(self.names)) if number not in self.missing]

    def whole(self, named: dict[str, Value], another: Callable[[Value, str, int], Value]) -> dict[str, Value]:
        """Of all blocks, in order, what is known by name of those that are there. another: makes of one's value, of the name and
        of the number of the block that it stands for, that block's."""
        if not self.missing:
            return named
        prefixes = {f"{self.names[number]}.": number for number in self.numbers}
        places = {name: next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None) for name in named}
        found: dict[str, Value] = {}
        reached = 0
        for name, value in named.items():
            here = places[name] or 0
            for number in range(reached, here):
                if number in self.missing:
                    like, path = self.missing[number], self.names[number]
                    for inner in (inner for inner in named if places[inner] == like):
                        full = path + inner.removeprefix(self.names[like])
                        found[full] = another(named[inner], full, number)
            reached = max(reached, here)
            found[name] = value
        return found


def thinned(model: nn.Module, name: str | None) -> Depth:
    """Take blocks out of one of transformers' models whose layers all do the same, where they lie in a ModuleList.

    name  the list that holds the blocks, None to find them
    """
    blocks = find_blocks(model, name)
    depth = Depth(tuple(path for path, _ in blocks))
    config = getattr(model, "config", None)
    configs = (config, *vars(config).values()) if config is not None else ()  # one of several models has theirs in it
    mixed = any(len(set(getattr(one, "layer_types", None) or ())) > 1 for one in configs)
    owned = [id(parameter) for _, block in blocks for parameter in block.parameters()]
    lists = [path.rpartition(".")[0] for path, _ in blocks]
    parents = {path: model.get_submodule(path) for path in dict.fromkeys(lists)}
    whole = all(isinstance(parent, nn.ModuleList) for parent in parents.values())
    if mixed or len(set(owned)) < len(owned) or not whole:
        return depth
    missing = stand_ins([block for _, block in blocks], lists)
    before = {path: dict(parent._modules) for path, parent in parents.items()}
    for number in missing:
        path, _, key = depth.names[number].rpartition(".")
        del parents[path]._modules[key]
    thin = Depth(depth.names, missing)
    if [path for path, _ in find_blocks(model, name)] == [thin.names[number] for number in thin.numbers]:
        return thin
    for path, parent in parents.items():  # what is left would be taken for something else
        parent._modules.clear()
        parent._modules.update(before[path])
    return depth


__all__ = ["Depth", "thinned"]
