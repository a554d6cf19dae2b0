"""Operations that are timed by name, because on a CPU they are slower than others of their kind: torch's
kernels for them are not vectorized, or compute more for each number than a sum or a product.

An operation that is not here has the rate of its kind (`planner/operation_kinds.py`). A new one needs only a
line in OPERATIONS. Powers are left out: torch has fast kernels for the usual exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit._torch.dispatch import TorchDispatchMode
from tightfit.calibration.cases import Case, Work, in_turn, random_tensor
from tightfit.models.tensors import bytes_accessed, tensors_in

SIZES, QUICK_SIZE = (2**20, 2**24), 2**18  # bytes accessed
ROW, IMAGE, VOLUME = (512,), (64, 28, 28), (16, 16, 16, 16)
_aten = torch.ops.aten


@dataclass(frozen=True)
class SingleOperation:
    """An operation to time.

    call      a function of the inputs that calls the operation. Of a gradient, the function whose backward
              calls it
    inputs    a letter for each input: f for numbers between -1 and 1, p for positive ones, m for a mask, v for one
              vector of a row
    shape     shape of one row, image or volume of an input; as many are timed as are wanted bytes
    gradient  whether the operation computes the gradient of `call`
    """

    call: Callable[..., Any]
    inputs: str = "f"
    shape: tuple[int, ...] = ROW
    gradient: bool = False

    def tensors(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        shapes = (self.shape if kind == "v" else (count, *self.shape) for kind in self.inputs)
        found = [random_tensor(shape, dtype, device) for shape in shapes]
        return tuple(
            one > 0 if kind == "m" else one.abs() if kind == "p" else one
            for kind, one in zip(self.inputs, found, strict=True)
        )

    def prepared(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Return the arguments of `run`."""
        inputs = self.tensors(count, dtype, device)
        if not self.gradient:
            return inputs
        value = inputs[0].requires_grad_()
        output = self.call(value, *inputs[1:])
        return value, output, torch.ones_like(output)

    def run(self, *prepared: Tensor) -> Any:
        if not self.gradient:
            return self.call(*prepared)
        value, output, gradient = prepared
        return torch.autograd.grad(output, value, gradient, retain_graph=True)


def _call(name: str, *constants: Any) -> Callable[..., Any]:
    """Return a function that calls the operation `name` with its tensors, followed by the constants."""
    operation = getattr(_aten, name)
    return lambda *tensors: operation(*tensors, *constants)


def _of_images(
    name: str, call: Callable[..., Any], backward: str, shape: tuple[int, ...] = IMAGE
) -> dict[str, SingleOperation]:
    return {name: SingleOperation(call, shape=shape), backward: SingleOperation(call, shape=shape, gradient=True)}


