"""The optimizer that updates one parameter at a time: bit-for-bit equality, narrow states,
rounding, resuming."""

import copy
import gc
import io
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.optim import make_optimizer
from tightfit.optim.in_batches import MultiTensor
from tightfit.optim.lamb import LAMB
from tightfit.optim.per_parameter import PerParameter, dequantize_state, round_stochastically_

ELEMENTWISE = ["adamw", "sgd", "lion", "lamb", "lars"]
ALL = [*ELEMENTWISE, "adafactor", "muon"]
WIDTHS = ["fp32", "bf16", "8-bit", "4-bit"]
RATES = {"lars": 1.0, "lamb": 0.02, "sgd": 0.05}


class Model(nn.Module):
    """Tied embedding and head, an untied matrix large enough to be packed (4096 elements), norms, an unused weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 32, dtype=dtype)
        self.up = nn.Linear(32, 128, dtype=dtype)
        self.down = nn.Linear(128, 32, dtype=dtype)
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.unused = nn.Linear(32, 2, dtype=dtype)
        self.head = nn.Linear(32, 16, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def train(name: str) -> Train:
    return Train(optimizer=name, learning_rate=RATES.get(name, 0.01), weight_decay=0.01, betas=(0.9, 0.99))


def make(
    name: str, dtype: torch.dtype = torch.float32, wrap: bool = True, **options: str
) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(dtype)
    optimizer = make_optimizer(model, train(name))
    return model, PerParameter(optimizer, **options) if wrap else optimizer


def backward(model: Model, seed: int) -> float:
    tokens = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), (tokens.flatten() + 3) % 16)
    loss.backward()
    return float(loss.detach())


def steps(model: Model, optimizer: torch.optim.Optimizer, seeds: range) -> float:
    for seed in seeds:
        loss = backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def saved_and_loaded(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for (name, expected), (_, found) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_equals_the_plain_optimizer_bit_for_bit(name: str, in_backward: bool, dtype: torch.dtype) -> None:
    plain, ours = make(name, dtype, wrap=False), make(name, dtype)
    if in_backward:
        ours[1].attach()
    for seed in range(3):
        for model, optimizer in (plain, ours):
            for group in optimizer.param_groups:
                group["lr"] = RATES.get(name, 0.01) / (seed + 1)
            steps(model, optimizer, range(seed, seed + 1))
    assert_same(plain[0], ours[0])
    assert not torch.equal(ours[0].up.weight, Model(dtype).up.weight)
    assert torch.equal(ours[0].unused.weight, Model(dtype).unused.weight)


def test_backward_frees_gradients_and_updates_tied_weights_once() -> None:
    model, optimizer = make("sgd")
    optimizer.attach()
    seen = []
    update = optimizer._inner.step

    def spy() -> None:
        alive = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        seen.append(alive)
        update()

    optimizer._inner.step = spy
    backward(model, 0)
    trained = {name for name, _ in model.named_parameters() if "unused" not in name}
    assert all(len(alive) == 1 for alive in seen)  # one gradient at a time
    assert sorted(alive[0] for alive in seen) == sorted(trained)  # each once, though the embedding is used twice
    assert all(parameter.grad is None for parameter in model.parameters())


def test_backward_twice_before_a_step_is_refused() -> None:
    model, optimizer = make("adamw")
    optimizer.attach()
    backward(model, 0)
    with pytest.raises(InputError, match="one micro-batch"):
        backward(model, 1)
    model.zero_grad()
    optimizer.step()
    backward(model, 2)


def test_hooks_do_not_keep_the_optimizer_alive() -> None:
    model, optimizer = make("adamw")
    optimizer.attach()
    backward(model, 0)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
    backward(model, 1)  # nobody updates: the gradients stay
    assert model.up.weight.grad is not None


def bytes_per_element(optimizer: PerParameter, parameter: Tensor) -> float:
    held = [
        t
        for state in optimizer.state[parameter].values()
        for t in (state.values() if isinstance(state, dict) else [state])
        if isinstance(t, Tensor) and t.dim()
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in held) / parameter.numel()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_states_take_the_expected_bytes_between_updates(name: str) -> None:
    states = 2 if name in ("adamw", "lamb") else 1
    expected = {"fp32": 4, "bf16": 2, "8-bit": 1 + 4 / 256, "4-bit": 0.5 + 4 / 128}
    for width in WIDTHS:
        model, optimizer = make(name, states=width)
        steps(model, optimizer, range(2))
        assert bytes_per_element(optimizer, model.up.weight) == states * expected[width]
        small = 2 if width == "bf16" else 4
        assert bytes_per_element(optimizer, model.norm.weight) == states * small
        assert not optimizer._inner.state  # nothing wide is left behind
        assert not optimizer._inner.param_groups


@pytest.mark.parametrize(("width", "within"), [("bf16", 0.002), ("8-bit", 0.003), ("4-bit", 0.03)])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_narrow_states_train_like_fp32_states(name: str, width: str, within: float) -> None:
    """After 30 steps the losses agree within a share of the initial loss."""
    start = backward(Model(), 0)
    exact, narrow = make(name), make(name, states=width)
    ends = [steps(model, optimizer, range(30)) for model, optimizer in (exact, narrow)]
    assert ends[0] < 0.7 * start
    assert abs(ends[1] - ends[0]) < within * start
    assert not torch.equal(exact[0].up.weight, narrow[0].up.weight)


@pytest.mark.parametrize("width", ["8-bit", "4-bit"])
def test_quantized_small_second_moments_give_no_huge_step(width: str) -> None:
    """A weight whose second moment is small beside a large one takes no huge step."""
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = PerParameter(torch.optim.AdamW([weight], lr=0.01), width)
    gradient = torch.full((64, 256), 2e-4)
    gradient[:, ::128] = 1.0
    for scale in (1.0, 1.0, 0.0):  # the last as for a token or a unit that the batch leaves out
        weight.grad = scale * gradient
        optimizer.step()
    assert weight.abs().max() < 3 * 0.01


def drift(rounding: str, states: str = "fp32") -> Tensor:
    """256 bf16 weights of 1 after 1000 SGD updates of -1e-4 each, an eightieth of the distance to the next number."""
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = PerParameter(torch.optim.SGD([weight], lr=1e-4), states, rounding)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().float()


def test_small_updates_of_a_bf16_weight_need_compensation() -> None:
    assert (drift("nearest") == 1).all()
    assert (drift("kahan") - 0.9).abs().max() < 0.004  # the distance between bf16 numbers there
    moved = drift("stochastic")
    assert moved.std() > 0
    assert (moved.mean() - 0.9).abs() < 0.004


def test_kahan_costs_two_bytes_and_nearest_none() -> None:
    for rounding, expected in (("nearest", 8), ("kahan", 8 + 2), ("stochastic", 8)):
        model, optimizer = make("adamw", torch.bfloat16, rounding=rounding)
        steps(model, optimizer, range(2))
        if rounding == "nearest":
            expected = 4  # torch keeps states in the type of the weight
        assert bytes_per_element(optimizer, model.up.weight) == expected


def test_fp32_updates_keep_values_too_small_for_fp16() -> None:
    for fp32_updates in (False, True):
        weight = nn.Parameter(torch.ones(4096, dtype=torch.float16))
        optimizer = PerParameter(
            torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0, eps=1e-6), fp32_updates=fp32_updates
        )
        weight.grad = torch.full_like(weight, 1e-4)  # its square is 0 in fp16
        optimizer.step()
        assert weight.dtype == torch.float16
        assert bool(((weight - 0.99).abs() < 1e-3).all()) is fp32_updates  # Adam's first step is lr
        assert bytes_per_element(optimizer, weight) == (8 if fp32_updates else 4)


def test_kahan_with_bf16_weights_matches_fp32_weights() -> None:
    exact, model = make("adamw"), make("adamw", torch.bfloat16, rounding="kahan")
    exact[0].load_state_dict(model[0].state_dict())
    generator = torch.Generator().manual_seed(0)
    start = exact[0].up.weight.detach().clone()
    for _ in range(50):
        gradient = torch.randn(128, 32, generator=generator).bfloat16()
        for one, optimizer in (exact, model):
            optimizer.param_groups[0]["lr"] = 1e-5
            one.up.weight.grad = gradient.to(one.up.weight.dtype)
            optimizer.step()
    weight = model[0].up.weight
    carried = weight.float() + model[1].state[weight]["compensation"]
    assert (carried - exact[0].up.weight).norm() < 0.01 * (exact[0].up.weight - start).norm()
    assert torch.equal(carried.bfloat16(), weight)


def test_stochastic_rounding_is_unbiased_and_keeps_bf16_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -1.001, 3.14159e-5, -7.7e4):
        values = torch.full((100_000,), value)
        down = torch.tensor(value).view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
        up = (torch.tensor(value).view(torch.int32).bitwise_and(-(1 << 16)) + (1 << 16)).view(torch.float32)
        rounded = round_stochastically_(values, generator)
        assert set(rounded.tolist()) == {float(down), float(up)}
        deviation = float((up - down).abs()) * 0.5 / 100_000**0.5
        assert abs(float(rounded.double().mean()) - value) < 5 * deviation + 1e-6 * abs(value)
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically_(kept.clone(), generator), kept)


def test_each_weight_is_rounded_with_its_own_noise() -> None:
    weights = [nn.Parameter(torch.ones(256, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = PerParameter(torch.optim.SGD(weights, lr=0.002), rounding="stochastic")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(*weights)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_resume_is_exact(name: str, width: str, rounding: str) -> None:
    dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
    whole, optimizer = make(name, dtype, states=width, rounding=rounding)
    optimizer.attach()
    steps(whole, optimizer, range(2))
    saved = saved_and_loaded(whole, optimizer)
    steps(whole, optimizer, range(2, 4))

    resumed, optimizer = make(name, dtype, states=width, rounding=rounding)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # not attached: the noise must not depend on the order of updates
    steps(resumed, optimizer, range(2, 4))
    assert_same(whole, resumed)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_resume_is_exact_for_states_that_are_not_elementwise(name: str) -> None:
    whole, optimizer = make(name, torch.bfloat16, rounding="kahan")
    steps(whole, optimizer, range(2))
    saved = saved_and_loaded(whole, optimizer)
    steps(whole, optimizer, range(2, 4))

    resumed, optimizer = make(name, torch.bfloat16, rounding="kahan")
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(resumed, optimizer, range(2, 4))
    assert_same(whole, resumed)


def widened(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> Tensor:
    state = optimizer.state[parameter][name]
    return dequantize_state(name, state, parameter) if isinstance(state, dict) else state.float()


@pytest.mark.parametrize(("saved_as", "loaded_as"), list(itertools.product(["plain", *WIDTHS], repeat=2)))
def test_states_of_any_width_load_into_any_other_width(saved_as: str, loaded_as: str) -> None:
    def build(width: str) -> tuple[Model, torch.optim.Optimizer]:
        return make("adamw", wrap=False) if width == "plain" else make("adamw", states=width)

    (model, first), (other, second) = build(saved_as), build(loaded_as)
    steps(model, first, range(3))
    second.load_state_dict(first.state_dict())
    within = {"bf16": 2**-8, "8-bit": 0.02, "4-bit": 0.12}.get(loaded_as, 1e-7) if loaded_as != saved_as else 0.0
    for name in ("exp_avg", "exp_avg_sq"):
        before, after = widened(first, model.up.weight, name), widened(second, other.up.weight, name)
        assert (before - after).abs().max() <= within * before.abs().max()
    steps(other, second, range(3, 4))
    assert int(second.state[other.up.weight]["step"]) == 4
    if loaded_as != "plain":
        expected = {"fp32": 8, "bf16": 4, "8-bit": 2 + 8 / 256, "4-bit": 1 + 8 / 128}[loaded_as]
        assert bytes_per_element(second, other.up.weight) == expected


def test_kahan_and_plain_optimizers_load_each_other_s_states() -> None:
    model, kahan = make("adamw", torch.bfloat16, rounding="kahan")
    steps(model, kahan, range(2))
    other, plain = make("adamw", torch.bfloat16, wrap=False)
    plain.load_state_dict(kahan.state_dict())
    assert set(plain.state[other.up.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    steps(other, plain, range(2, 3))
    back = make("adamw", torch.bfloat16, rounding="kahan")[1]
    back.load_state_dict(plain.state_dict())
    assert {state["exp_avg"].dtype for state in back.state.values()} == {torch.float32}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize(("name", "width"), [*itertools.product(ELEMENTWISE, WIDTHS), ("muon", "fp32")])
def test_runs_on_fake_tensors(name: str, width: str, rounding: str) -> None:
    with FakeTensorMode():
        model, optimizer = make(name, torch.bfloat16, states=width, rounding=rounding)
        optimizer.attach()
        for _ in range(2):
            model(torch.zeros(8, 4, dtype=torch.long)).float().square().mean().backward()
            optimizer.step()
        saved = optimizer.state_dict()
    expected = {"8-bit": torch.uint8, "4-bit": torch.uint8, "bf16": torch.bfloat16}.get(width)
    if expected is not None:
        packed = saved["state"][1].get("exp_avg", saved["state"][1].get("momentum_buffer"))
        assert (packed["codes"] if isinstance(packed, dict) else packed).dtype == expected


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_fused_kernel_is_used_inside(name: str) -> None:
    results = []
    for fused in (False, True):
        model = Model(torch.bfloat16)
        optimizer = PerParameter(make_optimizer(model, train(name), fused=fused), "8-bit", "kahan")
        steps(model, optimizer, range(3))
        results.append(model)
    torch.testing.assert_close(results[0].up.weight, results[1].up.weight, rtol=2e-2, atol=2e-3)


def test_a_run_resumes_with_another_rounding() -> None:
    for before, after in itertools.permutations(["nearest", "kahan", "stochastic"], 2):
        model, first = make("adamw", torch.bfloat16, rounding=before)
        steps(model, first, range(2))
        other, second = make("adamw", torch.bfloat16, rounding=after)
        second.load_state_dict(first.state_dict())
        steps(other, second, range(2, 4))
        own = {"kahan": {"compensation"}, "stochastic": {"roundings"}}.get(after, set())
        assert set(second.state[other.up.weight]) == {"step", "exp_avg", "exp_avg_sq"} | own


def test_the_plan_s_kernel_is_used_after_a_resume() -> None:
    for fused in (True, False):
        model, other = Model(), Model()
        first = PerParameter(make_optimizer(model, train("adamw"), fused=not fused))
        steps(model, first, range(2))
        second = PerParameter(make_optimizer(other, train("adamw"), fused=fused))
        second.load_state_dict(first.state_dict())
        assert {bool(group["fused"]) for group in second.param_groups} == {fused}
        steps(other, second, range(2, 4))


def test_closure_is_called() -> None:
    model, optimizer = make("sgd")
    before = model.up.weight.detach().clone()
    assert optimizer.step(lambda: backward(model, 0)) > 0
    assert not torch.equal(model.up.weight, before)


class Drawer:
    """A memory beside the device's that notes what is asked of it, in order, and whether it was settled since."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seen: list[str] = []
        self.settled = True

    def put_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        self.names.append(name)
        self.seen.append(f"put {len(parameter)}")
        self.settled = False
        return value.clone()

    def fetch_ahead(self, value: torch.Tensor) -> None:
        self.seen.append(f"ahead {len(value)}")

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"fetch {len(value)}")
        return value.clone()

    def next_update(self) -> None:
        self.seen.append("next")

    def end_updates(self) -> None:
        self.seen.append("end")

    def settle(self) -> None:
        self.settled = True


