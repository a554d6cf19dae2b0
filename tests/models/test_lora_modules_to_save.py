"""Modules that are trained whole beside adapters: a classifier's output layer, and what a job names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import save
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.machine import Machine
from tightfit.measure.verify import verify
from tightfit.models import model_factory
from tightfit.models.lora import classifier_heads
from tightfit.report.explain import logical_rows
from tightfit.report.export import export, load_trained
from tightfit.report.run_folder import train_in_folder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's call
HERE = "tests.models.test_lora_modules_to_save:"
ENCODER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
TEXTS = {"vocab_size": 64, "max_position_embeddings": 40, "task": "classification"}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"architecture": "bert", **ENCODER, **TEXTS},
    "roberta": {"architecture": "roberta", **ENCODER, **TEXTS},
    "llama": {**tiny.LLAMA, "task": "classification", "num_labels": 3, "pad_token_id": 0},
    "vit": {"architecture": "vit", **ENCODER, "image_size": 8, "patch_size": 4},
}
HEADS = {"bert": ["classifier"], "roberta": ["classifier"], "llama": ["score"], "vit": ["classifier"]}


def samples(name: str) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(5)
    if name == "vit":
        return [{"pixel_values": torch.randn(3, 8, 8, generator=random), "labels": row % 3} for row in range(16)]
    return [{"input_ids": torch.randint(1, 64, (12,), generator=random), "labels": row % 3} for row in range(16)]


def make_job(name: str, allow: tuple[str, ...] = (), model: dict[str, Any] | None = None, **lora: Any) -> Job:
    return Job(
        model={**(model or MODELS[name]), "lora": {"rank": 2, **lora}},
        data=samples(name),
        train={"batch": 4, "steps": 3, "learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "trackers": []},
        allow=["bf16", "offload", *allow],
    )


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}


def plain_peft(job: Job, heads: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Train with peft's wrapper and plain PyTorch, from the same weights and on the same batches."""
    run = tightfit.build(job)
    spec = job.model
    assert isinstance(spec, ModelSpec)
    inner = model_factory(spec.replace(lora=None))()
    model = get_peft_model(inner, LoraConfig(r=2, lora_alpha=32, target_modules="all-linear", modules_to_save=heads))
    states = run.model.state_dict()
    with torch.no_grad():
        for name, parameter in model.get_base_model().named_parameters():
            parameter.copy_(states[name.replace(".original_module", "").replace(".modules_to_save.default", "")])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = job.train
    optimizer = torch.optim.AdamW(trained, 1e-2, settings.betas, eps=settings.epsilon, weight_decay=0.0)
    losses = []
    for _, (batch,) in zip(range(3), run.data.steps(0, None), strict=False):
        inputs = {
            name: value for name, value in batch.items() if name in ("input_ids", "pixel_values", "attention_mask")
        }
        loss = nn.functional.cross_entropy(model(**inputs).logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {
        name.replace(".modules_to_save.default", ""): parameter.detach()
        for name, parameter in model.get_base_model().named_parameters()
        if ".original_module" not in name
    }
    return losses, found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_classifier_trains_its_output_layer_as_peft_does(name: str) -> None:
    job = make_job(name)
    run = tightfit.build(job)
    losses = [step.loss for step in tightfit.train(run)]
    expected_losses, expected = plain_peft(job, HEADS[name])
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    found = dict(run.model.named_parameters())
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key].detach(), weight, rtol=1e-5, atol=1e-6)
    assert {key.partition(".")[0] for key in trained_names(run.model)} == set(HEADS[name])


def check(name: str, fields: dict[str, Any], lora: dict[str, Any]) -> float:
    verification = verify(make_job(name, **lora), tightfit.Plan(**fields), steps=2)
    assert verification.passed
    return max(verification.loss, verification.gradients, verification.weights)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full", "micro_batch": 2},
        {"compile": "block"},
        {"update_in_backward": True},
        {"attention": "blocked"},
        {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
    ],
    ids=str,
)
@pytest.mark.parametrize("lora", [{}, {"quantize": "nf4"}], ids=str)
def test_methods_train_the_output_layer_exactly(fields: dict[str, Any], lora: dict[str, Any]) -> None:
    assert check("bert", fields, lora) < 2e-6


