"""Thin: a deep model without most of its blocks that are alike, before it is traced, and a ledger of such a model.

A trace would pass through them anyway; taken out, they need not be copied, cut or wrapped for each trace either. All but the
first two and the last are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from tightfit.entries import EVERYWHERE, Parameter
from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.models import find_blocks, model_config, shallow
from tightfit.planner.passing import stand_ins
from tightfit.program import Passage

SHALLOW = 4  # blocks that tell whether all are alike: of these, too, one is taken out

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


def created(spec: ModelSpec, create: Callable[[ModelSpec], nn.Module], whole: bool) -> tuple[nn.Module, Depth]:
    """One of transformers' models and what it stands for: thin, unless `whole`. Where its configuration says how many blocks it
    has, and all are alike, the others are not even made."""
    few = None if whole else shallow(spec, SHALLOW)
    if few is not None:
        model = create(few)
        depth = _stretched(model, spec.blocks, model_config(spec).num_hidden_layers)
        if depth is not None:
            return model, depth
    model = create(spec)
    names = tuple(path for path, _ in find_blocks(model, spec.blocks))
    return model, Depth(names) if whole else thinned(model, spec.blocks)


def _stretched(model: nn.Module, name: str | None, count: int) -> Depth | None:
    """Thin a model that was created with SHALLOW blocks in place of `count`, and let it stand for one with so many; None where
    these are not all of its blocks, or not alike."""
    few = thinned(model, name)
    lists = {path.rpartition(".")[0] for path in few.names}
    if len(few.names) != SHALLOW or len(few.missing) != SHALLOW - 3 or len(lists) != 1:
        return None
    (path,) = lists
    blocks = model.get_submodule(path)._modules
    blocks[str(count - 1)] = blocks.pop(str(SHALLOW - 1))
    depth = Depth(tuple(f"{path}.{number}" for number in range(count)), dict.fromkeys(range(2, count - 1), 1))
    there = [depth.names[number] for number in depth.numbers]
    return depth if [found for found, _ in find_blocks(model, name)] == there else None


def with_blocks(ledger: Ledger, count: int) -> Ledger:
    """The first ledger of a model with only `count` of its blocks, at least 2: the first ones and the last."""
    gone = range(count - 1, ledger.blocks - 1)

    def kept(parameter: Parameter) -> bool:
        return not parameter.places or any(place not in gone for place in parameter.places)

    def moved(place: int) -> int:
        return place - len(gone) if place >= gone.stop else place

    passages: list[Passage] = []
    here: int | None = None  # the block that was passed last: what lies behind it goes with it
    for passage in ledger.training:
        here = passage.block if passage.block is not None else here
        if here not in gone:
            passages.append(replace(passage, block=None if passage.block is None else moved(passage.block)))
    parameters = [
        parameter if parameter.places == EVERYWHERE else replace(parameter, places=tuple(map(moved, parameter.places)))
        for parameter in ledger.parameters
        if kept(parameter)
    ]
    names = {parameter.name for parameter in parameters}
    return replace(
        ledger,
        training=tuple(passages),
        parameters=tuple(parameters),
        updates={name: update for name, update in ledger.updates.items() if name in names},
        blocks=count,
    )


__all__ = ["Depth", "created", "thinned", "with_blocks"]
