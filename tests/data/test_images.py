"""Images from folders, saved datasets and scikit-learn: sizes, classes, and damage reported with
its file."""

from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.conftest import MODELS, make_job
from tightfit.data import open_samples
from tightfit.errors import InputError, TightfitWarning


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (20, 12), (255 * number, 0, 40 * index)).save(tmp_path / "pets" / name / f"{index}.png")
    return tmp_path / "pets"


def images(place: Path, model: Any = "images", **spec: Any) -> Any:
    return open_samples(make_job(model, {"images": str(place), **spec}))


def at(samples: Any, indices: list[int]) -> dict[str, torch.Tensor]:
    return samples.batch(np.array(indices), np.zeros(len(indices), dtype=np.int64))


def test_a_folder_of_class_folders_is_read(folder: Path) -> None:
    samples = images(folder, MODELS["images"] | {"num_channels": 3})
    batch = at(samples, [0, 5])
    assert len(samples) == 6
    assert (samples.sample_items, samples.ragged, samples.damaged) == (1, False, 0)
    assert batch["labels"].tolist() == [0, 1]
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert torch.allclose(batch["pixel_values"][1, :, 0, 0], torch.tensor([1.0, -1.0, 2 * 80 / 255 - 1]))
    assert torch.equal(samples[5]["pixel_values"], batch["pixel_values"][1])
    assert torch.equal(at(pickle.loads(pickle.dumps(samples)), [5])["pixel_values"][0], batch["pixel_values"][1])
    assert at(images(folder), [0])["pixel_values"].shape == (1, 1, 8, 8)


def test_reduced_decoding_of_photographs_equals_full_decoding(tmp_path: Path) -> None:
    (tmp_path / "all" / "one").mkdir(parents=True)
    ramp = np.linspace(0, 255, 640, dtype=np.uint8)
    photo = np.stack(np.broadcast_arrays(ramp, np.full((480, 640), 90), ramp[::-1]), 2)
    Image.fromarray(photo.astype(np.uint8)).save(tmp_path / "all" / "one" / "a.jpg", quality=95)
    found = at(images(tmp_path / "all", MODELS["images"] | {"num_channels": 3}), [0])["pixel_values"][0]
    whole = Image.fromarray(photo.astype(np.uint8)).resize((8, 8), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(whole)).permute(2, 0, 1).float() / 127.5 - 1
    assert torch.allclose(found, expected, atol=0.05)


def test_digits_are_resized_to_any_size() -> None:
    samples = open_samples(make_job("images", {"images": "digits"}))
    batch = at(samples, [0, 1])
    assert len(samples) == 1797  # type: ignore[arg-type]
    assert batch["labels"].tolist() == [0, 1]
    assert batch["pixel_values"].shape == (2, 1, 8, 8)
    assert batch["pixel_values"].aminmax() == (-1.0, 1.0)
    model = MODELS["images"] | {"image_size": 32, "num_channels": 3}
    large = at(open_samples(make_job(model, {"images": "digits"})), [0, 1])
    assert large["pixel_values"].shape == (2, 3, 32, 32)
    means = batch["pixel_values"].mean((2, 3)).expand(2, 3)
    assert torch.allclose(large["pixel_values"].mean((2, 3)), means, atol=0.05)


def test_broken_images_are_named_or_skipped(folder: Path) -> None:
    whole = (folder / "cats" / "1.png").read_bytes()
    (folder / "cats" / "1.png").write_bytes(whole[:-30])
    samples = images(folder)
    with pytest.raises(InputError, match=r"cats/1\.png(.|\n)*skip_damaged"):
        at(samples, [0, 1])
    (folder / "dogs" / "0.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"dogs/0\.png(.|\n)*skip_damaged"):
        images(folder)
    samples = images(folder, skip_damaged=True)
    assert len(samples) == 4
    assert samples.damaged == 2
    assert at(samples, [0, 1, 2, 3])["labels"].tolist() == [0, 0, 1, 1]
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(InputError, match="none of its 6 images can be read"):
        images(folder, skip_damaged=True)


def test_images_of_32_bits_are_refused_or_skipped(folder: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.float32)).save(folder / "dogs" / "deep.tif")
    with pytest.raises(InputError, match=r"deep\.tif(.|\n)*32 bits"):
        images(folder)
    samples = images(folder, skip_damaged=True)
    assert (len(samples), samples.damaged) == (6, 1)


