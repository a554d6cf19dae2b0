"""Computes a language model's last matrix product and its cross entropy together, one chunk of
tokens at a time. This avoids storing the logits of all tokens, which are often the largest tensor
of training.

Saves   the logits and their gradient: (tokens, vocabulary) becomes (chunk, vocabulary). With a
        vocabulary of 128k, that is most of a language model's activations.
Costs   no arithmetic: the gradient is computed while the chunk's logits are in memory, so nothing
        is recomputed. From forward to backward, a gradient of the head's weight in fp32 and one of
        the hidden states are held. Where a tenth or more of the positions have no label, no logits
        are computed for them: in masked language models these are most positions.
When    any causal or masked language model.
Order   before anything wraps the head.
Source  Hsu et al. 2024, arXiv:2410.10989 (Liger kernel, fused linear cross entropy).

A chunk's size is chosen by bytes: see `default_chunk`. Its kernels depend on the device: see
`loss_kernels.py`.

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
from tightfit.parallel.tensor.vocab_cross_entropy import vocab_parallel_cross_entropy_with_gradient
from tightfit.plan import Plan
from tightfit.runtime.fake_compiler import can_generate_kernels
from tightfit.runtime.loss_kernels import ROWS_IN_CACHE, LossKernels, add_product, kernels_for, linear
from tightfit.runtime.method import Default, SearchFacts
from tightfit.runtime.repeated_iterations import repeated_iterations
from tightfit.runtime.run import Run
from tightfit.target_device import kind_of

LOGITS_BIAS = "final_logits_bias"  # the name of a buffer that BART and its relatives add to the logits
# this shard's first class, and the group of devices that share the vocabulary
VocabularyShard = tuple[int, dist.ProcessGroup]
FIELDS = ("chunked_loss",)
TRACED_FIELDS = ("chunked_loss",)
VARIANTS = ({"chunked_loss": 5},)
# to generate the softmax kernel for CUDA, before the first step; used until it is measured
COMPILE_S = 5.0
CHUNK = 1024  # tokens: the fastest measured on a CPU; on CUDA the fewest with fast products
MOST_TOKENS = 8192  # tokens of a chunk: longer chunks make no product faster
CHUNK_BYTES = 512 * 2**20  # of the logits of a chunk
SHARE_OF_DEVICE = 32  # a chunk's logits take at most 1/32 of a CUDA device's memory
# a chunk is a multiple of STEP tokens; bytes per logit, in the usual type
CHUNK_MULTIPLE, BYTES = 128, {"cpu": 4, "cuda": 2}
MAX_LABELLED_SHARE = 0.9  # rows are skipped where fewer than this share count


def enabled(plan: Plan) -> bool:
    return plan.chunked_loss is not None


def defaults(job: Job, machine: Machine) -> Iterator[Default]:
    """Chunks for transformers' language models."""
    if job.of_transformers and task_of(job.model) in ("causal-lm", "masked-lm", "seq2seq-lm"):
        yield Default("chunked_loss", chunk_of(job, machine), "logits are never all there at once")


def leanest(start: Plan, job: Job, facts: SearchFacts) -> dict[str, list[Any]]:
    """A chunk no larger than needed; or all logits at once, for a model whose loss cannot be
    chunked.
    """
    return {"chunked_loss": [None] if start.chunked_loss is None else [min(start.chunked_loss, CHUNK), None]}


