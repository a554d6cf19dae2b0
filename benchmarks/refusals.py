"""Check that search refuses a job only if no plan of a complete list fits, and finds a plan if one fits.

    .venv/bin/python benchmarks/refusals.py --minutes 60 --seed 0 --out records/refusals.json

A draw has one of 20 presets and 6 machines, with a batch, a length, permissions and pins. The seed
gives the order of the draws. For each draw, every legal plan is estimated that differs in precision,
states, rounding, recompute, micro-batch, update in backward, kernels and in how the devices share the
work, the smallest bound first. Plans that cannot be leaner than a known one are left out. The leanest
plan gets a dry run.

Then search is asked twice: with the machine's memory, which it may refuse only if the leanest plan
does not fit; and with a limit that the leanest plan just meets, which it may not refuse.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tightfit
from tightfit.errors import DoesNotFit, InputError
from tightfit.machine import Machine
from tightfit.plan import Plan
from tightfit.planner.candidates import data_parallel_layouts, is_legal
from tightfit.planner.defaults import complete
from tightfit.planner.dry_run import dry_run
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.planner.search import search
from tightfit.report.quiet import quiet_libraries
from tightfit.units import format_bytes

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

PRESETS = (
    "bert-base", "bert-large", "vit-b-16", "vit-l-16", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-1.3b", "t5-3b",
    "llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b",
    "qwen3-8b", "mistral-7b",
)  # fmt: skip
MACHINES = ("t4", "rtx-4090", "a100-80gb", "mi300x", "rtx-3090:2", "h100-sxm:8")
ALLOWED: tuple[list[str] | None, ...] = (
    None,
    [],
    ["bf16", "bf16-states"],
    ["bf16", "8-bit-states", "stochastic-rounding"],
)
PINS: tuple[dict[str, Any], ...] = (
    {"compile": "none"},
    {},
    {"compile": "none", "micro_batch": 1},
    {"recompute": "full"},
)
SLACK = 1.002  # of a limit over the leanest plan's need: the bytes of the process itself are read again


@dataclass(frozen=True)
class Draw:
    """A job, a machine, and what is pinned of the plan."""

    preset: str
    machine: str
    batch: int
    length: int
    allow: list[str] | None
    pins: dict[str, Any]

    def job(self, memory: float | None = None) -> tightfit.Job:
        images = self.preset.startswith("vit")
        data = {"synthetic": "images"} if images else {"synthetic": "tokens", "sequence_length": self.length}
        return tightfit.Job(
            model={"preset": self.preset},
            data=data,
            train=tightfit.Train(batch=self.batch, steps=1000),
            allow=self.allow,
            limits={} if memory is None else {"memory": round(memory)},
        )


def draws(seed: int) -> list[Draw]:
    """One for each preset and machine, in an order that the seed gives."""
    chance = random.Random(seed)
    found = [
        Draw(
            preset,
            machine,
            chance.choice((8, 16)),
            chance.choice((256, 512)),
            chance.choice(ALLOWED),
            chance.choice(PINS),
        )
        for preset, machine in itertools.product(PRESETS, MACHINES)
    ]
    chance.shuffle(found)
    return found


def plans_by_bound(estimator: Estimator, start: Plan, pins: dict[str, Any]) -> list[tuple[float, list[Plan]]]:
    """All plans, grouped by their lower bound: the bytes of weights, states and gradients."""
    job, machine = estimator.job, estimator.machine
    shared = {
        "precision": ("fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"),
        "states": ("fp32", "bf16", "8-bit", "4-bit"),
        "update_in_backward": (False, True),
        "rounding": ("nearest", "kahan", "stochastic"),
    }
    shared = {name: (pins[name],) if name in pins else values for name, values in shared.items()}
    found = []
    for spread, *values in itertools.product(data_parallel_layouts(machine, start, pins), *shared.values()):
        plan = start.replace(**spread, **dict(zip(shared, values, strict=True)))
        if plan.precision == "bf16-true" and plan.rounding == "nearest" and "rounding" not in pins:
            continue  # which loses small updates: search takes it only where it is asked for
        same = [one for one in _with_kernels(plan, job, pins) if is_legal(one, job, machine.device)]
        if same:
            found.append((estimator.memory_lower_bound(plan), same))
    return sorted(found, key=lambda one: one[0])


def _with_kernels(plan: Plan, job: tightfit.Job, pins: dict[str, Any]) -> Iterator[Plan]:
    share = plan.share_of(job.train.batch)
    micro = [None, *(share // 2**power for power in range(1, share.bit_length()))]
    options: dict[str, Any] = {
        "recompute": ("full", "sqrt", "none", "selective", "selective-2", "every-2"),
        "micro_batch": micro,
        "chunked_loss": tuple(dict.fromkeys((plan.chunked_loss, None))),
        "compile": tuple(dict.fromkeys((plan.compile, "none"))),
    }
    options = {name: (pins[name],) if name in pins else values for name, values in options.items()}
    for values in itertools.product(*options.values()):
        yield plan.replace(**dict(zip(options, values, strict=True)))


def leanest_of_all(estimator: Estimator, pins: dict[str, Any], until: float) -> tuple[Estimate | None, int, bool]:
    """(the leanest plan, confirmed by its dry run; how many were estimated; whether time sufficed for all)."""
    start, _ = complete(estimator.job, estimator.machine, pins)
    seen: list[Estimate] = []
    best, looked, whole = float("inf"), 0, True
    for bound, plans in plans_by_bound(estimator, start, pins):
        if bound >= best:
            break
        for plan in plans:
            if time.monotonic() > until and seen:
                whole = False
                break
            try:
                one = estimator.estimate(plan)
            except InputError:  # what this model cannot have
                continue
            looked += 1
            if one.peak_bytes < best:
                seen, best = [*seen, one], one.peak_bytes
    for one in reversed(seen[-3:]):
        try:
            settled = estimator.include_allocator(one)
            peak = dry_run(estimator.job, one.plan, one.machine.device, one.ledger.device).total
        except InputError:
            continue
        beside = settled.peak.rows["runtime"] + settled.peak.rows["allocator"]
        return replace(settled, dry_run_bytes=max(peak + beside, settled.peak.total)), looked, whole
    return None, looked, whole


def asked(draw: Draw, machine: Machine, estimator: Estimator, memory: float | None) -> tuple[str, str]:
    """Search's answer for a draw with so much memory (fits, does not fit, refused, raised), and its plan or message."""
    job = draw.job(memory)
    try:
        chosen = search(job, machine, draw.pins, estimator.with_job(job, machine))[0]
    except DoesNotFit as refusal:
        return "does not fit", str(refusal)
    except InputError as error:
        return "refused", str(error)
    except Exception as error:  # which nothing that is asked for should
        return "raised", f"{type(error).__name__}: {error}"
    return "fits", str(chosen.plan)