def test_wrong_folders_sizes_and_labels_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        images(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"folder has no images(.|\n)*whose sub-folders contain the images"):
        images(tmp_path)
    with pytest.raises(InputError, match="no sub-folders"):
        images(folder / "cats")
    with pytest.raises(
        InputError, match=r"a single label(.|\n)*num_labels to the number of classes; or give the job a loss"
    ):
        images(folder, MODELS["images"] | {"num_labels": 1})
    shutil.copytree(folder / "cats", folder / "birds")
    with pytest.raises(InputError, match=r"label 2, but the model knows only the labels 0 to 1(.|\n)*num_labels: 3"):
        images(folder, MODELS["images"] | {"num_labels": 2})
    with pytest.raises(InputError, match=r"image_size=16: the model takes images of 8"):
        images(folder, image_size=16)
    with pytest.raises(InputError, match="a causal-lm model reads text"):
        images(folder, "causal-lm")
    with pytest.raises(InputError, match="num_channels"):
        images(folder, MODELS["images"] | {"num_channels": 2})


def test_saved_datasets_of_images_are_read(folder: Path, tmp_path: Path) -> None:
    import datasets

    files = sorted(map(str, folder.rglob("*.png")))
    rows = datasets.Dataset.from_dict({"picture": files, "label": [0, 0, 0, 1, 1, 1], "name": files})
    rows = rows.cast_column("picture", datasets.Image())
    rows.save_to_disk(tmp_path / "saved")

    def open_dataset(**spec: Any) -> Any:
        return open_samples(make_job("images", {"dataset": str(tmp_path / "saved"), **spec}))

    samples = open_dataset()
    assert torch.equal(at(samples, [1, 4])["pixel_values"], at(images(folder), [1, 4])["pixel_values"])
    assert torch.equal(at(pickle.loads(pickle.dumps(samples)), [4])["labels"], torch.tensor([1]))
    with pytest.raises(InputError, match="no column 'kind'"):
        open_dataset(label_field="kind")
    with pytest.raises(InputError, match="no whole numbers"):
        open_dataset(label_field="name")
    rows.remove_columns("picture").save_to_disk(tmp_path / "saved2")
    with pytest.raises(InputError, match="no column of images"):
        open_samples(make_job("images", {"dataset": str(tmp_path / "saved2")}))


def test_damage_in_a_saved_dataset_is_reported_with_its_row(tmp_path: Path, folder: Path) -> None:
    import datasets

    good = (folder / "cats" / "0.png").read_bytes()
    content = {"picture": [{"bytes": good, "path": None}, {"bytes": b"no", "path": None}, None], "label": [0, 1, 1]}
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(content, features=features).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved")}
    for row in (1, 2):
        with pytest.raises(InputError, match=f"saved: row {row + 1}"):
            at(open_samples(make_job("images", data)), [row])
    samples = open_samples(make_job("images", data | {"skip_damaged": True}))
    assert (len(samples), samples.damaged) == (1, 2)  # type: ignore[arg-type, union-attr]


def test_images_of_16_bits_are_scaled_and_wider_ones_refused(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "grey"
    place.mkdir(parents=True)
    Image.fromarray(np.full((12, 12), 20000, dtype=np.uint16)).save(place / "a.png")
    Image.fromarray(np.full((12, 12), 128, dtype=np.uint8)).save(place / "b.png")
    found = at(images(tmp_path / "deep"), [0, 1])["pixel_values"]
    assert found[0].mean().item() == pytest.approx(2 * 20000 / 65535 - 1, abs=0.01)
    assert found[1].mean().item() == pytest.approx(2 * 128 / 255 - 1, abs=0.01)
    Image.fromarray(np.full((12, 12), 0.5, dtype=np.float32)).save(place / "c.tif")
    with pytest.raises(InputError, match=r"c.tif: not a readable image \(its values have 32 bits"):
        at(images(tmp_path / "deep"), [2])


def test_photographs_are_turned_as_their_orientation_says(tmp_path: Path) -> None:
    place = tmp_path / "all" / "one"
    place.mkdir(parents=True)
    pixels = np.zeros((16, 16), dtype=np.uint8)
    pixels[:, 8:] = 255
    orientation = Image.Exif()
    orientation[0x0112] = 6  # to be turned by a quarter to the right
    Image.fromarray(pixels).save(place / "a.jpg", exif=orientation, quality=95)
    found = at(images(tmp_path / "all"), [0])["pixel_values"][0, 0]
    assert found[0].mean() < -0.9  # the left half is at the top now
    assert found[-1].mean() > 0.9


def test_dead_links_and_folders_within_classes_are_left_out(folder: Path) -> None:
    (folder / "cats" / "gone.png").symlink_to("nowhere.png")
    (folder / "dogs" / "more").mkdir()
    with pytest.warns(TightfitWarning, match="more: images in a folder within a class's folder are left out"):
        assert len(images(folder)) == 6


def test_unreadable_exif_data_leave_a_photograph_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = at(images(folder), [1])["pixel_values"]

    def fail(image: Image.Image) -> None:
        raise struct.error("unpack requires a buffer of 4 bytes")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fail)
    assert torch.equal(at(images(folder), [1])["pixel_values"], expected)
