"""The parts of benchmarks/gpu.py. Each is a function that saves what it has found so far, so that a
time-out loses only the rest.

A part is given the kind of its device and its sizes as data (benchmarks/gpu_sizes.py). Its code is the
same on GPUs and CPUs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

import tightfit
from benchmarks import harness, memory_ladder
from benchmarks.batch_norm_net import BatchNormNet
from benchmarks.contenders import KINDS, Crew
from tightfit.calibration.calibrate import calibrate, quick_calibrate
from tightfit.capabilities import missing_for_compile
from tightfit.engine.build import build
from tightfit.errors import DoesNotFit, InputError
from tightfit.machine import Machine
from tightfit.measure.observer import Observer
from tightfit.measure.verify import compare, observe, observe_settled
from tightfit.methods import METHODS, materialize
from tightfit.planner.estimate import Estimate
from tightfit.planner.estimator import Estimator
from tightfit.record import code_version
from tightfit.rules import needed_permissions

ROOT = Path(__file__).parent.parent
ALLOW = [
    "bf16",
    "fp16",
    "tf32",
    "float8",
    "bf16-states",
    "8-bit-states",
    "4-bit-states",
    "stochastic-rounding",
    "offload",
]
KEPT_OF_FAILURES = 12_000  # characters of the tests' failures
TAIL = 1500  # characters of what failed


@dataclass(frozen=True)
class Setup:
    """device: cpu or cuda. sizes: of this part. limit_s: seconds it may take. work: a folder of its own results and caches."""

    device: str
    sizes: dict[str, Any]
    limit_s: float
    work: Path

    @property
    def machine(self) -> Machine:
        """This machine, with what the part `calibration` has measured where it has run."""
        return Machine.detect()


Save = Callable[[dict[str, Any]], None]


# --- what all parts use ---------------------------------------------------------------------------------------------


def begin_anew(device: str) -> None:
    """Give back what earlier runs of this process held, and count from here."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def tail_of(error: BaseException) -> str:
    """Where an error was raised, and the beginning of what it says."""
    where = "".join(traceback.format_tb(error.__traceback__))[-TAIL:]
    return f"{where}{type(error).__name__}: {str(error)[:TAIL]}"


def is_out_of_memory(error: BaseException) -> bool:
    said = "can't allocate memory", "out of memory"  # of a processor's allocator, and of CUDA beside torch's own
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)


def tokens_job(
    model: dict[str, Any], length: int, batch: int, steps: int, allow: list[str], **train: Any
) -> tightfit.Job:
    """A language model on synthetic tokens, as many as its steps take."""
    data = {"synthetic": "tokens", "sequence_length": length, "samples": max(batch * steps, 16)}
    settings = tightfit.Train(batch=batch, steps=steps, trackers=(), **train)
    return tightfit.Job(model=model, data=data, train=settings, allow=allow)


@contextlib.contextmanager
def weights_drawn_on(device: str) -> Iterator[None]:
    """Inside this context, weights of new models are drawn on the device.

    tightfit draws them on the host, as plain PyTorch does. That takes minutes for the largest models.
    """
    factory = materialize.model_factory

    def make(model: Any, **options: Any) -> Callable[[], torch.nn.Module]:
        def create() -> torch.nn.Module:
            with torch.device(device):
                return factory(model, **options)()

        return create

    with mock.patch.object(materialize, "model_factory", make):
        yield


def predicted_of(estimate: Estimate) -> dict[str, Any]:
    """Bytes of tensors at the peak, of what the allocator takes of a GPU for them, and seconds; a step's speed."""
    rows = estimate.peak.rows
    tensors = sum(size for row, size in rows.items() if row not in ("runtime", "allocator"))
    return {
        "allocated_bytes": round(tensors),
        "reserved_bytes": round(tensors + rows.get("allocator", 0)),
        "peak_bytes": round(estimate.peak_bytes),
        "rows": {row: round(size) for row, size in rows.items()},
        "step_s": estimate.time.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "fits": estimate.fits,
    }


