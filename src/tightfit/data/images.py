"""Samples of images: a folder with one sub-folder per class, a saved dataset, or scikit-learn's handwritten digits.

Pixels are fractions of white brought to mean 0.5 and deviation 0.5, as ViT's image processor does. A JPEG file is
decoded at the smallest size it can be decoded at that is not below the wanted one.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tightfit.data.cache import cached, stamps
from tightfit.data.order import Integers, pieces
from tightfit.data.samples import Damage, ModelInput, single
from tightfit.data.text import find_files, load_dataset
from tightfit.errors import InputError
from tightfit.job import DataSpec, expanded
from tightfit.values import nearest

DIGITS = "digits"
_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_SIZE = 224
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what PIL raises for a broken file


class Pictures(Protocol):
    """Where images come from: `place` names one in messages, `open` reads its header, `image` decodes it."""

    def __len__(self) -> int: ...

    def place(self, index: int) -> str: ...

    def open(self, index: int) -> None: ...

    def image(self, index: int, size: int) -> Image.Image: ...


@dataclass(frozen=True)
class ImageFiles:
    files: list[Path]

    def __len__(self) -> int:
        return len(self.files)

    def place(self, index: int) -> str:
        return str(self.files[index])

    def open(self, index: int) -> None:
        Image.open(self.files[index]).close()

    def image(self, index: int, size: int) -> Image.Image:
        with Image.open(self.files[index]) as image:
            image.draft(None, (size, size))
            image.load()
            return image


@dataclass(frozen=True)
class ImageColumn:
    """The images of a datasets.Dataset's column."""

    folder: Path
    rows: Any
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        return f"{self.folder}: row {index + 1}"

    def open(self, index: int) -> None:
        """Nothing: a dataset gives an image only decoded."""

    def image(self, index: int, size: int) -> Image.Image:
        image = self.rows[index][self.column]
        if image is None:
            raise ValueError("no image")
        return image


@dataclass(frozen=True)
class ImageSamples:
    """{"pixel_values" float32 (B, C, H, W), "labels" int64 (B,)} of the pictures `kept`, (samples,) indices."""

    pictures: Pictures
    kept: Integers
    labels: Integers
    size: int
    channels: int
    damaged: int = 0
    sample_items: int = 1
    ragged: bool = False
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        return single(self, index)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.stack([self._pixels(int(index)) for index in self.kept[indices]]))
        fractions = pixels.permute(0, 3, 1, 2).float() / 255
        return {"pixel_values": normalise(fractions), "labels": torch.from_numpy(self.labels[self.kept[indices]])}

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        """(H, W, C)"""
        try:
            image = self.pictures.image(index, self.size).convert(_MODES[self.channels])
        except _BROKEN as error:
            raise _broken(self.pictures.place(index), error) from None
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(self.size, self.size, self.channels)


@dataclass(frozen=True)
class DigitSamples:
    """Handwritten digits as ImageSamples gives images. Source: scikit-learn's load_digits, 1,797 of 8 x 8."""

    images: Tensor
    digits: Tensor
    size: int
    channels: int
    damaged: int = 0
    sample_items: int = 1
    ragged: bool = False
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Any:
        return single(self, index)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        images = self.images[torch.from_numpy(indices)]
        if self.size != images.shape[-1]:
            images = torch.nn.functional.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        images = images.repeat(1, self.channels, 1, 1)
        return {"pixel_values": normalise(images), "labels": self.digits[torch.from_numpy(indices)]}


def open_images(spec: DataSpec, model: ModelInput) -> ImageSamples | DigitSamples:
    """The samples of `spec.images` or of the images in `spec.dataset`. Raises InputError."""
    if spec.images == DIGITS:
        return _digits(spec, model)
    if spec.images is not None:
        files, labels = class_folders(expanded(spec.images))
        return _samples(spec, model, ImageFiles(files), labels, stamps(files))
    folder = Path(str(spec.dataset))
    column, labels = _image_column(folder, spec.label_field)
    return _samples(spec, model, column, labels, stamps(find_files("dataset", str(folder))))


def first_images(spec: DataSpec, model: ModelInput, count: int) -> ImageSamples | None:
    """The first pictures of a folder, as they are, to see how long one takes to decode; None where there are none."""
    try:
        files, labels = class_folders(expanded(str(spec.images)))
    except InputError:
        return None
    size, channels = _shape(spec, model, _SIZE, 3)
    return ImageSamples(ImageFiles(files[:count]), np.arange(min(count, len(files))), labels[:count], size, channels)


