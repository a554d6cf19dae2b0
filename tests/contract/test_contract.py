"""The contract: every method, and every pair that the rules admit, trains the same job as plain PyTorch.

Methods are found in METHODS and their settings in each room's VARIANTS: a new room is held to this by being listed.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests.sweeps import part, spread
from tightfit.errors import InputError
from tightfit.methods import METHODS
from tightfit.rules import check

from . import cases

FP32 = 1e-6
BOUNDS = {"bf16-mixed": 5e-3, "bf16-true": 1e-2, "fp16-mixed": 1e-3, "fp16-true": 2e-3}
"""Relative difference of all weights after three steps. One rounding is 2^-9 (bf16) or 2^-12 (fp16) of a weight or an
activation; Adam turns relative errors of gradients into errors of steps that are 1 % of a weight."""
RELU = {"bf16-mixed": 3e-2, "bf16-true": 3e-2, "fp16-mixed": 2e-2, "fp16-true": 2e-2}
"""The network with BatchNorm has ReLUs too: what rounding moves across zero changes whole gradients, in any 16 bits.
`test_low_precision_is_plain_pytorch` holds it against PyTorch's own low precision without that slack."""
COMPILED_NORM = 2e-5
"""The compiler sums BatchNorm's statistics in another order, which three steps of a tiny batch magnify; plain torch.compile
of the same network is as far from eager in fp32, and 2e-14 from it in fp64."""
COMPRESSED = {"none": 0.0, "bf16": 5e-3}
STATES = {"fp32": 0.0, "bf16": 1e-3, "8-bit": 5e-3, "4-bit": 6e-2}

Variant = tuple[str, dict[str, Any]]


def variants() -> list[Variant]:
    return [(method.__name__.rpartition(".")[2], fields) for method in METHODS for fields in method.VARIANTS]


def named(items: list[Variant]) -> str:
    return "+".join(",".join(f"{key}={value}" for key, value in fields.items()) for _, fields in items)


AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def on_several(items: list[Variant]) -> bool:
    return any(fields.get(axis, 1) > 1 for _, fields in items for axis in AXES)


SINGLES = [[variant] for variant in variants()]
PAIRS = [list(pair) for pair in itertools.combinations(variants(), 2) if pair[0][0] != pair[1][0]]


