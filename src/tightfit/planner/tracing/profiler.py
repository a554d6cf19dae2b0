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

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tightfit._torch.compiler import forget_compilations
from tightfit._torch.fake import FakeTensorMode
from tightfit._torch.pytree import tree_map_only
from tightfit.cost.entries import EVERYWHERE, Parameter, Update
from tightfit.cost.ledger import Ledger
from tightfit.cost.recorded_step import Operation
from tightfit.data import model_input
from tightfit.data.streams import stream_bytes
from tightfit.distributed.mesh import make_mesh
from tightfit.errors import InputError, Untraceable
from tightfit.job import DataSpec, Job, LossSpec
from tightfit.methods import (
    METHODS,
    context_parallel,
    float8,
    loader,
    loss,
    materialize,
    optimizer_states,
    recompute,
    tensor_parallel,
)
from tightfit.methods.loader import EXAMPLE_SAMPLES
from tightfit.models import find_blocks, has_complex_parameters, load_python, model_factory, parameter_uses, task_of
from tightfit.models.dataflow import Dataflow
from tightfit.models.fake_forward import branch_on_values
from tightfit.models.objective import (
    LABEL_COUNT_KEY,
    Batch,
    Objective,
    forward_parameters,
    objective_of,
    processed_count,
    sample_count,
)
from tightfit.models.tensors import tensors_in
from tightfit.models.tracing import trace_dataflow
from tightfit.optim.gradient_dtype import widen_gradients
from tightfit.optim.groups import check_matches, first_match, names_of_parameters
from tightfit.parallel.context import sequence_chunks
from tightfit.parallel.fsdp import planning
from tightfit.parallel.pipeline import boundaries
from tightfit.parallel.tensor import sequence_parallel
from tightfit.plan import Plan, plan_of
from tightfit.planner.tracing.batch_scaling import SuperlinearGrowth, fit_batch_scaling
from tightfit.planner.tracing.cache import cache_key, cached, file_name
from tightfit.planner.tracing.device_emulation import emulate_device, fake_process_group
from tightfit.planner.tracing.fake_inputs import example_batch, is_padded, label_share, zeros_like_batch
from tightfit.planner.tracing.fake_tensors import FakeValues, untraceable_errors
from tightfit.planner.tracing.optimizer_trace import trace_clipping, trace_updates
from tightfit.planner.tracing.plain_data import RecordedStep
from tightfit.planner.tracing.recorder import record_step
from tightfit.planner.tracing.repeated_blocks import BlockMap, create_without_repeated_blocks, representatives
from tightfit.planner.tracing.shared_work import SharedWork
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.method import traced_fields
from tightfit.runtime.recomputed_segments import check_segments
from tightfit.runtime.run import Run

# a micro-batch with more chunks of a chunked loss is not traced: it is extrapolated from fewer
# chunks
MAX_TRACED_CHUNKS = 64


ALL_BLOCKS_UP_TO = 16  # `try_segments` runs all blocks of a model that has at most this number
REMOVED, SKIPPED, EXECUTED = range(3)  # what a trace does with blocks that repeat an earlier block


