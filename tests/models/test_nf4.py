"""Adapters on a base in 4 bits: values and training are those of torchao, peft and plain PyTorch, under
every method, and predictions count the bytes."""

from __future__ import annotations

import gc
import math
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
from tightfit._torch.loggers import quiet_import
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import save
from tightfit.engine.step import take_step
from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.machine import Machine
from tightfit.measure.memory import sample_step
from tightfit.measure.verify import verify
from tightfit.models import model_factory
from tightfit.models.lora import ADAPTER_FILE
from tightfit.models.nf4 import Nf4Linear, element_count, quantizing_bytes
from tightfit.report.explain import logical_rows
from tightfit.rules import check as check_rules
from tightfit.tensor_files import Reader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft's call
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),  # torchao
]
HERE = "tests.models.test_nf4:"
SIZES = {**tiny.LLAMA, "hidden_size": 64, "intermediate_size": 128}
LORA = {"rank": 4, "quantize": "nf4"}


def make_job(lora: dict[str, Any] | None = None, allow: list[str] | None = None, **train: Any) -> Job:
    content = tiny.content(**{"steps": 3, **train})
    model = {**SIZES, "lora": LORA if lora is None else lora}
    return Job.parse({**content, "model": model, "allow": [*content["allow"], "offload", *(allow or [])]})


