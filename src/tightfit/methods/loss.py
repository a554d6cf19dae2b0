"""Computes a language model's output head and its cross entropy together, one chunk of tokens at a
time. This avoids storing the logits of all tokens, which are often the largest tensor of training.

Saves   the logits and their gradient: (tokens, vocabulary) becomes (chunk, vocabulary). With a
        vocabulary of 128k, that is most of a language model's activations.
Costs   no arithmetic: the gradient is computed while the chunk's logits are in memory, so nothing
        is recomputed. From forward to backward, the gradients of the head's weight (in fp32) and of
        the hidden states are held. If more than a tenth of the positions have no label, no logits
        are computed for those positions; in a masked language model they are the majority.
When    any causal or masked language model.
Order   before anything wraps the output head.
Source  Hsu et al. 2024, arXiv:2410.10989 (Liger kernel, fused linear cross entropy).

The default chunk size follows from the bytes of the logits: see `default_chunk`. The kernels depend
on the device: see `runtime/loss_kernels.py`; `runtime/linear_cross_entropy.py` has the loop over chunks.

Example: 8,192 tokens and a vocabulary of 128,000 make 8,192 x 128,000 logits, 2.0 GiB in 16 bits,
and their gradient as much again. In chunks of 1,024 tokens, 0.25 GiB of logits exist at a time, and
the gradient overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.fake import is_fake
from tightfit.cost.ledger import Ledger
from tightfit.data import model_input
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import task_of
from tightfit.models.batches import IGNORED, LABEL_COUNT_KEY, Batch, LabelCount
from tightfit.models.objective import Objective
from tightfit.parallel.tensor.vocab_cross_entropy import vocab_parallel_cross_entropy_with_gradient
from tightfit.plan import Plan
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.linear_cross_entropy import linear_cross_entropy
from tightfit.runtime.loss_kernels import LossKernels, kernels_for
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.output_head import OutputHead, find_output_head
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

# (first class of this device's shard, group of the devices among which the vocabulary is sharded)
VocabularyShard = tuple[int, dist.ProcessGroup]
FIELDS = ("chunked_loss",)
TRACED_FIELDS = ("chunked_loss",)
VARIANTS = ({"chunked_loss": 5},)
# assumed seconds to generate the softmax kernel for CUDA before the first step
COMPILE_S = 5.0
# tokens in a chunk: the fastest number measured on a CPU; the smallest efficient number on CUDA
CHUNK = 1024
MOST_TOKENS = 8192  # tokens in a chunk: longer chunks do not make the matrix products faster
CHUNK_BYTES = 512 * 2**20  # maximal bytes of a chunk's logits
SHARE_OF_DEVICE = 32  # a chunk's logits take at most 1/32 of a CUDA device's memory
# a chunk is a multiple of CHUNK_MULTIPLE tokens; BYTES: bytes per logit, by device
CHUNK_MULTIPLE, BYTES = 128, {"cpu": 4, "cuda": 2}


def enabled(plan: Plan) -> bool:
    return plan.chunked_loss is not None


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Yield the default number of tokens in a chunk if the job trains a language model of
    transformers. Yield nothing for other models, and if metrics of the job need the logits."""
    if job.of_transformers and not job.has_metrics and task_of(job.model) in ("causal-lm", "masked-lm", "seq2seq-lm"):
        yield Default("chunked_loss", chunk_of(job, machine), "the logits of all tokens never exist at the same time")


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """Return the values of `chunked_loss` that may need the least memory: at most 1,024 tokens in a
    chunk, and None (no chunks), for models whose loss cannot be chunked. Only None is returned if
    the plan `start` has no chunks.
    """
    return {"chunked_loss": [None] if start.chunked_loss is None else [min(start.chunked_loss, CHUNK), None]}


