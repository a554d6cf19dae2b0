"""Dry run: execute training steps on fake tensors, with the engine that would train.

The dry run builds the model, the optimizer and everything that the plan adds to them as training
does. It then takes steps on batches of zeros, while a tracker adds up the bytes of all live
storages. Fake tensors have shapes and no memory, so nothing is allocated.

In this package, only this module and `loop_dry_run.py` use the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from tightfit._torch.compiler import forget_compilations
from tightfit._torch.fake import FakeTensorMode
from tightfit._torch.pytree import tree_map_only
from tightfit.engine.build import build
from tightfit.engine.step import Step, accumulate, drain, take_step, update
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Figure, Machine
from tightfit.methods import loader, optimizer_states
from tightfit.models.batches import LABEL_COUNT_KEY, Batch, LabelCount, processed_count, sample_count
from tightfit.models.tensors import tensors_in
from tightfit.optim.gradient_dtype import empty_gradient
from tightfit.parallel.fsdp import planning
from tightfit.plan import Plan, plan_of
from tightfit.planner.tracing.cache import cache_key, cached_number, file_name
from tightfit.planner.tracing.device_emulation import emulate_device, fake_process_group
from tightfit.planner.tracing.fake_inputs import example_batch, is_padded, label_share, zeros_like_batch
from tightfit.planner.tracing.fake_tensors import FakeValues, untraceable_errors
from tightfit.planner.tracing.live_storages import Peak, track_peak
from tightfit.planner.tracing.optimizer_trace import enable_foreach
from tightfit.planner.tracing.repeated_blocks import skip_repeated_blocks
from tightfit.planner.tracing.shared_work import SharedWork
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.repeated_iterations import iterations_chosen_by, representative_iterations
from tightfit.runtime.run import Run

# micro-batches per step of a dry run. The first one creates the gradients; the second one adds to
# them, as all later ones would
MICRO_BATCHES = 2


def _micro_batch_count(plan: Plan) -> int | None:
    """Return the number of micro-batches that a dry run executes in each step; None for all
    micro-batches of the plan's step.

    Without a pipeline, 2 run. With a pipeline, as many run as are needed to reach the steady state.
    Example: 1f1b over 4 ranks with 1 stage each has at most 4 micro-batches in flight, so a dry run
    has 8. gpipe has all micro-batches in flight, so all of them run.
    """
    if plan.pp == 1:
        return MICRO_BATCHES
    return None if plan.schedule == "gpipe" else 2 * plan.stages


@dataclass(frozen=True)
class DryRunData:
    """Provides the micro-batches of a dry run: zeros with the shapes of the job's samples. It takes
    the place of the `Data` that reads real samples.

    batch     an example batch: the micro-batches have its fields, dtypes and lengths
    job       gives the number of samples in a batch
    plan      gives the size and number of the micro-batches
    labelled  the number of labels that the loss does not ignore; only set for a plan with a chunked
              loss
    ragged, damaged, tokenizer  attributes that the engine reads from every `Data`; a dry run has no
              ragged batches, damaged samples or tokenizer
    """

    batch: Batch
    job: Job
    plan: Plan
    labelled: LabelCount | None = None
    ragged: bool = False
    damaged: int = 0
    tokenizer: Any = None

    @property
    def samples(self) -> int:
        return self.job.train.batch

    @property
    def sample_items(self) -> int:
        return processed_count(self.batch) // sample_count(self.batch)

    def steps(self, consumed: int, until: int | None) -> Iterator[list[Batch]]:
        whole = self.plan.share_of(self.job.train.batch)
        micro = self.plan.micro_batch_of(self.job.train.batch)
        while True:
            yield [
                self._sized(min(micro, whole - begin))
                for begin in list(range(0, whole, micro))[: _micro_batch_count(self.plan)]
            ]

    def held_out(self, samples: int | None) -> Iterator[Batch]:
        yield self._sized(self.plan.micro_batch_of(self.job.train.batch))

    def _sized(self, samples: int) -> Batch:
        batch = zeros_like_batch(self.batch, samples)
        return batch if self.labelled is None else {**batch, LABEL_COUNT_KEY: self.labelled}

    def example(self) -> Batch:
        return self.batch


def without_device_options(plan: Plan) -> Plan:
    """Return the plan without the options that need a real device or would change this process:
    tf32, pinned memory, non-blocking copies, allocator settings and materialization on the device.
    If the plan offloads tensors, the returned plan offloads them to disk instead of to host
    memory."""
    single = plan.replace(precision="fp32") if plan.precision == "tf32" else plan
    return single.replace(pin_memory=False, non_blocking=False, allocator="default", materialize="host").replace(
        **({"offload_to": "disk"} if plan.offload else {})
    )


DRY_RUN_MACHINE = Machine(
    name="dry run",
    device="cpu",  # fake tensors on another device need a torch that was built for it
    memory_bytes=Figure(value=1.0, source="system"),
    host_memory_bytes=Figure(value=1.0, source="system"),
)


def dry_run(
    job: Job, plan: Plan | Mapping[str, Any] | None = None, device: str = "cpu", pipeline_rank: int = 0
) -> Peak:
    """Return the peak memory of a training step on fake tensors: its total bytes and its bytes by
    row. A row is a use of memory, such as parameters or activations.

    The peak is that of the second step, because the first step creates the optimizer states.

    job            what to train
    plan           the plan, or a mapping of its fields; None: the reference plan `Plan()`, with the
                   fields that the job's `plan` sets
    device         kind of device, "cpu" or "cuda"; fake tensors behave as on a device of this kind
    pipeline_rank  the pipeline rank whose peak is returned; 0 without a pipeline

    A region that the plan compiles runs as the kernels that the compiler is expected to generate:
    see `runtime/fake_compiler.py`.

    Raises Untraceable if the model needs the values of tensors. Raises InputError if the engine
    refuses the plan.
    """
    plan = plan_of(plan, job)
    ahead = loader.overlaps_uploads(plan, device)
    plan = without_device_options(plan)
    # the number of steps in an epoch is unknown here, and may seem smaller than the warm-up
    job = job.replace(train=job.train.replace(warmup=0))
    if plan.compile != "none":
        single = (device, plan.tp, plan.cp, plan.sequence_parallel)
        forget_compilations(single if plan.devices == 1 else plan)
    batch = example_batch(job)[0]
    shapes = DryRunData(batch, job, plan, None if plan.chunked_loss is None else label_share(job, batch))
    values = FakeValues(is_padded(shapes.batch), job.train.expert_imbalance)
    first = (
        pipeline_rank * plan.devices // plan.pp + plan.servers
    )  # the first global rank with these pipeline stages; parameter servers have the lowest ranks
    gathers = planning.uses_fully_shard(plan, device)
    with (
        fake_process_group(plan.devices, first, gathers),
        FakeTensorMode(allow_non_fake_inputs=True),
        values,
        emulate_device(device),
    ):
        run = build(job, plan, DRY_RUN_MACHINE, shapes)
        if optimizer_states.uses_foreach(plan, device):
            enable_foreach(run.optimizer)
        steps = run.data.steps(0, None)
        first_batches = next(steps)[:1]
        with untraceable_errors(), iterations_chosen_by(representative_iterations):
            with values.computing():
                _first_step(run, first_batches, values)
            micro_batches = next(steps)
            several = range(2 * run.executor.loss_delay if run.executor is not None else 0)

            def take(watched: Run) -> Step:
                for step in several:  # pipedream: until no more micro-batches get in flight
                    take_step(watched, micro_batches, step)
                return take_step(watched, micro_batches, len(several))

            with values.computing():
                peak = track_peak(run, micro_batches, take)[1]
    return _with_other_batches(peak, shapes, device, ahead)


def dry_run_bytes(
    job: Job, plan: Plan, device: str, pipeline_rank: int = 0, shared_work: SharedWork | None = None
) -> int:
    """Return the total bytes of `dry_run`. They are read from the disk cache if the same dry run was
    made before, of a job without code of the user's own.

    shared_work  the results that other processes make for this one; None: this process makes it

    Other arguments and errors: see `dry_run`.
    """

    def make() -> int:
        return dry_run(job, plan, device, pipeline_rank).total

    model = cache_key(job)
    if model is None or job.train.uses_function("optimizer") or job.train.uses_function("schedule"):
        return make()
    batch = example_batch(job)[0]
    shapes = str(tree_map_only(Tensor, lambda tensor: (str(tensor.dtype), tensor.shape), batch))
    kernels = device == "cuda" and can_generate_kernels()
    spec = job.data.content() if isinstance(job.data, DataSpec) else None
    data = spec, shapes, is_padded(batch), str(label_share(job, batch))
    settings = job.train.content(), sorted(job.allowed), plan.content()
    key = "dry run", model, settings, data, device, kernels, pipeline_rank
    find = partial(cached_number, key, make)
    return int(find() if shared_work is None else shared_work.once(file_name(key), True, find))


def _first_step(run: Run, micro_batches: list[Batch], values: FakeValues) -> None:
    """Take the first step of a dry run. It creates the optimizer states and compiles the model if
    the plan says so.

    If possible, only three blocks of each kind of repeated block run, to save time. Parameters of
    the skipped blocks get empty tensors as gradients. So do all parameters without gradients, if the model has read
    unknown or random values, with which it may choose the parameters that it uses.
    """
    if run.reduction is not None or run.executor is not None or run.plan.update_in_backward:
        take_step(run, micro_batches, 0)
        if run.executor is not None:
            drain(run)
        return
    blocks = planning.model_blocks(run)
    apart = run.plan.compile != "model" and run.plan.recompute != "sqrt"  # whether each block is called on its own
    drawn = random.getstate()
    try:
        with untraceable_errors(), skip_repeated_blocks(blocks if apart else []) as called:
            accumulate(run, micro_batches, lambda: 1)
    except InputError:  # perhaps the model uses something that a skipped block would have set
        called = set()
        accumulate(run, micro_batches, lambda: 1)
    chooses = values.reads.any_read or random.getstate() != drawn  # other parameters in other steps
    skipped = {weight for block in called for weight in block.parameters()}
    for weight in (weight for group in run.optimizer.param_groups for weight in group["params"]):
        if weight.grad is None and (chooses or weight in skipped):
            weight.grad = empty_gradient(weight)
    update(run)


def _with_other_batches(peak: Peak, shapes: DryRunData, device: str, ahead: bool) -> Peak:
    """Return `peak`, the peak that a dry run found, plus the bytes of inputs that only training has
    in device memory. A dry run has fewer inputs in memory, because it runs only some of a step's
    micro-batches.

    On a CPU, training has the inputs of all micro-batches of a step in memory. On a GPU, it has
    only those of the current micro-batch, and with `ahead` also those of the next one.

    shapes  the micro-batches of the dry run
    device  kind of device, "cpu" or "cuda"
    ahead   whether the plan copies the next micro-batch to the device during the current one
    """
    whole = shapes.plan.share_of(shapes.job.train.batch)
    micro = shapes.plan.micro_batch_of(shapes.job.train.batch)
    in_memory = whole if device == "cpu" else micro * (1 + ahead)
    more = (
        tensor_bytes(tensors_in(shapes.batch))
        // (sample_count(shapes.batch) * shapes.plan.cp)
        * (in_memory - min(micro * (_micro_batch_count(shapes.plan) or whole), whole))
    )
    return replace(peak, total=peak.total + more, rows={**peak.rows, "activations": peak.rows["activations"] + more})
