"""The contract: every method, and every pair that the rules admit, trains the same job as plain
PyTorch.

Methods are found in METHODS and their settings in each module's VARIANTS: a new module is tested as
soon as it is listed. The same tests run on a processor and, with the mark `gpu`, on a GPU, where
plain PyTorch runs on the same GPU. Results are compared on the host.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tightfit
from tests import devices
from tests.contract import cases
from tests.devices import need, need_float8, on_each_device, on_gpu
from tests.sweeps import part, spread
from tightfit.errors import InputError
from tightfit.methods import METHODS
from tightfit.rules import check

FP32 = 1e-6
BOUNDS = {"bf16-mixed": 5e-3, "bf16-true": 1e-2, "fp16-mixed": 1e-3, "fp16-true": 2e-3}
"""Relative difference of all weights after three steps. One rounding is 2^-9 (bf16) or 2^-12 (fp16) of a weight or an
activation; Adam turns relative errors of gradients into errors of steps that are 1 % of a weight."""
RELU = {"bf16-mixed": 3e-2, "bf16-true": 3e-2, "fp16-mixed": 2e-2, "fp16-true": 2e-2}
"""The network with BatchNorm has ReLUs too: what rounding moves across zero changes whole gradients, in any 16 bits.
`test_low_precision_matches_plain_pytorch` holds it against PyTorch's own low precision without that slack."""
REORDERED_NORM = 2e-5
"""The compiler, and torch's own kernel for channels_last, sum BatchNorm's statistics in another order, which three steps of a
tiny batch magnify; plain PyTorch with either is as far from eager in fp32, and 2e-14 from it in fp64."""
FP32_ON_GPU = {"batchnorm": 5e-5}
"""There the libraries choose kernels by shape: a micro-batch is summed in another order than a batch, by cuBLAS in products, by
attention and cuDNN in theirs. Others than these: FP32_OF_OTHERS_ON_GPU. BatchNorm magnifies it, as REORDERED_NORM says."""
FP32_OF_OTHERS_ON_GPU = 1e-5
COMPILED_ON_GPU = 5e-5
"""The compiler's kernels take sums and powers by instructions of their own."""
TF32 = 5e-3
"""One rounding to 10 bits is 2^-11 of a factor, as in fp16, and the bound is that of fp16 with a gradient's slack."""
BITS_16_ON_GPU = 2e-3
"""Of a 16-bit precision beside PyTorch's own loop of that precision, after three steps: the same kernels, of which attention's
backward may add in another order each time. It is less than half of what one rounding of bf16 moves a weight."""
FLOAT8 = {"none": 0.0, "tensorwise": 5e-2, "rowwise": 4e-2}
"""One rounding is 2^-4 of a factor (e4m3), under tensorwise 2^-3 of a gradient (e5m2). Emulated on a processor the weights of the
tiny models end 1 to 3 % away."""
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
ON_GPU_ONLY: list[list[Variant]] = [
    [("precision", {"precision": "tf32"})],
    [("loader", {"pin_memory": True})],
    [("loader", {"pin_memory": True, "non_blocking": True})],
    [("loader", {"pin_memory": True, "non_blocking": True, "micro_batch": 3})],
    [("offload", {"offload": ("states",)})],
    [("offload", {"offload": ("gradients",)})],
    [("offload", {"offload": ("activations",)})],
    [("offload", {"offload": ("states", "gradients", "parameters")})],
    [("offload", {"offload": ("states", "gradients", "parameters", "activations"), "micro_batch": 3})],
]
"""What the rules keep from a processor, with which a method's VARIANTS are tried: host memory is another memory there."""
PAIRS = [list(pair) for pair in itertools.combinations(variants(), 2) if pair[0][0] != pair[1][0]]


@functools.cache
def expected(name: str, micro_batch: int | None, replicas: int, device: str) -> tuple[list[float], dict[str, Tensor]]:
    """The reference trains the whole batch at once, except with BatchNorm, whose statistics depend
    on each forward's samples."""
    if name != "batchnorm":
        micro_batch, replicas = None, 1
    return cases.plain_training(cases.make_case(name), micro_batch, replicas=replicas, device=device)


def hold(name: str, items: list[Variant], backend: str | None = None, device: str = "cpu") -> None:
    """Train the case with the variants' plan and hold losses and weights against plain PyTorch's."""
    fields = {key: value for _, variant in items for key, value in variant.items()}
    case, plan = cases.make_case(name), tightfit.Plan(**fields)
    if not admitted(plan, case, device):
        with pytest.raises(InputError):
            next(tightfit.train(tightfit.build(case.job, plan, devices.machine(device))))
        return
    need(plan.devices, device)
    if plan.float8 != "none":
        need_float8(plan.float8)
    losses, weights = cases.training(case, plan, backend, device)
    plain_losses, plain_weights = expected(name, plan.micro_batch, plan.data_parallel, device)
    bound = bound_of(name, plan, device)
    assert cases.distance(weights, plain_weights) <= bound
    assert losses == pytest.approx(plain_losses, rel=max(bound, 2e-6))