SHARED = (  # attributes of a Profiler that are the same for any data
    "_mode", "_models", "_tensor_parallel_models", "_repeated", "_updates", "_parameters", "_known_parameters", "_dataflow",
    "_refused", "_segments_tried", "_segments_refused", "_clippings",
)  # fmt: skip


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
    device       kind of device to predict for: "cpu" or "cuda"
    samples      number of samples in the example batch
    tokens       number of tokens in the example batch; of samples, if the model has no tokens
    unit         what throughput counts: "tokens" or "samples"
    shared_work  the traces that other processes make for this one; None: it makes all itself
    superlinear  whether two traces have shown that the model's memory or FLOPs grow faster than the
                 number of samples
    """

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device = job, device
        self.batch, self.sample_s = example_batch(job)
        self.stream_bytes = stream_bytes(job.data, model_input(job)) if isinstance(job.data, DataSpec) else 0.0
        self.samples, self.tokens = sample_count(self.batch), processed_count(self.batch)
        self.padded = is_padded(self.batch)
        self.labelled = label_share(job, self.batch)
        self.unit = self.objective().unit
        self.shared_work: SharedWork | None = None
        self.superlinear = False
        self._mode = FakeTensorMode()  # one for all traces, so that they can share a model's tensors
        self._models: dict[tuple[torch.dtype, bool], tuple[nn.Module, BlockMap]] = {}
        self._tensor_parallel_models: dict[Any, tuple[nn.Module, BlockMap]] = {}
        self._traced: dict[Any, dict[int, RecordedStep]] = {}  # by the options that need a trace, then by samples
        self._repeated = REMOVED  # SKIPPED or EXECUTED after the model failed
        self._fitted_steps: dict[Any, RecordedStep | None] = {}  # None: not linear, so each size is traced
        self._updates: dict[Any, dict[str, Update]] = {}
        self._parameters: dict[Any, tuple[Parameter, ...]] = {}
        self._known_parameters: dict[tuple[Parameter, ...], tuple[Parameter, ...]] = {}
        self._dataflow: Dataflow | None = None
        self._refused: dict[str, InputError] = {}  # value of recompute that the model does not support -> why
        self._refused_evaluations: dict[_TraceKey, InputError] = {}  # evaluations that cannot be traced -> why
        self._segments_tried = False
        self._segments_refused: InputError | None = None
        self._clippings: dict[Any, tuple[Operation, ...]] = {}

    def with_data_of(self, job: Job) -> Profiler:
        """Return a profiler of `job`, which differs from this profiler's job only in its data.

        If the model is of transformers, both profilers use the same model, optimizer updates and
        dataflow graph. None of them depends on the data.
        """
        other = Profiler(job, self.device)
        other.shared_work = self.shared_work
        for name in SHARED if job.of_transformers else ():
            setattr(other, name, getattr(self, name))
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
        batch = zeros_like_batch(self.batch, min(self.samples, EXAMPLE_SAMPLES))
        if line := branch_on_values(model_factory(self.job.model), self.objective().total, batch):
            found.append(
                f"{line} reads the value of a tensor: predictions take True or 1 for it, and run a loop on it once"
            )
        if self.device == "cuda" and self._has_recurrent_layers():
            found.append("what cuDNN's recurrent layers keep for backward is estimated: it may take more memory")
        return tuple(found)

    def _has_recurrent_layers(self) -> bool:
        with self._mode, self._values():
            return any(isinstance(module, nn.RNNBase) for module in self._model(torch.float32, False)[0].modules())

    def ledger(self, plan: Plan) -> Ledger:
        """Return the base ledger of `plan`: the buffers and operations of a step, with the plan's
        precision, kernels and optimizer. The other methods of the plan are not applied.

        The ledger has one micro-batch: all samples that one device processes in a step. Raises
        InputError if the model cannot be traced.
        """
        of_device = plan.share_of(self.job.train.batch)  # samples; `microbatch.cost` divides them
        micro_batch = plan.micro_batch_of(self.job.train.batch)
        programs, sizes = self.recorded_step(plan, micro_batch)
        # a recomputed block's first forward is that of an evaluation, which has to save nothing
        may_save = not recompute.enabled(plan) or recompute.changes_trace(plan)
        return Ledger(
            micro_batch=of_device,
            micro_batches=1,
            training=programs.segments,
            inference=lambda: self._evaluation(plan, micro_batch, sizes, may_save).segments,
            parameters=programs.parameters,
            blocks=programs.blocks,
            experts=programs.experts,
            updates=self.updates(plan),
            whole_step=self.clipping(plan),
            batch_bytes=self._batch_bytes(plan),
            sample_s=self.sample_s,
            stream_bytes=self.stream_bytes,
            host_batch=self.device == "cpu",
            dataflow=self.dataflow,
            check_segments=self.try_segments,
        )

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

    def dataflow(self) -> Dataflow:
        """Return the dataflow graph of a forward: which operation computes each tensor from which
        others. It is traced at the first call. Most repeated blocks of a transformers model are
        left out of the trace.

        Raises InputError if the model cannot be traced.
        """
        if self._dataflow is None:
            with self._mode, self._values():
                model, depth = self._model(torch.float32, False)
                boundaries.refuse_encoder_decoder(model)
                blocks = find_blocks(model, self.job.blocks_name)
                batch, total = zeros_like_batch(self.batch, min(self.samples, EXAMPLE_SAMPLES)), self.objective().total
                self._dataflow = trace_dataflow(model, total, batch, blocks, tuple(depth.numbers))
        return self._dataflow

    def try_segments(self) -> None:
        """Raise InputError if this model's blocks cannot be recomputed in groups, so that training
        with `recompute: sqrt` would be refused. Later calls reuse the result of the first."""
        if not self._segments_tried:
            self._segments_tried = True
            try:
                self._try_segments()
            except Untraceable:  # the dry run reports this error
                pass
            except InputError as error:
                self._segments_refused = error
        if self._segments_refused is not None:
            raise self._segments_refused

    def _try_segments(self) -> None:
        with self._mode, self._values():
            model, depth = self._model(torch.float32, False)
            if len(depth.names) <= ALL_BLOCKS_UP_TO and depth.removed:
                model, depth = self._model(torch.float32, True)
            model.train()
            blocks = [block for _, block in find_blocks(model, self.job.blocks_name)]
            batch, objective = zeros_like_batch(self.batch, min(self.samples, EXAMPLE_SAMPLES)), self.objective()
            segments = [blocks] if depth.removed else recompute.make_segments(blocks)
            with untraceable_errors():
                check_segments(model, segments, lambda: objective.total(model, batch))

    def _batch_bytes(self, plan: Plan) -> float:
        """Return the bytes of one sample's data on one device. With context parallelism, the device
        has only its chunks of the sequence."""
        if plan.cp == 1:
            return tensor_bytes(tensors_in(self.batch)) / self.samples
        with self._mode:
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
            one, other = traced[small], traced[large]
            try:
                segments = fit_batch_scaling(one.segments, other.segments, (small, large))
            except SuperlinearGrowth:
                segments, self.superlinear = None, True
            self._fitted_steps[key, small, large] = None if segments is None else replace(one, segments=segments)
        return self._fitted_steps[key, small, large]

    def _samples_per_chunk(self, plan: Plan) -> int:
        """Return how many samples fill one chunk of a chunked loss, which computes the logits of
        one chunk of tokens at a time. Return 0 if the plan has no chunked loss.

        A micro-batch with fewer samples has one smaller chunk. A micro-batch with more samples has
        more chunks of the same size.
        """
        if plan.chunked_loss is None:
            return 0
        taken = loss.computed_rows(self.labelled, self.tokens, 1) or self.tokens
        return max(int(-(-plan.chunked_loss // (taken / self.samples))), 1)

    def _cached_trace(self, key: _TraceKey, plan: Plan, samples: int, ahead: dict[int, bool]) -> RecordedStep:
        """Return a trace of one micro-batch. If the same trace was made before, read it from the
        disk cache.

        samples  number of samples in the micro-batch
        ahead    other numbers of samples, which are traced while another process makes this trace:
                 number -> whether it is less than a chunk of the loss
        """
        if key.again in self._refused:  # no longer found once the compiled blocks are known
            raise self._refused[key.again]
        if key in self._refused_evaluations:
            raise self._refused_evaluations[key]
        try:
            return self._read_or_trace(key, plan, samples, ahead)
        except InputError as error:
            if key.again == "attention":
                self._refused[key.again] = error
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
        before = self._repeated
        while True:
            try:
                return self._trace_once(plan, samples, training, gradients)
            except _RepeatedBlockFailure as short:
                (self._repeated,) = short.args
            except InputError:  # the repeated blocks were not the reason
                self._repeated = before
                raise

    def _trace_once(self, plan: Plan, samples: int, training: bool, gradients: bool) -> RecordedStep:
        """Trace one micro-batch of `samples` samples: forward and backward, or only the forward of
        an evaluation if not `training`, with autograd if `gradients`. Raises _RepeatedBlockFailure if
        the model fails while repeated blocks are removed or skipped."""
        values = self._values()
        with fake_process_group(plan.tp * plan.cp), self._mode, values, emulate_device(self.device):
            run, depth = self._build_traced_run(plan)
            name = self.job.blocks_name
            blocks = [block for _, block in find_blocks(run.model, name)]
            parameters, count = _parameters(run.model, name, depth), len(depth.names)
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
                    segments = record_step(
                        run.model,
                        run.loss_sum,
                        batch,
                        blocks,
                        training,
                        depth.removed,
                        gradients=gradients,
                        run_all=self._repeated == EXECUTED,
                    )
            except InputError as error:
                if depth.removed:
                    raise _RepeatedBlockFailure(SKIPPED) from error
                if self._repeated != EXECUTED and representatives(blocks):
                    raise _RepeatedBlockFailure(EXECUTED) from error
                raise
            return RecordedStep(segments, parameters, count, tuple(sorted(values.routing.choices)))

    def _build_traced_run(self, plan: Plan) -> tuple[Run, BlockMap]:
        """Build the job's model and apply the plan's methods that decide which operations run
        (those with TRACED_FIELDS). Return (run, BlockMap). The BlockMap says which blocks the model
        lacks because each of them repeats a traced block.

        Call this inside `_mode`, the fake tensor mode.
        """
        run, depth = self._build_model(plan)
        if plan.compile != "none":  # after the model's methods, which may refuse the plan
            forget_compilations((self.device, plan.tp, plan.cp, plan.sequence_parallel))
        run.model.train()
        widen_gradients(run.model.parameters(), wide=False)  # traces share their parameters
        for method in METHODS:
            is_traced = recompute.changes_trace(plan) if method is recompute else traced_fields([method])
            if is_traced and method is not float8 and method.enabled(plan):
                run = method.apply(run, plan)
        return run, depth

    def _build_model(self, plan: Plan) -> tuple[Run, BlockMap]:
        """Build the job's model, with 8-bit products if the plan has them; with tensor or context
        parallelism, the part of rank 0. Return (run, BlockMap). The run has no data and no optimizer.
        The BlockMap says which blocks the model lacks because each of them repeats another block.

        Call this inside `_mode`, the fake tensor mode.
        """
        objective = self.objective()
        unset, processor = cast(Any, None), torch.device("cpu")
        model, depth = self._model(materialize.weights_dtype(plan), plan.compile == "model")
        forward_parameters(model)  # before a method replaces the forward
        run = Run(
            self.job,
            plan,
            processor,
            objective,
            model,
            partial(objective.total, model),
            unset,
            unset,
            unset,
        )
        if plan.tp * plan.cp > 1:
            run = replace(run, mesh=make_mesh(Plan(tp=plan.tp, cp=plan.cp), processor))
        for method in (context_parallel, float8, tensor_parallel):
            if method.enabled(plan):
                run = method.apply(run, plan)
        return run, depth

    def _model(self, dtype: torch.dtype, whole: bool) -> tuple[nn.Module, BlockMap]:
        """Return (model, BlockMap): the job's model on fake tensors, which a method may edit, and
        which of its blocks are left out.

        A transformers model is created once for each parameter dtype, because creating a deep model
        takes a second. Later calls copy its modules and share its tensors.

        dtype  dtype of the parameters
        whole  whether to keep all blocks; otherwise the repeated blocks of a transformers model are
               removed
        """

        def create(model: Any) -> nn.Module:
            made = materialize.create_on_host(model, torch.device("cpu"), dtype)
            loader.check_packing(made, self.job)
            return made

        spec = self.job.model
        if not self.job.of_transformers:
            # no copies and no removed blocks: a user's module may hold state that a copy would
            # share or lose, and may access its blocks in any way
            model = create(spec)
            return model, BlockMap(tuple(path for path, _ in find_blocks(model, self.job.blocks_name)))
        whole = whole or self._repeated != REMOVED
        if (dtype, whole) not in self._models:
            self._models[dtype, whole] = create_without_repeated_blocks(spec, create, whole)
        model, depth = self._models[dtype, whole]
        held = [
            *model.parameters(),
            *model.buffers(),
            *(value for part in model.modules() for value in vars(part).values()),
        ]
        return copy.deepcopy(model, {id(value): value for value in held if isinstance(value, Tensor)}), depth

    def _tensor_parallel_model(self, plan: Plan) -> tuple[nn.Module, BlockMap]:
        """Return (model, BlockMap): the model as tensor parallelism shards it on rank 0, and which
        of its blocks are left out.

        Use only its parameters: context parallelism, sequence parallelism and compile are not
        applied.
        """
        key = materialize.weights_dtype(plan), plan.tp
        if key not in self._tensor_parallel_models:
            run, depth = self._build_model(plan.replace(cp=1, sequence_parallel=False, compile="none", float8="none"))
            self._tensor_parallel_models[key] = run.model, depth
        return self._tensor_parallel_models[key]

    def _sized(self, plan: Plan, samples: int) -> Batch:
        """Return a batch of zeros, shaped like a micro-batch of `samples` samples on one device.
        With context parallelism, it has only the first rank's chunks of the sequences."""
        batch = zeros_like_batch(self.batch, samples)
        if plan.cp == 1:
            return batch
        return sequence_chunks.shard_batch(batch, task_of(self.job.model) == "causal-lm", 0, plan.cp)

    def _values(self) -> FakeValues:
        return FakeValues(self.padded, self.job.train.expert_imbalance)

    def objective(self) -> Objective:
        given = self.job.loss
        return objective_of(
            load_python(given.python) if isinstance(given, LossSpec) else given, task_of(self.job.model)
        )

    def parameters(self, plan: Plan) -> tuple[Parameter, ...]:
        """Return the parameters and buffers of one device, in the dtypes in which the plan stores
        them. Only tensor parallelism shards them: sharding by ZeRO or a pipeline is not applied."""
        key = materialize.weights_dtype(plan), plan.tp
        if key not in self._parameters:
            with fake_process_group(plan.tp), self._mode, FakeValues():
                model, depth = self._tensor_parallel_model(plan)
                self._parameters[key] = _parameters(model, self.job.blocks_name, depth)
        return self._parameters[key]

    def updates(self, plan: Plan) -> dict[str, Update]:
        """Return parameter name -> the optimizer's update of this parameter (its optimizer states,
        temporary bytes and operations), with the plan's kernels and dtypes of states. Raises
        InputError if a name pattern of the job's parameter groups matches no parameter."""
        fields = (
            plan.states,
            plan.rounding,
            plan.master_weights,
            plan.fused_optimizer,
            plan.update_in_backward,
            plan.tp,
        )
        together = optimizer_states.uses_foreach(plan, self.device)
        batched = optimizer_states.updates_in_batches(plan, self.job.train, self.device)
        undoes = optimizer_states.keeps_undo_copies(plan, self.device)
        key = (plan.has_16_bit_weights, plan.precision == "fp16-true", together, batched, undoes, *fields)
        if key not in self._updates:
            with fake_process_group(plan.tp), self._mode, FakeValues(), emulate_device(self.device):
                model, depth = self._tensor_parallel_model(plan)
                widen_gradients(model.parameters(), plan.master_weights)
                optimizer = optimizer_states.optimizer_of(model, self.job.train, plan, device=self.device)
                updates = trace_updates(model, optimizer, together)
                self._updates[key] = self._in_groups(model, depth, updates)
        return self._updates[key]

    def _in_groups(self, model: nn.Module, depth: BlockMap, updates: dict[str, Update]) -> dict[str, Update]:
        """Return parameter name -> update for the full-depth model (with all of its blocks), each
        update with the index of its parameter group.

        model    the model, perhaps without its repeated blocks
        depth    maps the model's blocks to those of the full-depth model
        updates  parameter name -> update, for the parameters of `model`

        If the job has no groups, a removed block's parameters are in the groups of the block that
        it repeats. If it has groups, its name patterns are matched against the names of removed
        blocks, too. Raises InputError if a pattern matches nothing.
        """
        expanded = depth.expand(updates, lambda update, name, number: update)
        train = self.job.train
        if not train.groups:
            return expanded
        aliases = {names[0]: names for names in names_of_parameters(model).values()}
        every = depth.expand(aliases, lambda names, name, number: [name])
        check_matches(train, every.values())
        keys = {name: (first_match(train, every[name]), update.group) for name, update in expanded.items()}
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
        return {name: replace(update, group=numbers[keys[name]]) for name, update in expanded.items()}

    def clipping(self, plan: Plan) -> tuple[Operation, ...]:
        """Return the operations that run on all gradients before the update: dividing by the loss
        scale (fp16), computing the norm, and clipping."""
        scaled, clip = plan.precision.startswith("fp16"), self.job.train.clip
        key = plan.has_16_bit_weights, plan.master_weights, scaled, clip, plan.tp
        if key not in self._clippings:
            with fake_process_group(plan.tp), self._mode, FakeValues(), emulate_device(self.device):
                model, depth = self._tensor_parallel_model(plan)
                widen_gradients(model.parameters(), plan.master_weights)
                trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
                every = depth.expand(trained, lambda weight, name, number: weight)
                self._clippings[key] = trace_clipping(list(every.values()), scaled, clip)
        return self._clippings[key]


def _parameters(model: nn.Module, blocks: str | None, depth: BlockMap) -> tuple[Parameter, ...]:
    """Return a description of each parameter and buffer of the full-depth model (with all of its
    blocks).

    model   the model, perhaps without its repeated blocks
    blocks  name of the list that holds the blocks, from the job; None to find it
    depth   maps the model's blocks to those of the full-depth model
    """
    places, numbers = parameter_uses(model, find_blocks(model, blocks)), {-1: -1, **dict(enumerate(depth.numbers))}

    def described(name: str, tensor: Tensor) -> Parameter:
        used = tuple(numbers.get(place, len(depth.names)) for place in places[name]) if name in places else EVERYWHERE
        buffer = not isinstance(tensor, nn.Parameter)
        return Parameter(name, tuple(tensor.shape), tensor_bytes([tensor]), tensor.requires_grad, used, buffer)

    def another(known: Parameter, name: str, number: int) -> Parameter:
        return replace(known, name=name, places=known.places if known.places == EVERYWHERE else (number,))

    found: list[Parameter] = []
    for own in (model.named_parameters(), model.named_buffers()):
        found += depth.expand({name: described(name, tensor) for name, tensor in own}, another).values()
    return tuple(found)


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
