"""Results are remembered by the identity of the arguments, and only the last ones."""

from __future__ import annotations

from tightfit.cost.remembered import remembered


def test_results_are_kept_for_the_same_objects_only() -> None:
    asked: list[object] = []

    @remembered(2)
    def length(table: dict[str, int], extra: int) -> int:
        asked.append(table)
        return len(table) + extra

    first, equal, other = {"a": 1}, {"a": 1}, {"a": 1, "b": 2}
    assert [length(first, 0), length(first, 0), length(first, 1)] == [1, 1, 2]
    assert len(asked) == 2
    assert length(equal, 0) == 1
    assert len(asked) == 3, "an equal table may be changed apart from the first"
    assert length(first, 1) == 2
    assert len(asked) == 3
    assert [length(other, 0), length(first, 0)] == [2, 1]
    assert len(asked) == 5, "the third last result is no longer kept"


def test_a_freed_argument_is_not_taken_for_a_new_one() -> None:
    """A new table may get the address of one that was freed."""

    @remembered(1)
    def total(table: list[int]) -> int:
        return sum(table)

    assert [total([number] * 10) for number in range(100)] == [10 * number for number in range(100)]
