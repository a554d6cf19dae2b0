"""A model, a dataset and a loss of your own: a network fills in hidden pixels of digits.

job.yaml names three things of this file. Only the loss uses tightfit:

    Inpainter     an nn.Module. Its repeated blocks are in an nn.ModuleList, where tightfit finds
                  them. It can recompute, compile or shard them one by one
    HiddenPixels  a dataset with __len__ and __getitem__, whose samples are dicts of tensors
    loss          a sum and a count, because samples differ in how many pixels are hidden
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import tightfit


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(self.norm(x))))


class Inpainter(nn.Module):
    """Predicts all pixels of an image from those that are visible."""

    def __init__(self, channels: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.read = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(depth))
        self.norm = nn.GroupNorm(8, channels)
        self.write = nn.Conv2d(channels, 1, 1)

    def forward(self, image: Tensor, hidden: Tensor) -> Tensor:
        """(samples, 1, height, width) for both, and for the result."""
        visible = image.masked_fill(hidden, 0.0)
        x = self.read(torch.cat([visible, hidden.to(image.dtype)], dim=1))
        for block in self.blocks:
            x = block(x)
        return self.write(self.norm(x))


class HiddenPixels(Dataset[dict[str, Tensor]]):
    """The 1,797 digits of scikit-learn, 8 x 8 pixels, with 10 to 60 % of the pixels hidden.

    The random numbers of a sample depend on the job's seed, the sample and the epoch. A resumed run
    and a run with worker processes therefore hide the same pixels.
    """

    def __init__(self) -> None:
        self.images = torch.from_numpy(load_digits().images / 16.0).float().unsqueeze(1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        share = torch.empty(1).uniform_(0.1, 0.6)
        hidden = torch.rand(image.shape) < share
        hidden[0, 0, 0] = True  # every sample has a pixel to predict
        return {"image": image, "hidden": hidden}


def total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of the squared errors of the hidden pixels."""
    error = model(batch["image"], batch["hidden"]).float() - batch["image"]
    return error.square().masked_fill(~batch["hidden"], 0.0).sum()


def count(batch: dict[str, Tensor]) -> int:
    """How many pixels are hidden."""
    return int(batch["hidden"].sum())


# A mean over the hidden pixels of each micro-batch would weigh those of a micro-batch with few of
# them more. With a sum and a count, the loss is the same for any micro_batch and number of devices.
loss = tightfit.Objective(total, count, unit="samples")
