"""The order of samples: permutations, epochs, held-out samples, and random draws."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.data.order import Order, hash_numbers, permute, random_numbers, uniform

orders = st.builds(Order, st.integers(1, 400), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 2**32))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_permute_is_a_permutation(count: int, secret: int) -> None:
    assert sorted(permute(np.arange(count), count, secret)) == list(range(count))


@given(orders, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_each_epoch_has_every_training_sample_exactly_once(order: Order, epoch: int) -> None:
    """No held-out sample is among them."""
    indices, epochs = order.training_samples(epoch * order.training_count, (epoch + 1) * order.training_count)
    held_out = order.held_out(order.count)
    assert set(epochs) == {epoch}
    assert sorted([*indices, *held_out]) == list(range(order.count))
    assert len(held_out) == order.evaluation_count


@given(orders, st.integers(0, 2000), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_any_slice_of_the_stream_is_the_same_by_itself(order: Order, start: int, first: int, second: int) -> None:
    whole, whole_epochs = order.training_samples(start, start + first + second)
    left, right = (
        order.training_samples(start, start + first),
        order.training_samples(start + first, start + first + second),
    )
    assert np.array_equal(whole, np.concatenate([left[0], right[0]]))
    assert np.array_equal(whole_epochs, np.concatenate([left[1], right[1]]))


def test_order_does_not_change_between_versions() -> None:
    """A checkpoint holds only how many samples were consumed: these numbers may never change."""
    assert Order(10, 0.2, seed=7).training_samples(0, 10)[0].tolist() == [7, 5, 8, 1, 4, 6, 0, 2, 7, 6]
    assert Order(10, 0.2, seed=7).held_out(5).tolist() == [3, 9]
    assert hash_numbers(1, 2, 3) == 7702586659592502839


def test_seeds_and_epochs_change_the_order_but_not_the_split() -> None:
    order = Order(100, 0.1, seed=1)
    first, second = order.training_samples(0, 90)[0], order.training_samples(90, 180)[0]
    assert not np.array_equal(first, second)
    assert set(first) == set(second)
    assert set(Order(100, 0.1, seed=2).held_out(10)) != set(order.held_out(10))


def test_permutations_are_uniform() -> None:
    """Each of 20 things comes to each of 20 places 200 times in 4,000 orders, give or take 5 deviations."""
    counts = np.zeros((20, 20))
    for secret in range(4000):
        counts[np.arange(20), permute(np.arange(20), 20, hash_numbers(secret))] += 1
    assert np.abs(counts - 200).max() < 5 * 200**0.5


def test_a_single_sample_is_never_held_out() -> None:
    assert Order(1, 0.5, 0).training_count == 1
    assert Order(2, 0.001, 0).evaluation_count == 1
    assert Order(2, 0.0, 0).evaluation_count == 0


def test_draws_are_uniform_and_independent_of_their_number() -> None:
    rows = np.arange(1000)
    fractions = uniform(random_numbers(3, rows, 100))
    assert abs(fractions.mean() - 0.5) < 0.005
    assert abs(fractions.var() - 1 / 12) < 0.002
    assert fractions.min() >= 0
    assert fractions.max() < 1
    assert np.array_equal(random_numbers(3, rows[5:6], 10)[0], random_numbers(3, rows, 100)[5, :10])
    assert not np.array_equal(random_numbers(4, rows, 10), random_numbers(3, rows, 10))