def test_kahan_compensation_is_offloaded_with_the_states() -> None:
    """A resume waits for the copies that it starts."""

    def made(store: Drawer) -> tuple[torch.nn.Parameter, PerParameter]:
        weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        return weight, PerParameter(torch.optim.AdamW([weight]), rounding="kahan", state_store=store)

    before = Drawer()
    weight, optimizer = made(before)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert "compensation" in before.names
    assert not before.settled  # no host waits for an update
    saved = optimizer.state_dict()
    assert before.settled
    after = Drawer()
    made(after)[1].load_state_dict(saved)
    assert set(after.names) == set(before.names)
    assert after.settled


@pytest.mark.parametrize("kind", [PerParameter, MultiTensor])
def test_states_of_the_next_update_are_prefetched(kind: type[PerParameter], monkeypatch: Any) -> None:
    monkeypatch.setattr("tightfit.optim.in_batches.ELEMENTS", 1)
    weights = [torch.nn.Parameter(torch.ones(4 + number)) for number in range(3)]
    drawer = Drawer()
    optimizer = kind(torch.optim.SGD(weights, lr=0.1, momentum=0.9), state_store=drawer)
    for _ in range(2):
        drawer.seen.clear()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert drawer.seen == [
        "ahead 4", "next", "ahead 5", "fetch 4", "put 4", "next", "ahead 6", "fetch 5", "put 5", "next", "fetch 6", "put 6", "end",
    ]  # fmt: skip


