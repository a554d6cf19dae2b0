"""The experts that tokens are assumed to choose on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.models.expert_routing import RoutedExperts, spread_over_experts

TOKENS, EXPERTS, CHOSEN, WIDTH = 24, 6, 2, 8


def counts(imbalance: float, tokens: int = TOKENS, chosen: int = CHOSEN) -> list[int]:
    index = spread_over_experts((tokens, EXPERTS), -1, chosen, True, imbalance)
    assert index.shape == (tokens, chosen)
    assert all(len(set(row)) == chosen for row in index.tolist())  # no token chooses an expert twice
    return torch.bincount(index.flatten(), minlength=EXPERTS).tolist()


def test_tokens_are_spread_evenly() -> None:
    assert counts(1.0) == [8] * EXPERTS


@pytest.mark.parametrize("imbalance", [1.25, 1.5, 2.0])
def test_the_busiest_expert_has_its_share(imbalance: float) -> None:
    *others, busiest = counts(imbalance)
    assert busiest == 8 * imbalance
    assert sum(others) + busiest == TOKENS * CHOSEN
    assert max(others) - min(others) <= 1


def test_no_expert_gets_more_than_all_tokens() -> None:
    assert counts(100.0)[-1] == TOKENS
    assert counts(1.5, chosen=EXPERTS) == [TOKENS] * EXPERTS


def test_the_experts_may_be_in_any_dimension() -> None:
    index = spread_over_experts((2, EXPERTS, 3), 1, 1, False, 1.0)
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]


def by_loop(hidden: Tensor, scores: Tensor) -> list[torch.Size]:
    chosen = scores.topk(CHOSEN, -1).indices
    mask = torch.nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    found = []
    for expert in mask.sum((1, 2)).nonzero():
        _, token = torch.where(mask[expert[0]])
        found.append(hidden[token].shape)
    return found


def by_split(hidden: Tensor, scores: Tensor) -> list[torch.Size]:
    """As JetMoE does: gates of zeros and ones, sizes read as numbers."""
    chosen = scores.topk(CHOSEN, dim=1).indices
    gates = torch.zeros([len(hidden), EXPERTS]).scatter(1, chosen, 1).long()
    order = chosen.flatten().sort(0).indices.div(CHOSEN, rounding_mode="trunc")
    return [part.shape for part in hidden[order].split(gates.sum(0).tolist(), dim=0)]


def by_equality(hidden: Tensor, scores: Tensor) -> list[torch.Size]:
    best = scores.argmax(-1)
    return [hidden[best == expert].shape for expert in range(EXPERTS)]


def by_count(hidden: Tensor, scores: Tensor) -> list[torch.Size]:
    chosen = scores.max(-1).indices
    repeated = hidden[chosen.argsort()].split(torch.bincount(chosen).tolist())
    return [part.shape for part in repeated]


def by_two_choices(hidden: Tensor, scores: Tensor) -> list[torch.Size]:
    """As NLLB-MoE does: the second expert is the best of all but the first."""
    first = torch.nn.functional.one_hot(scores.argmax(-1), EXPERTS)
    others = scores.masked_fill(first.bool(), float("-inf"))
    both = (first + torch.nn.functional.one_hot(others.argmax(-1), EXPERTS)).bool()
    return [hidden[both[:, expert]].shape for expert in range(EXPERTS)]


def test_a_second_choice_is_of_another_expert() -> None:
    with FakeTensorMode(), RoutedExperts():
        found = by_two_choices(torch.empty(TOKENS, WIDTH), torch.empty(TOKENS, EXPERTS))
    assert found == [(2 * TOKENS // EXPERTS, WIDTH)] * EXPERTS


@pytest.mark.parametrize(("route", "chosen"), [(by_loop, 2), (by_split, 2), (by_equality, 1), (by_count, 1)])
def test_each_expert_gets_its_tokens(route: Any, chosen: int) -> None:
    with FakeTensorMode(), RoutedExperts() as mode:
        found = route(torch.empty(TOKENS, WIDTH), torch.empty(TOKENS, EXPERTS))
    assert found == [(TOKENS * chosen // EXPERTS, WIDTH)] * EXPERTS
    assert mode.routing.choices == {(EXPERTS, chosen)}


def test_a_change_through_a_view_is_not_overlooked() -> None:
    """What is no longer known is refused, not computed from old values."""
    with FakeTensorMode(), RoutedExperts():
        mask = torch.zeros(TOKENS, EXPERTS).scatter(1, torch.empty(TOKENS, EXPERTS).topk(1).indices, 1)
        mask[:2].copy_(torch.empty(2, EXPERTS))
        with pytest.raises(Exception, match="nonzero"):
            mask.nonzero()


def test_other_values_stay_unknown() -> None:
    with FakeTensorMode(), RoutedExperts(), pytest.raises(Exception, match="nonzero"):
        torch.zeros(4).nonzero()
