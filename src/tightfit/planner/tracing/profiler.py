"""Trace the user's model on fake tensors and build the base ledger from the trace.

The estimator edits this ledger with the `cost` of each method. The methods that decide which
operations run (precision, attention, chunked loss and others with TRACED_FIELDS) are different: the
profiler applies them to the model before the trace, with the same `apply` that training uses. Their
effect is therefore never described twice.

The profiler traces at two micro-batch sizes and interpolates every other size. Example: a buffer
has 6 MiB with 2 samples and 10 MiB with 4. Its size is then 2 MiB + 2 MiB per sample, and 34 MiB
with 16 samples. A model whose sizes are not linear, such as one that compares all samples of a batch
with each other, is traced at every micro-batch size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from tightfit._torch.modules import Convolution
from tightfit._torch.pytree import tree_map_only
from tightfit.cost.entries import Parameter, Update
from tightfit.cost.ledger import Ledger
from tightfit.data import model_input
from tightfit.data.streams import stream_bytes
from tightfit.errors import InputError, Untraceable
from tightfit.job import DataSpec, Job
from tightfit.methods import (
    METHODS,
    float8,
    recompute,
)
from tightfit.models import find_blocks, has_complex_parameters, model_factory, task_of
from tightfit.models.batches import LABEL_COUNT_KEY, Batch, processed_count, sample_count
from tightfit.models.fake_forward import branch_on_values
from tightfit.models.tensors import tensors_in
from tightfit.parallel.context import sequence_chunks
from tightfit.parallel.fsdp import planning
from tightfit.parallel.tensor import sequence_parallel
from tightfit.plan import Plan, plan_of
from tightfit.planner.tracing.batch_scaling import SuperlinearGrowth, fit_batch_scaling
from tightfit.planner.tracing.cache import cache_key, cached, file_name
from tightfit.planner.tracing.compiled_depth import NothingRepeats, with_more_blocks
from tightfit.planner.tracing.device_emulation import emulate_device, fake_process_group
from tightfit.planner.tracing.fake_inputs import example_batch, is_padded, label_share, zeros_like_batch
from tightfit.planner.tracing.fake_model import EXECUTED, SKIPPED, FakeModel, describe_parameters
from tightfit.planner.tracing.fake_tensors import untraceable_errors
from tightfit.planner.tracing.plain_data import RecordedStep
from tightfit.planner.tracing.recorder import record_step
from tightfit.planner.tracing.repeated_blocks import representatives
from tightfit.planner.tracing.shared_work import SharedWork
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.linear_cross_entropy import computed_rows
from tightfit.runtime.method import traced_fields
from tightfit.runtime.micro_batches import EXAMPLE_SAMPLES

# a micro-batch with more chunks of a chunked loss is not traced: it is extrapolated from fewer
# chunks
MAX_TRACED_CHUNKS = 64


@dataclass(frozen=True)
class _TraceKey:
    """The options of a plan by which traces differ, beside the number of samples.

    operations     values of the plan fields that decide which operations run
    filled         whether inputs are padded for float8
    again          value of `recompute`, if it changes the trace of the forward; else "none"
    training       True: forward and backward; False: the forward of an evaluation
    gradients      whether autograd is on in the forward of an evaluation
    is_part        whether the samples do not fill a chunk of the chunked loss
    layout         degrees and kinds of tensor and context parallelism
    narrow         whether weights are gathered in a narrower type
    """

    operations: tuple[Any, ...]
    filled: bool
    again: str
    training: bool
    gradients: bool
    is_part: bool
    layout: tuple[Any, ...]
    narrow: bool


class _RepeatedBlockFailure(Exception):
    """Raised if the model failed because repeated blocks did not run. args[0] says what the next
    trace has to do with them: SKIPPED (they return their input) or EXECUTED (they run)."""


class Profiler:
    """Traces a job's model. Each variant (precision, attention kernel, size of the micro-batch and
    so on) is traced only once, when it is first needed.

    job          what to train
    model        the job's model on fake tensors
    device       kind of device to predict for: "cpu" or "cuda"
    samples      number of samples in the example batch
    tokens       number of tokens in the example batch; of samples, if the model has no tokens
    unit         what throughput counts: "tokens" or "samples"
    shared_work  the traces that other processes make for this one; None: it makes all itself
    superlinear  whether two traces have shown that the model's memory or FLOPs grow faster than the
                 number of samples
    """

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device, self.model = job, device, FakeModel(job, device)
        self.batch, self.sample_s = example_batch(job)
        self.stream_bytes = stream_bytes(job.data, model_input(job)) if isinstance(job.data, DataSpec) else 0.0
        self.samples, self.tokens = sample_count(self.batch), processed_count(self.batch)
        self.padded = is_padded(self.batch)
        self.labelled = label_share(job, self.batch)
        self.unit = self.model.objective().unit
        self.shared_work: SharedWork | None = None
        self.superlinear = False
        self._traced: dict[Any, dict[int, RecordedStep]] = {}  # by the options that need a trace, then by samples
        self._fitted_steps: dict[Any, RecordedStep | None] = {}  # None: not linear, so each size is traced
        self._known_parameters: dict[tuple[Parameter, ...], tuple[Parameter, ...]] = {}
        self._refused_evaluations: dict[_TraceKey, InputError] = {}  # evaluations that cannot be traced -> why

    def with_data_of(self, job: Job) -> Profiler:
        """Return a profiler of `job`, which differs from this profiler's job only in its data.

        If the model is of transformers, both profilers use the same model, optimizer updates and
        dataflow graph. None of them depends on the data.
        """
        other = Profiler(job, self.device)
        other.shared_work = self.shared_work
        if job.of_transformers:
            other.model, other._known_parameters = self.model, self._known_parameters
        return other

    @cached_property
    def is_complex(self) -> bool:
        """Whether the model has complex parameters, which cannot be stored in a narrower type."""
        return has_complex_parameters(self.job.model)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a prediction cannot know of the user's own model, as sentences."""
        if self.job.of_transformers:
            return ()
        found = []
        if line := branch_on_values(model_factory(self.job.model), self.model.objective().total, self._example()):
            found.append(
                f"{line} reads the value of a tensor: predictions take True or 1 for it, and run a loop on it once"
            )
        if self.device == "cuda" and self._has_recurrent_layers():
            found.append("what cuDNN's recurrent layers keep for backward is estimated: it may take more memory")
        return tuple(found)

    def _has_recurrent_layers(self) -> bool:
        return self._has_modules(nn.RNNBase)

    @property
    def may_convolve(self) -> bool:
        """Whether the model may compute convolutions. The functions of a user's own model are not known."""
        return not self.job.of_transformers or self._has_modules(Convolution)

    def _has_modules(self, kind: type[nn.Module]) -> bool:
        with self.model.mode, self.model.values(self.padded):
            return any(isinstance(module, kind) for module in self.model.create(torch.float32, False)[0].modules())

    def ledger(self, plan: Plan) -> Ledger:
        """Return the base ledger of `plan`: the buffers and operations of a step, with the plan's
        precision, kernels and optimizer. The other methods of the plan are not applied.

        The ledger has one micro-batch: all samples that one device processes in a step. Raises
        InputError if the model cannot be traced.
        """
        of_device = plan.share_of(self.job.train.batch)  # samples; `microbatch.cost` divides them
        micro_batch = plan.micro_batch_of(self.job.train.batch)
        recorded, sizes = self.recorded_step(plan, micro_batch)
        # a recomputed block's first forward is that of an evaluation, which has to save nothing
        events = (event for segment in recorded.segments for event in segment.timeline.events)
        retained = sum(buffer.size.at(micro_batch) for buffer, sign in events if buffer.retained and sign > 0)
        may_save = not recompute.enabled(plan) or recompute.changes_trace(plan)
        return Ledger(
            micro_batch=of_device,
            micro_batches=1,
            training=recorded.segments,
            inference=lambda: self._evaluation(plan, micro_batch, sizes, may_save).segments,
            parameters=recorded.parameters,
            blocks=recorded.blocks,
            experts=recorded.experts,
            fixed={"activations": retained} if retained else {},
            updates=self._updates(plan, recorded.unused),
            once_per_step=self.model.clipping(plan),
            batch_bytes=self._batch_bytes(plan),
            sample_s=self.sample_s,
            stream_bytes=self.stream_bytes,
            host_batch=self.device == "cpu",
            dataflow=partial(self.model.dataflow, self._example, self.padded),
            check_block_groups=partial(self.model.try_block_groups, self._example, self.padded),
        )

    def _updates(self, plan: Plan, unused: tuple[str, ...]) -> dict[str, Update]:
        """Return parameter name -> the optimizer's update of it. On one device, the optimizer skips parameters that
        get no gradient, and keeps no states for them."""
        return self.model.updates(plan, unused if plan.devices == 1 else ())

    def _evaluation(self, plan: Plan, micro_batch: int, sizes: tuple[int, int], may_save: bool) -> RecordedStep:
        """Return the recorded forward of an evaluation, which runs without torch.compile.

        micro_batch, sizes  see `recorded_step`
        may_save            whether the forward may save tensors for backward. If so, a model whose
                            forward needs autograd, such as one that computes forces as gradients of an
                            energy, is traced with autograd. What it saves lives until the loss is
                            computed, so more memory is predicted than without autograd; the operations
                            are the same

        Raises Untraceable if the model cannot be traced.
        """
        traced = partial(self.recorded_step, plan.replace(compile="none"), micro_batch, training=False, sizes=sizes)
        try:
            return traced()[0]
        except Untraceable as error:
            if not may_save:
                found = (
                    f"needs autograd in its forward; recompute is predicted from a forward without it ({error.found})"
                )
                raise Untraceable(error.asked, found, "use recompute: none, or train without a prediction") from error
            return traced(gradients=True)[0]

    def _batch_bytes(self, plan: Plan) -> float:
        """Return the bytes of one sample's data on one device. With context parallelism, the device
        has only its chunks of the sequence."""
        if plan.cp == 1:
            return tensor_bytes(tensors_in(self.batch)) / self.samples
        with self.model.mode:
            return tensor_bytes(tensors_in(self._sized(plan, 1)))

    def recorded_step(
        self,
        plan: Plan,
        micro_batch: int,
        training: bool = True,
        sizes: tuple[int, int] | None = None,
        gradients: bool = False,
    ) -> tuple[RecordedStep, tuple[int, int]]:
        """Return the recorded step of one micro-batch, with the plan's precision, attention and
        loss, and the two sizes between which it is interpolated. They are both `micro_batch` if the
        step was traced with this number of samples.

        micro_batch  number of samples. The step is traced with this number, or interpolated from
                     two other numbers that were traced before
        training     True: forward and backward; False: the forward of an evaluation
        sizes        the two sizes to interpolate between. `recompute` looks for the buffers of
                     training in the evaluation by their sizes, so both are interpolated between the
                     same two. None: any
        gradients    whether autograd is on in the forward of an evaluation

        Raises InputError if the model cannot be traced.
        """
        whole = self._samples_per_chunk(plan)
        gathered = planning.uses_fully_shard(plan, self.device)
        plan = plan.replace(  # of formats of the same width, one is traced
            precision=plan.precision.replace("fp16", "bf16").replace("tf32", "fp32"),
            # gathered weights have gradients of their own type, which are widened after they are reduced
            master_weights=plan.master_weights and training and not gathered,
        )
        key = self._trace_key(plan, micro_batch < whole, training, gradients)
        traced = self._traced.setdefault(key, {})
        if sizes is None:
            sizes = self._sizes_to_trace(traced, micro_batch, whole)
        for pair in (sizes, (micro_batch, micro_batch)):
            for samples in pair:
                if samples not in traced:
                    found = self._cached_trace(key, plan, samples, self._sizes_ahead(plan, samples, whole))
                    # one tuple for all traces, by which tables that are computed from it are remembered
                    known = self._known_parameters.setdefault(found.parameters, found.parameters)
                    traced[samples] = replace(found, parameters=known)
            fit = self._fit_two_traces(key, traced, *pair)
            if fit is not None:
                return fit, pair
        raise AssertionError("a trace fits itself")

    def _trace_key(self, plan: Plan, is_part: bool, training: bool, gradients: bool) -> _TraceKey:
        """Return the key of the traces of `plan`: plans that run the same operations have the same. The
        arguments have the names of the key's fields."""
        # whether backward all-gathers a layer's input again, rather than saving it
        regathers = plan.sequence_parallel and training and sequence_parallel.regathers_inputs(plan)
        return _TraceKey(
            operations=tuple(getattr(plan, field) for field in traced_fields(METHODS)),
            filled=float8.enabled(plan) and float8.needs_padding(self.job, plan),
            again=plan.recompute if training and recompute.changes_trace(plan) else "none",
            training=training,
            gradients=gradients,
            is_part=is_part,
            layout=(plan.tp, plan.cp, plan.sequence_parallel, regathers),
            narrow=planning.uses_fully_shard(plan, self.device) and planning.gather_dtype(plan) is not None,
        )

    def _sizes_to_trace(self, traced: dict[int, RecordedStep], micro_batch: int, whole: int) -> tuple[int, int]:
        """Return the two sizes of micro-batches between which a step is interpolated; both are
        `micro_batch` if it is not.

        traced  samples -> the trace with this number of samples
        whole   samples in one chunk of the loss; 0: the loss is not chunked
        """
        if micro_batch in traced:
            return micro_batch, micro_batch
        if micro_batch > MAX_TRACED_CHUNKS * whole > 0:
            first = max(whole, 2)
            pair = sorted({*traced, first, 2 * first})
        else:
            pair = sorted(traced)
        # a trace with 1 sample has other strides and statistics, and one with a single chunk has no
        # loop over chunks, so it is not interpolated from them
        pair = [samples for samples in pair if samples > max(whole, 1)]
        if micro_batch > max(whole, 1) and len(pair) > 1:
            return pair[0], pair[-1]
        return micro_batch, micro_batch

    def _sizes_ahead(self, plan: Plan, samples: int, whole: int) -> dict[int, bool]:
        """Return the other sizes of micro-batches that a search for the largest one will probably need
        traces of: size -> whether it is less than a chunk of the loss. They are the sizes that are
        never interpolated, and the smallest one from which others are.

        samples, whole  samples in the trace that is needed now, and in one chunk of the loss

        There are none for 16-bit weights: the process that has traced a size traces it fast with master
        weights, too, because the compiled code is the same. There are none beside a single sample, which
        is the last that a search tries, and beside the whole batch, which is the first.
        """
        work, chunk = self.shared_work, max(whole, 1)
        if work is None or not work.any_micro_batch or plan.has_16_bit_weights:
            return {}
        if not 1 < samples < plan.share_of(self.job.train.batch):
            return {}
        return {size: size < whole for size in (2 * chunk, chunk, 1) if size != samples}

    def _fit_two_traces(
        self, key: _TraceKey, traced: dict[int, RecordedStep], small: int, large: int
    ) -> RecordedStep | None:
        if (key, small, large) not in self._fitted_steps:
            small_trace, large_trace = traced[small], traced[large]
            try:
                segments = fit_batch_scaling(small_trace.segments, large_trace.segments, (small, large))
            except SuperlinearGrowth:
                segments, self.superlinear = None, True
            self._fitted_steps[key, small, large] = (
                None if segments is None else replace(small_trace, segments=segments)
            )
        return self._fitted_steps[key, small, large]

    def _samples_per_chunk(self, plan: Plan) -> int:
        """Return how many samples fill one chunk of a chunked loss, which computes the logits of
        one chunk of tokens at a time. Return 0 if the plan has no chunked loss.

        A micro-batch with fewer samples has one smaller chunk. A micro-batch with more samples has
        more chunks of the same size.
        """
        if plan.chunked_loss is None:
            return 0
        taken = computed_rows(self.labelled, self.tokens, 1) or self.tokens
        return max(int(-(-plan.chunked_loss // (taken / self.samples))), 1)

    def _cached_trace(self, key: _TraceKey, plan: Plan, samples: int, ahead: dict[int, bool]) -> RecordedStep:
        """Return a trace of one micro-batch. If the same trace was made before, read it from the
        disk cache.

        samples  number of samples in the micro-batch
        ahead    other numbers of samples, which are traced while another process makes this trace:
                 number -> whether it is less than a chunk of the loss
        """
        if key.again in self.model.refused:  # no longer found once the compiled blocks are known
            raise self.model.refused[key.again]
        if key in self._refused_evaluations:
            raise self._refused_evaluations[key]
        try:
            return self._read_or_trace(key, plan, samples, ahead)
        except InputError as error:
            if key.again == "attention":
                self.model.refused[key.again] = error
            if not key.training:
                self._refused_evaluations[key] = error
            raise

    def _read_or_trace(self, key: _TraceKey, plan: Plan, samples: int, ahead: dict[int, bool]) -> RecordedStep:
        name, make = self._named_trace(key, plan, samples)
        if self.shared_work is None or name is None:
            return make()
        others = (self._named_trace(replace(key, is_part=is_part), plan, size) for size, is_part in ahead.items())
        return self.shared_work.once(name, plan.compile != "none", make, others)

    def _named_trace(self, key: _TraceKey, plan: Plan, samples: int) -> tuple[str | None, Callable[[], RecordedStep]]:
        """Return (name, function) of a trace: its name in the disk cache, which is None if it is not
        stored there, and a function that reads the trace or makes it."""
        model = cache_key(self.job)
        if model is None:
            return None, partial(self._trace, plan, samples, key.training, key.gradients)
        shapes = str(tree_map_only(Tensor, lambda tensor: (str(tensor.dtype), tensor.shape[1:]), self.batch))
        kernels = self.device == "cuda" and can_generate_kernels()
        imbalance = self.job.train.expert_imbalance
        what = (model, shapes, self.padded, str(self.labelled), self.device, kernels, key, samples, imbalance)
        return file_name(what), partial(cached, what, partial(self._trace, plan, samples, key.training, key.gradients))

    def _trace(self, plan: Plan, samples: int, training: bool, gradients: bool = False) -> RecordedStep:
        before = self.model.repeated
        while True:
            try:
                return self._trace_once(plan, samples, training, gradients)
            except NothingRepeats:
                self.model.extends_compiled = False
            except _RepeatedBlockFailure as short:
                (self.model.repeated,) = short.args
            except InputError:  # the repeated blocks were not the reason
                self.model.repeated = before
                raise

    def _trace_once(self, plan: Plan, samples: int, training: bool, gradients: bool) -> RecordedStep:
        """Trace one micro-batch of `samples` samples: forward and backward, or only the forward of
        an evaluation if not `training`, with autograd if `gradients`. Raises _RepeatedBlockFailure if
        the model fails while repeated blocks are removed or skipped, and NothingRepeats if the trace of
        a compiled model with few blocks does not show what further blocks add."""
        values = self.model.values(self.padded)
        with fake_process_group(plan.tp * plan.cp), self.model.mode, values, emulate_device(self.device):
            run, block_map = self.model.build_traced(plan)
            name = self.job.blocks_name
            blocks = [block for _, block in find_blocks(run.model, name)]
            parameters, count = describe_parameters(run.model, name, block_map), len(block_map.names)
            if plan.compile == "model":  # one compiled region: calls of its blocks are not visible
                blocks, count = [], 0
            dtype = planning.gather_dtype(plan)
            if planning.uses_fully_shard(plan, self.device) and dtype is not None:  # gathered in a narrow type
                for _, block in find_blocks(run.model, name):
                    for module in planning.split_by_autocast(block)[0]:
                        for key, weight in module.named_parameters(recurse=False):
                            narrow = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
                            module.register_parameter(key, narrow)
            try:
                with untraceable_errors():
                    batch = self._sized(plan, samples)
                    if run.count_labels is not None and self.labelled is not None:
                        batch = {**batch, LABEL_COUNT_KEY: self.labelled}
                    drawn, without_gradient = random.getstate(), set[str]()
                    with values.computing():
                        segments = record_step(
                            run.model,
                            run.loss_sum,
                            batch,
                            blocks,
                            training,
                            block_map.removed if count else None,
                            gradients=gradients,
                            run_all=self.model.repeated == EXECUTED,
                            finds_retained=plan.compile == "none" and not self.job.of_transformers,
                            without_gradient=without_gradient,
                        )
            except InputError as error:
                if block_map.removed:
                    raise _RepeatedBlockFailure(SKIPPED) from error
                if self.model.repeated != EXECUTED and representatives(blocks):
                    raise _RepeatedBlockFailure(EXECUTED) from error
                raise
            if plan.compile == "model" and block_map.removed:
                more = len(block_map.removed)
                segments = with_more_blocks(segments, more, block_map.parameter_of)
                without_gradient |= {block_map.parameter_of(one, n) for one in without_gradient for n in range(more)}
            chooses = not training or values.reads.any_read or random.getstate() != drawn
            unused = () if chooses else tuple(sorted(without_gradient))
            return RecordedStep(segments, parameters, count, tuple(sorted(values.routing.choices)), unused)

    def _sized(self, plan: Plan, samples: int) -> Batch:
        """Return a batch of zeros, shaped like a micro-batch of `samples` samples on one device.
        With context parallelism, it has only the first rank's chunks of the sequences."""
        batch = zeros_like_batch(self.batch, samples)
        if plan.cp == 1:
            return batch
        return sequence_chunks.shard_batch(batch, task_of(self.job.model) == "causal-lm", 0, plan.cp)

    def _example(self) -> Batch:
        """Return a batch of zeros with few samples."""
        return zeros_like_batch(self.batch, min(self.samples, EXAMPLE_SAMPLES))


def profile(job: Job, plan: Plan | Mapping[str, Any] | None = None, device: str = "cpu") -> Ledger:
    """Trace the model of `job`, and return its base ledger: the buffers and operations of a step.

    plan    the plan, or a mapping of its fields. Of its methods, only those that decide which
            operations run are applied. None: the reference plan `Plan()`, with the fields that the
            job's `plan` sets
    device  kind of device to predict for: "cpu" or "cuda"

    Raises InputError if the model cannot be traced.
    """
    return Profiler(job, device).ledger(plan_of(plan, job))


__all__ = ["Profiler", "profile"]
