"""Reads the tables of known devices and of cloud instance types. Each figure in them has its
source. If a machine was calibrated, the measured figures are used instead of those in the table."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

# fraction of the peak that large matrix products are assumed to reach if this was not measured;
# about the fraction of the devices that were measured
ACHIEVED = 0.7
# the same for 16-bit and tf32 products of a GeForce card with tensor cores at half the rate. Of 15
# notebooks' cards in the repository that `devices.yaml` names, fp16 products reach 0.80 to 1.16 of
# what `gpus.py` estimates without their clocks, at the median 0.99
GEFORCE_ACHIEVED = 1.0
MEMORY_ACHIEVED = 0.85  # fraction of the published bandwidth that copies reach
# fraction of a link's published bandwidth that NCCL's collectives reach with large messages: within
# a node, 350 to 360 of 450 GB/s between 8 H100 (NVIDIA/nccl issue 1281). The share between nodes is
# an assumption
LINK_ACHIEVED, NETWORK_ACHIEVED = 0.79, 0.92
# fraction of the published memory that a process can use: the driver, and ECC if it is on, use the
# rest
USABLE = 0.985


@cache
def devices() -> dict[str, dict[str, Any]]:
    """Return the table of known devices, devices.yaml, as device name -> {figure: value}. The
    figures are those of one device, such as its memory; the top of the file explains them and their
    units."""
    return _table("devices.yaml")


@cache
def instances() -> dict[str, dict[str, Any]]:
    """Return the table of cloud instance types, instances.yaml: name of an instance type ->
    {device, count, network, memory}.

    device   the name in the table of devices
    count    number of devices
    network  Gbit/s of the host
    memory   GiB of the host
    """
    return _table("instances.yaml")


def _table(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((resources.files(__name__) / name).read_text(encoding="utf-8"))
    return found
