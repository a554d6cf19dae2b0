"""Data: text, images, synthetic data and the user's own datasets as samples, in an order that can
be resumed.

`open_samples` is the entry point. `methods/loader.py` reads batches of the samples in the order
that `Order` computes.
"""

from __future__ import annotations

from typing import Any

from tightfit.data.images import open_images
from tightfit.data.language import open_language, synthetic_language
from tightfit.data.mixture import MixedOrder, MixedSamples, open_mixture
from tightfit.data.order import Order
from tightfit.data.samples import ModelInput, Samples
from tightfit.data.synthetic import SyntheticImages
from tightfit.data.user_samples import DatasetFunction, DatasetObject, UserStream, open_user
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job, ModelSpec
from tightfit.models import model_config, task_of, text_config

__all__ = ["MixedOrder", "ModelInput", "Order", "Samples", "UserStream", "model_input", "open_samples", "order_of"]


def open_samples(job: Job) -> Samples | UserStream:
    """Open the samples of a job's data, and prepare the data if the cache does not have it yet.
    Returns a UserStream if the data is an iterable without a length.

    Raises InputError for data that is missing, empty or damaged, or that the job's model cannot
    take.
    """
    model, seed = model_input(job), job.train.seed
    spec = job.data
    if not isinstance(spec, DataSpec):
        return open_user(DatasetObject(spec), model, seed)
    if spec.python is not None:
        return open_user(DatasetFunction(spec.python), model, seed)
    if spec.sources is not None:
        return open_mixture(spec, model, seed)
    if _are_images(spec, model):
        return _images(spec, model, seed)
    return synthetic_language(spec, model, seed) if spec.synthetic else open_language(spec, model, seed)


def order_of(samples: Samples, share: float, seed: int) -> Order | MixedOrder:
    """Return the order in which training reads samples.

    share  the share of the samples that is held out for evaluation; of each source, if there are
           several
    """
    return samples.order(share, seed) if isinstance(samples, MixedSamples) else Order(len(samples), share, seed)


def model_input(job: Job) -> ModelInput:
    """Return which inputs a job's model takes, read from the model's config. Fields for which the
    config has no value are None."""
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
    )


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