def trained(
    job: tightfit.Job,
    plan: tightfit.Plan,
    machine: Machine,
    estimate: Estimate | None = None,
    profiled: int = 0,
    on_device: bool = False,
) -> dict[str, Any]:
    """Train the job's steps with the plan: speed, losses, and peaks beside what was predicted of them.

    profiled   how many steps more are taken under the profiler, for the table of kernels
    on_device  draw the weights on the device, which is faster; False: on the host, as tightfit does
    """
    begin_anew(machine.device)
    began = time.perf_counter()
    longer = job.replace(train=job.train.replace(steps=(job.train.steps or 1) + profiled))
    with weights_drawn_on(machine.device) if on_device else contextlib.nullcontext():
        run = build(longer, plan, machine)
    print(f"{time.perf_counter() - began:.1f} s to build the model", flush=True)
    built_s, observer = time.perf_counter() - began, Observer(run, 0)
    results = tightfit.train(run, take=observer.take)
    for step in itertools.islice(results, job.train.steps):
        observer.add(step)
    record = observer.record(machine)
    flops, seconds = observer.flops_per_step, record.median_step_s
    peak = machine.matrix_peak_flops_per_s.get(plan.precision.split("-")[0])
    found = {
        "plan": plan.differences(),
        "parameters": record.parameters,
        "built_s": built_s,
        "first_step_s": observer.steps[0].seconds,
        "step_s": record.step_s,
        "tokens_per_s": record.tokens_per_s,
        "samples_per_s": record.samples_per_s,
        "mfu_of_published_peak": flops / seconds / peak.value if flops and seconds and peak else None,
        "flops_per_step": flops,
        "loss": [value for _, value in record.loss],
        "allocated_bytes": record.peak_bytes.measured,
        "reserved_bytes": record.peak_bytes.reserved,
        "rows": record.peak_bytes.rows,
        "predicted": predicted_of(estimate) if estimate is not None else None,
    }
    if profiled:
        found["kernels"] = kernels_of(lambda: next(results), profiled, machine.device)
    return with_errors(found)


def with_errors(found: dict[str, Any]) -> dict[str, Any]:
    """Predicted over measured, where both are known: of bytes allocated and reserved, and of seconds."""
    predicted = found.get("predicted")
    if not predicted:
        return found
    seconds = statistics.median(found["step_s"]) if found.get("step_s") else None
    pairs = {
        "allocated": (predicted["allocated_bytes"], found.get("allocated_bytes")),
        "reserved": (predicted["reserved_bytes"], found.get("reserved_bytes")),
        "step_s": (predicted["step_s"], seconds),
    }
    return {
        **found,
        "predicted_over_measured": {name: one / other if other else None for name, (one, other) in pairs.items()},
    }


