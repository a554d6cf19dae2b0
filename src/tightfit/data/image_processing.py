"""Defines `ImageProcessing`, which turns decoded images into pixels of one size, normalised: as the
image processor of a pretrained model does, or else as ViT's does.

A pretrained model's folder describes its image processor in preprocessor_config.json. transformers
reads this file, and the result is compared on a random image with what transformers returns. A
processor that does anything else, such as padding, is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tightfit.errors import InputError

PROCESSOR_FILE = "preprocessor_config.json"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # PIL's mode for a number of channels
_WARPED_FROM = 384  # ConvNeXT's processor crops no images of this size or more
_TOLERANCE = 1.01  # steps of a pixel, of 255, by which two ways to resize an image may differ


@dataclass(frozen=True)
class ImageProcessing:
    """How images become pixels: they are resized, cut to a square and normalised.

    size       H and W of the result, in pixels
    resized    the length of a side after resizing, in pixels. Then the center, size x size, is cut out
    is_whole   True: both sides get the length `resized`, which changes the shape of the image. False:
               the shorter side gets it, and the longer one is resized in proportion
    filter     PIL's number of the filter that resizes
    scale      a pixel x of 0 to 255 becomes x * scale
    mean, std  then it becomes (x * scale - mean) / std: one number for each channel; empty for none
    content    the content of preprocessor_config.json, which describes all this to transformers
    """

    size: int
    resized: int
    is_whole: bool
    filter: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    content: dict[str, Any] = field(default_factory=dict, compare=False)

    def square(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the pixels of an image, resized and cut: (size, size, C), from 0 to 255."""
        width, height = image.size
        new = (self.resized, self.resized)
        if not self.is_whole:
            longer = int(self.resized * max(width, height) / min(width, height))
            new = (self.resized, longer) if width <= height else (longer, self.resized)
        image = image.resize(new, Image.Resampling(self.filter))
        left, top = ((side - self.size) // 2 for side in new)
        pixels = np.array(image).reshape(new[1], new[0], -1)
        return pixels[top : top + self.size, left : left + self.size]

    def normalise(self, fractions: Tensor) -> Tensor:
        """Normalise pixels (B, C, H, W), given as fractions in [0, 1], in place. Return the tensor."""
        if self.scale * 255 != 1:
            fractions.mul_(self.scale * 255)
        if self.mean:
            mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
            fractions.sub_(mean).div_(std)
        return fractions

    def at(self, size: int) -> ImageProcessing:
        """Return the same processing for another size of the result, resized in proportion."""

        def scaled(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: scaled(one) for name, one in value.items()}
            return round(value * size / self.size) if isinstance(value, int) else value

        if size == self.size:
            return self
        content = {name: scaled(one) if name in ("size", "crop_size") else one for name, one in self.content.items()}
        return replace(self, size=size, resized=scaled(self.resized), content=content)


def default_processing(size: int, channels: int) -> ImageProcessing:
    """Return ViT's processing: images are resized to size x size, and pixels become -1 to 1."""
    halves = (0.5,) * channels
    content = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": int(Image.Resampling.BILINEAR),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(halves),
        "image_std": list(halves),
        **({"do_convert_rgb": True} if channels == 3 else {}),
    }
    return ImageProcessing(size, size, True, int(Image.Resampling.BILINEAR), 1 / 255, halves, halves, content)


def pretrained_processing(folder: Path, channels: int) -> ImageProcessing | None:
    """Return the processing that preprocessor_config.json in a model's folder describes. None if
    the folder has no such file.

    channels: of the model's images

    Raises InputError if transformers cannot read the file, or if the image processor does something
    else than resize, cut the center out and normalise.
    """
    file = folder / PROCESSOR_FILE
    return _read(file, file.stat().st_mtime_ns, channels) if file.is_file() else None


