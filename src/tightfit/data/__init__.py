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

from tightfit.data.image_processing import MODES, pretrained_processing
from tightfit.data.images import open_images
from tightfit.data.language import open_language, synthetic_language
from tightfit.data.mixture import MixedOrder, MixedSamples, open_mixture
from tightfit.data.order import Integers, Order
from tightfit.data.samples import ModelInput, Samples
from tightfit.data.streams import TextStream, open_stream
from tightfit.data.synthetic import SyntheticImages
from tightfit.data.tokenizer import named_tokenizer
from tightfit.data.user_samples import DatasetFunction, DatasetObject, UserStream, open_user
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import DataSpec, Job, ModelSpec, Train
from tightfit.models import model_config, task_of, text_config
from tightfit.models.create import config_of_function, task_of_class
from tightfit.models.pretrained import own_tokenizer, pretrained_folder, read_config

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
        _warn_of_repeated_samples(job.train, order_of(samples, job.data.held_out, job.train.seed).training_count)
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


def model_input(job: Job) -> ModelInput:
    """Return what inputs a job's model takes (task, vocabulary size, image size, ...), read from
    the model's transformers config. The image size of a pretrained model is that of the image
    processor in its folder, if there is one. Fields that the config does not have are None, and so are all
    config fields of a model from the user's own code."""
    config = model_config(job.model) if isinstance(job.model, ModelSpec) else None
    text, task = text_config(config), task_of(job.model)
    if task == "classification" and job.loss is None:
        _check_problem(job.model, config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(job.model, ModelSpec) and job.model.from_ and isinstance(size, int) and channels in MODES:
        processing = pretrained_processing(pretrained_folder(job.model.from_), channels)
        size = size if processing is None else processing.size
    return ModelInput(
        task=task,
        own_loss=job.loss is not None,
        vocabulary=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        labels=getattr(config, "num_labels", None),
        image_size=size if isinstance(size, int) else None,
        channels=channels,
        tokenizer=_own_tokenizer(job.model),
        pretrained=job.model.from_ if isinstance(job.model, ModelSpec) else None,
        class_names=_pretrained_classes(job.model, config) if task == "classification" else (),
    )


def _check_problem(model: Any, config: Any) -> None:
    """Raise InputError if the config of a classifier asks for a loss that is no cross entropy over
    classes.

    config: the transformers config; None for a model of the user's own function that names its task
    """
    if config is None and not (isinstance(model, ModelSpec) and model.task):
        config = config_of_function(model)
    problem = getattr(config, "problem_type", None)
    if getattr(config, "num_labels", None) == 1:
        problem = "regression"
    losses = {"regression": "MSELoss", "multi_label_classification": "BCEWithLogitsLoss"}
    if problem not in losses:
        return
    found = "has a single label, which transformers trains as a regression" if config.num_labels == 1 else ""
    choice = (
        "set num_labels to the number of classes"
        if config.num_labels == 1
        else "if each sample has one class, set problem_type: single_label_classification"
    )
    place = " (in model.config)" if isinstance(model, ModelSpec) and model.from_ else ""
    raise InputError(
        f"job: model: {model}" if isinstance(model, ModelSpec) else "model",
        f"{found or f'its config has problem_type: {problem}'}, and the task classification trains a cross entropy over classes",
        f"{choice}{place}; or give the job a loss, such as loss: {{python: 'torch.nn:{losses[problem]}'}}, and a dataset with "
        "such labels (data.python)",
    )


def _pretrained_classes(model: Any, config: Any) -> tuple[str, ...]:
    """Return the names of a pretrained classifier's classes, by their numbers. Empty for names such
    as LABEL_0, which transformers gives to classes without names, and for a new last layer. Issues a
    TightfitWarning if the job gives the classifier a new last layer."""
    if not isinstance(model, ModelSpec) or not model.from_ or config is None:
        return ()
    names = getattr(config, "id2label", None) or {}
    content = read_config(model.from_)
    had = len(content.get("id2label") or ()) or content.get("num_labels") or 2
    is_classifier = any(task_of_class(str(name)) == "classification" for name in content.get("architectures") or ())
    if is_classifier and had != config.num_labels:
        warnings.warn(
            f"model.from={model.from_}: its classifier has {had} classes, and the job sets {config.num_labels}: its last layer "
            "is replaced by a new one with random weights",
            TightfitWarning,
            stacklevel=1,
        )
        return ()
    listed = tuple(str(names[number]) for number in sorted(names))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(listed)) else listed


def _own_tokenizer(model: Any) -> str | None:
    folder = own_tokenizer(model.from_) if isinstance(model, ModelSpec) and model.from_ else None
    return str(folder) if folder else None


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