def kernels_of(step: Callable[[], Any], steps: int, device: str) -> list[dict[str, Any]]:
    """What takes the device's time in `steps` steps: kernels on a GPU, operations on a processor; the longest first."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as watched:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    for event in watched.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.is_user_annotation:  # which spans kernels that are counted by themselves
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        before, calls = times.get(event.key, (0.0, 0))
        times[event.key] = before + spent, calls + event.count
    total = sum(spent for spent, _ in times.values())
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:40]
    return [
        {
            "name": name[:160],
            "us_per_step": spent / steps,
            "calls_per_step": calls / steps,
            "share": spent / max(total, 1e-9),
        }
        for name, (spent, calls) in longest
    ]


# --- the parts ------------------------------------------------------------------------------------------------------


def machine(setup: Setup, save: Save) -> None:
    """Versions, driver, and the machine as it is detected. A GPU that is asked for has to be there."""
    found = setup.machine
    if found.device != setup.device:
        raise InputError(
            "benchmarks/gpu.py", f"torch sees no device of kind {setup.device}", "use --cpu for the small copy"
        )
    content: dict[str, Any] = {
        "machine": found.content(),
        "code": code_version(),
        "missing_for_compile": missing_for_compile(found),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": asked(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
        ),
        "packages": {
            name: version_of(name) for name in ("triton", "torchao", "accelerate", "datasets", "numpy", "pytest")
        },
    }
    if setup.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        content |= {"capability": torch.cuda.get_device_capability(), "free_bytes": free, "total_bytes": total}
    save(content)


def asked(command: list[str]) -> str | None:
    """What a command prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version_of(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tests(setup: Setup, save: Save) -> None:
    """The tests for this kind of device: how many passed, and what the others said."""
    log = setup.work / "tests.txt"
    command = [
        sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark", "--durations=15",
        "--continue-on-collection-errors", *setup.sizes["arguments"],
    ]  # fmt: skip
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(setup.sizes["workers"])]
    ended = ""
    with log.open("w") as file:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # workers with several threads would wait for each other
        running = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | None = running.wait(timeout=max(setup.limit_s - 5, 1))
        except subprocess.TimeoutExpired:
            running.kill()
            code, ended = None, f"stopped after {setup.limit_s - 5:.0f} s"
    content = {**summary_of(log.read_text(errors="replace")), "exit_code": code, "ended": ended}
    save(content)
    if code != 0 or not content["passed"]:
        raise AssertionError(
            f"{content['failed']} failed, {content['passed']} passed; pytest ended with {code} {ended}"
        )


def summary_of(text: str) -> dict[str, Any]:
    """Counts of pytest's verbose lines, the names of what failed, and the text of the failures."""
    kinds = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
    outcomes = re.findall(rf"^(\S+::.+?) ({kinds})\b", text, re.M)
    by_workers = re.findall(rf"^\[gw\d+\] \[ *\d+%\] ({kinds}) (\S+::.+?)(?:@\S+)? *$", text, re.M)  # of pytest-xdist
    outcomes += [(name, kind) for kind, name in by_workers]
    found = re.search(
        r"^=+ (?:FAILURES|ERRORS) =+$.*?(?=^=+ (?:slowest|short test summary|warnings summary)|\Z)", text, re.M | re.S
    )
    slowest = re.search(r"^=+ slowest.*?$(.*?)(?=^=+ |\Z)", text, re.M | re.S)
    return {
        "passed": sum(kind == "PASSED" for _, kind in outcomes),
        "failed": sum(kind in ("FAILED", "ERROR") for _, kind in outcomes),
        "skipped": sum(kind == "SKIPPED" for _, kind in outcomes),
        "names": [name for name, kind in outcomes if kind in ("FAILED", "ERROR")],
        "failures": found.group(0)[:KEPT_OF_FAILURES] if found else "",
        "slowest": slowest.group(1).strip().splitlines() if slowest else [],
        "last": text.strip().splitlines()[-1:] if text.strip() else [],
    }


def batch_norm_net() -> BatchNormNet:
    return BatchNormNet(16)


def job_of_net(name: str, sizes: dict[str, Any]) -> tightfit.Job:
    """Adam's epsilon is large enough that gradients which are zero but for rounding do not become whole steps."""
    train = {"learning_rate": 1e-3, "weight_decay": 0.1, "epsilon": 1e-3, "seed": 5}
    if name in ("llama", "bert"):
        return tokens_job(sizes["specs"][name], sizes["length"], sizes["batch"], sizes["steps"], ALLOW, **train)
    settings = tightfit.Train(batch=sizes["batch"], steps=sizes["steps"], trackers=(), **train)
    if name == "vit":
        data: Any = {"synthetic": "images", "samples": 4 * sizes["batch"]}
        return tightfit.Job(model=sizes["specs"][name], data=data, train=settings, allow=ALLOW)
    generator = torch.Generator().manual_seed(4)
    data = [(torch.randn(3, 16, 16, generator=generator), number % 10) for number in range(4 * sizes["batch"])]
    return tightfit.Job(model=batch_norm_net, data=data, train=settings, allow=ALLOW)


