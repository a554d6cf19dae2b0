"""Models with low-rank adapters train as plain PyTorch and peft train them, under every method."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tightfit
from tests import tiny
from tests.pool import together
from tightfit.engine.checkpoint.save import save
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.measure.memory import sample_step
from tightfit.measure.verify import verify
from tightfit.models import model_factory
from tightfit.models.lora import ADAPTER_FILE
from tightfit.planner.estimator import Estimator
from tightfit.report.explain import logical_rows
from tightfit.rules import check as check_rules

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's call
HERE = "tests.models.test_lora:"


def make_job(lora: dict[str, Any], allow: list[str] | None = None, **train: Any) -> Job:
    content = tiny.content(**{"steps": 3, **train})
    model = {**tiny.LLAMA, "lora": {"rank": 4, **lora}}
    return Job.parse({**content, "model": model, "allow": [*content["allow"], "offload", *(allow or [])]})


def plain_peft(job: Job, dora: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with peft's own model and plain PyTorch, from the same weights and on the same batches."""
    run = tightfit.build(job)
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "architecture"}
    config = LoraConfig(r=4, lora_alpha=32, use_dora=dora, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), config)
    inner = model.get_base_model()
    inner.load_state_dict(run.model.state_dict())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = job.train
    optimizer = torch.optim.AdamW(trained, 1e-2, settings.betas, eps=settings.epsilon, weight_decay=0.0)
    losses = []
    for _, (batch,) in zip(range(3), run.data.steps(0, None), strict=False):
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in inner.named_parameters()}


def check(lora: dict[str, Any], fields: dict[str, Any]) -> tuple[float, float, float]:
    verification = verify(make_job(lora), tightfit.Plan(**fields), steps=2)
    assert verification.passed
    return verification.loss, verification.gradients, verification.weights


@pytest.mark.parametrize("dora", [False, True])
def test_training_equals_plain_peft(dora: bool) -> None:
    job = make_job({"dora": dora}, schedule="constant", warmup=0)
    run = tightfit.build(job)
    losses = [step.loss for step in tightfit.train(run)]
    expected_losses, expected = plain_peft(job, dora)
    found = dict(run.model.named_parameters())
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].detach(), weight, rtol=1e-5, atol=1e-6)
        assert found[name].requires_grad is ("lora_" in name)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        {"recompute": "selective", "micro_batch": 2},
        {"chunked_loss": 8},
        {"materialize": "device", "attention": "blocked"},
        {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
        {"update_in_backward": True},
    ],
    ids=str,
)
def test_methods_train_adapters_exactly(fields: dict[str, Any], dora: bool) -> None:
    assert max(check({"dora": dora}, fields)) < 2e-6


@pytest.mark.parametrize("compiled", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_adapters_train_compiled(compiled: str) -> None:
    assert max(check({}, {"compile": compiled})) < 2e-6


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters_train_in_16_bits(precision: str) -> None:
    check({}, {"precision": precision})


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"dp_replicate": 2},
        {"zero": 1, "dp_shard": 2},
        {"zero": 2, "dp_shard": 2},
        {"zero": 3, "dp_shard": 2},
        {"cp": 2},
        {"pp": 2, "micro_batch": 2},
    ],
    ids=str,
)
def test_adapters_train_on_several_devices(fields: dict[str, Any], dora: bool) -> None:
    for errors in together(2, HERE + "check", {"dora": dora}, fields):
        assert max(errors) < 2e-6


def peaks(fields: dict[str, Any]) -> tuple[float, int]:
    """Predicted and measured peak bytes of the third step: the first two create the optimizer's states."""
    content, plan = make_job({}).content(), tightfit.Plan(**fields)
    job = Job.parse({**content, "model": {**content["model"], "hidden_size": 64, "num_hidden_layers": 4}})
    predicted = sum(logical_rows(tightfit.estimate(job, plan, Machine.detect())).values())
    gc.collect()
    run = tightfit.build(job, plan)
    steps = run.data.steps(0, None)
    for number in range(2):
        take_step(run, next(steps), number)
    return predicted, sample_step(run, next(steps), 2)[1].total


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields", [{"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"pp": 2, "micro_batch": 2}], ids=str
)
def test_the_peak_of_several_devices_is_predicted(fields: dict[str, Any]) -> None:
    predicted, measured = together(2, HERE + "peaks", fields)[0]
    assert predicted == pytest.approx(measured, rel=0.05)


