"""Parameter groups: which parameters a pattern and a word match, and how learning rates follow the
schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.job_sections.train import OptimizerName
from tightfit.optim import make_optimizer
from tightfit.optim.groups import begin_schedule, changed_rates, check_matches, names_of_parameters, set_learning_rates
from tightfit.optim.in_batches import MultiTensor
from tightfit.optim.per_parameter import PerParameter

NAMES = get_args(OptimizerName)


class Net(nn.Module):
    """An embedding that is also the head, two hidden layers, a norm over two dims, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm((6, 64))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, 11)
        self.head.weight = self.embed.weight


def options_of(**train: Any) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, by name."""
    model = Net()
    optimizer = make_optimizer(model, Train(**{"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.1, **train}))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize(
    ("words", "decayed"),
    [
        (None, {"embed.weight", "layers.0.weight", "layers.1.weight"}),
        (["norms", "biases", "embeddings"], {"layers.0.weight", "layers.1.weight"}),
        (["embeddings"], {*(name for name, _ in Net().named_parameters())} - {"embed.weight"}),
        ([], {name for name, _ in Net().named_parameters()}),
    ],
    ids=["default", "all three", "embeddings", "none"],
)
def test_no_decay_says_what_has_no_weight_decay(words: list[str] | None, decayed: set[str]) -> None:
    found = options_of(no_decay=words)
    assert {name for name, (_, decay) in found.items() if decay == 0.1} == decayed
    assert {decay for name, (_, decay) in found.items() if name not in decayed} <= {0.0}


def test_the_first_group_that_matches_counts() -> None:
    found = options_of(
        groups=[
            {"match": "head.*", "weight_decay": 0.3},  # the embedding by its other name, and the head's bias
            {"match": "layers.1.*", "learning_rate": 0.25},
            {"match": "*.bias", "learning_rate": 0.5, "weight_decay": 0.2},
        ]
    )
    assert found == {
        "embed.weight": (1.0, 0.3),
        "layers.0.weight": (1.0, 0.1),
        "layers.0.bias": (0.5, 0.2),
        "layers.1.weight": (0.25, 0.1),
        "layers.1.bias": (0.25, 0.0),  # the job's rule holds where a group says nothing
        "norm.weight": (1.0, 0.0),
        "norm.bias": (0.5, 0.2),
        "gain": (1.0, 0.0),
        "head.bias": (1.0, 0.3),
    }


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "*.embeding.*", "learning_rate": 1.0}], r"matches no parameter(.|\n)*embed\.weight"),
        (
            [{"match": "layers.*", "weight_decay": 0.0}, {"match": "layers.0.*", "weight_decay": 0.2}],
            "earlier groups match all(.|\n)*move this group before",
        ),
    ],
)
def test_a_group_of_no_parameter_is_refused(groups: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_matches(Train(groups=groups), names_of_parameters(Net()).values())


def test_a_group_that_says_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="neither a learning rate nor a weight decay"):
        Train(groups=[{"match": "*"}])
    with pytest.raises(InputError, match="did you mean 'match'"):
        Train(groups=[{"matches": "*", "weight_decay": 0.1}])


@pytest.mark.parametrize(
    ("name", "states", "kind"),
    [
        *((name, "fp32", None) for name in NAMES),
        *((name, "fp32", PerParameter) for name in NAMES),
        *(("adamw", states, kind) for states in ("bf16", "8-bit", "4-bit") for kind in (PerParameter, MultiTensor)),
        ("lamb", "8-bit", PerParameter),
    ],
)
def test_every_optimizer_follows_its_groups(name: str, states: Any, kind: Any) -> None:
    """A weight of a group moves as in a training with the group's options for all weights."""

    def wrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer if kind is None else kind(optimizer, states)

    own = {"learning_rate": 0.02, "weight_decay": 0.3}
    groups = [{"match": "layers.1.*", **own}]
    common: dict[str, Any] = {"optimizer": name, "learning_rate": 0.05, "weight_decay": 0.1, "no_decay": ()}
    ended = [
        _trained(Train(**common, groups=groups), wrap),
        _trained(Train(**common), wrap),
        _trained(Train(**{**common, **own}), wrap),
    ]
    for key, value in ended[0].items():
        other = ended[2 if key.startswith("layers.1.") else 1][key]
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-8)
    assert not torch.equal(ended[1]["layers.1.bias"], ended[2]["layers.1.bias"])


def _trained(train: Train, wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Weights after three steps with given gradients."""
    torch.manual_seed(0)
    model, generator = Net(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros have no norm, and do not decay
            parameter.add_(0.1)
    optimizer = wrap(make_optimizer(model, train))
    for step in range(3):
        set_learning_rates(optimizer, train.learning_rate * (step + 1) / 3)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_change_of_a_learning_rate_multiplies_the_schedule() -> None:
    model = Net()
    train = Train(learning_rate=1.0, groups=[{"match": "embed.*", "learning_rate": 0.5}])
    optimizer = make_optimizer(model, train)
    embedding = next(group for group in optimizer.param_groups if group["match"] == "embed.*")
    others = [group for group in optimizer.param_groups if group is not embedding]
    set_learning_rates(optimizer, 0.8)
    assert [group["lr"] for group in (embedding, *others)] == [0.4, *(0.8 for _ in others)]
    embedding["lr"] = 0.1  # by a quarter
    set_learning_rates(optimizer, 0.8)
    assert embedding["lr"] == pytest.approx(0.1)
    set_learning_rates(optimizer, 0.4)
    assert [group["lr"] for group in (embedding, *others)] == pytest.approx([0.05, *(0.4 for _ in others)])
    assert changed_rates(optimizer) == {"embed.*": pytest.approx(0.25)}
    embedding["lr"] = 0.0  # frozen
    set_learning_rates(optimizer, 0.2)
    assert embedding["lr"] == 0.0
    embedding["lr"] = 0.1  # and back to its schedule
    set_learning_rates(optimizer, 0.6)
    assert embedding["lr"] == pytest.approx(0.3)


def test_a_rate_in_a_tensor_stays_in_it() -> None:
    """A compiled update reads it there. Rounding it is no change by the user."""
    rate = torch.tensor(0.3)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=rate, foreach=False, capturable=False)
    begin_schedule(optimizer, 0.3)
    for scheduled in (0.1, 0.07, 0.03):
        set_learning_rates(optimizer, scheduled)
        (group,) = optimizer.param_groups
        assert group["lr"] is rate
        assert float(rate) == pytest.approx(scheduled)
        assert group["lr_factor"] == 1.0
    rate.fill_(0.015)
    set_learning_rates(optimizer, 0.02)
    assert float(rate) == pytest.approx(0.01)
