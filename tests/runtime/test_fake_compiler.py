"""The replacement for the compiler on fake tensors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tightfit._torch.compiler import inductor_read_limits
from tightfit.machine import Machine
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.profiler import profile
from tightfit.runtime.fake_compiler import fake_backend

ALONE = """
import sys
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tightfit.runtime.fake_compiler import fake_backend

with FakeTensorMode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    backend = fake_backend()
    assert "torch._inductor.lowering" not in sys.modules, "which takes long to import"
    torch.compile(model, backend=backend)(torch.zeros(2, 3, 8, 8)).sum().backward()
    assert model[0].weight.grad is not None
"""


def test_pooling_is_traced_without_importing_the_code_generator() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class _Kernels(TorchDispatchMode):
    """Keeps what generated kernels are said to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def see_kernel(self, moved: int, dtype: torch.dtype, kind: str = "compiled") -> None:
        self.seen[kind] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "kind", "times"),
    [
        (nn.GELU(), "compiled erf", 2),  # backward computes it again
        (nn.GELU(approximate="tanh"), "compiled tanh", 2),
        (nn.SiLU(), "compiled exp", 2),
        (nn.Tanh(), "compiled tanh", 1),
        (nn.ReLU(), "compiled exp", 0),
        (nn.Dropout(0.5), "compiled random", 1),
        (nn.Dropout(0.5), "compiled mask", 0),  # part of drawing it
        (nn.Dropout(0.5), "compiled mask read", 1),  # in backward
        (nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), "compiled mask", 1),  # where the input is negative
        (nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), "compiled mask read", 2),
        (nn.GELU(), "compiled mask", 0),
    ],
    ids=str,
)
def test_functions_in_generated_kernels_are_counted(function: nn.Module, kind: str, times: int) -> None:
    torch._dynamo.reset()
    with FakeTensorMode(), _Kernels() as kernels:
        model = nn.Sequential(nn.Linear(8, 8), function, nn.Linear(8, 8))
        torch.compile(model, backend=fake_backend())(torch.zeros(4, 8)).sum().backward()
    assert kernels.seen[kind] == times * 4 * 4 * 8
    assert kernels.seen["compiled"] > 0


def test_pooling_in_a_generated_kernel_is_counted() -> None:
    torch._dynamo.reset()
    with FakeTensorMode(), _Kernels() as kernels:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(16, 2))
        torch.compile(model, backend=fake_backend())(torch.zeros(2, 3, 8, 8)).sum().backward()
    assert kernels.seen["compiled pooling"] == 4 * 9 * 2 * 4 * 2 * 2  # nine values for each output


class Rotary(nn.Module):
    """Rotates pairs of numbers, as complex numbers: Llama's own rotary embedding."""

    def forward(self, values: Tensor) -> Tensor:
        pairs = torch.view_as_complex(2 * values.unflatten(-1, (-1, 2)))
        angles = torch.polar(torch.ones(4), torch.arange(4.0))
        return torch.view_as_real(pairs * angles).flatten(-2) + 1


def test_complex_numbers_have_kernels_of_their_own() -> None:
    """The code generator leaves their operations to torch's kernels; those around it are fused."""

    class Multiplications(_Kernels):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                self.seen[str(found.dtype)] += 1
            return found

    torch._dynamo.reset()
    with FakeTensorMode(), Multiplications() as kernels:
        torch.compile(Rotary(), backend=fake_backend())(torch.zeros(16, 8))
    assert kernels.seen["torch.complex64"] == 1
    assert kernels.seen["torch.float32"] == 0  # 2 * values is in a generated kernel
    assert kernels.seen["compiled"] > 2 * 2 * 4 * 16 * 8  # two kernels that read and write
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*complex operators")  # torch's own: it may be slower than without compile
        code = run_and_get_code(torch.compile(Rotary()), torch.zeros(16, 8))[1]
    assert "aten.mul" in code[0]
    torch._dynamo.reset()


class Tied(nn.Module):
    """A language model without blocks, whose head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.inner(self.table(tokens).relu())
        return nn.functional.cross_entropy((states @ self.table.weight.t()).flatten(0, 1), tokens.flatten())


def test_a_product_that_is_added_runs_with_the_sum() -> None:
    """The gradient of a tied weight: the head's product is added to the embedding's gradient, last of all."""

    class Products(_Kernels):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                shapes.append(tuple(found.shape))
            return found

    shapes: list[tuple[int, ...]] = []
    torch._dynamo.reset()
    with FakeTensorMode(), Products():
        torch.compile(Tied(), backend=fake_backend())(torch.zeros(2, 4, dtype=torch.long)).backward()
    assert shapes[-1] == (32, 8)
    torch._dynamo.reset()
    model, tokens = Tied(), torch.arange(8).view(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        codes = run_and_get_code(lambda: torch.compile(model)(tokens).backward())[1]
    torch._dynamo.reset()
    kernels = [line for line in codes[-1].splitlines() if "extern_kernels." in line and "(" in line]
    assert "extern_kernels.addmm(" in kernels[-1]
    assert "extern_kernels.addmm(" not in "".join(kernels[:-1])


def test_kernel_functions_take_time_if_measured() -> None:
    """The time adds to the memory traffic's, without a launch of its own; without a measured rate
    it is zero."""
    job = tightfit.Job(
        model={"architecture": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128},
        data={"synthetic": "tokens", "sequence_length": 32},
        train=tightfit.Train(batch=4, steps=10),
    )
    ledger = profile(job, tightfit.Plan(compile="block"))
    kinds = ("elementwise", "compiled", "product")
    known = Machine.named("a100-80gb").replace(device="cpu", rates={f"{kind}/float32": {1: 1e9} for kind in kinds})
    slower = known.replace(rates={**known.rates, "compiled tanh/float32": {1: 1e9}})
    computed = sum(
        operation.bytes_accessed.at(4) * operation.count.at(4)
        for segment in ledger.training
        for operation in segment.timeline.operations
        if operation.name == "compiled tanh"
    )
    assert computed == 2 * 2 * 4 * (4 * 32 * 4 * 64)  # blocks, forward and backward, bytes, elements
    free, charged = (TimeModel(machine).step_time(ledger) for machine in (known, slower))
    assert charged.step_s - free.step_s == pytest.approx(computed / 1e9)
    assert charged.launch_s == free.launch_s


def test_read_limits_have_other_names_in_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(realize_reads_threshold=4, realize_acc_reads_threshold=8)
    newer = SimpleNamespace(
        realize_reads_threshold=4,
        realize_acc_reads_threshold=None,
        realize_cpu_acc_reads_threshold=12,
        _realize_acc_reads_threshold_default=8,
    )
    for config, on_cpu in ((older, 8), (newer, 12)):
        monkeypatch.setattr(torch._inductor, "config", config)
        assert inductor_read_limits("cpu") == (4, on_cpu)
        assert inductor_read_limits("cuda") == (4, 8)
