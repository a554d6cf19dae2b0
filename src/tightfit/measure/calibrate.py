"""What this machine was measured to do: matrix rate by type and size, bandwidths, the cost of a launch."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch

from tightfit.errors import TightfitError, TightfitWarning
from tightfit.machine import Figure, Machine
from tightfit.machines.gpus import architecture_of, multiplies_float8
from tightfit.measure.pace import Pace
from tightfit.measure.rates import measure_rates
from tightfit.measure.timing import Pick, timed, timed_by_clock

SIZES = (256, 512, 1024, 2048, 4096, 8192)
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GLANCE_SIZES = (512,)
PATIENCE_S = 1.0  # a size that would take longer than this is not measured, nor are larger ones
BUSY = 0.5  # load of a core, from which on a glance is not kept
LARGE, SMALL = 2**26, 2**12  # bytes of the sums that two processes are timed by
LIMIT_S = 120.0  # that two processes may take for them, starting included
COPIED = {
    "cpu": 2**28,
    "cuda": 2**30,
}  # bytes of a copy in memory: of a GPU many times what its second-level cache holds


def calibrate(machine: Machine, say: Callable[[str], None] = lambda line: None) -> Machine:
    """The machine with measured figures, kept in the user's cache for `Machine.detect`. Takes about a minute.

    What is measured while the machine is slower or faster than for the most part is brought to its usual pace.
    """
    device = device_of(machine)
    pace = Pace(device)
    by_size: dict[str, dict[int, float]] = {}
    for kind in _types(device):
        say(f"matrix products in {kind}")
        rates = _matrix_rates(kind, device, SIZES)
        control_s = pace.stretch()
        by_size[kind] = {size: rate * control_s for size, rate in rates.items()}
    kinds = measure_rates(device, pace, say)
    say("memory bandwidth, launches, copies, processes")
    bandwidth, launch_s = _memory_bandwidth(device), _launch_s(device)
    copies = _copy_bandwidth(device) if device.type == "cuda" else None
    ended_s = pace.stretch()
    sums_s = _sums_of_two_s(machine, say)
    sums_ended_s, usual_s = pace.stretch(), pace.usual
    now, sums_now = usual_s / ended_s, usual_s / sums_ended_s  # seconds then are so many seconds at the usual pace
    by_size = {kind: {size: amount / usual_s for size, amount in table.items()} for kind, table in by_size.items()}
    measured = machine.replace(
        matrix_flops_per_s=_best(by_size),
        matrix_flops_per_s_by_size=by_size,
        rates={kind: {size: amount / usual_s for size, amount in table.items()} for kind, table in kinds.items()},
        efficiency={},  # that of runs was of other rates
        memory_bytes_per_s=_figure(bandwidth / now, _copied(device)),
        launch_s=_figure(launch_s * now, "a chain of products of single numbers, forward and backward"),
        host_to_device_bytes_per_s=None if copies is None else _figure(copies, "pinned copy of 256 MiB"),
        control_s=_figure(usual_s, "a step of a small layer in fp32, median of those between the others")
        if device.type == "cpu"
        else None,
        **_links(machine, sums_s, sums_now),
    )
    measured.keep()
    return measured


def device_of(machine: Machine) -> torch.device:
    """Of a machine's devices the one whose figures it has: of GPUs that differ not always the first."""
    if machine.device == "cpu":
        return torch.device("cpu")
    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return torch.device("cuda", names.index(machine.name))


def _links(machine: Machine, sums_s: dict[int, float] | None, now: float) -> dict[str, Figure]:
    """Figures of what two processes send each other; none where that was not measured. Of GPUs a latency only where no table
    has one, for NCCL's own model tells the hops from the call."""
    if sums_s is None:
        return {}
    said = "two gloo processes" if machine.device == "cpu" else "two GPUs, by NCCL"
    found = {
        "process_bytes_per_s": _figure(
            LARGE / (sums_s[LARGE] * now), f"all-reduce of 64 MiB over {said}, bytes each sends"
        )
    }
    if machine.device == "cpu" or machine.process_latency_s is None:
        found["process_latency_s"] = _figure(
            sums_s[SMALL] * now / 2, f"all-reduce of 4 KiB over {said}, of its two rounds one"
        )
    return found


def _sums_of_two_s(machine: Machine, say: Callable[[str], None]) -> dict[int, float] | None:
    """As `_sums_s`, of the devices that are here; None where there are no two, or where they do not come to an end."""
    if machine.device == "cuda" and machine.devices_per_node < 2:
        say("nothing between GPUs, of which there is one: figures of links stay what is published")
        return None
    try:
        return _sums_s() if machine.device == "cpu" else _sums_s("nccl")
    except TightfitError as error:
        warnings.warn(
            f"what processes send each other is not measured, and stays as it was: {error}",
            TightfitWarning,
            stacklevel=3,
        )
        return None


def glance(machine: Machine) -> Machine:
    """This machine with figures that take seconds: the fastest of a few runs of operations of small sizes, none compiled. Kept
    like those of `calibrate`, unless the machine is busy with something else or the cache cannot be written. A process of its own
    looks, for what is measured leaves its trace in a heap."""
    busy = os.getloadavg()[0] > BUSY * machine.cores
    code = "import sys; from tightfit.measure.calibrate import glanced; sys.stdout.write(glanced(sys.stdin.read()))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=machine.to_json(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:  # memory that is short, for one: then its speed stays a guess, and is said to be
        return machine
    seen = Machine.model_validate_json(done.stdout.splitlines()[-1])
    with contextlib.suppress(OSError):
        if not busy:
            seen.keep()
    return seen