@functools.cache
def expected(name: str, micro_batch: int | None, replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """Of the whole batch at once, but for BatchNorm, whose statistics are those of what a forward sees."""
    if name != "batchnorm":
        micro_batch, replicas = None, 1
    return cases.plain_training(cases.make_case(name), micro_batch, replicas=replicas)


def hold(name: str, items: list[Variant], backend: str | None = None) -> None:
    """Train the case with the variants' plan and hold losses and weights against plain PyTorch's."""
    fields = {key: value for _, variant in items for key, value in variant.items()}
    case, plan = cases.make_case(name), tightfit.Plan(**fields)
    if not admitted(plan, case):
        with pytest.raises(InputError):
            tightfit.build(case.job, plan)
        return
    losses, weights = cases.training(case, plan, backend)
    plain_losses, plain_weights = expected(name, plan.micro_batch, plan.data_parallel)
    bounds = RELU if name == "batchnorm" else BOUNDS
    fp32 = COMPILED_NORM if plan.compile != "none" and name == "batchnorm" else FP32
    bound = fp32 + bounds.get(plan.precision, 0.0) + STATES[plan.states] + COMPRESSED[plan.compressed_gradients]
    assert cases.distance(weights, plain_weights) <= bound
    assert losses == pytest.approx(plain_losses, rel=max(bound, 2e-6))


def admitted(plan: tightfit.Plan, case: cases.Case) -> bool:
    """Whether the rules admit the plan for the case, and the model has what it works on."""
    try:
        check(plan, case.job, "cpu")
    except InputError:
        return False
    if (plan.attention == "blocked" or plan.tp > 1) and case.name == "batchnorm":
        return False
    if plan.cp > 1 and case.name in ("vit", "batchnorm"):
        return False
    return plan.chunked_loss is None or case.name in ("llama", "bert")


def has_workers(items: list[Variant]) -> bool:
    return any(method == "loader" for method, _ in items)


def is_compiled(items: list[Variant]) -> bool:
    return any(method == "compile" for method, _ in items)


@pytest.mark.parametrize("name", cases.NAMES)
def test_reference_plan_is_plain_pytorch(name: str) -> None:
    hold(name, [])


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", [s for s in SINGLES if not is_compiled(s)], ids=named)
def test_single(name: str, items: list[Variant]) -> None:
    hold(name, items)


@pytest.mark.parametrize(
    ("items", "name"),
    spread(
        [p for p in PAIRS if not is_compiled(p) and not has_workers(p) and not on_several(p)],
        cases.NAMES,
        len(cases.NAMES),
        lambda one: one if isinstance(one, str) else named(one),
    ),
)
def test_pair(items: list[Variant], name: str) -> None:
    """Each pair on one of the models, another each time; the slow suite tries all pairs on all."""
    hold(name, items)


SEVERAL = [p for p in PAIRS if on_several(p) and not is_compiled(p) and not has_workers(p)]


def is_usual(variant: Variant) -> bool:
    """Of several devices, or the first of its room: the others differ in degree."""
    return on_several([variant]) or variant in [one for one in variants() if one[0] == variant[0]][:1]


QUICK = [p for p in SEVERAL if all(map(is_usual, p))]


def covering(pairs: list[list[Variant]], every: int) -> list[list[Variant]]:
    """Each `every`-th pair, and of the others those with a variant that is in none before."""
    there: list[Variant] = []
    found = []
    for pair in [*pairs[::every], *(pair for number, pair in enumerate(pairs) if number % every)]:
        if len(found) < len(pairs[::every]) or any(variant not in there for variant in pair):
            found.append(pair)
            there += pair
    return found


TRIED = covering(QUICK, 4)


@pytest.mark.parametrize(
    "items",
    [pytest.param(p, id=named(p), marks=[] if p in TRIED else pytest.mark.slow) for p in QUICK],
)
def test_pair_on_several_devices(items: list[Variant]) -> None:
    """A quarter of them, on one model; the slow suite tries all pairs on all. Pairs of axes are on all models in tests/engine."""
    hold("llama", items)


def test_every_variant_is_in_a_pair_of_the_quick_suite() -> None:
    there = [variant for pair in TRIED for variant in pair]
    assert all(variant in there for pair in QUICK for variant in pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", SEVERAL, ids=named)
def test_pair_on_several_devices_of_all(name: str, items: list[Variant]) -> None:
    hold(name, items)


WITH_WORKERS = [p for p in PAIRS if has_workers(p) and not is_compiled(p)]


USUAL_WITH_WORKERS = [p for p in WITH_WORKERS if not on_several(p) and all(map(is_usual, p))]


@pytest.mark.parametrize("items", USUAL_WITH_WORKERS, ids=named)
def test_pair_with_workers(items: list[Variant]) -> None:
    """On one model: each of these starts processes, which takes seconds, and what they prepare is the same batches."""
    hold("batchnorm", items)


@pytest.mark.slow
@pytest.mark.parametrize("items", [p for p in WITH_WORKERS if p not in USUAL_WITH_WORKERS], ids=named)
def test_pair_with_workers_of_all(items: list[Variant]) -> None:
    hold("batchnorm", items)


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_is_plain_pytorch(name: str, precision: str) -> None:
    """Held tightly against the loop that anyone would write for that precision in plain PyTorch."""
    case = cases.make_case(name)
    losses, weights = cases.training(case, tightfit.Plan(precision=precision))
    plain_losses, plain_weights = cases.plain_training(case, precision=precision)
    assert cases.distance(weights, plain_weights) <= FP32
    assert losses == pytest.approx(plain_losses, rel=1e-5)


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED = [(name, single) for name in cases.NAMES for single in SINGLES if is_compiled(single)]
WHOLE = {"compile": "model"}  # generates most code


@pytest.mark.parametrize(
    ("name", "items"),
    [
        pytest.param(
            name,
            items,
            id=f"{named(items)}-{name}",
            marks=[] if name == "llama" or (name == "batchnorm" and items[0][1] == WHOLE) else pytest.mark.slow,
        )
        for name, items in COMPILED
    ],
)
def test_compiled(name: str, items: list[Variant], fresh_compiler: None) -> None:
    """The slow suite compiles every model; the quick one the usual one and the one with buffers."""
    hold(name, items)


@pytest.mark.parametrize("items", part([p for p in PAIRS if ("compile", {"compile": "block"}) in p], 2, named))
def test_compiled_pair_composes(items: list[Variant], fresh_compiler: None) -> None:
    """Block by block, as search does; traced and differentiated as compiled, but run by eager kernels, which is quick. The slow
    suite compiles whole models too, and generates code."""
    hold("llama", items, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", [p for p in PAIRS if is_compiled(p)], ids=named)
def test_compiled_pair(name: str, items: list[Variant], fresh_compiler: None) -> None:
    hold(name, items)
