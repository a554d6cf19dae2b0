"""Compiles each block, or the whole model with its loss, with torch.compile, which makes training
faster by fusing operations into fewer kernels.

Saves   time: fewer, fused elementwise kernels and less memory traffic; often temporaries as well.
Costs   15 to 35 s or more before the first step, so short runs become slower. The mode
        max-autotune-no-cudagraphs takes several times as long. The mode reduce-overhead (CUDA
        graphs) keeps a step's activations, temporaries and gradients in its own memory pool from
        step to step, so the optimizer update and evaluations need memory in addition.
When    a run of more than a few hundred steps. `block` compiles once for all blocks of one kind.
        reduce-overhead is for small models, whose kernels take less time than their launches.
        Search does not try these two modes by itself.
Order   after the methods whose operations it compiles, such as recompute; before precision, because
        compiled code runs under autocast.
Source  Ansel et al. 2024, "PyTorch 2", ASPLOS.

Compiled code draws other random numbers than PyTorch's eager kernels, such as for dropout.

Ragged data causes no recompilation: data of varying lengths is compiled with dynamic shapes, and a
short last micro-batch, or an evaluation, runs without the compiler.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tightfit._torch.compiler import (
    allow_compilations,
    guard_hooks,
    is_compiler_error,
    is_compiler_file,
    operation_error,
    when_compiling_ends,
)
from tightfit._torch.fake import active_fake_mode
from tightfit._torch.modules import RunningNorm, call_uncompiled, has_hooks, own_buffers, replace_call
from tightfit._torch.tensors import version_of
from tightfit.capabilities import missing_for_compile
from tightfit.cost.entries import EVERYWHERE, Parameter
from tightfit.cost.ledger import Ledger
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import find_blocks
from tightfit.models.batches import Batch, sample_count
from tightfit.models.call_model import forward_parameters
from tightfit.models.masks import without_needless_masks
from tightfit.plan import Plan
from tightfit.runtime.fake_compiler import fake_backend
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.run import Run
from tightfit.runtime.run_length import length_of

FIELDS = ("compile", "compile_mode")
TRACED_FIELDS = ("compile",)
VARIANTS = ({"compile": "block"}, {"compile": "model"})
BACKEND = "inductor"
# assumed seconds to compile blocks of one kind, before the first step
COMPILE_S = {"cpu": 20.0, "cuda": 30.0}
# assumed factor on the compile time if kernels are autotuned: a guess
AUTOTUNE_FACTOR = 4.0
PAYS_AFTER_STEPS = 200  # steps; in shorter runs, compiling takes more time than it saves
# seconds for each block in addition, with compile: model: measured on 2 processor cores with models of
# 4 and 12 blocks, and assumed for other machines
MODEL_COMPILE_S = 1.0


def enabled(plan: Plan) -> bool:
    return plan.compile != "none"


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Yield the default for `compile`: "block" for a model of transformers, "model" for any other
    model, and "none" if the machine has no compiler that torch.compile needs.

    Yields nothing if the run is too short for compiling to save time.
    """
    if pays_to_compile(job):
        lacking = missing_for_compile(machine)
        regions = "none" if lacking else "block" if job.of_transformers else "model"
        why = "fused kernels: fewer of them, and less memory traffic"
        yield Default("compile", regions, f"torch.compile needs {lacking}" if lacking else why)


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    return {"compile": list(dict.fromkeys([start.compile, "none"]))}


