"""Architectures' options by which the head reads what every block returns.

Methods that do not support this refuse them, in a prediction as in a training.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

import tightfit
from tests.zoo import others
from tests.zoo.entry import CLASSES, Entry
from tests.zoo.plain import make_job
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.planner.estimator import Estimator

WEIGHTED = {**others.HEARING, "use_weighted_layer_sum": True, "num_hidden_layers": 4}
WHISPER = {**others.WHISPER, "encoder_layers": 4, "use_weighted_layer_sum": True, "num_labels": CLASSES}
INDICES = {**others.SIGHT, **others.QUIET, "num_hidden_layers": 4, "num_labels": CLASSES, "out_indices": [1, 2, 3, 4]}
FORMS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WEIGHTED, others.sounds),
    "hubert": ("HubertForSequenceClassification", "HubertConfig", WEIGHTED, others.sounds),
    "wavlm": ("WavLMForSequenceClassification", "WavLMConfig", WEIGHTED, others.sounds),
    "whisper": (
        "WhisperForAudioClassification",
        "WhisperConfig",
        WHISPER,
        others.spectra("input_features", 8, 32),
    ),
    "beit": ("BeitForSemanticSegmentation", "BeitConfig", {**INDICES, "use_auxiliary_head": False}, others.maps),
}


def entry(name: str) -> Entry:
    model, config, keys, samples = FORMS[name]
    more = {"loss": of_pooled} if samples is others.maps else {}
    return others.given(name, "audio", model, config, keys, samples, **more)


def of_pooled(output: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(output.logits.mean((2, 3)), batch["labels"][:, 0, 0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "wav2vec2" else pytest.mark.slow) for name in FORMS]
)
def test_heads_that_read_all_blocks_are_refused_early(name: str) -> None:
    job, machine = make_job(entry(name), {}), Machine.named("a100-80gb:2")
    estimator = Estimator(job, machine)
    assert estimator.estimate(tightfit.Plan(recompute="full")).peak_bytes
    with pytest.raises(InputError, match=r"plan: pp"):
        estimator.estimate(tightfit.Plan(pp=2, micro_batch=2))
    plan = tightfit.Plan(recompute="sqrt")
    with pytest.raises(InputError, match=r"plan: recompute=sqrt") as predicted:
        estimator.estimate(plan)
    with pytest.raises(InputError) as refused:
        tightfit.build(job, plan)
    assert str(predicted.value) == str(refused.value)