def saved(fields: dict[str, Any], folder: Path) -> Path:
    """Train three steps with a plan and save them; the folder of the checkpoint."""
    run = tightfit.build(make_job({}, ["asynchronous"]), tightfit.Plan(**fields))
    for _ in tightfit.train(run):
        pass
    return save(run, folder, 3)


@pytest.mark.parametrize(
    ("fields", "is_exact"),
    [
        ({"zero": 3, "dp_shard": 2}, True),
        ({"pp": 2, "micro_batch": 2}, True),
        pytest.param({"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"}, True, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "micro_batch": 2, "schedule": "pipedream"}, False, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "parameter_server": "sync"}, True, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "parameter_server": "async"}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_adapters_are_saved_by_several_devices(fields: dict[str, Any], is_exact: bool, tmp_path: Path) -> None:
    """peft's file has the adapters of all shards and stages, as one device saves them."""
    one = saved({}, tmp_path / "one")
    several = together(tightfit.Plan(**fields).devices, HERE + "saved", fields, tmp_path / "several")[0]
    expected, found = (load_file(folder / "adapter" / ADAPTER_FILE) for folder in (one, several))
    assert found.keys() == expected.keys()
    assert len(found) == 2 * 7 * tiny.LLAMA["num_hidden_layers"]  # two matrices beside each linear layer
    for name, weight in expected.items() if is_exact else ():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"float8": "rowwise", "precision": "bf16-mixed"}], ids=str)
def test_methods_that_replace_layers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="adapters"):
        check_rules(tightfit.Plan(**fields), make_job({}, allow=["float8"]), "cuda")


def test_frozen_weights_have_no_gradients_and_states() -> None:
    plain, adapted = (
        Estimator(job, tightfit.Machine.detect()).estimate(tightfit.Plan()).ledger for job in (tiny.job(), make_job({}))
    )
    count = sum(p.numel() for p in model_factory(make_job({}).model)().parameters() if p.requires_grad)
    assert adapted.gradient_bytes() == 4 * count
    assert adapted.gradient_bytes() < plain.gradient_bytes() / 3


def test_explain_says_what_is_trained() -> None:
    text = tightfit.explain(make_job({"rank": 2, "targets": ["q_proj", "v_proj"]}), plan=tightfit.Plan())
    assert "LoRA of rank 2, alpha 32 on q_proj, v_proj" in text
    assert "trained  256 of " in text  # 2 blocks x 2 layers x 2 matrices of 2 x 16


@pytest.mark.parametrize(
    ("lora", "found", "fix"),
    [
        ({"targets": ["q_prj"]}, "matches no linear layer", "q_proj"),
        ({"rnk": 3}, "", "rank"),
        ({"targets": []}, "names nothing", "all-linear"),
    ],
)
def test_wrong_adapters_are_refused(lora: dict[str, Any], found: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        model_factory(make_job(lora).model)()
    assert found in caught.value.found
    assert fix in caught.value.fix


@pytest.mark.slow
def test_a_module_of_peft_is_traced_and_trained() -> None:
    """A user's function may return a PeftModel, or a model that is partly frozen."""
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "architecture"}

    def adapted() -> nn.Module:
        return get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(r=2, task_type="CAUSAL_LM"))

    def frozen() -> nn.Module:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        model.model.requires_grad_(False)
        return model.to(torch.float32)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    data = [{"input_ids": torch.arange(16) + row} for row in range(8)]
    for make in (adapted, frozen):
        job = Job(
            model=make,
            data=data,
            loss=tightfit.Objective(loss, lambda batch: len(batch["input_ids"]), unit="samples"),
            train={"batch": 2, "steps": 2, "learning_rate": 1e-2, "trackers": []},
        )
        plan = tightfit.Plan()
        estimate = tightfit.estimate(job, plan)
        trained = sum(one.count for one in estimate.ledger.parameters if one.trainable)
        assert trained == sum(p.numel() for p in make().parameters() if p.requires_grad)
        assert verify(job, tightfit.Plan(recompute="full"), steps=1).passed
