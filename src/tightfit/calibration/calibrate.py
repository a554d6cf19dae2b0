"""Calibration: measures the rates of this machine, such as FLOP/s of matrix products by dtype and
size, bandwidths, and the time to launch an operation. Step times are predicted from them.

`calibrate` (`tightfit machine --calibrate`) takes four to five minutes. `quick_calibrate` takes a few
seconds and serves for a CPU that was not calibrated.
"""

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

from tightfit._torch.operations import scaled_mm
from tightfit.calibration.clock_drift import ClockDrift
from tightfit.calibration.operation_rates import measure_rates
from tightfit.calibration.timing import Pick, timed, timed_by_clock
from tightfit.errors import TightfitError, TightfitWarning
from tightfit.machine import Figure, Machine
from tightfit.machines.gpus import architecture_of, multiplies_float8

SIZES = (256, 512, 1024, 2048, 4096, 8192)
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_SIZES = (512,)
PATIENCE_S = 1.0  # a size that would take longer, and all larger sizes, are not measured
BUSY = 0.5  # load per core above which a quick calibration is not cached
LARGE, SMALL = 2**26, 2**12  # bytes of the all-reduces that are timed between two processes
LIMIT_S = 120.0  # the longest time that these all-reduces may take, including the start of processes
COPIED = {  # bytes of a timed copy in memory: on a GPU many times its L2 cache
    "cpu": 2**28,
    "cuda": 2**30,
}


