"""Tell the planner about fully_shard (FSDP2): which parameters are gathered, in which dtype, and
how many bytes that takes.

The methods and the planner use this module, which does not import fully_shard. `fully_shard.py`
shards the model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tightfit._torch.modules import Convolution
from tightfit.cost.entries import Parameter, ShardedParameters
from tightfit.cost.ledger import Ledger
from tightfit.errors import InputError
from tightfit.models import find_blocks
from tightfit.models.blocks import is_conv1d
from tightfit.models.dataflow import describe_line, innermost_model_line
from tightfit.plan import Plan
from tightfit.runtime.run import Run

BLOCK_NAME = r"(.*?\.\d+)\."  # matches the name of a block's parameter; group 1 is the block's name


def low_precision_names(ledger: Ledger) -> set[str]:
    """Return the names of the parameters that are gathered in a narrower dtype than they are stored
    in. In a name, * replaces the block's number.

    A parameter is one of them if its gradient in the recorded step has fewer bytes than the
    parameter itself. Example: {"blocks.*.attn.weight"}, if that weight is stored in fp32 and
    autocast computes with it in bf16.
    """
    stored = {parameter.name: parameter.bytes for parameter in ledger.parameters}
    return {
        _wildcard_name(buffer.parameter)
        for segment in ledger.training
        for buffer in segment.timeline.allocated
        if buffer.row == "gradients" and buffer.size.fixed < stored.get(buffer.parameter, 0)
    }


def _wildcard_name(name: str) -> str:
    """Return a parameter's name with * in place of each number: "blocks.3.weight" gives
    "blocks.*.weight".
    """
    return re.sub(r"\.\d+\.", ".*.", name)


def gathered_bytes(parameter: Parameter, narrow: set[str]) -> float:
    """Return the number of bytes of a full parameter in the dtype in which it is gathered.

    narrow  names of the parameters that are gathered in half their stored size, with * in place of
            the block's number (from `low_precision_names`)
    """
    return parameter.bytes / 2 if _wildcard_name(parameter.name) in narrow else parameter.bytes


def least_unsharded_bytes(parameters: Iterable[Parameter], plan: Plan) -> float:
    """Return a lower bound on the unsharded bytes of ZeRO-3 during the backward of the largest block,
    whatever the micro-batch. Return 0 for a model of fewer than two blocks.

    The bytes are those of

    - this block's parameters and gradients,
    - the next block's parameters, which are prefetched: at least those of the smallest block,
    - the previous block's gradients, which are being reduced: at least those of the smallest block,
    - the parameters outside of blocks.

    In mixed precision, all matrices are taken to be gathered in 16 bits.
    """
    gathered: Counter[str] = Counter()  # by block
    with_gradients: Counter[str] = Counter()
    reduced: Counter[str] = Counter()
    rest = 0.0
    halved = gather_dtype(plan) is not None
    for parameter in parameters:
        if parameter.buffer:
            continue
        found = re.match(BLOCK_NAME, parameter.name)
        if found is None:
            rest += parameter.bytes
            continue
        size = parameter.bytes / 2 if halved and len(parameter.shape) > 1 else parameter.bytes
        block = found.group(1)
        gathered[block] += math.ceil(size)
        with_gradients[block] += math.ceil(2 * size if parameter.trainable else size)
        reduced[block] += parameter.gradient_bytes if parameter.trainable else 0
    if len(gathered) < 2:
        return 0.0
    return max(with_gradients.values()) + min(gathered.values()) + min(reduced.values()) + rest


def sharded_parameters(ledger: Ledger, plan: Plan, narrow: set[str]) -> ShardedParameters:
    """Return the ledger's entry for sharded parameters: the bytes of the largest block, and the
    bytes of all parameters outside of blocks.

    A parameter belongs to a block if its name has a number: "blocks.3.weight" is in block 3.

    narrow  names of the parameters that are gathered in half their stored size, with * in place of
            the block's number (from `low_precision_names`)
    """
    blocks: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    reduced: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    rest = rest_sums = 0.0
    for parameter in ledger.parameters:
        if parameter.buffer:
            continue
        match = re.match(BLOCK_NAME, parameter.name)
        if match is None:
            rest += parameter.bytes
            rest_sums += max(4 * parameter.count, parameter.bytes)
        else:
            blocks[match.group(1)] += math.ceil(gathered_bytes(parameter, narrow))
            stored[match.group(1)] += parameter.bytes
            reduced[match.group(1)] += parameter.gradient_bytes
            sums[match.group(1)] += max(4 * parameter.count, parameter.bytes)
    # after the reduce-scatter, 1/devices of each gradient stays on this device
    devices = math.inf if "gradients" in plan.offload else plan.shards
    block = float(max(blocks.values(), default=0))
    as_stored = float(max(stored.values(), default=0))
    as_reduced = float(max(reduced.values(), default=0))
    # with one shard, blocks are copied from host memory in their stored dtype, and prefetched in
    # forward, too
    alone = plan.shards == 1
    return ShardedParameters(
        devices,
        block,
        rest,
        as_reduced,
        as_stored if alone else block,
        alone,
        plan.gradient_sync == "micro-batch",
        max(sums.values(), default=0) / block if block else 1.0,
        rest_sums / rest if rest else 1.0,
    )


def uses_fully_shard(plan: Plan, kind: str) -> bool:
    """Return whether the plan uses fully_shard, so that a block's parameters are gathered only
    while the block runs.

    It does with ZeRO-3, and with offloaded parameters on a GPU. A CPU needs no gather for offloaded
    parameters, because it computes directly with memory-mapped files.

    kind  the kind of device: "cpu" or "cuda"
    """
    return plan.zero == 3 or (kind == "cuda" and "parameters" in plan.offload)


@contextmanager
def naming_sharded_use(plan: Plan) -> Iterator[None]:
    """A context that turns some obscure errors of torch about sharded parameters into an InputError
    that says what the model does. Use it around a forward and a backward. Other errors are not
    changed.

    fully_shard gathers a layer's parameters only while the layer is called, so a model cannot use
    them otherwise, and a block cannot write to its input.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        asked = "plan: zero=3" if plan.zero == 3 else "plan: offload=parameters"
        if "mixed torch.Tensor and DTensor" in message or "does not have a sharding strategy" in message:
            line = innermost_model_line(error)
            fix = "use zero: 2, or let the model call the layer"
            if plan.recompute != "none":
                fix += "; if a block keeps a tensor as an attribute that the model reads, use recompute: none, or return the tensor"
            raise InputError(
                asked,
                f"{describe_line(line) if line else 'the model'} uses a layer's parameters without calling the layer, and they "
                "are gathered only while the layer is called",
                fix,
            ) from error
        if "RegisterPostBackwardFunction" in message and "modified inplace" in message:
            raise InputError(
                asked,
                "a block writes to its input in place, which is not possible with sharded parameters",
                "use zero: 2, or let the block write to a new tensor",
            ) from error
        raise


