"""Users' own datasets: their types, how their samples become batches, and their randomness."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tightfit
from tests.data.conftest import make_job
from tightfit.data import UserStream, open_samples
from tightfit.errors import InputError, TightfitWarning


def opened(data: Any, model: Any = "images", **job: Any) -> Any:
    return open_samples(make_job(model, data, **job))


def at(samples: Any, indices: list[int], epoch: int = 0) -> Any:
    return samples.batch(np.array(indices), np.full(len(indices), epoch))


Pair = namedtuple("Pair", ["x", "y"])


def test_every_kind_of_sample_becomes_a_batch() -> None:
    x, y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 2, 3])
    pairs = list(zip(x, y, strict=True))
    arrays, lists = [[a.numpy(), int(b)] for a, b in pairs], [(a.tolist(), np.int64(b)) for a, b in pairs]
    for data in (TensorDataset(x, y), pairs, arrays, lists):
        batch = at(opened(data), [3, 1])
        assert torch.equal(batch[0].float(), x[[3, 1]])
        assert torch.equal(batch[1], y[[3, 1]])
    named = at(opened([Pair(a, b) for a, b in zip(x, y, strict=True)]), [2])
    assert torch.equal(named.x[0], x[2])
    keyed = at(opened([{"pixel_values": a, "labels": int(b)} for a, b in zip(x, y, strict=True)]), [0, 2])
    assert torch.equal(keyed["labels"], y[[0, 2]])
    plain = at(opened(list(x), loss=lambda output, batch: output.sum()), [1, 0])
    assert torch.equal(plain, x[[1, 0]])


def test_a_huggingface_dataset_is_used_unchanged() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]})
    samples = opened(rows, "causal-lm")
    assert at(samples, [1, 0])["input_ids"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert samples.sample_items == 3


def test_ragged_rows_are_padded() -> None:
    rows = [{"input_ids": list(range(1, n)), "labels": list(range(1, n))} for n in (4, 6)]
    samples = opened(rows, "causal-lm")
    batch = at(samples, [0, 1])
    assert samples.ragged
    assert samples.sample_items == 5
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100, -100], [1, 2, 3, 4, 5]]
    assert "attention_mask" not in batch
    masked = at(opened(rows, "masked-lm"), [0, 1])
    assert masked["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert not opened([rows[0]] * 2, "causal-lm").ragged


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])


def test_unshifted_labels_give_a_warning_without_a_task() -> None:
    rows = list(Streamed())
    model: Any = lambda: torch.nn.Embedding(4, 4)  # noqa: E731
    with pytest.warns(TightfitWarning, match=r"labels are not shifted: (.|\n)*task: causal-lm} they are shifted"):
        opened(rows, model)
    with pytest.warns(TightfitWarning, match="they are shifted"):
        assert opened(Streamed(), model).sample_items == 3
    for task in ("causal-lm", "classification"):  # and any other warning is an error here
        opened(rows, {"python": "own.py:model", "task": task})
    opened(rows, model, loss=lambda output, batch: output.sum())
    opened([{"input_ids": [1, 2, 3], "labels": 1}], model)


def test_the_error_for_missing_labels_names_the_task_s_form() -> None:
    rows = [{"input_ids": [1, 2, 3]}]
    with pytest.raises(InputError, match=r"a copy of input_ids, which the task shifts"):
        opened(rows, "causal-lm")
    with pytest.raises(InputError, match=r"with model\.task: causal-lm, which shifts the copy"):
        opened(rows, {"python": "torch.nn:Identity"})
    with pytest.raises(InputError, match="add a field named labels, or"):
        opened(rows, "masked-lm")


WRONG = [
    ([], "empty"),
    ("words", "expected a mapping"),
    (5, "expected a mapping"),
    (DataLoader(TensorDataset(torch.zeros(2))), "give its dataset"),
    (iter([1, 2]), "read only once"),
    ([("a", 1)], "holds a str"),
    ([(None, 1)], "holds a NoneType"),
    ([torch.zeros(3)], "the default loss needs an input and a label"),
    ([{"pixel_values": torch.zeros(3)}], "no labels"),
    ([{"pixel_values": torch.zeros(3), "labels": 10}], "label 10, but the model knows only the labels 0 to 9"),
    ([(torch.zeros(3), -1)], "label -1"),
]


@pytest.mark.parametrize(("data", "found"), WRONG, ids=[found for _, found in WRONG])
def test_data_that_the_model_cannot_use_is_refused(data: Any, found: str) -> None:
    with pytest.raises(InputError, match=found):
        at(opened(data), [0])


def test_wrong_tokens_and_shapes_are_refused() -> None:
    def row(*ids: int) -> dict[str, Any]:
        return {"input_ids": list(ids), "labels": list(ids)}

    with pytest.raises(
        InputError, match=r"token id 300, but the model's vocabulary has 300 tokens(.|\n)*vocab_size: 320"
    ):
        at(opened([row(1), row(300)], "causal-lm"), [1])
    with pytest.raises(InputError, match="token id -1"):
        at(opened([row(-1)], "causal-lm"), [0])
    with pytest.raises(InputError, match="named fields"):
        opened([(torch.zeros(3), 1)], "causal-lm")
    with pytest.raises(InputError, match="cannot be stacked"):
        at(opened([(torch.zeros(3, 2), 1), (torch.zeros(2, 2), 1)]), [0, 1])
    with pytest.raises(InputError, match="cannot be stacked"):
        at(opened([{"a": 1, "labels": 1}, {"labels": 1}]), [0, 1])


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            raise KeyError("lost")
        return torch.zeros(2), 1


class Lengthless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), 1


def test_an_error_in_the_dataset_names_the_sample() -> None:
    samples = opened(Failing())
    with pytest.raises(InputError, match="sample 12: the dataset raised KeyError: 'lost'"):
        at(samples, [11, 12])
    with pytest.raises(InputError, match="no __len__"):
        opened(Lengthless())


class Random(Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.random(), float(torch.rand(()))]), index % 10


def test_random_samples_depend_on_seed_sample_and_epoch_only() -> None:
    """Drawing them leaves the global random state unchanged."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    samples = opened(Random())
    whole = at(samples, [5, 9])[0]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(at(samples, [9])[0][0], whole[1])
    assert (at(samples, [9], epoch=1)[0][0] != whole[1]).all()
    assert (at(opened(Random(), seed=1), [9])[0][0] != whole[1]).all()
    assert (whole[0] != whole[1]).all()


