"""Datasets of many tensors reach workers in one block of shared memory, whatever the start method."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tightfit
from tightfit.data.shared_memory import MAX_SHARED_SINGLY, pack_dataset, unpack_dataset
from tightfit.data.user_samples import DatasetObject


def pairs(count: int) -> list[tuple[Tensor, int]]:
    return [(torch.full((4,), float(number)), number % 2) for number in range(count)]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def losses(data: Any, **plan: Any) -> list[float]:
    job = tightfit.Job(model=linear, data=data, train={"batch": 8, "steps": 3, "trackers": []})
    return [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan(**plan)))]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("count", [256, 20_000])
def test_workers_prepare_a_list_of_many_tensors(count: int) -> None:
    data = pairs(count)
    assert losses(data, loader_workers=2) == losses(data)


def _answer(given: DatasetObject, queue: Any) -> None:
    queue.put(float(sum(sample.sum() for sample, _ in given.dataset)))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # of fork, from Python 3.12 on
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_every_start_method_receive_the_dataset(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_answer, args=(DatasetObject(pairs(600)), queue))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert queue.get() == 4 * sum(range(600))


class Labelled(Tensor):
    """A tensor subclass like those of torchvision."""


def test_packed_samples_equal_the_originals() -> None:
    base = torch.arange(40).view(5, 8)
    kinds = [base.t(), base[2, 3:5], torch.tensor(3), torch.zeros(0, 3), torch.ones(2, dtype=torch.bfloat16)]
    kinds += [torch.tensor([1 + 2j]), nn.Parameter(torch.ones(3)).data.requires_grad_()]
    many = [torch.full((number % 7,), number, dtype=torch.int16) for number in range(2 * MAX_SHARED_SINGLY)]
    array = np.arange(3)
    for filler in ([], many):
        content, storages, offsets = pack_dataset({"kinds": kinds, "filler": filler, "array": array})
        assert (offsets is not None) == bool(filler)
        found = unpack_dataset(content, storages, offsets)
        for one, other in zip([*kinds, *filler], [*found["kinds"], *found["filler"]], strict=True):
            assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            assert torch.equal(one, other)
        assert found["kinds"][0].untyped_storage().data_ptr() == found["kinds"][1].untyped_storage().data_ptr()
        assert (found["array"] == array).all()


def test_subclasses_of_tensors_are_packed_too() -> None:
    given = [torch.full((3,), float(number)).as_subclass(Labelled) for number in range(2 * MAX_SHARED_SINGLY)]
    content, storages, offsets = pack_dataset(given)
    assert len(storages) == 1
    found = unpack_dataset(content, storages, offsets)
    assert all(type(one) is Labelled and torch.equal(one, other) for one, other in zip(found, given, strict=True))


def test_a_few_tensors_are_shared_unpacked() -> None:
    whole = torch.arange(6.0)
    _, storages, offsets = pack_dataset([whole, whole[2:]])
    assert offsets is None
    assert [storage.data_ptr() for storage in storages] == [whole.data_ptr()]


def test_samples_with_a_graph_are_refused() -> None:
    data = [(torch.ones(4, requires_grad=True) * 2, 0) for _ in range(8)]
    with pytest.raises(tightfit.InputError, match=r"cannot be sent to a worker(.|\n)*detach"):
        losses(data, loader_workers=1)


def test_a_dataset_survives_plain_pickling() -> None:
    assert pickle.loads(pickle.dumps(DatasetObject(pairs(3)))).dataset[2][1] == 0
