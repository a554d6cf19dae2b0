"""What several pipeline ranks and replicas have copies of stays the same on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import tightfit
from tests.pool import together
from tightfit.errors import InputError

WIDTH, TOKENS, HERE = 16, 32, "tests.parallel.pipeline.test_copies:"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Averaging(Block):
    """Has a buffer that only training writes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return functional.dropout(super().forward(x), 0.1, self.training)


class Language(nn.Module):
    """A position embedding comes first, so that the tied weight has another place on each rank."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.position, self.token = nn.Embedding(8, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token.weight)


def averaging() -> nn.Module:
    return Language(Averaging)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, 1), batch["labels"].flatten())


def trained(model: Any, fields: dict[str, Any], **train: Any) -> Any:
    ids = [torch.tensor([(row * 7 + place * 3) % TOKENS for place in range(8)]) for row in range(64)]
    job = tightfit.Job(
        model=model,
        data=[{"input_ids": row, "labels": row} for row in ids],
        loss=loss,
        train=tightfit.Train(batch=8, steps=4, learning_rate=1e-2, **train),
        allow=["bf16", "stochastic-rounding"],
    )
    run = tightfit.build(job, tightfit.Plan(**fields))
    return run, [step.loss for step in tightfit.train(run)]


def tied_weight(rounding: str) -> Tensor:
    run, _ = trained(Language, {"pp": 2, "micro_batch": 4, "precision": "bf16-true", "rounding": rounding})
    return dict(run.model.named_parameters())["token.weight"].detach()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_tied_weights_of_two_ranks_are_rounded_alike(rounding: str) -> None:
    first, last = together(2, HERE + "tied_weight", rounding)
    assert torch.equal(first, last)


def updated_by_muon(pp: int) -> tuple[list[str], list[float]]:
    run, losses = trained(Language, {"pp": pp, "micro_batch": 4}, optimizer="muon")
    names = {one: name for name, one in run.model.named_parameters()}
    groups = (group for group in run.optimizer.param_groups if group["algorithm"] == "muon")
    return [names[one] for group in groups for one in group["params"]], losses


def test_muon_updates_the_same_matrices_in_a_pipeline() -> None:
    """The model's head is no nn.Linear: the last linear layer of a stage is not taken for it."""
    (whole, expected) = updated_by_muon(1)
    assert whole == [f"blocks.{number}.{name}.weight" for number in range(4) for name in ("up", "down")]
    stages = together(2, HERE + "updated_by_muon", 2)
    assert [name for names, _ in stages for name in names] == whole
    for _, losses in stages:
        assert losses == pytest.approx(expected, rel=1e-4)


class Rotating(Block):
    """Passes a complex tensor and a tensor of bytes on to the next block."""

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, turned, kept = state
        x = super().forward(x) * kept.unsqueeze(-1)
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2).contiguous())
        return x + torch.view_as_real(turned).flatten(-2), turned + pairs * 1j, kept * 1


class Phases(Language):
    def __init__(self, wide: bool = False) -> None:
        super().__init__(Rotating)
        self.wide = wide

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        turned = torch.zeros(*input_ids.shape, WIDTH // 2, dtype=torch.complex64)
        kept = (input_ids % 5 > 0).to(torch.int16 if self.wide else torch.uint8)
        state = (x, turned, kept)
        for block in self.blocks:
            state = block(state)
        return functional.linear(self.norm(state[0]), self.token.weight)


def losses_of_phases(pp: int) -> list[float]:
    return trained(Phases, {"pp": pp, "micro_batch": 4})[1]


def test_complex_numbers_and_bytes_cross_a_boundary() -> None:
    expected = losses_of_phases(1)
    for losses in together(2, HERE + "losses_of_phases", 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def refused_type() -> str:
    try:
        trained(lambda: Phases(wide=True), {"pp": 2, "micro_batch": 4})
    except InputError as error:
        return str(error)
    return ""


def test_a_type_that_stages_cannot_send_is_refused() -> None:
    assert "a torch.int16 tensor with 2 dimensions, which stages cannot send" in together(2, HERE + "refused_type")[0]


def difference_of_replicas(check_split: str) -> float:
    run, _ = trained(averaging, {"pp": 2, "dp_replicate": 2, "micro_batch": 2}, check_split=check_split)
    buffer = next(one for name, one in run.model.named_buffers() if name.endswith("mean") and bool(one.any()))
    found = [torch.empty_like(buffer) for _ in range(2)]
    dist.all_gather(found, buffer, group=run.mesh.group("dp_replicate"))
    return float((found[0] - found[1]).abs().max())


def test_the_check_of_a_split_does_not_end_averaging() -> None:
    """It runs models with dropout in evaluation mode, in which this model writes no buffer."""
    assert together(4, HERE + "difference_of_replicas", "always") == [0.0] * 4


def test_a_loss_that_reads_weights_of_blocks_is_named() -> None:
    def total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return loss(model(batch["input_ids"]), batch) * len(batch["labels"]) + 0.01 * penalty

    ids = torch.arange(8)
    train = tightfit.Train(batch=4, steps=1)
    data = [{"input_ids": ids, "labels": ids}] * 8
    job = tightfit.Job(model=Language, data=data, loss=tightfit.Objective(total, len), train=train)
    with pytest.raises(InputError, match="a block and outside of the blocks, as by a loss that reads weights"):
        tightfit.estimate(job, tightfit.Plan(pp=2, micro_batch=2), "l4:2")
