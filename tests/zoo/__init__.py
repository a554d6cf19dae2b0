"""The model zoo: many models in tiny sizes, each trained with drawn plans and compared with plain PyTorch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.zoo.entry import Entry

ALLOW = (
    "compressed-gradients",
    "offload",
    "bf16",
    "fp16",
    "tf32",
    "bf16-states",
    "8-bit-states",
    "4-bit-states",
    "stochastic-rounding",
    "asynchronous",
)


@cache
def zoo() -> dict[str, Entry]:
    """All entries by name."""
    from tests.zoo.architectures import ARCHITECTURES
    from tests.zoo.custom import CUSTOM
    from tests.zoo.others import OTHERS

    entries = [*ARCHITECTURES, *OTHERS, *CUSTOM]
    found = {entry.name: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def find(name: str) -> Entry:
    return zoo()[name]