class Counting(IterableDataset[Any]):
    """Gives 7 samples in each pass, with a random number each."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for index in range(7):
            yield torch.tensor([index, random.random()]), 1


def rows_of(stream: Any, consumed: int, sizes: list[int]) -> list[list[float]]:
    ends = itertools.accumulate(sizes, initial=consumed)
    return [row for batch in stream.batches(itertools.pairwise(ends)) for row in batch[0].tolist()]


def test_iterables_resume_from_any_sample() -> None:
    stream = opened(Counting())
    assert isinstance(stream, UserStream)
    whole = rows_of(stream, 0, [5, 5, 5])
    assert [int(row[0]) for row in whole] == [number % 7 for number in range(15)]
    assert rows_of(stream, 10, [3, 2]) == whole[10:]
    assert len({row[1] for row in whole}) == 15  # each pass draws anew
    state = torch.get_rng_state(), random.getstate()
    rows_of(stream, 0, [3])
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_empty_and_failing_iterables_are_refused() -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    class Broken(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield torch.zeros(1), 1
            raise OSError("gone")

    with pytest.raises(InputError, match="no samples in epoch 0"):
        rows_of(opened(Empty()), 0, [1])
    with pytest.raises(InputError, match="OSError: gone"):
        rows_of(opened(Broken()), 0, [2])


SOURCE = """
import torch
from companion import SIZE

def pairs():
    return [(torch.full((2,), float(n)), n % 3) for n in range(SIZE)]

def stream():
    for n in range(SIZE):
        yield torch.full((2,), float(n)), 1

def fails():
    raise RuntimeError("no data today")

def nothing():
    return None

def columns():
    return {"x": [1, 2]}
"""


def test_a_dataset_function_is_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "companion.py").write_text("SIZE = 6\n")

    def named(function: str) -> Any:
        return opened({"python": f"{tmp_path / 'mine.py'}:{function}"})

    samples = named("pairs")
    assert len(samples) == 6
    assert torch.equal(at(pickle.loads(pickle.dumps(samples)), [4])[0], at(samples, [4])[0])
    assert [int(row[0]) for row in rows_of(named("stream"), 4, [4])] == [4, 5, 0, 1]
    with pytest.raises(InputError, match="RuntimeError: no data today"):
        named("fails")
    with pytest.raises(InputError, match="NoneType"):
        named("nothing")
    with pytest.raises(InputError, match="a dict, not a dataset"):
        named("columns")
    with pytest.raises(InputError, match="did you mean 'pairs'"):
        named("pair")


class Rows:
    """Samples of 3 to 5 numbers, with a class or with as many real labels."""

    def __init__(self, **more: Any) -> None:
        self.more = more

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 3 + index % 3
        given = {"x": torch.ones(length), "labels": index % 2}
        return given | {name: make(length) for name, make in self.more.items()}


def losses_of_rows(data: Rows) -> list[float]:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.layer(x[..., None]).mean(1)

    settings = tightfit.Train(learning_rate=0.1, batch=8, steps=1, trackers=[])
    return [step.loss for step in tightfit.train(tightfit.build(tightfit.Job(model=Pooled, data=data, train=settings)))]


def test_padding_without_a_mask_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    losses_of_rows(Rows(attention_mask=torch.ones))
    assert not recwarn
    with pytest.warns(TightfitWarning, match="in the length of x, and have no attention_mask"):
        losses_of_rows(Rows())


def test_real_labels_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="their padding would be trained on"):
        losses_of_rows(Rows(labels=torch.rand, attention_mask=torch.ones))
