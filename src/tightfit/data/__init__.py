"""Opens a job's training and evaluation data as samples: text, images, synthetic data, or a dataset
of the user's own.

`open_samples` is the entry point. `Order` computes which samples each step reads, so that a run can
be resumed at any step. `methods/loader.py` reads the batches in this order.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from tightfit.data.images import open_images
from tightfit.data.language import open_language, synthetic_language
from tightfit.data.mixture import MixedOrder, MixedSamples, open_mixture
from tightfit.data.model_input import model_input
from tightfit.data.order import Integers, Order
from tightfit.data.samples import ModelInput, Samples
from tightfit.data.streams import TextStream, open_stream
from tightfit.data.synthetic import SyntheticImages
from tightfit.data.tokenizer import named_tokenizer
from tightfit.data.user_samples import DatasetFunction, DatasetObject, UserStream, open_user
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec, Job, Train

__all__ = [
    "MixedOrder",
    "ModelInput",
    "Order",
    "SampleStream",
    "Samples",
    "TextStream",
    "UserStream",
    "describe_tokenizer",
    "first_samples",
    "model_input",
    "open_evaluation",
    "open_samples",
    "order_of",
]

SampleStream = UserStream | TextStream  # samples without a length, which are read in order


def open_samples(job: Job) -> Samples | SampleStream:
    """Return the samples of `job.data`. Data that must be prepared, such as text that must be
    tokenized, is prepared once and then cached.

    Returns a SampleStream if the data is streamed or is the user's own iterable without a length,
    else Samples.

    Raises InputError if the data is missing or empty, if it is damaged (unless data.skip_damaged is
    set), or if the job's model cannot take it, such as images for a language model. Issues a
    TightfitWarning if a step has more samples than the data, and for settings of the data that are
    not read.
    """
    model = model_input(job)
    samples = _open(job, model)
    for sentence in job.data.without_effect(model.task) if isinstance(job.data, DataSpec) else ():
        warnings.warn(sentence, TightfitWarning, stacklevel=1)
    # several sources are drawn by weight, which repeats samples in any case; synthetic data may stand
    # in for the job's own data
    if (
        isinstance(job.data, DataSpec)
        and not job.data.synthetic
        and not isinstance(samples, SampleStream | MixedSamples)
    ):
        _warn_of_repeated_samples(job.train, order_of(samples, job.held_out, job.train.seed).training_count)
    return samples


def _warn_of_repeated_samples(train: Train, count: int) -> None:
    """Issue a TightfitWarning if the batch is larger than the `count` training samples."""
    batch = train.batch
    if batch > count > 0:
        least = batch // count
        times = f"{least} times" if batch % count == 0 else f"{least} or {least + 1} times"
        warnings.warn(
            f"train.batch={batch} is more than the {count} training samples, so each step has every sample {times}. If this is "
            f"not meant, set train.batch: {count} or less, or give more data",
            TightfitWarning,
            stacklevel=1,
        )


def _open(job: Job, model: ModelInput) -> Samples | SampleStream:
    spec, seed = job.data, job.train.seed
    if not isinstance(spec, DataSpec):
        return open_user(DatasetObject(spec), model, seed)
    if spec.python is not None:
        return open_user(DatasetFunction(spec.python), model, seed)
    if spec.streaming:
        return open_stream(spec, model, seed)
    if spec.sources is not None:
        return open_mixture(spec, model, seed)
    if _are_images(spec, model):
        return _images(spec, model, seed)
    return synthetic_language(spec, model, seed) if spec.synthetic else open_language(spec, model, seed)


def open_evaluation(job: Job, training: Samples | SampleStream) -> Samples | None:
    """Return the samples of `job.evaluate.data`, or None if the job does not set this field. Text
    is tokenized with the tokenizer of the training data, unless evaluate.data names one itself.

    training  the samples of `job.data`, as `open_samples` returned them

    Raises InputError if the data is missing, empty or damaged, if the model cannot take it, or if
    it is an iterable without a length. The classes have the numbers that they have in the training
    data.
    """
    data = job.evaluate.data if job.evaluate is not None else None
    if data is None:
        return None
    if isinstance(data, DataSpec) and data.tokenizer is None:
        tokenizer = getattr(training, "tokenizer", None)
        data = data if tokenizer is None else data.replace(tokenizer=tokenizer.name_or_path)
    own = job.replace(data=data, evaluate=None, train=Train(seed=job.train.seed))
    model, names = model_input(own), getattr(training, "class_names", ())
    source = _open(own, replace(model, class_names=names, only_these_classes=True) if names else model)
    if isinstance(source, SampleStream):
        raise InputError(
            "job: evaluate.data", "is an iterable without a length", "give a dataset with __len__ and __getitem__"
        )
    return source


def order_of(samples: Samples, share: float, seed: int) -> Order | MixedOrder:
    """Return the order in which training reads samples.

    share  the share of the samples that is held out for evaluation; of each source, if there are
           several
    """
    return samples.order(share, seed) if isinstance(samples, MixedSamples) else Order(len(samples), share, seed)


def first_samples(samples: Samples, limit: int | None) -> Integers:
    """Return the indices of the first `limit` samples, or of all if `limit` is None. Of several
    sources, they are in proportion to the weights, as far as each source has enough."""
    if limit is None or limit >= len(samples):
        return np.arange(len(samples))
    return samples.first(limit) if isinstance(samples, MixedSamples) else np.arange(limit)


def describe_tokenizer(job: Job) -> str | None:
    """Return a phrase that says which tokenizer tokenizes a job's data, such as "a byte-level BPE
    of 50257 tokens, trained on the data". Return None if the data is not text, or comes from the
    user's own code."""
    spec = job.data
    if not isinstance(spec, DataSpec) or spec.python or spec.synthetic or spec.images:
        return None
    model = model_input(job)
    if _are_images(spec, model):
        return None
    if spec.tokenizer:
        return f"{spec.tokenizer} (data.tokenizer)"
    if path := named_tokenizer(spec, model):
        return f"{path} (the model's own tokenizer)"
    size = spec.vocabulary_size or model.vocabulary
    return f"a byte-level BPE of {size or 'an unknown number of'} tokens, trained on the data"


def _are_images(spec: DataSpec, model: ModelInput) -> bool:
    if spec.images is not None or spec.synthetic == "images":
        return True
    return spec.dataset is not None and model.task == "classification" and model.vocabulary is None


def _images(spec: DataSpec, model: ModelInput, seed: int) -> Any:
    if model.task not in (None, "classification"):
        raise InputError(
            f"data: {spec}",
            f"is images, and a {model.task} model reads text",
            "give text, or a model of images such as vit",
        )
    if spec.synthetic is None:
        return open_images(spec, model)
    size, channels = model.image_size or spec.image_size or 32, model.channels or 3
    return SyntheticImages(spec.samples, model.labels or 10, channels, size, seed)