def of_torchao(weight: torch.Tensor) -> Any:
    """torchao's own tensor of a weight in 4 bits."""
    group = math.gcd(weight.numel() // 64, 256)
    return quiet_import("torchao.quantization").NF4Tensor.from_tensor(weight.detach(), 64, group)


def peaks(fields: dict[str, Any], lora: dict[str, Any]) -> tuple[float, int]:
    """Predicted and measured peak bytes of the third step: the first two create the optimizer's states."""
    job, plan = make_job(lora), tightfit.Plan(**fields)
    predicted = sum(logical_rows(tightfit.estimate(job, plan, Machine.detect())).values())
    gc.collect()
    run = tightfit.build(job, plan)
    steps = run.data.steps(0, None)
    for number in range(2):
        take_step(run, next(steps), number)
    return predicted, sample_step(run, next(steps), 2)[1].total


def check(fields: dict[str, Any]) -> tuple[float, float, float]:
    verification = verify(make_job(), tightfit.Plan(**fields), steps=2)
    assert verification.passed
    return verification.loss, verification.gradients, verification.weights


@pytest.mark.parametrize("shape", [(256, 512), (64, 192), (8, 8), (100, 320)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantized_values_are_those_of_torchao(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    quantized = Nf4Linear(layer)
    expected = of_torchao(layer.weight)
    assert torch.equal(quantized.dequantized().weight, expected.get_original_weight())
    x = torch.randn(3, shape[1], dtype=dtype)
    product = nn.functional.linear(x, expected.to(dtype))
    torch.testing.assert_close(quantized(x), product + layer.bias.to(dtype))
    # 0.31: half of the largest distance between two values of NF4, beside the rounding of scales
    assert (expected.get_original_weight() - layer.weight).abs().max() < 0.31 * layer.weight.abs().max()


def test_gradients_of_inputs_are_those_of_the_weight() -> None:
    torch.manual_seed(0)
    quantized = Nf4Linear(nn.Linear(64, 32).requires_grad_(False))
    inputs = [torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    for layer, x in zip((quantized, quantized.dequantized()), inputs, strict=True):
        layer(x).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert all(parameter.grad is None for parameter in quantized.parameters())


def test_autocast_computes_the_product_in_16_bits() -> None:
    quantized = Nf4Linear(nn.Linear(64, 32).requires_grad_(False))
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = quantized(x), quantized.dequantized()(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-3)  # the bias is added after a rounding
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_a_layer_without_values_has_the_same_parts() -> None:
    real = Nf4Linear(nn.Linear(192, 64).requires_grad_(False))
    with torch.device("meta"):
        shapes = Nf4Linear(nn.Linear(192, 64).requires_grad_(False))
    for name, tensor in (*real.named_parameters(), *real.named_buffers()):
        other = shapes.get_parameter(name) if name in dict(shapes.named_parameters()) else shapes.get_buffer(name)
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # no view of a larger tensor
    assert sum(element_count(name, tuple(one.shape)) for name, one in shapes.named_parameters()) == 64 * 192 + 64


def plain_peft(job: Job, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train adapters with peft and plain PyTorch on a base whose weights are torchao's NF4Tensor."""
    run = tightfit.build(job)
    settings = {name: value for name, value in SIZES.items() if name != "architecture"}
    torch.manual_seed(job.train.seed)
    unquantized = model_factory(ModelSpec.parse({**SIZES, "lora": {"rank": 4}}))().state_dict()
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**settings)), config)
    inner = model.get_base_model()
    inner.load_state_dict(unquantized)
    for name, parameter in run.model.named_parameters():  # the same start, whatever was drawn at random
        if "nf4_" not in name:
            inner.get_parameter(name).data.copy_(parameter.detach())
    for name, module in inner.named_modules():
        if name.endswith(".base_layer"):
            parts = run.model.get_submodule(name)
            assert isinstance(parts, Nf4Linear)
            made = of_torchao(module.weight)
            assert torch.equal(made.quantized_data, parts.nf4_codes)
            assert torch.equal(made.quantized_scalers, parts.nf4_scales)
            module.weight = nn.Parameter(made, requires_grad=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2, job.train.betas, eps=job.train.epsilon, weight_decay=0.0)
    losses = []
    for _, (batch,) in zip(range(steps), run.data.steps(0, None), strict=False):
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in inner.named_parameters() if one.requires_grad}


def test_training_equals_peft_on_torchaos_tensors() -> None:
    job = make_job(schedule="constant", warmup=0, steps=5)
    run = tightfit.build(job)
    losses = [step.loss for step in tightfit.train(run)]
    expected_losses, expected = plain_peft(job, 5)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    found = {name: one for name, one in run.model.named_parameters() if one.requires_grad}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].detach(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full", "micro_batch": 2},
        {"recompute": "selective", "attention": "blocked"},
        {"chunked_loss": 8},
        {"offload": ("states", "gradients", "parameters"), "offload_to": "disk"},
        {"offload": ("activations",), "offload_to": "disk"},
        {"update_in_backward": True},
    ],
    ids=str,
)
def test_methods_train_the_same_adapters(fields: dict[str, Any]) -> None:
    assert max(check(fields)) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_adapters_on_4_bits_train_compiled(compiled: str) -> None:
    assert max(check({"compile": compiled})) < 2e-6


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters_on_4_bits_train_in_16(precision: str) -> None:
    check({"precision": precision})
    run = tightfit.build(make_job(), tightfit.Plan(precision=precision))
    plain = tightfit.build(make_job())
    for name, tensor in run.model.state_dict().items():
        if "nf4_" in name:  # of the fp32 weights, whatever the plan
            assert torch.equal(tensor, plain.model.state_dict()[name])


@pytest.mark.sweep(12)
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
def test_several_devices_train_the_same_adapters(fields: dict[str, Any]) -> None:
    for loss, gradients, weights in together(2, HERE + "check", fields):
        assert max(loss, gradients) < 1e-6
        assert weights < 5e-6  # Adam divides small gradients, with their rounding, by their magnitude


@pytest.mark.parametrize("fields", [{"zero": 3, "dp_shard": 2, "precision": "bf16-mixed"}], ids=str)
def test_sharded_4_bits_train_in_mixed_precision(fields: dict[str, Any]) -> None:
    together(2, HERE + "check", fields)


@pytest.mark.slow
@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields",
    [{}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"recompute": "full", "micro_batch": 2}],
    ids=str,
)
def test_predicted_bytes_are_measured(fields: dict[str, Any]) -> None:
    predicted, found = peaks(fields, LORA)
    assert predicted == pytest.approx(found, rel=0.02)
    assert found < 0.9 * peaks(fields, {"rank": 4})[1]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields", [{"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"pp": 2, "micro_batch": 2}], ids=str
)
def test_predicted_bytes_are_those_of_two_devices(fields: dict[str, Any]) -> None:
    predicted, found = together(2, HERE + "peaks", fields, LORA)[0]
    assert predicted == pytest.approx(found, rel=0.05)


