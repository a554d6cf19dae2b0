"""What is taken for the value of a tensor without values, when a model's Python code reads it."""

from __future__ import annotations

import ast
import linecache
from collections import Counter
from functools import cache

from tightfit.errors import Untraceable
from tightfit.models.dataflow import describe_line, model_line

MOST_READS = 100_000  # of unknown values, by one line of the model


class ValueReads:
    """Chooses the unknown values that a model reads, and counts how often each line reads one.

    Conditions that guard against wrong data get the value with which the code raises no error. A loop
    would never end if its condition were always the same.

    most  how often one line may read unknown values; None: MOST_READS times
    """

    def __init__(self, most: int | None = None) -> None:
        self._counts: Counter[tuple[str, int] | None] = Counter()
        self._most = most

    @property
    def any_read(self) -> bool:
        """Whether the model has read a value that is unknown and no guard."""
        return bool(self._counts)

    def value(self, default: bool) -> bool:
        """Return the value that is taken for the unknown bool that the model reads now: `default`, but
        the opposite where a `while` reads it for the second time, and the value without an error where it
        is a guard.

        Raises Untraceable if a line reads unknown values too often.
        """
        line = model_line()
        guarded = passing_value(line)
        return guarded if guarded is not None else default != self._ends_loop(line)

    def number(self, default: float) -> float:
        """Return the value that is taken for the unknown number that the model reads now: `default`, but 0 where
        a `while` reads it for the second time. Raises Untraceable as `value` does."""
        return type(default)(0) if self._ends_loop(model_line()) else default

    def _ends_loop(self, line: tuple[str, int] | None) -> bool:
        self._counts[line] += 1
        if self._counts[line] > (MOST_READS if self._most is None else self._most):
            raise Untraceable(
                "job: model",
                f"repeats {describe_line(line)} until the value of a tensor changes, which is not known before it runs",
                "run the job without a prediction: tightfit train measures what it cannot predict",
            )
        is_loop = line is not None and linecache.getline(*line).lstrip().startswith("while ")
        return is_loop and self._counts[line] % 2 == 0


def passing_value(line: tuple[str, int] | None) -> bool | None:
    """Return the value of the condition in a line, (file, number), with which the code raises no error:
    False for `if condition: raise ...`, True for `if not condition: raise ...` and for `assert condition`.
    Return None if the line has no such condition.

    Example: with `if labels.max() >= self.classes: raise ValueError(...)`, data is taken to be right.
    """
    return None if line is None else _guards(line[0]).get(line[1])


@cache
def _guards(file: str) -> dict[int, bool]:
    """Return line number -> the value with which its condition raises no error."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # not Python, such as a cell of a notebook
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            test, passing = node.test, False
        elif isinstance(node, ast.Assert):
            test, passing = node.test, True
        else:
            continue
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passing = test.operand, not passing
        if not any(isinstance(part, ast.Not) for part in ast.walk(test)):  # else its parts have opposite values
            found.update(dict.fromkeys(range(test.lineno, (test.end_lineno or test.lineno) + 1), passing))
    return found


__all__ = ["ValueReads", "passing_value"]