def chunk_of(job: Job, machine: Machine) -> int:
    """The number of tokens in a chunk for this job on this machine: see `default_chunk`."""
    return default_chunk(model_input(job).vocabulary, machine.device, machine.memory_bytes.value)


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Add the time to generate a kernel; buffers and operations are traced.

    Where the vocabulary is sharded (tp), the softmax consists of torch's own operations and no
    kernel is generated.
    """
    if machine.device == "cpu" or plan.tp > 1 or not can_generate_kernels():
        return ledger
    return replace(ledger, compile_s=ledger.compile_s + COMPILE_S)


def apply(run: Run, plan: Plan) -> Run:
    """Replace the objective by one that computes the loss in chunks. Raises InputError where the
    logits are not the head's own output.
    """
    assert plan.chunked_loss is not None
    kernels = kernels_for(kind_of(run.device), plan.precision not in ("fp32", "tf32"), plan.chunked_loss)
    objective = chunked(run.objective, run.model, plan.chunked_loss, kernels, _vocabulary_shard(run))
    assert objective.targets is not None
    labelled = partial(count_labelled, objective.targets)
    return replace(run, objective=objective, loss_sum=partial(objective.total, run.model), count_labels=labelled)


def default_chunk(vocabulary: int | None, device: str, memory_bytes: float | None = None) -> int:
    """The number of tokens in a chunk where the user does not set it: a multiple of 128.

    On a CUDA device, as many tokens as have 512 MiB of logits in 16 bits, or a 32nd of the device's
    memory where that is less; but at least 1,024 and at most 8,192. Each chunk reads and writes the
    fp32 gradient of the head's weight once more, 8 bytes for every 2 x tokens FLOPs: with fewer
    tokens that takes longer than the product. On a CPU 1,024, or fewer where their fp32 logits
    would take more than 512 MiB: with a vocabulary beyond 131,072.

    vocabulary    classes of the head on one device; None where the model does not say
    device        "cpu" or "cuda"
    memory_bytes  of the device; None for unknown
    """
    most = CHUNK_BYTES if memory_bytes is None or device == "cpu" else min(CHUNK_BYTES, memory_bytes / SHARE_OF_DEVICE)
    if vocabulary is None:
        return CHUNK
    tokens = max(int(most / (BYTES[device] * vocabulary)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE, CHUNK_MULTIPLE)
    return min(tokens, CHUNK) if device == "cpu" else min(max(tokens, CHUNK), MOST_TOKENS)


def count_labelled(targets: Callable[[Batch], Tensor], batch: Batch) -> LabelCount | None:
    """The number of targets that count, for a batch on the host; None for tensors without values."""
    labels = targets(batch)
    return None if is_fake(labels) else LabelCount(int((labels != IGNORED).sum()), labels.numel())


def _vocabulary_shard(run: Run) -> VocabularyShard | None:
    """This device's shard of the head's classes, where the vocabulary is sharded across devices;
    else None.
    """
    head = find_head(run.objective, run.model).weight
    cuts = [
        run.tp_shards[name] for name, weight in run.model.named_parameters() if weight is head and name in run.tp_shards
    ]
    return (cuts[0].range()[0], cuts[0].mesh.group("tp")) if cuts else None


@dataclass
class Head:
    """A model's last linear layer, whose matrix product can be skipped during a forward.

    layer          the linear layer
    model          the model, which may have a buffer that it adds to the logits
    skips_product  whether the product is skipped at the moment
    hidden_states  the layer's input in the last such forward
    checked        whether the model was seen to return this input unchanged
    """

    layer: nn.Linear
    model: nn.Module
    skips_product: bool = False
    hidden_states: Tensor | None = None
    checked: bool = False

    def attach(self) -> None:
        """Replace the layer's forward by one that returns its input while `skips_product` is set."""
        product = self.layer.forward

        def forward(hidden: Tensor) -> Tensor:
            if not self.skips_product:
                return product(hidden)
            self.hidden_states = hidden
            return hidden

        self.layer.forward = forward  # type: ignore[method-assign, assignment]

    @property
    def logits_bias(self) -> Tensor | None:
        """A buffer that the model adds to the logits (BART's final_logits_bias); it is zero while
        the product is skipped.
        """
        return own_buffers(self.model).get(LOGITS_BIAS)

    def bias(self, first: int) -> Tensor | None:
        """The bias added to the products, for this layer's classes, which begin at class `first`;
        None for no bias.
        """
        if self.logits_bias is None:
            return self.layer.bias
        added = self.logits_bias.flatten()[first : first + len(self.layer.weight)]
        return added if self.layer.bias is None else self.layer.bias + added

    def hidden(self, logits: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
        """The head's input when the model runs on `batch`. Raises InputError where the model
        changes the head's output.
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
            # something as wide as the vocabulary was added to the hidden states
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
        """Check, on the first forward only, that the model returned the hidden states unchanged
        except for their type.
        """
        given = self.hidden_states
        if given is None or returned.shape[-1] != given.shape[-1] or returned.numel() != given.numel():
            raise _changed()
        if self.checked or returned is given or is_fake(returned):
            return
        self.checked = True
        if not torch.equal(returned.detach(), given.detach().to(returned.dtype).view_as(returned)):
            raise _changed()


def _changed() -> InputError:
    return InputError("plan: chunked_loss", "the model changes the logits after its head", "leave out chunked_loss")


def chunked(
    objective: Objective,
    model: nn.Module,
    chunk: int,
    kernels: LossKernels = LossKernels(),  # noqa: B008
    vocabulary_shard: VocabularyShard | None = None,
) -> Objective:
    """`objective` with the loss computed in chunks, so that the full logits never exist: see
    linear_cross_entropy.

    A batch may contain the number of its labels that count, under LABELLED. Raises InputError where
    the logits are not the head's own output.
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
    """The linear layer that produces a language model's logits. Raises InputError where there is
    none, or its output is changed.
    """
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else None
    if not isinstance(layer, nn.Linear) or objective.logits is None:
        raise InputError(
            "plan: chunked_loss",
            f"{type(model).__name__} has no linear layer that it calls its output embedding",
            "leave out chunked_loss, or give the model get_output_embeddings() returning its last nn.Linear",
        )
    config: Any = getattr(model, "config", None)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise InputError(
                "plan: chunked_loss", f"the model changes the logits after its head ({name})", "leave out chunked_loss"
            )
    return layer


# compiling gains nothing: it would unroll the loop, and all chunks would exist together
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
    """The cross entropy of `hidden @ weight.T + bias`, summed over the targets that count, `chunk`
    rows at a time.

    hidden            (tokens, width)
    weight            (vocabulary, width)
    bias              (vocabulary) or None
    targets           (tokens), with IGNORED where a token does not count
    kernels           which kernels compute a chunk
    vocabulary_shard  set where weight and bias are this device's shard of the vocabulary; the
                      gradient of hidden is then this shard's part of a sum over the devices
    labelled          how many targets count, as the host knows it. Where many do not, their rows
                      are skipped, without waiting for the device. None: all rows are computed

    Products run in autocast's type, or in that of `hidden`; the softmax and the sum run in fp32.
    Returns an fp32 scalar.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    taken = computed_rows(labelled, len(targets), kernels.row_multiple)
    # inside a Function's forward, gradients look disabled and inputs look as if they required them: ask here
    return LinearCrossEntropy.apply(
        hidden, weight, bias, targets, taken, (chunk, kernels), vocabulary_shard, dtype, torch.is_grad_enabled()
    )


def computed_rows(labelled: LabelCount | None, rows: int, multiple: int) -> int | None:
    """The number of rows to compute, a multiple of `multiple`: those that count and a few that do
    not; None for all.
    """
    if labelled is None:
        return None
    taken = -(-max(labelled.scaled_to(rows), 1) // multiple) * multiple
    return taken if taken < MAX_LABELLED_SHARE * rows else None


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, while a chunk's logits are in memory, and scales them in
    backward.
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
        divided: VocabularyShard | None,
        dtype: torch.dtype,
        learning: bool,
    ) -> Tensor:
        wanted = [learning and needed for needed in ctx.needs_input_grad[:3]]
        which = None if taken is None else _labelled_rows_first(targets)[:taken]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _sum_and_gradients(hidden, weight, bias, targets, which, how, divided, dtype, wanted)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shape = hidden.shape
        ctx.save_for_backward(*gradients, which if wanted[0] else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *made, which = ctx.saved_tensors
        # in place, which autograd tracks: a second backward through the same graph raises
        scaled = [
            None if gradient is None else gradient.mul_(gradients[0]).to(dtype)
            for gradient, dtype in zip(made, ctx.types, strict=True)
        ]
        if which is not None and scaled[0] is not None:
            scaled[0] = scaled[0].new_zeros(ctx.shape).index_copy_(0, which, scaled[0])
        return *scaled, None, None, None, None, None, None


def _labelled_rows_first(targets: Tensor) -> Tensor:
    """The indices of all rows, labelled rows first, each group in its order. It does not wait for
    the device.
    """
    return (targets == IGNORED).to(torch.uint8).argsort(stable=True)


def _sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    which: Tensor | None,
    how: tuple[int, LossKernels],
    divided: VocabularyShard | None,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The loss and its gradients for hidden, weight and bias, for each where `wanted` says so; the
    last two in fp32.

    which: indices of the computed rows, to which the gradient for hidden belongs; None for all.
    """
    chunk, kernels = how
    narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    count = len(hidden) if which is None else len(which)
    for_hidden = hidden.new_empty((count, hidden.shape[1]), dtype=dtype) if wanted[0] else None
    one = count <= chunk and weight.dtype == dtype  # a single product, already in the weight's type
    wide = torch.promote_types(dtype, torch.float32)
    adds = kernels.accumulates_fp32 and dtype != wide and count > 0
    begun = torch.empty_like if adds else torch.zeros_like
    for_weight = begun(weight, dtype=wide) if wanted[1] and not one else None
    for_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    loss = torch.zeros((), dtype=wide, device=hidden.device)

    # a function, so that a chunk's tensors are freed before the next chunk's logits
    def compute_chunk(here: slice) -> None:
        nonlocal for_weight
        if which is None:
            rows, labels = hidden[here].to(dtype), targets[here]
        else:
            rows, labels = hidden.index_select(0, which[here]).to(dtype), targets.index_select(0, which[here])
        logits = linear(rows, narrow_weight, narrow_bias, kernels.pads)
        part, gradient = _chunk_loss(logits, labels, kernels, divided, any(wanted))
        loss.add_(part)
        counts = (labels != IGNORED).to(dtype).unsqueeze(1)
        if for_hidden is not None:
            torch.mm(gradient, narrow_weight, out=for_hidden[here]).mul_(counts)
        if wanted[1]:
            rows = rows * counts
            if for_weight is None or one:
                for_weight = gradient.t() @ rows
            else:
                _add_weight_gradient(for_weight, gradient.t(), rows, adds, here.start == 0)
        if for_bias is not None:
            for_bias.add_((gradient.t() @ counts).squeeze(1))

    for start in repeated_iterations(range(0, count, chunk)):
        compute_chunk(slice(start, start + chunk))
    return loss, (for_hidden, for_weight, for_bias)


def _chunk_loss(
    logits: Tensor, labels: Tensor, kernels: LossKernels, divided: VocabularyShard | None, learning: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient for the logits, which may overwrite them."""
    if divided is not None:
        return vocab_parallel_cross_entropy_with_gradient(logits, labels, *divided)
    if kernels.fused is not None and learning:
        return kernels.fused(logits, labels), logits
    return cross_entropy_with_gradient(logits, labels, kernels.rows)


def _add_weight_gradient(total: Tensor, left: Tensor, right: Tensor, fused: bool, first: bool) -> None:
    """Add the product of a chunk to the weight's gradient, in place.

    fused  whether one kernel multiplies and adds in fp32. Then the first product overwrites `total`
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif fused:
        add_product(left, right, total, first)
    else:
        total += left @ right


def cross_entropy_with_gradient(logits: Tensor, labels: Tensor, rows: int = ROWS_IN_CACHE) -> tuple[Tensor, Tensor]:
    """The summed cross entropy, in fp32, of (rows, classes) logits; the gradient of each row
    overwrites its logits.

    The gradient is softmax minus one at the label. In rows whose label is IGNORED it is
    meaningless.
    """
    loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for start in repeated_iterations(range(0, len(logits), rows)):
        here = slice(start, start + rows)
        loss += _loss_and_gradient_within(logits[here], labels[here])
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
