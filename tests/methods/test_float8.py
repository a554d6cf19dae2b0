"""Float8 products: trained like torchao on a plain model, predicted as they run, and refused on
devices without 8-bit units.

Here products are emulated: computed in fp32, from factors in 8 bits. On a GPU the contract tests
train with real ones.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import tightfit
from tests import devices
from tests.contract import cases
from tests.pool import together
from tightfit import rules
from tightfit.achieved_rates import achieved
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.measure.verify import FLOAT8, verify
from tightfit.methods import float8
from tightfit.parallel.fsdp.planning import split_by_autocast
from tightfit.planner.defaults import complete
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimator import Estimator
from tightfit.planner.kernels import in_float8
from tightfit.report.explain import _layers_in_float8
from tightfit.rules import needed_permissions

pytest.importorskip("torchao")
BOUND = {"tensorwise": 5e-2, "rowwise": 4e-2}
"""Relative difference of all weights after three steps from those in fp32: see BOUNDS of the contract. One rounding is 2^-4 of a
factor (e4m3), 2^-3 of a gradient under tensorwise (e5m2)."""
MIXED: dict[str, Any] = {"precision": "bf16-mixed"}
TENSORWISE: dict[str, Any] = {**MIXED, "float8": "tensorwise"}
RECIPES = ("tensorwise", "rowwise")


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Let this process train in float8 without a device for it."""
    patch.setattr(float8, "EMULATE", True)
    patch.setattr(
        rules, "RULES", tuple(rule for rule in rules.RULES if "float8 products need a CUDA device" not in rule.text)
    )


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def trained(name: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights, of one of the processes that train together."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        run = tightfit.build(cases.make_case(name).job, tightfit.Plan(**fields), devices.machine("cpu"))
        return [step.loss for step in tightfit.train(run)], cases.state_of(run)


def by_torchao(recipe: str, emulated: bool = True) -> Any:
    """What anyone would write: the blocks of a plain model converted, with an input in the type of autocast."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def change(model: nn.Module) -> None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", emulated)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: "layer" in name)
        for layer in model.modules():
            if type(layer).__name__ == "Float8Linear":
                layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].bfloat16(), *inputs[1:]))

    return change


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_equals_torchao_on_a_plain_model(recipe: str, precision: str) -> None:
    case = cases.make_case("llama")
    losses, weights = cases.training(case, tightfit.Plan(precision=precision, float8=recipe))
    plain_losses, plain_weights = cases.plain_training(case, precision=precision, change=by_torchao(recipe))
    assert cases.distance(weights, plain_weights) <= 1e-6
    assert losses == pytest.approx(plain_losses, rel=1e-5)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "gpt2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_is_near_fp32_but_less_exact_than_bf16(recipe: str, name: str) -> None:
    case = cases.make_case(name)
    losses, weights = cases.training(case, tightfit.Plan(precision="bf16-mixed", float8=recipe))
    plain_losses, plain_weights = cases.plain_training(case)
    _, narrow = cases.plain_training(case, precision="bf16-mixed")
    assert cases.distance(narrow, plain_weights) < cases.distance(weights, plain_weights) <= BOUND[recipe]
    assert losses == pytest.approx(plain_losses, rel=BOUND[recipe])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("recompute", ["full", "selective-2"])
def test_recomputation_changes_nothing(recompute: str) -> None:
    losses, weights = trained("llama", TENSORWISE)
    again, others = trained("llama", {**TENSORWISE, "recompute": recompute})
    assert cases.distance(others, weights) <= 1e-6
    assert again == pytest.approx(losses, rel=1e-6)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("name", "fields", "alone"),
    [
        ("llama", {"dp_replicate": 2}, {"micro_batch": cases.BATCH // 2}),
        *(
            (
                name,
                {"zero": 3, "dp_shard": 2, "precision": "bf16-true"},
                {"micro_batch": cases.BATCH // 2, "precision": "bf16-true"},
            )
            for name in ("llama", "gpt2")
        ),
        ("llama", {"cp": 2}, {}),
        ("llama", {"pp": 2, "micro_batch": 4}, {"micro_batch": 4}),
        *(
            (name, {"tp": 2, **more}, {name: value for name, value in more.items() if name != "sequence_parallel"})
            for name in ("llama", "gpt2")
            for more in ({}, {"sequence_parallel": True}, {"float8": "rowwise"})
        ),
        ("bert", {"tp": 2}, {}),
        ("vit", {"tp": 2}, {}),
        ("llama", {"tp": 2, "sequence_parallel": True, "recompute": "full"}, {}),
        ("llama", {"tp": 2, "sequence_parallel": True, "compile": "block"}, {}),
        pytest.param(
            "llama",
            {"tp": 2, "sequence_parallel": True, "zero": 3, "dp_shard": 2},
            {"micro_batch": cases.BATCH // 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("llama", {"tp": 2, "pp": 2, "micro_batch": 4}, {"micro_batch": 4}, marks=pytest.mark.slow),
        pytest.param("llama", {"tp": 2, "cp": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_train_like_one(name: str, fields: dict[str, Any], alone: dict[str, Any]) -> None:
    """One device multiplies as much at once as each of two, because a scale covers one product;
    shards of sequences and of layers are the exceptions."""
    count = tightfit.Plan(**TENSORWISE).replace(**fields).devices
    found = together(count, "tests.methods.test_float8:trained", name, {**TENSORWISE, **fields})
    losses, weights = trained(name, {**TENSORWISE, **alone})
    bound = BOUND[fields.get("float8", "tensorwise")] if "cp" in fields or "tp" in fields else 3e-3
    for other_losses, other_weights in found:
        assert cases.distance(other_weights, weights) <= bound
        assert other_losses == pytest.approx(losses, rel=bound)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("recipe", RECIPES)
def test_verify_allows_8_bit_rounding_errors(recipe: str) -> None:
    found = verify(cases.make_case("llama").job, tightfit.Plan(precision="bf16-mixed", float8=recipe))
    assert found.passed
    assert found.gradients > 2.0**-9
    assert found.tolerances.gradients == FLOAT8[recipe] ** 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(32, 32)
        self.odd = nn.Linear(32, 24)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_hook(lambda layer, inputs, output: output)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 32)


def test_linear_layers_of_blocks_are_replaced() -> None:
    """The new layers keep the parameters of the old ones."""
    net = Net()
    before = dict(net.named_parameters())
    assert float8.convert(net, "rowwise", net.blocks) == 3
    kinds = {name: type(layer).__name__ for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    assert float8.convert(Net(), "rowwise", net.blocks, shards=4) == 0  # 8 of 32 features for each device
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {f"blocks.{n}.plain" for n in range(3)}
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_conv1d_computes_like_a_transposed_linear_layer(recipe: str) -> None:
    """Results and gradients equal those of torchao's layer; the parameters keep names, shapes and values."""
    conv, linear = nn.Sequential(Conv1D(48, 32)), nn.Sequential(nn.Linear(32, 48))
    with torch.no_grad():
        linear[0].weight.copy_(conv[0].weight.t())
        linear[0].bias.copy_(conv[0].bias.normal_())
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    assert float8.convert(conv, recipe, [conv], emulate=True) == 1
    assert float8.convert(linear, recipe, [linear], emulate=True) == 1
    after = conv.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    inputs = [torch.randn(2, 16, 32).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    outputs = [layer(one) for layer, one in zip((conv, linear), inputs, strict=True)]
    scales = torch.randn(48)
    for output in outputs:
        (output * scales).sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(conv[0].weight.grad, linear[0].weight.grad.t())
    assert torch.equal(conv[0].bias.grad, linear[0].bias.grad)
    plain = torch.nn.functional.linear(inputs[1], linear[0].weight, linear[0].bias)
    assert not torch.equal(outputs[0], plain)  # it was rounded to 8 bits


def test_fsdp_gathers_a_float8_conv1d_as_autocast_casts_it() -> None:
    """Its weight counts as that of a matrix product, like that of the layer which it replaces."""
    block = nn.Sequential(Conv1D(48, 32), nn.LayerNorm(48))
    assert float8.convert(block, "tensorwise", [block], emulate=True) == 1
    assert split_by_autocast(block) == ([block[0]], [block[1]])


@pytest.mark.parametrize(
    ("fields", "device", "said"),
    [
        (TENSORWISE, "cpu", "float8: none"),
        ({"float8": "tensorwise"}, "cuda", "bf16-mixed or bf16-true"),
        ({"float8": "rowwise", "precision": "fp16-mixed"}, "cuda", "bf16-mixed or bf16-true"),
        ({**TENSORWISE, "pp": 2, "schedule": "zero-bubble"}, "cuda", "schedule: 1f1b"),
        (TENSORWISE, "cuda", ""),
    ],
)
def test_impossible_plans_are_refused_with_a_remedy(fields: dict[str, Any], device: str, said: str) -> None:
    job = cases.make_case("llama").job
    if not said:
        rules.check(tightfit.Plan(**fields), job, device)
        return
    with pytest.raises(InputError) as refused:
        rules.check(tightfit.Plan(**fields), job, device)
    assert said in refused.value.fix


def test_float8_needs_the_job_s_permission() -> None:
    assert needed_permissions(tightfit.Plan(**TENSORWISE)) == {"bf16", "float8"}
    job = cases.make_case("llama").job.replace(allow=["bf16"])
    with pytest.raises(InputError, match=r"allow: \[bf16, float8\]"):
        rules.check(tightfit.Plan(**TENSORWISE), job, "cuda")


@pytest.mark.parametrize(
    ("machine", "recipe", "fix"),
    [
        ("a100-80gb", "tensorwise", "float8: none"),
        ("l4", "rowwise", "float8: tensorwise"),
        ("l4", "tensorwise", ""),
        ("h100-sxm", "rowwise", ""),
        ("mi300x", "rowwise", ""),
    ],
)
def test_devices_without_units_are_refused(machine: str, recipe: str, fix: str) -> None:
    plan: Any = tightfit.Plan(precision="bf16-mixed", float8=recipe)
    ledger: Any = object()
    if not fix:
        assert float8.cost(ledger, plan, Machine.named(machine)) is ledger
        return
    with pytest.raises(InputError) as refused:
        float8.cost(ledger, plan, Machine.named(machine))
    assert fix in refused.value.fix


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError) as refused:
        float8.convert(Net(), "tensorwise", [Block()])
    assert "pip install torchao" in refused.value.fix


@pytest.mark.usefixtures("emulated")
def test_a_model_without_suitable_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"no plain nn\.Linear or Conv1D"):
        tightfit.build(cases.make_case("batchnorm").job, tightfit.Plan(**TENSORWISE))


