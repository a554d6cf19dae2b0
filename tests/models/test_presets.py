"""Each preset has its published parameter count."""

import pytest
import torch

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models import model_factory, preset, presets


@pytest.mark.parametrize("name", presets())
def test_the_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = model_factory(ModelSpec(preset=name))()
    count = sum(parameter.numel() for parameter in model.parameters())
    published = preset(name).parameters
    tolerance = 0.02 if published % 10_000_000 == 0 else 0  # papers round; configs do not
    assert count == pytest.approx(published, rel=tolerance, abs=0)


def test_most_presets_are_exact():
    rounded = [name for name, value in presets().items() if value.parameters % 10_000_000 == 0]
    papers = ["bert-base", "bert-large", "gpt-1.3b", "turing-nlg-17b", "gpt-3-175b"]
    assert rounded == [*papers, "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"]


MIXTURES = {  # in billions, as they were published
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "deepseek-v3": 671,
    "olmoe-1b-7b": 6.9,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_their_published_size(name):
    """To the last digit of the published size."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_factory(ModelSpec(preset=name))().parameters())
    decimals = len(str(MIXTURES[name]).partition(".")[2])
    assert round(count / 1e9, decimals) == MIXTURES[name]


def test_mixtures_state_their_active_parameters():
    assert [name for name, value in presets().items() if value.active_parameters] == list(MIXTURES)


@pytest.mark.parametrize("key", ["n_layer", "num_hidden_layers"])
def test_config_keys_override_a_preset_under_either_name(key):
    with torch.device("meta"):
        model = model_factory(ModelSpec.parse({"preset": "gpt2", key: 2}))()
    assert len(model.transformer.h) == 2
    assert model.config.n_embd == 768


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'llama-2-7b'"):
        preset("llama2-7b")
