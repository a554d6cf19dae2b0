"""Defines the section `evaluate` of a job: the data and the metrics of evaluations."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from tightfit.errors import InputError
from tightfit.job_sections.checks import refuse_plain
from tightfit.job_sections.data import SOURCES, DataSpec
from tightfit.job_sections.python_objects import PythonObject, PythonSpec
from tightfit.job_sections.selection import LOSS
from tightfit.values import Value


class Evaluation(Value):
    """Describes when a training is evaluated, on which data, and with which metrics besides the
    loss.

    data     a DataSpec (or its mapping), or a map-style dataset. A DataSpec takes the fields that
             it does not set, such as sequence_length, from the job's data, but not its split and
             `streaming`. If data is left out, the
             evaluation uses samples that are held out of the job's data (the fraction
             `data.held_out`)
    every    number of steps between two evaluations; the same as train.evaluate_every
    samples  the largest number of samples of an evaluation. If left out: all samples of `data`, or
             train.evaluate_samples of the held-out samples
    metrics  name -> a torchmetrics.Metric, a pair (torchmetrics.Metric, function), or another
             callable; in a job file {python: "file.py:name"}

    A callable `metric(outputs, batch)` returns the mean over the samples of the batch, as a number
    or a dict of numbers. Evaluations weight this mean by the number of samples, so that every
    sample has the same weight.

    For a Metric, tightfit calls `update(predictions, targets)`. For the default loss of a task,
    these are the logits, shape (items, classes), and the labels, shape (items,), of the items that
    count in the loss. For other losses, they are the model's output and the batch's labels. For a
    pair, tightfit calls the Metric's `update(*function(outputs, batch))` instead.
    """

    data: DataSpec | PythonObject = None
    every: int | None = Field(None, gt=0, description="evaluate after every so many steps")
    samples: int | None = Field(None, gt=0, description="most samples of an evaluation")
    metrics: dict[str, PythonSpec | PythonObject] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = dict(content)
        if isinstance(content.get("data"), dict):
            content["data"] = DataSpec.parse(content["data"], "job: evaluate.data")
            if content["data"].streaming:
                raise InputError(
                    "job: evaluate.data.streaming",
                    "is true, and every evaluation reads the same samples",
                    "leave out evaluate.data.streaming",
                )
        refuse_plain(content, "data", "{jsonl: evaluation.jsonl}", "evaluate.data")
        metrics = content.get("metrics")
        if metrics is None:
            content.pop("metrics", None)
        elif not isinstance(metrics, dict):
            raise InputError(
                "job: evaluate.metrics",
                f"expected a mapping from names to metrics, found {metrics!r}",
                'write it like metrics: {accuracy: {python: "file.py:accuracy"}}',
            )
        else:
            content["metrics"] = {str(name): _metric(str(name), metric) for name, metric in metrics.items()}
        return content


def _metric(name: str, metric: Any) -> Any:
    """Return a metric of the section `evaluate`. A mapping, {python: "file.py:name"}, is returned
    as a PythonSpec, anything else unchanged.

    Raises InputError if it is not a metric, or if its name is empty or that of the evaluation loss.
    """
    where = f"job: evaluate.metrics.{name}"
    if name == LOSS or not name:
        raise InputError(
            where, "is the name of the evaluation loss" if name else "has no name", "give the metric another name"
        )
    if isinstance(metric, dict):
        return PythonSpec.parse(metric, where)
    if not isinstance(metric, PythonSpec | tuple) and not callable(metric):
        raise InputError(
            where, f"expected a metric, found {metric!r}", 'give a function, or in a job file {python: "file.py:name"}'
        )
    return metric


def with_fields_of(evaluate: Any, data: Any) -> Any:
    """Return a copy of the job's `evaluate` in which the fields that its data does not set, such as
    sequence_length, are filled in from the job's `data`.

    Returns `evaluate` unchanged unless it is an Evaluation, its data is a DataSpec, and the job's
    `data` is a DataSpec.
    """
    own = evaluate.data if isinstance(evaluate, Evaluation) else None
    if not isinstance(own, DataSpec) or not isinstance(data, DataSpec):
        return evaluate
    left_out = {*SOURCES, *own.model_fields_set, "split", "streaming", "shuffle_buffer"}
    if own.dataset != data.dataset:
        left_out.add("subset")
    shared = {name: value for name, value in data if name not in left_out}
    return evaluate.replace(data=own.replace(**shared))
