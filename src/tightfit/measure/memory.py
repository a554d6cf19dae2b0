"""Peak memory of one step by row: parameters, gradients, optimizer, activations, temporaries.

On CPU the bytes are those of the storages of live tensors; inside a compiled region, where nothing is seen operation
by operation, the profiler's allocator events give the total. On CUDA the allocator itself counts. Either way one
step is sampled and the others run untouched; the process's resident set stands beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tightfit.engine.step import Step, take_step
from tightfit.measure.storages import Peak, StorageTracker, inner_tensors
from tightfit.methods.run import Run
from tightfit.models.objective import Batch


def sample_step(run: Run, micro_batches: list[Batch], step: int) -> tuple[Step, Peak]:
    """Take one step (a real one) and see the peak of its memory. Take it after the first, when states exist."""
    if run.device.type == "cuda":
        return _sample_cuda(run, micro_batches, step)
    if run.plan.compile != "none":
        return _sample_profiled(run, micro_batches, step)
    tracker = StorageTracker(run.model.parameters(), [*run.model.buffers(), *state_tensors(run.optimizer)])
    before = run.optimizer.register_step_pre_hook(lambda *_: setattr(tracker, "optimizing", True))
    after = run.optimizer.register_step_post_hook(lambda *_: setattr(tracker, "optimizing", False))
    try:
        with tracker:
            result = take_step(run, micro_batches, step)
    finally:
        before.remove()
        after.remove()
    return result, tracker.peak


def _sample_cuda(run: Run, micro_batches: list[Batch], step: int) -> tuple[Step, Peak]:
    before = torch.cuda.memory_allocated(run.device)
    torch.cuda.reset_peak_memory_stats(run.device)
    result = take_step(run, micro_batches, step)
    total = torch.cuda.max_memory_allocated(run.device)
    return result, _with_model_states(run, Peak(total=total, phase="step"), beside=before)


def _sample_profiled(run: Run, micro_batches: list[Batch], step: int) -> tuple[Step, Peak]:
    """The allocator's events of a step, added to the bytes alive when it began."""
    resident = tensor_bytes(run.model.parameters()) + tensor_bytes(run.model.buffers()) + tensor_bytes(state_tensors(run.optimizer))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        result = take_step(run, micro_batches, step)
    current = largest = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        largest = max(largest, current)
    return result, _with_model_states(run, Peak(total=resident + largest, phase="step"), beside=resident)




def _with_model_states(run: Run, peak: Peak, beside: int) -> Peak:
    """Rows where only the total was seen: the model states are counted, the rest of the peak is what came on top."""
    parameters = tensor_bytes(run.model.parameters())
    gradients = 0 if run.plan.update_in_backward else parameters
    rows = {"parameters": parameters, "gradients": gradients, "optimizer": tensor_bytes(state_tensors(run.optimizer))}
    peak.rows = {**rows, "activations": max(peak.total - sum(rows.values()), 0), "temporaries": 0}
    return peak


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    storages = [part.untyped_storage() for tensor in tensors for part in inner_tensors(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor among the optimizer's states."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def process_peak_bytes() -> int:
    """The largest resident set this process has had, in bytes (Linux: VmHWM), else the present one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
