"""Several samples in a sequence are trained as each would be alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import MODELS, make_job
from tests.data.test_conversations import LLAMA
from tightfit.data import open_samples
from tightfit.data.segments import in_separate_segments, pack
from tightfit.engine.build import build
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import model_factory
from tightfit.models.objective import TASKS
from tightfit.plan import Plan

PAIRS = [{"prompt": "why " * (number % 5 + 1), "response": "so " * (number % 7)} for number in range(40)]
QWEN = {
    **LLAMA,
    "architecture": "qwen3",
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GPT2 = MODELS["causal-lm"] | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def spec(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "d.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    given = {"jsonl": str(folder / "d.jsonl"), "format": "prompt-response", "vocabulary_size": 300, "held_out": 0.0}
    return {**given, "sequence_length": 64, **more}


def whole(samples: Any) -> dict[str, torch.Tensor]:
    """All samples as one batch."""
    return samples.batch(np.arange(len(samples)), np.zeros(len(samples), dtype=np.int64))


@pytest.mark.parametrize("model", [LLAMA, GPT2, QWEN], ids=["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "tightfit_blocked"])
def test_losses_and_gradients_are_those_of_samples_alone(model: Any, attention: str, tmp_path: Path) -> None:
    from tightfit.methods import attention as blocked

    blocked.register()
    packed, padded = (
        open_samples(make_job(model, spec(tmp_path, packing=packing))) for packing in ("separate", "padded")
    )
    assert len(packed) < len(padded) / 2  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = model_factory(make_job(model, spec(tmp_path)).model)().train()
    network.set_attn_implementation(attention)  # type: ignore[operator]
    found = []
    for samples in (packed, padded):
        batch, objective = whole(samples), TASKS["causal-lm"]
        network.zero_grad()
        loss = objective.total(network, batch) / objective.count(batch)
        loss.backward()
        found.append((objective.count(batch), loss.detach(), [weight.grad for weight in network.parameters()]))
    (count, loss, grads), (wanted_count, wanted_loss, wanted_grads) = found
    assert count == wanted_count
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=1e-6)
    for grad, wanted in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)


def test_tokens_of_other_samples_have_no_effect(tmp_path: Path) -> None:
    """The same tokens without position ids give other losses, so the test above can fail."""
    samples = open_samples(make_job(LLAMA, spec(tmp_path, packing="separate")))
    network, batch = model_factory(make_job(LLAMA, spec(tmp_path)).model)(), whole(samples)
    with torch.no_grad():
        apart = TASKS["causal-lm"].total(network, batch)
        joined = TASKS["causal-lm"].total(network, {name: batch[name] for name in ("input_ids", "labels")})
    assert abs(float(apart - joined)) > 1e-3


def test_sequences_hold_each_sample_once_and_are_full(tmp_path: Path) -> None:
    packed: Any = open_samples(make_job(LLAMA, spec(tmp_path, packing="separate")))
    padded: Any = open_samples(make_job(LLAMA, spec(tmp_path)))
    batch, alone = whole(packed), whole(padded)
    assert batch["input_ids"].shape == (len(packed), 64)
    assert not packed.ragged
    assert in_separate_segments(batch["position_ids"])
    seen = []
    for ids, labels, positions in zip(*(batch[name].tolist() for name in batch), strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0] + [64]
        for begin, end in pairwise(starts):
            assert positions[begin:end] == list(range(end - begin))
            if any(label != -100 for label in labels[begin:end]):
                seen.append((ids[begin:end], labels[begin:end]))
    wanted = []
    for ids, labels in zip(alone["input_ids"].tolist(), alone["labels"].tolist(), strict=True):
        length = max(at for at, label in enumerate(labels) if label != -100) + 1
        wanted.append((ids[:length], labels[:length]))
    assert sorted(seen) == sorted(wanted)


def test_texts_are_cut_and_packed_whole(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text("word " * (number * 3 + 1))
    data = {"text": str(tmp_path), "sequence_length": 32, "held_out": 0.0, "packing": "separate"}
    samples: Any = open_samples(make_job("causal-lm", data))
    rows, tokens = samples.rows, samples.rows.tokens
    assert (rows.stops - rows.starts).sum() == len(tokens.ids)
    assert sorted(rows.starts.tolist())[1:] == sorted(rows.stops.tolist())[:-1]
    assert max(rows._segment_lengths(at).sum() for at in range(len(rows))) == 32
    batch = whole(samples)
    firsts = batch["position_ids"] == 0
    assert (batch["labels"][firsts] == -100).all()


def test_packing_is_tight_and_depends_on_nothing_else() -> None:
    lengths = np.random.default_rng(0).integers(1, 31, 500)
    order, firsts = pack(lengths, 64)
    assert sorted(order.tolist()) == list(range(500))
    sums = [int(lengths[order[begin:end]].sum()) for begin, end in pairwise(firsts)]
    assert max(sums) <= 64
    assert len(sums) <= lengths.sum() / 64 * 1.03 + 1
    assert pack(np.array([3, 5, 2]), 5)[0].tolist() == [1, 0, 2]
    assert pack(np.array([3, 5, 2]), 5)[1].tolist() == [0, 1, 3]


@pytest.mark.parametrize("packing", ["padded", "separate"])
def test_the_step_is_independent_of_micro_batch(packing: str, tmp_path: Path) -> None:
    """One step with the same seed gives the same weights, although micro-batches have different
    numbers of labels."""
    weights = []
    for micro in (1, 2, 4):
        job = Job(model=LLAMA, data=spec(tmp_path, packing=packing), train={"batch": 4, "steps": 1}, allow=[])
        run = build(job, Plan(micro_batch=micro), Machine.detect().replace(device="cpu"))
        from tightfit.engine.loop import train

        list(train(run))
        weights.append(torch.cat([weight.detach().flatten() for weight in run.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights[1], weights[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_models_that_mix_samples_are_refused(name: str, tmp_path: Path) -> None:
    small = {"hidden_size": 16, "vocab_size": 512, "num_hidden_layers": 1}
    heads = {"n_head": 2} if name == "bloom" else {}
    job = Job(
        model={"architecture": name, **small, **heads}, data=spec(tmp_path, packing="separate"), train={"batch": 2}
    )
    with pytest.raises(InputError, match=r"(has Conv1d layers|does not pass position_ids)(.|\n)*packing: padded"):
        build(job, Plan(), Machine.detect().replace(device="cpu"))


def test_explain_predicts_the_mask_of_separate_samples(tmp_path: Path) -> None:
    from tightfit.planner.tracing.fake_inputs import example_batch, is_padded

    job = make_job(LLAMA, spec(tmp_path, packing="separate"))
    batch, _ = example_batch(job)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert is_padded(batch)
    assert not is_padded(example_batch(make_job(LLAMA, spec(tmp_path)))[0])


def test_context_parallelism_is_refused(tmp_path: Path) -> None:
    from tightfit.rules import check

    job = make_job(LLAMA, spec(tmp_path, packing="separate"))
    with pytest.raises(InputError, match="several samples"):
        check(Plan(cp=2), job, "cpu")