@functools.lru_cache(maxsize=8)
def _read(file: Path, changed_ns: int, channels: int) -> ImageProcessing:
    """Return the processing that a file describes. The result is kept for each time at which the
    file was changed."""
    asked = f"job: model.from: {file}"
    try:
        from transformers import AutoImageProcessor

        content = json.loads(file.read_text())
        processor: Any = AutoImageProcessor.from_pretrained(
            file.parent, local_files_only=True, trust_remote_code=False, backend="pil"
        )
        found = [
            reading for reading in _readings(processor, channels, content) if _agrees(reading, processor, channels)
        ]
    except Exception as error:  # transformers and PIL raise many classes
        if isinstance(error, MemoryError):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refused(asked, f"its image processor cannot be used ({said})") from None
    if not found:
        raise _refused(asked, f"{type(processor).__name__} does more than to resize, cut the center out and normalise")
    return found[0]


def _refused(asked: str, found: str) -> InputError:
    return InputError(
        asked,
        found,
        "let a dataset of your own prepare the images (data.python); or use a copy of the folder without this file: "
        "images are then resized to squares, and pixels become -1 to 1",
    )


def _readings(processor: Any, channels: int, content: dict[str, Any]) -> list[ImageProcessing]:
    """Return what an image processor's settings may mean: classes of transformers read them
    differently."""

    def on(name: str, default: bool = False) -> bool:
        value = getattr(processor, name, None)
        return default if value is None else bool(value)

    size, crop = (_sides(getattr(processor, name, None)) for name in ("size", "crop_size"))
    edge = _edge(getattr(processor, "size", None))
    share = getattr(processor, "crop_pct", None)
    shapes: list[tuple[int, int, bool]] = []  # (size, resized, is_whole)
    if on("do_resize"):
        end = crop if on("do_center_crop") else size
        if size and end:
            shapes.append((end, size, True))
        if edge and end:
            shapes += [(end, edge, False), *([(end, int(edge / share), False)] if share else [])]
        if edge and share:  # ConvNeXT's
            is_whole = edge >= _WARPED_FROM
            shapes.append((edge, edge if is_whole else int(edge / share), is_whole))
    scale = float(processor.rescale_factor) if on("do_rescale") else 1.0
    means, stds = (
        _for_channels(getattr(processor, name), channels) if on("do_normalize") else ()
        for name in ("image_mean", "image_std")
    )
    resample = int(processor.resample)
    return [
        ImageProcessing(end, resized, is_whole, resample, scale, means, stds, content)
        for end, resized, is_whole in shapes
        if end <= resized
    ]


def _sides(size: Any) -> int | None:
    """Return the side of a square, in a processor's setting of a size; None if it is no square."""
    height, width = (_of(size, name) for name in ("height", "width"))
    return int(height) if height and height == width else None


def _edge(size: Any) -> int | None:
    edge = _of(size, "shortest_edge")
    return None if edge is None or _of(size, "longest_edge") is not None else int(edge)


def _of(size: Any, name: str) -> Any:
    return size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)


def _for_channels(values: Any, channels: int) -> tuple[float, ...]:
    return tuple(map(float, values)) if isinstance(values, list | tuple) else (float(values),) * channels


def _agrees(processing: ImageProcessing, processor: Any, channels: int) -> bool:
    """Return whether the processing of a random image returns what the image processor returns."""
    random = np.random.default_rng(0)
    for height, width in ((3, 4), (4, 3)):
        shape = (height * processing.resized // 3, width * processing.resized // 3, channels)
        pixels = random.integers(0, 256, shape).astype(np.uint8)
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels, MODES[channels])
        expected = processor(images=image, return_tensors="np")["pixel_values"][0]
        found = processing.normalise(torch.from_numpy(processing.square(image)).permute(2, 0, 1)[None].float() / 255)[0]
        if found.shape != expected.shape:
            return False
        step = processing.scale / min(processing.std, default=1.0)
        if float(np.abs(found.numpy() - expected).max()) > _TOLERANCE * step:
            return False
    return True


__all__ = ["MODES", "PROCESSOR_FILE", "ImageProcessing", "default_processing", "pretrained_processing"]
