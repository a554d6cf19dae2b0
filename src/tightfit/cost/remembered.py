"""Remember the results of a function of large tables, which many estimates of a search share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

from tightfit.plan import Plan

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def remembered(count: int) -> Callable[[Callable[[*Arguments], Result]], Callable[[*Arguments], Result]]:
    """Return a decorator for a function without side effects. The function's last `count` results
    are kept, and returned again for the same arguments.

    Arguments are the same if they are the same objects: large tables are not compared. Only numbers,
    strings and plans are compared by their values. Neither the arguments nor the results may be changed
    afterwards.
    """

    def decorate(function: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
        known: OrderedDict[tuple[Any, ...], tuple[Any, Result]] = OrderedDict()

        @wraps(function)
        def call(*args: *Arguments) -> Result:
            key = tuple((True, arg) if isinstance(arg, int | float | str | Plan) else (False, id(arg)) for arg in args)
            if key not in known:
                known[key] = args, function(*args)  # keeps the arguments alive, so that no other gets their id
                if len(known) > count:
                    known.popitem(last=False)
            known.move_to_end(key)
            return known[key][1]

        return call

    return decorate


__all__ = ["remembered"]
