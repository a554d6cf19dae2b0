"""The table of known devices, each figure with its source. What is measured on a machine itself takes its place."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

ACHIEVED = 0.7  # share of the peak that large products reach, where nobody measured it: about that of the measured ones
MEMORY_ACHIEVED = 0.85  # share of the printed bandwidth that copies reach
USABLE = 0.985  # share of the printed memory that a process can have: the driver, and ECC where it is on, keep the rest


@cache
def devices() -> dict[str, dict[str, Any]]:
    """Name -> figures of one device, as devices.yaml has them."""
    return yaml.safe_load((resources.files(__name__) / "devices.yaml").read_text(encoding="utf-8"))
