"""Kinds of operations whose speed on a CPU depends on the order of numbers in memory: images in their two
formats, and rows that are read or added by their index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightfit.calibration.cases import Case, in_turn, random_tensor, sizes_in_bytes

Cases = Callable[[torch.dtype, torch.device], Iterator[Case]]


def _of_images(
    forward: Callable[[Tensor], Tensor],
    tensors: tuple[int, int],
    backward: bool,
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Case]:
    """Yield an operation on images of 28 x 28 pixels to time, as cases (size, bytes accessed, function).

    forward   the operation
    tensors   how many tensors of the input's size and of the output's size it accesses
    backward  time its gradient
    """
    ratio = forward(torch.empty((1, 1, 28, 28), device="meta")).numel() / 28**2
    for moved in sizes_in_bytes(device)[1:-1]:
        touched = tensors[0] + ratio * tensors[1]
        count = max(int(moved / touched / (64 * 28 * 28) / dtype.itemsize), 1)

        def images(count: int = count) -> tuple[Tensor]:
            return (random_tensor((count, 64, 28, 28), dtype, device).contiguous(memory_format=memory_format),)

        def run(images: Any = images) -> tuple[Tensor, ...]:
            image = images()[0].requires_grad_()
            output = forward(image)
            return image, output, torch.ones_like(output)

        def make(image: Tensor, output: Tensor, gradient: Tensor) -> object:
            return torch.autograd.grad(output, image, gradient, retain_graph=True)

        exact = touched * count * 64 * 28 * 28 * dtype.itemsize
        yield moved, exact, in_turn(make, run) if backward else in_turn(forward, images)


def _image_kinds() -> dict[str, Cases]:
    """Return the kinds of operations on images whose speed depends on the memory format, each with its cases."""
    cases: dict[str, Cases] = {}
    for layout, memory_format in (("", torch.contiguous_format), ("channels-last ", torch.channels_last)):
        for kind, forward, read in (
            ("average pooling", partial(functional.avg_pool2d, kernel_size=2), 2),
            ("overlapping average pooling", partial(functional.avg_pool2d, kernel_size=3, stride=1, padding=1), 2),
            ("nearest interpolation", partial(functional.interpolate, scale_factor=2.0), 1),
            ("linear interpolation", partial(functional.interpolate, scale_factor=2.0, mode="bilinear"), 1),
        ):
            cases[f"{layout}{kind}"] = partial(_of_images, forward, (1, 1), False, memory_format)
            cases[f"{layout}{kind} backward"] = partial(_of_images, forward, (read, 1), True, memory_format)
    return cases


def _indexed(kind: str, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield an operation that reads or adds rows of 64 numbers by their index to time, as cases (size, bytes
    accessed, function). Each of 8 samples has four times as many indices as rows."""
    for moved in sizes_in_bytes(device)[1:-1]:
        rows = max(moved // (6 * 8 * 64 * dtype.itemsize), 1)
        index = torch.randint(0, rows, (4 * rows,), device=device)
        each = index[None, :, None].expand(8, -1, 64)

        def inputs(rows: int = rows) -> tuple[Tensor, Tensor]:
            return random_tensor((8, rows, 64), dtype, device), random_tensor((8, 4 * rows, 64), dtype, device)

        def make(table: Tensor, values: Tensor, index: Tensor = index, each: Tensor = each) -> Tensor:
            if kind == "index":
                return table[:, index]
            if kind == "index select":
                return table.index_select(1, index)
            if kind == "element gather":
                return table.gather(1, each)
            return table.index_add(1, index, values) if kind == "index add" else table.scatter_add(1, each, values)

        tables = 2 if "add" in kind or "scatter" in kind else 1
        yield moved, float((tables + 4) * 8 * rows * 64 * dtype.itemsize + index.nbytes), in_turn(make, inputs)


def _between_formats(
    make: Callable[..., Tensor], touched: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """Yield an operation on two images to time, the second of which has its channels last, as cases (size,
    bytes accessed, function).

    touched  bytes that the operation accesses, divided by the bytes of an image
    """
    for moved in sizes_in_bytes(device)[1:]:
        count = max(moved // touched // (128 * 28 * 28) // dtype.itemsize, 1)

        def inputs(count: int = count) -> tuple[Tensor, Tensor]:
            images = random_tensor((count, 128, 28, 28), dtype, device)
            return images, images.contiguous(memory_format=torch.channels_last)

        yield moved, float(touched * count * 128 * 28 * 28 * dtype.itemsize), in_turn(make, inputs)


OF_ONE_SPEED: dict[str, Cases] = {  # their rates hardly depend on the size, so a quick calibration takes the smallest
    **{
        kind: partial(_indexed, kind)
        for kind in ("index", "index select", "element gather", "element scatter", "index add")
    },
    **_image_kinds(),
    "copy between formats": partial(_between_formats, lambda images, last: last.contiguous(), 2),
    "elementwise between formats": partial(_between_formats, torch.add, 3),
}

__all__ = ["OF_ONE_SPEED"]
