"""Refusal: what is said where no plan fits: what the leanest plan needs, what is there, and what would help, each with its result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tightfit.errors import DoesNotFit, InputError
from tightfit.job import DataSpec
from tightfit.machine import Machine, devices
from tightfit.plan import Plan
from tightfit.planner.complete import complete
from tightfit.planner.estimate import MARGIN, Estimate, Estimator
from tightfit.planner.leanest import leanest
from tightfit.units import format_bytes

WORDS = ("bf16", "fp16", "bf16-states", "8-bit-states", "4-bit-states", "stochastic-rounding", "offload")
MATTERS = 0.99  # of what is needed: a remedy that leaves more is none
MOST_DEVICES = 1024
NODE = 8  # devices of a usual node
SHORTEST = 64  # tokens of a sequence that are suggested, at least
KERNELS = ("chunked_loss", "compile", "attention")
OPENED = (  # fields that may be left open where they are pinned
    "precision", "micro_batch", "recompute", "states", "update_in_backward", "offload", "zero", "dp_shard", "dp_replicate",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """A change of the job, the plan's pins or the machine, and what the leanest plan needs with it."""

    change: str
    result: Estimate

    def __str__(self) -> str:
        verdict = "fits" if self.result.fits else "does not fit either"
        return f"{self.change}: {format_bytes(_needed(self.result))}, {verdict}"

    def content(self) -> dict[str, Any]:
        """As `tightfit explain --json` prints it."""
        return {
            "change": self.change,
            "needed": round(_needed(self.result)),
            "fits": self.result.fits,
            "plan": self.result.plan.content(),
        }


def does_not_fit(
    estimator: Estimator, estimates: list[Estimate], refused: dict[Plan, InputError], pins: dict[str, Any] | None
) -> DoesNotFit:
    """What is said where nothing fits. refused: plans that the engine cannot run. pins: fields of the plan that are asked for;
    None where plans were given to choose from, and nothing else can be suggested."""
    least = estimator.settle(min(estimates, key=lambda one: (one.fullness, one.peak_bytes)))
    remedies = [] if pins is None else _remedies(estimator, least, pins)
    lines = [_needs(least), f"  leanest plan: {least.plan}"]
    lines += [f"  {line}" for line in _largest(least)]
    if remedies:
        lines += ["  what would help:", *(f"    {one}" for one in remedies)]
    if "disk" in least.lacks():
        lines.append("  or fewer train.keep_checkpoints, or a larger limits.disk")
    if "host memory" in least.lacks():
        lines.append("  or materialize: device, fewer loader_workers or offload: [], or a host with more memory")
    if "memory" in least.lacks():
        lines.append(f"  or {_larger_machine(least)}")
    for plan, error in refused.items():
        lines.append(f"  would fit, and cannot run: {plan}: {error.found}")
    return DoesNotFit("\n".join(lines), _content(least, estimates, remedies))


def _content(least: Estimate, estimates: list[Estimate], remedies: list[Remedy]) -> dict[str, Any]:
    """What `tightfit explain --json` prints."""
    others = sorted((one for one in estimates if one.plan != least.plan), key=lambda one: one.fullness)
    return {
        "machine": least.machine.model_dump(mode="json"),
        "chosen": None,
        "plans": [
            {**one.content(), "rejected_because": one.rejected_because or lacking(one)} for one in (least, *others)
        ],
        "lacks": {
            name: {"needed_bytes": round(needed), "available_bytes": round(there)}
            for name, (needed, there) in least.lacks().items()
        },
        "margin_bytes": round(least.margin_bytes),
        "remedies": [one.content() for one in remedies],
    }


def lacking(one: Estimate) -> str:
    """What a plan needs and what is there, of whatever is too small."""
    said = []
    for name, (needed, there) in one.lacks().items():
        beside = "" if name == "memory" else f" of {name}"
        free = f" and {format_bytes(one.margin_bytes)} kept free" if name == "memory" and needed <= there else ""
        said.append(f"needs {format_bytes(needed)}{beside}{free}, {format_bytes(there)} are there")
    return "; ".join(said)


def _needs(least: Estimate) -> str:
    said = []
    for name, (needed, there) in least.lacks().items():
        beside = f" of {name}" if name != "memory" else ""
        margin = (
            f" and {format_bytes(least.margin_bytes)} ({MARGIN:.0%}) kept free as a safety margin" if not beside else ""
        )
        said.append(f"needs {format_bytes(needed)}{beside} at least{margin}, {format_bytes(there)} are there")
    return "\n".join(said)


def _largest(least: Estimate) -> list[str]:
    """The largest rows of what is too small."""
    lacks, lines = least.lacks(), []
    for name, of in (("memory", least.peak.rows), ("host memory", least.host), ("disk", least.disk)):
        if name in lacks:
            rows = sorted(of.items(), key=lambda row: -row[1])[:3]
            said = ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size)
            lines.append(f"largest: {said}" + (f" (in {least.peak_phase})" if name == "memory" else ""))
    return lines


def _needed(one: Estimate) -> float:
    """Bytes that have to be there of the device's memory, the safety margin among them."""
    return one.peak_bytes + one.margin_bytes


