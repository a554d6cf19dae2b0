"""Images in channels_last: which tensors have the format, and which operations are predicted with
its rates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.cost.recorded_step import CHANNELS_LAST
from tightfit.machine import Machine
from tightfit.methods.memory_format import PointwiseConv2d, use_channels_last
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search

CONVOLUTIONS = ("convolution", "convolution backward")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def job() -> tightfit.Job:
    images = [(torch.randn(3, 32, 32), index % 4) for index in range(16)]
    train = tightfit.Train(batch=4, steps=4, learning_rate=1e-2, trackers=())
    return tightfit.Job(model=Net, data=images, train=train, loss=nn.functional.cross_entropy)


PLAN = tightfit.Plan.parse({"memory_format": "channels_last"}, "plan")


def test_results_of_convolutions_keep_the_format() -> None:
    run = tightfit.build(job(), PLAN)
    seen: list[Tensor] = []
    for layer in run.model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    next(iter(tightfit.train(run)))
    assert len(seen) == 7
    assert all(one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous() for one in seen)
    assert all(weight.is_contiguous() for weight in run.model.parameters())


def test_the_same_results_in_double_precision() -> None:
    """In fp32, torch's batch norm of channels_last sums its statistics less exactly."""
    found = []
    for converts in (False, True):
        torch.manual_seed(4)
        model = Net().double()
        if converts:
            use_channels_last(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
            optimizer.step()
        found.append(model.state_dict())
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize(("pixels", "compiles", "product"), [(8, False, True), (9, False, False), (8, True, False)])
@pytest.mark.parametrize("bias", [False, True])
def test_pointwise_convolutions_of_small_images(pixels: int, compiles: bool, product: bool, bias: bool) -> None:
    """Up to 8 x 8 pixels, a 1 x 1 convolution is a matrix product with the same result and gradients."""
    torch.manual_seed(1)
    plain, other = (nn.Conv2d(6, 10, 1, bias=bias).double() for _ in range(2))
    other.load_state_dict(plain.state_dict())
    use_channels_last(other)
    assert type(other) is PointwiseConv2d
    images = torch.randn(4, 6, pixels, pixels, dtype=torch.float64)
    found = []
    for module in (plain, other):
        given = images.clone().requires_grad_()
        call = torch.compile(module, backend="aot_eager") if compiles and module is other else module
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            made = call(given)
        if module is other:
            operations = {event.key for event in profiled.key_averages()}
            assert ("aten::linear" in operations, "aten::convolution" in operations) == (product, not product)
            assert made.is_contiguous(memory_format=torch.channels_last)
        (made * torch.linspace(0, 1, made.numel(), dtype=made.dtype).view_as(made)).sum().backward()
        found.append([made, given.grad, *(weight.grad for weight in module.parameters())])
    for one, same in zip(*found, strict=True):
        assert torch.allclose(one, same, rtol=1e-12, atol=1e-12)


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.GELU(), nn.Conv2d(8, 16, 1), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16-mixed", 5e-3), ("bf16-true", 1e-2)])
def test_training_with_pointwise_convolutions(precision: str, tolerance: float) -> None:
    images = [(torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(n)), n % 4) for n in range(16)]
    train = tightfit.Train(batch=4, steps=4, learning_rate=1e-2, trackers=())
    found = []
    for memory_format in ("contiguous", "channels_last"):
        given = tightfit.Job(model=Pointwise, data=images, train=train, loss=nn.functional.cross_entropy)
        run = tightfit.build(given, tightfit.Plan(precision=precision, memory_format=memory_format))
        assert len(list(tightfit.train(run))) == 4
        found.append(torch.cat([weight.detach().float().flatten() for weight in run.model.parameters()]))
    assert type(run.model.layers[2]) is PointwiseConv2d  # type: ignore[index, union-attr]
    assert (found[1] - found[0]).norm() <= tolerance * found[0].norm()


@pytest.mark.parametrize("options", [{"kernel_size": 3}, {"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_other_convolutions_keep_their_class(options: dict[str, int]) -> None:
    module = nn.Conv2d(6, 10, **{"kernel_size": 1, **options})
    use_channels_last(module)
    assert type(module) is nn.Conv2d


def names(plan: tightfit.Plan) -> set[str]:
    ledger = Estimator(job(), Machine.detect()).estimate(plan).ledger
    return {one.name for segment in ledger.training for one in segment.timeline.operations}


@pytest.mark.slow
def test_operations_on_the_format_are_told_apart() -> None:
    ended = {"aten.convolution", "aten.convolution_backward", "aten.max_pool2d_with_indices"}
    assert ended <= names(tightfit.Plan())
    assert not any(name.endswith(CHANNELS_LAST) for name in names(tightfit.Plan()))
    assert {name + CHANNELS_LAST for name in ended} <= names(PLAN)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "chosen"), [(2.0, "channels_last"), (0.5, "contiguous")])
def test_search_takes_the_format_with_the_faster_kernels(ratio: float, chosen: str) -> None:
    machine = Machine.detect()
    rates = dict(machine.rates)
    for kind in CONVOLUTIONS:
        rates[f"{kind}/float32"] = {1000: 1e9}
        rates[f"channels-last {kind}/float32"] = {1000: ratio * 1e9}
    machine = machine.replace(rates=rates)
    pins = {"precision": "fp32", "compile": "none"}
    assert search(job(), machine, pins)[0].plan.memory_format == chosen
