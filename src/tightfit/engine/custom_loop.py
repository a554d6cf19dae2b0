"""Train with a loop that the user writes. `prepare` fits a model and its optimizer to a plan; the
loop calls the model, `backward` and `step`.

tightfit's own loop computes one loss for one model. The user's loop may have several models, losses
and optimizers, as a GAN has, and may differentiate a gradient. Each model is prepared by itself.

    net = tightfit.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), plan)
    for images, labels in batches:
        loss = functional.cross_entropy(net(images), labels)
        net.backward(loss)
        net.step()

As in plain PyTorch, gradients accumulate in `.grad`, also those of a loss of another model.
Data-parallel devices sum the gradients in `step`; with ZeRO-2, each `backward` shards the gradients
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit._torch.fake import active_fake_mode
from tightfit._torch.pytree import tree_map_only
from tightfit.engine.agreement import all_reduce_max
from tightfit.engine.build import apply_methods, kind_of_device, new_run
from tightfit.engine.checkpoint.resume import resume
from tightfit.engine.checkpoint.save import save
from tightfit.engine.failures import naming_failures
from tightfit.engine.step import update
from tightfit.errors import InputError
from tightfit.job import Job, Permission, Train
from tightfit.machine import Machine
from tightfit.methods.zero import ShardedReduction
from tightfit.models.batches import Batch
from tightfit.models.objective import Objective
from tightfit.models.python import GivenModel
from tightfit.optim.functions import ExistingOptimizer
from tightfit.optim.groups import set_learning_rates
from tightfit.plan import Plan, plan_of
from tightfit.rules import check
from tightfit.runtime.run import Run, refuse_unfrozen, wait_for_weights
from tightfit.target_device import TARGET

# The models that `prepare` has fitted to their plans, for the one who watches their memory.
WATCHED: ContextVar[list[Prepared] | None] = ContextVar("watched", default=None)

_LOOP = "the loop is yours"
# What a plan cannot do in a loop of the user's: (whether the plan does it, the field, the reason,
# the smallest change).
_REFUSED: tuple[tuple[Callable[[Plan], bool], str, str, str], ...] = (
    (lambda plan: plan.pp > 1, "pp", "a pipeline's schedule runs the forwards and backwards of a step", "use pp: 1"),
    (
        lambda plan: plan.parameter_server != "none",
        "parameter_server",
        "a server runs the steps of its own loop",
        "use parameter_server: none",
    ),
    (
        lambda plan: plan.zero == 3,
        "zero",
        "zero: 3 gathers a block's parameters for one forward and one backward of the model's own loss",
        "use zero: 2",
    ),
    (
        lambda plan: plan.tp > 1 or plan.cp > 1,
        "tp and cp",
        "they divide a model together with the loss of its task, and the loss is yours",
        "use tp: 1 and cp: 1",
    ),
    (
        lambda plan: plan.update_in_backward,
        "update_in_backward",
        "a step of yours may have several backwards",
        "use update_in_backward: false",
    ),
    (
        lambda plan: "gradients" in plan.offload or "parameters" in plan.offload,
        "offload",
        "gradients and parameters are copied for the one backward of a job's step",
        "use offload: [states], [activations] or both",
    ),
    (lambda plan: plan.chunked_loss is not None, "chunked_loss", "the loss is yours", "leave out chunked_loss"),
    (
        lambda plan: plan.micro_batch is not None,
        "micro_batch",
        f"{_LOOP}: it decides how many samples a forward has",
        "leave out micro_batch",
    ),
    (
        lambda plan: plan.recompute == "sqrt",
        "recompute",
        "recompute: sqrt is checked on a batch of the job's data, and the data are yours",
        "use recompute: full or every-2",
    ),
    (
        lambda plan: plan.compile_mode == "reduce-overhead",
        "compile_mode",
        "a CUDA graph replays one forward and one backward",
        "use compile_mode: default",
    ),
    (
        lambda plan: plan.loader_workers > 0 or plan.pin_memory,
        "loader_workers and pin_memory",
        f"{_LOOP}: it loads the data",
        "leave them out, and set them in your loader",
    ),
)


class _NoData:
    """An empty `Data`: the user's loop reads the samples, not tightfit."""

    samples = None
    sample_items = 1
    ragged = False
    damaged = 0
    tokenizer = None