def _remedies(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> list[Remedy]:
    """Changes that leave less to be needed, each with its result; those that fit first."""
    found = [
        Remedy(change, result)
        for change, result in (
            *_permissions(estimator, least, pins),
            *_without_pins(estimator, least, pins),
            *_shorter(estimator, least),
            *_more_devices(estimator, least, pins),
        )
        if result.fullness < MATTERS * least.fullness
    ]
    return sorted(found, key=lambda one: not one.result.fits)


def _leanest_with(
    estimator: Estimator, least: Estimate, pins: dict[str, Any], only_fitting: bool = False
) -> Estimate | None:
    """The leanest plan with the kernels of `least`; None where there is none."""
    kernels = {name: getattr(least.plan, name) for name in KERNELS}
    try:
        start, _ = complete(estimator.job, estimator.machine, {**kernels, **pins})
    except InputError:
        return None
    found = leanest(estimator, start, {**kernels, **pins}, only_fitting)
    return None if found is None else estimator.settle(found)


def _permissions(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """What the job may allow beside what it does, by itself, and where no one is enough all of it."""
    job = estimator.job
    said = ["bf16"] if job.allow is None else list(job.allow)
    missing = [word for word in WORDS if word not in job.allowed and not (word == "fp16" and "bf16" in job.allowed)]
    results: list[Estimate] = []
    for words in [[word] for word in missing] + [missing]:
        if len(words) != 1 and (len(missing) < 2 or any(one.fits for one in results)):
            continue
        allowing = estimator.of(job.replace(allow=[*said, *words]), estimator.machine)
        result = _leanest_with(allowing, least, pins)
        if result is not None:
            results.append(result)
            yield f"allow {', '.join(words)}", result


def _without_pins(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """Each field of the plan that is asked for, left open."""
    for name in (name for name in OPENED if name in pins):
        open_ = {other: value for other, value in pins.items() if other != name}
        result = _leanest_with(estimator, least, open_)
        if result is not None and getattr(result.plan, name) != pins[name]:
            yield f"plan.{name}: {_written(getattr(result.plan, name))} in place of {_written(pins[name])}", result


def _written(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value).lower()


def _shorter(estimator: Estimator, least: Estimate) -> Iterator[tuple[str, Estimate]]:
    """The longest sequences, of half the length or a quarter and so on, that fit."""
    job = estimator.job
    if not isinstance(job.data, DataSpec) or estimator.profiler.unit != "tokens":
        return
    if estimator.least_bytes(least.plan) > estimator.limit_bytes:
        return
    halves = (job.data.sequence_length >> power for power in itertools.count(1))
    lengths = list(itertools.takewhile(lambda length: length >= SHORTEST, halves))  # the longest first
    fitting: Estimate | None = None
    low, high = 0, len(lengths) - 1  # among these is the first that fits, if the last does
    while low <= high:
        middle = high if fitting is None else (low + high) // 2
        shorter = job.replace(data=job.data.replace(sequence_length=lengths[middle]))
        try:
            one = Estimator(shorter, estimator.machine)
            result = one.settle(one.estimate(least.plan))
        except InputError:
            return
        if result.fits:
            fitting, high = result, middle - 1
        elif fitting is None:
            return
        else:
            low = middle + 1
    if fitting is not None and isinstance(fitting.job.data, DataSpec):
        yield f"data.sequence_length: {fitting.job.data.sequence_length}", fitting


def _more_devices(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """The least number of devices that is enough, twice as many as there are or four times and so on."""
    machine = estimator.machine
    if machine.device == "cpu" or "memory" not in least.lacks():
        return
    row = devices().get(machine.name)
    node = max(machine.devices_per_node, row["node"] if row else NODE)
    count = 2 * machine.devices_per_node * machine.nodes
    while count <= min(MOST_DEVICES, estimator.job.train.batch):
        per_node = min(count, node)
        nodes = max(count // per_node, 1)
        size = f"{per_node}x{nodes}" if nodes > 1 else f"{per_node}"
        larger = machine.replace(devices_per_node=per_node, nodes=nodes)
        if row and machine.memory_bytes.source == "published":
            larger = Machine.named(f"{machine.name}:{size}")
        result = _leanest_with(estimator.of(estimator.job, larger), least, pins, only_fitting=True)
        if result is not None and result.fits:
            yield f"{count} devices ({machine.name}:{size})", result
            return
        count *= 2


def _larger_machine(least: Estimate) -> str:
    """The smallest known device that has enough memory; of a processor and of a limit how much is needed."""
    needed = _needed(least)
    if least.job.limits.memory and needed <= least.machine.memory_bytes.value:
        return f"limits.memory of {format_bytes(math.ceil(needed))} or more, which this machine has"
    if least.machine.device == "cuda":
        known = [(Machine.named(name).memory_bytes.value, name) for name in devices()]
        large = [one for one in sorted(known) if one[0] >= needed]
        if large:
            return f"a larger device: {large[0][1]} has {format_bytes(large[0][0])}"
    return f"a larger machine, with {format_bytes(needed)} for each device"
