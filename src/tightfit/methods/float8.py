"""Computes the matrix products of linear layers in 8-bit floating point, using torchao's
`torchao.float8`. On recent GPUs, such products are up to twice as fast as in bf16.

Saves   time: matrix products run at up to twice the rate of bf16. In mixed precision it also saves
        autocast's 16-bit copies of the weights, because the layers cast the weights themselves.
Costs   both factors of each product are read once to find their largest value, and again to be
        scaled and cast: six casts for the three products of a layer. rowwise has a scale for each
        row instead of one for the tensor, which is more precise but takes more time. Factors are
        rounded to 3 mantissa bits (e4m3), and gradients to 2 (e5m2) with tensorwise. Sums, weights,
        gradients and the layers' outputs are stored in their usual types.
When    layers of some thousand features and thousands of tokens, with torch.compile, which fuses
        each cast into one or two kernels. In small layers, the casts take more time than the
        products save. Search uses float8 if it predicts that float8 is faster.
Order   before anything shards or wraps a layer, because only plain linear layers are replaced.
Source  torchao's float8 training (README of torchao/float8; `convert_to_float8_training`, the
        recipes tensorwise and rowwise); Micikevicius et al. 2022, "FP8 formats for deep learning",
        arXiv:2209.05433.

It replaces the trained linear layers in the model's repeated blocks, if their input and output
features are multiples of 16, as the hardware requires. These are `nn.Linear` and transformers'
`Conv1D`, the linear layer of GPT-2. It never replaces the output head, embeddings, or a layer with
hooks or a wrapped forward. Parameters keep their names and shapes.

With tensor parallelism, each device scales and casts its own shards of weights and activations. A
scale then covers a shard rather than a whole tensor, which is at least as precise. The features
must be multiples of 16 times the number of devices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.loggers import quiet_import
from tightfit._torch.modules import has_hooks
from tightfit.cost.ledger import Ledger
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.machines.gpus import architecture_of, multiplies_float8
from tightfit.models import find_blocks
from tightfit.plan import Plan
from tightfit.runtime.method import SearchFacts
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

FIELDS = ("float8",)
TRACED_FIELDS = ("float8",)
VARIANTS = (
    {"precision": "bf16-mixed", "float8": "tensorwise"},
    {"precision": "bf16-mixed", "float8": "rowwise"},
)
MULTIPLE = 16  # the sizes of an 8-bit matrix product must be multiples of 16
# True in tests on devices without 8-bit matrix units: factors are rounded to 8 bits and then
# multiplied in fp32
EMULATE = False


def enabled(plan: Plan) -> bool:
    return plan.float8 != "none"


def candidates(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values of `float8` that search tries: the value of the plan `start`, and "none".
    Without float8, less memory is needed, because no 8-bit copies are saved for backward.
    """
    return {"float8": list(dict.fromkeys([start.float8, "none"]))}


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) unchanged, because the model was
    traced with the casts and the 8-bit products. Raises InputError if the machine's devices have no
    8-bit matrix units.
    """
    _check_units(machine.architecture, plan)
    return ledger


def apply(run: Run, plan: Plan) -> Run:
    """Replace the linear layers in the model's blocks by layers that multiply in float8, and return
    the run. Raises InputError if the device has no 8-bit matrix units, or if no layer can be
    replaced.
    """
    if run.device.type == "cuda":
        _check_units(architecture_of(torch.cuda.get_device_properties(run.device)), plan)
    elif kind_of(run.device) != "cuda" and not EMULATE:
        raise InputError(f"plan: float8={plan.float8}", "a CPU has no 8-bit matrix units", "use float8: none")
    blocks = [block for _, block in find_blocks(run.model, run.job.blocks_name)]
    if not convert(run.model, plan.float8, blocks, EMULATE, needs_padding(run.job, plan), plan.tp):
        raise InputError(
            f"plan: float8={plan.float8}",
            f"{type(run.model).__name__} has no plain nn.Linear or Conv1D in its repeated blocks that "
            f"is trained and whose input and output features are multiples of {MULTIPLE * plan.tp}",
            "use float8: none, or name the list of blocks in the job (model: {..., blocks: encoder.layers})",
        )
    return run


def _check_units(architecture: str, plan: Plan) -> None:
    if architecture and not multiplies_float8(architecture, plan.float8 == "rowwise"):
        needed = "9.0" if plan.float8 == "rowwise" else "8.9"
        raise InputError(
            f"plan: float8={plan.float8}",
            f"{architecture} cannot multiply in 8 bits with {plan.float8} scales, which needs "
            f"compute capability {needed}, or MI300",
            "use float8: tensorwise" if multiplies_float8(architecture, False) else "use float8: none",
        )


def is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def convert(
    model: nn.Module,
    recipe: str,
    blocks: Iterable[nn.Module],
    emulate: bool = False,
    pad: bool = True,
    shards: int = 1,
) -> int:
    """Replace the linear layers of `blocks` inside `model` by layers that multiply in float8:
    nn.Linear by torchao's Float8Linear, and transformers' Conv1D by the same products of its
    transposed weight. Return the number of replaced layers. Layers that float8 does not support are
    not replaced.

    recipe   torchao's recipe: "tensorwise" (a scale for each tensor) or "rowwise" (for each row)
    emulate  whether factors are rounded to 8 bits and then multiplied in fp32, which gives the same
             numbers on devices without 8-bit matrix units
    pad      whether the layers pad the number of tokens to a multiple of 16, which the product for
             the weight's gradient needs
    shards   number of devices over which tensor parallelism will shard the layers

    Raises InputError if torchao is not installed.
    """
    layers: dict[int, Any] = {
        id(layer): layer for block in blocks for layer in block.modules() if _can_be_replaced(layer, shards)
    }
    if not layers:
        return 0
    torchao = _torchao(recipe)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=pad)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: id(layer) in layers)
    pattern = torchao.convert_to_float8_training(
        nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, device="meta")), config=config
    )
    for layer in layers.values():
        if _is_conv1d(layer):
            layer.__class__ = _float8_conv1d()
            layer.float8_settings = pattern[0].linear_mm_config, config
    for layer in model.modules():
        if type(layer).__name__ in ("Float8Linear", "Float8Conv1D") and layer.weight.device.type == "cpu":
            layer.register_forward_pre_hook(_cast_as_autocast)
    return len(layers)


def _can_be_replaced(layer: Any, shards: int) -> bool:
    if not (type(layer) is nn.Linear or _is_conv1d(layer)):
        return False
    return bool(
        all(size % (MULTIPLE * shards) == 0 for size in layer.weight.shape)
        and layer.weight.requires_grad  # torchao always computes the gradient of a weight
        and not has_hooks(layer)
        and "forward" not in vars(layer)
    )


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D: a linear layer whose weight has shape (input
    features, output features)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


@cache
def _float8_conv1d() -> type[nn.Module]:
    """Return a subclass of transformers' Conv1D whose product is computed in float8."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from transformers.pytorch_utils import Conv1D

    class Float8Conv1D(Conv1D):  # type: ignore[misc]
        """Conv1D with the products of torchao's Float8Linear, which multiplies by its transposed
        weight: that is how Conv1D stores its weight."""

        float8_settings: Any  # of torchao's layer: (how it multiplies, its Float8LinearConfig)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cuda"):
                x = x.to(torch.get_autocast_dtype("cuda"))
            products, config = self.float8_settings
            output: Tensor = matmul_with_hp_or_float8_args.apply(x, self.weight, products, config)
            return output + self.bias.to(output.dtype)

    return Float8Conv1D