LEFT_OUT = (
    False,
    False,
    True,
    False,
    True,
    True,
    False,
)  # steps of which some overflow, after a first one that makes states
WAYS: list[dict[str, Any]] = [
    {},
    {"states": "bf16"},
    {"states": "8-bit"},
    {"rounding": "kahan"},
    {"rounding": "stochastic"},
    {"states": "4-bit", "rounding": "kahan"},
]


def overflowing(name: str, batched: bool, way: dict[str, Any], by_the_device: bool) -> tuple[list[Any], list[Any]]:
    """Weights and states after each step, those that overflow left out by the optimizer or by who calls it."""
    model = Model(torch.bfloat16 if "rounding" in way else torch.float32)
    inner = make_optimizer(model, Train(optimizer=name, learning_rate=RATES.get(name, 1e-2), weight_decay=0.1))
    optimizer = (MultiTensor if batched else PerParameter)(inner, can_undo=by_the_device, **way)
    weights, states = [], []
    for number, overflows in enumerate(LEFT_OUT):
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
            if overflows:
                parameter.grad.view(-1)[0] = float("inf")
                parameter.grad.view(-1)[-1] = float("nan")
        assert optimizer.can_skip_step() == (by_the_device and number > 0)
        if optimizer.can_skip_step():
            optimizer.skip_step_if(torch.tensor(overflows), lambda overflows=overflows: overflows)  # type: ignore[misc]
        if by_the_device or not overflows:
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        states.append(copy.deepcopy(optimizer.state_dict()["state"]) if number % 2 else None)  # asking corrects counts
    return weights, states


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_an_overflow_unknown_to_the_host_changes_nothing(name: str, way: dict[str, Any]) -> None:
    """Weights, states and counts equal, bit for bit, those of an optimizer that was not called."""
    for batched in (False, True) if name in ELEMENTWISE[:3] else (False,):
        plain, told = (overflowing(name, batched, way, by_the_device) for by_the_device in (False, True))
        torch.testing.assert_close(told, plain, rtol=0.0, atol=0.0)


def test_the_host_reads_a_step_s_overflow_at_the_next_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = PerParameter(LAMB([weight], lr=0.1), can_undo=True)
    asked: list[int] = []

    def asks() -> bool:
        asked.append(optimizer.state[weight]["step"])
        return True

    for _ in range(3):
        weight.grad = torch.ones(3)
        if optimizer.can_skip_step():
            optimizer.skip_step_if(torch.tensor(True), asks)
        optimizer.step()
    assert asked == [2]
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert asked == [2, 2]
