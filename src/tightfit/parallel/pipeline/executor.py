"""Run one pipeline rank's part of a step: forwards, backwards, and messages to its neighbours.

`PipelineRank` is the `StepExecutor` that `pipeline` puts into a Run. `make_schedule` returns the
order of a rank's actions, and this module runs them. An action is the forward, the backward or the
weight gradients of one micro-batch on one stage.

A micro-batch is in flight between its forward and its backward: the rank keeps what the backward
needs (`_InFlight`). Example: 4 ranks, 8 micro-batches, schedule 1f1b. Rank r first runs 3 - r
forwards (warm-up), then alternates one forward and one backward, then runs the remaining backwards:

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7    at most 4 in flight
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7    at most 3
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7    at most 1

So rank r of p has at most min(p - r, micro-batches) in flight; with gpipe every rank has all 8. If
a stage saves 1.5 GiB per micro-batch, rank 0 holds 6 GiB with 1f1b and 12 GiB with gpipe.

`messages.py` sends and receives the tensors that pass between stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tightfit._torch.modules import own_children
from tightfit.cost.pipeline_schedule import BACKWARD, FORWARD, WEIGHTS, Action, coming, make_schedule
from tightfit.distributed.mesh import Mesh
from tightfit.models.batches import Batch, sample_count
from tightfit.models.dataflow import blocks_out_of_order, sample_shapes
from tightfit.parallel.gradient_buckets import gradients_filled
from tightfit.parallel.pipeline.messages import StageInputs, StageMessages, shape_key
from tightfit.parallel.pipeline.pruned_model import ForwardState, OwnBlock, StageEnd, StubBlock
from tightfit.parallel.pipeline.weight_gradients import DeferredWeightGradients
from tightfit.plan import Plan
from tightfit.runtime.run import DummyMicroBatch, Run, optimizer_weights_named, to_device
from tightfit.target_device import kind_of


@dataclass
class _InFlight:
    """The tensors that the backward of one micro-batch on one stage needs from its forward.

    inputs          the tensors that the stage received. Backward computes their gradients and sends
                    them back
    backward_roots  where the backward begins: [loss] on the last stage; on other stages, the
                    gradient edges of the tensors that were sent
    scale           the factor of the loss in backward; 0 for a dummy micro-batch
    """

    inputs: StageInputs
    backward_roots: list[Any]
    scale: float | Tensor = 1.0


@dataclass(frozen=True)
class RankBlocks:
    """The stages and blocks of one pipeline rank, and the means to run one stage at a time.

    stages         the range of block numbers of each stage of the model
    own_stages     the numbers of this rank's stages
    slots          for each block of the model, (parent module, the block's name in the parent)
    own_blocks     block number -> block, for the blocks that this rank has
    stubs          for each block of the model, the stub that replaces it when it does not run
    forward_state  the state that all stubs and wrapped blocks share, such as which stage runs
    """

    stages: list[range]
    own_stages: list[int]
    slots: list[tuple[nn.Module, str]]
    own_blocks: dict[int, nn.Module]
    stubs: list[StubBlock]
    forward_state: ForwardState

    @cached_property
    def wrappers(self) -> dict[int, OwnBlock]:
        """Return block number -> the wrapper of this block, for the blocks of this rank. While a
        block's stage runs, the wrapper takes the block's place in the model.
        """
        return {number: OwnBlock(number, self.forward_state, block) for number, block in self.own_blocks.items()}

    @property
    def last_stage(self) -> int:
        return len(self.stages) - 1

    @contextmanager
    def running(self, stage: int, receive: Callable[[list[Tensor]], list[Tensor]], batch: Batch) -> Iterator[None]:
        """Inside this context, the model's forward runs only one stage: stubs replace all other
        blocks.

        stage    the number of the stage
        receive  a function that receives the stage's input. It is called once, with those arguments
                 of the stage's first block that the stage before sends (here they are stubs), and
                 returns the received tensors
        batch    the micro-batch; the stubs take their shapes from it
        """
        blocks = self.stages[stage]
        self.forward_state.begin_stage(blocks, receive, sample_count(batch), sample_shapes(batch))
        for number in self.own_blocks:
            parent, child = self.slots[number]
            own_children(parent)[child] = self.wrappers[number] if number in blocks else self.stubs[number]
        try:
            yield
        finally:
            for number, block in self.own_blocks.items():
                parent, child = self.slots[number]
                own_children(parent)[child] = block


class PipelineRank:
    """The `StepExecutor` of a Run that runs one rank's part of a pipeline schedule.

    blocks         this rank's stages and blocks
    tied           names of the weights that the first and the last rank both use (tied embeddings)
    messages       sends tensors to the neighbouring ranks, and receives theirs
    in_flight      (stage, micro-batch) -> what its backward needs
    loss_delay     how many steps after its forward a step's loss becomes known
    copies_of_earlier_ranks
                   names of the weights that an earlier rank has, too. A gradient norm over all
                   devices leaves out this rank's copies, so that each weight counts once
    stale_buffers  names of the buffers whose correct values are on another rank
    deferred       with schedule: zero-bubble, the weight gradients that are computed later; else
                   None
    """

    def __init__(
        self, mesh: Mesh, plan: Plan, blocks: RankBlocks, tied: frozenset[str], stale: frozenset[str] = frozenset()
    ) -> None:
        self.mesh, self.plan, self.blocks, self.tied, self.stale_buffers = mesh, plan, blocks, tied, stale
        self.rank, self.pp_size = mesh.rank("pp"), mesh.size("pp")
        self.device = mesh.device  # not a parameter's device: parameters may be offloaded
        self.messages = StageMessages(mesh, blocks.last_stage)
        self.copies_of_earlier_ranks = tied if self.rank else frozenset()
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.losses: deque[Tensor] = deque()
        self.staleness: list[int] = []
        self.deferred = DeferredWeightGradients() if plan.schedule == "zero-bubble" else None

    loss_delay = 0
    unsynchronized = False
    counted: tuple[int, int, int] | None = None

    def drain(self, run: Run) -> Iterator[None]:
        """Return an empty iterator, because no step is in flight when the next step begins."""
        return iter(())

    def accumulate(self, run: Run, micro_batches: list[Batch], scale: float | Tensor) -> Tensor:
        """Run the forwards and backwards of a step's micro-batches in the order of the schedule.

        scale  the factor of the losses in backward

        Returns the sum of the micro-batches' losses, without the factor, on the last rank, and 0 on
        all other ranks.
        """
        return self._run_schedule(run, micro_batches, scale, self.plan.schedule)

    def run_micro_batch(self, run: Run, batch: Batch, scale: float | Tensor) -> Tensor:
        """Run the forward and backward of a single micro-batch. If the schedule is pipedream, 1f1b
        is used in its place.

        scale  the factor of the loss in backward

        Returns the loss, without the factor, on the last rank, and 0 on all other ranks.
        """
        schedule = "1f1b" if self.plan.schedule == "pipedream" else self.plan.schedule
        return self._run_schedule(run, [batch], scale, schedule)

    def _run_schedule(self, run: Run, micro_batches: list[Batch], scale: float | Tensor, schedule: str) -> Tensor:
        """Run this rank's actions of a schedule, and then all-reduce the gradients of the weights
        that the first and the last rank share.

        scale     the factor of the losses in backward
        schedule  the name of the schedule, which may differ from the plan's (see `run_micro_batch`)

        Returns the sum of the micro-batches' losses, without the factor, on the last rank, and 0 on
        all other ranks.
        """
        table = make_schedule(schedule, self.pp_size, self.plan.virtual_stages, len(micro_batches))
        actions = table[self.rank]
        self.messages.positions = {action: index for own in table for index, action in enumerate(own)}
        total: Tensor | None = None
        completing = WEIGHTS if self.deferred is not None else BACKWARD
        final = max(index for index, action in enumerate(actions) if action.kind == completing)
        stops = kind_of(run.device) != "cpu"
        next_actions = coming(schedule, self.pp_size, self.plan.virtual_stages, len(micro_batches), self.rank, stops)
        for index, (action, after) in enumerate(zip(actions, next_actions, strict=True)):
            self._free_completed_sends(run)
            self.messages.post_receives(run, [(one, micro_batches[one.micro_batch]) for one in (action, *after)])
            batch = micro_batches[action.micro_batch]
            last = action.micro_batch == len(micro_batches) - 1
            if action.kind == FORWARD:
                total = add_losses(total, self.forward(run, action, batch, scale))
                continue
            if action.kind == BACKWARD and self.deferred is not None:
                with self.deferred.group(action.micro_batch):
                    self.backward(run, action, index == final)
                continue
            if run.reduction is not None:
                run.reduction.begin(last)
            if action.kind == BACKWARD:
                self.backward(run, action, index == final)
            else:
                assert self.deferred is not None
                self.deferred.run(action.micro_batch)
            if run.reduction is not None:
                run.reduction.end(index == final)
        self.messages.finish()
        self._all_reduce_tied(run)
        return torch.zeros((), device=run.device) if total is None else total

    @torch.no_grad()
    def evaluate(self, run: Run, batch: Batch) -> Tensor:
        """Run the forward of an evaluation batch through this rank's stages. Return the summed loss
        on the last rank, and 0 on all other ranks.
        """
        total: Tensor | None = None
        self.messages.positions = {Action(FORWARD, stage, 0): stage for stage in range(len(self.blocks.stages))}
        for stage in self.blocks.own_stages:
            total = add_losses(total, self.forward(run, Action(FORWARD, stage, 0), batch, 1.0))
            self.in_flight.clear()
        self.messages.finish()
        return torch.zeros((), device=run.device) if total is None else total

    def forward(self, run: Run, action: Action, batch: Batch, scale: float | Tensor) -> Tensor | None:
        """Run one stage's forward on a micro-batch, and send the next stage its inputs.

        action  the stage and the number of the micro-batch
        scale   the factor of the loss in the later backward

        Returns the loss, without the factor, on the last stage. Returns None on other stages, and
        for a dummy micro-batch. Raises InputError if the model does not call its blocks in order.
        """
        is_real = not isinstance(batch, DummyMicroBatch)
        on_device = to_device(batch if is_real else batch.batch, run)
        key = shape_key(on_device)
        inputs = StageInputs()

        def take(arguments: list[Tensor]) -> list[Tensor]:
            self.messages.receive_inputs(action, key, arguments, inputs)
            return inputs.for_model()

        try:
            with self.blocks.running(action.stage, take, on_device):
                loss = run.loss_sum(on_device)
        except StageEnd as left:
            left.__traceback__ = None
            sent = left.sent
            self.messages.send_outputs(action, key, sent)
            backward_roots = [get_gradient_edge(tensor) for tensor in sent if tensor.requires_grad]
            self.in_flight[action.stage, action.micro_batch] = _InFlight(inputs, backward_roots)
            return None
        if action.stage != self.blocks.last_stage:
            raise blocks_out_of_order()
        self.blocks.forward_state.end_stage()
        self.in_flight[action.stage, action.micro_batch] = _InFlight(inputs, [loss], scale if is_real else 0.0)
        # in fp32, like the 0 of ranks without a loss: one all-reduce adds the sums of all ranks
        return loss.detach().float() if is_real else None

    def backward(self, run: Run, action: Action, final: bool) -> None:
        """Run one stage's backward of a micro-batch, and send the gradients of the stage's inputs
        to the preceding stage.

        action  the stage and the number of the micro-batch
        final   whether this is the rank's last backward of the step. fully_shard (FSDP2) reduces
                gradients after it
        """
        from torch.distributed.fsdp import FSDPModule  # imported late: most runs do not need it

        in_flight = self.in_flight.pop((action.stage, action.micro_batch))
        if isinstance(run.model, FSDPModule):  # StageEnd ended the forward before FSDP's own hooks
            run.model.unshard()
            run.model.set_is_last_backward(final)
        if action.stage == self.blocks.last_stage:
            (in_flight.backward_roots[0] * in_flight.scale).backward()
        else:
            found = zip(in_flight.backward_roots, self.messages.receive_gradients(action), strict=True)
            pairs = [(root, gradient) for root, gradient in found if gradient is not None]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if action.stage:
            self.messages.send_gradients(action, in_flight.inputs)

    def _free_completed_sends(self, run: Run) -> None:
        if kind_of(run.device) != "cpu":
            self.messages.free_completed()

    @torch.no_grad()
    def _all_reduce_tied(self, run: Run) -> None:
        """All-reduce, between the first and the last rank, the gradients of the weights that both
        use (tied embeddings).
        """
        weights = [weight for weight in optimizer_weights_named(run, self.tied) if weight.requires_grad]
        if not weights:
            return
        total = partial(self.mesh.all_reduce_in_group, group=self.mesh.other_groups["ends"])
        with gradients_filled(weights, total):
            for weight in weights:
                assert weight.grad is not None
                total(weight.grad)


def add_losses(total: Tensor | None, loss: Tensor | None) -> Tensor | None:
    """Return the sum of two losses, either of which may be None for no loss. Return None if both
    are None.
    """
    return loss if total is None else total if loss is None else total + loss
