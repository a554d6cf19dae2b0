"""States in 8 and 4 bits: maps, bytes, layout, and agreement with torchao."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tightfit.optim.blockwise_quantization import PART_ELEMENTS, BlockQuantizer, bits_of, quantization_map
from tightfit.planner.tracing.live_storages import StorageTracker

CPU = torch.device("cpu")
NAMES = {True: "exp_avg", False: "exp_avg_sq"}


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_maps_equal_torchao_s_except_zero_of_second_moments(bits: int, signed: bool) -> None:
    torchao = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    theirs = list(torchao.get_qmap_signed() if signed else torchao.get_qmap_unsigned())
    if not signed and bits == 8:
        assert theirs[0] == 0
        theirs[0] = 1e-7
    assert quantization_map(bits, signed) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_states_are_restored_like_torchao_s(bits: int, signed: bool) -> None:
    torchao = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    torch.manual_seed(0)
    state = torch.randn(64, 96) * 10 ** torch.randn(64, 1)
    state = state if signed else state.square()
    blocks = BlockQuantizer(bits, CPU)
    ours = blocks.dequantize(NAMES[signed], blocks.quantize(NAMES[signed], state), state)
    theirs = getattr(torchao, f"OptimState{bits}bit").zeros(state.shape, signed, blocks.size)
    theirs.copy_(state)
    largest = state.view(-1, blocks.size).abs().amax(1, keepdim=True)
    same = ((ours - theirs.dequantize()).view(-1, blocks.size) / largest).abs() < 4e-7  # about our zero, 1e-7
    same |= torch.isclose(ours, theirs.dequantize(), rtol=1e-4).view(-1, blocks.size)
    assert same.float().mean() > 0.999  # halfway cases may round to either neighbour
    values = quantization_map(bits, signed)
    bound = max(max(b - a for a, b in itertools.pairwise(values)) / 2, min(map(abs, values))) + 1e-6
    assert ((ours - state).view(-1, blocks.size).abs() <= largest * bound).all()


@pytest.mark.parametrize(("bits", "expected"), [(8, 1.0), (4, 0.5)])
def test_packed_states_take_the_expected_bytes(bits: int, expected: float) -> None:
    state = torch.randn(64, 128)
    packed = BlockQuantizer(bits, CPU).quantize("exp_avg", state)
    assert packed["codes"].untyped_storage().nbytes() == expected * state.numel()
    assert packed["scale"].untyped_storage().nbytes() == 4 * state.numel() / BlockQuantizer(bits, CPU).size
    assert bits_of(packed, state) == bits


def test_only_large_tensors_of_whole_blocks_are_packed() -> None:
    for bits, size in ((8, 256), (4, 128)):
        blocks = BlockQuantizer(bits, CPU)
        assert blocks.can_quantize(torch.empty(4096))
        assert not blocks.can_quantize(torch.empty(4096 - size))
        assert not blocks.can_quantize(torch.empty(4096 + size // 2))


@pytest.mark.parametrize("bits", [8, 4])
def test_layout_and_type_follow_the_weight(bits: int) -> None:
    weight = torch.randn(64, 16, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    blocks = BlockQuantizer(bits, CPU)
    found = blocks.dequantize("exp_avg", blocks.quantize("exp_avg", weight), weight)
    assert found.stride() == weight.stride()
    assert found.dtype == torch.float64
    assert (found - weight).abs().max() < weight.abs().max() * (0.02 if bits == 8 else 0.2)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zero_if_signed_and_small_if_not(bits: int) -> None:
    zeros, blocks = torch.zeros(4096), BlockQuantizer(bits, CPU)
    assert torch.equal(blocks.dequantize("exp_avg", blocks.quantize("exp_avg", zeros), zeros), zeros)
    assert blocks.dequantize("exp_avg_sq", blocks.quantize("exp_avg_sq", zeros), zeros).max() <= 1e-12


def allocated(work: Callable[[], object]) -> int:
    """Peak bytes that the allocator gave out, those inside an operation too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("bits", [8, 4])
def test_temporaries_are_fp32_values_and_codes(bits: int) -> None:
    """On a GPU, each direction takes 8 bytes per element, and no int64 copy of the codes, which indexing
    would create."""
    state, blocks = torch.randn(256, 1024), BlockQuantizer(bits, CPU)
    blocks._in_parts = False  # as on a GPU
    packed = blocks.quantize("exp_avg", state)
    for work in (lambda: blocks.dequantize("exp_avg", packed, state), lambda: blocks.quantize("exp_avg", state)):
        with StorageTracker([]) as tracker:
            tracker.assign([state, *packed.values()], "parameters")
            work()
        seen = tracker.peak().total - tracker.peak().rows["parameters"]
        for peak in (seen, allocated(work)):
            assert 8 * state.numel() <= peak <= 8.1 * state.numel()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_cpu_quantizes_in_parts(bits: int) -> None:
    """Its temporaries are those of a part: the state is quantized in less memory than its own size."""
    state, blocks = torch.randn(40, PART_ELEMENTS), BlockQuantizer(bits, CPU)
    packed = blocks.quantize("exp_avg", state)
    assert allocated(lambda: blocks.quantize("exp_avg", state)) < 4 * state.numel()
    restored = blocks.dequantize("exp_avg", packed, state)
    assert allocated(lambda: blocks.dequantize("exp_avg", packed, state)) < 1.6 * 4 * state.numel()
    blocks._in_parts = False
    whole = blocks.quantize("exp_avg", state)
    assert all(torch.equal(packed[name], whole[name]) for name in whole)
    assert torch.equal(restored, blocks.dequantize("exp_avg", whole, state))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_table_gives_the_codes_of_a_search(bits: int, signed: bool) -> None:
    """For the midpoints between values of the map, their neighbours, all magnitudes, and not-a-numbers."""
    blocks = BlockQuantizer(bits, CPU)
    midpoints = blocks._midpoints[signed]
    beside = [torch.nextafter(midpoints, torch.full_like(midpoints, far)) for far in (-2.0, 2.0)]
    every = torch.arange(-(2**31), 2**31, 2**13 - 1, dtype=torch.int64).to(torch.int32).view(torch.float32)
    every = every[(every.abs() <= 1) | every.isnan()]
    shares = torch.cat([midpoints, *beside, every, torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])])
    shares = shares if signed else shares[~(shares < 0)]
    expected = torch.bucketize(shares, midpoints, right=True)
    assert torch.equal(blocks._codes(shares, signed).long(), expected)
