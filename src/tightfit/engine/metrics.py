"""Metrics of an evaluation: the user's functions and torchmetrics' Metrics, computed over the
samples of all devices.

`engine/evaluation.py` runs the model; this module reads the outputs. A forward hook stores what the
model returned, so that the loss and the metrics share one forward. Each device accumulates the
metrics of its own samples. At the end, the accumulated states of all devices are gathered in rank
order. One device computes the values and sends them to all devices.

Example: a function that returns 0.5 for a micro-batch of 4 samples and 1.0 for one of 2 samples has
the value (0.5 x 4 + 1.0 x 2) / 6 = 0.67.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.distributed.processes import rank
from tightfit.engine.checkpoint.save import all_gather_values
from tightfit.errors import InputError
from tightfit.job import PythonSpec
from tightfit.models import load_python
from tightfit.models.batches import Batch, sample_count
from tightfit.models.objective import predictions_and_targets
from tightfit.models.python import as_input_error
from tightfit.runtime.run import Run

States = list[list[Tensor]]  # for a metric and each metric inside of it: its states' tensors, in order


class EvaluationMetrics:
    """Accumulates the job's metrics during one evaluation of a run.

    Call `add` (or `discard`) after each forward inside the context `observed`, and `values` at the
    end. With pipeline stages, only the last stage has outputs. With tensor parallelism, all devices
    of a group have the same samples, and only one of them accumulates.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.samples = 0
        self._outputs: Any = None
        self._counts = run.mesh is None or run.mesh.rank("tp") == 0
        named = run.job.evaluate.metrics if run.job.evaluate is not None else {}
        self._parts: list[_Mean | _Stateful] = [
            part for name, metric in named.items() for part in _parts_of(name, metric, run)
        ]

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context manager that stores the output of the model's latest forward, until `add` or
        `discard` takes it."""

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            self._outputs = output

        handle = self.run.model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
            self._outputs = None

    def discard(self) -> None:
        """Drop the stored output of the latest forward. It belongs to a dummy micro-batch, which
        has no samples of its own."""
        self._outputs = None

    def add(self, batch: Callable[[], Batch]) -> None:
        """Add the outputs of the latest forward, and its micro-batch, to all metrics.

        batch  a function that returns the micro-batch on the device. It is called only if this
               device needs it

        Raises InputError if the job's loss did not call the model, so that there are no outputs, or
        if a metric fails.
        """
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            if self.run.executor is None or self.run.plan.pp == 1:
                raise InputError(
                    "job: evaluate.metrics",
                    "get the model's outputs, and the job's loss does not call the model",
                    "call model(...) in the loss, not one of its modules or methods",
                )
            return  # the outputs are on the last stage
        outputs = _with_full_logits(self.run, outputs)
        if not self._counts:
            return
        on_device = batch()
        size = sample_count(on_device)
        self.samples += size
        for part in self._parts:
            part.add(outputs, on_device, size)

    def values(self) -> dict[str, float]:
        """Return metric name -> value over the samples of all devices. All devices must call this
        method, and all get the same values. Raises InputError if a metric fails."""
        mine = [part.state() for part in self._parts] if self.samples else None
        everyones = all_gather_values(self.run, mine)
        computing = next((index for index, everyone in enumerate(everyones) if everyone is not None), None)
        results: dict[str, float] = {}
        failure: tuple[str, str, str] | None = None
        if computing == (rank() if self.run.mesh is not None else 0):
            try:
                for index, part in enumerate(self._parts):
                    results.update(part.value([everyone[index] for everyone in everyones if everyone is not None]))
            except InputError as error:
                failure = error.asked, error.found, error.fix
        results, failure = all_gather_values(self.run, (results, failure))[computing or 0]
        if failure is not None:
            raise InputError(*failure)
        return results


class _Mean:
    """A metric that is a function of (outputs, batch). Its value is the mean of the function's
    results, weighted by the number of samples in each micro-batch."""

    def __init__(self, name: str, function: Callable[[Any, Batch], Any]) -> None:
        self.name, self.function = name, function
        self.sums: dict[str, float | Tensor] = {}
        self.samples: dict[str, int] = {}

    def add(self, outputs: Any, batch: Batch, samples: int) -> None:
        with _failures_named(self.name):
            found = self.function(outputs, batch)
        for name, value in _numbers(self.name, found):
            weighted = value.detach().double() * samples if isinstance(value, Tensor) else float(value) * samples
            self.sums[name] = self.sums.get(name, 0.0) + weighted
            self.samples[name] = self.samples.get(name, 0) + samples

    def state(self) -> dict[str, tuple[float, int]]:
        return {name: (float(total), self.samples[name]) for name, total in self.sums.items()}

    def value(self, states: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
        names = dict.fromkeys(name for state in states for name in state)
        every = {name: [state[name] for state in states if name in state] for name in names}
        return {
            name: math.fsum(total for total, _ in found) / sum(count for _, count in found)
            for name, found in every.items()
        }


class _Stateful:
    """A metric that is a torchmetrics.Metric. Its states are merged over the devices in the same
    way as torchmetrics' own synchronization does.

    select  a function of (outputs, batch) that returns the arguments of the metric's `update`
    """

    def __init__(self, name: str, metric: Any, select: Callable[[Any, Batch], Any], device: torch.device) -> None:
        self.name, self.select = name, select
        self.metric = metric.clone().to(device)
        self.metric.reset()
        for inner in _metrics_in(self.metric):
            inner.compute_on_cpu = True  # states that grow with the samples do not stay on the device
            inner.distributed_available_fn = _never

    def add(self, outputs: Any, batch: Batch, samples: int) -> None:
        with _failures_named(self.name):
            given = self.select(outputs, batch)
            self.metric.update(*(given if isinstance(given, tuple | list) else (given,)))

    def state(self) -> States:
        self.metric.cpu()
        return [_states_of(inner) for inner in _metrics_in(self.metric)]

    def value(self, states: list[States]) -> dict[str, float]:
        if len(states) > 1:
            for inner, *everyones in zip(_metrics_in(self.metric), *states, strict=True):
                if len({len(tensors) for tensors in everyones}) > 1:
                    raise InputError(
                        f"job: evaluate.metrics.{self.name}",
                        f"{type(inner).__name__} keeps lists of another length on each device",
                        "use a metric whose list states have dist_reduce_fx='cat', or evaluate on one device",
                    )
                inner.dist_sync_fn = _Gathered(list(zip(*everyones, strict=True)))
                inner.distributed_available_fn = _always
        with _failures_named(self.name):
            found = self.metric.compute()
        return {name: float(value) for name, value in _numbers(self.name, found, as_lists=True)}


def _never() -> bool:
    return False


def _always() -> bool:
    return True


class _Gathered:
    """Replaces torchmetrics' function that gathers a tensor from all devices (`dist_sync_fn`),
    because the tensors were gathered before. The n-th call returns the n-th entry of `everyones`:
    the tensors of all devices."""

    def __init__(self, everyones: list[tuple[Tensor, ...]]) -> None:
        self.everyones, self.calls = everyones, 0

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        found = list(self.everyones[self.calls % len(self.everyones)])
        self.calls += 1
        return found


def _states_of(metric: Any) -> list[Tensor]:
    """Return the tensors that torchmetrics would gather to synchronize a metric, in the same order."""
    tensors: list[Tensor] = []

    def record(tensor: Tensor, group: Any = None) -> list[Tensor]:
        tensors.append(tensor)
        return [tensor]

    metric.sync(dist_sync_fn=record, distributed_available=_always)
    metric.unsync()
    return tensors


def _metrics_in(metric: Any) -> list[Any]:
    """Return `metric` and all torchmetrics Metrics nested in it. The order is the same on all
    devices."""
    return [module for module in metric.modules() if isinstance(module, sys.modules["torchmetrics"].Metric)]


def _parts_of(name: str, given: Any, run: Run) -> list[_Mean | _Stateful]:
    """Return the metrics of one entry of the job's `evaluate.metrics`: a list of one metric, or of
    several if the entry is a torchmetrics MetricCollection.

    name   the entry's name. A metric of a collection is named "name.key"
    given  the entry's value: a metric, a pair (metric, function that selects its arguments), a
           class or function that makes one, or the Python name of one of these

    Raises InputError for any other value.
    """
    metric = load_python(given.python) if isinstance(given, PythonSpec) else given
    if isinstance(metric, type) or _takes_nothing(metric):
        with _failures_named(name):
            metric = metric()
    metric, select = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, None)
    library = sys.modules.get("torchmetrics")  # an object of a library that is not imported cannot exist
    if library is not None and isinstance(metric, library.MetricCollection):
        found = metric.items(keep_base=True, copy_state=False)
        return [part for key, inner in found for part in _parts_of(f"{name}.{key}", (inner, select), run)]
    if library is not None and isinstance(metric, library.Metric):
        chosen = select or (lambda outputs, batch: predictions_and_targets(run.objective, outputs, batch))
        return [_Stateful(name, metric, chosen, run.device)]
    if select is not None or not callable(metric):
        raise InputError(
            f"job: evaluate.metrics.{name}",
            f"is a {type(metric).__name__}",
            "give a function metric(outputs, batch), a torchmetrics.Metric, or a pair (Metric, function)",
        )
    return [_Mean(name, metric)]


def _takes_nothing(metric: Any) -> bool:
    """Return whether `metric` is a function without required arguments. Such a function is called
    to make the metric."""
    if not inspect.isfunction(metric):
        return False
    try:
        inspect.signature(metric).bind()
    except TypeError:
        return False
    return True


def _numbers(name: str, result: Any, as_lists: bool = False) -> Iterator[tuple[str, float | Tensor]]:
    """Yield (name, number) for each number in the result of a metric.

    name      the metric's name, which is also that of a single number. A value of a dict is named
              "name.key"
    result    what the metric returned
    as_lists  whether a tensor with several elements is allowed. Its elements are named "name.0",
              "name.1", ...

    Raises InputError if the result contains anything that is not a number.
    """
    if isinstance(result, dict):
        for key, value in result.items():
            yield from _numbers(f"{name}.{key}", value, as_lists)
    elif isinstance(result, Tensor) and result.numel() == 1:
        yield name, result.reshape(())
    elif isinstance(result, Tensor) and as_lists:
        yield from ((f"{name}.{index}", value) for index, value in enumerate(result.flatten()))
    elif isinstance(result, int | float) or (hasattr(result, "__float__") and not isinstance(result, Tensor)):
        yield name, float(result)
    else:
        shape = list(result.shape) if isinstance(result, Tensor) else ""
        raise InputError(
            f"job: evaluate.metrics.{name}",
            f"returned {type(result).__name__}{shape}, not a number",
            "return the mean over the batch's samples, or a dict of such means",
        )


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    with as_input_error(f"job: evaluate.metrics.{name}", "correct the metric"):
        yield


def full_logits(run: Run, logits: Tensor) -> Tensor:
    """Return the logits of all classes, of shape (..., classes). If tensor parallelism shards the
    vocabulary, gather the shards; then all devices of a tensor-parallel group must call this
    function.

    logits  what the model returned on this device, of shape (..., classes of this device)
    """
    get = getattr(run.model, "get_output_embeddings", None)
    if get is None or not run.tp_shards:
        return logits
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    cut = run.tp_shards.get(names.get(id(getattr(get(), "weight", None)), ""))
    if cut is None or cut.shape[0] == logits.shape[-1]:
        return logits
    return cut.unshard(logits.movedim(-1, 0)).movedim(0, -1)


def _with_full_logits(run: Run, outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return full_logits(run, outputs)
    if isinstance(getattr(outputs, "logits", None), Tensor):
        outputs.logits = full_logits(run, outputs.logits)
    return outputs


__all__ = ["EvaluationMetrics", "full_logits"]
