"""Explain why no plan fits.

The error says what the leanest plan (the plan that needs the least memory) needs and what is
available. It lists changes that would help, each with the memory that is then needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tightfit.errors import DoesNotFit, InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine, devices
from tightfit.models.lora import quantizes
from tightfit.plan import Plan
from tightfit.planner.defaults import complete
from tightfit.planner.estimate import MARGIN, Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.leanest import leanest
from tightfit.planner.split_check import changed_state, loss_depends_on_split, model_uses
from tightfit.units import format_bytes

PERMISSIONS = ("bf16", "fp16", "bf16-states", "8-bit-states", "4-bit-states", "stochastic-rounding", "offload")
MIN_REDUCTION = 0.99  # a remedy must reduce the needed memory to less than this share
MOST_DEVICES = 1024  # the largest number of devices that is suggested
DEVICES_PER_NODE = 8  # assumed for a machine that is not in the device table
MIN_SEQUENCE_LENGTH = 64  # the shortest sequence that is suggested, in tokens
KEPT_KERNELS = ("chunked_loss", "compile", "attention")
UNPINNABLE = (  # plan fields that a remedy may suggest not to pin
    "precision", "micro_batch", "recompute", "states", "update_in_backward", "offload", "zero", "dp_shard", "dp_replicate",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """A change of the job, the pinned plan fields or the machine that reduces the needed memory.

    change  the change in words, such as "allow bf16" or "data.sequence_length: 512"
    result  the estimate of the leanest plan after this change
    """

    change: str
    result: Estimate

    def __str__(self) -> str:
        verdict = "fits" if self.result.fits else "does not fit either"
        return f"{self.change}: {format_bytes(_needed_bytes(self.result))}, {verdict}"

    def content(self) -> dict[str, Any]:
        """Return the remedy as the dict that `tightfit explain --json` prints. `needed` is in bytes
        of device memory, safety margin included."""
        return {
            "change": self.change,
            "needed": round(_needed_bytes(self.result)),
            "fits": self.result.fits,
            "plan": self.result.plan.content(),
        }


def does_not_fit(
    estimator: Estimator, estimates: list[Estimate], refused: dict[Plan, InputError], pins: dict[str, Any] | None
) -> DoesNotFit:
    """Return the error to raise for a job that does not fit. Its message names the leanest plan,
    its shortages and the changes that would help.

    estimator  estimates the plans with these changes
    estimates  estimates of the plans that do not fit, at least one
    refused    the plans that the engine cannot run, each with the engine's error
    pins       plan fields that the user fixed; None if the user gave the plans to choose from, so
               that no other plan is suggested
    """
    least = estimator.include_allocator(min(estimates, key=lambda estimate: (estimate.fullness, estimate.peak_bytes)))
    remedies = [] if pins is None else _remedies(estimator, least, pins)
    lines = [_shortage_lines(least), f"  leanest plan: {least.plan}"]
    lines += [f"  {line}" for line in _largest_rows(least)]
    if remedies:
        lines += ["  what would help:", *(f"    {remedy}" for remedy in remedies)]
    if "disk" in least.shortages():
        lines.append("  or a smaller train.keep_checkpoints, or a larger limits.disk")
    if "host memory" in least.shortages():
        on_device = "" if quantizes(estimator.job.model) else "materialize: device, "  # QLoRA quantizes on the host
        lines.append(f"  or {on_device}a smaller loader_workers, offload: [], or a host with more memory")
    if "memory" in least.shortages():
        lines.append(f"  or {_larger_machine(least)}")
    for plan, error in refused.items():
        lines.append(f"  would fit, but cannot run: {plan}: {error.found}")
    return DoesNotFit("\n".join(lines), _content(least, estimates, remedies))


def _content(least: Estimate, estimates: list[Estimate], remedies: list[Remedy]) -> dict[str, Any]:
    """Return the error as the dict that `tightfit explain --json` prints: the machine, the plans,
    the shortages and the remedies.

    least      the leanest plan's estimate
    estimates  estimates of all plans that do not fit
    remedies   changes that would help
    """
    others = sorted(
        (estimate for estimate in estimates if estimate.plan != least.plan), key=lambda estimate: estimate.fullness
    )
    return {
        "machine": least.machine.model_dump(mode="json"),
        "chosen": None,
        "plans": [
            {**one.content(), "rejected_because": one.rejected_because or describe_shortages(one)}
            for one in (least, *others)
        ],
        "lacks": {
            name: {"needed_bytes": round(needed), "available_bytes": round(available)}
            for name, (needed, available) in least.shortages().items()
        },
        "margin_bytes": round(least.margin_bytes),
        "remedies": [remedy.content() for remedy in remedies],
    }


def describe_shortages(estimate: Estimate) -> str:
    """Return one line with the needed and the available bytes of each resource that is too small
    for the plan, such as "needs 31.4 GiB, 24.0 GiB are available". Return "" if the plan fits."""
    shortages = []
    for name, (needed, available) in estimate.shortages().items():
        beside = "" if name == "memory" else f" of {name}"
        free = (
            f" and {format_bytes(estimate.margin_bytes)} kept free" if name == "memory" and needed <= available else ""
        )
        shortages.append(f"needs {format_bytes(needed)}{beside}{free}, {format_bytes(available)} are available")
    return "; ".join(shortages)


def _shortage_lines(least: Estimate) -> str:
    """Return one line of text for each resource that is too small for the leanest plan `least`: the
    needed and the available bytes. The lines are joined to one string."""
    lines = []
    for name, (needed, available) in least.shortages().items():
        beside = f" of {name}" if name != "memory" else ""
        margin = (
            f" and {format_bytes(least.margin_bytes)} ({MARGIN:.0%}) kept free as a safety margin" if not beside else ""
        )
        lines.append(f"needs {format_bytes(needed)}{beside} at least{margin}, {format_bytes(available)} are available")
    return "\n".join(lines)


def _largest_rows(least: Estimate) -> list[str]:
    """Return one line of text for each resource (device memory, host memory, disk) that is too
    small for the plan of `least`. It names the three largest uses of the resource, each with its
    bytes."""
    lacks, lines = least.shortages(), []
    for name, of in (("memory", least.peak.rows), ("host memory", least.host), ("disk", least.disk)):
        if name in lacks:
            rows = sorted(of.items(), key=lambda row: -row[1])[:3]
            said = ", ".join(f"{row} {format_bytes(size)}" for row, size in rows if size)
            lines.append(f"largest: {said}" + (f" (in {least.peak_phase})" if name == "memory" else ""))
    return lines


def _needed_bytes(estimate: Estimate) -> float:
    """Return the bytes of device memory that the plan needs, safety margin included."""
    return estimate.peak_bytes + estimate.margin_bytes


def _remedies(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> list[Remedy]:
    """Return the changes of the job, the pins or the machine that reduce the needed memory by more
    than 1 %. Changes with which the job fits come first.

    least  the estimate of the leanest plan without any change
    pins   plan fields that the user fixed
    """
    work = estimator.profiler.shared_work
    if work is not None:  # copies of this process begin with the last ones
        words = reversed(_missing_permissions(estimator.job))
        work.restart_copies([partial(_allowing, estimator, least, pins, [word]) for word in words])
    found = [
        Remedy(change, result)
        for change, result in (
            *_more_permissions(estimator, least, pins),
            *_fewer_pins(estimator, least, pins),
            *_shorter_sequences(estimator, least),
            *_more_devices(estimator, least, pins),
        )
        if result.fullness < MIN_REDUCTION * least.fullness
    ]
    return sorted(found, key=lambda one: not one.result.fits)


def _leanest_with_same_kernels(
    estimator: Estimator, least: Estimate, pins: dict[str, Any], only_fitting: bool = False
) -> Estimate | None:
    """Return the estimate of the leanest plan that has the same kernels (attention, loss, compile)
    as `least`, so that no new trace is needed. Return None if no plan with these pins is possible.

    pins          plan fields that the user fixed
    only_fitting  also return None if parameters, optimizer states and gradients alone do not fit
    """
    kernels = {name: getattr(least.plan, name) for name in KEPT_KERNELS}
    try:
        start, _ = complete(estimator.job, estimator.machine, {**kernels, **pins})
    except InputError:
        return None
    found = leanest(estimator, start, {**kernels, **pins}, only_fitting)
    return None if found is None else estimator.include_allocator(found)


def _more_permissions(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """Yield (change, estimate) for each permission that the job does not give yet, such as "bf16".
    `change` says in words which permission to give, and `estimate` is that of the leanest plan with
    it.

    If no single permission makes the job fit, the last item gives all missing permissions together.

    least  the estimate of the leanest plan with the job's own permissions
    pins   plan fields that the user fixed
    """
    missing, results = _missing_permissions(estimator.job), list[Estimate]()
    for words in [[word] for word in missing] + [missing]:
        if len(words) != 1 and (len(missing) < 2 or any(one.fits for one in results)):
            continue
        result = _allowing(estimator, least, pins, words)
        if result is not None:
            results.append(result)
            yield f"allow {', '.join(words)}", result


def _missing_permissions(job: Job) -> list[str]:
    """Return the permissions that the job does not give. fp16 is not among them if the job allows bf16."""
    return [word for word in PERMISSIONS if word not in job.allowed and not (word == "fp16" and "bf16" in job.allowed)]


def _allowing(estimator: Estimator, least: Estimate, pins: dict[str, Any], words: list[str]) -> Estimate | None:
    """Return the estimate of the leanest plan if the job gave the permissions `words` too, or None if
    no plan is possible. Other arguments: see `_more_permissions`."""
    job = estimator.job
    said = ["bf16"] if job.allow is None else list(job.allow)
    allowing = estimator.with_job(job.replace(allow=[*said, *words]), estimator.machine)
    return _leanest_with_same_kernels(allowing, least, pins)


def _fewer_pins(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """Yield (change, estimate) for each plan field that the user fixed in `pins` and that would get
    another value if it were not fixed. `change` names the field and both values, and `estimate` is
    that of the leanest plan with the new value.

    least  the estimate of the leanest plan with all pins
    """
    for name in (name for name in UNPINNABLE if name in pins):
        if name == "micro_batch" and (loss_depends_on_split(estimator) or model_uses(estimator).changed):
            continue  # the batch has to stay whole
        if name == "recompute" and changed_state(estimator):
            continue  # its blocks would compute something else the second time
        open_ = {other: value for other, value in pins.items() if other != name}
        result = _leanest_with_same_kernels(estimator, least, open_)
        if result is not None and getattr(result.plan, name) != pins[name]:
            yield f"plan.{name}: {_yaml(getattr(result.plan, name))} in place of {_yaml(pins[name])}", result


def _yaml(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value).lower()


def _shorter_sequences(estimator: Estimator, least: Estimate) -> Iterator[tuple[str, Estimate]]:
    """Yield (change, estimate) for the longest sequence length with which the leanest plan fits, or
    nothing if none does. `change` names the length, and `estimate` is that of the plan with it.

    The lengths are half of the job's, a quarter and so on, down to 64 tokens. Each that is tried takes
    a trace. So the next one is the longest that fits if memory is a linear function of the length,
    judged by the two shortest lengths that do not fit. Before the first, the memory without any token
    is taken to be that of parameters, gradients and optimizer states. Longer ones follow while they fit.
    """
    job, limit = estimator.job, estimator.limit_bytes
    if not isinstance(job.data, DataSpec) or estimator.profiler.unit != "tokens":
        return
    halves = (job.data.sequence_length >> power for power in itertools.count(1))
    lengths = list(itertools.takewhile(lambda length: length >= MIN_SEQUENCE_LENGTH, halves))  # descending
    length, needed, fixed = job.data.sequence_length, _needed_bytes(least), estimator.memory_lower_bound(least.plan)
    index, tried, found = 0, 0, least  # the lengths before `tried` do not fit
    try:
        while not found.fits:
            if "memory" not in found.shortages():  # host memory and disk do not depend on the length
                return
            tried, per_token = index, (needed - fixed) / length
            likely = (at for at in range(index, len(lengths)) if fixed + lengths[at] * per_token <= limit)
            index = next(likely, len(lengths))
            if index == len(lengths):
                return
            found = _with_length(estimator, least.plan, lengths[index])
            slope = (needed - _needed_bytes(found)) / (length - lengths[index])
            length, needed = lengths[index], _needed_bytes(found)
            fixed, index = needed - slope * length, index + 1
        for length in reversed(lengths[tried : index - 1]):
            longer = _with_length(estimator, least.plan, length)
            if not longer.fits:
                break
            found = longer
    except InputError:
        return
    if isinstance(found.job.data, DataSpec):
        yield f"data.sequence_length: {found.job.data.sequence_length}", found


def _with_length(estimator: Estimator, plan: Plan, length: int) -> Estimate:
    """Return the estimate of `plan` for sequences of `length` tokens, with the allocator's bytes."""
    other = estimator.with_data(sequence_length=length)
    return other.include_allocator(other.estimate(plan))


