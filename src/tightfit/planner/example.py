"""A micro-batch like those of a job, of any number of samples: shapes and types, no values."""

from __future__ import annotations

import time

import numpy as np
import torch

from tightfit.data import Samples, UserStream, model_input, open_samples
from tightfit.data.images import DIGITS, first_images
from tightfit.data.sequences import corruption, row_length
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.models.objective import IGNORED, Batch, Labelled, map_tensors, objective_of

MILLION = 1_000_000
TRIED = 2  # times that a batch is prepared to see how long it takes
_SEEN = 8  # samples of a user's dataset that are looked at: batches are as long as their longest
_TOKENS = 2**22  # of a text that stands in for another
_VOCABULARY = 32  # where neither job nor model says one: values do not matter


def example(job: Job) -> tuple[Batch, float]:
    """A small batch with the fields, types and lengths of the job's, and the seconds that preparing a sample of it takes (0.0
    where nothing is prepared). Text need not be there; what is small, or the user's own, is looked at. Raises InputError."""
    spec = job.data
    stands_in = _synthetic(job, spec) if isinstance(spec, DataSpec) and spec.python is None else None
    source = open_samples(job if stands_in is None else job.replace(data=stands_in))
    if isinstance(source, UserStream):
        return next(iter(source.batches([(0, 1)]))), 0.0
    count = min(_SEEN, len(source))
    if stands_in is not None and stands_in.synthetic == "tokens":  # whose values do not matter
        count = min(count, max(_TOKENS // stands_in.sequence_length, 1))
    batch = source.batch(np.arange(count), np.zeros(count, dtype=np.int64))
    if isinstance(spec, DataSpec) and _is_padded(job, spec):
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"]).index_fill_(1, torch.tensor(-1), 0)}
    return batch, _sample_s(
        job, source if stands_in is None or (isinstance(spec, DataSpec) and spec.synthetic) else None
    )


def _sample_s(job: Job, source: Samples | None) -> float:
    """Seconds that preparing a sample takes, at best of a few batches: what was opened or imported for the first is there by
    then. source: the job's own; of text, which is read from mapped tokens, and of what is not there it is 0."""
    spec = job.data
    if isinstance(spec, DataSpec) and spec.images not in (None, DIGITS):
        source = first_images(spec, model_input(job), _SEEN)
    if source is None:
        return 0.0
    places, seconds = np.arange(min(_SEEN, len(source))), []
    for _ in range(TRIED):
        began = time.perf_counter()
        try:
            source.batch(places, 0 * places)
        except InputError:  # one that is damaged: a run says so, or leaves it out
            return 0.0
        seconds.append((time.perf_counter() - began) / len(places))
    return min(seconds)


def labelled(job: Job, batch: Batch) -> Labelled | None:
    """How many of a micro-batch's labels count, in proportion: as `mask_probability` says of text for a masked language model,
    else as in `batch`, a job's example. None where the job brings its own loss.

    Text that is padded for a causal model is taken to have labels everywhere, as its example does: a bound from above.
    """
    model = model_input(job)
    targets = None if job.loss is not None else objective_of(None, model.task).targets
    if targets is None or not isinstance(batch, dict) or "labels" not in batch:
        return None
    if isinstance(job.data, DataSpec) and job.data.python is None and model.task == "masked-lm":
        return Labelled(round(MILLION * job.data.mask_probability), MILLION)
    labels = targets(batch)
    return Labelled(int((labels != IGNORED).sum()), labels.numel())


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
