"""Evaluation on data of its own, with the job's own metrics: what they get, and how they are
averaged."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

import tightfit
from tests import tiny
from tightfit.errors import InputError
from tightfit.rules import check

CLASSES = 4


def samples(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return list(zip(inputs, labels, strict=True))


TRAINING, EVALUATION = samples(24, 0), samples(37, 1)


class Net(nn.Module):
    """Dropout makes its training differ from its evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def accuracy(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs.argmax(1) == batch[1]).double().mean()


def confidences(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    likelihood = outputs.double().softmax(1)
    return {"top": likelihood.amax(1).mean(), "labelled": likelihood.gather(1, batch[1][:, None]).mean().item()}


def job(metrics: dict[str, Any] | None = None, data: Any = EVALUATION, **evaluate: Any) -> tightfit.Job:
    return tightfit.Job(
        model=Net,
        data=TRAINING,
        train=tightfit.Train(batch=12, steps=4, learning_rate=1e-2, trackers=()),
        evaluate={"data": data, "metrics": metrics or {}, **evaluate},
    )


def trained(of: tightfit.Job, **fields: Any) -> Any:
    run = tightfit.build(of, tightfit.Plan(**fields))
    for _ in tightfit.train(run):
        pass
    return run


def outputs_of(run: Any) -> tuple[Tensor, Tensor]:
    """What the trained model returns for all evaluation samples at once, and their labels."""
    run.model.eval()
    with torch.no_grad():
        found = run.model(torch.stack([x for x, _ in EVALUATION]))
    run.model.train()
    return found, torch.stack([y for _, y in EVALUATION])


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_values_are_those_over_all_samples_at_once(micro_batch: int | None) -> None:
    metrics = {
        "accuracy": accuracy,
        "confidence": confidences,
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "class": MulticlassAccuracy(CLASSES, average=None),
        "both": torchmetrics.MetricCollection([MulticlassAccuracy(CLASSES), MulticlassConfusionMatrix(CLASSES)]),
        "auroc": (BinaryAUROC(), lambda outputs, batch: (outputs[:, 0], batch[1] == 0)),
    }
    run = trained(job(metrics), micro_batch=micro_batch)
    found = tightfit.evaluate_metrics(run)
    outputs, labels = outputs_of(run)
    likelihood = outputs.double().softmax(1)
    expected = {
        "loss": nn.functional.cross_entropy(outputs.double(), labels).item(),
        "accuracy": (outputs.argmax(1) == labels).double().mean().item(),
        "confidence.top": likelihood.amax(1).mean().item(),
        "confidence.labelled": likelihood[torch.arange(37), labels].mean().item(),
        "f1": MulticlassF1Score(CLASSES, average="macro")(outputs, labels).item(),
        "auroc": BinaryAUROC()(outputs[:, 0], labels == 0).item(),
        "both.MulticlassAccuracy": MulticlassAccuracy(CLASSES)(outputs, labels).item(),
    }
    for place, value in enumerate(MulticlassAccuracy(CLASSES, average=None)(outputs, labels)):
        expected[f"class.{place}"] = value.item()
    for place, value in enumerate(MulticlassConfusionMatrix(CLASSES)(outputs, labels).flatten()):
        expected[f"both.MulticlassConfusionMatrix.{place}"] = value.item()
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-14)
    assert found["loss"] == tightfit.evaluate(run)
    assert tightfit.evaluate_metrics(run) == found
    assert run.model.training


class Forces(Net):
    """Adds the gradient of an energy, as a model of molecules does."""

    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if self.allowed else contextlib.nullcontext():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(place).square().sum(), place, create_graph=True)
        return super().forward(x + force)


def test_gradients_in_an_evaluation_need_enable_grad() -> None:
    assert tightfit.evaluate(tightfit.build(job().replace(model=lambda: Forces(True)), tightfit.Plan())) > 0
    run = tightfit.build(job().replace(model=lambda: Forces(False)), tightfit.Plan())
    with pytest.raises(
        InputError, match=r"evaluate_every: the model or its loss computes gradients(.|\n)*torch\.enable_grad"
    ):
        tightfit.evaluate(run)


def test_evaluate_samples_bounds_the_evaluation() -> None:
    run = trained(job({"accuracy": accuracy}, samples=10))
    outputs, labels = outputs_of(run)
    first = (outputs[:10].argmax(1) == labels[:10]).double().mean().item()
    assert tightfit.evaluate_metrics(run)["accuracy"] == pytest.approx(first, rel=1e-14)
    assert tightfit.evaluate_metrics(run, 37)["accuracy"] != pytest.approx(first, rel=1e-14)


def test_evaluation_does_not_change_the_losses() -> None:
    plain = [step.loss for step in tightfit.train(tightfit.build(job()))]
    run, losses = tightfit.build(job({"f1": MulticlassF1Score(CLASSES)})), []
    for step in tightfit.train(run):
        losses.append(step.loss)
        tightfit.evaluate_metrics(run)
    assert losses == plain


def test_an_iterable_can_have_evaluation_data() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(TRAINING)

    streamed = job({"accuracy": accuracy}).replace(data=Stream())
    ordered = trained(job({"accuracy": accuracy}))
    found = tightfit.evaluate_metrics(trained(streamed))
    assert found.keys() == tightfit.evaluate_metrics(ordered).keys() == {"loss", "accuracy"}


