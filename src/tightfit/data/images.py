"""Reads images as samples: from a folder with one sub-folder per class, from a saved dataset, or
scikit-learn's handwritten digits.

Pixels in [0, 1] are normalised with mean 0.5 and standard deviation 0.5, as ViT's image processor
does: 0 becomes -1 and 1 becomes 1. To save time, a large JPEG file is decoded at a reduced scale,
but never below the size that the model needs.
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

from tightfit.data.cache import cached_folder, stamps
from tightfit.data.datasets_library import DatasetRows, dataset_rows
from tightfit.data.order import Integers, split_ranges
from tightfit.data.samples import DamagePolicy, ModelInput, one_sample
from tightfit.errors import InputError
from tightfit.job import DataSpec
from tightfit.job_sections.paths import expand_path
from tightfit.optional_packages import import_optional
from tightfit.values import nearest

DIGITS = "digits"
_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_DEFAULT_SIZE = 224  # pixels on each side, if neither the model nor the job gives a size
# the errors of PIL for a broken file
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageSource(Protocol):
    """Interface of a source of images, which are numbered from 0.

    location  returns where image `index` is, for messages: its file, or its row of a dataset
    open      reads only the header of image `index`
    image     returns image `index`, decoded, at its own size. Only a JPEG may be smaller, but each
              side then has at least `size` pixels

    If the image is damaged, both `open` and `image` raise one of _BROKEN, PIL's errors for a broken
    file.
    """

    def __len__(self) -> int: ...

    def location(self, index: int) -> str: ...

    def open(self, index: int) -> None: ...

    def image(self, index: int, size: int) -> Image.Image: ...


@dataclass(frozen=True)
class ImageFiles:
    """An ImageSource whose image i is in the file files[i]."""

    files: list[Path]

    def __len__(self) -> int:
        return len(self.files)

    def location(self, index: int) -> str:
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
    """An ImageSource whose image i is in row i of a datasets.Dataset.

    folder  the folder of the dataset, for messages
    rows    the datasets.Dataset
    column  the name of the column with the images
    """

    source: DatasetRows
    column: str

    def __len__(self) -> int:
        return len(self.source.rows)

    def location(self, index: int) -> str:
        return f"{self.source.name}: row {index + 1}"

    def open(self, index: int) -> None:
        """Do nothing. A dataset returns only decoded images, so there is no header to read."""

    def image(self, index: int, size: int) -> Image.Image:
        image = self.source.rows[index][self.column]
        if image is None:
            raise ValueError("no image")
        return image


@dataclass(frozen=True, kw_only=True)
class SingleImages:
    """Base class of Samples with one image per sample, all images of the same size.

    damaged       how many images were left out because they are damaged
    sample_items  1, because a sample is one image
    ragged        False, because all images have the same shape
    tokenizer     None, because there is no text
    """

    damaged: int = 0
    sample_items: int = 1
    ragged: bool = False
    tokenizer: Any = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        return one_sample(self, index)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class ImageSamples(SingleImages):
    """The undamaged images of a source, with their classes.

    A batch is {"pixel_values": (B, C, H, W) float32, "labels": (B,) int64}.

    images     the source
    undamaged  (samples,): sample i is the source's image undamaged[i]
    labels     the class of each image of the source, damaged ones included
    size       H and W in pixels, to which each image is resized
    channels   C
    """

    images: ImageSource
    undamaged: Integers
    labels: Integers
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.undamaged)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.stack([self._pixels(int(index)) for index in self.undamaged[indices]]))
        fractions = pixels.permute(0, 3, 1, 2).float() / 255
        return {"pixel_values": normalise(fractions), "labels": torch.from_numpy(self.labels[self.undamaged[indices]])}

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` of the source, resized: pixels of shape (H, W, C), from 0 to 255.
        Raises InputError if the image is damaged."""
        try:
            image = self.images.image(index, self.size).convert(_MODES[self.channels])
        except _BROKEN as error:
            raise _not_readable(self.images.location(index), error) from None
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(self.size, self.size, self.channels)


