"""Find out how many optimizer steps a job trains, from its number of steps, or of epochs and samples."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

from tightfit.data import Order, SampleStream, open_samples
from tightfit.data.source_files import needs_copies
from tightfit.data.text import Columns, open_text
from tightfit.errors import InputError
from tightfit.job import DataSpec, Job
from tightfit.optim.schedule import total_steps

BYTES_PER_TOKEN = 4  # bytes of plain text per token, about, for natural language and code
DEFAULT_STEPS = 1000  # assumed if neither the job nor its data says how many


@dataclass(frozen=True)
class Length:
    """How long a job trains.

    steps  number of optimizer steps
    basis  how the number was found, such as "2 epochs of 45 samples"; "" if it is `train.steps`
    """

    steps: int
    basis: str = ""


def length_of(job: Job) -> Length:
    """Return how long the job trains: see `_length_of`. Each job is looked at only once."""
    known = _KNOWN.get(id(job))
    if known is None or known[0]() is not job:
        for key in [key for key, (other, _) in _KNOWN.items() if other() is None]:
            del _KNOWN[key]
        _KNOWN[id(job)] = known = ref(job), _length_of(job)
    return known[1]


# id of a job -> (the job, its length). Jobs have no hash, because their data may have none
_KNOWN: dict[int, tuple[ref[Job], Length]] = {}


def _length_of(job: Job) -> Length:
    """Return the number of optimizer steps of the job, and how it was found.

    The number is `train.steps` if the job sets it. Otherwise it follows from `train.epochs` and the
    number of samples in the data. If text is packed into sequences, its tokens are estimated from
    its bytes, because counting them takes long. If the number of samples is unknown, 1,000 steps
    are assumed.
    """
    train = job.train
    if train.steps is not None:
        return Length(train.steps)
    found = _samples_of_an_epoch(job)
    if found is None:
        return Length(DEFAULT_STEPS, "assumed, because train.steps is not set")
    samples, said = found
    steps = total_steps(train, samples)
    assert steps is not None  # because the number of samples is known
    epochs = train.epochs or 1
    return Length(max(steps, 1), f"{epochs:g} epoch{'' if epochs == 1 else 's'} of {said}")


def _samples_of_an_epoch(job: Job) -> tuple[int, str] | None:
    """Return (number of training samples in the data, this number in words, such as "about 320
    samples"). Return None if the data is empty or not on this machine, or if it would have to be
    read completely."""
    spec, about = job.data, ""
    share = job.held_out
    try:
        if isinstance(spec, DataSpec) and spec.synthetic is not None:
            count = spec.samples
        elif isinstance(spec, DataSpec) and spec.streaming:
            return None
        elif isinstance(spec, DataSpec) and all(part.text or part.jsonl for part in spec.parts()):
            if spec.packing == "padded" or any(part.format or needs_copies(part) for part in spec.parts()):
                return None
            sizes = [open_text(part, Columns(part.field)).size_bytes for part in spec.parts()]
            count, about = sum(size // BYTES_PER_TOKEN // spec.sequence_length for size in sizes), "about "
        elif isinstance(spec, DataSpec) and spec.python is None and spec.images is None:
            return None
        else:
            source = open_samples(job)
            if isinstance(source, SampleStream):
                return None
            count = len(source)
    except InputError:  # the data is not on this machine
        return None
    count = Order(count, share, job.train.seed).training_count
    return (count, f"{about}{count:,} samples") if count > 0 else None


__all__ = ["DEFAULT_STEPS", "Length", "length_of"]