def variants(device: str) -> list[dict[str, Any]]:
    """The settings of every method that works on one device, and those that only a GPU has."""
    found = [dict(fields) for method in METHODS for fields in method.VARIANTS if tightfit.Plan(**fields).devices == 1]
    if device == "cuda":
        everything = ("states", "gradients", "parameters", "activations")
        found += [
            {"precision": "tf32"},
            {"pin_memory": True, "non_blocking": True},
            *(
                {"offload": words}
                for words in (everything[:1], everything[1:2], everything[3:], everything[:3], everything)
            ),
        ]
    return found


def methods(setup: Setup, save: Save) -> None:
    """Every method for one device on four nets against the reference plan on the same device: losses, gradients, weights."""
    sizes, device = setup.sizes, setup.machine
    rows: list[dict[str, Any]] = []
    for number, name in enumerate((*sizes["specs"], "batchnorm")):
        job = job_of_net(name, sizes)
        expected = observe(build(job, tightfit.Plan(), device), sizes["steps"])
        for fields in variants(setup.device)[number % sizes["every"] :: sizes["every"]]:
            rows.append({"net": name, "plan": fields, **held(job, fields, name, expected, device, sizes)})
            save({"rows": rows, **counted(rows)})
    wrong = [row for row in rows if row["outcome"] in ("failed", "differs")]
    if wrong:
        raise AssertionError("\n".join(f"{row['net']} {row['plan']}: {row.get('said', row)}" for row in wrong)[-TAIL:])


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    kinds = ("agrees", "differs", "refused", "failed", "left out")
    return {kind: sum(row["outcome"] == kind for row in rows) for kind in kinds}


def held(
    job: tightfit.Job, fields: dict[str, Any], name: str, expected: Any, machine: Machine, sizes: dict[str, Any]
) -> dict[str, Any]:
    """One plan beside the reference: agrees, differs, refused (by a rule, with its words), failed, left out."""
    plan, steps = tightfit.Plan(**fields), sizes["steps"]
    if plan.compile != "none" and name not in sizes["compiled"]:
        return {"outcome": "left out", "said": "compiling takes long: it is tried on others"}
    if plan.micro_batch is not None and name == "batchnorm":
        return {"outcome": "left out", "said": "BatchNorm's statistics are those of a micro-batch"}
    torch._dynamo.reset()
    try:
        found = compare(plan, observe_settled(job, plan, machine, steps), expected)
    except InputError as error:
        return {"outcome": "refused", "said": str(error)[-TAIL:]}
    except Exception as error:  # the other methods are tried all the same
        return {"outcome": "failed", "said": tail_of(error)}
    return {"outcome": "agrees" if found.passed else "differs", **found.content()}


def calibration(setup: Setup, save: Save) -> None:
    """What the machine is measured to do; the parts after this one plan with it."""
    before = setup.machine
    how = {"calibrate": calibrate, "quick": lambda machine, say: quick_calibrate(machine)}[setup.sizes["how"]]
    began = time.perf_counter()
    found = how(before, say=lambda line: print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True))
    published = {kind: figure.value for kind, figure in before.matrix_peak_flops_per_s.items()}
    reached = {kind: figure.value for kind, figure in found.matrix_flops_per_s.items()}
    save(
        {
            "seconds": time.perf_counter() - began,
            "machine": found.content(),
            "share_of_published": {kind: rate / published[kind] for kind, rate in reached.items() if kind in published},
        }
    )


