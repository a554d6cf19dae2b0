"""Muon updates hidden matrices, and AdamW the rest, like torch's two optimizers side by side."""

import torch
from torch import nn

import tightfit
from tests import tiny
from tightfit.models import model_factory
from tightfit.optim.muon import MuonWithAdamW, head_of, hidden_matrices


class TinyLM(nn.Module):
    """Embedding, a hidden matrix of each kind, a norm, and a head that may be the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Parameter(torch.randn(8, 6))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.up(self.embedding(tokens))) @ self.mix)


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if any(parameter is p for p in parameters)}


def test_hidden_matrices_exclude_embedding_head_and_vectors() -> None:
    """Frozen matrices are excluded too."""
    for tied in (False, True):
        model = TinyLM(tied)
        assert names_of(model, hidden_matrices(model, head_of(model))) == {"up.weight", "mix"}
    model.mix.requires_grad_(False)
    assert names_of(model, hidden_matrices(model, head_of(model))) == {"up.weight"}


def test_equals_torchs_two_optimizers_side_by_side() -> None:
    torch.manual_seed(0)
    one, two = TinyLM(False), TinyLM(False)
    two.load_state_dict(one.state_dict())
    tokens = torch.randint(0, 11, (4, 5))

    def parts(model: nn.Module) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
        hidden = hidden_matrices(model, head_of(model))
        others = [p for p in model.parameters() if not any(p is h for h in hidden)]
        return torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.02)

    combined, apart = MuonWithAdamW(*parts(one)), parts(two)
    for _ in range(3):
        for model in (one, two):
            model.zero_grad()
            model(tokens).square().sum().backward()
        combined.step()
        for part in apart:
            part.step()
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_learning_rate_and_state_are_those_of_its_own_groups() -> None:
    model = TinyLM(False)
    hidden = hidden_matrices(model, head_of(model))
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    optimizer = MuonWithAdamW(torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.02))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    loss = model(torch.tensor([[1, 2]])).square().sum()
    loss.backward()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert set(optimizer.state_dict()["state"]) == set(range(len(before)))


class Head(nn.Module):
    def __init__(self, *outer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3))
        self.outer = nn.Sequential(*outer)


def test_the_head_is_the_last_linear_layer_outside_of_blocks() -> None:
    assert head_of(Head(nn.Linear(4, 9))) == {"outer.0.weight", "outer.0.bias"}
    assert head_of(Head(nn.LayerNorm(4))) == frozenset()
    assert head_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))) == {"2.weight", "2.bias"}
    assert head_of(model_factory(tightfit.ModelSpec(**tiny.LLAMA))()) == {"lm_head.weight"}
