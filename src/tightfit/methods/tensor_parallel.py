"""Tensor parallelism: the products of attention and MLP are divided among devices, by columns, then by rows.

Saves   parameters, their states and the activations between the two products, all by the number of devices; a language
        model's embedding and logits as well, by vocabulary.
Costs   for each pair of products one sum over the devices in forward and one in backward, of the hidden states, which
        nothing hides: inside a node only, where links are fast. Norms, dropout and the residual stream are everyone's.
When    one layer's activations or weights are too large for a device, or more data parallelism would leave it too few
        samples. As many devices as divide the number of attention heads.
Order   after attention, which the model's configuration chooses; before what wraps blocks.
Source  Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM); the tables of transformers' own configurations where they
        have one.

A table says which module is divided how, by its name with * for any part: colwise, rowwise, qkv (columns of three
matrices side by side), heads (an embedding whose columns are attention heads). Parameters are created whole, by the same
seed everywhere, and cut: what is trained is what one device trains.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.mesh import Mesh, Slice, grown, message, shrink
from tightfit.methods.run import Run
from tightfit.models.objective import IGNORED, Batch, Objective
from tightfit.plan import Plan

VARIANTS = ({"tp": 2},)

TABLES: dict[str, dict[str, str]] = {
    "gpt2": {"*.attn.c_attn": "qkv", "*.attn.c_proj": "rowwise", "*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise"},
    "bert": {
        "*.attention.self.query": "colwise",
        "*.attention.self.key": "colwise",
        "*.attention.self.value": "colwise",
        "*.attention.output.dense": "rowwise",
        "*.intermediate.dense": "colwise",
        "*.layer.*.output.dense": "rowwise",
    },
    "vit": {
        "*.q_proj": "colwise",
        "*.k_proj": "colwise",
        "*.v_proj": "colwise",
        "*.o_proj": "rowwise",
        "*.mlp.fc1": "colwise",
        "*.mlp.fc2": "rowwise",
    },
    "t5": {
        "*Attention.q": "colwise",
        "*Attention.k": "colwise",
        "*Attention.v": "colwise",
        "*Attention.o": "rowwise",
        "*.relative_attention_bias": "heads",
        "*.wi": "colwise",
        "*.wi_0": "colwise",
        "*.wi_1": "colwise",
        "*.wo": "rowwise",
    },
}
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
STYLES = ("colwise", "rowwise", "qkv", "heads")


def wanted(plan: Plan) -> bool:
    return plan.tp > 1


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """The profile traces one device's part of the model, with what it says to the others, which they wait for."""
    sums = sum(
        operation.moved.at(ledger.micro_batch) / 2 * operation.count.at(ledger.micro_batch)  # read, and written
        for passage in ledger.training
        for operation in passage.timeline.operations
        if operation.name == "c10d.allreduce_"
    )
    ring = 2 * (plan.tp - 1) / plan.tp * sums * ledger.micro_batches
    sent = replace(message("activations", ring, plan, machine, ("tp",)), hides=False)
    return replace(ledger, messages=(*ledger.messages, sent))


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    table = table_of(run)
    _check_heads(run.model, plan.tp)
    cutter = Cutter(run.model, run.mesh)
    found = 0
    for name, module in list(run.model.named_modules()):
        style = next((style for pattern, style in table.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is not None:
            cutter.divide(name, module, style)
            found += 1
    if not found:
        raise InputError(
            f"plan: tp={plan.tp}", "no module of the model is in its table", "mend model.tensor_parallel, or use tp: 1"
        )
    objective = run.objective
    get = getattr(run.model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if isinstance(head, nn.Linear) and objective.logits is not None and run.job.loss is None:
        objective = cutter.divide_vocabulary(run.model, head, objective)
    model = run.model
    return replace(
        run, objective=objective, loss_sum=lambda batch: objective.total(model, batch), slices=cutter.slices()
    )


def table_of(run: Run) -> dict[str, str]:
    """Which modules are divided how: as the job says, or the model, or its configuration, or TABLES. Raises InputError."""
    spec = run.job.model
    own = spec.tensor_parallel if isinstance(spec, ModelSpec) else None
    own = own or getattr(run.model, "tensor_parallel", None)
    if own:
        wrong = sorted({style for style in own.values() if style not in STYLES})
        if wrong:
            raise InputError(
                f"job: model.tensor_parallel: {wrong[0]}",
                "unknown way to divide a module",
                f"use one of: {', '.join(STYLES)}",
            )
        return dict(own)
    config: Any = getattr(run.model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in TABLES:
        return TABLES[kind]
    given = getattr(config, "base_model_tp_plan", None) or {}
    others = sorted({style for style in given.values() if style not in STYLES})
    if given and not others:
        return {f"*{pattern}": style for pattern, style in given.items()}
    found = f"{kind or type(run.model).__name__} has no table of what can be divided"
    if others:
        found = f"{kind} divides modules in a way that is not known here ({others[0]})"
    raise InputError(
        "plan: tp",
        found,
        "give one in the job (model: {..., tensor_parallel: {blocks.*.up: colwise, blocks.*.down: rowwise}}), or use tp: 1",
    )


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            fitting = max(n for n in range(1, size) if heads % n == 0)
            raise InputError(
                f"plan: tp={size}",
                f"the model's {name} is {heads}, which {size} devices cannot share",
                f"use tp: {fitting}",
            )


class Cutter:
    """Cuts a model's modules down to one device's part of them, and notes what was cut."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.group, self.size, self.rank = mesh.group("tp"), mesh.size("tp"), mesh.rank("tp")
        self.cut: dict[nn.Parameter, tuple[nn.Parameter, Slice]] = {}
        self.draws = Draws(model, self.rank)

    def divide(self, name: str, module: nn.Module, style: str) -> None:
        if style == "heads" and isinstance(module, nn.Embedding):
            self._take(module, "weight", 1)
            module.embedding_dim = module.weight.shape[1]
            return
        weight = getattr(module, "weight", None)
        is_linear, is_transposed = isinstance(module, nn.Linear), type(module).__name__ == "Conv1D"
        if style == "heads" or not isinstance(weight, nn.Parameter) or not (is_linear or is_transposed):
            raise InputError(
                f"plan: tp, table: {name}: {style}",
                f"is a {type(module).__name__}, which cannot be divided so",
                "name nn.Linear modules in the table",
            )
        columns, rows = (0, 1) if is_linear else (1, 0)
        pieces = 3 if style == "qkv" else 1
        dim = rows if style == "rowwise" else columns
        if weight.shape[dim] % (self.size * pieces):
            raise InputError(
                f"plan: tp={self.size}", f"{name} has {weight.shape[dim]} rows or columns to divide", "use a smaller tp"
            )
        self._take(module, "weight", dim, pieces)
        if style == "rowwise":
            self._sum_after(module)
        else:
            if module.bias is not None:
                self._take(module, "bias", 0, pieces)
            self._copy_before(module)
        self._set_sizes(name, module, style, is_transposed)

    def _set_sizes(self, name: str, module: Any, style: str, is_transposed: bool) -> None:
        """What modules remember of their own sizes."""
        if is_transposed:
            module.nf = module.weight.shape[1]
        else:
            module.out_features, module.in_features = module.weight.shape
        parent: Any = self.model.get_submodule(name.rpartition(".")[0])
        if style == "qkv":
            parent.split_size //= self.size
        if style == "rowwise" and hasattr(parent, "relative_attention_num_buckets"):
            parent.n_heads //= self.size

    def _take(self, module: nn.Module, name: str, dim: int, pieces: int = 1) -> None:
        """Put this device's part of a parameter in its place; of one that several modules share, in all of them."""
        whole = getattr(module, name)
        if any(whole is mine for mine, _ in self.cut.values()):
            return  # it is another module's too, and was cut there
        if whole not in self.cut:
            part = Slice(self.mesh, whole.shape, dim, pieces)
            values = part.part(grown(whole, self.mesh))
            shrunk = hasattr(whole, "rows")
            if shrunk:
                kept = torch.empty(values.shape, dtype=values.dtype, device="meta")
            else:  # of a parameter that another device of a pipeline has there are no values
                kept = values if whole.untyped_storage().nbytes() < whole.nbytes else values.clone()
            mine = nn.Parameter(kept, requires_grad=whole.requires_grad)
            if shrunk:
                shrink(mine, self.mesh, values)
            self.cut[whole] = mine, part
        mine, _ = self.cut[whole]
        for other in self.model.modules():
            for key, parameter in list(other._parameters.items()):
                if parameter is whole:
                    other._parameters[key] = mine

    def _copy_before(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, inputs: (_Copied.apply(inputs[0], self.group), *inputs[1:]))
        module.register_forward_hook(self.draws.enter)

    def _sum_after(self, module: Any) -> None:
        bias, product = module.bias, module.forward

        def forward(input: Tensor) -> Tensor:
            self.draws.leave()
            held = module._parameters.get("bias")
            if bias is None or held is None:
                return _Summed.apply(product(input), self.group)
            module._parameters["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(held)
            try:
                summed = _Summed.apply(product(input), self.group)
            finally:
                module._parameters["bias"] = held
            return summed + held.to(summed.dtype)

        module.forward = forward

    def divide_vocabulary(self, model: Any, head: nn.Linear, objective: Objective) -> Objective:
        """Embedding and head by vocabulary: logits are never whole, and only numbers of each token travel."""
        part = Slice(self.mesh, head.weight.shape, 0)
        first, last = part.range()
        vocabulary = head.weight.shape[0]
        self._take(head, "weight", 0)
        if head.bias is not None:
            self._take(head, "bias", 0)
        head.out_features = last - first
        head.register_forward_pre_hook(lambda module, inputs: (_Copied.apply(inputs[0], self.group), *inputs[1:]))
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == vocabulary:
            self._take(embedding, "weight", 0)
            for module in model.modules():  # an encoder and a decoder have one each, of one weight
                if isinstance(module, nn.Embedding) and module.weight is embedding.weight:
                    self._look_up(module, first, last)
        assert objective.logits is not None
        assert objective.targets is not None
        logits, targets, group = objective.logits, objective.targets, self.group

        def total(model: nn.Module, batch: Batch) -> Tensor:
            return divided_cross_entropy(logits(model, batch).flatten(0, -2), targets(batch).flatten(), first, group)

        return replace(objective, total=total)

    def _look_up(self, embedding: nn.Embedding, first: int, last: int) -> None:
        """Rows that are another device's are zero here, and the sum over devices has them all."""
        embedding.num_embeddings = last - first
        padding, lookup = embedding.padding_idx, embedding.forward
        embedding.padding_idx = padding - first if padding is not None and first <= padding < last else None

        def forward(input: Tensor) -> Tensor:
            here = (input >= first) & (input < last)
            found = lookup(torch.where(here, input - first, 0))
            return _Summed.apply(found * here.unsqueeze(-1).to(found.dtype), self.group)

        embedding.forward = forward  # type: ignore[method-assign]

    def slices(self) -> dict[str, Slice]:
        parts = dict(self.cut.values())
        return {name: parts[p] for name, p in self.model.named_parameters() if p in parts}


class Draws:
    """Dropout between a division by columns and the one by rows draws other numbers on each device, elsewhere the same.

    What is drawn inside begins from a number that the common generator draws, so a recomputation draws it again.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.outside: tuple[Tensor, Tensor | None] | None = None
        self.model = model
        self.needed = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or _has_dropout(model)

    def enter(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.needed and module.training and self.outside is None:
            seed = int(torch.randint(2**31, ()))
            self.outside = _states(output.device)
            torch.manual_seed(seed * 1009 + self.rank)

    def leave(self) -> None:
        if self.outside is not None:
            _restore(self.outside)
            self.outside = None


def _has_dropout(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    return any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(config or object).items()
    )


def _states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


class _Copied(torch.autograd.Function):
    """Forward the same tensor everywhere; backward the sum of everyone's gradients (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """Forward the sum of everyone's tensors; backward the same gradient everywhere (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = input.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def divided_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Summed cross entropy of logits whose classes are divided among devices: (tokens, classes from `first` on) here.

    targets (tokens), IGNORED where nothing counts. Of each token its largest logit, its sum of exponentials and its
    target's logit travel, in fp32. Returns an fp32 scalar, the same everywhere.
    """
    return _DividedCrossEntropy.apply(logits, targets, first, group)


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        values = logits.float()
        largest = values.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (values - largest.unsqueeze(-1)).exp_()
        counts = targets != IGNORED
        here = counts & (targets >= first) & (targets < first + logits.shape[-1])
        local = torch.where(here, targets - first, 0)
        chosen = torch.where(here, values.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        sums = torch.stack([exponentials.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + largest - sums[1]
        exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(exponentials, local, here, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, losses, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, local.unsqueeze(-1), -here.to(gradient.dtype).unsqueeze(-1))
        gradient *= (counts.to(gradient.dtype) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None
