"""Reads images as samples: from a folder with one sub-folder per class, from a saved dataset, or
scikit-learn's handwritten digits.

Images are resized and normalised as the image processor in the folder of a pretrained model does,
else as ViT's does: see `data/image_processing.py`. To save time, a large JPEG file is decoded at a
reduced scale, but never below the size to which it is resized.
"""

from __future__ import annotations

import itertools
import json
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from tightfit.data.cache import cached_folder, stamps
from tightfit.data.datasets_library import DatasetRows, dataset_rows
from tightfit.data.image_processing import MODES, ImageProcessing, default_processing, pretrained_processing
from tightfit.data.order import Integers, split_ranges
from tightfit.data.samples import DamagePolicy, ModelInput, one_sample
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec
from tightfit.job_sections.paths import expand_path
from tightfit.models.pretrained import pretrained_folder
from tightfit.optional_packages import import_optional
from tightfit.values import nearest

DIGITS = "digits"
_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
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
        with Image.open(self.files[index]) as image:
            _refuse_32_bits(image)

    def image(self, index: int, size: int) -> Image.Image:
        with Image.open(self.files[index]) as image:
            image.draft(None, (size, size))
            image.load()
            return _turned(image)


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

    images       the source
    undamaged    (samples,): sample i is the source's image undamaged[i]
    labels       the class of each image of the source, damaged ones included
    channels     C
    processing   how images are resized and normalised; its size is H and W
    class_names  the names of the classes, by their numbers; empty if the data has none
    """

    images: ImageSource
    undamaged: Integers
    labels: Integers
    channels: int
    processing: ImageProcessing
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.undamaged)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.stack([self._pixels(int(index)) for index in self.undamaged[indices]]))
        fractions = pixels.permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(self.labels[self.undamaged[indices]])
        return {"pixel_values": self.processing.normalise(fractions), "labels": labels}

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` of the source, resized: pixels of shape (H, W, C), from 0 to 255.
        Raises InputError if the image is damaged."""
        try:
            image = _of_8_bits(self.images.image(index, self.processing.resized)).convert(MODES[self.channels])
        except _BROKEN as error:
            raise _not_readable(self.images.location(index), error) from None
        return self.processing.square(image)


@dataclass(frozen=True)
class DigitSamples(SingleImages):
    """Handwritten digits: the 1,797 images of scikit-learn's load_digits, of 8 x 8 pixels.

    A batch is {"pixel_values": (B, C, H, W) float32, "labels": (B,) int64}.

    images      (1797, 1, 8, 8), with values in [0, 1]
    digits      (1797,): the label of each image, 0 to 9
    channels    C; each channel holds the same grey image
    processing  how images are normalised; its size is H and W, to which each image is resized
    """

    images: Tensor
    digits: Tensor
    channels: int
    processing: ImageProcessing

    def __len__(self) -> int:
        return len(self.digits)

    def batch(self, indices: Integers, epochs: Integers) -> dict[str, Tensor]:
        images = self.images[torch.from_numpy(indices)]
        size = self.processing.size
        if size != images.shape[-1]:
            images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)
        images = images.repeat(1, self.channels, 1, 1)
        return {"pixel_values": self.processing.normalise(images), "labels": self.digits[torch.from_numpy(indices)]}


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
        files, labels, found = class_folders(expand_path(spec.images))
        numbers, names = model.numbered(f"data: images={spec.images}", found)
        return _samples(spec, model, ImageFiles(files), numbers[labels], names, stamps(files))
    source = dataset_rows(spec)
    column, labels = _image_column(source, spec.label_field)
    return _samples(spec, model, column, labels, source.class_names(spec.label_field), source.identity)


def first_images(spec: DataSpec, model: ModelInput, count: int) -> ImageSamples | None:
    """Return the first `count` images of the folder `spec.images` as samples, without checking
    them. They serve to measure how long decoding takes. Returns None if there is no such folder, if
    it has no sub-folders, or if one of these has no images."""
    try:
        files, labels, _ = class_folders(expand_path(str(spec.images)))
    except InputError:
        return None
    channels, processing = _processing(spec, model, _DEFAULT_SIZE, 3)
    indices = np.arange(min(count, len(files)))
    return ImageSamples(ImageFiles(files[:count]), indices, labels[:count], channels, processing)


