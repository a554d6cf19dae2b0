"""Compare predicted and measured times of single operations of torch, forward and backward, on this CPU.

    .venv/bin/python benchmarks/operations.py --out records/operations.json
    .venv/bin/python benchmarks/operations.py --only pool     # those whose name contains this

A prediction adds up operations. Here each is predicted from its own recorded step, at the rates of the
calibration. Then it is timed on tensors larger than the caches. Those off by more than 1.7 times are printed.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks import harness
from tightfit.calibration.clock_drift import ClockDrift
from tightfit.machine import Machine
from tightfit.methods.allocator import keep_freed_memory
from tightfit.planner.operation_kinds import kind_of
from tightfit.planner.time_model import TimeModel
from tightfit.planner.tracing.recorder import record_step

PRINTED = 1.7  # predicted / measured, or its inverse, from which an operation is printed
REPEATS = 7
TOKENS, IMAGES, VOLUMES, MATRICES = (16, 512, 512), (16, 64, 56, 56), (8, 16, 24, 24, 24), (64, 32, 32)
Case = tuple[tuple[int, ...], Callable[[Tensor], Tensor]]


ROWS = torch.arange(512)
EACH = ROWS[None, :, None]
OF_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(functional, name)
        for name in (
            "relu", "leaky_relu", "elu", "softplus", "mish", "silu", "gelu", "hardswish", "logsigmoid", "glu", "tanh", "sigmoid",
        )
    },
    **{name: getattr(torch, name) for name in ("exp", "sin", "erf", "atan", "square", "tril")},
    "sqrt": lambda x: x.abs().sqrt(),
    "log1p": lambda x: x.abs().log1p(),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of rows": lambda x: x.cumsum(1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (512,)),
    "rms_norm": lambda x: functional.rms_norm(x, (512,)),
    "max": lambda x: x.max(-1)[0],
    "amax": lambda x: x.amax(-1),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(-1),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "roll": lambda x: x.roll(3, 1),
    "flip": lambda x: x.flip(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "index": lambda x: x[:, ROWS],
    "index_select": lambda x: x.index_select(1, ROWS),
    "gather": lambda x: x.gather(1, EACH.expand_as(x)),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, ROWS, x),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, EACH.expand_as(x), x),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "noise": lambda x: x + torch.randn_like(x),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x)),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "sum with its transpose": lambda x: x + x.transpose(1, 2),
    "topk": lambda x: x.topk(8)[0],
    "sort": lambda x: x.sort(-1)[0],
}  # fmt: skip
OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool": lambda x: functional.max_pool2d(x, 2),
    "max_pool_overlapping": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: functional.avg_pool2d(x, 2),
    "avg_pool_overlapping": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool": lambda x: functional.adaptive_avg_pool2d(x, 7),
    "adaptive_max_pool": lambda x: functional.adaptive_max_pool2d(x, 7),
    "upsample_nearest": lambda x: functional.interpolate(x, scale_factor=2.0),
    "upsample_bilinear": lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: functional.group_norm(x, 8),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "reflection_pad": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "unfold": lambda x: functional.unfold(x[:, :8], 3, padding=1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "layer_norm_of_channels": lambda x: functional.layer_norm(x.permute(0, 2, 3, 1).contiguous(), (64,)),
}
CASES: dict[str, Case] = {
    **{name: (TOKENS, call) for name, call in OF_TOKENS.items()},
    **{name: (IMAGES, call) for name, call in OF_IMAGES.items()},
    **{
        f"{name}, channels_last": (IMAGES, lambda x, call=call: call(x.to(memory_format=torch.channels_last)))
        for name, call in OF_IMAGES.items()
        if name not in ("channels_last", "pixel_shuffle", "unfold", "layer_norm_of_channels", "reflection_pad")
    },
    "avg_pool3d": (VOLUMES, lambda x: functional.avg_pool3d(x, 2)),
    "max_pool3d": (VOLUMES, lambda x: functional.max_pool3d(x, 2)),
    "upsample_trilinear": (VOLUMES, lambda x: functional.interpolate(x, scale_factor=2.0, mode="trilinear")),
    "inverse": (MATRICES, lambda x: torch.linalg.inv(x @ x.mT + torch.eye(32))),
}


def weighted_sum(output: Tensor) -> Tensor:
    """A loss whose gradient lies in memory as the output does. That of a plain sum is a single number."""
    return (output * torch.ones_like(output)).sum()


def predicted_s(
    machine: Machine, call: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> float:
    """The predicted seconds of a forward and backward of the sum of an operation's result."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))

        def forward(self, batch: Any) -> Tensor:
            return weighted_sum(call(self.weight))

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Model()
        segments = record_step(model, model, {}, [])
    model_of_time = TimeModel(machine)
    launch_s = machine.launch_s.value if machine.launch_s else 0.0
    operations = [one for segment in segments for one in segment.timeline.operations if kind_of(one) != "nothing"]
    return sum((model_of_time.operation_s(one, 1) + launch_s) * one.count.at(1) for one in operations)


def measured_s(call: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    weight = torch.randn(shape).to(dtype).requires_grad_()
    found = []
    for _ in range(REPEATS + 1):
        weight.grad = None
        began = time.perf_counter()
        weighted_sum(call(weight)).backward()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def main() -> None:
    arguments = harness.make_parser(__doc__, only="operations whose name contains this").parse_args()
    machine = Machine.detect()
    if machine.device != "cpu" or machine.control_s is None:
        raise SystemExit("this benchmark needs a calibrated CPU: run tightfit machine --calibrate")
    keep_freed_memory()
    pace = ClockDrift(torch.device("cpu"))
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, (shape, call) in CASES.items():
            if arguments.only not in name:
                continue
            try:
                measured = measured_s(call, shape, dtype)
            except (NotImplementedError, RuntimeError):  # torch has no kernel of this type
                continue
            measured *= machine.control_s.value / pace.control_around_s()
            predicted = predicted_s(machine, call, shape, dtype)
            rows.append({"operation": name, "dtype": str(dtype)[6:], "predicted_s": predicted, "measured_s": measured})
            if not 1 / PRINTED < predicted / measured < PRINTED:
                print(
                    f"{name:32s} {str(dtype)[6:]:9s} predicted {predicted * 1e3:7.2f} ms, measured {measured * 1e3:7.2f} ms",
                    flush=True,
                )
    logs = [abs(math.log(row["predicted_s"] / row["measured_s"])) for row in rows]
    summary = {
        "operations": len(rows),
        "median_factor": math.exp(statistics.median(logs)),
        "within_two": sum(one <= math.log(2) for one in logs) / len(rows),
        "worst_factor": math.exp(max(logs)),
    }
    print(
        f"{len(rows)} operations: the median is off by {summary['median_factor']:.2f} times, "
        f"{summary['within_two']:.0%} by at most 2 times, the worst by {summary['worst_factor']:.1f} times"
    )
    harness.write_record(arguments.out, {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
