"""The repeated blocks of any model are found."""

import pytest
import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models import find_blocks, model_factory

SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "vocab_size": 5000,
}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Residual(4), Residual(4), nn.Linear(4, 2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Residual(4) for _ in range(3)])


def names(model: nn.Module, name: str | None = None) -> list[str]:
    blocks = find_blocks(model, name)
    assert all(model.get_submodule(path) is module for path, module in blocks)
    return [path for path, _ in blocks]


@pytest.mark.parametrize(
    ("spec", "lists"),
    [
        ({"architecture": "llama", **SMALL, "num_key_value_heads": 2}, ["model.layers"]),
        ({"architecture": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 3}, ["transformer.h"]),
        ({"architecture": "bert", **SMALL}, ["bert.encoder.layer"]),
        (
            {"architecture": "t5", "d_model": 16, "d_ff": 8, "num_layers": 3, "num_heads": 2, "vocab_size": 9},
            ["encoder.block", "decoder.block"],
        ),
        (
            {
                "architecture": "qwen2_moe",
                **SMALL,
                "num_key_value_heads": 2,
                "num_experts": 4,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 8,
            },
            ["model.layers"],
        ),
    ],
    ids=lambda value: value["architecture"] if isinstance(value, dict) else "",
)
def test_the_layers_of_transformers_are_found(spec, lists):
    with torch.device("meta"):
        model = model_factory(ModelSpec.parse(spec))()
    assert names(model) == [f"{path}.{i}" for path in lists for i in range(3)]


def test_the_layers_of_a_vit_are_found():
    with torch.device("meta"):
        model = model_factory(ModelSpec(preset="vit-b-16"))()
    found = names(model)
    assert len(found) == 12
    assert all(".layer" in name for name in found)


def test_one_layer_is_a_list_of_one():
    spec = ModelSpec(architecture="llama", config={**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2})
    assert names(model_factory(spec)()) == ["model.layers.0"]


def test_stages_of_a_convolutional_network_are_found():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(8), Residual(8), nn.Flatten(), nn.Linear(8, 2))
    assert names(net) == ["2", "3"]
    stages = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(2)]
    assert names(nn.Sequential(*stages, nn.Linear(3, 2))) == ["0", "1"]


def test_siblings_of_one_class_are_blocks_without_a_list():
    assert names(Siblings()) == ["first", "second"]


def test_the_outermost_repetition_is_taken():
    assert names(nn.Sequential(nn.Linear(1, 1), nn.ModuleList([Experts(), Experts()]))) == ["1.0", "1.1"]


def test_both_lists_of_torch_s_transformer_are_found():
    model = nn.Transformer(8, 2, 2, 2, 8, batch_first=True, device="meta")
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_blocks_are_found_inside_a_dict_of_named_parts():
    body = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "h": nn.ModuleList([Experts(), Experts()])})
    assert names(nn.ModuleDict({"body": body, "head": nn.Linear(4, 5)})) == ["body.h.0", "body.h.1"]


def test_small_lists_beside_the_blocks_are_not_blocks():
    model = nn.ModuleDict(
        {"heads": nn.ModuleList([Residual(1), Residual(1)]), "layers": nn.ModuleList([Experts(), Experts()])}
    )
    assert names(model) == ["layers.0", "layers.1"]


def test_a_model_without_repetition_has_no_blocks():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert names(nn.LSTM(3, 4, 2)) == []


def test_lists_named_by_the_user_are_taken():
    model = nn.ModuleDict({"one": nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "two": nn.Sequential(nn.Linear(1, 1))})
    assert names(model, "two") == ["two.0"]
    assert names(model, "one, two") == ["one.0", "one.1", "two.0"]


def test_a_wrong_name_is_refused_with_the_nearest_list():
    model = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList([Residual(1)])}))
    with pytest.raises(InputError, match=r"did you mean '0\.layers'"):
        find_blocks(model, "layers")
    with pytest.raises(InputError, match="holds no modules"):
        find_blocks(model, "0.layers.0.inner.0")
