"""Modules of our own in the zoo: their losses and samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.zoo import layers, nets
from tests.zoo.entry import CLASSES, SAMPLES, Entry, images, pair, sequences, summed, token_pairs, vectors


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of each one's sum: a loss of the job's own."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / len(labels)


def of_dict(output: Any, batch: Any) -> Tensor:
    return of_classes(output["scores"], batch[1]) + 0.01 * output["hidden"].square().mean()


def plain_of_dict(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(batch[0])
    loss = functional.cross_entropy(output["scores"].flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + 0.01 * output["hidden"].square().mean() * len(batch[0]), len(batch[0])


def of_pair(output: Any, batch: Any) -> Tensor:
    return of_classes(output[0], batch[1]) + 0.1 * output[1].mean()


def plain_of_pair(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits, aside = model(batch[0])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + 0.1 * aside.sum(), len(batch[0])


def several(model: nn.Module, batch: Any) -> Tensor:
    """Two losses, summed over the labels that count: the second shares each sample's part among them."""
    logits, sizes = model(batch[0])
    labels = batch[1]
    counts = (labels != -100).sum(1)
    return (
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        + (counts * (sizes - labels.clamp_min(0).float().mean(1)).square()).sum()
    )


def plain_several(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits, sizes = model(batch[0])
    loss, count = summed(logits, batch[1])
    counts = (batch[1] != -100).sum(1)
    return loss + (counts * (sizes - batch[1].clamp_min(0).float().mean(1)).square()).sum(), count


def counted(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def plain_logits(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return summed(model(batch[0]).logits, batch[1])


def of_towers(output: Tensor, batch: Any) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, batch["labels"].float())


def plain_towers(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(batch["user"], batch["words"])
    return functional.binary_cross_entropy_with_logits(output, batch["labels"].float(), reduction="sum"), len(output)


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def plain_squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    loss = (model(batch[0]) - batch[1]).square()
    return loss.mean((1, 2)).sum(), len(loss)


def uneven() -> list[Any]:
    """Most labels of some samples do not count, all of one."""
    found = []
    for number, (tokens, labels) in enumerate(token_pairs()):
        labels = labels.clone()
        labels[: number % 9] = -100
        found.append((tokens, labels))
    return found


def visits() -> list[Any]:
    return [
        {"user": tokens[0], "words": tokens[1:6], "labels": number % 2}
        for number, (tokens, _) in enumerate(token_pairs())
    ]


def targets() -> list[Any]:
    generator = torch.Generator().manual_seed(20)
    return [(tokens, torch.randn(8, CLASSES, generator=generator)) for tokens, _ in token_pairs()[:SAMPLES]]


def module(name: str, made: Any, samples: Any = token_pairs, plain: Any = pair, **own: Any) -> Entry:
    return Entry(name, "custom", partial(_itself, made), samples, plain, **own)


def _itself(made: Any) -> Any:
    return made


CUSTOM = [
    module("net", nets.Net),
    module("positions-buffer", nets.PositionsBuffer),
    module("exponential", nets.Exponential),
    module("skip-from-embedding", nets.SkipFromEmbedding),
    module("skip-from-input", nets.SkipFromInput),
    module("sum-of-blocks", nets.SumOfBlocks),
    module("first-into-each", nets.FirstIntoEach),
    module("dense", nets.Dense),
    module("horseshoe", nets.Horseshoe),
    module("between-blocks", nets.BetweenBlocks),
    module("normalised-weight", nets.NormalisedWeight),
    module("shared-blocks", nets.SharedBlocks),
    module("tied-weights", nets.TiedWeights),
    module("called-twice", nets.CalledTwice),
    module("each-twice", nets.EachTwice),
    module("reversed", nets.Reversed),
    module("head-first", layers.HeadFirst),
    module("frozen", nets.Frozen),
    module("frozen-norms", nets.FrozenNorms),
    module("unused", nets.Unused),
    module("unused-in-blocks", nets.UnusedInBlocks),
    module("unused-block", nets.UnusedBlock),
    module("used-twice", nets.UsedTwice),
    module("head-of-embedding", nets.HeadOfEmbedding),
    module("routed", layers.Routed),
    module("conditional", nets.Conditional),
    module("evaluated", nets.Evaluated),
    module("weight-norm", nets.WeightNorm),
    module("spectral-norm", nets.SpectralNorm, together=True),
    module("counts", nets.Counts),
    module("running-mean", nets.RunningMean, together=True),
    module("own-function", nets.OwnFunction),
    module("dict-output", nets.DictOutput, plain=plain_of_dict, loss=of_dict),
    module("dataclass-output", nets.DataclassOutput, plain=plain_logits),
    module("tuple-blocks", nets.TupleBlocks, plain=plain_of_pair, loss=of_pair),
    module("dict-blocks", nets.DictBlocks),
    module("mask-by-name", nets.MaskByName),
    module("in-place", nets.InPlace),
    module("detached", nets.Detached),
    module("double", nets.Double),
    module("checkpointed", nets.Checkpointed),
    module("caches", nets.Caches),
    module("leaves-returned", nets.LeavesReturned),
    module("keeps-returned", nets.KeepsReturned),
    module("complex", nets.Complex),
    module("fourier", nets.Fourier),
    module("lstm", layers.Recurrent),
    module("gru", layers.Gated),
    module("recurrent-cells", layers.Cells),
    module("batch-norm", layers.Convolution, images, together=True),
    module("group-norm", layers.Grouped, images),
    module("u-net", layers.UNet, images),
    module("dropout", nets.Dropping, random=True),
    module("torch-encoder", layers.Attention),
    module("perceptron", layers.Perceptron, vectors),
    module("widths", layers.Widths, sequences),
    module("odd-parameters", layers.OddParameters, vectors),
    module("wide-buffer", nets.WideBuffer),
    module("towers", layers.Towers, visits, plain_towers, loss=of_towers),
    module("scan", layers.Scan),
    module("uneven-labels", nets.Net, uneven),
    module("several-losses", nets.TwoHeads, uneven, plain_several, loss=tightfit.Objective(several, counted, "tokens")),
    module("squares", nets.Net, targets, plain_squares, loss=squares),
]