def chunk_of(job: Job, machine: Machine) -> int:
    """Return the default of `plan.chunked_loss` for this job on this machine: the number of tokens
    for which the loss computes logits at a time."""
    return default_chunk(model_input(job).vocabulary, machine.device, machine.memory_bytes.value)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) with the seconds in which
    torch.compile generates the softmax kernel of the chunked loss, before the first step.

    The buffers and operations of this loss are in the ledger already, because the model was traced
    with it. On a CPU, and with a sharded vocabulary (tp), the softmax consists of torch's own
    operations, so no kernel is generated.
    """
    if machine.device == "cpu" or plan.tp > 1 or not can_generate_kernels():
        return ledger
    return replace(ledger, compile_s=ledger.compile_s + COMPILE_S)


def apply(run: Run, plan: Plan) -> Run:
    """Return the run with an objective that computes the loss in chunks. Raises InputError if no
    output head is found, or if the model's configuration says that it changes the logits after the
    head.
    """
    assert plan.chunked_loss is not None
    kernels = kernels_for(kind_of(run.device), plan.precision not in ("fp32", "tf32"), plan.chunked_loss)
    objective = chunked(run.objective, run.model, plan.chunked_loss, kernels, _vocabulary_shard(run))
    assert objective.targets is not None
    labelled = partial(count_labelled, objective.targets)
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), count_labels=labelled)


def default_chunk(vocabulary: int | None, device: str, memory_bytes: float | None = None) -> int:
    """Return the number of tokens in a chunk if the user does not set it: a multiple of 128.

    On CUDA, a chunk's 16-bit logits take at most 512 MiB and at most 1/32 of the device's memory,
    within limits of 1,024 and 8,192 tokens. The lower limit is for speed: each chunk reads and
    writes the fp32 gradient of the head's weight (8 bytes per element), and computes 2 x tokens
    FLOPs per element for this gradient. With fewer tokens, the memory traffic takes longer than the
    arithmetic.

    On a CPU, a chunk has 1,024 tokens. It has fewer if their fp32 logits would take more than 512
    MiB, which happens with more than 131,072 classes.

    vocabulary    number of classes of the output head on one device; None if unknown: 1,024 tokens
    device        "cpu" or "cuda"
    memory_bytes  memory of the device; None if unknown
    """
    most = CHUNK_BYTES if memory_bytes is None or device == "cpu" else min(CHUNK_BYTES, memory_bytes / SHARE_OF_DEVICE)
    if vocabulary is None:
        return CHUNK
    tokens = max(int(most / (BYTES[device] * vocabulary)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE, CHUNK_MULTIPLE)
    return min(tokens, CHUNK) if device == "cpu" else min(max(tokens, CHUNK), MOST_TOKENS)


def count_labelled(targets: Callable[[Batch], Tensor], batch: Batch) -> LabelCount | None:
    """Return the number of labelled targets of a batch, and of all its targets. Return None for
    fake tensors, which have no values.

    targets  returns a batch's targets; a target of IGNORED has no label
    batch    a batch in host memory
    """
    labels = targets(batch)
    return None if is_fake(labels) else LabelCount(int((labels != IGNORED).sum()), labels.numel())


def _vocabulary_shard(run: Run) -> VocabularyShard | None:
    """Return which classes of the output head this device has: (number of its first class, group of
    the devices that share the vocabulary). Return None if tensor parallelism does not shard the
    vocabulary.
    """
    head = find_output_head(run.objective, run.model).weight
    cuts = [
        run.tp_shards[name] for name, weight in run.model.named_parameters() if weight is head and name in run.tp_shards
    ]
    return (cuts[0].range()[0], cuts[0].mesh.group("tp")) if cuts else None


def chunked(
    objective: Objective,
    model: nn.Module,
    chunk: int,
    kernels: LossKernels = LossKernels(),  # noqa: B008
    vocabulary_shard: VocabularyShard | None = None,
) -> Objective:
    """Return `objective` with a loss that is computed in chunks of tokens, so that the logits of
    all tokens never exist at the same time. The forward of the output head in `model` is replaced.

    chunk             number of tokens whose logits exist at the same time
    kernels           the kernels that compute a chunk
    vocabulary_shard  given if tensor parallelism shards the head by vocabulary: (number of this
                      device's first class, group of the devices that share the vocabulary)

    A batch may contain the number of its labels (a LabelCount) under LABEL_COUNT_KEY. Then the
    logits of tokens without a label need not be computed.

    Raises InputError if no output head is found, or if the model's configuration says that it
    changes the logits after the head.
    """
    head = OutputHead(find_output_head(objective, model), model)
    head.attach()
    assert objective.logits is not None
    assert objective.targets is not None
    logits, targets = objective.logits, objective.targets
    first, sharded_loss = 0, None
    if vocabulary_shard is not None:
        first, group = vocabulary_shard
        sharded_loss = partial(vocab_parallel_cross_entropy_with_gradient, first=first, group=group)

    def total(model: nn.Module, batch: Batch) -> Tensor:
        labelled = batch.get(LABEL_COUNT_KEY) if isinstance(batch, dict) else None
        hidden = head.hidden(logits, model, batch)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            head.layer.weight,
            head.bias(first),
            targets(batch).flatten(),
            chunk,
            kernels,
            sharded_loss,
            labelled,
        )

    return replace(objective, total=total, compile=head.compile)
