"""Opens a job's training and evaluation data as samples: text, images, synthetic data, or a dataset
of the user's own.

`open_samples` is the entry point. `Order` computes which samples each step reads, so that a run can
be resumed at any step. `methods/loader.py` reads the batches in this order.
"""

from __future__ import annotations

from typing import Any

from tightfit.data.images import open_images
from tightfit.data.language import open_language, synthetic_language
from tightfit.data.order import Order
from tightfit.data.samples import ModelInput, Samples
from tightfit.data.synthetic import SyntheticImages
from tightfit.data.tokenizer import named_tokenizer
from tightfit.data.user_samples import DatasetFunction, DatasetObject, UserStream, open_user
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job, ModelSpec, Train
from tightfit.models import model_config, task_of, text_config
from tightfit.models.pretrained import own_tokenizer

__all__ = [
    "ModelInput",
    "Order",
    "Samples",
    "UserStream",
    "describe_tokenizer",
    "model_input",
    "open_evaluation",
    "open_samples",
]


def open_samples(job: Job) -> Samples | UserStream:
    """Return the samples of `job.data`. Data that must be prepared, such as text that must be
    tokenized, is prepared once and then cached.

    Returns a UserStream if the data is the user's own iterable without a length, else Samples.

    Raises InputError if the data is missing or empty, if it is damaged (unless data.skip_damaged is
    set), or if the job's model cannot take it, such as images for a language model.
    """
    model, seed = model_input(job), job.train.seed
    spec = job.data
    if not isinstance(spec, DataSpec):
        return open_user(DatasetObject(spec), model, seed)
    if spec.python is not None:
        return open_user(DatasetFunction(spec.python), model, seed)
    if _are_images(spec, model):
        return _images(spec, model, seed)
    return synthetic_language(spec, model, seed) if spec.synthetic else open_language(spec, model, seed)


def open_evaluation(job: Job, training: Samples | UserStream) -> Samples | None:
    """Return the samples of `job.evaluate.data`, or None if the job does not set this field. Text
    is tokenized with the tokenizer of the training data, unless evaluate.data names one itself.

    training  the samples of `job.data`, as `open_samples` returned them

    Raises InputError if the data is missing, empty or damaged, if the model cannot take it, or if
    it is an iterable without a length.
    """
    data = job.evaluate.data if job.evaluate is not None else None
    if data is None:
        return None
    if isinstance(data, DataSpec) and data.tokenizer is None:
        tokenizer = getattr(training, "tokenizer", None)
        data = data if tokenizer is None else data.replace(tokenizer=tokenizer.name_or_path)
    source = open_samples(job.replace(data=data, evaluate=None, train=Train(seed=job.train.seed)))
    if isinstance(source, UserStream):
        raise InputError(
            "job: evaluate.data", "is an iterable without a length", "give a dataset with __len__ and __getitem__"
        )
    return source


def model_input(job: Job) -> ModelInput:
    """Return what inputs a job's model takes (task, vocabulary size, image size, ...), read from
    the model's transformers config. Fields that the config does not have are None, and so are all
    config fields of a model from the user's own code."""
    config = model_config(job.model) if isinstance(job.model, ModelSpec) else None
    text = text_config(config)
    size = getattr(config, "image_size", None)
    return ModelInput(
        task=task_of(job.model),
        own_loss=job.loss is not None,
        vocabulary=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        labels=getattr(config, "num_labels", None),
        image_size=size if isinstance(size, int) else None,
        channels=getattr(config, "num_channels", None),
        tokenizer=_own_tokenizer(job.model),
    )


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