def test_a_plan_that_pins_only_float8_is_completed() -> None:
    plan, _ = complete(cases.make_case("llama").job, Machine.named("h100-sxm"), {"float8": "rowwise"})
    assert (plan.float8, plan.precision, plan.allocator) == ("rowwise", "bf16-mixed", "tuned")


def llama(hidden: int, length: int) -> tightfit.Job:
    model = {**cases.LLAMA, "hidden_size": hidden, "intermediate_size": 2 * hidden, "max_position_embeddings": length}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return tightfit.Job(
        model={**model, **heads},
        data={"synthetic": "tokens", "sequence_length": length, "samples": 16},
        train=tightfit.Train(batch=8, steps=5000),
        allow=["bf16", "float8"],
    )


@pytest.fixture(scope="module")
def large() -> Estimator:
    return Estimator(llama(4096, 1024), Machine.named("h100-sxm"))


PREDICTED: list[dict[str, Any]] = [
    {"float8": "rowwise", "recompute": "selective"},
    {"compile": "block"},
    {"tp": 2, "sequence_parallel": True},
]
ALSO_PREDICTED: list[dict[str, Any]] = [
    {},
    {"precision": "bf16-true"},
    {"recompute": "full"},
    {"compile": "block", "float8": "rowwise", "recompute": "selective"},
    {"tp": 2},
    {"tp": 2, "float8": "rowwise", "recompute": "full"},
    {"tp": 2, "sequence_parallel": True, "compile": "block"},
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fields", [*PREDICTED, *(pytest.param(fields, marks=pytest.mark.slow) for fields in ALSO_PREDICTED)], ids=str
)
def test_estimated_memory_agrees_with_the_dry_run(fields: dict[str, Any], large: Estimator) -> None:
    plan = tightfit.Plan(**{**TENSORWISE, **fields})
    estimated = large.estimate(plan).peak
    assert estimated.total - estimated.rows["runtime"] == pytest.approx(
        dry_run(large.job, plan, "cuda").total, rel=0.01
    )


