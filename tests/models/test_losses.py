"""torch's own losses train as in plain PyTorch; for losses that cannot be trained, one sentence
says what to give."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tightfit


class Perceptron(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden, self.out = nn.Linear(5, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class UNet(nn.Module):
    """Prints itself in many lines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(40)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 5, generator=DRAW)
REAL, BITS = torch.randn(24, 3, generator=DRAW), torch.randint(0, 2, (24, 3), generator=DRAW)
CLASSES = torch.randint(0, 3, (24,), generator=DRAW)
CLASSES[[1, 4, 5, 6]] = -100
LOSSES: list[tuple[Any, Tensor]] = [
    (nn.BCEWithLogitsLoss(), BITS),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), BITS.float()),
    (nn.MSELoss, REAL),
    (functional.mse_loss, REAL),
    (functional.l1_loss, REAL),
    (nn.HuberLoss(delta=0.3), REAL),
    (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    (functional.cross_entropy, CLASSES),
    (nn.CrossEntropyLoss(), REAL.softmax(1)),
    (nn.MultiLabelSoftMarginLoss(), BITS.float()),
    (nn.MultiMarginLoss(), CLASSES.clamp(min=0)),
]


def plain(loss: Any, targets: Tensor, steps: int) -> tuple[list[float], nn.Module]:
    """Plain PyTorch on the same samples in tightfit's order."""
    job = job_of(loss, targets)
    run = tightfit.build(job, tightfit.Plan())
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    made = loss() if isinstance(loss, type) else loss
    seen = []
    for (batch,) in run.data.steps(0, 8 * steps):
        output = model(batch[0])
        target = batch[1].float() if isinstance(made, nn.BCEWithLogitsLoss) else batch[1]
        value = made(output, target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    return seen, model


def job_of(loss: Any, targets: Tensor | None = None, **fields: Any) -> tightfit.Job:
    data = list(zip(INPUTS, REAL if targets is None else targets, strict=True))
    train = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.5, "batch": 8, "steps": 3, "trackers": []}
    return tightfit.Job(**{"model": Perceptron, "data": data, "loss": loss, "train": train, "allow": [], **fields})


@pytest.mark.parametrize(("loss", "targets"), LOSSES, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_torch_s_losses_train_like_plain_pytorch(loss: Any, targets: Tensor) -> None:
    expected, reference = plain(loss, targets, 3)
    for plan in (tightfit.Plan(), tightfit.Plan(micro_batch=3)):
        run = tightfit.build(job_of(loss, targets), plan)
        found = [step.loss for step in tightfit.train(run)]
        assert found == pytest.approx(expected, rel=1e-6)
        for one, other in zip(run.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_torch_s_losses_accept_dicts_and_are_predicted() -> None:
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, BITS, strict=True)]
    job = job_of(nn.BCEWithLogitsLoss(), data=data)
    expected = [
        step.loss for step in tightfit.train(tightfit.build(job_of(nn.BCEWithLogitsLoss(), BITS), tightfit.Plan()))
    ]
    assert [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan()))] == expected
    assert tightfit.estimate(job, tightfit.Plan(), tightfit.Machine.named("a100-80gb")).peak_bytes > 0


def without_labels() -> list[Any]:
    return [{"x": x} for x in INPUTS]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("a model", {"model": UNet()}, r"job: model=UNet\(\.\.\.\): is a UNet(.|\n)*model=lambda: UNet\(\.\.\.\)"),
    (
        "samples without labels",
        {"data": without_labels()},
        r"a dict with the keys x, without a target, which the loss needs(.|\n)*'labels' key",
    ),
    ("no loss and no labels", {"data": without_labels(), "loss": None}, r"the fields x and no labels"),
    (
        "fields that forward does not take",
        {"data": [{"image": x, "labels": y} for x, y in zip(INPUTS, REAL, strict=True)]},
        r"fields image, and the model's forward does not take these(.|\n)*as forward names",
    ),
    (
        "a loss of output and target",
        {"loss": lambda output, target: ((output - target) ** 2).mean()},
        r"called as loss\(output, batch\), and the data gives a list of 2 items as batch",
    ),
    ("a loss without a graph", {"loss": lambda output, batch: output.detach().mean()}, r"no graph(.|\n)*\.detach\(\)"),
    ("a loss that is no number", {"loss": lambda output, batch: output}, r"not a scalar tensor"),
    ("a number", {"loss": lambda output, batch: output.mean().item()}, r"float\[\], not a scalar tensor"),
    ("a sum", {"loss": nn.MSELoss(reduction="sum")}, r"use reduction='mean'"),
    (
        "weights of classes",
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))},
        r"divides by the weights(.|\n)*Objective",
    ),
    ("three arguments", {"loss": nn.TripletMarginLoss()}, r"more than an output and a target(.|\n)*def loss"),
    ("another shape", {"model": lambda: Perceptron(1)}, r"shape \(8, 1\), and the targets have shape \(8, 3\)"),
    (
        "an objective without a graph",
        {"loss": tightfit.Objective(lambda model, batch: torch.zeros(()), len)},
        r"no graph",
    ),
]


@pytest.mark.parametrize(("fields", "says"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_losses_that_cannot_be_trained_are_refused_clearly(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(tightfit.InputError, match=says) as raised:
        for _ in tightfit.train(tightfit.build(job_of(**{"loss": nn.MSELoss(), **fields}), tightfit.Plan())):
            pass
    assert len(re.findall(r"\n", str(raised.value))) <= 2
    assert len(str(raised.value)) < 500
