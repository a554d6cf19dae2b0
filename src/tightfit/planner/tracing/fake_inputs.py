"""Make an example micro-batch for a job, with the job's fields, shapes and dtypes and any number of
samples.

The profiler and the dry run trace the model with it. Text and images are replaced by synthetic
data, so the data does not have to exist yet.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from tightfit.data import Samples, SampleStream, model_input, open_samples
from tightfit.data.images import DIGITS, first_images
from tightfit.data.language import check_task
from tightfit.data.segments import in_separate_segments
from tightfit.data.sequences import corruption, row_length
from tightfit.data.streams import seconds_per_sample
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.models.batches import IGNORED, Batch, LabelCount, map_tensors
from tightfit.models.expert_routing import forget_values
from tightfit.models.objective import objective_of

PARTS_PER_MILLION = 1_000_000
TIMED_BATCHES = 2  # batches that are prepared to measure the seconds per sample
_EXAMPLES = 8  # samples of a user's dataset that are read; the longest sets the batch's length
_TOKENS = 2**22  # most tokens in an example batch of synthetic text
_VOCABULARY = 32  # size if neither the job nor the model states one: token values do not matter


def example_batch(job: Job) -> tuple[Batch, float]:
    """Return (example batch, seconds to prepare one sample).

    The batch has the fields, dtypes and lengths of the job's batches, and few samples. The seconds
    are 0.0 if samples need no preparation. Text and large image data do not have to exist; small
    datasets and the user's own datasets are opened and read.

    Raises InputError if the data cannot be opened.
    """
    spec = job.data
    for part in spec.parts() if isinstance(spec, DataSpec) else ():
        if part.format or part.packing == "separate" or part.streaming:
            check_task(part, model_input(job))
    stands_in = _synthetic_spec(job, spec) if isinstance(spec, DataSpec) and spec.python is None else None
    source = open_samples(job if stands_in is None else job.replace(data=stands_in))
    if isinstance(source, SampleStream):
        return next(iter(source.batches([(0, 1)]))), 0.0
    count = min(_EXAMPLES, len(source))
    if stands_in is not None and stands_in.synthetic == "tokens":  # keep the synthetic text small
        count = min(count, max(_TOKENS // stands_in.sequence_length, 1))
    batch = source.batch(np.arange(count), np.zeros(count, dtype=np.int64))
    if isinstance(spec, DataSpec) and _masks_padding(job, spec):
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"]).index_fill_(1, torch.tensor(-1), 0)}
    if isinstance(spec, DataSpec) and spec.packing == "separate":
        batch = {**batch, "position_ids": _two_segments(batch["input_ids"])}
    return batch, _seconds_per_sample(
        job, source if stands_in is None or (isinstance(spec, DataSpec) and spec.synthetic) else None
    )


def _seconds_per_sample(job: Job, source: Samples | None) -> float:
    """Measure and return the seconds to prepare one sample. Of a few batches, the fastest counts,
    because the first one also opens files and imports modules.

    For tightfit's own sources these are seconds of the processor, so other processes of this machine
    do not change a prediction. A dataset of the user's may wait for something else than the
    processor, such as a network, so for it they are seconds of the clock.

    source  the job's own samples; None for text, which is read from memory-mapped tokens or
            streamed, and for data that does not exist yet

    Returns 0.0 if `source` is None or a sample is damaged.
    """
    spec = job.data
    if isinstance(spec, DataSpec) and spec.images not in (None, DIGITS):
        source = first_images(spec, model_input(job), _EXAMPLES)
    if isinstance(spec, DataSpec) and spec.streaming:
        return seconds_per_sample(spec, model_input(job))
    if source is None:
        return 0.0
    clock = time.thread_time if isinstance(spec, DataSpec) and spec.python is None else time.perf_counter
    indices, seconds = np.arange(min(_EXAMPLES, len(source))), []
    for _ in range(TIMED_BATCHES):
        began = clock()
        try:
            source.batch(indices, 0 * indices)
        except InputError:  # a damaged sample: the run reports or skips it
            return 0.0
        seconds.append((clock() - began) / len(indices))
    return min(seconds)


def label_share(job: Job, batch: Batch) -> LabelCount | None:
    """Return the share of a micro-batch's labels that the loss does not ignore, as a ratio of two
    counts.

    batch  an example batch of the job

    For text and a masked language model the share is `mask_probability`; otherwise it is counted in
    `batch`. For padded text and for conversations every token counts as a label, as in the example
    batch: this is an upper bound. Returns None if the job has its own loss or the batch has no
    labels.
    """
    model = model_input(job)
    targets = None if job.loss is not None else objective_of(None, model.task).targets
    if targets is None or not isinstance(batch, dict) or "labels" not in batch:
        return None
    if isinstance(job.data, DataSpec) and job.data.python is None and model.task == "masked-lm":
        return LabelCount(round(PARTS_PER_MILLION * job.data.mask_probability), PARTS_PER_MILLION)
    labels = targets(batch)
    return LabelCount(int((labels != IGNORED).sum()), labels.numel())


def is_padded(batch: Batch) -> bool:
    """Return whether attention in this batch has to hide some positions from others: the batch has
    an attention mask that masks at least one position, or rows that hold several sequences, which
    their position ids tell apart."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and in_separate_segments(positions):
        return True
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def zeros_like_batch(batch: Batch, samples: int) -> Batch:
    """Return a batch of zeros with the fields, dtypes and lengths of `batch`, and with `samples`
    samples. Inside FakeTensorMode its tensors are fake."""
    return map_tensors(
        lambda tensor: forget_values(torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype)), batch
    )


def _two_segments(ids: torch.Tensor) -> torch.Tensor:
    """Return position ids for a batch whose rows hold two sequences each. They have the shape of
    `ids`, (B, L), and begin again at 0 in the middle of a row."""
    length = ids.shape[1]
    return (torch.arange(length) % (length // 2)).expand(len(ids), -1).contiguous()


def _masks_padding(job: Job, spec: DataSpec) -> bool:
    return spec.packing == "padded" and spec.synthetic is None and model_input(job).task == "masked-lm"


def _synthetic_spec(job: Job, spec: DataSpec) -> DataSpec | None:
    """Return a description of synthetic data with the shapes of the data that `spec` describes
    (text, images). Return None if the real data has to be read, because its shapes are not
    known."""
    model = model_input(job)
    small = {"samples": _EXAMPLES, "held_out": 0.0}
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