def products(estimator: Estimator, plan: tightfit.Plan) -> list[str]:
    segments = estimator.estimate(plan).ledger.training
    return [one.dtype for segment in segments for one in segment.timeline.operations if one.name == "aten._scaled_mm"]


def test_the_products_of_blocks_are_traced_in_eight_bits(large: Estimator) -> None:
    plan = tightfit.Plan(**MIXED)
    layers, blocks = 7, 2  # each with three products
    assert products(large, plan) == []
    plan = plan.replace(float8="tensorwise")
    assert products(large, plan) == ["float8"] * (3 * layers * blocks)
    assert _layers_in_float8(large.estimate(plan)) == "; 14 linear layers multiply in float8"
    assert products(large, plan.replace(tp=2)) == products(large, plan)


def test_float8_products_reach_the_measured_rate() -> None:
    machine = Machine.named("h100-sxm")
    ratio = 0.71 * 1979 / (0.8 * 989)  # measured shares of the published peaks
    rate = achieved(machine, "product", "float8", 4096)
    assert rate == pytest.approx(ratio * achieved(machine, "product", "bfloat16", 4096), rel=1e-2)
    calibrated = machine.replace(rates={"product/bfloat16": {4096: 7e14}, "cast/bfloat16": {2**20: 1e12}})
    assert achieved(calibrated, "product", "float8", 4096) == pytest.approx(7e14 * ratio)
    assert achieved(calibrated, "cast", "float8_e4m3fn", 2**20) == 1e12


