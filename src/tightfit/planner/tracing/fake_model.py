"""A job's model on fake tensors, and what follows from the model whatever its data: its parameters, the
optimizer's updates, its dataflow graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit._torch.compiler import forget_compilations
from tightfit._torch.fake import FakeTensorMode
from tightfit.cost.entries import EVERYWHERE, Parameter, Update
from tightfit.cost.recorded_step import Operation
from tightfit.distributed.mesh import make_mesh
from tightfit.errors import InputError, Untraceable
from tightfit.job import Job
from tightfit.methods import (
    METHODS,
    context_parallel,
    float8,
    loader,
    materialize,
    optimizer_states,
    recompute,
    tensor_parallel,
)
from tightfit.models import find_blocks, parameter_uses
from tightfit.models.batches import Batch
from tightfit.models.call_model import forward_parameters
from tightfit.models.dataflow import Dataflow
from tightfit.models.objective import Objective, objective_of_job
from tightfit.models.tracing import trace_dataflow
from tightfit.optim.gradient_dtype import widen_gradients
from tightfit.optim.groups import check_matches, first_match, names_of_parameters
from tightfit.optim.muon import head_of
from tightfit.parallel.pipeline import boundaries
from tightfit.plan import Plan
from tightfit.planner.tracing.device_emulation import emulate_device, fake_process_group
from tightfit.planner.tracing.fake_tensors import FakeValues, untraceable_errors
from tightfit.planner.tracing.optimizer_trace import trace_clipping, trace_states, trace_updates
from tightfit.planner.tracing.repeated_blocks import BlockMap, create_few_blocks, create_without_repeated_blocks
from tightfit.planner.tracing.storages import tensor_bytes
from tightfit.runtime.block_groups import check_groups
from tightfit.runtime.method import traced_fields
from tightfit.runtime.run import Run

ALL_BLOCKS_UP_TO = 16  # `try_block_groups` runs all blocks of a model that has at most this number
REMOVED, SKIPPED, EXECUTED = range(3)  # what a trace does with blocks that repeat an earlier block


class FakeModel:
    """A job's model on fake tensors. Each variant of it is created once, and each result is computed once.

    job       what to train. Of its data, only the packing is read
    device    kind of device to predict for: "cpu" or "cuda"
    mode      the fake tensor mode of all tensors: one for all traces, so that they can share the parameters
    repeated  what traces do with blocks that repeat an earlier block: REMOVED; SKIPPED or EXECUTED after the
              model failed without them
    extends_compiled  whether the trace of a model that is compiled as a whole is made of one with few blocks;
              False after it failed
    refused   value of `recompute` that the model does not support -> why
    """

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device = job, device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.repeated = REMOVED
        self.extends_compiled = True
        self.refused: dict[str, InputError] = {}
        self._models: dict[tuple[torch.dtype, bool, bool], tuple[nn.Module, BlockMap]] = {}
        self._tensor_parallel_models: dict[Any, tuple[nn.Module, BlockMap]] = {}
        self._updates: dict[Any, dict[str, Update]] = {}
        self._state_bytes: dict[Any, int] = {}
        self._parameters: dict[Any, tuple[Parameter, ...]] = {}
        self._dataflow: Dataflow | None = None
        self._block_groups_tried = False
        self._block_groups_refused: InputError | None = None
        self._clippings: dict[Any, tuple[Operation, ...]] = {}

    def build_traced(self, plan: Plan) -> tuple[Run, BlockMap]:
        """Build the job's model and apply the plan's methods that decide which operations run
        (those with TRACED_FIELDS). Return (run, BlockMap). The BlockMap says which blocks the model
        lacks because each of them repeats a traced block.

        Call this inside `mode`, the fake tensor mode.
        """
        run, block_map = self.build(plan)
        if plan.compile != "none":  # after the model's methods, which may refuse the plan
            forget_compilations((self.device, plan.tp, plan.cp, plan.sequence_parallel))
        run.model.train()
        widen_gradients(run.model.parameters(), wide=False)  # traces share their parameters
        for method in METHODS:
            is_traced = recompute.changes_trace(plan) if method is recompute else traced_fields([method])
            if is_traced and method is not float8 and method.enabled(plan):
                run = method.apply(run, plan)
        return run, block_map

    def build(self, plan: Plan) -> tuple[Run, BlockMap]:
        """Build the job's model, with 8-bit products if the plan has them; with tensor or context
        parallelism, the part of rank 0. Return (run, BlockMap). The run has no data and no optimizer.
        The BlockMap says which blocks the model lacks because each of them repeats another block.

        Call this inside `mode`, the fake tensor mode.
        """
        objective = self.objective()
        unset, processor = cast(Any, None), torch.device("cpu")
        compiled = plan.compile == "model"
        # with master weights, the gradients of all blocks are widened after the compiled backward
        alike = recompute.treats_blocks_alike(plan) and not plan.master_weights
        whole = compiled and not (self.extends_compiled and alike)
        model, block_map = self.create(materialize.weights_dtype(plan), whole, compiled)
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
        return run, block_map

    def create(self, dtype: torch.dtype, whole: bool, compiled: bool = False) -> tuple[nn.Module, BlockMap]:
        """Return (model, BlockMap): the job's model on fake tensors, which a method may edit, and
        which of its blocks are left out.

        A transformers model is created once for each parameter dtype, because creating a deep model
        takes a second. Later calls copy its modules and share its tensors.

        dtype     dtype of the parameters
        whole     whether to keep all blocks; otherwise the repeated blocks of a transformers model are
                  removed
        compiled  whether to remove only as many that `compiled_depth.py` can extend a trace of the model,
                  and none if it cannot
        """

        def make(model: Any) -> nn.Module:
            made = materialize.create_on_host(model, torch.device("cpu"), dtype)
            loader.check_packing(made, self.job)
            return made

        spec = self.job.model
        if not self.job.of_transformers:
            # no copies and no removed blocks: a user's module may hold state that a copy would
            # share or lose, and may access its blocks in any way
            model = make(spec)
            return model, BlockMap(tuple(path for path, _ in find_blocks(model, self.job.blocks_name)))
        whole = whole or self.repeated != REMOVED
        key = dtype, whole, compiled
        if key not in self._models:
            few = create_few_blocks(spec, make) if compiled and not whole else None
            self._models[key] = few or create_without_repeated_blocks(spec, make, whole or compiled)
        model, block_map = self._models[key]
        held = [
            *model.parameters(),
            *model.buffers(),
            *(value for part in model.modules() for value in vars(part).values()),
        ]
        return copy.deepcopy(model, {id(value): value for value in held if isinstance(value, Tensor)}), block_map

    def sharded(self, plan: Plan) -> tuple[nn.Module, BlockMap]:
        """Return (model, BlockMap): the model as tensor parallelism shards it on rank 0, and which
        of its blocks are left out.

        Use only its parameters: context parallelism, sequence parallelism and compile are not
        applied.
        """
        key = materialize.weights_dtype(plan), plan.tp
        if key not in self._tensor_parallel_models:
            run, block_map = self.build(plan.replace(cp=1, sequence_parallel=False, compile="none", float8="none"))
            self._tensor_parallel_models[key] = run.model, block_map
        return self._tensor_parallel_models[key]

    def dataflow(self, batch: Callable[[], Batch], padded: bool) -> Dataflow:
        """Return the dataflow graph of a forward: which operation computes each tensor from which
        others. It is traced at the first call. Most repeated blocks of a transformers model are
        left out of the trace.

        batch   returns a batch of few samples on fake tensors
        padded  whether batches have padding

        Raises InputError if the model cannot be traced.
        """
        if self._dataflow is None:
            with self.mode, self.values(padded):
                model, block_map = self.create(torch.float32, False)
                boundaries.refuse_encoder_decoder(model)
                blocks = find_blocks(model, self.job.blocks_name)
                total, numbers = self.objective().total, tuple(block_map.numbers)
                self._dataflow = trace_dataflow(model, total, batch(), blocks, numbers)
        return self._dataflow

    def try_block_groups(self, batch: Callable[[], Batch], padded: bool) -> None:
        """Raise InputError if this model's blocks cannot be recomputed in groups, so that training
        with `recompute: sqrt` would be refused. Later calls reuse the result of the first.

        batch, padded  see `dataflow`
        """
        if not self._block_groups_tried:
            self._block_groups_tried = True
            try:
                self._try_block_groups(batch, padded)
            except Untraceable:  # the dry run reports this error
                pass
            except InputError as error:
                self._block_groups_refused = error
        if self._block_groups_refused is not None:
            raise self._block_groups_refused

    def _try_block_groups(self, batch: Callable[[], Batch], padded: bool) -> None:
        with self.mode, self.values(padded):
            model, block_map = self.create(torch.float32, False)
            if len(block_map.names) <= ALL_BLOCKS_UP_TO and block_map.removed:
                model, block_map = self.create(torch.float32, True)
            model.train()
            blocks = [block for _, block in find_blocks(model, self.job.blocks_name)]
            objective, sample = self.objective(), batch()
            groups = [blocks] if block_map.removed else recompute.make_block_groups(blocks)
            with untraceable_errors():
                check_groups(model, groups, lambda: objective.total(model, sample))

    def values(self, padded: bool) -> FakeValues:
        """Return the dispatch mode that answers what the model asks of the values of fake tensors."""
        return FakeValues(padded, self.job.train.expert_imbalance)

    def objective(self) -> Objective:
        return objective_of_job(self.job)

    def parameters(self, plan: Plan) -> tuple[Parameter, ...]:
        """Return the parameters and buffers of one device, in the dtypes in which the plan stores
        them. Only tensor parallelism shards them: sharding by ZeRO or a pipeline is not applied."""
        key = materialize.weights_dtype(plan), plan.tp
        if key not in self._parameters:
            with fake_process_group(plan.tp), self.mode, FakeValues():
                model, block_map = self.sharded(plan)
                self._parameters[key] = describe_parameters(model, self.job.blocks_name, block_map)
        return self._parameters[key]

    def updates(self, plan: Plan, unused: tuple[str, ...] = ()) -> dict[str, Update]:
        """Return parameter name -> the optimizer's update of this parameter (its optimizer states,
        temporary bytes and operations), with the plan's kernels and dtypes of states. Raises
        InputError if a name pattern of the job's parameter groups matches no parameter.

        unused  names of parameters that get no gradient, so that they are not updated
        """
        key = self._key_of_updates(plan), unused
        if key not in self._updates:
            self._updates[key] = self._trace_optimizer(plan, trace_updates, unused)
        return self._updates[key]

    def state_bytes(self, plan: Plan) -> int:
        """Return the bytes of the optimizer states of one device's parameters, as `updates` has them, but
        without recording the updates: a search compares many plans by these bytes alone."""
        key = self._key_of_updates(plan)
        if key not in self._state_bytes:
            known = self._updates.get((key, ())) or self._trace_optimizer(plan, trace_states)
            self._state_bytes[key] = sum(update.state_bytes for update in known.values())
        return self._state_bytes[key]

    def _key_of_updates(self, plan: Plan) -> Any:
        """Return what `updates` depends on."""
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
        can_undo = optimizer_states.keeps_undo_copies(plan, self.device)
        return (plan.has_16_bit_weights, plan.precision == "fp16-true", together, batched, can_undo, *fields)

    def _trace_optimizer(
        self,
        plan: Plan,
        trace: Callable[[nn.Module, Optimizer, bool, bool], dict[str, Update]],
        unused: tuple[str, ...] = (),
    ) -> dict[str, Update]:
        """Return parameter name -> update, as `trace` finds it (`optimizer_trace.py`). unused: see `updates`."""
        values = FakeValues()  # NAdam divides by a number that it has counted
        with fake_process_group(plan.tp), self.mode, values, values.computing(), emulate_device(self.device):
            model, block_map = self.sharded(plan)
            widen_gradients(model.parameters(), plan.master_weights)
            head = head_of(model, self.job.blocks_name) if self.job.train.optimizer == "muon" else None
            with _frozen(model, unused):
                optimizer = optimizer_states.optimizer_of(model, self.job.train, plan, device=self.device, head=head)
            foreach = optimizer_states.uses_foreach(plan, self.device)
            updates = trace(model, optimizer, foreach, plan.precision == "fp16-true")
            return self._in_groups(model, block_map, updates)

    def _in_groups(self, model: nn.Module, block_map: BlockMap, updates: dict[str, Update]) -> dict[str, Update]:
        """Return parameter name -> update for the full-depth model (with all of its blocks), each
        update with the index of its parameter group.

        model      the model, perhaps without its repeated blocks
        block_map  maps the model's blocks to those of the full-depth model
        updates    parameter name -> update, for the parameters of `model`

        If the job has no groups, a removed block's parameters are in the groups of the block that
        it repeats. If it has groups, its name patterns are matched against the names of removed
        blocks, too. Raises InputError if a pattern matches nothing.
        """
        expanded = block_map.expand(updates, lambda update, name, number: update)
        train = self.job.train
        if not train.groups:
            return expanded
        aliases = {names[0]: names for names in names_of_parameters(model).values()}
        every = block_map.expand(aliases, lambda names, name, number: [name])
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
            with fake_process_group(plan.tp), self.mode, FakeValues(), emulate_device(self.device):
                model, block_map = self.sharded(plan)
                widen_gradients(model.parameters(), plan.master_weights)
                trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
                every = block_map.expand(trained, lambda weight, name, number: weight)
                self._clippings[key] = trace_clipping(list(every.values()), scaled, clip)
        return self._clippings[key]


@contextmanager
def _frozen(model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """A context in which the parameters with these names require no gradients."""
    frozen = [parameter for name, parameter in model.named_parameters() if name in names]
    for one in frozen:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in frozen:
            one.requires_grad_()


def describe_parameters(model: nn.Module, blocks: str | None, block_map: BlockMap) -> tuple[Parameter, ...]:
    """Return a description of each parameter and buffer of the full-depth model (with all of its
    blocks).

    model      the model, perhaps without its repeated blocks
    blocks     name of the list that holds the blocks, from the job; None to find it
    block_map  maps the model's blocks to those of the full-depth model
    """
    uses, numbers = parameter_uses(model, find_blocks(model, blocks)), {-1: -1, **dict(enumerate(block_map.numbers))}

    def described(name: str, tensor: Tensor) -> Parameter:
        used = tuple(numbers.get(block, len(block_map.names)) for block in uses[name]) if name in uses else EVERYWHERE
        buffer = not isinstance(tensor, nn.Parameter)
        return Parameter(name, tuple(tensor.shape), tensor_bytes([tensor]), tensor.requires_grad, used, buffer)

    def another(known: Parameter, name: str, number: int) -> Parameter:
        return replace(
            known, name=name, used_by_blocks=known.used_by_blocks if known.used_by_blocks == EVERYWHERE else (number,)
        )

    found: list[Parameter] = []
    for own in (model.named_parameters(), model.named_buffers()):
        found += block_map.expand({name: described(name, tensor) for name, tensor in own}, another).values()
    return tuple(found)


__all__ = ["EXECUTED", "REMOVED", "SKIPPED", "FakeModel", "describe_parameters"]