def pays_to_compile(job: Job) -> bool:
    """Return whether a run has at least 200 steps, so that compiling saves more time than it takes.
    Return True if the number of steps is not known.
    """
    return length_of(job).steps >= PAYS_AFTER_STEPS


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the seconds that compiling
    takes. If the plan uses CUDA graphs, also mark in the ledger that a step's memory is kept from
    step to step.

    The buffers and kernels of compiled code are in the ledger already, because the model was traced
    with the compiler on fake tensors. Not predicted: the time that a CUDA graph saves on launches,
    and the gain from autotuned kernels.
    """
    more = MODEL_COMPILE_S * _count_of_blocks(ledger.parameters) if plan.compile == "model" else 0.0
    times = AUTOTUNE_FACTOR if plan.compile_mode == "max-autotune-no-cudagraphs" else 1.0
    graphed = plan.compile_mode == "reduce-overhead"
    compile_s = ledger.compile_s + times * (COMPILE_S[machine.device] + more)
    return replace(ledger, compile_s=compile_s, uses_cuda_graphs=graphed)


def _count_of_blocks(parameters: tuple[Parameter, ...]) -> int:
    """Return the number of blocks that have parameters, counting what comes after them as one more.
    The trace of a model that is compiled as a whole has no blocks of its own."""
    blocks = {
        block
        for parameter in parameters
        if parameter.used_by_blocks != EVERYWHERE
        for block in parameter.used_by_blocks
        if block >= 0
    }
    return len(blocks)


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with compiled blocks (compile: block) or with a compiled loss function, which
    calls the model (compile: model).

    Raises InputError for compile: block if the model has no repeated blocks, and for CUDA graphs
    (compile_mode: reduce-overhead) if the data's lengths vary.
    """
    backend = BACKEND if active_fake_mode() is None else fake_backend()
    mode = None if plan.compile_mode == "default" or active_fake_mode() is not None else plan.compile_mode
    graphed = mode == "reduce-overhead"
    dynamic = active_fake_mode() is None and run.data.ragged
    if graphed and dynamic:
        raise InputError(
            "plan: compile_mode=reduce-overhead",
            "the data's lengths vary, and a CUDA graph has fixed shapes",
            "use compile_mode: default",
        )
    any_size = active_fake_mode() is not None or run.own_loop
    full = None if any_size else plan.micro_batch_of(run.job.train.batch)
    if any(map(has_hooks, run.model.modules())):  # which another module of the same class may not have
        guard_hooks()
    blocks = find_blocks(run.model, run.job.blocks_name) if plan.compile == "block" else []
    if active_fake_mode() is None:
        kinds = {tuple(parameter.shape for parameter in block.parameters()) for _, block in blocks}
        allow_compilations(2 * max(len(kinds), 1))  # of blocks of one class that differ, each for two shapes of inputs
        when_compiling_ends(_warn_of_limit)
    if plan.compile == "block":
        if not blocks:
            raise InputError(
                "plan: compile=block", f"{type(run.model).__name__} has no repeated blocks", "use compile: model"
            )
        for _, block in blocks:
            _compile_block(block, dynamic=dynamic, backend=backend, mode=mode)
        compiled = run.loss_sum
    else:
        forward_parameters(run.model)
        compiled = without_needless_masks(_compile_loss(run, dynamic=dynamic, backend=backend, mode=mode), run.model)
    compiled = with_cuda_graph(compiled) if graphed else compiled
    if plan.recompute != "none" and active_fake_mode() is None:
        compiled = refusing_buffer_changes(compiled, run.model, run.job.blocks_name)
    return replace(run, loss_sum=only_full_batches(compiled, run.loss_sum, full))


def _warn_of_limit(limit: int, function: str) -> None:
    warnings.warn(
        f"torch.compile has compiled {function} {limit} times, because its inputs or what it reads change, and runs it "
        "uncompiled from now on; compile: none avoids the compilations",
        TightfitWarning,
        stacklevel=2,
    )


def _compile_loss(run: Run, **options: Any) -> Callable[[Batch], Tensor]:
    """Return the compiled loss function of a run. options: those of torch.compile.

    Of a loss that cannot be compiled as a whole, only the part is compiled that can be. The compiler would
    find the same part by itself, but trace the model again at every function that contains another part.
    """
    if run.objective.compile is None:
        return torch.compile(run.loss_sum, **options)
    run.objective.compile(**options)
    return run.loss_sum


