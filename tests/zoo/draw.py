"""A seed draws a trial: a model, a plan that is likely to train it, and training settings."""

from __future__ import annotations

import random
from typing import Any

from tests.zoo import find, zoo
from tests.zoo.plain import BATCH, make_job
from tests.zoo.trial import Trial
from tightfit.errors import InputError
from tightfit.rules import check

Fields = dict[str, Any]
Choices = tuple[tuple[float, Fields], ...]

ALONE: Choices = (
    (3, {"micro_batch": 2}),
    (2, {"micro_batch": 3}),
    (1, {"micro_batch": 1}),
    (3, {"recompute": "full"}),
    (2, {"recompute": "selective"}),
    (1, {"recompute": "selective-2"}),
    (2, {"recompute": "every-2"}),
    (2, {"recompute": "sqrt"}),
    (3, {"attention": "blocked"}),
    (2, {"chunked_loss": 5}),
    (1, {"chunked_loss": 64}),
    (1, {"states": "bf16"}),
    (1, {"states": "8-bit"}),
    (1, {"states": "4-bit"}),
    (2, {"fused_optimizer": True}),
    (2, {"update_in_backward": True}),
    (2, {"materialize": "device"}),
    (1, {"allocator": "lean"}),
    (2, {"precision": "bf16-mixed"}),
    (1, {"precision": "bf16-true"}),
    (0.5, {"precision": "bf16-true", "rounding": "kahan"}),
    (0.5, {"precision": "bf16-true", "rounding": "stochastic"}),
    (0.5, {"precision": "bf16-true", "master_weights": True}),
    (0.5, {"precision": "fp16-true", "master_weights": True, "loss_scale": 128.0}),
    (0.5, {"precision": "fp16-mixed", "loss_scale": 128.0}),
    (0.5, {"precision": "fp16-mixed"}),
    (0.5, {"precision": "fp16-true", "loss_scale": 128.0}),
    (1, {"offload": ("states",), "offload_to": "disk"}),
    (1, {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"}),
    (1, {"offload": ("activations",), "offload_to": "disk"}),
    (0.15, {"compile": "block"}),
    (0.1, {"compile": "model"}),
    (0.1, {"loader_workers": 1}),
)
PIPELINES: Choices = (
    (3, {"micro_batch": 2}),
    (1, {"micro_batch": 1}),
    (1, {}),
    (1, {"micro_batch": 2, "schedule": "gpipe"}),
    (1, {"micro_batch": 2, "schedule": "naive"}),
    (1, {"micro_batch": 2, "schedule": "zero-bubble"}),
    (1, {"micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2}),
    (1, {"micro_batch": 4, "schedule": "pipedream"}),
    (0.5, {"micro_batch": 4, "schedule": "pipedream", "vertical_sync": True}),
)
TWO: Choices = (
    (2, {"dp_replicate": 2}),
    (0.5, {"dp_replicate": 2, "compressed_gradients": "bf16"}),
    (0.3, {"dp_replicate": 2, "compressed_gradients": "powersgd"}),
    (1.5, {"zero": 1, "dp_shard": 2}),
    (1.5, {"zero": 2, "dp_shard": 2}),
    (3, {"zero": 3, "dp_shard": 2}),
    (1, {"zero": 3, "dp_shard": 2, "gradient_sync": "step"}),
    (3, {"tp": 2}),
    (2, {"tp": 2, "sequence_parallel": True}),
    (2, {"cp": 2}),
    (1, {"cp": 2, "zero": 1}),
    (1, {"cp": 2, "zero": 3}),
    (6, {"pp": 2}),
)
THREE: Choices = (
    (1, {"dp_replicate": 3}),
    (1, {"zero": 3, "dp_shard": 3}),
    (1, {"zero": 2, "dp_shard": 3}),
    (1, {"cp": 3}),
    (2, {"pp": 3}),
    (3, {"parameter_server": "sync", "dp_replicate": 2}),
    (2, {"parameter_server": "async", "dp_replicate": 2}),
    (1, {"parameter_server": "async", "dp_replicate": 2, "staleness": 1}),
)
FOUR: Choices = (
    (1, {"dp_replicate": 4}),
    (1, {"zero": 3, "dp_shard": 4}),
    (1, {"zero": 3, "dp_shard": 2, "dp_replicate": 2}),
    (1, {"zero": 1, "dp_shard": 2, "dp_replicate": 2}),
    (1, {"tp": 2, "dp_replicate": 2}),
    (1, {"tp": 2, "dp_shard": 2, "zero": 3}),
    (1, {"tp": 2, "dp_shard": 2, "zero": 2}),
    (1, {"tp": 4}),
    (1, {"tp": 2, "cp": 2}),
    (1, {"cp": 2, "dp_replicate": 2}),
    (1, {"cp": 2, "zero": 3, "dp_shard": 2}),
    (1, {"pp": 2, "dp_replicate": 2}),
    (1, {"pp": 2, "dp_shard": 2, "zero": 1}),
    (1, {"pp": 2, "dp_shard": 2, "zero": 3}),
    (1, {"pp": 2, "tp": 2}),
    (1, {"pp": 2, "cp": 2}),
    (1, {"pp": 4}),
)
SIZES = ((60, 1), (26, 2), (6, 3), (8, 4))
OF_SIZE = {2: TWO, 3: THREE, 4: FOUR}
TRAINS: Choices = (
    (6, {}),
    (3, {"optimizer": "sgd"}),
    (1, {"optimizer": "lion", "learning_rate": 1e-3}),
    (1, {"optimizer": "lamb"}),
    (1, {"optimizer": "lars", "learning_rate": 1.0}),
    (1, {"optimizer": "adafactor"}),
    (1, {"optimizer": "muon"}),
)
KINDS_WEIGHT = {"custom": 1.5}
TRIES = 6


def draw(seed: int, number: int) -> Trial:
    """The trial `number` of a seed. Plans that the rules refuse are mostly drawn again, as no model need be made to know it."""
    source = random.Random(f"{seed}-{number}")
    entries = list(zoo().values())
    model = source.choices(entries, [KINDS_WEIGHT.get(entry.kind, 1.0) for entry in entries])[0].name
    size = source.choices([size for _, size in SIZES], [weight for weight, _ in SIZES])[0]
    trial = Trial(model, *_settings(source, size))
    for _ in range(TRIES):
        if _admitted(trial):
            break
        trial = Trial(model, *_settings(source, size))
    return trial


def _settings(source: random.Random, size: int) -> tuple[Fields, Fields]:
    plan: Fields = {}
    if size > 1:
        plan |= _one(source, OF_SIZE[size])
        if plan.get("pp", 1) > 1:
            plan |= _one(source, PIPELINES)
    count = source.choices([0, 1, 2, 3], [1, 4, 3, 2] if size == 1 else [4, 4, 2, 0])[0]
    for _ in range(count):
        more = _one(source, ALONE)
        if not set(more) & set(plan):
            plan |= more
    train = dict(_one(source, TRAINS))
    if source.random() < 0.3:
        train["clip"] = source.choice([0.1, 1.0])
    return plan, train


def _one(source: random.Random, choices: Choices) -> Fields:
    return dict(source.choices([fields for _, fields in choices], [weight for weight, _ in choices])[0])


def _admitted(trial: Trial) -> bool:
    plan, entry = trial.whole_plan, find(trial.model)
    if entry.together and plan.data_parallel > 1 and BATCH % plan.data_parallel:
        return False  # replicas with other numbers of samples: no reference
    try:
        check(plan, make_job(entry, trial.train), "cpu")
    except InputError:
        return False
    return True
