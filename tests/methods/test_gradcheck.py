"""Every operation with a backward of its own is checked against numerical differentiation, in fp64.

Operations that communicate are checked as a function of what all devices hold, on two processes
that run it together.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.pool import together
from tightfit.distributed.mesh import make_mesh
from tightfit.methods import attention
from tightfit.models import nf4
from tightfit.models.batches import IGNORED, LabelCount
from tightfit.parallel.context import ring_attention
from tightfit.parallel.pipeline import messages, weight_gradients
from tightfit.parallel.tensor import sequence_parallel, sharder, vocab_cross_entropy
from tightfit.runtime import loss_kernels
from tightfit.runtime.dropout_noise import dropout_noise
from tightfit.runtime.linear_cross_entropy import linear_cross_entropy

HERE = "tests.methods.test_gradcheck:"


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def targets(count: int, classes: int) -> Tensor:
    found = torch.arange(count) * 5 % classes
    found[1] = IGNORED
    return found


def check_attention() -> None:
    """Two blocks of queries in batches of 2 x 2 heads, with a bias of each shape that broadcasts to them."""
    before = attention.QUERY_BLOCK, attention.MOST_QUERIES
    attention.QUERY_BLOCK = attention.MOST_QUERIES = 3
    try:
        shapes = [None, (2, 2, 5, 5), (1, 2, 5, 5), (2, 1, 1, 5), (1, 1, 5, 1)]
        for causal in (False, True):
            for shape in shapes:
                inputs = [random(2, 2, 5, width) for width in (4, 4, 4)]
                bias = None if shape is None else random(*shape)

                noise = dropout_noise(inputs[0].new_empty(0), [4, attention.probability_count(5, causal)], 0.25)
                for dropped in (None, noise):

                    def output(
                        query: Tensor, key: Tensor, value: Tensor, bias: Any, how: Any = (causal, dropped)
                    ) -> Tensor:
                        factor = 1.0 if how[1] is None else attention.kept_factor(0.25, query.dtype)
                        return attention.blocked_attention(query, key + 0.1, value + 0.2, bias, *how, factor)[0]

                    assert gradcheck(output, (*inputs, bias))
    finally:
        attention.QUERY_BLOCK, attention.MOST_QUERIES = before


def check_linear_cross_entropy() -> None:
    """Its backward scales what forward kept, so it runs once: each time, forward runs again."""
    some = targets(7, 9).index_fill(0, torch.tensor([0, 4]), IGNORED)
    as_on_cuda = loss_kernels.LossKernels(
        100, pads=True, accumulates_fp32=True, fused=loss_kernels.loss_and_gradient, row_multiple=1
    )
    every = [(targets(7, 9), None), (some, LabelCount(4, 7))]
    for (labels, few), kernels, bias, chunk in itertools.product(
        every, (loss_kernels.LossKernels(2), as_on_cuda), (None, random(9)), (3, 100)
    ):

        def total(
            hidden: Tensor,
            weight: Tensor,
            bias: Any,
            labels: Tensor = labels,
            few: Any = few,
            kernels: Any = kernels,
            chunk: int = chunk,
        ) -> Tensor:
            return checkpoint(
                linear_cross_entropy, hidden, weight, bias, labels, chunk, kernels, None, few, use_reentrant=False
            )

        assert gradcheck(total, (random(7, 4), random(9, 4), bias))


def check_add_product() -> None:
    """Within a Function only, which asks for no gradient of it: it adds what a product in fp64 gives, but for fp32's rounding."""
    left, right = (random(*shape).detach().bfloat16() for shape in ((5, 64), (64, 3)))
    total = random(5, 3).detach().float()
    expected = total.double() + left.double() @ right.double()
    loss_kernels.add_product(left, right, total, False)
    assert torch.allclose(total.double(), expected, rtol=1e-6, atol=1e-6)


def check_deferred_product() -> None:
    """The input's gradient by differentiation; the weight's, which comes later, by its own."""
    for transposed in (False, True):
        weight = nn.Parameter(random(4, 4).detach())
        store = weight_gradients.DeferredWeightGradients()

        def output(input: Tensor, weight: Any = weight, store: Any = store, transposed: bool = transposed) -> Tensor:
            return weight_gradients._DeferredMatmul.apply(input, weight, torch.float64, store, transposed)

        with store.group(0):
            assert gradcheck(output, (random(2, 3, 4),))
        store.left.clear()
        weight.grad = None
        with store.group(0):
            output(random(2, 3, 4)).square().sum().backward()
        store.run(0)
        expected = weight.detach().clone().requires_grad_()
        (random(2, 3, 4) @ (expected if transposed else expected.t())).square().sum().backward()
        assert torch.allclose(weight.grad, expected.grad)