def saved(fields: dict[str, Any], folder: Path) -> Path:
    """Train three steps with a plan and save them; the folder of the checkpoint."""
    run = tightfit.build(make_job(learning_rate=1e-3), tightfit.Plan(**fields))
    for _ in tightfit.train(run):
        pass
    return save(run, folder, 3)


@pytest.mark.parametrize("fields", [{"zero": 3, "dp_shard": 2}, {"pp": 2, "micro_batch": 2}], ids=str)
def test_several_devices_save_what_one_saves(fields: dict[str, Any], tmp_path: Path) -> None:
    one = saved({}, tmp_path / "one")
    several = together(2, HERE + "saved", fields, tmp_path / "several")[0]
    with Reader(one, "model") as expected, Reader(several, "model") as found:
        assert found.names == expected.names
        for name in expected.names:
            torch.testing.assert_close(found.get(name), expected.get(name), rtol=1e-5, atol=2e-6)
    assert load_file(several / "adapter" / ADAPTER_FILE).keys() == load_file(one / "adapter" / ADAPTER_FILE).keys()


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    whole = [step.loss for step in tightfit.train(tightfit.build(make_job()))]
    run = tightfit.build(make_job(steps=2))
    list(tightfit.train(run))
    save(run, tmp_path, 2)
    again = tightfit.build(make_job())
    assert resume(again, tmp_path) == 2
    assert [step.loss for step in tightfit.train(again, 2)] == whole[2:]


@pytest.mark.parametrize("fields", [{"tp": 2}, {"float8": "rowwise", "precision": "bf16-mixed"}], ids=str)
def test_methods_that_replace_layers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="adapters"):
        check_rules(tightfit.Plan(**fields), make_job(allow=["float8"]), "cuda")


@pytest.mark.slow
def test_the_model_is_created_on_the_host() -> None:
    with pytest.raises(InputError, match="full weights in host memory") as caught:
        check_rules(tightfit.Plan(materialize="device"), make_job(), "cpu")
    assert caught.value.fix == "use materialize: host"
    chosen = tightfit.search(make_job(), Machine.detect())[0].plan
    assert chosen.materialize == "host"


def test_wrong_quantization_is_refused() -> None:
    with pytest.raises(InputError, match="leave out dora or quantize"):
        ModelSpec.parse({**SIZES, "lora": {"dora": True, "quantize": "nf4"}})
    with pytest.raises(InputError, match="nf4"):
        ModelSpec.parse({**SIZES, "lora": {"quantize": "int3"}})
    gpt2 = {"architecture": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    with pytest.raises(InputError, match="no frozen nn"):
        model_factory(ModelSpec.parse({**gpt2, "lora": LORA}))()


def test_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.quantization

    monkeypatch.delattr(torchao.quantization, "NF4Tensor")
    with pytest.raises(InputError, match=r"tightfit\[qlora\]"):
        Nf4Linear(nn.Linear(64, 8).requires_grad_(False))


@pytest.mark.slow
def test_explain_counts_the_weights_in_4_bits() -> None:
    plain, quantized = (tightfit.explain(make_job(lora), plan=tightfit.Plan()) for lora in ({"rank": 4}, LORA))
    assert "frozen layers in 4 bits (nf4)" in quantized
    (before,) = [line.split(":")[0] for line in plain.splitlines() if line.startswith("trained")]
    (after,) = [line.split(":")[0] for line in quantized.splitlines() if line.startswith("trained")]
    assert before == after


def test_the_host_has_the_full_model_for_a_moment() -> None:
    """On a GPU, the fp32 model is in host memory; the device gets the layers in 4 bits only."""
    machine = Machine.named("h100-sxm")
    found = []
    for lora in ({"rank": 4}, LORA):
        ledger = tightfit.estimate(make_job(lora), tightfit.Plan(), machine).ledger
        found.append((ledger.transient_host_bytes["materialize"], ledger.phases["materialize"]))
    (host, device), (host_4_bits, device_4_bits) = found
    largest = 64 * 128
    assert host_4_bits == pytest.approx(host + quantizing_bytes(largest))
    assert device_4_bits < device / 1.5