def _more_devices(estimator: Estimator, least: Estimate, pins: dict[str, Any]) -> Iterator[tuple[str, Estimate]]:
    """Yield (change, estimate) for the smallest number of devices with which the job fits, or
    nothing. `change` names the devices, and `estimate` is that of the leanest plan on them.

    The function tries 2, 4, 8, ... times the machine's number of devices, up to 1024 devices or one
    device per sample of a step. It yields nothing if the job does not fit with any of these
    numbers, on a CPU, or if device memory is large enough.
    """
    machine = estimator.machine
    if machine.device == "cpu" or "memory" not in least.shortages():
        return
    row = devices().get(machine.name)
    node = max(machine.devices_per_node, row["node"] if row else DEVICES_PER_NODE)
    count = 2 * machine.devices_per_node * machine.nodes
    while count <= min(MOST_DEVICES, estimator.job.train.batch):
        per_node = min(count, node)
        nodes = max(count // per_node, 1)
        size = f"{per_node}x{nodes}" if nodes > 1 else f"{per_node}"
        larger = machine.replace(devices_per_node=per_node, nodes=nodes)
        if row and machine.memory_bytes.source == "published":
            larger = Machine.named(f"{machine.name}:{size}")
        result = _leanest_with_same_kernels(estimator.with_job(estimator.job, larger), least, pins, only_fitting=True)
        if result is not None and result.fits:
            yield f"{count} devices ({machine.name}:{size})", result
            return
        count *= 2


def _larger_machine(least: Estimate) -> str:
    """Return in words which memory would be enough for the leanest plan `least`.

    - If `limits.memory` of the job is below the machine's memory, and the machine has enough: the
      limit that is needed.
    - For a GPU: the smallest GPU of the device table with enough memory.
    - For a CPU, or if no GPU has enough memory: the bytes that each device needs.
    """
    needed = _needed_bytes(least)
    if least.job.limits.memory and needed <= least.machine.memory_bytes.value:
        return f"limits.memory of {format_bytes(math.ceil(needed))} or more, which this machine has"
    if least.machine.device == "cuda":
        known = [
            (Machine.named(name).memory_bytes.value, name)
            for name, row in devices().items()
            if not row.get("explain_only")
        ]
        large = [one for one in sorted(known) if one[0] >= needed]
        if large:
            return f"a larger device: {large[0][1]} has {format_bytes(large[0][0])}"
    return f"a larger machine, with {format_bytes(needed)} for each device"
