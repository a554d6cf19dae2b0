"""The tables of known devices and of clouds' instance types, each figure with its source. A
calibration's figures replace the table's."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

# share of the peak that large matrix products reach, if it was not measured: about that of measured
# devices
ACHIEVED = 0.7
MEMORY_ACHIEVED = 0.85  # share of the published bandwidth that copies reach
# share of the published memory that a process can use: the driver, and ECC if it is on, take the
# rest
USABLE = 0.985


@cache
def devices() -> dict[str, dict[str, Any]]:
    """Name -> figures of one device, as devices.yaml lists them."""
    return _table("devices.yaml")


@cache
def instances() -> dict[str, dict[str, Any]]:
    """Instance type of a cloud -> its device, their number, and the host's network and memory."""
    return _table("instances.yaml")


def _table(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((resources.files(__name__) / name).read_text(encoding="utf-8"))
    return found
