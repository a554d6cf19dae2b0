"""On fake tensors of a processor, torch's choices by device are those of the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests.planner import cases
from tightfit.machine import Machine
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import estimated_ledger
from tightfit.planner.tracing.device_emulation import emulate_device
from tightfit.planner.tracing.profiler import Profiler


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func).rsplit(".", 1)[0])
        return func(*args, **(kwargs or {}))


def normalised(device: str) -> torch.dtype:
    with emulate_device(device), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        narrow = functional.linear(torch.empty(4, 8), torch.empty(8, 8))
        assert narrow.dtype is torch.bfloat16
        return functional.layer_norm(narrow, (8,)).dtype


def test_the_compiler_returns_to_the_cpu_after_emulation() -> None:
    project = torch.nn.Linear(8, 8)

    def attend(input: torch.Tensor) -> torch.Tensor:
        query = project(input).view(1, 2, 4, 8)
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum()

    for device in ("cuda", "cpu"):
        torch.compiler.reset()
        with emulate_device(device):
            torch.compile(attend, backend="aot_eager")(torch.randn(8, 8)).backward()
    torch.compiler.reset()


def test_autocast_keeps_the_target_s_fp32_operations() -> None:
    assert normalised("cpu") is torch.bfloat16
    assert normalised("cuda") is torch.float32
    assert normalised("cpu") is torch.bfloat16  # and nothing of it is left


def attention(device: str) -> list[str]:
    with emulate_device(device), FakeTensorMode(), Names() as names:
        query = torch.empty(1, 2, 16, 8, requires_grad=True)
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward()
    return names.seen


def test_attention_with_dropout_is_fused_on_a_cuda_device() -> None:
    assert any("flash_attention" in name for name in attention("cuda"))
    assert not any("flash_attention" in name for name in attention("cpu"))


def operations(device: str, run: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, mixed: bool) -> list[str]:
    """The operations of `run`, a function of a tensor, and of its backward."""
    with emulate_device(device), FakeTensorMode():
        values = torch.empty(4, 16, 64, dtype=dtype, requires_grad=True)
        with (
            Names() as names,
            torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=mixed),
        ):
            run(values).sum().backward()
    return [name for name in names.seen if not name.startswith("prim")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_is_one_kernel_with_a_narrow_mask_on_cuda(dtype: torch.dtype) -> None:
    """at::dropout calls native_dropout for CUDA tensors only (aten/src/ATen/native/Dropout.cpp)."""
    dropout = partial(functional.dropout, p=0.1)
    on_cuda, on_cpu = (operations(device, dropout, dtype, False) for device in ("cuda", "cpu"))
    assert "aten.native_dropout" in on_cuda
    assert "aten.bernoulli_" not in on_cuda
    assert "aten.native_dropout" not in on_cpu
    assert "aten.bernoulli_" in on_cpu
    for device in ("cuda", "cpu"):
        assert not any("drop" in name for name in operations(device, partial(functional.dropout, p=0.0), dtype, False))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("device", "dtype", "copies"), [
    ("cuda", torch.float16, False),
    ("cuda", torch.bfloat16, True),
    ("cpu", torch.float16, True),
])  # fmt: skip
def test_a_softmax_of_fp16_needs_no_fp32_copy_on_cuda(
    name: str, device: str, dtype: torch.dtype, copies: bool, mixed: bool
) -> None:
    softmax = partial(getattr(functional, name), dim=-1, dtype=torch.float32)
    assert ("aten._to_copy" in operations(device, softmax, dtype, mixed)) == copies


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_under_autocast_read_16_bits_on_cuda(dtype: torch.dtype) -> None:
    """Autocast gives a sum the dtype of its result, so its input is not copied to fp32."""
    found = operations("cuda", lambda values: values.sum(-1), dtype, True)
    assert found.index("aten.sum") < found.index("aten._to_copy")  # the copy is of the gradient


def test_autocast_leaves_sums_of_integers_alone() -> None:
    with emulate_device("cuda"), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.int64, torch.bool):
            assert torch.zeros(4, 8, dtype=dtype).sum(-1).dtype is torch.int64
            assert torch.zeros(4, 8, dtype=dtype).cumsum(-1).dtype is torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_one_kernel_on_cuda(dtype: torch.dtype) -> None:
    norm = partial(functional.rms_norm, normalized_shape=(64,))
    assert [name for name in operations("cuda", norm, dtype, False) if "norm" in name or "rsqrt" in name] == [
        "aten._fused_rms_norm",
        "aten._fused_rms_norm_backward",
    ]
    assert "aten.rsqrt" in operations("cpu", norm, dtype, False)  # and nothing of the GPU's is left


@pytest.mark.parametrize("compile", ["none", "model"])
def test_a_norm_saves_its_input_alone_on_cuda(compile: str) -> None:
    """A CPU saves more: the input in fp32 and the normalised values."""

    class Norms(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(torch.nn.RMSNorm(64) for _ in range(4)), torch.nn.Linear(64, 4))

    job = tightfit.Job(
        model=Norms,
        data=[(torch.zeros(64), number % 4) for number in range(4096)],
        train=tightfit.Train(batch=4096, steps=1),
        allow=["bf16"],
    )
    plan = tightfit.Plan(precision="bf16-true", rounding="kahan", compile=compile)
    ledger = estimated_ledger(Profiler(job, "cuda"), plan, Machine.named("a100-40gb"))
    assert ledger.peak().total == pytest.approx(dry_run(job, plan, "cuda").total, rel=0.02)
    values = 2 * 4096 * 64  # bytes of the values between two layers
    # the inputs of five layers, the batch in fp32, and small tensors
    assert max(rows["activations"] for _, _, rows in ledger.instants()) < 7.5 * values


def attention_kernel(
    device: str, dtype: torch.dtype, heads: int = 8, width: int = 64, mask: torch.Tensor | None = None
) -> str:
    """The first operation of attention of 8 query heads, or "products" if it is no fused kernel."""
    with emulate_device(device), FakeTensorMode(allow_non_fake_inputs=True), Names() as names:
        query = torch.empty(2, 8, 16, 64, dtype=dtype, requires_grad=True)
        key = torch.empty(2, heads, 16, 64, dtype=dtype, requires_grad=True)
        value = torch.empty(2, heads, 16, width, dtype=dtype, requires_grad=True)
        functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=heads != 8
        ).sum().backward()
    kernels = [name for name in names.seen if "attention" in name]
    return kernels[0].removeprefix("aten._scaled_dot_product_").partition("_")[0] if kernels else "products"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_kernels_are_those_of_a_gpu(dtype: torch.dtype) -> None:
    """select_sdp_backend (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), torch 2.11 to 2.13."""
    on_cuda, on_cpu = partial(attention_kernel, "cuda", dtype), partial(attention_kernel, "cpu", dtype)
    assert on_cuda() == on_cpu() == "flash"
    assert on_cuda(heads=2) == ("products" if dtype is torch.float32 else "flash")
    assert on_cpu(heads=2) == "flash"
    assert (on_cuda(width=32), on_cpu(width=32)) == ("efficient", "products")  # multi-head latent attention
    assert on_cuda(width=33) == "products"  # no multiple of 16 bytes
    learned = torch.zeros(1, 8, 16, 16, dtype=dtype, requires_grad=True)  # such as T5's relative positions
    assert (on_cuda(mask=learned), on_cpu(mask=learned)) == ("efficient", "products")
    visible = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    assert (on_cuda(mask=visible), on_cpu(mask=visible)) == ("efficient", "flash")


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize("compile", ["none", "block"])
def test_grouped_queries_in_fp32_need_their_scores_on_cuda(compile: str) -> None:
    """In 16 bits, attention of grouped queries is fused and saves no scores."""
    plan, length, found = tightfit.Plan(compile=compile), 128, []
    for heads in (2, 4):
        job = tightfit.Job(
            model={**cases.SPECS["llama"], "num_key_value_heads": heads},
            data={"synthetic": "tokens", "sequence_length": length},
            train=tightfit.Train(batch=8, steps=2),
        )
        ledger = estimated_ledger(Profiler(job, "cuda"), plan, Machine.named("a100-40gb"))
        assert ledger.peak().total == pytest.approx(dry_run(job, plan, "cuda").total, rel=0.02)
        found.append(ledger.peak().rows["activations"])
    scores = 4 * job.train.batch * 4 * length**2  # bytes of a block
    assert found[0] - found[1] > 0.9 * cases.SPECS["llama"]["num_hidden_layers"] * scores


@pytest.mark.slow
def test_estimate_for_a_cuda_device_agrees_with_its_dry_run() -> None:
    machine = Machine.named("a100-40gb")
    for name in ("gpt2", "bert", "vit"):
        for fields in (
            {},
            {"precision": "bf16-mixed", "micro_batch": 2},
            {"precision": "bf16-mixed", "fused_optimizer": True},
        ):
            plan = tightfit.Plan(**fields)
            estimated = estimated_ledger(Profiler(cases.job(name), "cuda"), plan, machine).peak().total
            seen = dry_run(cases.job(name), plan, "cuda").total
            assert abs(estimated / seen - 1) < 0.02, (name, fields)


def test_foreach_kernels_hold_a_copy_of_each_parameter() -> None:
    machine, job = Machine.named("a100-40gb"), cases.job("llama")
    together, fused = (
        estimated_ledger(Profiler(job, "cuda"), tightfit.Plan(fused_optimizer=kind), machine) for kind in (False, True)
    )
    assert together.peaks()["optimizer"] - fused.peaks()["optimizer"] >= 0.95 * together.gradient_bytes()