_ALONE = (
    "mish", "softplus", "elu", "log_sigmoid_forward", "erf", "atan", "expm1", "isnan", "exp", "sin", "cos", "tril", "triu",
    "argmax", "argmin", "randn_like", "rand_like", "normal_", "exponential_", "uniform_", "glu",
)  # fmt: skip
_OF_POSITIVE = ("sqrt", "log", "log1p")
_IN_PAIRS = ("mish_backward", "silu_backward", "sigmoid_backward", "atan2", "fmod", "remainder")
_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_OF_ROWS = ("std", "var", "var_mean", "logsumexp")
_ALONG_ROWS = ("cumsum", "cumprod", "cummax", "logcumsumexp", "max", "min")
OPERATIONS: dict[str, SingleOperation] = {
    **{name: SingleOperation(_call(name)) for name in _ALONE},
    **{name: SingleOperation(_call(name), "p") for name in _OF_POSITIVE},
    **{name: SingleOperation(_call(name), "ff") for name in _IN_PAIRS},
    **{name: SingleOperation(_call(name, 0.0)) for name in _COMPARISONS},
    **{name: SingleOperation(_call(name, [-1])) for name in _OF_ROWS},
    **{name: SingleOperation(_call(name, -1)) for name in _ALONG_ROWS},
    "glu_backward": SingleOperation(functional.glu, gradient=True),
    "softplus_backward": SingleOperation(_call("softplus_backward", 1.0, 20.0), "ff"),
    "elu_backward": SingleOperation(functional.elu, gradient=True),
    "log_sigmoid_backward": SingleOperation(_call("log_sigmoid_backward"), "fff"),
    "_prelu_kernel_backward": SingleOperation(_call("_prelu_kernel_backward"), "ffv"),
    "xlogy": SingleOperation(_call("xlogy"), "pp"),
    "where": SingleOperation(_call("where"), "mff"),
    "masked_fill": SingleOperation(_call("masked_fill", 0.0), "fm"),
    "masked_fill_": SingleOperation(_call("masked_fill_", 0.0), "fm"),
    "flip": SingleOperation(_call("flip", [-1])),
    "pixel_shuffle": SingleOperation(_call("pixel_shuffle", 2), shape=IMAGE),
    "pixel_unshuffle": SingleOperation(_call("pixel_unshuffle", 2), shape=IMAGE),
    **_of_images("reflection_pad2d", _call("reflection_pad2d", [1, 1, 1, 1]), "reflection_pad2d_backward"),
    **_of_images("replication_pad2d", _call("replication_pad2d", [1, 1, 1, 1]), "replication_pad2d_backward"),
    **_of_images("im2col", _call("im2col", [3, 3], [1, 1], [1, 1], [1, 1]), "col2im", (16, 28, 28)),
    **_of_images("_adaptive_avg_pool2d", _call("_adaptive_avg_pool2d", [7, 7]), "_adaptive_avg_pool2d_backward"),
    **_of_images(
        "adaptive_max_pool2d",
        lambda images: functional.adaptive_max_pool2d(images, 7),
        "adaptive_max_pool2d_backward",
    ),
    **_of_images("avg_pool3d", _call("avg_pool3d", [2, 2, 2]), "avg_pool3d_backward", VOLUME),
    **_of_images(
        "upsample_trilinear3d",
        lambda images: _aten.upsample_trilinear3d(images, [32, 32, 32], False),
        "upsample_trilinear3d_backward",
        VOLUME,
    ),
}


class _CountBytes(TorchDispatchMode):
    """Counts the bytes that an operation accesses, as a trace does.

    name   the operation, such as aten.mish
    found  bytes of its last call; 0 without one
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.found = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if str(func.overloadpacket) == self.name:
            self.found = sum(map(bytes_accessed, tensors_in((args, kwargs, output))))
        return output


def single_cases(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield one of OPERATIONS to time on a CPU, as cases (size, bytes accessed, function). Yield nothing for a
    `dtype` in which torch does not have it, and on a GPU, whose kernels are limited by memory bandwidth.

    Raises KeyError if the function does not call the operation.
    """
    operation = OPERATIONS[name]
    if (each := _bytes_of_one(name, dtype, device)) is None:
        return
    for size in SIZES:
        count = max(size // each, 1)

        def inputs(count: int = count) -> tuple[Tensor, ...]:
            return operation.prepared(count, dtype, device)

        work: Work = in_turn(operation.run, inputs)
        yield size, float(_bytes_of(name, count, dtype)), work


def quick_cases(kind: str, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield one small case, whose inputs are in the cache: most of these operations are not limited by memory.

    kind  the operation's name with its namespace, such as aten.mish
    """
    name = kind.removeprefix("aten.")
    if (each := _bytes_of_one(name, dtype, device)) is not None:
        count = max(QUICK_SIZE // each, 1)
        prepared = OPERATIONS[name].prepared(count, dtype, device)
        yield QUICK_SIZE, float(_bytes_of(name, count, dtype)), partial(OPERATIONS[name].run, *prepared)


def _bytes_of_one(name: str, dtype: torch.dtype, device: torch.device) -> int | None:
    """Return the bytes that an operation accesses for one row or image; None if it is not timed."""
    if device.type != "cpu":
        return None
    try:
        return _bytes_of(name, 1, dtype)
    except (NotImplementedError, RuntimeError):  # torch raises either if it has no kernel of this type
        return None


def _bytes_of(name: str, count: int, dtype: torch.dtype) -> int:
    """Return the bytes that an operation accesses for `count` rows or images."""
    operation = OPERATIONS[name]
    prepared = operation.prepared(count, dtype, torch.device("cpu"))
    with _CountBytes(f"aten.{name}") as mode:
        operation.run(*prepared)
    if not mode.found:
        raise KeyError(f"the function does not call aten.{name}")
    return mode.found


__all__ = ["OPERATIONS", "quick_cases", "single_cases"]
