"""The tables of known devices and of cloud instance types, each figure with its source. Figures of
a calibration replace those of the table."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

# fraction of the peak that large matrix products are assumed to reach if this was not measured;
# about the fraction of the devices that were measured
ACHIEVED = 0.7
MEMORY_ACHIEVED = 0.85  # fraction of the published bandwidth that copies reach
# fraction of the published memory that a process can use: the driver, and ECC if it is on, use the
# rest
USABLE = 0.985


@cache
def devices() -> dict[str, dict[str, Any]]:
    """Return the figures of one device of each kind, by the device's name, as devices.yaml lists
    them."""
    return _table("devices.yaml")


@cache
def instances() -> dict[str, dict[str, Any]]:
    """Return, by name of a cloud instance type, the host's device, number of devices, network and
    memory."""
    return _table("instances.yaml")


def _table(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((resources.files(__name__) / name).read_text(encoding="utf-8"))
    return found