def checked(draw: Draw, listed: float) -> dict[str, Any]:
    """The outcome of one draw; `wrong` is an answer that search should not have given.

    listed: seconds for the list of plans; 0 for none.
    """
    began, machine = time.monotonic(), Machine.named(draw.machine)
    estimator = Estimator(draw.job(), machine)
    said, words = asked(draw, machine, estimator, None)
    row = {**vars(draw), "said": said, "search_s": round(time.monotonic() - began, 1), "words": words.splitlines()[0]}
    if said in ("refused", "raised") or listed == 0:
        return {**row, "wrong": words if said == "raised" else ""}
    least, looked, whole = leanest_of_all(estimator, draw.pins, time.monotonic() + listed)
    if least is None:
        return {**row, "wrong": "", "looked": looked}
    needed = least.peak_bytes + least.margin_bytes
    wrong = ""
    if said == "does not fit" and least.fits:
        wrong = f"search refused, and {least.plan} fits"
    limit = SLACK * needed
    tight, tight_words = asked(draw, machine, estimator, limit)
    if tight == "does not fit":
        wrong = wrong or f"search refused a limit of {format_bytes(limit)}, which {least.plan} keeps: {tight_words}"
    return {
        **row,
        "plans": looked,
        "all_plans": whole,
        "leanest": str(least.plan),
        "needed": round(needed),
        "at_that_limit": tight,
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def main() -> None:
    quiet_libraries()
    parser = harness.make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="after which no further draw is begun")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="for the list of plans of one draw; 0: only see that search never raises",
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw: a run can be gone on with")
    arguments = parser.parse_args()
    until, rows = time.monotonic() + 60 * arguments.minutes, []
    everything = draws(arguments.seed)
    for draw in everything[arguments.first :]:
        if time.monotonic() > until:
            break
        rows.append(checked(draw, arguments.seconds))
        row = rows[-1]
        print(
            f"{draw.preset:14s} {draw.machine:12s} {row['said']:12s} {row.get('plans', 0):5d} plans {row['wrong']}",
            flush=True,
        )
        wrong = sum(bool(one["wrong"]) for one in rows)
        counts = {"draws": len(rows), "of": len(everything), "wrong": wrong}
        found = {"seed": arguments.seed, "first": arguments.first, **counts, "rows": rows}
        harness.write_record(arguments.out, found)
    if any(row["wrong"] for row in rows):
        raise SystemExit("search refused what fits")


if __name__ == "__main__":
    main()
