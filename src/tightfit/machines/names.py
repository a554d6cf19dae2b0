"""Finds devices by a name: a name in the table of devices, the name that the driver reports, or a
cloud instance type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tightfit.errors import InputError
from tightfit.machines import devices, instances
from tightfit.values import nearest

AZURE = "standard_"  # optional prefix of Azure's instance types
LISTED = "tightfit machine --list shows them; the name of a machine file ends in .yaml or .json"


@dataclass(frozen=True)
class Named:
    """The devices that the user has named, such as h100-sxm:8x4.

    device    name of the device in the table
    row       the device's row of the table; for a cloud instance type, network and host memory are
              the host's, divided by its number of devices
    per_node  number of devices of a host
    nodes     number of hosts
    """

    device: str
    row: dict[str, Any]
    per_node: int
    nodes: int


def find_named(text: str) -> Named:
    """Return the devices of NAME, NAME:COUNT or NAME:COUNTxNODES, or of INSTANCE or INSTANCE:NODES.

    NAME is a name in the table of devices or the name that the driver reports. INSTANCE is a cloud
    instance type. Upper and lower case are the same. Example: h100-sxm:8x4 means 4 hosts of 8
    devices.

    Raises InputError for an unknown name or a wrong count.
    """
    name, _, size = text.strip().partition(":")
    key = name.strip().lower()
    instance = {one.lower(): one for one in instances()}.get(key.removeprefix(AZURE))
    if instance is not None:
        return _of_instance(text, instance, size)
    device = _device_of(key)
    if device is None:
        known = [*devices(), *instances()]
        near = nearest(key.removeprefix(AZURE), known) if key else LISTED
        raise InputError(
            f"machine {text}", "no such device is known", near if near.startswith("did you mean") else LISTED
        )
    match = re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", size or "1")
    if match is None:
        raise InputError(
            f"machine {text}",
            f"{size} is not a number of devices",
            f"write it like {device}:8 or {device}:8x4, for 4 hosts of 8 devices",
        )
    return Named(device, devices()[device], int(match.group(1)), int(match.group(2) or 1))


def _device_of(key: str) -> str | None:
    """Return the table's name of the device that is called `key`; None if there is none.

    key  the name in the table, or the name that the driver reports, in lower case
    """
    for device, row in devices().items():
        if key == device or key in (called.lower() for called in row["called"]):
            return device
    return None


def _of_instance(text: str, instance: str, size: str) -> Named:
    if not re.fullmatch(r"[1-9]\d{0,5}", size or "1"):
        raise InputError(
            f"machine {text}",
            f"{size} is not a number of hosts",
            f"write it like {instance}:4, for 4 hosts, each with all devices of that instance type",
        )
    facts = instances()[instance]
    row = devices()[facts["device"]]
    row = {
        **row,
        "network": facts["network"] / 8 / facts["count"],
        "host_memory": facts["memory"] / facts["count"],
        "instance": instance,
    }
    return Named(facts["device"], row, facts["count"], int(size or 1))