def bound_of(name: str, plan: tightfit.Plan, device: str) -> float:
    """How far the weights may be from plain PyTorch's in fp32 on the same device, relative to all of them."""
    bounds = RELU if name == "batchnorm" else BOUNDS
    reordered = plan.compile != "none" or plan.memory_format != "contiguous"
    fp32 = REORDERED_NORM if reordered and name == "batchnorm" else FP32
    if device == "cuda":
        fp32 = FP32_ON_GPU.get(name, FP32_OF_OTHERS_ON_GPU if plan.compile == "none" else COMPILED_ON_GPU)
    rounded = TF32 if plan.precision == "tf32" else bounds.get(plan.precision, 0.0)
    if plan.precision == "tf32" and name == "batchnorm":
        rounded = RELU["fp16-mixed"]
    return fp32 + rounded + FLOAT8[plan.float8] + STATES[plan.states] + COMPRESSED[plan.compressed_gradients]


def test_every_variant_is_trained_by_some_case() -> None:
    """A variant that the rules or ALLOW in cases.py keep from every case would be compared with nothing. float8 needs a
    device of its own: tests/methods/test_float8.py emulates it."""
    every = [cases.make_case(name) for name in cases.NAMES]
    untrained = [
        named([(name, fields)])
        for name, fields in variants()
        if name != "float8" and not any(admitted(tightfit.Plan(**fields), case, "cpu") for case in every)
    ]
    assert untrained == []


def admitted(plan: tightfit.Plan, case: cases.Case, device: str) -> bool:
    """Whether the rules admit the plan for the case, and the model has what it works on."""
    try:
        check(plan, case.job, device)
    except InputError:
        return False
    if (plan.attention == "blocked" or plan.tp > 1) and case.name == "batchnorm":
        return False
    if plan.float8 != "none" and case.name == "batchnorm":
        return False
    if plan.recompute == "attention" and case.name == "batchnorm":
        return False
    if plan.cp > 1 and case.name in ("vit", "batchnorm"):
        return False
    return plan.chunked_loss is None or case.name in ("llama", "bert")


def has_workers(items: list[Variant]) -> bool:
    return any(method == "loader" for method, _ in items)


def is_compiled(items: list[Variant]) -> bool:
    return any(method == "compile" for method, _ in items)


@on_each_device
@pytest.mark.parametrize("name", cases.NAMES)
def test_reference_plan_is_plain_pytorch(name: str, device: str) -> None:
    hold(name, [], device=device)


@on_each_device
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", [s for s in SINGLES if not is_compiled(s) and not on_several(s)], ids=named)
def test_single_method_matches_plain_pytorch(name: str, items: list[Variant], device: str) -> None:
    hold(name, items, device=device)


@pytest.mark.parametrize(
    ("items", "name"),
    spread(
        [s for s in SINGLES if on_several(s) and not is_compiled(s)],
        cases.NAMES,
        2,
        lambda one: one if isinstance(one, str) else named(one),
    ),
)
def test_method_of_several_devices_matches_plain_pytorch(items: list[Variant], name: str) -> None:
    """On two of the four models, on the others each time; the slow suite tries all."""
    hold(name, items)


@on_each_device
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", ON_GPU_ONLY, ids=named)
def test_gpu_only_method_matches_plain_pytorch(name: str, items: list[Variant], device: str) -> None:
    """The rules refuse these variants on a processor."""
    (_, fields), *_ = items
    assert admitted(tightfit.Plan(**fields), cases.make_case(name), device) == (device == "cuda")
    hold(name, items, device=device)


@pytest.mark.parametrize(
    ("items", "name"),
    spread(
        [p for p in PAIRS if not is_compiled(p) and not has_workers(p) and not on_several(p)],
        cases.NAMES,
        3 * len(cases.NAMES),
        lambda one: one if isinstance(one, str) else named(one),
    ),
)
def test_pair_of_methods_matches_plain_pytorch(items: list[Variant], name: str) -> None:
    """Every third pair on one of the models, another each time; the slow suite tries all pairs on all."""
    hold(name, items)


def is_usual(variant: Variant) -> bool:
    """The variants on several devices, and the first of each module: the others differ in degree."""
    return on_several([variant]) or variant in [one for one in variants() if one[0] == variant[0]][:1]


def on_gpu_too(pairs: list[list[Variant]]) -> list[Any]:
    """Each of the pairs on one of the models that take it, and on a GPU."""
    found = []
    for number, pair in enumerate(pairs):
        of_language = any(method in ("loss", "attention") for method, _ in pair)
        names = ("llama", "bert") if of_language else cases.NAMES
        name = names[number % len(names)]
        found.append(on_gpu((pair, name), name=f"{named(pair)}-{name}"))
    return found