def glanced(text: str) -> str:
    """What `glance` finds of a machine, on the machine itself; from JSON to JSON, of one line."""
    machine = Machine.model_validate_json(text)
    device = device_of(machine)
    by_size = {kind: _matrix_rates(kind, device, GLANCE_SIZES, min) for kind in _types(device)}
    kinds = measure_rates(device, Pace(device, watched=False), lambda line: None, glance=True)
    bandwidth, launch_s = _memory_bandwidth(device, min), _launch_s(device, min)
    seen = machine.replace(
        matrix_flops_per_s=_best(by_size, "glance"),
        matrix_flops_per_s_by_size=by_size,
        rates=kinds,
        memory_bytes_per_s=_figure(bandwidth, _copied(device), "glance"),
        launch_s=_figure(launch_s, "a chain of products of single numbers, forward and backward", "glance"),
    )
    return seen.to_json()


def _types(device: torch.device) -> list[str]:
    found = [kind for kind in TYPES if kind != "tf32" or device.type == "cuda"]
    if device.type == "cuda" and multiplies_float8(architecture_of(torch.cuda.get_device_properties(device))):
        found.append("fp8")
    return found


def _best(
    by_size: dict[str, dict[int, float]], source: Literal["measured", "glance"] = "measured"
) -> dict[str, Figure]:
    """The rate of each type at the size that is fastest."""
    best = {kind: max(table.items(), key=lambda item: item[1]) for kind, table in by_size.items() if table}
    return {kind: _figure(rate, f"square matrices of {size}", source) for kind, (size, rate) in best.items()}


def _figure(value: float, detail: str, source: Literal["measured", "glance"] = "measured") -> Figure:
    return Figure(value=value, source=source, detail=detail)


def _matrix_rates(
    kind: str, device: torch.device, sizes: Iterable[int], pick: Pick = statistics.median
) -> dict[int, float]:
    """FLOP/s of square products by size; stops where the next size would outlast PATIENCE_S."""
    rates: dict[int, float] = {}
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        for size in sizes:
            if rates and 2 * size**3 / min(rates.values()) > PATIENCE_S:
                break
            seconds = timed(_square_product(kind, size, device), device, pick=pick)
            rates[size] = 2 * size**3 / seconds
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return rates


def _square_product(kind: str, size: int, device: torch.device) -> Callable[[], object]:
    """A product of two square matrices in `kind`, to be timed."""
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if kind == "fp8":
        of_mi300 = architecture_of(torch.cuda.get_device_properties(device)).startswith("gfx94")
        narrow = torch.float8_e4m3fnuz if of_mi300 else torch.float8_e4m3fn
        left, right = left.to(narrow), right.to(narrow).t()  # by columns, as the hardware takes it
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    left, right = left.to(TYPES[kind]), right.to(TYPES[kind])
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _memory_bandwidth(device: torch.device, pick: Pick = statistics.median) -> float:
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), device, pick=pick)


def _copied(device: torch.device) -> str:
    return f"copy of {COPIED[device.type] // 2**20} MiB, read and written"


def _launch_s(device: torch.device, pick: Pick = statistics.median) -> float:
    """Seconds to start one operation from Python and, in backward, from autograd: of a chain of tiny ones."""
    number = torch.zeros(1, device=device, requires_grad=True)

    def many() -> None:
        value = number
        for _ in range(200):
            value = value * 1.0
        value.backward()

    return timed_by_clock(many, device, pick=pick) / 400


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**28, dtype=torch.uint8, device=device)
    return 2**28 / timed(lambda: target.copy_(source, non_blocking=True), device)


def _sums_s(
    backend: str = "gloo", sums: Callable[..., None] | None = None, limit_s: float = LIMIT_S
) -> dict[int, float]:
    """Seconds of all-reduces of two processes, by bytes (a ring of two sends each byte once): of the processor by gloo, or with
    a GPU each by NCCL. Raises TightfitError where one of them dies, or they take longer than `limit_s`.

    sums  what each process does; left out, the all-reduces
    """
    context = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=sums or _all_reduce, args=(rank, folder, backend, sender), daemon=True)
            for rank in range(2)
        ]
        try:
            for worker in workers:
                worker.start()
            return _answer(receiver, workers, limit_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
            receiver.close()
            sender.close()


def _answer(receiver: Any, workers: list[Any], limit_s: float) -> dict[int, float]:
    """What the first process sends, while none of them fails."""
    until = time.monotonic() + limit_s
    running = list(workers)
    while running:
        ended = connection.wait(
            [receiver, *(worker.sentinel for worker in running)], max(until - time.monotonic(), 0.0)
        )
        if receiver in ended:
            answer: dict[int, float] = receiver.recv()
            return answer
        if not ended:
            raise TightfitError(f"two processes did not send each other anything within {limit_s:.3g} s")
        for worker in [worker for worker in running if worker.sentinel in ended]:
            worker.join()
            if worker.exitcode:
                raise TightfitError(f"a process ended with code {worker.exitcode} while it was timed")
            running.remove(worker)
    if receiver.poll():
        late: dict[int, float] = receiver.recv()
        return late
    raise TightfitError("two processes ended without an answer")


def _all_reduce(rank: int, folder: str, backend: str, sender: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)
    limit = timedelta(seconds=LIMIT_S)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
    found = {}
    for size, calls in ((LARGE, 5 if device.type == "cpu" else 50), (SMALL, 50)):
        tensor, times = torch.ones(size // 4, device=device), []
        for _ in range(calls + 1):
            torch.distributed.barrier()
            _wait(device)
            began = time.perf_counter()
            torch.distributed.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - began)
        found[size] = statistics.median(times[1:])
    if rank == 0:
        sender.send(found)
    torch.distributed.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
