"""The loader gives the same samples in the same order, however they are split, prepared and
interrupted."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from tightfit.engine.build import build
from tightfit.errors import InputError, TightfitError
from tightfit.job import Job
from tightfit.methods import loader
from tightfit.models.batches import Batch
from tightfit.models.objective import TASKS
from tightfit.plan import Plan
from tightfit.runtime.run import Data, Run, to_device

GPT = {"architecture": "gpt2", "vocab_size": 300, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64}
BERT = {"architecture": "bert", "vocab_size": 300}
VIT = {"architecture": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
TOKENS = {"synthetic": "tokens", "samples": 40, "sequence_length": 8, "held_out": 0.25}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def data_of(data: Any, model: Any = GPT, plan: dict[str, Any] | None = None, **train: Any) -> Data:
    """The `Data` that the loader gives a run of this job."""
    job = Job(model=model, data=data, train={"batch": 8, "steps": 100, "seed": 1, **train})
    nothing = cast(Any, None)
    run = Run(
        job=job,
        plan=Plan(**(plan or {})),
        device=torch.device("cpu"),
        objective=TASKS["causal-lm"],
        model=nothing,
        loss_sum=nothing,
        data=nothing,
        optimizer=nothing,
        learning_rate=nothing,
    )
    assert loader.enabled(run.plan)
    return loader.apply(run, run.plan).data


def first(data: Data, steps: int, consumed: int = 0, until: int | None = None) -> list[list[Batch]]:
    return list(itertools.islice(data.steps(consumed, until), steps))


def stacked(steps: list[list[Batch]]) -> Batch:
    """All samples of all micro-batches one after another."""
    batches = list(itertools.chain.from_iterable(steps))
    if isinstance(batches[0], dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return {str(place): torch.cat([batch[place] for batch in batches]) for place in range(len(batches[0]))}


def same(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Augmented(Dataset[Any]):
    """Samples with their number and something random in them."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index), random.random(), float(torch.rand(()))]), index % 10


class Jitter:
    def __init__(self) -> None:
        self.generators = {"numpy": np.random.default_rng(0), "old": np.random.RandomState(0)}

    def __call__(self) -> list[float]:
        return [float(self.generators["numpy"].random()), float(self.generators["old"].rand())]