PAIRS_ON_GPU = [
    p for p in PAIRS if not is_compiled(p) and not has_workers(p) and not on_several(p) and all(map(is_usual, p))
]
MIXED = ("precision", {"precision": "bf16-mixed"})
TRUE = ("precision", {"precision": "bf16-true"})
HOST = ("offload", {"offload": ("states", "gradients", "parameters")})
PAIRS_WITH_HOST = [
    [other, HOST] for other in [MIXED, TRUE, ("recompute", {"recompute": "full"}), ("loss", {"chunked_loss": 5})]
] + [[MIXED, ("loader", {"pin_memory": True, "non_blocking": True})]]


@pytest.mark.parametrize(("items", "name", "device"), on_gpu_too(PAIRS_ON_GPU + PAIRS_WITH_HOST))
def test_pair_of_methods_matches_plain_pytorch_on_a_gpu(items: list[Variant], name: str, device: str) -> None:
    """The usual setting of each two methods, on one of the models; and what is beside a GPU only."""
    hold(name, items, device=device)


SEVERAL = [p for p in PAIRS if on_several(p) and not is_compiled(p) and not has_workers(p)]


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


TRIED = covering(QUICK, 9)


@pytest.mark.parametrize(
    "items",
    [pytest.param(p, id=named(p), marks=[] if p in TRIED else pytest.mark.slow) for p in QUICK],
)
def test_pair_on_several_devices_matches_plain_pytorch(items: list[Variant]) -> None:
    """A part of the pairs, on one model; the slow suite tries all pairs on all. Pairs of axes
    are on all models in tests/engine."""
    hold("llama", items)


def test_every_variant_is_in_a_pair_of_the_quick_suite() -> None:
    there = [variant for pair in TRIED for variant in pair]
    assert all(variant in there for pair in QUICK for variant in pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", SEVERAL, ids=named)
def test_all_pairs_on_several_devices_match_plain_pytorch(name: str, items: list[Variant]) -> None:
    hold(name, items)


WITH_WORKERS = [p for p in PAIRS if has_workers(p) and not is_compiled(p)]


USUAL_WITH_WORKERS = [p for p in WITH_WORKERS if not on_several(p) and all(map(is_usual, p))]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("items", USUAL_WITH_WORKERS, ids=named)
def test_pair_with_data_workers_matches_plain_pytorch(items: list[Variant]) -> None:
    """On one model: each of these starts processes, which takes seconds, and what they prepare is the same batches."""
    hold("batchnorm", items)


@pytest.mark.slow
@pytest.mark.parametrize("items", [p for p in WITH_WORKERS if p not in USUAL_WITH_WORKERS], ids=named)
def test_all_pairs_with_data_workers_match_plain_pytorch(items: list[Variant]) -> None:
    hold("batchnorm", items)


@on_each_device
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp16-mixed"])
def test_low_precision_matches_plain_pytorch(name: str, precision: str, device: str) -> None:
    """The plain PyTorch loop for the same precision is the reference, with tight bounds."""
    case = cases.make_case(name)
    losses, weights = cases.training(case, tightfit.Plan(precision=precision), device=device)
    plain_losses, plain_weights = cases.plain_training(case, precision=precision, device=device)
    bound = FP32 if device == "cpu" else BITS_16_ON_GPU
    assert cases.distance(weights, plain_weights) <= bound
    assert losses == pytest.approx(plain_losses, rel=max(bound, 1e-5))


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED = [(name, single) for name in cases.NAMES for single in SINGLES if is_compiled(single)]
WHOLE = {"compile": "model"}  # generates most code


def is_quick(name: str, items: list[Variant], device: str) -> bool:
    whole = items[0][1] == WHOLE
    return (name == "llama" and not (whole and device == "cuda")) or (
        name == "batchnorm" and whole and device == "cuda"
    )


@pytest.mark.parametrize(
    ("name", "items", "device"),
    [
        pytest.param(
            name,
            items,
            device,
            id=f"{named(items)}-{name}-{device}",
            marks=[
                *([pytest.mark.gpu] if device == "cuda" else []),
                *([] if is_quick(name, items, device) else [pytest.mark.slow]),
            ],
        )
        for device in ("cpu", "cuda")
        for name, items in COMPILED
    ],
)
def test_compiled_method_matches_plain_pytorch(
    name: str, items: list[Variant], device: str, fresh_compiler: None
) -> None:
    """The slow suite compiles every model; the quick one the usual one and the one with buffers, on a GPU each in one way."""
    hold(name, items, device=device)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("items", part([p for p in PAIRS if ("compile", {"compile": "block"}) in p], 4, named))
def test_compiled_pair_composes_on_one_model(items: list[Variant], fresh_compiler: None) -> None:
    """Block by block, as search does; traced and differentiated as compiled, but run by eager kernels, which is quick. The slow
    suite compiles whole models too, and generates code."""
    hold("llama", items, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("items", [p for p in PAIRS if is_compiled(p)], ids=named)
def test_compiled_pair_matches_plain_pytorch(name: str, items: list[Variant], fresh_compiler: None) -> None:
    hold(name, items)
