"""The table of known devices, each figure with its source. A calibration's figures replace the
table's."""

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
    return yaml.safe_load((resources.files(__name__) / "devices.yaml").read_text(encoding="utf-8"))