def _cast_as_autocast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs with the first one cast to autocast's type, if autocast is enabled on
    the CPU.

    This is a forward pre-hook for float8 layers that a CPU emulates, because torchao itself casts
    only to the type of CUDA's autocast.
    """
    if not inputs or not torch.is_autocast_enabled("cpu"):
        return inputs
    first: Tensor = inputs[0]
    return first.to(torch.get_autocast_dtype("cpu")), *inputs[1:]


def needs_padding(job: Job, plan: Plan) -> bool:
    """Return whether float8 layers must pad the number of tokens, because it may not be a multiple
    of 16. Return False only for packed sequences whose length on each device is a multiple of 16.
    """
    data = job.data
    if not isinstance(data, DataSpec) or data.packing != "packed":
        return True
    of_others = data.images is not None or data.synthetic == "images" or data.python is not None
    lengths = data.sequence_length, data.target_length or data.sequence_length
    return of_others or any(length % (MULTIPLE * plan.cp) for length in lengths)


def _torchao(recipe: str) -> Any:
    """Import and return `torchao.float8`, without its log messages and warnings. Raises InputError
    if torchao cannot be imported.
    """
    try:
        return quiet_import("torchao.float8")
    except ImportError as error:
        raise InputError(
            f"plan: float8={recipe}",
            f"float8 needs the package torchao, which cannot be imported ({error})",
            "pip install torchao (or tightfit[float8]), or use float8: none",
        ) from None
