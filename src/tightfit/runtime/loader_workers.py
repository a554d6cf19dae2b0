"""Worker processes that prepare micro-batches while the device computes."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tightfit.errors import InputError, TightfitError
from tightfit.models.batches import Batch
from tightfit.plan import Plan

# errors of pickle; torch raises RuntimeError for a tensor that is part of an autograd graph
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


def batches_from_workers(dataset: Dataset[Any], keys: Iterable[Any] | None, plan: Plan) -> Iterator[Batch]:
    """Yield the micro-batches that the plan's worker processes prepare, in the order of `keys`.

    dataset  returns or yields micro-batches
    keys     for each micro-batch, the key with which it is read: dataset[key]; None if the dataset
             is an iterable

    Workers are forked from a fork server, a process that has imported torch and has no threads.
    Forking the training process itself could deadlock, because torch has started threads in it.
    Spawned workers would each import torch again.

    Raises TightfitError if a worker is killed, and InputError if the dataset cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tightfit.data"])
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=plan.loader_workers,
        collate_fn=_identity,
        prefetch_factor=plan.prefetch,
        pin_memory=plan.pin_memory,
        multiprocessing_context=context,
        generator=torch.Generator(),  # else the loader would draw from torch's global generator
    )
    try:
        for batch in _start_workers(loader, plan):
            if isinstance(batch, TightfitError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TightfitError(
            f"{error}\n  a worker is usually killed because host memory or /dev/shm is full\n"
            f"  fix: use fewer loader_workers than {plan.loader_workers}, or less prefetch; if your "
            "script defines the dataset's class, start training under if __name__ == '__main__'"
        ) from error


def _start_workers(loader: DataLoader[Any], plan: Plan) -> Iterator[Any]:
    """Start the loader's workers, and return the iterator over their batches. The workers import
    the user's script only if the dataset cannot be pickled without it. Raises InputError if the
    dataset cannot be pickled.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got pickle error")  # the InputError below says it
        try:
            with _no_script():
                return iter(loader)
        except _NOT_PICKLABLE:
            pass  # the dataset's class may be defined in the script: try again with the script
        try:
            return iter(loader)
        except _NOT_PICKLABLE as error:
            raise InputError(
                f"plan: loader_workers={plan.loader_workers}",
                f"the dataset cannot be sent to a worker ({error})",
                "define the dataset's class at the top level of a module, or use loader_workers: 0",
            ) from None


@contextmanager
def _no_script() -> Iterator[None]:
    """A context in which new worker processes do not import the main script again, so that the
    script needs no `if __name__ == "__main__"`.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _identity(batch: Batch) -> Batch:
    return batch


def result_or_error(make: Callable[[], Any]) -> Any:
    """Call `make` and return its result. If it raises a TightfitError, return this error."""
    try:
        return make()
    except TightfitError as error:
        return error