def class_folders(folder: Path) -> tuple[list[Path], Integers]:
    """The images in the sub-folders of `folder`, sorted, and the number of the sub-folder of each."""
    asked = f"data: images={folder}"
    if not folder.is_dir():
        raise InputError(asked, "no such folder", "name a folder with one sub-folder per class, or digits")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise InputError(
            asked, "has no sub-folders, which would be its classes", "put each class's images into a sub-folder"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, place in enumerate(classes):
        inside = sorted(file for file in place.iterdir() if file.suffix.lower() in _ENDINGS)
        if not inside:
            raise InputError(
                str(place), "a class without images", "name the folder whose sub-folders hold the images themselves"
            )
        files += inside
        labels += [label] * len(inside)
    return files, np.array(labels, dtype=np.int64)


def _image_column(folder: Path, label_field: str) -> tuple[ImageColumn, Integers]:
    import datasets

    rows = load_dataset(folder)
    asked = f"data: dataset={folder}"
    columns = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise InputError(
            asked,
            f"has no column of images; it has {', '.join(rows.column_names)}",
            "cast one with dataset.cast_column(name, datasets.Image()), or use data.images",
        )
    if label_field not in rows.column_names:
        raise InputError(
            asked, f"has no column {label_field!r}", f"set data.label_field ({nearest(label_field, rows.column_names)})"
        )
    labels = np.array(rows[label_field][:])
    if labels.dtype.kind not in "iu":
        raise InputError(asked, f"column {label_field!r} holds no whole numbers", "number the classes from 0")
    return ImageColumn(folder, rows, columns[0]), labels.astype(np.int64)


def _samples(spec: DataSpec, model: ModelInput, pictures: Pictures, labels: Integers, identity: Any) -> ImageSamples:
    size, channels = _shape(spec, model, _SIZE, 3)
    model.check_labels(f"data: {spec}", labels)
    damaged = _damaged(pictures, spec.skip_damaged, identity)
    kept = np.setdiff1d(np.arange(len(labels)), damaged)
    if len(kept) == 0:
        raise InputError(f"data: {spec}", f"holds no sound image of {len(labels)}", "name another folder")
    return ImageSamples(pictures, kept, labels, size, channels, len(damaged))


def _digits(spec: DataSpec, model: ModelInput) -> DigitSamples:
    from sklearn.datasets import load_digits

    found = load_digits()
    size, channels = _shape(spec, model, 8, 1)
    model.check_labels("data: images=digits", found.target)
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return DigitSamples(images, torch.from_numpy(found.target).long(), size, channels)


def _shape(spec: DataSpec, model: ModelInput, size: int, channels: int) -> tuple[int, int]:
    """Size and channels of the images: the model's where it has them, else the job's, else these."""
    if spec.image_size and model.image_size and spec.image_size != model.image_size:
        raise InputError(
            f"data: image_size={spec.image_size}",
            f"the model takes images of {model.image_size}",
            f"leave it out, or set model.image_size: {spec.image_size}",
        )
    channels = model.channels or channels
    if channels not in _MODES:
        raise InputError("model: num_channels", f"{channels}, and an image has 1, 3 or 4", "set model.num_channels: 3")
    return model.image_size or spec.image_size or size, channels


def _damaged(pictures: Pictures, skip: bool, identity: Any) -> Integers:
    """Indices of the damaged pictures. Where they are to be left out each is decoded once; else its header is read."""

    def make(folder: Path) -> None:
        damage = Damage(skip)
        found: dict[int, str] = {}
        with ThreadPoolExecutor() as threads:  # PIL decodes outside the interpreter's lock
            ranges = itertools.starmap(range, pieces(0, len(pictures), 256))
            for flaws in threads.map(lambda indices: _flaws(pictures, indices, skip), ranges):
                found |= flaws
        for index, flaw in found.items():
            damage.report(pictures.place(index), f"not a readable image ({flaw})")
        (folder / "damaged.json").write_text(json.dumps(list(found)))

    return np.array(json.loads((cached("images", [identity, skip], make) / "damaged.json").read_text()), dtype=np.int64)


def _flaws(pictures: Pictures, indices: range, decode: bool) -> dict[int, str]:
    """What is wrong with which pictures."""
    found = {}
    for index in indices:
        try:
            if decode:
                pictures.image(index, _SIZE)
            else:
                pictures.open(index)
        except _BROKEN as error:
            found[index] = str(error) or type(error).__name__
    return found


def _broken(place: str, error: Exception) -> InputError:
    return InputError(
        place, f"not a readable image ({error})", "mend it, or set data.skip_damaged: true to leave such samples out"
    )


def normalise(fractions: Tensor) -> Tensor:
    """Fractions in [0, 1] brought to mean 0.5 and deviation 0.5, in place."""
    return fractions.sub_(0.5).div_(0.5)