def llama(setup: Setup, save: Save) -> None:
    """Full fine-tuning of the largest of a family of Llamas that this machine can train, with the plan that search picks."""
    sizes, here = setup.sizes, setup.machine
    allow = sorted({"bf16", *needed_permissions(tightfit.Plan(precision="bf16-true"))})
    content: dict[str, Any] = {"asked": sizes["family"][0][0], "too_large": [], "attempts": []}
    for name, spec in sizes["family"]:
        job = tokens_job(spec, sizes["length"], sizes["batch"], sizes["planned_steps"], allow)
        content |= {"model": name, "length": sizes["length"], "batch": sizes["batch"], "allow": allow}
        done, reason = None, ""
        for pins in sizes["attempts"]:
            one: dict[str, Any] = {"model": name, "pins": pins}
            content["attempts"].append(one)
            save(content)
            try:
                done = searched(job, pins, here, sizes, one)
            except DoesNotFit as error:
                reason = one["said"] = str(error)[:TAIL]
                break  # with narrower pins less fits
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = one["said"] = tail_of(error)
            finally:
                save(content)
            if done is not None:
                save({**content, **done})
                return
        content["too_large"].append({"model": name, "said": reason})
        save(content)
    raise AssertionError("none of the family fits this machine and the time of this part")


def searched(
    job: tightfit.Job, pins: dict[str, Any], machine: Machine, sizes: dict[str, Any], one: dict[str, Any]
) -> dict[str, Any]:
    """What search picks for the job as it is planned, trained for a few steps. `one` is told what was chosen before it runs."""
    began, alone = time.perf_counter(), 2 * 2.0 * weights_of(job)
    if alone > machine.memory_bytes.value:  # what any plan on one device needs, offload apart
        raise DoesNotFit(f"the weights and gradients alone take {alone / 1e9:.0f} GB in bf16")
    print(f"search for a plan of {one['model']}", flush=True)
    best = tightfit.search(job, machine, pins)[0]
    one |= {"search_s": time.perf_counter() - began, "chosen": best.plan.differences(), "predicted": predicted_of(best)}
    print(f"{one['search_s']:.1f} s for the search; train with {one['chosen']}", flush=True)
    short = job.replace(train=job.train.replace(steps=sizes["steps"]))
    return {**trained(short, best.plan, machine, best, sizes["profiled"], on_device=True), "search_s": one["search_s"]}


def weights_of(job: tightfit.Job) -> int:
    """The number of the job's parameters."""
    from tightfit.models import model_factory

    with torch.device("meta"):
        model = model_factory(job.model)()
    return sum(parameter.numel() for parameter in model.parameters())