class Prepared:
    """A model and its optimizer, fitted to a plan for a loop that the user writes. `prepare`
    creates it.

    Call this object as you would call the model: it computes in the plan's precision, and its
    outputs are fp32. Do not prepare a model twice.

    model                  the model. With ZeRO, every device has all parameters between two steps
    optimizer              the optimizer. You may change the learning rates in its `param_groups`,
                           or pass it to torch's learning-rate schedulers
    device                 the device that computes. Inputs are moved to it
    data_rank, data_ranks  each batch has to be divided into `data_ranks` equal parts. This process
                           has to compute the part with index `data_rank`, and its loss is the mean
                           over this part
    run                    the `Run` that holds the prepared model, its optimizer and the plan
    """

    def __init__(self, run: Run, scheduled: bool) -> None:
        self.run = run
        self._scheduled, self._steps = scheduled, 0

    @property
    def model(self) -> nn.Module:
        return self.run.model

    @property
    def optimizer(self) -> Optimizer:
        return self.run.optimizer

    @property
    def device(self) -> torch.device:
        return self.run.device

    @property
    def data_rank(self) -> int:
        return self.run.mesh.data_rank_and_size[0] if self.run.mesh is not None else 0

    @property
    def data_ranks(self) -> int:
        return self.run.mesh.data_rank_and_size[1] if self.run.mesh is not None else 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward with the plan's methods, on inputs that are first moved to the
        device. Return the model's output, in which bf16 and fp16 tensors are cast to fp32 if the
        plan computes in 16 bits."""
        run = self.run

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(run.device, non_blocking=run.plan.non_blocking)

        with naming_failures(run.plan):
            output: Any = run.loss_sum(tree_map_only(Tensor, moved, (args, kwargs)))
        return tree_map_only(Tensor, _widened, output) if run.plan.computes_in_16_bits else output

    def backward(self, loss: Tensor, retain_graph: bool | None = None) -> None:
        """Compute the gradients of `loss` and add them to `.grad` of all parameters that the loss
        depends on, in this model and in others. All processes must call this method.

        loss          a scalar: the mean over this process's samples. This method divides it by the
                      number of data-parallel processes and, in fp16, multiplies it by the loss
                      scale
        retain_graph  as in `torch.Tensor.backward`
        """
        run = self.run
        factor = run.loss_scale.factor if run.loss_scale is not None else 1.0
        if run.reduction is not None:
            run.reduction.begin(False)
        with naming_failures(run.plan):
            (loss * (factor / self.data_ranks)).backward(retain_graph=retain_graph)
        if run.reduction is not None:
            run.reduction.end(False)

    def step(self, clip: float | None = None) -> Tensor | None:
        """Sum the gradients over the data-parallel processes, update the weights, and set the
        gradients to None. In fp16, a step with an overflowed gradient leaves the weights unchanged.
        All processes must call this method.

        clip  the largest gradient norm over all parameters and devices: larger gradients are scaled
              down to it. None: the `clip` of the Train that was passed to `prepare`, if any

        Returns the norm before clipping, a scalar tensor; None if the gradients are not clipped.
        Raises InputError if a parameter was unfrozen after the model was prepared.
        """
        run = self.run
        refuse_unfrozen(run)
        self._reduce()
        if self._scheduled:
            of_groups = run.group_rates and run.group_rates(self._steps)
            set_learning_rates(run.optimizer, run.learning_rate(self._steps), of_groups)
        norm, _ = update(run, clip)
        wait_for_weights(run)
        self._steps += 1
        return norm

    def _reduce(self) -> None:
        """Sum the gradients over the data-parallel processes. ZeRO-2 has reduced some of them
        during backward; then only the rest is reduced here. Afterwards the optimizer can read the
        complete gradients."""
        run, reduction = self.run, self.run.reduction
        if reduction is None:
            return
        if isinstance(reduction, ShardedReduction) and reduction.scatter.has_reduced:
            # a backward of another model's loss may have left gradients in this model
            left = any(parameter.grad is not None for parameter in run.model.parameters())
            if not all_reduce_max(run, int(left)):
                reduction.complete()
                return
        reduction.begin(True)
        reduction.end(True)

    def zero_grad(self) -> None:
        """Set all gradients of the model to None, and drop the gradients that ZeRO has sharded
        already."""
        for parameter in self.run.model.parameters():
            parameter.grad = None
        self.run.optimizer.zero_grad(set_to_none=True)
        if self.run.reduction is not None:
            self.run.reduction.forget()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint into a new folder under `folder`, and return the path of the new
        folder. Each prepared model needs a `folder` of its own. All processes must call this
        method. Raises TightfitError if the checkpoint cannot be written."""
        return save(self.run, folder, self._steps)

    def resume(self, folder: str | Path) -> int:
        """Load the newest checkpoint under `folder`, and return how many steps had been done when
        it was saved. All processes must call this method. Raises InputError if there is no
        checkpoint, or if it is damaged or does not fit."""
        self._steps = resume(self.run, folder)
        return self._steps