def _compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block in place. options: those of torch.compile.

    torch's compiler skips functions of torch.nn unless another function calls them. So a block that is a
    Sequential or a layer of torch.nn is called by one.
    """
    if "forward" in vars(block) or not type(block).forward.__module__.startswith("torch.nn."):
        block.compile(**options)
        return
    replace_call(block, partial(torch.compile(call_uncompiled, **options), block))


@contextmanager
def naming_compiler_failures(plan: Plan) -> Iterator[None]:
    """A context that turns an error of torch's compiler, or of the code that it generated, into an
    InputError that says that torch.compile fails on this model, and one of a forward that does not take the
    samples' fields into an InputError that says so. Other errors are not changed.

    Use it around a first forward and backward, because torch compiles the backward when it first
    runs.
    """
    try:
        yield
    except TypeError as error:  # compiled code calls forward without the check of `call_by_name`
        if plan.compile != "model" or "forward() " not in str(error):
            raise
        raise InputError(
            "data",
            f"the model's forward does not take the fields of the samples ({error})",
            "name the fields as forward names its arguments, or let samples be (input, target)",
        ) from error
    except RuntimeError as error:
        from_elsewhere = any(word in str(error).lower() for word in ("memory", "gloo", "nccl", "connection"))
        if plan.compile == "none" or from_elsewhere or not _is_compiler_error(error):
            raise
        said = operation_error(error)
        if said is not None:
            raise InputError(
                f"plan: compile={plan.compile}",
                f"an operation of the model fails on its inputs while it is compiled ({said})",
                "use compile: none; if the model fails then, too, the error names the line that the data does not suit",
            ) from error
        inner = getattr(error, "inner_exception", error)  # torch.compile wraps the original error
        message = next((line.strip() for line in str(inner).splitlines() if line.strip()), "no message")
        raise InputError(
            f"plan: compile={plan.compile}",
            f"torch.compile fails on this model ({type(inner).__name__}: {message})",
            "use compile: none",
        ) from error


def _is_compiler_error(error: RuntimeError) -> bool:
    if is_compiler_error(error):
        return True
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(map(is_compiler_file, frames))


def refusing_buffer_changes(
    compiled: Callable[[Batch], Tensor], model: nn.Module, name: str | None
) -> Callable[[Batch], Tensor]:
    """Return a loss function that calls `compiled`, and raises InputError if a block changes one of
    its buffers.

    Such a block cannot be both compiled and recomputed, because its recomputation would change the
    buffer a second time. Running statistics of norms are allowed, because the compiler handles
    them. The first call compares the values of the buffers, and later ones count how often they were written.

    compiled  the compiled loss function: batch -> sum of the losses
    name      name of the list of blocks in the model; None: it is found automatically
    """
    held = [
        (f"{path}.{inner}.{key}".replace("..", "."), module, key)
        for path, block in find_blocks(model, name)
        for inner, module in block.named_modules()
        if not isinstance(module, RunningNorm)
        for key, _ in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    compared: list[bool] | None = None  # for each buffer, whether its values are compared in each call

    def loss_sum(batch: Batch) -> Tensor:
        nonlocal compared
        buffers = [cast(Tensor, own_buffers(module)[key]) for _, module, key in held]
        by_value = compared or [compared is None] * len(held)
        before = [
            (version_of(buffer), buffer.clone() if copied else buffer)
            for buffer, copied in zip(buffers, by_value, strict=True)
        ]
        total = compiled(batch)
        after = [cast(Tensor, own_buffers(module)[key]) for _, module, key in held]
        written = [
            now is not buffer or version_of(now) != version
            for now, buffer, (version, _) in zip(after, buffers, before, strict=True)
        ]
        for (path, _, _), now, (_, value), copied, is_written in zip(
            held, after, before, by_value, written, strict=True
        ):
            if (copied and not torch.equal(now, value)) or (is_written and not copied):
                raise InputError(
                    "plan: compile with recompute",
                    f"forward changes the buffer {path}, and its recomputation would change it again",
                    "use compile: none, or recompute: none",
                )
        compared = written if compared is None else compared  # some are written with the same values
        return total

    return loss_sum


def with_cuda_graph(compiled: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Return a loss function that calls `compiled` and copies the loss out of the memory of the
    CUDA graph, because the next replay of the graph overwrites this memory.

    compiled  the compiled loss function: batch -> sum of the losses
    """

    def loss_sum(batch: Batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(batch).clone()

    return loss_sum


def only_full_batches(
    compiled: Callable[[Batch], Tensor], plain: Callable[[Batch], Tensor], full: int | None
) -> Callable[[Batch], Tensor]:
    """Return a loss function that calls `compiled` on full micro-batches in training, and `plain`,
    without the compiler, on shorter micro-batches and in evaluations. This avoids recompilations
    for other shapes.

    compiled, plain  the same loss function with and without compilation: batch -> sum of the losses
    full             number of samples in a full micro-batch; None: a micro-batch of any size counts
                     as full
    """

    def loss_sum(batch: Batch) -> Tensor:
        if torch.is_grad_enabled() and (full is None or sample_count(batch) == full):
            return compiled(batch)
        with torch.compiler.set_stance("force_eager"):
            return plain(batch)

    return loss_sum