def ladder(setup: Setup, save: Save) -> None:
    """The published ladder of ViT-L/16, rung by rung: predicted, measured and published bytes (those are reserved ones)."""
    sizes, here = setup.sizes, setup.machine
    rows: list[dict[str, Any]] = []
    train, plan = dict[str, Any](), dict[str, Any]()
    tried = 0
    for rung in memory_ladder.RUNGS:
        if sizes["published"] and rung.published is None and rows:
            if rung.plan.get("states"):
                continue  # which is no rung of the published ladder, and none of those after it has states
            break
        if tried == sizes.get("rungs", len(memory_ladder.RUNGS)):
            break
        tried += 1
        train, plan = {**train, **rung.train}, {**plan, **rung.plan}
        row: dict[str, Any] = {
            "name": rung.name,
            "train": dict(train),
            "published_bytes": rung.published and rung.published * 1e9,
        }
        rows.append(row)
        try:
            row |= rung_trained(
                sizes, tightfit.Train(steps=sizes["steps"], trackers=(), **train), tightfit.Plan(**plan), here
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row["said"] = tail_of(error)
        save({"rungs": rows, "model": sizes["model"]})
    if any("said" in row for row in rows):
        raise AssertionError("\n".join(f"{row['name']}: {row['said']}" for row in rows if "said" in row)[-TAIL:])


def rung_trained(sizes: dict[str, Any], train: tightfit.Train, plan: tightfit.Plan, machine: Machine) -> dict[str, Any]:
    job = tightfit.Job(
        model=sizes["model"],
        data={"synthetic": "images", "samples": train.batch * (train.steps or 1)},
        train=train,
        allow=memory_ladder.ALLOW,
    )
    return trained(job, plan, machine, tightfit.estimate(job, plan, machine))


def rivals(setup: Setup, save: Save) -> None:
    """Small language models trained by a plain compiled loop, transformers' Trainer and tightfit, each at its best, in turns."""
    sizes = setup.sizes
    content: dict[str, Any] = {"models": {}, "left_out": []}
    began, longest_s = time.perf_counter(), 0.0
    for name, one in sizes["models"].items():
        so_far_s = time.perf_counter() - began
        if so_far_s + longest_s > setup.limit_s:  # as long as the one before
            content["left_out"].append(name)
            save(content)
            continue
        asked_of = {**one, **{key: value for key, value in sizes.items() if key != "models"}, "device": setup.device}
        with Crew(asked_of, setup.work) as crew:
            found: dict[str, Any] = {"ready": crew.ready(sizes["ready_s"])}
            content["models"][name] = found
            rounds: list[dict[str, dict[str, Any]]] = []
            for _ in range(sizes["rounds"]):
                rounds.append({kind: crew.take(kind, one["steps"]) for kind in crew.able})
                found |= compared(rounds, one["batch"] * one["length"])
                save(content)
            found["kernels"] = crew.kernels("tightfit", sizes["profiled"]) if "tightfit" in crew.able else []
            save(content)
        missing = [kind for kind in KINDS if kind not in crew.able]
        found["missing"] = {kind: found["ready"][kind]["said"] for kind in missing}
        longest_s = max(longest_s, time.perf_counter() - began - so_far_s)
        save(content)
    broken = [
        said for one in content["models"].values() for said in one["missing"].values() if "accelerate" not in said
    ]
    if broken:
        raise AssertionError("\n".join(broken)[-TAIL:])


def compared(rounds: list[dict[str, dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """Tokens/s of each contender's median step, and medians over rounds of the ratio of tightfit to the others in a round."""
    kinds = list(rounds[0])
    rates = {kind: [tokens / statistics.median(one[kind]["step_s"]) for one in rounds] for kind in kinds}
    medians = {
        kind: tokens / statistics.median([second for one in rounds for second in one[kind]["step_s"]]) for kind in kinds
    }
    ours = rates.get("tightfit", [])
    ratios = {
        kind: statistics.median(a / b for a, b in zip(ours, rates[kind], strict=True))
        for kind in kinds
        if ours and kind != "tightfit"
    }
    return {
        "tokens_per_s": medians,
        "rounds": rates,
        "tightfit_over": ratios,
        "peak_bytes": {kind: rounds[-1][kind]["peak_bytes"] for kind in kinds},
        "loss": {kind: rounds[-1][kind]["loss"] for kind in kinds},
    }


def largest(setup: Setup, save: Save) -> None:
    """The largest Llama of a family of widths and depths that fits, by prediction, with AdamW, with narrow states, with offload;
    the first two are trained for a few steps."""
    sizes, here = setup.sizes, setup.machine
    estimators: dict[int, Estimator] = {}

    def job_of(number: int) -> tightfit.Job:
        width, depth, heads, inner = sizes["widths"][number]
        spec = llama_spec(width, depth, heads, inner, sizes)
        return tokens_job(spec, sizes["length"], 1, sizes["steps"], ALLOW)

    def estimated(number: int, plan: tightfit.Plan) -> Estimate:
        if number not in estimators:
            estimators[number] = Estimator(job_of(number), here)
        return estimators[number].include_allocator(estimators[number].estimate(plan))

    content: dict[str, Any] = {"ways": {}}
    for way, fields in sizes["ways"].items():
        plan = tightfit.Plan(
            **{**sizes["lean"], **fields, **({"offload": tuple(fields["offload"])} if "offload" in fields else {})}
        )
        content["ways"][way] = row = largest_that_fits(
            len(sizes["widths"]), lambda number, plan=plan: estimated(number, plan)
        )
        number = row.pop("number")
        if number is not None:
            row |= {"dimensions": sizes["widths"][number], "plan": plan.differences()}
        save(content)
    for way in sizes["trained"]:
        row = content["ways"][way]
        if "dimensions" not in row:
            continue
        number = [tuple(one) for one in sizes["widths"]].index(tuple(row["dimensions"]))
        plan = tightfit.Plan(**{**sizes["lean"], **sizes["ways"][way]})
        best = estimated(number, plan)
        estimators.clear()
        try:
            row["trained"] = trained(job_of(number), plan, here, best, on_device=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row["said"] = tail_of(error)
        save(content)
    wrong = [f"{way}: {row['said']}" for way, row in content["ways"].items() if "said" in row]
    if wrong:
        raise AssertionError("\n".join(wrong)[-TAIL:])


def llama_spec(width: int, depth: int, heads: int, inner: int, sizes: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.gpu_sizes import llama as spec

    return spec(width, depth, heads, inner, sizes["vocabulary"], sizes["length"])


def largest_that_fits(count: int, estimated: Callable[[int], Estimate]) -> dict[str, Any]:
    """By halves, of a family in the order of size: the number of the largest that fits, its prediction, and the next one's."""
    low, high, best, above = -1, count, None, None
    while high - low > 1:
        middle = (low + high) // 2
        found = estimated(middle)
        if found.fits:
            low, best = middle, found
        else:
            high, above = middle, found
    return {
        "number": low if best is not None else None,
        "parameters": sum(one.count for one in best.ledger.parameters) if best is not None else None,
        "predicted": predicted_of(best) if best is not None else None,
        "next_lacks": {name: list(pair) for name, pair in above.shortages().items()} if above is not None else None,
    }


def kernels(setup: Setup, save: Save) -> None:
    """The longest kernels of the parts `llama` and `rivals`, which profiled a step or two when their times were taken."""
    shown, found = setup.sizes["shown"], {}
    for part in ("llama", "rivals"):
        path = setup.work / f"{part}.json"
        result = json.loads(path.read_text())["result"] if path.exists() else {}
        for name, one in (result.get("models") or {result.get("model", part): result}).items():
            if one.get("kernels"):
                found[f"{part}: {name}"] = one["kernels"][:shown]
    save({"tables": found})
    if not found:
        raise AssertionError("neither llama nor rivals got as far as its profile")


PARTS: dict[str, Callable[[Setup, Save], None]] = {
    "machine": machine,
    "tests": tests,
    "methods": methods,
    "calibration": calibration,
    "llama": llama,
    "ladder": ladder,
    "rivals": rivals,
    "largest": largest,
    "kernels": kernels,
}


def run_parts(
    names: list[str], sizes: dict[str, dict[str, Any]], device: str, limits: dict[str, float], work: Path
) -> None:
    """Run parts one after another in this process. What each found is in `work`/NAME.json, also while it is under way.

    Parts plan with the machine in `work`/calibrated.json, if there is this file and it is of the same machine.
    """
    if (work / "calibrated.json").exists():
        calibrated = Machine.model_validate_json((work / "calibrated.json").read_text())
        if calibrated.name == Machine.detect().name:
            calibrated.keep()
    imports_s = time.time() - psutil.Process().create_time()  # they count as part of the first one
    for name in names:
        path, state = work / f"{name}.json", {"status": "under way", "result": {}}

        def save(result: dict[str, Any], path: Path = path, state: dict[str, Any] = state) -> None:
            state["result"] = result
            harness.write_json(path, finite(state))

        began = time.perf_counter()
        save({})
        # where a part hangs, which is ended soon after
        faulthandler.dump_traceback_later(max(limits[name] - imports_s - 3, 1), file=sys.__stderr__)
        imports_s = 0.0
        print(f"--- {name}", flush=True)
        try:
            PARTS[name](Setup(device, sizes[name], limits[name], work), save)
            state["status"] = "done"
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            state |= {"status": "failed", "said": tail_of(error)}
        faulthandler.cancel_dump_traceback_later()
        state["seconds"] = time.perf_counter() - began
        save(state["result"])
        begin_anew(device)


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