@dataclass(frozen=True)
class DigitSamples(SingleImages):
    """Handwritten digits: the 1,797 images of scikit-learn's load_digits, of 8 x 8 pixels.

    A batch is {"pixel_values": (B, C, H, W) float32, "labels": (B,) int64}.

    images    (1797, 1, 8, 8), with values in [0, 1]
    digits    (1797,): the label of each image, 0 to 9
    size      H and W in pixels, to which each image is resized
    channels  C; each channel holds the same grey image
    """

    images: Tensor
    digits: Tensor
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.digits)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        images = self.images[torch.from_numpy(indices)]
        if self.size != images.shape[-1]:
            images = torch.nn.functional.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        images = images.repeat(1, self.channels, 1, 1)
        return {"pixel_values": normalise(images), "labels": self.digits[torch.from_numpy(indices)]}


def open_images(spec: DataSpec, model: ModelInput) -> ImageSamples | DigitSamples:
    """Return the images of `spec.images` (a folder, or "digits") as samples. If this field is not
    set, return those in the image column of the saved dataset `spec.dataset`.

    Raises InputError if images or labels are missing, or if an image is damaged and `skip_damaged`
    is not set. Also raises it if the model cannot take the image size, the number of channels or a
    label.
    """
    if spec.images == DIGITS:
        return _digits(spec, model)
    if spec.images is not None:
        files, labels = class_folders(expand_path(spec.images))
        return _samples(spec, model, ImageFiles(files), labels, stamps(files))
    source = dataset_rows(spec)
    column, labels = _image_column(source, spec.label_field)
    return _samples(spec, model, column, labels, source.identity)


def first_images(spec: DataSpec, model: ModelInput, count: int) -> ImageSamples | None:
    """Return the first `count` images of the folder `spec.images` as samples, without checking
    them. They serve to measure how long decoding takes. Returns None if there is no such folder, if
    it has no sub-folders, or if one of these has no images."""
    try:
        files, labels = class_folders(expand_path(str(spec.images)))
    except InputError:
        return None
    size, channels = _size_and_channels(spec, model, _DEFAULT_SIZE, 3)
    return ImageSamples(ImageFiles(files[:count]), np.arange(min(count, len(files))), labels[:count], size, channels)