def check_entered() -> None:
    """What came from another stage: its gradients are left for that stage as they come, and none where none came."""
    came = SimpleNamespace(gradients=None)
    used, unused = messages._ReceivedInputs.apply(random(1), came, [random(2, 3).detach(), random(4).detach()])
    (used * random(2, 3).detach()).sum().backward()
    assert torch.equal(came.gradients[0], random(2, 3).detach())
    assert came.gradients[1] is None
    assert unused.requires_grad


class Everyones(torch.autograd.Function):
    """Forward what each device has, side by side; backward this device's part of a gradient that is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank = dist.get_rank(group)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.rank].contiguous(), None


def everyone_has(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`whole` as each device has it, whose gradient is the sum over what they do with it."""
    return sharder._CopyToRegion.apply(whole, group)


def group_of(fields: dict[str, Any], axis: str) -> tuple[dist.ProcessGroup, int]:
    mesh = make_mesh(tightfit.Plan(**fields), torch.device("cpu"))
    assert mesh is not None
    group = mesh.other_groups["context"] if axis == "cp" else mesh.group(axis)
    return group, dist.get_rank(group)


def ring() -> None:
    group, rank = group_of({"cp": 2}, "cp")
    seen = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    seen[..., -2:] = False
    for causal, mask in ((True, None), (False, seen)):

        def output(query: Tensor, key: Tensor, value: Tensor, causal: bool = causal, mask: Any = mask) -> Tensor:
            def mine(whole: Tensor) -> Tensor:
                chunks = whole.chunk(4, -2)
                return torch.cat([chunks[rank], chunks[3 - rank]], -2)

            parts = [mine(everyone_has(whole, group)) for whole in (query, key, value)]
            own = None if mask is None else mine(mask.transpose(-1, -2)).transpose(-1, -2)
            place = ring_attention.Ring(group)
            return Everyones.apply(ring_attention.RingAttention.apply(*parts, own, causal, 0.5, place), group)

        assert gradcheck(output, (random(1, 2, 8, 4), random(1, 1, 8, 4), random(1, 1, 8, 4).detach().requires_grad_()))


def divided_cross_entropy() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    labels = targets(4, 6)

    def total(logits: Tensor) -> Tensor:
        mine = everyone_has(logits, group).chunk(2, -1)[rank]
        return vocab_cross_entropy.vocab_parallel_cross_entropy(mine, labels, 3 * rank, group)

    assert gradcheck(total, (random(4, 6),))


def copied() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    assert gradcheck(
        lambda x: Everyones.apply(sharder._CopyToRegion.apply(x, group) * (rank + 2), group), (random(3, 4),)
    )


def summed() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    assert gradcheck(lambda x: sharder._ReduceFromRegion.apply(everyone_has(x, group)[rank], group), (random(2, 3, 4),))


def columns_gathered() -> None:
    group, rank = group_of({"tp": 2}, "tp")

    def output(x: Tensor) -> Tensor:
        return sharder._GatherFromRegion.apply(everyone_has(x, group).chunk(2, -1)[rank], group)

    assert gradcheck(output, (random(3, 4),))


def columns_divided() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    assert gradcheck(
        lambda x: Everyones.apply(sharder._SplitToRegion.apply(x, group) * (rank + 2), group), (random(3, 4),)
    )


def positions_divided() -> None:
    """Of 5 positions one device has 3, and the other 2 and a copy of the last: what becomes of that copy does not count."""
    group, rank = group_of({"tp": 2}, "tp")
    for length in (4, 5):
        counts = torch.ones(3 if length == 5 else 2, 1, dtype=torch.float64)
        counts[-1] = 0.0 if length == 5 and rank else 1.0

        def output(x: Tensor, counts: Tensor = counts) -> Tensor:
            return Everyones.apply(sequence_parallel._ScatterToSequence.apply(x, group) * counts, group)

        assert gradcheck(output, (random(2, length, 3),))


