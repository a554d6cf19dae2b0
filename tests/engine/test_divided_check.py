"""A user's own model that tp or cp divides is compared with the undivided model before the first step."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import tightfit
from tests.pool import together
from tightfit.engine import divided_check
from tightfit.errors import InputError, TightfitWarning
from tightfit.machine import Machine
from tightfit.models.unchanged import is_unchanged
from tightfit.planner.estimator import Estimator
from tightfit.planner.parallelism import by_lower_bound

HERE = "tests.engine.test_divided_check:"
WIDTH = 32


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


class NormedMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


def norm_in_mlp() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = NormedMlp(model.config)
    return model


class NormedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(x), dim=-1)


def norm_of_all_heads() -> nn.Module:
    """The first loss hardly depends on it: only the gradients show it."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = NormedLinear(WIDTH, WIDTH, bias=False)
    return model


class ScaledMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def scaled_mlp() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = ScaledMlp(model.config)
    return model


class LogScaledMlp(LlamaMLP):
    """Its loss is not a number once small random numbers are added to the weights."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((64,), 1e-9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.log(self.scale).mean()


def log_scaled_mlp() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = LogScaledMlp(model.config)
    return model


class ShiftingLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        before = functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(0.5 * hidden_states + 0.5 * before, *arguments, **named)


def shifted_tokens() -> nn.Module:
    model = llama()
    model.model.layers = nn.ModuleList([ShiftingLayer(model.config, number) for number in range(2)])
    return model


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


def own_positions() -> nn.Module:
    model = llama()
    model.model.embed_tokens = Positions()
    return model


class Gate(nn.Module):
    """A norm between two sharded layers, the second of which begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.normalize(self.up(x), dim=-1))


class BeginsAtZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Gate(), Gate()), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


TABLE = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SETTINGS: dict[str, Any] = {"steps": 2, "batch": 4, "optimizer": "sgd", "learning_rate": 0.1, "trackers": []}


def job(name: str, **settings: Any) -> tightfit.Job:
    generator = torch.Generator().manual_seed(0)
    train = tightfit.Train(**{**SETTINGS, **settings})
    if name == "BeginsAtZero":
        samples = [(torch.randn(16, generator=generator), number % 3) for number in range(8)]
        return tightfit.Job(model={"python": HERE + name, "tensor_parallel": TABLE}, data=samples, train=train)
    ids = torch.randint(64, (8, 16), generator=generator)
    return tightfit.Job(
        model=globals()[name], data=[{"input_ids": one, "labels": one.clone()} for one in ids], train=train
    )


def trained(name: str, fields: dict[str, Any], settings: dict[str, Any]) -> str | list[float]:
    """The losses, or why the plan is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return [
                step.loss for step in tightfit.train(tightfit.build(job(name, **settings), tightfit.Plan(**fields)))
            ]
        except InputError as error:
            return str(error)


TP: dict[str, Any] = {"tp": 2}
CP: dict[str, Any] = {"cp": 2}
SEQUENCES: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("norm_of_all_heads", TP),
        ("shifted_tokens", CP),
        ("BeginsAtZero", TP),
        ("norm_in_mlp", TP),
        ("norm_in_mlp", {**TP, "precision": "bf16-mixed"}),
        ("own_positions", CP),
        ("shifted_tokens", SEQUENCES),
        ("norm_in_mlp", {**TP, "pp": 2, "micro_batch": 2, "precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_a_model_that_differs_when_divided_is_refused(name: str, fields: dict[str, Any]) -> None:
    for said in together(tightfit.Plan(**fields).devices, HERE + "trained", name, fields, {}):
        assert "the divided model computes something else than the undivided model" in said
        assert "and the gradient of" in said


def test_nothing_is_compared_with_check_split_never() -> None:
    for losses in together(2, HERE + "trained", "norm_in_mlp", TP, {"check_split": "never"}):
        assert len(losses) == 2


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("scaled_mlp", {**TP, "precision": "bf16-mixed", "chunked_loss": 16}),
        ("scaled_mlp", CP),
        ("scaled_mlp", SEQUENCES),
        ("norm_in_mlp", CP),
        ("log_scaled_mlp", CP),
    ],
    ids=str,
)
def test_a_model_that_computes_the_same_trains(name: str, fields: dict[str, Any]) -> None:
    """The check changes neither weights nor random numbers."""
    checked, plain = (
        together(2, HERE + "trained", name, fields, {"check_split": check}) for check in ("always", "never")
    )
    assert checked == plain
    if "precision" not in fields:
        (alone,) = together(1, HERE + "trained", name, {}, {})
        assert checked[0] == pytest.approx(alone, rel=1e-5)


def without_room(name: str) -> list[str]:
    before, divided_check.AUTO_SHARE = divided_check.AUTO_SHARE, 0.0
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            list(tightfit.train(tightfit.build(job(name), tightfit.Plan(**TP))))
    finally:
        divided_check.AUTO_SHARE = before
    return [str(one.message) for one in said if issubclass(one.category, TightfitWarning)]


def test_a_check_of_a_large_model_is_left_out_with_a_warning() -> None:
    for said in together(2, HERE + "without_room", "norm_in_mlp"):
        assert any("was not compared with the undivided model" in one for one in said)


def hooked() -> nn.Module:
    model = llama()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def replaced_forward() -> nn.Module:
    model = llama()
    model.model.norm.forward = lambda x: x  # type: ignore[method-assign]
    return model


def own_config() -> nn.Module:
    model = llama()
    return LlamaForCausalLM(copy.deepcopy(model.config))


@pytest.mark.parametrize(
    ("make", "unchanged"),
    [
        (llama, True),
        (own_config, True),
        (hooked, False),
        (replaced_forward, False),
        (norm_in_mlp, False),
        (norm_of_all_heads, False),
        (lambda: nn.Linear(2, 2), False),
    ],
)
def test_only_unchanged_models_of_transformers_need_no_check(make: Any, unchanged: bool) -> None:
    assert is_unchanged(tightfit.Job(model=make, data=[(torch.zeros(2), 0)] * 2)) is unchanged


@pytest.mark.parametrize(
    ("name", "batch", "degrees"),
    [
        ("llama", 8, {"tp", "cp", "pp"}),
        ("norm_in_mlp", 8, {"pp"}),
        ("BeginsAtZero", 8, {"tp", "pp"}),  # it has a table
        ("norm_in_mlp", 2, {"tp", "cp", "pp"}),  # data parallelism alone cannot use four devices
    ],
)
def test_a_search_does_not_divide_unchecked_models(name: str, batch: int, degrees: set[str]) -> None:
    estimator = Estimator(job(name, batch=batch), Machine.named("l4:4"))
    tried = by_lower_bound(estimator, tightfit.Plan(), {})
    assert {degree for _, sizes in tried for degree in sizes} == degrees


def test_shapes_that_fit_only_undivided_are_explained() -> None:
    run: Any = SimpleNamespace(plan=tightfit.Plan(tp=2))
    with (
        pytest.raises(InputError, match=r"plan: tp=2.*fails when it is divided, and not as a whole"),
        divided_check._naming_divided_shapes(run),
    ):
        torch.ones(4) + torch.ones(2)
