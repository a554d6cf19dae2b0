"""What a plan needs to know about fully_shard (FSDP2), without importing it.

The methods and the planner read from here which parameters are gathered, in which dtype, and how
many bytes that takes. `fully_shard.py` shards the model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from tightfit._torch.modules import Convolution
from tightfit.cost.entries import Parameter, ShardedParameters
from tightfit.cost.ledger import Ledger
from tightfit.errors import InputError
from tightfit.models import find_blocks
from tightfit.plan import Plan
from tightfit.runtime.run import Run


def low_precision_names(ledger: Ledger) -> set[str]:
    """Names of the parameters that are gathered in a narrower dtype than they are stored in, with *
    for a block's number. In the recorded step, their gradients have fewer bytes than they have.
    """
    kept = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        _wildcard_name(buffer.parameter)
        for segment in ledger.training
        for buffer in segment.timeline.allocated
        if buffer.row == "gradients" and buffer.size.fixed < kept.get(buffer.parameter, 0)
    }


def _wildcard_name(name: str) -> str:
    """A parameter's name with * for the numbers of blocks, as "blocks.*.weight"."""
    return re.sub(r"\.\d+\.", ".*.", name)


def gathered_bytes(parameter: Parameter, narrow: set[str]) -> float:
    """Bytes of a full parameter when it is gathered. `narrow`: see `low_precision_names`."""
    return parameter.bytes / 2 if _wildcard_name(parameter.name) in narrow else parameter.bytes


def sharded_parameters(ledger: Ledger, plan: Plan, narrow: set[str]) -> ShardedParameters:
    """The entry of sharded parameters in the ledger: bytes of the largest block, and of the
    parameters outside of blocks. A parameter's block is recognized by the number in its name.
    """
    blocks: Counter[str] = Counter()
    reduced: Counter[str] = Counter()
    rest = 0.0
    for parameter in ledger.parameters:
        found = re.match(r"(.*?\.\d+)\.", parameter.name)
        if found is None:
            rest += parameter.bytes
        else:
            blocks[found.group(1)] += math.ceil(gathered_bytes(parameter, narrow))
            reduced[found.group(1)] += parameter.bytes
    # 1/devices of a gradient stays on this device
    devices = math.inf if "gradients" in plan.offload else plan.shards
    block = float(max(blocks.values(), default=0))
    as_kept = float(max(reduced.values(), default=0))
    # then blocks are copied in their stored dtype, and prefetched in forward too
    alone = plan.shards == 1
    return ShardedParameters(devices, block, rest, as_kept, as_kept if alone else block, alone)


def uses_fully_shard(plan: Plan, kind: str) -> bool:
    """Whether parameters are on a device of this kind ("cpu" or "cuda") only while their block
    computes. A CPU computes with offloaded parameters where they are mapped, so it needs no copy of
    them.
    """
    return plan.zero == 3 or (kind == "cuda" and "parameters" in plan.offload)


def check_shardable(described: Iterable[tuple[str, int, tuple[int, ...]]], blocks: int, plan: Plan) -> None:
    """Raise InputError for parameters that fully_shard cannot shard along dimension 0, or cannot
    gather for one block at a time.

    described  (name, number of dimensions, positions of the modules that use it: see
               `parameter_uses`) of each parameter
    blocks     the number of blocks
    """
    asked, fix = (
        ("plan: zero=3", "use zero: 2") if plan.zero == 3 else ("plan: offload=parameters", "leave them out of it")
    )
    for name, dims, places in described:
        if dims == 0:
            raise InputError(asked, f"{name} is a single number, without rows", f"make it torch.ones(1), say, or {fix}")
        if len(places) > 1 and any(0 <= place < blocks for place in places):
            raise InputError(asked, f"{name} is used by several blocks, of which one is there at a time", fix)


def model_blocks(run: Run) -> list[nn.Module]:
    """The model's blocks, or in a pipeline those of this device's stages."""
    return list(run.blocks or [block for _, block in find_blocks(run.model, run.job.blocks_name)])


def gather_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype in which weights of matrix products are gathered: in mixed precision the 16-bit
    one. None: the parameters' own.
    """
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(plan.precision)


def split_by_autocast(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules of a block with parameters of their own: those whose weights autocast converts
    (linear and convolution), and the others.
    """
    own = [module for module in block.modules() if next(module.parameters(recurse=False), None) is not None]
    kinds = (nn.Linear, Convolution)
    products = [module for module in own if isinstance(module, kinds) or type(module).__name__ == "Conv1D"]
    return products, [module for module in own if module not in products]


__all__ = [
    "check_shardable",
    "gather_dtype",
    "gathered_bytes",
    "low_precision_names",
    "model_blocks",
    "sharded_parameters",
    "split_by_autocast",
    "uses_fully_shard",
]
