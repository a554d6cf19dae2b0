"""A student's U-Net: a module of their own, masks as targets, metrics of their own and two learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import BinaryJaccardIndex

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.engine.build import build
from tightfit.engine.step import take_step
from tightfit.measure.memory import sample_step
from tightfit.planner.estimator import estimate

HERE = "tests.journeys.test_unet:"
SIZE, BATCH, STEPS, HELD_OUT = 32, 4, 3, 7
FAST, SLOW = 1e-2, 1e-3
PLANS: list[dict[str, Any]] = [{}, {"micro_batch": 2}, {"precision": "bf16-mixed"}, {"update_in_backward": True}]


class Block(nn.Sequential):
    """Two convolutions, each with a norm and a ReLU."""

    def __init__(self, given: int, width: int) -> None:
        pairs = ((given, width), (width, width))
        super().__init__(
            *(
                layer
                for source, target in pairs
                for layer in (nn.Conv2d(source, target, 3, padding=1), nn.GroupNorm(4, target), nn.ReLU())
            )
        )


class UNet(nn.Module):
    """A U-Net of two levels: images (samples, 3, s, s) to logits (samples, 1, s, s). Source: Ronneberger et al.
    2015, arXiv:1505.04597."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(3, 8), Block(8, 16)])
        self.bottom = Block(16, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.decoder = nn.ModuleList([Block(32, 16), Block(16, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, hidden = [], images
        for block in self.encoder:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = functional.max_pool2d(hidden, 2)
        hidden = self.bottom(hidden)
        for up, block in zip(self.up, self.decoder, strict=True):
            hidden = block(torch.cat([up(hidden), skips.pop()], dim=1))
        return self.head(hidden)


def segments(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Noisy images and the masks of their bright halves."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        mask = (torch.rand(1, SIZE // 4, SIZE // 4, generator=generator) > 0.5).float()
        mask = mask.repeat_interleave(4, 1).repeat_interleave(4, 2)
        found.append((mask + 0.3 * torch.randn(3, SIZE, SIZE, generator=generator), mask))
    return found


def dice(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean Dice coefficient of the samples: 2 |A and B| / (|A| + |B|)."""
    found, masks = (outputs > 0).double().flatten(1), batch[1].double().flatten(1)
    return (2 * (found * masks).sum(1) / (found.sum(1) + masks.sum(1))).mean()


def pixels(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.sigmoid(), batch[1].int()


def job(**fields: Any) -> tightfit.Job:
    return tightfit.Job(
        model=UNet,
        data=segments(BATCH * STEPS, 1),
        loss=nn.BCEWithLogitsLoss(),
        evaluate={
            "data": segments(HELD_OUT, 2),
            "metrics": {"dice": dice, "jaccard": (BinaryJaccardIndex(), pixels)},
        },
        train={
            "batch": BATCH,
            "steps": STEPS,
            "learning_rate": FAST,
            "epsilon": cases.EPSILON,
            "groups": [{"match": "encoder.*", "learning_rate": SLOW}],
            **fields,
        },
    )


def trained(fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    run = tightfit.build(job(), tightfit.Plan(**fields))
    losses = [step.loss for step in tightfit.train(run)]
    return losses, cases.state_of(run), tightfit.evaluate_metrics(run)


def trained_plainly() -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    run = tightfit.build(job())  # for the initial weights and the order of the samples
    model = UNet()
    model.load_state_dict(run.model.state_dict())
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("encoder.")]
    groups: list[dict[str, Any]] = [{"params": list(model.encoder.parameters()), "lr": SLOW}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=FAST, eps=cases.EPSILON, weight_decay=0.0)
    losses = []
    for _, (batch,) in zip(range(STEPS), run.data.steps(0, None), strict=False):
        loss = functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    images, masks = (torch.stack(column) for column in zip(*segments(HELD_OUT, 2), strict=True))
    with torch.no_grad():
        outputs = model(images)
    jaccard = BinaryJaccardIndex()
    jaccard.update(*pixels(outputs, (images, masks)))
    metrics = {
        "loss": functional.binary_cross_entropy_with_logits(outputs, masks).item(),
        "dice": dice(outputs, (images, masks)).item(),
        "jaccard": jaccard.compute().item(),
    }
    return losses, cases.state(model), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"micro_batch": 2, "update_in_backward": False}, {"zero": 2, "dp_shard": 2}], ids=str
)
def test_it_trains_and_scores_as_plain_pytorch_does(fields: dict[str, Any]) -> None:
    losses, weights, metrics = trained_plainly()
    devices = tightfit.Plan(**fields).devices
    results = [trained(fields)] if devices == 1 else together(devices, HERE + "trained", fields)
    for found, others, scores in results:
        assert found == pytest.approx(losses, rel=2e-6)
        assert cases.distance(others, weights) <= 2e-6
        assert scores == pytest.approx(metrics, rel=1e-5)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_its_peak_is_predicted(fields: dict[str, Any]) -> None:
    sample, plan = job(), tightfit.Plan(**fields)
    run = build(sample, plan)
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)
    _, measured = sample_step(run, next(steps), 1)
    predicted = estimate(sample, plan).peak
    tensors = predicted.total - predicted.rows["runtime"] - predicted.rows["allocator"]
    assert tensors == pytest.approx(measured.total, rel=0.05)


def test_explain_names_the_groups() -> None:
    said = tightfit.explain(job(), plan=tightfit.Plan())
    assert "encoder.*" in said
    assert "learning rate 0.001" in said
