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
on the device: see `runtime/loss_kernels.py`.

Example: 8,192 tokens and a vocabulary of 128,000 make 8,192 x 128,000 logits, 2.0 GiB in 16 bits,
and their gradient as much again. In chunks of 1,024 tokens, 0.25 GiB of logits exist at a time, and
the gradient overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tightfit._torch.fake import is_fake
from tightfit._torch.modules import own_buffers
from tightfit.cost.ledger import Ledger
from tightfit.data import model_input
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.machine import Machine
from tightfit.models import task_of
from tightfit.models.objective import IGNORED, LABEL_COUNT_KEY, Batch, LabelCount, Objective
from tightfit.optim.gradient_dtype import gradient_dtype
from tightfit.parallel.tensor.vocab_cross_entropy import vocab_parallel_cross_entropy_with_gradient
from tightfit.plan import Plan
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.loss_kernels import ROWS_IN_CACHE, LossKernels, add_product, kernels_for, padded
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.repeated_iterations import repeated_iterations
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

LOGITS_BIAS = "final_logits_bias"  # a buffer that BART and similar models add to the logits
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
# unlabelled rows are skipped if fewer than this share of all rows have a label
MAX_LABELLED_SHARE = 0.9


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
    head = find_head(run.objective, run.model).weight
    cuts = [
        run.tp_shards[name] for name, weight in run.model.named_parameters() if weight is head and name in run.tp_shards
    ]
    return (cuts[0].range()[0], cuts[0].mesh.group("tp")) if cuts else None


@dataclass
class Head:
    """Runs a model without the matrix product of its output head, so that the model returns hidden
    states instead of logits. The chunked loss computes the logits from the hidden states.

    layer          the output head
    model          the model; it may have a buffer that it adds to the logits
    skips_product  True while a forward without the product runs
    hidden_states  the input of the output head in this forward; None outside of it
    checked        True after a check that the model returns the hidden states unchanged
    """

    layer: nn.Linear
    model: nn.Module
    skips_product: bool = False
    hidden_states: Tensor | None = None
    checked: bool = False

    def attach(self) -> None:
        """Replace the forward of the output head by one that returns its input while
        `skips_product` is True."""
        product = self.layer.forward

        def forward(hidden: Tensor) -> Tensor:
            if not self.skips_product:
                return product(hidden)
            self.hidden_states = hidden
            return hidden

        self.layer.forward = forward  # type: ignore[method-assign, assignment]

    @property
    def logits_bias(self) -> Tensor | None:
        """The buffer that the model adds to the logits (BART's final_logits_bias); None if the
        model has no such buffer.
        """
        return own_buffers(self.model).get(LOGITS_BIAS)

    def bias(self, first: int) -> Tensor | None:
        """Return the sum of the head's bias and the model's logits bias, or None if there is
        neither.

        first  number of the layer's first class; more than 0 if the layer is a shard of the head
        """
        if self.logits_bias is None:
            return self.layer.bias
        added = self.logits_bias.flatten()[first : first + len(self.layer.weight)]
        return added if self.layer.bias is None else self.layer.bias + added

    def hidden(self, logits: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
        """Run the model on `batch` without the head's product, and return the hidden states, which
        are the head's input. Raises InputError if the model changes the head's output.

        logits  the function `Objective.logits`, which calls the model on the batch
        """
        added, self.hidden_states = self.logits_bias, None
        self.skips_product = True
        if added is not None:
            own_buffers(self.model)[LOGITS_BIAS] = added.new_zeros(1, 1)
        try:
            returned = logits(model, batch)
        except RuntimeError as error:
            if self.hidden_states is None or "must match the size" not in str(error):
                raise
            # the model added a tensor with one element per class to the hidden states
            raise _changed() from error
        finally:
            self.skips_product = False
            if added is not None:
                own_buffers(self.model)[LOGITS_BIAS] = added
        self._check(returned)
        self.hidden_states = None
        return returned

    @torch.compiler.disable
    def _check(self, returned: Tensor) -> None:
        """Raise InputError if `returned`, the model's output, differs from the hidden states in
        more than its type. The values are compared only in the first forward, the shapes in each.
        """
        given = self.hidden_states
        if given is None or returned.shape[-1] != given.shape[-1] or returned.numel() != given.numel():
            raise _changed()
        if self.checked or returned is given or is_fake(returned):
            return
        self.checked = True
        if returned.requires_grad and self.logits_bias is None and not _is_copy_of(given, returned):
            raise _changed()  # by something that changes no value yet, such as a scale that begins at 1
        if not torch.equal(returned.detach(), given.detach().to(returned.dtype).view_as(returned)):
            raise _changed()


# backwards of operations that give the numbers of one tensor as they are, in another shape or type
_COPIES = (
    "ToCopyBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "AliasBackward", "CloneBackward",
    "SliceBackward", "SqueezeBackward", "UnsqueezeBackward", "TransposeBackward", "PermuteBackward", "TBackward", "AsStridedBackward",
)  # fmt: skip


def _is_copy_of(given: Tensor, returned: Tensor) -> bool:
    """Return whether autograd says that `returned` was made from `given` by copies, casts and views alone."""
    node = returned.grad_fn
    while node is not None and node is not given.grad_fn:
        if not node.name().startswith(_COPIES) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return node is given.grad_fn


def _changed() -> InputError:
    return InputError(
        "plan: chunked_loss", "the model changes the logits after its output head", "leave out chunked_loss"
    )


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
    head = Head(find_head(objective, model), model)
    head.attach()
    assert objective.logits is not None
    assert objective.targets is not None
    logits, targets = objective.logits, objective.targets

    def total(model: nn.Module, batch: Batch) -> Tensor:
        labelled = batch.get(LABEL_COUNT_KEY) if isinstance(batch, dict) else None
        hidden = head.hidden(logits, model, batch)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            head.layer.weight,
            head.bias(vocabulary_shard[0] if vocabulary_shard else 0),
            targets(batch).flatten(),
            chunk,
            kernels,
            vocabulary_shard,
            labelled,
        )

    return replace(objective, total=total)


