"""Float8: the matrix products of linear layers take their factors in 8 bits, by torchao's `torchao.float8`.

Saves   time: such a product runs at up to twice the rate of bf16's. In mixed precision also autocast's 16-bit copies of
        the weights, for layers cast the weights themselves.
Costs   each factor of each product is read once for its largest value, and again to be scaled and cast: six casts for the
        three products of a layer. rowwise has a scale for each row in place of one for the tensor: closer numbers, more
        time. Numbers keep 3 bits after the first (e4m3); under tensorwise those of gradients 2 (e5m2). Sums, weights,
        gradients and what layers return stay as they were.
When    layers of some thousand features and thousands of tokens, compiled, which makes one or two kernels of each cast. In
        small layers the casts take longer than the products save; a search takes it where it is predicted to be faster.
Order   replaces linear layers while they are plain, before anything wraps a block.
Source  torchao's float8 training (README of torchao/float8; `convert_to_float8_training`, the recipes tensorwise and
        rowwise); Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.

Replaced are the `nn.Linear` layers of the model's repeated blocks whose features are multiples of 16, in and out, which the
hardware asks for, and whose weights are trained: never the output head or embeddings, nor a layer that something has hooked
or wrapped. Parameters keep their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.job import DataSpec, Job, ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.machines.gpus import architecture_of, multiplies_float8
from tightfit.methods.protocol import SearchFacts
from tightfit.methods.run import Run, kind_of
from tightfit.models import find_blocks
from tightfit.plan import Plan

FIELDS = ("float8",)
TRACED_FIELDS = ("float8",)
VARIANTS = (
    {"precision": "bf16-mixed", "float8": "tensorwise"},
    {"precision": "bf16-mixed", "float8": "rowwise"},
)
MULTIPLE = 16  # of which the sizes of a product in 8 bits have to be multiples
EMULATE = False  # products in fp32 of factors that were rounded to 8 bits, for devices without units for them


def wanted(plan: Plan) -> bool:
    return plan.float8 != "none"


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """As chosen before, or without, which takes less memory: no casts are saved for backward."""
    return {"float8": list(dict.fromkeys([start.float8, "none"]))}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Products and casts are traced. Raises InputError for a machine whose devices do not multiply in 8 bits."""
    _check_units(machine.architecture, plan)
    return ledger


def apply(run: Run, plan: Plan) -> Run:
    if run.device.type == "cuda":
        _check_units(architecture_of(torch.cuda.get_device_properties(run.device)), plan)
    elif kind_of(run.device) != "cuda" and not EMULATE:
        raise InputError(f"plan: float8={plan.float8}", "a processor has no units for it", "use float8: none")
    name = run.job.model.blocks if isinstance(run.job.model, ModelSpec) else None
    blocks = [block for _, block in find_blocks(run.model, name)]
    if not convert(run.model, plan.float8, blocks, EMULATE, pads(run.job, plan)):
        raise InputError(
            f"plan: float8={plan.float8}",
            f"{type(run.model).__name__} has no plain nn.Linear in its repeated blocks that is trained and whose features are "
            f"multiples of {MULTIPLE}",
            "use float8: none, or name the list of blocks in the job (model: {..., blocks: encoder.layers})",
        )
    return run


def _check_units(architecture: str, plan: Plan) -> None:
    if architecture and not multiplies_float8(architecture, plan.float8 == "rowwise"):
        needed = "9.0" if plan.float8 == "rowwise" else "8.9"
        raise InputError(
            f"plan: float8={plan.float8}",
            f"{architecture} has no units for it: it takes compute capability {needed}, or MI300",
            "use float8: tensorwise" if multiplies_float8(architecture, False) else "use float8: none",
        )


def is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def convert(model: nn.Module, recipe: str, blocks: Iterable[nn.Module], emulate: bool = False, pad: bool = True) -> int:
    """Replace the linear layers of `blocks` that can be by torchao's, in `model`; returns how many there are.

    recipe   tensorwise or rowwise, as torchao names them
    emulate  whether products are computed in fp32, of factors in 8 bits: the same numbers without the hardware
    pad      whether tokens are filled up to a multiple of 16 where the weight's gradient needs that

    Raises InputError where torchao is not installed.
    """
    taken = {id(layer) for block in blocks for layer in block.modules() if _can_be_replaced(layer)}
    if not taken:
        return 0
    torchao = _torchao(recipe)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=pad)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: id(layer) in taken)
    for layer in model.modules():
        if type(layer).__name__ == "Float8Linear" and layer.weight.device.type == "cpu":
            layer.register_forward_pre_hook(_in_type_of_autocast)
    return len(taken)


def _can_be_replaced(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        and layer.weight.requires_grad  # torchao makes the gradient of a weight, wanted or not
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and "forward" not in vars(layer)
    )


def _in_type_of_autocast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """torchao casts a layer's input as autocast does on CUDA. Where a processor stands for a device, autocast is the processor's."""
    if not inputs or not torch.is_autocast_enabled("cpu"):
        return inputs
    first: Tensor = inputs[0]
    return first.to(torch.get_autocast_dtype("cpu")), *inputs[1:]


def pads(job: Job, plan: Plan) -> bool:
    """Whether a micro-batch may have a number of tokens that is no multiple of 16: all but packed sequences of such a length."""
    data = job.data
    if not isinstance(data, DataSpec) or data.packing != "packed":
        return True
    of_others = data.images is not None or data.synthetic == "images" or data.python is not None
    lengths = data.sequence_length, data.target_length or data.sequence_length
    return of_others or any(length % (MULTIPLE * plan.cp) for length in lengths)


def _torchao(recipe: str) -> Any:
    """`torchao.float8`, without the notes that are made when it is imported. Raises InputError."""
    notes = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [one.level for one in notes]
    for one in notes:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise InputError(
            f"plan: float8={recipe}",
            f"needs the package torchao, which cannot be imported here ({error})",
            "pip install torchao (or tightfit[float8]), or use float8: none",
        ) from None
    finally:
        for one, level in zip(notes, before, strict=True):
            one.setLevel(level)