def calibrate(machine: Machine, say: Callable[[str], None] = lambda line: None) -> Machine:
    """Measure the speed of this machine, and return a copy of `machine` with the measured figures.
    This takes four to five minutes on a CPU.

    The figures are also written to the user's cache, where `Machine.detect` finds them. The speed
    of a shared CPU changes, so each figure is scaled to the machine's usual speed. For this, a
    fixed workload, the control, is timed before and after each measurement. Example: a product
    reached 90 GFLOP/s while the control took 12 ms, and the median of all times of the control is
    10 ms: the figure is 90 x 12 / 10 = 108 GFLOP/s.

    say  called with a line of text before each measurement
    """
    device = device_of(machine)
    pace = ClockDrift(device)
    by_size: dict[str, dict[int, float]] = {}
    for kind in _types(device):
        say(f"matrix products in {kind}")
        rates = _matrix_rates(kind, device, SIZES)
        control_s = pace.control_around_s()
        by_size[kind] = {size: rate * control_s for size, rate in rates.items()}
    kinds = measure_rates(device, pace, say)
    say("memory bandwidth")
    bandwidth = _memory_bandwidth(device)
    say("launches of operations")
    launch_s = _launch_s(device)
    copies = None
    if device.type == "cuda":
        say("copies from the host")
        copies = _copy_bandwidth(device)
    say("communication between processes")
    ended_s = pace.control_around_s()
    sums_s = _all_reduces_here_s(machine, say)
    sums_ended_s, usual_s = pace.control_around_s(), pace.usual_control_s
    now, sums_now = usual_s / ended_s, usual_s / sums_ended_s  # factors that scale to the usual speed
    by_size = {kind: {size: amount / usual_s for size, amount in table.items()} for kind, table in by_size.items()}
    measured = machine.replace(
        matrix_flops_per_s=_best(by_size),
        matrix_flops_per_s_by_size=by_size,
        rates={kind: {size: amount / usual_s for size, amount in table.items()} for kind, table in kinds.items()},
        efficiency={},  # earlier runs measured it relative to the old rates
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
    """Return the torch device that `machine` describes. If the host has different GPUs, it is the
    first GPU with the machine's name."""
    if machine.device == "cpu":
        return torch.device("cpu")
    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return torch.device("cuda", names.index(machine.name))


def _links(machine: Machine, sums_s: dict[int, float] | None, now: float) -> dict[str, Figure]:
    """Return the measured bandwidth and latency of the communication between two processes, as
    field of Machine -> figure. The dict is empty if they were not measured.

    sums_s  bytes of an all-reduced tensor -> seconds of the all-reduce; None if not measured
    now     factor that scales seconds to the machine's usual speed

    The latency between GPUs is in the result only if the table of devices has none. The table's
    latency comes from NCCL's own model and is better, because it separates hops from calls.
    """
    if sums_s is None:
        return {}
    processes = "two gloo processes" if machine.device == "cpu" else "two GPUs, by NCCL"
    figures = {
        "process_bytes_per_s": _figure(
            LARGE / (sums_s[LARGE] * now), f"all-reduce of 64 MiB over {processes}, bytes each sends"
        )
    }
    if machine.device == "cpu" or machine.process_latency_s is None:
        figures["process_latency_s"] = _figure(
            sums_s[SMALL] * now / 2, f"all-reduce of 4 KiB over {processes}, of its two rounds one"
        )
    return figures


def _all_reduces_here_s(machine: Machine, say: Callable[[str], None]) -> dict[int, float] | None:
    """Time all-reduces between two processes on this machine's devices. Return bytes of the tensor
    -> seconds. Return None if there is only one GPU, or, with a warning, if the all-reduces fail.

    say  called with a line of text if there is only one GPU
    """
    if machine.device == "cuda" and machine.devices_per_node < 2:
        say("links between GPUs are not measured, because there is one GPU: their published figures are kept")
        return None
    try:
        return _all_reduces_s() if machine.device == "cpu" else _all_reduces_s("nccl")
    except TightfitError as error:
        warnings.warn(
            f"communication between processes could not be measured, so its figures stay unchanged: {error}",
            TightfitWarning,
            stacklevel=3,
        )
        return None


def quick_calibrate(machine: Machine) -> Machine:
    """Measure the speed of this machine in a few seconds, and return a copy of `machine` with the
    measured figures. Return `machine` itself if the measurement fails.

    Only small operations are timed, and no compiled kernels. Each figure is that of the fastest of
    a few runs. The figures are cached like those of `calibrate`, unless the machine is busy or the
    cache cannot be written. The measurement runs in a process of its own, because it changes the
    state of the process's heap.
    """
    busy = is_busy(machine)
    code = "import sys; from tightfit.calibration import calibrate; sys.stdout.write(calibrate.quick_measurement(sys.stdin.read()))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=machine.to_json(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:  # such as out of memory: the speed remains a guess
        return machine
    measured = Machine.model_validate_json(done.stdout.splitlines()[-1])
    with contextlib.suppress(OSError):
        if not busy:
            measured.keep()
    return measured


def is_busy(machine: Machine) -> bool:
    """Return whether other programs use so much of this machine that measured speeds are not kept."""
    return os.getloadavg()[0] > BUSY * machine.cores


def quick_measurement(text: str) -> str:
    """Run the quick calibration in this process, which `quick_calibrate` has started. Return the
    machine with the measured figures as one line of JSON.

    text  the machine as JSON
    """
    machine = Machine.model_validate_json(text)
    device = device_of(machine)
    by_size = {kind: _matrix_rates(kind, device, QUICK_SIZES, min) for kind in _types(device)}
    kinds = measure_rates(device, ClockDrift(device, watched=False), lambda line: None, quick=True)
    bandwidth, launch_s = _memory_bandwidth(device, min), _launch_s(device, min)
    measured = machine.replace(
        matrix_flops_per_s=_best(by_size, "quick"),
        matrix_flops_per_s_by_size=by_size,
        rates=kinds,
        memory_bytes_per_s=_figure(bandwidth, _copied(device), "quick"),
        launch_s=_figure(launch_s, "a chain of products of single numbers, forward and backward", "quick"),
    )
    return measured.to_json()


def _types(device: torch.device) -> list[str]:
    found = [kind for kind in TYPES if kind != "tf32" or device.type == "cuda"]
    if device.type == "cuda" and multiplies_float8(architecture_of(torch.cuda.get_device_properties(device))):
        found.append("fp8")
    return found


def _best(by_size: dict[str, dict[int, float]], source: Literal["measured", "quick"] = "measured") -> dict[str, Figure]:
    """Return dtype -> the highest rate among all sizes, as a figure that names the size.

    by_size  dtype -> size of square matrices -> FLOP/s
    source   how the rates were measured: "measured" by `calibrate`, "quick" by the quick
             calibration
    """
    best = {kind: max(table.items(), key=lambda item: item[1]) for kind, table in by_size.items() if table}
    return {kind: _figure(rate, f"square matrices of {size}", source) for kind, (size, rate) in best.items()}


def _figure(value: float, detail: str, source: Literal["measured", "quick"] = "measured") -> Figure:
    return Figure(value=value, source=source, detail=detail)


def _matrix_rates(
    kind: str, device: torch.device, sizes: Iterable[int], pick: Pick = statistics.median
) -> dict[int, float]:
    """Return size -> FLOP/s of the product of two (size, size) matrices. Stop before a size that
    would take longer than PATIENCE_S seconds.

    kind  the precision, such as "tf32"
    pick  computes the seconds of a product from those of all runs
    """
    rates: dict[int, float] = {}
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        for size in sizes:
            if rates and 2 * size**3 / min(rates.values()) > PATIENCE_S:
                break
            least_s = 0.05 if device.type == "cuda" else 0.2  # the rate of a GPU varies less
            seconds = timed(_square_product(kind, size, device), device, least_s=least_s, pick=pick)
            rates[size] = 2 * size**3 / seconds
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return rates


def _square_product(kind: str, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that multiplies two (size, size) matrices in the precision `kind`, such as
    "bf16"."""
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if kind == "fp8":
        of_mi300 = architecture_of(torch.cuda.get_device_properties(device)).startswith("gfx94")
        narrow = torch.float8_e4m3fnuz if of_mi300 else torch.float8_e4m3fn
        left, right = left.to(narrow), right.to(narrow).t()  # stored by columns, as the hardware requires
        one = torch.ones((), device=device)
        return lambda: scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
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
    """Return the mean seconds to launch one operation, measured on a chain of tiny operations. Half
    of them are launched by Python in forward, the others by autograd in backward."""
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


def _all_reduces_s(
    backend: str = "gloo", sums: Callable[..., None] | None = None, limit_s: float = LIMIT_S
) -> dict[int, float]:
    """Time all-reduces between two new processes. Return bytes of the tensor -> seconds. In a ring
    of two, each process sends each byte once.

    backend  "gloo" for two processes on the CPU, "nccl" for two processes with a GPU each
    sums     the function that each process runs; None: `_all_reduce`, which times the all-reduces
    limit_s  the most seconds until the answer, including the start of the processes

    Raises TightfitError if a process fails, or if there is no answer within `limit_s`.
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
    """Wait for the answer of the process with rank 0, and return it: bytes of the all-reduced
    tensor -> seconds. Raises TightfitError if a process fails, or if there is no answer within
    `limit_s` seconds.

    receiver  the end of the pipe from which the answer is read
    workers   the processes
    """
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
            raise TightfitError(f"two processes did not finish their all-reduces within {limit_s:.3g} s")
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
    seconds = {}
    for size, calls in ((LARGE, 5 if device.type == "cpu" else 50), (SMALL, 50)):
        tensor, times = torch.ones(size // 4, device=device), []
        for _ in range(calls + 1):
            torch.distributed.barrier()
            _wait(device)
            began = time.perf_counter()
            torch.distributed.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - began)
        seconds[size] = statistics.median(times[1:])
    if rank == 0:
        sender.send(seconds)
    torch.distributed.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