class OwnGenerators(Augmented):
    """Draws from generators of its own, and of its transform."""

    def __init__(self) -> None:
        self.random, self.torch, self.transforms = random.Random(0), torch.Generator(), [Jitter()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [self.random.random(), float(torch.rand((), generator=self.torch)), *self.transforms[0]()]
        return torch.tensor([float(index), *drawn]), index % 10


class Passes(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for index in range(11):
            yield torch.tensor([float(index), random.random()]), 1


CASES: dict[str, tuple[Any, Any]] = {
    "tokens": (TOKENS, GPT),
    "masked": (TOKENS, BERT),
    "digits": ({"images": "digits"}, VIT),
    "user": (Augmented(), VIT),
    "own generators": (Subset(ConcatDataset([OwnGenerators()]), range(21)), VIT),
    "stream": (Passes(), VIT),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batches_hold_the_same_samples_as_the_batch(case: str, micro_batch: int) -> None:
    source, model = CASES[case]
    whole = first(data_of(source, model), 4)
    pieces = first(data_of(source, model, {"micro_batch": micro_batch}), 4)
    assert [len(step) for step in whole] == [1] * 4
    assert {len(step) for step in pieces} == {-(-8 // micro_batch)}
    assert same(stacked(whole), stacked(pieces))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("case", CASES)
def test_workers_give_the_same_batches(case: str) -> None:
    source, model = CASES[case]
    workers = {"loader_workers": 1 if case == "stream" else 2, "micro_batch": 3, "prefetch": 1}
    here = first(data_of(source, model, {"micro_batch": 3}), 5, consumed=10, until=46)
    there = first(data_of(source, model, workers), 5, consumed=10, until=46)
    assert [len(step) for step in here] == [len(step) for step in there] == [3, 3, 3, 3, 2]
    for left, right in zip(itertools.chain(*here), itertools.chain(*there), strict=True):
        assert same(stacked([[left]]), stacked([[right]]))


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_continues_with_the_same_batches(case: str) -> None:
    source, model = CASES[case]
    undisturbed = first(data_of(source, model), 8)
    for done in (1, 3, 5):  # within and across epochs
        resumed = first(data_of(source, model), 8 - done, consumed=8 * done)
        assert same(stacked(undisturbed[done:]), stacked(resumed))


def test_each_epoch_has_all_samples_and_the_last_step_is_short() -> None:
    data = data_of(Augmented(), VIT)
    assert data.samples == 21
    steps = first(data, 100, until=42)
    assert [len(step[0][1]) for step in steps] == [8, 8, 8, 8, 8, 2]
    numbers = stacked(steps)["0"][:, 0].tolist()
    assert sorted(numbers[:21]) == sorted(numbers[21:]) == list(range(21))
    assert numbers[:21] != numbers[21:]
    assert first(data, 100, consumed=42, until=42) == []
    assert [len(step[0][1]) for step in first(data, 100, consumed=40, until=42)] == [2]


def test_held_out_samples_are_fixed_and_never_trained_on() -> None:
    data = data_of({"images": "digits", "held_out": 0.1}, VIT, {"micro_batch": 3})
    held_out = list(data.held_out(10))
    assert data.samples == 1797 - 180
    assert [len(batch["labels"]) for batch in held_out] == [3, 3, 3, 1]
    assert same(stacked([held_out]), stacked([list(data.held_out(10))]))
    assert sum(len(batch["labels"]) for batch in data.held_out(10_000)) == 180
    assert list(data_of(Augmented(), VIT).held_out(10)) == []
    whole, kept = data_of(TOKENS), stacked([list(data_of(TOKENS).held_out(10))])["input_ids"]
    trained = stacked(first(whole, 4, until=whole.samples))["input_ids"]
    rows = {tuple(row.tolist()) for row in trained} | {tuple(row.tolist()) for row in kept}
    assert len(rows) == len(trained) + len(kept) == 40


def test_facts_about_the_data_come_from_its_source() -> None:
    data = data_of(TOKENS)
    assert (data.samples, data.sample_items, data.ragged, data.damaged, data.tokenizer) == (30, 8, False, 0, None)
    stream = data_of(Passes(), VIT)
    assert (stream.samples, stream.sample_items, stream.ragged, stream.damaged) == (None, 1, False, 0)
    assert list(stream.held_out(3)) == []


def test_workers_do_not_change_the_training_s_random_numbers() -> None:
    def draw(workers: int) -> Tensor:
        torch.manual_seed(5)
        first(data_of(Augmented(), VIT, {"loader_workers": workers}), 2)
        return torch.rand(4)

    assert torch.equal(draw(0), draw(2))


class Damaged(Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise OSError("lost")
        return torch.zeros(1), 1


class Killed(Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1), 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_s_error_is_raised_in_the_training(workers: int) -> None:
    with pytest.raises(InputError, match="sample 20: the dataset raised OSError: lost") as raised:
        first(data_of(Damaged(), VIT, {"loader_workers": workers}), 4)
    assert raised.value.fix == "correct the dataset's __getitem__"


@pytest.mark.slow  # torch checks its workers every five seconds
def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(TightfitError, match=r"killed(.|\n)*fix: use fewer loader_workers"):
        first(data_of(Killed(), VIT, {"loader_workers": 1}), 4)


def test_impossible_plans_are_refused_with_a_remedy() -> None:
    class Local(Augmented):
        pass

    with pytest.raises(InputError, match=r"cannot be sent to a worker(.|\n)*loader_workers: 0"):
        first(data_of(Local(), VIT, {"loader_workers": 1}), 1)
    with pytest.raises(InputError, match=r"set train.steps"):
        data_of(Passes(), VIT, steps=None, epochs=1)
    with pytest.raises(InputError, match="use loader_workers: 1"):
        data_of(Passes(), VIT, {"loader_workers": 2})
    with pytest.raises(InputError, match="no held-out samples"):
        data_of(Passes(), VIT, evaluate_every=5)
    with pytest.raises(InputError, match=r"no samples are held out(.|\n)*python"):
        data_of(Augmented(), VIT, evaluate_every=5)
    with pytest.raises(InputError, match=r"no samples are held out(.|\n)*data.held_out"):
        data_of(TOKENS | {"held_out": 0}, evaluate_every=5)


SCRIPT = """
from tests.methods.test_loader import TOKENS, VIT, data_of, first
from torch.utils.data import TensorDataset
import torch

class Mine(TensorDataset):
    pass

def main(data, model):
    print(len(first(data_of(data, model, {"loader_workers": 1}), 2)))

"""


@pytest.mark.slow
def test_only_scripts_defining_the_dataset_need_a_main_guard(tmp_path: Path) -> None:
    def run(line: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(SCRIPT + line)
        folder = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'src'}"}
        return subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True)

    mine = "main(Mine(torch.zeros(20, 3), torch.zeros(20).long()), VIT)\n"
    assert run("main(TOKENS, {'architecture': 'gpt2'})\n").stdout == "2\n"
    assert run(f"if __name__ == '__main__':\n    {mine}").stdout == "2\n"
    assert "start training under if __name__ == '__main__'" in run(mine).stderr


def test_workers_read_text_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words to learn, and more of them. " * 200)
    source = {"text": str(tmp_path / "a.txt"), "sequence_length": 16, "held_out": 0}
    inline, in_worker = data_of(source), data_of(source, plan={"loader_workers": 1})
    assert in_worker.tokenizer.eos_token == "<|endoftext|>"
    assert same(stacked(first(inline, 2)), stacked(first(in_worker, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_page_locked(workers: int) -> None:
    plan = {"pin_memory": True, "loader_workers": workers, "micro_batch": 4}
    steps = first(data_of(TOKENS, plan=plan), 2)
    assert all(batch["input_ids"].is_pinned() for step in steps for batch in step)
    assert same(stacked(steps), stacked(first(data_of(TOKENS), 2)))


TINY_BERT: dict[str, Any] = {
    "architecture": "bert",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [({}, True), ({"compile": "block"}, True), ({"compile": "model"}, False), ({"cp": 2}, False)],
)
def test_the_host_drops_masks_that_hide_nothing(
    fields: dict[str, Any], left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CUDA device transformers would read whether the mask hides anything; the loss is the
    same."""
    data = [
        {"input_ids": torch.arange(8) + n, "labels": torch.arange(8), "attention_mask": torch.ones(8).long()}
        for n in range(4)
    ]
    job = Job(model=TINY_BERT, data=data, train={"batch": 2, "steps": 2})
    run = build(job)
    assert not run.droppable_masks
    monkeypatch.setattr("tightfit.methods.loader.kind_of", lambda device: "cuda")
    on_cuda = loader.apply(run, Plan(**fields))
    assert on_cuda.droppable_masks == (("attention_mask",) if left_out else ())
    batch = next(run.data.steps(0, None))[0]
    assert ("attention_mask" not in to_device(batch, on_cuda)) == left_out
    padded = {**batch, "attention_mask": batch["attention_mask"].index_fill(1, torch.tensor(7), 0)}
    assert "attention_mask" in to_device(padded, on_cuda)
    run.model.eval()
    assert torch.equal(run.loss_sum(to_device(batch, run)), run.loss_sum(to_device(batch, on_cuda)))


def test_a_user_s_own_model_keeps_its_mask() -> None:
    assert not loader._optional_masks(torch.nn.Linear(2, 2), Plan())
