"""Learning-rate schedules: warm-up, shapes, lengths."""

import math

import pytest

from tightfit.errors import InputError
from tightfit.job import Train
from tightfit.optim.schedule import learning_rate, total_steps


def test_warm_up_is_linear_and_ends_at_the_full_rate() -> None:
    rate = learning_rate(Train(learning_rate=1.0, warmup=4), None)
    assert [rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_without_warm_up_is_the_same_at_every_step() -> None:
    rate = learning_rate(Train(learning_rate=0.3, steps=10), 10)
    assert {rate(step) for step in range(20)} == {0.3}


def test_linear_decays_evenly_to_the_final_share() -> None:
    rate = learning_rate(Train(learning_rate=2.0, schedule="linear", warmup=10, final_learning_rate=0.1), 110)
    assert rate(10) == pytest.approx(2.0)
    assert rate(60) == pytest.approx(2.0 * 0.55)
    assert rate(110) == pytest.approx(0.2)
    assert rate(500) == pytest.approx(0.2)
    assert rate(35) - rate(36) == pytest.approx(2.0 * 0.9 / 100)


def test_cosine_has_the_expected_values_at_its_quarters() -> None:
    rate = learning_rate(Train(learning_rate=2.0, schedule="cosine", warmup=10, final_learning_rate=0.1), 110)
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        expected = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
        assert rate(10 + round(100 * progress)) == pytest.approx(expected)
    assert rate(111) == pytest.approx(0.2)


def test_warmup_stable_decay_has_its_three_parts() -> None:
    rate = learning_rate(Train(learning_rate=1.0, schedule="warmup-stable-decay", warmup=10, decay=0.2), 100)
    assert rate(4) == pytest.approx(0.5)
    assert {rate(step) for step in range(9, 81)} == {1.0}
    assert rate(90) == pytest.approx(0.5)
    assert rate(99) == pytest.approx(0.05)
    assert rate(100) == 0.0


def test_warmup_stable_decay_may_lack_a_part() -> None:
    late = learning_rate(Train(learning_rate=1.0, schedule="warmup-stable-decay", warmup=90, decay=0.2), 100)
    assert [late(step) for step in (89, 90, 95)] == pytest.approx([1.0, 1.0, 0.5])
    short = learning_rate(Train(learning_rate=1.0, schedule="warmup-stable-decay", decay=0.01), 10)
    assert [short(step) for step in (0, 9, 10)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup-stable-decay"])
@pytest.mark.parametrize("steps", [1, 7])
def test_no_step_is_taken_at_a_rate_of_zero(schedule: str, steps: int) -> None:
    for warmup in (0, 1, steps):
        rate = learning_rate(Train(schedule=schedule, warmup=warmup, steps=steps), steps)
        assert all(rate(step) > 0 for step in range(steps))


def test_the_schedule_starts_from_the_scaled_learning_rate() -> None:
    train = Train(learning_rate=0.1, batch=64, base_batch=16, scale_learning_rate="linear")
    assert learning_rate(train, None)(0) == pytest.approx(0.4)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup-stable-decay"])
def test_a_schedule_that_ends_needs_a_length(schedule: str) -> None:
    with pytest.raises(InputError, match=r"add train\.steps"):
        learning_rate(Train(schedule=schedule), None)


def test_warm_up_longer_than_the_training_is_refused() -> None:
    with pytest.raises(InputError, match="at most 5"):
        learning_rate(Train(warmup=6, epochs=1), 5)


def test_total_steps_follow_from_steps_or_epochs() -> None:
    assert total_steps(Train(steps=7), None) == 7
    assert total_steps(Train(epochs=2.5, batch=8), 100) == 32
    assert total_steps(Train(batch=8), 100) == 13
    assert total_steps(Train(), None) is None
