"""A CUDA device without values: torch's fake tensors are on it, in a process of a CPU build of
torch.

An operation that mixes tensors of the host and of the device raises, as it would on a real device.
So does a call of torch.distributed with tensors that NCCL does not accept.

`python -m tests.cuda.stand_in LIBRARY` reads lines of JSON. Each has a case's name, the fields of a
plan, a rank of the processes that it is for, and a mistake to make. It builds each run and takes
steps. For each it prints a line of JSON: the error that was raised, or "".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def compile_library(folder: Path) -> Path | None:
    """Returns None where there is no compiler, or torch was built for CUDA: then it has a device of its own."""
    import torch

    if torch.version.cuda is not None:
        return None

    here, out = Path(torch.__file__).parent, folder / "stand_in.so"
    include, libraries = here / "include", here / "lib"
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{include}", str(Path(__file__).with_suffix(".cpp"))]
    command += ["-o", str(out), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        return None
    return out


class _Stream:
    """Replaces streams and events: there is nothing to wait for."""

    device = device_index = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return self

    wait_stream = wait_event = record_event = record = synchronize = wait = __enter__ = _nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __exit__(self, *error: Any) -> None:
        pass


def _patch() -> None:
    """torch.cuda as where there is a device."""
    import torch

    from tightfit.models import tracing

    only = _Stream()
    generator = torch.Generator()

    def stream(*args: Any) -> _Stream:
        return only

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    properties = type("Properties", (), {"total_memory": 2**34, "major": 9, "minor": 0, "multi_processor_count": 100})
    replaced: dict[str, Any] = {
        "Stream": _Stream, "Event": _Stream, "current_stream": stream, "default_stream": stream, "stream": stream,
        "_lazy_init": nothing, "set_device": nothing, "synchronize": nothing, "empty_cache": nothing,
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "device": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0), "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: generator.get_state(), "set_rng_state": nothing, "manual_seed": nothing,
        "manual_seed_all": nothing, "initial_seed": lambda: 0,
        "get_rng_state_all": lambda: [generator.get_state()], "set_rng_state_all": nothing,
        "get_device_properties": lambda *_: properties(), "_is_in_bad_fork": lambda: False,
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch._C._accelerator_setAllocatorSettings = nothing  # type: ignore[attr-defined]
    torch.accelerator.current_stream = stream  # type: ignore[assignment]

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.device.type != "cuda":
            raise RuntimeError(f"record_stream of a tensor on {tensor.device}")

    torch.Tensor.record_stream = record_stream  # type: ignore[assignment, method-assign]

    def pinned(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"pin_memory of a tensor on {tensor.device}")
        return tensor.clone()

    torch.Tensor.pin_memory = pinned  # type: ignore[assignment, method-assign]
    torch.Tensor.is_pinned = lambda tensor, *_: tensor.device.type == "cpu"  # type: ignore[assignment, method-assign]
    # `torch.tensor(..., device=)` makes its values on the host, and moves them as fake ones
    always = property(lambda mode: True, lambda mode, value: None)
    torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init = always  # type: ignore[assignment, method-assign]
    _move_as_real_ones()
    tracing.FakeTensor = _Never  # type: ignore[attr-defined, misc]  # what is followed is followed on the host, as a real model is


class _Never:
    """A class of which no tensor is an instance."""


def _move_as_real_ones() -> None:
    """Let `.data = ` move fake tensors to another device, and modules move their parameters so: as with real ones, which keep
    their identity."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    plain: Any = torch.Tensor.data

    def put(tensor: Any, value: Any) -> None:
        plain.__set__(tensor, value)
        if isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device

    FakeTensor.data = property(plain.__get__, put)  # type: ignore[assignment, attr-defined]

    def moved(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            moved(child, change)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = change(parameter.detach())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    torch.nn.Module._apply = moved  # type: ignore[method-assign, assignment]


def _nccl() -> Any:
    """A mode in which torch.distributed takes what NCCL does: tensors on the device, contiguous, of types that it knows."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    class Nccl(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, torch.Tensor):
                        wrong = leaf.device.type != "cuda" or not leaf.is_contiguous()
                        if wrong or leaf.dtype.is_complex or leaf.dtype in (torch.int16, torch.uint16):
                            raise RuntimeError(
                                f"NCCL: {func} of {leaf.dtype} on {leaf.device}, contiguous: {leaf.is_contiguous()}"
                            )
                return self._said(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

        def _said(self, func: Any, args: Any, kwargs: Any) -> Any:
            """A CPU build says nothing of CUDA tensors: empty ones on the host take their places."""
            places: dict[int, Any] = {}

            def there(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                host = torch.empty(value.shape, dtype=value.dtype)
                places[id(host)] = host, value
                return host

            given = tree_map(there, (args, kwargs))
            found = func(*given[0], **given[1])
            return tree_map(lambda one: places[id(one)][1] if id(one) in places else one, found)

    return Nccl()


@contextlib.contextmanager
def _with(fault: str) -> Iterator[None]:
    """Within, a mistake is made that is to be seen: "batch": batches stay on the host; "sum": sums are made there; "": none."""
    from tightfit.distributed.mesh import Mesh
    from tightfit.engine import step

    kept, begin = step.device_batches, Mesh.begin_all_reduce
    if fault == "batch":
        step.device_batches = lambda micro_batches, run: iter(micro_batches)
    elif fault == "sum":
        Mesh.begin_all_reduce = lambda mesh, values, axes: begin(mesh, values.cpu(), axes)  # type: ignore[method-assign]
    try:
        yield
    finally:
        step.device_batches, Mesh.begin_all_reduce = kept, begin  # type: ignore[method-assign]


def run_case(job: Any, fields: dict[str, Any], rank: int) -> None:
    """Build the plan on the device without values and take three steps. Raises what a device would."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    import tightfit
    from tightfit.engine.build import build
    from tightfit.engine.step import drain, take_step
    from tightfit.machine import Figure, Machine
    from tightfit.parallel.fsdp import planning
    from tightfit.planner.dry_run import DryRunData
    from tightfit.planner.tracing.device_emulation import fake_process_group
    from tightfit.planner.tracing.fake_inputs import example_batch
    from tightfit.planner.tracing.fake_tensors import FakeValues

    figure = Figure(value=1.0, source="system")
    machine = Machine(name="stand-in", device="cuda", memory_bytes=figure, host_memory_bytes=figure)
    plan = tightfit.Plan(**fields)
    shapes = DryRunData(example_batch(job)[0], job, plan)
    gathers = planning.uses_fully_shard(plan, "cuda")
    with fake_process_group(plan.devices, rank, gathers), FakeTensorMode(), FakeValues(), _nccl():
        run = build(job, plan, machine, shapes)
        for step, micro_batches in zip(range(3), run.data.steps(0, None), strict=False):
            take_step(run, micro_batches, step)
        drain(run)
        for weight in run.model.parameters():
            wanted = "cpu" if getattr(weight, "stored", False) or "parameters" in plan.offload else "cuda"
            if weight.device.type != wanted:
                raise RuntimeError(f"a parameter lies on {weight.device}")


def _lines(jobs: dict[str, Any]) -> Iterator[str]:
    for line in sys.stdin:
        name, fields, rank, fault = json.loads(line)
        try:
            with _with(fault):
                run_case(jobs[name], fields, rank)
            yield ""
        except Exception:
            yield traceback.format_exc()


def main() -> None:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch asks which devices there are
    from tests.contract import cases

    _patch()
    jobs = {name: cases.make_case(name).job.replace(allow=[*cases.ALLOW, "asynchronous"]) for name in cases.NAMES}
    for said in _lines(jobs):
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
