"""Remove repeated blocks from a model before it is traced, and from a ledger.

A trace skips repeated blocks anyway (see `skipped_layers`). Removing them before also saves
copying, sharding and wrapping them for every trace. Of each kind of block, the first two and the
last stay.

Example: a transformers model with 32 equal layers is created with layers 0, 1 and 31. `LayerMap`
then has 32 names, and `removed` maps each of the layers 2 to 30 to layer 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from tightfit._torch.modules import own_children
from tightfit.cost.entries import EVERYWHERE, Parameter
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Segment
from tightfit.job import ModelSpec
from tightfit.models import find_blocks, model_config, with_fewer_blocks
from tightfit.planner.tracing.skipped_layers import representatives

FEW_BLOCKS = 4  # blocks that show whether all are equal: then the third one is removed

Value = TypeVar("Value")


@dataclass(frozen=True)
class LayerMap:
    """Maps a model without its repeated blocks to its full depth.

    names    of all blocks, in order, removed ones included
    removed  number of each removed block -> number of the block that it repeats
    """

    names: tuple[str, ...] = ()
    removed: dict[int, int] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the blocks that are left, in order."""
        return [number for number in range(len(self.names)) if number not in self.removed]

    def expand(self, named: dict[str, Value], another: Callable[[Value, str, int], Value]) -> dict[str, Value]:
        """Expand values by name (parameters, updates) to the full depth, in the order of the full
        model.

        named    values of the blocks that are left, and of the rest of the model, by dotted name
        another  (value, new name, number of the removed block) -> the value for the removed block

        Example: "layers.1.weight" also gives the values of "layers.2.weight" to "layers.30.weight".
        """
        if not self.removed:
            return named
        prefixes = {f"{self.names[number]}.": number for number in self.numbers}
        places = {name: next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None) for name in named}
        found: dict[str, Value] = {}
        reached = 0
        for name, value in named.items():
            here = places[name] or 0
            for number in range(reached, here):
                if number in self.removed:
                    like, path = self.removed[number], self.names[number]
                    for inner in (inner for inner in named if places[inner] == like):
                        full = path + inner.removeprefix(self.names[like])
                        found[full] = another(named[inner], full, number)
            reached = max(reached, here)
            found[name] = value
        return found


def remove_repeated_layers(model: nn.Module, name: str | None) -> LayerMap:
    """Remove the repeated blocks of a transformers model, in place.

    Removes nothing if layers have different types, share parameters, or are not in a ModuleList.

    name  the list that holds the blocks; None to find it
    """
    blocks = find_blocks(model, name)
    depth = LayerMap(tuple(path for path, _ in blocks))
    config = getattr(model, "config", None)
    configs = (config, *vars(config).values()) if config is not None else ()  # sub-models have their own
    mixed = any(len(set(getattr(one, "layer_types", None) or ())) > 1 for one in configs)
    owned = [id(parameter) for _, block in blocks for parameter in block.parameters()]
    lists = [path.rpartition(".")[0] for path, _ in blocks]
    parents = {path: model.get_submodule(path) for path in dict.fromkeys(lists)}
    whole = all(isinstance(parent, nn.ModuleList) for parent in parents.values())
    if mixed or len(set(owned)) < len(owned) or not whole:
        return depth
    missing = representatives([block for _, block in blocks], lists)
    before = {path: dict(own_children(parent)) for path, parent in parents.items()}
    for number in missing:
        path, _, key = depth.names[number].rpartition(".")
        del own_children(parents[path])[key]
    thin = LayerMap(depth.names, missing)
    if [path for path, _ in find_blocks(model, name)] == [thin.names[number] for number in thin.numbers]:
        return thin
    for path, parent in parents.items():  # the remaining blocks are not recognised: restore
        own_children(parent).clear()
        own_children(parent).update(before[path])
    return depth


def created(spec: ModelSpec, create: Callable[[ModelSpec], nn.Module], whole: bool) -> tuple[nn.Module, LayerMap]:
    """Create a transformers model without its repeated blocks, and the map to its full depth.

    If the configuration states the number of blocks and all are equal, the repeated blocks are
    never created.

    create  creates a model from its spec
    whole   keep all blocks
    """
    few = None if whole else with_fewer_blocks(spec, FEW_BLOCKS)
    if few is not None:
        model = create(few)
        depth = _stand_for_full_depth(model, spec.blocks, model_config(spec).num_hidden_layers)
        if depth is not None:
            return model, depth
    model = create(spec)
    names = tuple(path for path, _ in find_blocks(model, spec.blocks))
    return model, LayerMap(names) if whole else remove_repeated_layers(model, spec.blocks)


def _stand_for_full_depth(model: nn.Module, name: str | None, count: int) -> LayerMap | None:
    """Map a model that was created with FEW_BLOCKS blocks to the full depth of `count` blocks.
    Returns None if it has other blocks too, or if its blocks differ."""
    few = remove_repeated_layers(model, name)
    lists = {path.rpartition(".")[0] for path in few.names}
    if len(few.names) != FEW_BLOCKS or len(few.removed) != FEW_BLOCKS - 3 or len(lists) != 1:
        return None
    (path,) = lists
    blocks = own_children(model.get_submodule(path))
    blocks[str(count - 1)] = blocks.pop(str(FEW_BLOCKS - 1))
    depth = LayerMap(tuple(f"{path}.{number}" for number in range(count)), dict.fromkeys(range(2, count - 1), 1))
    there = [depth.names[number] for number in depth.numbers]
    return depth if [found for found, _ in find_blocks(model, name)] == there else None


def with_depth(ledger: Ledger, count: int) -> Ledger:
    """The base ledger of the model with only `count` blocks (at least 2): the first ones and the
    last."""
    removed = range(count - 1, ledger.blocks - 1)

    def remains(parameter: Parameter) -> bool:
        return not parameter.places or any(place not in removed for place in parameter.places)

    def renumbered(place: int) -> int:
        return place - len(removed) if place >= removed.stop else place

    segments: list[Segment] = []
    here: int | None = None  # the last block so far: the segments after it are removed with it
    for segment in ledger.training:
        here = segment.block if segment.block is not None else here
        if here not in removed:
            segments.append(replace(segment, block=None if segment.block is None else renumbered(segment.block)))
    parameters = [
        parameter
        if parameter.places == EVERYWHERE
        else replace(parameter, places=tuple(map(renumbered, parameter.places)))
        for parameter in ledger.parameters
        if remains(parameter)
    ]
    names = {parameter.name for parameter in parameters}
    return replace(
        ledger,
        training=tuple(segments),
        parameters=tuple(parameters),
        updates={name: update for name, update in ledger.updates.items() if name in names},
        blocks=count,
    )


__all__ = ["LayerMap", "created", "remove_repeated_layers", "with_depth"]