def own_positions(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return sequence_parallel._padded_chunks(everyone_has(whole, group), 2)[dist.get_rank(group)]


def positions_joined() -> None:
    group, _ = group_of({"tp": 2}, "tp")
    for length in (4, 5):
        uneven = length if length % 2 else None
        assert gradcheck(
            lambda x, uneven=uneven: sequence_parallel._GatherFromSequence.apply(
                own_positions(x, group), uneven, group
            ),
            (random(2, length, 3),),
        )


def positions_gathered() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    for length in (4, 5):
        uneven = length if length % 2 else None

        def output(x: Tensor, uneven: int | None = uneven) -> Tensor:
            whole = sequence_parallel._AllGather.apply(own_positions(x, group), uneven, group, None)
            return Everyones.apply(whole * (rank + 2), group)

        assert gradcheck(output, (random(2, length, 3),))


def positions_scattered() -> None:
    group, rank = group_of({"tp": 2}, "tp")
    for length in (4, 5):

        def output(x: Tensor) -> Tensor:
            return Everyones.apply(sequence_parallel._ReduceScatter.apply(everyone_has(x, group)[rank], group), group)

        assert gradcheck(output, (random(2, 2, length, 3),))


def check_product_with_a_weight_in_4_bits() -> None:
    layer = nn.Linear(16, 8, bias=False)
    layer.requires_grad_(False)
    assert gradcheck(nf4.Nf4Linear(layer), random(3, 16))


ALONE: dict[str, Callable[[], None]] = {
    "tightfit.models.nf4._Product": check_product_with_a_weight_in_4_bits,
    "tightfit::blocked_attention": check_attention,
    "tightfit::blocked_attention_backward": check_attention,  # of which nothing is asked twice: see below
    "tightfit::add_product": check_add_product,
    "tightfit::dropout_noise": check_attention,  # a random number has no gradient
    "tightfit.runtime.linear_cross_entropy.LinearCrossEntropy": check_linear_cross_entropy,
    "tightfit.parallel.pipeline.weight_gradients._DeferredMatmul": check_deferred_product,
    "tightfit.parallel.pipeline.messages._ReceivedInputs": check_entered,
}
TOGETHER: dict[str, Callable[[], None]] = {
    "tightfit.parallel.context.ring_attention.RingAttention": ring,
    "tightfit.parallel.tensor.vocab_cross_entropy._VocabCrossEntropy": divided_cross_entropy,
    "tightfit.parallel.tensor.sharder._CopyToRegion": copied,
    "tightfit.parallel.tensor.sharder._ReduceFromRegion": summed,
    "tightfit.parallel.tensor.sharder._GatherFromRegion": columns_gathered,
    "tightfit.parallel.tensor.sharder._SplitToRegion": columns_divided,
    "tightfit.parallel.tensor.sequence_parallel._ScatterToSequence": positions_divided,
    "tightfit.parallel.tensor.sequence_parallel._GatherFromSequence": positions_joined,
    "tightfit.parallel.tensor.sequence_parallel._AllGather": positions_gathered,
    "tightfit.parallel.tensor.sequence_parallel._ReduceScatter": positions_scattered,
}


def check_together() -> list[str]:
    """What of them fails, with why."""
    failed = []
    for name, check in TOGETHER.items():
        try:
            check()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def own_operations() -> set[str]:
    """All autograd functions and registered operations of the package, found by importing all of it."""
    for module in pkgutil.walk_packages(tightfit.__path__, "tightfit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, left = set(), [torch.autograd.Function]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.partition(".")[0] == "tightfit":
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    registered = torch._C._dispatch_get_all_op_names()
    return found | {name for name in registered if name.startswith("tightfit::")}


def test_every_operation_has_a_check() -> None:
    assert own_operations() == ALONE.keys() | TOGETHER.keys()


@pytest.mark.parametrize("check", dict.fromkeys(ALONE.values()), ids=lambda check: check.__name__)
def test_gradients_agree_with_numerical_differentiation(check: Callable[[], None]) -> None:
    check()


def test_gradients_across_devices_agree_with_numerical_ones() -> None:
    assert together(2, HERE + "check_together") == [[], []]


def test_a_second_backward_raises() -> None:
    """No gradient is dropped silently: not of kept probabilities, not of a backward, not of a
    second backward."""
    query = random(1, 1, 4, 2)
    output, kept = attention.blocked_attention(query, query, query, None, False)
    assert not kept.requires_grad
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()
    total = linear_cross_entropy(random(7, 4), random(9, 4), None, targets(7, 9), 3)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