def find_head(objective: Objective, model: nn.Module) -> nn.Linear:
    """Return the output head: the linear layer that produces a language model's logits. Raises
    InputError if the model does not name one, or if its configuration says that it changes the
    logits after the head.
    """
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else None
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        raise InputError(
            "plan: chunked_loss",
            f"the model's output head is a {type(layer).__name__}, whose forward is not that of nn.Linear",
            "leave out chunked_loss",
        )
    if not isinstance(layer, nn.Linear) or objective.logits is None:
        raise InputError(
            "plan: chunked_loss",
            f"{type(model).__name__} does not say which nn.Linear is its output head",
            "leave out chunked_loss, or give the model a method get_output_embeddings() that returns this layer",
        )
    config: Any = getattr(model, "config", None)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise InputError(
                "plan: chunked_loss",
                f"the model changes the logits after its output head ({name})",
                "leave out chunked_loss",
            )
    return layer


# not compiled: the compiler would unroll the loop, and all chunks would exist at the same time
@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    kernels: LossKernels = LossKernels(),  # noqa: B008
    vocabulary_shard: VocabularyShard | None = None,
    labelled: LabelCount | None = None,
) -> Tensor:
    """Compute the cross entropy of `hidden @ weight.T + bias`, summed over the labelled tokens,
    `chunk` tokens at a time.

    hidden            (tokens, width)
    weight            (vocabulary, width)
    bias              (vocabulary) or None
    targets           (tokens): the class of each token, or IGNORED for a token without a label
    chunk             number of tokens whose logits exist at the same time
    kernels           the kernels that compute a chunk
    vocabulary_shard  given if weight and bias are this device's shard of the vocabulary: (number of
                      its first class, group of the devices). The gradient of `hidden` is then
                      partial: its sum over the devices is the gradient
    labelled          how many targets have a label, counted on the host. If more than a tenth do
                      not, no logits are computed for most of those. None: all are computed

    Products run in autocast's type, or without autocast in the type of `hidden`. The softmax and
    the sum run in fp32. Returns an fp32 scalar.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    taken = computed_rows(labelled, len(targets), kernels.row_multiple)
    # is_grad_enabled() is always False inside a Function's forward, so it is read here
    return LinearCrossEntropy.apply(
        hidden, weight, bias, targets, taken, (chunk, kernels), vocabulary_shard, dtype, torch.is_grad_enabled()
    )


def computed_rows(labelled: LabelCount | None, rows: int, multiple: int) -> int | None:
    """Return for how many rows (tokens) the chunked loss computes logits; None means all rows.

    The result is the number of labelled rows, rounded up to a multiple of `multiple`. It is None if
    the number of labels is unknown, or if the result would be 90 % of the rows or more.

    labelled  the number of labels; None if it is unknown
    rows      the number of all rows

    Example: 150 of 1,000 rows have a label, and `multiple` is 128: 256 rows are computed.
    """
    if labelled is None:
        return None
    taken = -(-max(labelled.scaled_to(rows), 1) // multiple) * multiple
    return taken if taken < MAX_LABELLED_SHARE * rows else None


class LinearCrossEntropy(torch.autograd.Function):
    """The autograd function of the chunked loss (see `linear_cross_entropy`). Forward computes the
    loss and also its gradients, while a chunk's logits are in memory. Backward multiplies these by
    the incoming gradient of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        taken: int | None,
        how: tuple[int, LossKernels],
        shard: VocabularyShard | None,
        dtype: torch.dtype,
        learning: bool,
    ) -> Tensor:
        needed = [learning and needs for needs in ctx.needs_input_grad[:3]]
        chosen_rows = None if taken is None else _labelled_rows_first(targets)[:taken]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _sum_and_gradients(hidden, weight, bias, targets, chosen_rows, how, shard, dtype, needed)
        # a leaf may have fp32 gradients although it is stored in 16 bits (master_weights)
        own = [None if one is None else gradient_dtype(one) if one.is_leaf else one.dtype for one in (weight, bias)]
        ctx.types = (hidden.dtype, *own)
        ctx.shape = hidden.shape
        ctx.save_for_backward(*gradients, chosen_rows if needed[0] else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *made, chosen_rows = ctx.saved_tensors
        # in place: autograd notices the change, so a second backward through this graph raises
        scaled = [
            None if gradient is None else gradient.mul_(gradients[0]).to(dtype)
            for gradient, dtype in zip(made, ctx.types, strict=True)
        ]
        if chosen_rows is not None and scaled[0] is not None:
            scaled[0] = scaled[0].new_zeros(ctx.shape).index_copy_(0, chosen_rows, scaled[0])
        return *scaled, None, None, None, None, None, None


def _labelled_rows_first(targets: Tensor) -> Tensor:
    """Return the indices of all rows of `targets`: first the rows with a label, then the others,
    both in their original order. The host does not wait for the device.
    """
    return (targets == IGNORED).to(torch.uint8).argsort(stable=True)


def _sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chosen_rows: Tensor | None,
    how: tuple[int, LossKernels],
    shard: VocabularyShard | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the summed loss, and a tuple with its gradients with respect to hidden, weight and
    bias. A gradient that is not needed is None.

    The gradient of hidden is in `dtype`, the other two are in fp32. Exception: with a single chunk
    and a weight of type `dtype`, the gradient of the weight is in `dtype`, too.

    hidden, weight, bias, targets  as in `linear_cross_entropy`
    chosen_rows  indices of the rows to compute; None for all. The gradient of hidden has these rows
                 only
    how          (tokens in a chunk, kernels)
    shard        the vocabulary shard of this device; None if the vocabulary is not sharded
    dtype        the type of the products
    needed       for each of hidden, weight and bias, whether its gradient is needed
    """
    chunk, kernels = how
    classes = len(weight)
    narrow_weight = padded(weight, dtype, kernels.pads)
    narrow_bias = None if bias is None else padded(bias, dtype, kernels.pads)
    count = len(hidden) if chosen_rows is None else len(chosen_rows)
    for_hidden = hidden.new_empty((count, hidden.shape[1]), dtype=dtype) if needed[0] else None
    single_product = count <= chunk and weight.dtype == dtype  # already in the weight's type
    wide = torch.promote_types(dtype, torch.float32)
    sums_in_fp32 = kernels.accumulates_fp32 and dtype != wide and count > 0
    allocate = torch.empty_like if sums_in_fp32 else torch.zeros_like
    for_weight = allocate(weight, dtype=wide) if needed[1] and not single_product else None
    for_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    loss = torch.zeros((), dtype=wide, device=hidden.device)

    # a function, so that a chunk's tensors are freed before the next chunk's logits
    def compute_chunk(span: slice) -> None:
        nonlocal for_weight
        if chosen_rows is None:
            rows, labels = hidden[span].to(dtype), targets[span]
        else:
            row_indices = chosen_rows[span]
            rows, labels = hidden.index_select(0, row_indices).to(dtype), targets.index_select(0, row_indices)
        padded_logits = functional.linear(rows, narrow_weight, narrow_bias)
        logits = padded_logits[:, :classes]
        part, gradient = _chunk_loss(logits, labels, kernels, shard, any(needed))  # may write it over the logits
        loss.add_(part)
        counts = (labels != IGNORED).to(dtype).unsqueeze(1)
        if for_hidden is not None:
            # where the gradient was written over the logits, it has the zeros of padded classes beside it
            overwritten = gradient is logits
            factors = (padded_logits, narrow_weight) if overwritten else (gradient, narrow_weight[:classes])
            torch.mm(*factors, out=for_hidden[span]).mul_(counts)
        if needed[1]:
            rows = rows * counts
            if for_weight is None or single_product:
                for_weight = gradient.t() @ rows
            else:
                _add_weight_gradient(for_weight, gradient.t(), rows, sums_in_fp32, span.start == 0)
        if for_bias is not None:
            for_bias.add_((gradient.t() @ counts).squeeze(1))

    for start in repeated_iterations(range(0, count, chunk)):
        compute_chunk(slice(start, start + chunk))
    return loss, (for_hidden, for_weight, for_bias)


def _chunk_loss(
    logits: Tensor, labels: Tensor, kernels: LossKernels, shard: VocabularyShard | None, learning: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of one chunk of tokens, and its gradient with respect to the logits.
    The gradient may be written over the logits.

    logits    (tokens, classes)
    labels    (tokens)
    shard     the vocabulary shard of this device; None if the vocabulary is not sharded
    learning  whether the gradient is needed
    """
    if shard is not None:
        return vocab_parallel_cross_entropy_with_gradient(logits, labels, *shard)
    if kernels.fused is not None and learning:
        return kernels.fused(logits, labels), logits
    return cross_entropy_with_gradient(logits, labels, kernels.rows)


def _add_weight_gradient(total: Tensor, left: Tensor, right: Tensor, fused: bool, first: bool) -> None:
    """Add `left @ right`, the product of one chunk, to `total`, the fp32 gradient of the weight, in
    place.

    fused  whether one kernel multiplies in 16 bits and adds in fp32
    first  whether this is the first chunk. With `fused`, its product overwrites `total`
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif fused:
        add_product(left, right, total, first)
    else:
        total += left @ right


def cross_entropy_with_gradient(logits: Tensor, labels: Tensor, rows: int = ROWS_IN_CACHE) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy in fp32, and its gradient with respect to the logits, which
    is written over the logits.

    logits  (tokens, classes)
    labels  (tokens): a class, or IGNORED
    rows    number of tokens that are computed in fp32 at a time

    The gradient is the softmax, minus one at the label. For a token whose label is IGNORED, it has
    no meaning.
    """
    loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for start in repeated_iterations(range(0, len(logits), rows)):
        span = slice(start, start + rows)
        loss += _loss_and_gradient_within(logits[span], labels[span])
    return loss, logits


def _loss_and_gradient_within(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORED
    safe = labels.where(counts, 0).unsqueeze(1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    chosen, largest = logits.gather(1, safe).to(wide), logits.amax(-1, keepdim=True).to(wide)
    probability = functional.softmax(logits, -1, dtype=wide)
    log_sum = largest - probability.amax(-1, keepdim=True).log()
    gradient_there = probability.gather(1, safe).sub_(1).to(logits.dtype)
    logits.copy_(probability).scatter_(1, safe, gradient_there)
    return ((log_sum - chosen) * counts.unsqueeze(1)).sum()