def class_folders(folder: Path) -> tuple[list[Path], Integers, list[str]]:
    """Return (the image files in the sub-folders of `folder`, the class of each file, (files,)
    int64, the names of the classes). Classes are the sub-folders, numbered from 0 in alphabetical
    order; the files are sorted
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
        inside = sorted(file for file in location.iterdir() if file.suffix.lower() in _ENDINGS and file.is_file())
        deeper = next((path for path in location.iterdir() if path.is_dir() and not path.name.startswith(".")), None)
        if deeper is not None and inside:
            warnings.warn(
                f"{deeper}: images in a folder within a class's folder are left out", TightfitWarning, stacklevel=2
            )
        if not inside:
            raise InputError(
                str(location),
                "this class's folder has no images",
                "name the folder whose sub-folders contain the images, one sub-folder per class",
            )
        files += inside
        labels += [label] * len(inside)
    return files, np.array(labels, dtype=np.int64), [location.name for location in classes]


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


def _samples(
    spec: DataSpec, model: ModelInput, images: ImageSource, labels: Integers, names: tuple[str, ...], identity: Any
) -> ImageSamples:
    channels, processing = _processing(spec, model, _DEFAULT_SIZE, 3)
    model.check_labels(f"data: {spec}", labels)
    damaged = _damaged(images, spec.skip_damaged, identity)
    kept = np.setdiff1d(np.arange(len(labels)), damaged)
    if len(kept) == 0:
        raise InputError(
            f"data: {spec}", f"none of its {len(labels)} images can be read", "name a folder with readable images"
        )
    return ImageSamples(images, kept, labels, channels, processing, names, damaged=len(damaged))


def _digits(spec: DataSpec, model: ModelInput) -> DigitSamples:
    found = import_optional("sklearn.datasets", "data: images=digits").load_digits()
    channels, processing = _processing(spec, model, 8, 1)
    model.check_labels("data: images=digits", found.target)
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return DigitSamples(images, torch.from_numpy(found.target).long(), channels, processing)


def _processing(spec: DataSpec, model: ModelInput, size: int, channels: int) -> tuple[int, ImageProcessing]:
    """Return (the number of channels of the images, how they are resized and normalised).

    The channels are those of the model's config, else `channels`. The processing is that of the
    pretrained model's image processor, if its folder describes one. The size is `data.image_size`,
    else that of this processor, of the model's config, or the argument `size`.

    Raises InputError if `data.image_size` is neither the size of the model's config nor that of the
    processor, if the number of channels is not 1, 3 or 4, or if the processor cannot be used.
    """
    channels = model.channels or channels
    if channels not in MODES:
        raise InputError(
            "model: num_channels", f"{channels} channels, but images have 1, 3 or 4", "set model.num_channels: 3"
        )
    own = pretrained_processing(pretrained_folder(model.pretrained), channels) if model.pretrained else None
    taken = {size for size in (model.image_size, own and own.size) if size}
    if spec.image_size and model.image_size and spec.image_size not in taken:
        raise InputError(
            f"data: image_size={spec.image_size}",
            f"the model takes images of {' or '.join(map(str, sorted(taken)))}",
            f"leave out data.image_size{'' if model.pretrained else f', or set model.image_size: {spec.image_size}'}",
        )
    if own is not None:
        return channels, own.at(spec.image_size or own.size)
    return channels, default_processing(model.image_size or spec.image_size or size, channels)


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
        json.loads((cached_folder("images", [identity, skip, "8 bits"], make) / "damaged.json").read_text()),
        dtype=np.int64,
    )


def _decode_errors(images: ImageSource, indices: range, decode: bool) -> dict[int, str]:
    """Return {index: error message} for the damaged images among `indices`.

    decode: whether to decode each image; if False, only its header is read
    """
    found = {}
    for index in indices:
        try:
            if decode:
                _of_8_bits(images.image(index, _DEFAULT_SIZE)).convert(MODES[3])
            else:
                images.open(index)
        except _BROKEN as error:
            found[index] = str(error) or type(error).__name__
    return found


def _turned(image: Image.Image) -> Image.Image:
    """Return the image as its EXIF orientation says. One whose EXIF data cannot be read is returned as it
    is."""
    try:
        return ImageOps.exif_transpose(image)
    except (*_BROKEN, struct.error, TypeError, LookupError, ArithmeticError, AttributeError):
        return image


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return the image with values from 0 to 255: those of 16 bits are scaled, which PIL would cut off.
    Raises ValueError for numbers of 32 bits, whose range is not known."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    _refuse_32_bits(image)
    return image


def _refuse_32_bits(image: Image.Image) -> None:
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its values have 32 bits (mode {image.mode}), of which the range is not known; write them in 8 bits"
        )


def _not_readable(location: str, error: Exception) -> InputError:
    return InputError(
        location,
        f"not a readable image ({error})",
        "repair the file, or set data.skip_damaged: true to skip images that cannot be read",
    )