def prepare(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Any], Optimizer] | Train,
    plan: Plan | Mapping[str, Any] | None = None,
    *,
    allow: list[Permission] | None = None,
    machine: Machine | str | None = None,
) -> Prepared:
    """Fit a model and its optimizer to a plan, for a loop that the user writes. Return the
    `Prepared` model.

    model      a module, which is changed in place, or a function that creates one
    optimizer  a new torch optimizer of the module's parameters; or a function that gets the
               parameters and creates an optimizer; or a `Train`, which describes one of tightfit's
               optimizers with its learning-rate schedule, `clip` and parameter groups
    plan       the plan, or a mapping of its fields; None: the reference plan, `Plan()`
    allow      which changes of the numerics are permitted, as in a job; None: the default, [bf16]
    machine    a machine or its name, of which only the kind of device is used; None: detect this
               host

    The random number generators are not seeded. With several processes, all start from the weights
    of the first one.

    Raises InputError if the plan cannot work, or if it contains a method that cannot be used in a
    loop of the user, such as a pipeline.
    """
    plan = plan_of(plan)
    if not isinstance(model, nn.Module) and not callable(model):
        raise InputError(
            "prepare: model", f"is of type {type(model).__name__}", "give a module, or a function that creates one"
        )
    for does, field, reason, fix in _REFUSED:
        if does(plan):
            raise InputError(f"plan: {field}", f"cannot be used in a loop of your own: {reason}", fix)
    train = optimizer if isinstance(optimizer, Train) else Train(optimizer=_function_of(optimizer))
    train = train.replace(batch=max(train.batch, plan.data_parallel))  # every device has samples
    job = Job(model=_factory_of(model), data=_NoData(), train=train, allow=allow)
    kind = "cpu" if active_fake_mode() is not None else kind_of_device(machine)
    check(plan, job, TARGET.get() or kind)
    run = new_run(job, plan, kind, Objective(_forward, _one), _NoData(), False, None)  # type: ignore[arg-type]
    run = apply_methods(replace(run, own_loop=True), keeps_data=True)
    if isinstance(optimizer, Optimizer) and run.optimizer is not optimizer:
        raise InputError(
            "prepare: optimizer",
            f"this plan must create the optimizer itself, and your {type(optimizer).__name__} exists already",
            "give a function that creates it, such as lambda parameters: torch.optim.AdamW(parameters), and use "
            "net.optimizer, where net is what prepare returns",
        )
    prepared = Prepared(run, isinstance(optimizer, Train))
    watched = WATCHED.get()
    if watched is not None:
        watched.append(prepared)
    return prepared


def _forward(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for `batch`, a pair (arguments, keyword arguments). A prepared run
    has this function in place of the job's loss, because the user's loop computes the loss."""
    args, kwargs = batch
    return model(*args, **kwargs)


def _one(batch: Batch) -> int:
    return 1


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _factory_of(model: Any) -> Any:
    return GivenModel(model) if isinstance(model, nn.Module) else model


def _function_of(optimizer: Any) -> Callable[[Any], Optimizer]:
    """Return a function that gets the parameters and returns the optimizer. Raises InputError if
    `optimizer` is not a torch optimizer and cannot be called.

    optimizer  a torch optimizer, or a function that gets the parameters and creates one
    """
    if isinstance(optimizer, Optimizer):
        return ExistingOptimizer(optimizer)
    if not callable(optimizer):
        raise InputError(
            "prepare: optimizer",
            f"is of type {type(optimizer).__name__}",
            "give a torch optimizer, a function of the parameters that creates one, or a tightfit.Train",
        )
    return optimizer  # type: ignore[no-any-return]


__all__ = ["WATCHED", "Prepared", "prepare"]