@pytest.mark.slow
def test_rowwise_scales_take_longer(large: Estimator) -> None:
    """The block is compiled: its kernels read a tensor before they scale it by its largest value."""
    plans: Any = [tightfit.Plan(**MIXED, compile="block", float8=recipe) for recipe in RECIPES]
    one, other = (large.estimate(plan).time for plan in plans)
    assert one.compute_s == pytest.approx(other.compute_s)
    assert one.memory_s < other.memory_s


FEW: dict[str, Any] = {"micro_batch": 8, "recompute": "none", "update_in_backward": False}  # plans to choose from


def test_large_compiled_layers_are_estimated_to_be_faster(large: Estimator) -> None:
    wide, narrow = (large.estimate(tightfit.Plan(**one, compile="block")).time for one in (MIXED, TENSORWISE))
    assert narrow.compute_s < 0.75 * wide.compute_s
    assert narrow.step_s < wide.step_s


@pytest.mark.slow
def test_search_chooses_float8_for_large_compiled_layers(large: Estimator) -> None:
    chosen = tightfit.search(large.job, large.machine, {**FEW, "compile": "block"}, large)[0]
    assert chosen.plan.float8 != "none"
    assert chosen.changes_math == ["bf16", "float8"]


def test_search_tries_float8_only_where_allowed(large: Estimator) -> None:
    plan, job, other = tightfit.Plan(**MIXED), large.job, Machine.named("a100-80gb")
    assert [one.float8 for one in in_float8(large, plan, {})] == ["tensorwise", "rowwise"]
    assert in_float8(large, plan, {"float8": "none"}) == []
    assert [one.tp for one in in_float8(large, plan.replace(tp=2), {})] == [2, 2]
    assert in_float8(large, plan.replace(pp=2, schedule="zero-bubble"), {}) == []
    assert in_float8(large, tightfit.Plan(), {}) == []
    assert in_float8(large.with_job(job.replace(allow=["bf16"]), large.machine), plan, {}) == []
    assert in_float8(large.with_job(job, other), plan, {}) == []
    assert [one.float8 for one in in_float8(large.with_job(job, Machine.named("l4")), plan, {})] == ["tensorwise"]


def test_the_advice_mentions_missing_torchao(large: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "is_installed", lambda: False)
    assert any("torchao" in line for line in large.estimate(tightfit.Plan(**MIXED)).advice)
    assert not any("torchao" in line for line in large.estimate(tightfit.Plan(**TENSORWISE)).advice)


def test_search_rejects_float8_for_small_layers() -> None:
    chosen = tightfit.search(llama(64, 64), Machine.named("h100-sxm"), {**FEW, "compile": "none"})[0]
    assert chosen.plan.float8 == "none"


@pytest.mark.parametrize(
    ("recipe", "compiled", "device"),
    [devices.on_gpu((recipe, how), name=f"{recipe}-{how}") for recipe in RECIPES for how in ("none", "block")],
)
def test_a_gpu_multiplies_in_eight_bits(
    recipe: str, compiled: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real products are compared with emulated ones on the same device, which sum in another order."""
    devices.need_float8(recipe)
    called: list[Any] = []
    product = torch._scaled_mm

    @functools.wraps(product)  # the compiler, which may be imported meanwhile, reads the function's name
    def counted(*args: Any, **named: Any) -> Tensor:
        called.append(args)
        return product(*args, **named)

    if compiled == "none":
        monkeypatch.setattr(torch, "_scaled_mm", counted)
    case = cases.make_case("llama")
    plan: Any = tightfit.Plan(precision="bf16-mixed", float8=recipe, compile=compiled)
    losses, weights = cases.training(case, plan, device=device)
    assert len(called) == (cases.STEPS * 4 * 7 * 3 if compiled == "none" else 0)
    monkeypatch.setattr(float8, "EMULATE", True)
    torch.compiler.reset()
    emulated_losses, emulated_weights = cases.training(case, plan.replace(compile="none"), device=device)
    assert cases.distance(weights, emulated_weights) <= BOUND[recipe]
    assert losses == pytest.approx(emulated_losses, rel=BOUND[recipe])