@pytest.mark.parametrize(
    "fields", [{"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"dp_replicate": 2}], ids=str
)
def test_several_devices_train_the_output_layer_exactly(fields: dict[str, Any]) -> None:
    assert max(together(2, HERE + "check", "bert", fields, {})) < 2e-6


@pytest.mark.parametrize("tied", [False, True])
def test_a_job_names_what_is_trained_whole(tied: bool) -> None:
    model = {**tiny.LLAMA, "tie_word_embeddings": tied}
    whole = {"modules_to_save": ["embed_tokens", "lm_head"]}
    job = make_job("llama", model=model, **whole)
    adapted = model_factory(job.model)()
    expected = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert trained_names(adapted) == expected
    assert "embed_tokens, lm_head whole" in str(job.model.lora)  # type: ignore[union-attr]


def test_tied_weights_are_saved_for_both_modules(tmp_path: Path) -> None:
    sizes = {**tiny.LLAMA, "tie_word_embeddings": True}
    job = tiny.job(steps=2).replace(model={**sizes, "lora": {"rank": 2, "modules_to_save": ["lm_head"]}})
    run = tightfit.build(job)
    for _ in tightfit.train(run):
        pass
    folder = save(run, tmp_path / "saved", 2)
    spec = job.model
    assert isinstance(spec, ModelSpec)
    base = model_factory(spec.replace(lora=None))()
    states = {name.replace(".base_layer", ""): value for name, value in run.model.state_dict().items()}
    base.load_state_dict({name: states[name] for name in base.state_dict()})
    with torch.no_grad():
        base.get_input_embeddings().weight.zero_()  # type: ignore[operator, union-attr]
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, run.model.eval()(tokens).logits)


def test_frozen_layers_in_4_bits_leave_the_trained_ones_alone() -> None:
    adapted = model_factory(make_job("bert", quantize="nf4").model)()
    kinds = {name: type(module).__name__ for name, module in adapted.named_modules()}
    assert kinds["classifier"] == "Linear"
    assert "Nf4Linear" in kinds.values()


def test_its_memory_is_predicted() -> None:
    job, machine = make_job("bert"), Machine.detect()
    model = model_factory(job.model)()
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    rows = logical_rows(tightfit.estimate(job, tightfit.Plan(), machine))
    assert rows["gradients"] <= trained
    assert rows["optimizer"] == pytest.approx(2 * trained, abs=1024)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, None) for name in sorted(MODELS)),
        ("llama", ["norm"]),  # peft takes a name for all that ends with it
        ("vit", ["embeddings"]),
        ("bert", ["pooler", "pooler.dense"]),
    ],
)
def test_peft_reads_adapters_and_output_layer(name: str, whole: list[str] | None, tmp_path: Path) -> None:
    """The pretrained folder has the base model only, so that the output layer is new in each process."""
    job = make_job(name)
    spec = job.model
    assert isinstance(spec, ModelSpec)
    base: Any = model_factory(spec.replace(lora=None))()
    torch.manual_seed(3)
    base.base_model.save_pretrained(tmp_path / "base")
    own = {"task": "classification", "config": {"num_labels": 3, **({"pad_token_id": 0} if name == "llama" else {})}}
    job = job.replace(model=ModelSpec(from_=str(tmp_path / "base"), **own, lora={"rank": 2, "modules_to_save": whole}))
    run = tightfit.build(job)
    for _ in tightfit.train(run):
        pass
    folder = save(run, tmp_path / "saved", 3)
    kind = type(run.model)
    batch = {key: torch.stack([row[key] for row in samples(name)]) for key in samples(name)[0] if key != "labels"}
    run.model.eval()
    with torch.no_grad():
        expected = run.model(**batch).logits
        adapted = PeftModel.from_pretrained(
            kind.from_pretrained(tmp_path / "base", num_labels=3, **({"pad_token_id": 0} if name == "llama" else {})),
            folder / "adapter",
        )
        torch.testing.assert_close(adapted(**batch).logits, expected, rtol=1e-5, atol=1e-5)
    assert any(isinstance(module, ModulesToSaveWrapper) for module in adapted.modules())

    again = tightfit.build(job)
    resume(again, tmp_path / "saved")
    again.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again.model(**batch).logits, expected)


def test_a_trained_classifier_is_exported_merged_and_apart(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"text": "a b c {row}", "label": {row % 3}}}\n' for row in range(16)))
    job = Job.parse(
        {
            "model": {**MODELS["bert"], "vocab_size": 300, "lora": {"rank": 2}},
            "data": {"jsonl": str(data), "sequence_length": 12},
            "train": {"batch": 4, "steps": 2, "learning_rate": 1e-2, "trackers": []},
        }
    )
    train_in_folder(job, tightfit.Plan(), Machine.detect(), tmp_path / "run")
    trained = load_trained(tmp_path / "run").model.eval()
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapters")
    kind = type(trained)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = trained(tokens).logits
        merged = kind.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        head = dict(trained.named_parameters())["classifier.weight"]
        torch.testing.assert_close(dict(merged.named_parameters())["classifier.weight"], head)
    assert (tmp_path / "adapters" / "adapter_config.json").exists()


class Whole(nn.Module):
    """A classifier that names no base model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        model_factory(make_job("bert", modules_to_save=["clasifier"]).model)()
    assert "matches no module with weights" in caught.value.found
    assert "classifier" in caught.value.fix
    with pytest.raises(InputError, match="matches no linear layer"):
        model_factory(make_job("bert", targets=["classifier"]).model)()
    with pytest.raises(InputError, match="empty name"):
        make_job("bert", modules_to_save=[""])
    with pytest.raises(InputError, match="would freeze all layers of Whole"):
        classifier_heads(Whole())
    assert classifier_heads(Whole(), may_lack=True) == []