def check_shardable(described: Iterable[tuple[str, int, tuple[int, ...]]], blocks: int, plan: Plan) -> None:
    """Raise InputError if there is a parameter that fully_shard cannot shard: one without
    dimensions, or one that several blocks use.

    described  for each parameter, (name, number of dimensions, numbers of the blocks that use it).
               A number below 0 or of at least `blocks` means code before or after the blocks
    blocks     the number of blocks
    plan       the plan, which the error names
    """
    asked, fix = (
        ("plan: zero=3", "use zero: 2")
        if plan.zero == 3
        else ("plan: offload=parameters", "leave parameters out of offload")
    )
    for name, dims, block_numbers in described:
        if dims == 0:
            raise InputError(
                asked, f"{name} is a single number, which cannot be sharded", f"give it the shape (1,), or {fix}"
            )
        if len(block_numbers) > 1 and any(0 <= number < blocks for number in block_numbers):
            raise InputError(asked, f"{name} is used by several blocks, and is gathered for one block at a time", fix)


def model_blocks(run: Run) -> list[nn.Module]:
    """Return the model's blocks. In a pipeline, return the blocks of this device's stages."""
    return list(run.blocks or [block for _, block in find_blocks(run.model, run.job.blocks_name)])


def gather_dtype(plan: Plan) -> torch.dtype | None:
    """Return the dtype in which the weights of matrix products are gathered: bf16 or fp16 in mixed
    precision. Otherwise return None, which means the dtype in which they are stored.
    """
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(plan.precision)


def split_by_autocast(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return (products, others), two lists of the modules in `block` that directly have parameters.

    `products` are the linear and convolution modules, whose weights autocast converts to a narrower
    dtype. `others` are all other modules, such as norms.
    """
    own = [module for module in block.modules() if next(module.parameters(recurse=False), None) is not None]
    kinds = (nn.Linear, Convolution)
    products = [module for module in own if isinstance(module, kinds) or is_conv1d(module)]
    return products, [module for module in own if module not in products]


__all__ = [
    "check_shardable",
    "gather_dtype",
    "gathered_bytes",
    "least_unsharded_bytes",
    "low_precision_names",
    "model_blocks",
    "naming_sharded_use",
    "sharded_parameters",
    "split_by_autocast",
    "uses_fully_shard",
]
