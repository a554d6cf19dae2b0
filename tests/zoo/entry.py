"""An entry of the zoo: how its model is made, its samples, and its loss in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal[
    "decoder", "experts", "state-space", "encoder", "encoder-decoder", "vision", "audio", "multimodal", "custom"
]
VOCABULARY, LENGTH, CLASSES, SAMPLES = 96, 12, 5, 16
PlainLoss = Callable[[nn.Module, Any], tuple[Tensor, int]]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    model      what a Job is given: a mapping of config keys, or a callable that makes a module
    samples    the data, a list
    plain      (model, batch) -> (sum of the losses that count, how many count), written without tightfit
    loss       what a Job is given as its loss; None where it follows from the task
    together   whether what a sample gives depends on the other samples of its forward (BatchNorm, contrastive losses), so that
               the reference has to see the same micro-batches
    random     whether it draws random numbers, so that only plans that draw the same ones can be compared
    """

    name: str
    kind: Kind
    model: Callable[[], Any]
    samples: Callable[[], list[Any]]
    plain: PlainLoss
    loss: Any = None
    together: bool = False
    random: bool = False


# Losses ---------------------------------------------------------------------------------------------------------------


def summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Cross entropy over the labels that are not -100."""
    loss = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum())


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return summed(model(**inputs_of(batch)).logits[:, :-1], batch["labels"][:, 1:])


def each_label(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(**inputs_of(batch))
    return summed(output if isinstance(output, Tensor) else output.logits, batch["labels"])


def translation(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Teacher forcing by the model's own code: it moves the labels to the right itself. The loss is ours."""
    return summed(model(**batch).logits, batch["labels"])


def pair(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return summed(model(batch[0]), batch[1])


# Samples --------------------------------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, length: int = LENGTH, low: int = 4) -> Tensor:
    return torch.randint(low, VOCABULARY, (length,), generator=generator)


def texts() -> list[Any]:
    """Unevenly many labels count, so that dividing by micro-batches would show."""
    generator, samples = torch.Generator().manual_seed(3), []
    for number in range(SAMPLES):
        tokens = _tokens(generator)
        labels = tokens.clone()
        labels[: number % 7] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def masked_texts() -> list[Any]:
    samples = texts()
    for number, sample in enumerate(samples):
        sample["labels"][1 + number % 3 :: 2] = -100
    return samples


def ragged_texts() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    tokens = [_tokens(generator, 5 + number % 8) for number in range(SAMPLES)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def translations() -> list[Any]:
    generator, samples = torch.Generator().manual_seed(5), []
    for number in range(SAMPLES):
        labels = _tokens(generator, 8)
        labels[8 - number % 4 :] = -100
        samples.append({"input_ids": _tokens(generator), "labels": labels})
    return samples


def pictures(size: int = 32, channels: int = 3) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        generator = torch.Generator().manual_seed(6)
        return [
            {"pixel_values": torch.randn(channels, size, size, generator=generator), "labels": number * 7 % CLASSES}
            for number in range(SAMPLES)
        ]

    return make


def vectors(width: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(width, generator=generator), number * 7 % CLASSES) for number in range(SAMPLES)]


def sequences(width: int = 16, length: int = 6) -> list[Any]:
    """Rows of vectors, each row with a class of its own."""
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randn(length, width, generator=generator), torch.randint(0, CLASSES, (length,), generator=generator))
        for _ in range(SAMPLES)
    ]


def token_pairs() -> list[Any]:
    generator = torch.Generator().manual_seed(9)
    return [(_tokens(generator, 8), torch.randint(0, CLASSES, (8,), generator=generator)) for _ in range(SAMPLES)]


def images() -> list[Any]:
    generator = torch.Generator().manual_seed(10)
    return [(torch.randn(3, 16, 16, generator=generator), number * 7 % CLASSES) for number in range(SAMPLES)]