def test_held_out_samples_are_used_without_data() -> None:
    def token_accuracy(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return (outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).double().mean()

    content = tiny.content(evaluate_samples=5)
    run = tightfit.build(tightfit.Job.parse({**content, "evaluate": {"metrics": {"accuracy": token_accuracy}}}))
    metric = MulticlassAccuracy(300, average="micro")
    with_metric = tightfit.Job.parse({**content, "evaluate": {"metrics": {"accuracy": metric}}})
    found = tightfit.evaluate_metrics(run)
    again = tightfit.evaluate_metrics(tightfit.build(with_metric))
    assert found["loss"] == tightfit.evaluate(run)
    assert found == pytest.approx(again, rel=1e-6)


TEXTS = "".join(f'{{"text": "{word} tells a long story of {word} and of many words"}}\n' for word in "abcdefgh")
METRICS = """
import torch
from torchmetrics.text import Perplexity

class Share(Perplexity):
    def __init__(self):
        super().__init__(ignore_index=-100)

def perplexity():
    select = lambda outputs, batch: (outputs.logits[:, :-1].float(), batch["labels"][:, 1:])
    return Share(), select

def longest(outputs, batch):
    return batch["input_ids"].shape[1]
"""


def test_a_job_file_names_data_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(TEXTS * 4)
    (tmp_path / "held.jsonl").write_text(TEXTS.replace("many", "few"))
    (tmp_path / "metrics.py").write_text(METRICS)
    (tmp_path / "job.yaml").write_text("""
model: {architecture: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, max_position_embeddings: 32}
data: {jsonl: train.jsonl, sequence_length: 16}
train: {batch: 4, steps: 2, trackers: []}
evaluate:
  data: {jsonl: held.jsonl}
  every: 1
  metrics:
    perplexity: {python: "metrics.py:perplexity"}
    longest: {python: "metrics.py:longest"}
""")
    read = tightfit.Job.load(tmp_path / "job.yaml")
    assert read.evaluate is not None
    assert (read.evaluate.data.sequence_length, read.evaluate_every) == (16, 1)  # of the job's data
    assert tightfit.Job.parse(read.content()) == read
    run = trained(read)
    assert run.data.evaluation.tokenizer.get_vocab() == run.data.tokenizer.get_vocab()
    found = tightfit.evaluate_metrics(run)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)
    assert found["longest"] == 16


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda outputs, batch: outputs, r"returned Tensor\[.*\], not a number(.|\n)*mean over the batch's samples"),
        (lambda outputs, batch: "high", "returned str, not a number"),
        (lambda outputs, batch: outputs["logits"], "evaluate.metrics.own.*\n.*correct the metric"),
        ((accuracy, confidences), "is a function(.|\n)*pair"),
    ],
    ids=["tensor", "word", "error", "pair"],
)
def test_a_wrong_metric_is_named(metric: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        tightfit.evaluate_metrics(tightfit.build(job({"own": metric})))


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        ({"metrics": [accuracy]}, "mapping from names to metrics"),
        ({"metrics": {"accuracy": "metrics.py:accuracy"}}, "expected a metric"),
        ({"metrics": {"loss": accuracy}}, "name of the evaluation loss"),
        ({"data": "held.jsonl"}, "evaluate.data: expected a mapping"),
        ({"data": {"jsonl": "a", "text": "b"}}, "gives text and jsonl"),
        ({"evry": 3}, "did you mean 'every'"),
        (["every"], "job: evaluate: expected a mapping"),
    ],
    ids=["list", "word", "loss", "path", "two sources", "unknown", "no mapping"],
)
def test_a_wrong_evaluate_section_is_refused(evaluate: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        tightfit.Job(model=Net, data=TRAINING, evaluate=evaluate)


def test_two_intervals_that_differ_are_refused() -> None:
    with pytest.raises(InputError, match=r"differ \(3 and 4\)"):
        tightfit.Job(model=Net, data=TRAINING, train={"evaluate_every": 4}, evaluate={"every": 3})


@pytest.mark.parametrize("fields", [{"cp": 2}, {"chunked_loss": 64}], ids=str)
def test_plans_without_whole_outputs_are_refused(fields: dict[str, Any]) -> None:
    refused = tightfit.Job.parse({**tiny.content(), "evaluate": {"metrics": {"accuracy": accuracy}}})
    with pytest.raises(InputError, match=r"metrics of the job's own(.|\n)*leave out evaluate.metrics"):
        check(tightfit.Plan(**fields), refused, "cpu")
    assert tightfit.complete(refused, tightfit.Machine.detect(), {})[0].chunked_loss is None


def test_a_loss_that_does_not_call_the_model_is_named() -> None:
    objective = tightfit.Objective(
        lambda model, batch: nn.functional.cross_entropy(model.layers(batch[0]), batch[1], reduction="sum"),
        lambda batch: len(batch[1]),
    )
    run = tightfit.build(job({"accuracy": accuracy}).replace(loss=objective))
    with pytest.raises(InputError, match="does not call the model"):
        tightfit.evaluate_metrics(run)
