"""A micro-batch like those of a job, of any number of samples: shapes and types, no values."""

from __future__ import annotations

import numpy as np
import torch

from tightfit.data import UserStream, model_input, open_samples
from tightfit.data.sequences import corruption, row_length
from tightfit.job import DataSpec, Job
from tightfit.models.objective import Batch, map_tensors

_SEEN = 8  # samples of a user's dataset that are looked at: batches are as long as their longest
_VOCABULARY = 32  # where neither job nor model says one: values do not matter


def example(job: Job) -> Batch:
    """A small batch with the fields, types and lengths of the job's. Text need not be there; what is small, or the
    user's own, is looked at. Raises InputError."""
    spec = job.data
    stands_in = _synthetic(job, spec) if isinstance(spec, DataSpec) and spec.python is None else None
    source = open_samples(job if stands_in is None else job.replace(data=stands_in))
    if isinstance(source, UserStream):
        return next(iter(source.batches([(0, 1)])))
    count = min(_SEEN, len(source))
    batch = source.batch(np.arange(count), np.zeros(count, dtype=np.int64))
    if isinstance(spec, DataSpec) and _is_padded(job, spec):
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"]).index_fill_(1, torch.tensor(-1), 0)}
    return batch


def is_padded(batch: Batch) -> bool:
    """Whether the batch has an attention mask that hides something."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def sized(batch: Batch, samples: int) -> Batch:
    """Zeros shaped like `batch`, with `samples` in place of its own number: fake ones inside FakeTensorMode."""
    return map_tensors(lambda tensor: torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype), batch)


def _is_padded(job: Job, spec: DataSpec) -> bool:
    return spec.packing == "padded" and spec.synthetic is None and model_input(job).task == "masked-lm"


def _synthetic(job: Job, spec: DataSpec) -> DataSpec | None:
    """Synthetic data of the same shapes in place of a text or of images; None where the data itself has to be asked."""
    model = model_input(job)
    small = {"samples": _SEEN, "held_out": 0.0}
    if spec.synthetic is not None:
        return spec.replace(**small)
    if spec.images is not None or (
        spec.dataset is not None and model.task == "classification" and not model.vocabulary
    ):
        return None if model.image_size is None else DataSpec(synthetic="images", **small)
    length, target = spec.sequence_length, spec.target_length
    if model.task == "seq2seq-lm" and spec.target_field is None:
        row = row_length(length, spec.mask_probability)
        taken, spans = corruption(row, spec.mask_probability)
        length, target = row - taken + spans + 1, taken + spans + 1
    vocabulary = spec.vocabulary_size or model.vocabulary or _VOCABULARY
    return DataSpec(
        synthetic="tokens", sequence_length=length, target_length=target, vocabulary_size=vocabulary, **small
    )