def class_folders(folder: Path) -> tuple[list[Path], Integers]:
    """Return (the image files in the sub-folders of `folder`, the class of each file, (files,)
    int64). Classes are the sub-folders, numbered from 0 in alphabetical order; the files are sorted
    by class and then by name.

    Raises InputError if the folder does not exist or has no sub-folders, or if a sub-folder has no
    images.
    """
    asked = f"data: images={folder}"
    if not folder.is_dir():
        raise InputError(asked, "no such folder", "name a folder with one sub-folder per class, or digits")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise InputError(
            asked,
            "has no sub-folders; each sub-folder is one class",
            "put the images of each class into a sub-folder of its own",
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, location in enumerate(classes):
        inside = sorted(file for file in location.iterdir() if file.suffix.lower() in _ENDINGS)
        if not inside:
            raise InputError(
                str(location),
                "this class's folder has no images",
                "name the folder whose sub-folders contain the images, one sub-folder per class",
            )
        files += inside
        labels += [label] * len(inside)
    return files, np.array(labels, dtype=np.int64)


def _image_column(source: DatasetRows, label_field: str) -> tuple[ImageColumn, Integers]:
    rows, asked = source.rows, source.asked
    datasets = import_optional("datasets", asked)
    columns = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise InputError(
            asked,
            f"has no column of images; it has {', '.join(rows.column_names)}",
            "convert the image column with dataset.cast_column(name, datasets.Image()), or use data.images",
        )
    if label_field not in rows.column_names:
        raise InputError(
            asked, f"has no column {label_field!r}", f"set data.label_field ({nearest(label_field, rows.column_names)})"
        )
    labels = np.array(rows[label_field][:])
    if labels.dtype.kind not in "iu":
        raise InputError(asked, f"column {label_field!r} holds no whole numbers", "number the classes from 0")
    return ImageColumn(source, columns[0]), labels.astype(np.int64)


def _samples(spec: DataSpec, model: ModelInput, images: ImageSource, labels: Integers, identity: Any) -> ImageSamples:
    size, channels = _size_and_channels(spec, model, _DEFAULT_SIZE, 3)
    model.check_labels(f"data: {spec}", labels)
    damaged = _damaged(images, spec.skip_damaged, identity)
    kept = np.setdiff1d(np.arange(len(labels)), damaged)
    if len(kept) == 0:
        raise InputError(
            f"data: {spec}", f"none of its {len(labels)} images can be read", "name a folder with readable images"
        )
    return ImageSamples(images, kept, labels, size, channels, damaged=len(damaged))


def _digits(spec: DataSpec, model: ModelInput) -> DigitSamples:
    found = import_optional("sklearn.datasets", "data: images=digits").load_digits()
    size, channels = _size_and_channels(spec, model, 8, 1)
    model.check_labels("data: images=digits", found.target)
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return DigitSamples(images, torch.from_numpy(found.target).long(), size, channels)


def _size_and_channels(spec: DataSpec, model: ModelInput, size: int, channels: int) -> tuple[int, int]:
    """Return (height and width of the images in pixels, their number of channels).

    Both are those of the model's config if it has them. Otherwise the size is `data.image_size` or,
    if this is not set, the argument `size`; and the number of channels is the argument `channels`.

    Raises InputError if the config and `data.image_size` give different sizes, or if the number of
    channels is not 1, 3 or 4.
    """
    if spec.image_size and model.image_size and spec.image_size != model.image_size:
        raise InputError(
            f"data: image_size={spec.image_size}",
            f"the model takes images of {model.image_size}",
            f"leave out data.image_size, or set model.image_size: {spec.image_size}",
        )
    channels = model.channels or channels
    if channels not in _MODES:
        raise InputError(
            "model: num_channels", f"{channels} channels, but images have 1, 3 or 4", "set model.num_channels: 3"
        )
    return model.image_size or spec.image_size or size, channels


def _damaged(images: ImageSource, skip: bool, identity: Any) -> Integers:
    """Return the indices of the damaged images. The images are checked once, and the result is
    cached.

    skip      True decodes each image. False reads only the header of each image, and raises
              InputError at the first damaged one
    identity  JSON-like content that changes when the images change: a part of the key of the cache
    """

    def make(folder: Path) -> None:
        damage = DamagePolicy(skip)
        found: dict[int, str] = {}
        with ThreadPoolExecutor() as threads:  # PIL releases the GIL while it decodes
            ranges = itertools.starmap(range, split_ranges(0, len(images), 256))
            for errors in threads.map(lambda indices: _decode_errors(images, indices, skip), ranges):
                found |= errors
        for index, error_message in found.items():
            damage.report(images.location(index), f"not a readable image ({error_message})")
        (folder / "damaged.json").write_text(json.dumps(list(found)))

    return np.array(
        json.loads((cached_folder("images", [identity, skip], make) / "damaged.json").read_text()), dtype=np.int64
    )


def _decode_errors(images: ImageSource, indices: range, decode: bool) -> dict[int, str]:
    """Return {index: error message} for the damaged images among `indices`.

    decode: whether to decode each image; if False, only its header is read
    """
    found = {}
    for index in indices:
        try:
            if decode:
                images.image(index, _DEFAULT_SIZE)
            else:
                images.open(index)
        except _BROKEN as error:
            found[index] = str(error) or type(error).__name__
    return found


def _not_readable(location: str, error: Exception) -> InputError:
    return InputError(
        location,
        f"not a readable image ({error})",
        "repair the file, or set data.skip_damaged: true to skip images that cannot be read",
    )


def normalise(fractions: Tensor) -> Tensor:
    """Map pixels x in [0, 1] to [-1, 1] by (x - 0.5) / 0.5, in place, and return the tensor."""
    return fractions.sub_(0.5).div_(0.5)
