"""Name the cause of some obscure errors of a forward or backward: torch's compiler, sharded
parameters, or layers that tensor parallelism has divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tightfit._torch.fake import DataDependentOutputException, DynamicOutputShapeException, active_fake_mode
from tightfit.errors import InputError
from tightfit.methods.compile import naming_compiler_failures
from tightfit.models.dataflow import describe_line, innermost_model_line
from tightfit.parallel.fsdp.planning import naming_sharded_use
from tightfit.plan import Plan


@contextmanager
def naming_failures(plan: Plan) -> Iterator[None]:
    """A context for a forward and a backward, which turns some errors of torch into an InputError that
    says what is wrong with the plan, the model or the data. Other errors are not changed."""
    with (
        _naming_fake_tensors(),
        _naming_divided_layers(plan),
        _naming_single_samples(plan),
        naming_compiler_failures(plan),
        naming_sharded_use(plan),
    ):
        yield


@contextmanager
def _naming_fake_tensors() -> Iterator[None]:
    """A context that explains a failure on fake tensors in a training: the user's code holds on to a model that
    was created without values, to find out what it does."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if active_fake_mode() is not None:
            raise
        raise InputError(
            "job: loss",
            "computes with tensors without values: it reads a model from a variable of its own, and the model's function was "
            "called again to find out what the model does",
            "let the loss read the model that it is given: tightfit.Objective(total, count), with total(model, batch)",
        ) from error


@contextmanager
def _naming_single_samples(plan: Plan) -> Iterator[None]:
    """A context that explains a batch norm that gets a single sample, because the plan divides the batch."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error) or (
            plan.micro_batch is None and plan.devices == 1
        ):
            raise
        raise InputError(
            f"plan: micro_batch={plan.micro_batch}",
            "a batch norm gets a single sample, of which it has no statistics",
            "use a micro_batch that divides the samples of a device, or a larger one",
        ) from error


# parts of torch's messages about shapes that do not match
_SHAPES = ("must match", "shape", "size", "same reduction dim", "dimension")
_OTHERS = ("memory", "gloo", "nccl", "collective", "connection")  # and of other failures


@contextmanager
def _naming_divided_layers(plan: Plan) -> Iterator[None]:
    """A context that explains a failure about shapes under tensor parallelism: the model's own code
    computes with the numbers of heads or features of a whole layer, of which a device has a part."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        line = innermost_model_line(error)
        others = any(word in message.lower() for word in _OTHERS)
        if plan.tp == 1 or line is None or others or not any(word in message for word in _SHAPES):
            raise
        raise InputError(
            f"plan: tp={plan.tp}",
            f"{describe_line(line)} fails where a device has only its part of the heads or features ({message})",
            "use tp: 1; if that fails, too, the data does not suit the model",
        ) from error


__all__ = ["naming_failures"]
