"""The machine that runs this process, with figures of its speed: a CPU that was never calibrated gets a
quick calibration.

torch is imported only for the calibration: commands print their plan before that import.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.machine import Machine, machine_of
from tightfit.machines.gpus import unused

_measured: dict[str, Machine] = {}  # as detected -> with figures, which are not on disk if the machine was busy


def this_machine(say: Callable[[str], None]) -> Machine:
    """Detect and return this machine. A CPU that was never calibrated gets a quick calibration,
    which takes some seconds.

    Prints a warning with the reason if the host shows a GPU that torch cannot use.

    say  prints a line
    """
    machine = Machine.detect()
    if without := unused():
        say(f"warning  {without}")
    if machine.device != "cpu" or machine.matrix_flops_per_s:
        return machine
    say("measuring the speed of this machine (some seconds, only once)")
    from tightfit.calibration.calibrate import is_busy, quick_calibrate

    if is_busy(machine):
        say("other programs use this machine, so later commands will measure it again")
    return quick_calibrate(machine)


def measured_machine_of(given: Machine | str | None) -> Machine:
    """Return the machine that a caller of the library means, as `machine_of` does. If it is this machine,
    a CPU that was never calibrated, it gets a quick calibration, once in a process.

    given  a machine, or the name of one or of a machine file; None: the machine that runs this process

    One of several processes that train together measures nothing: the others would disturb it.
    Raises InputError for an unknown name or a wrong file, or if `given` is of another type.
    """
    machine = machine_of(given)
    if given is not None or machine.device != "cpu" or machine.matrix_flops_per_s:
        return machine
    from tightfit.calibration.calibrate import quick_calibrate
    from tightfit.distributed.processes import world_size

    if world_size() > 1:
        return machine
    key = machine.to_json()
    if key not in _measured:
        _measured[key] = quick_calibrate(machine)
    return _measured[key]


__all__ = ["measured_machine_of", "this_machine"]
