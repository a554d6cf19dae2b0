"""Cutter: takes one device's part of a model's modules for tensor parallelism, and puts in what the devices say to each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.methods.collectives import gather_rows, summed
from tightfit.methods.mesh import Mesh, Slice, grown, shrink
from tightfit.methods.sequences import Sequences, before
from tightfit.methods.vocabulary import divided_cross_entropy
from tightfit.models.objective import Batch, Objective

GATHERED = "colwise_gather_output"


class Cutter:
    """Cuts a model's modules down to one device's part of them, and notes what was cut."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        sequences: Sequences | None = None,
        blocks: list[tuple[str, nn.Module]] | None = None,
    ) -> None:
        """sequences: where those are divided too. blocks: the model's, where they are compiled."""
        self.model, self.mesh, self.sequences = model, mesh, sequences
        self.group, self.size, self.rank = mesh.group("tp"), mesh.size("tp"), mesh.rank("tp")
        self.cut: dict[nn.Parameter, tuple[nn.Parameter, Slice]] = {}
        self.made: set[nn.Parameter] = set()
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners[parameter].append((module, key))
        self.draws = Draws(model, self.rank)
        self.compiled = None if blocks is None else [block for _, block in blocks]
        self.regions: set[nn.Module] = set()
        self.copied: tuple[Tensor, Tensor] | None = None  # what the last products by columns were given, and its copy
        if sequences is not None:  # each device has other positions: all that a block draws is its own
            for _, block in sequences.blocks:
                block.register_forward_pre_hook(self.draws.enter)
                block.register_forward_hook(self.draws.leave)

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
        gathers = style == GATHERED
        if gathers and (len(self.owners[weight]) > 1 or self._is_in_divided_sequences(module)):
            raise InputError(
                f"plan: tp, table: {name}: {style}",
                "its weight is another module's too, or its block does a part of each sequence",
                "leave it out of the table, or say whole",
            )
        self._take(module, "weight", dim, pieces)
        if style == "rowwise":
            self._sum_after(module)
        else:
            if module.bias is not None:
                self._take(module, "bias", 0, pieces)
            if gathers:
                module.register_forward_pre_hook(self._copied_input)
                module.register_forward_hook(lambda module, inputs, output: _Gathered.apply(output, self.group))
            else:
                self._copy_before(name, module)
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
        if whole in self.made:
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
            self.made.add(mine)
        for owner, key in self.owners[whole]:
            owner._parameters[key] = self.cut[whole][0]

    def _copy_before(self, name: str, module: nn.Module) -> None:
        if self.sequences is not None:
            self.sequences.enter(self.model.get_submodule(name.rpartition(".")[0]), module)
            return
        module.register_forward_pre_hook(self.draws.enter)
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if self.compiled is not None and self._feeds_all(parent):
            if parent not in self.regions:
                self.regions.add(parent)
                before(parent, lambda hidden: _Copied.apply(hidden, self.group))
            return
        module.register_forward_pre_hook(lambda module, inputs: (self._copy(inputs[0]), *inputs[1:]))

    def _copied_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Copied.apply(inputs[0], self.group), *inputs[1:]

    def _is_in_divided_sequences(self, module: nn.Module) -> bool:
        blocks = [] if self.sequences is None else [block for _, block in self.sequences.blocks]
        return any(module is inner for block in blocks for inner in block.modules())

    def _feeds_all(self, parent: nn.Module) -> bool:
        """Whether all products of a module have its own input: not those of a block, nor of attention to an encoder."""
        assert self.compiled is not None
        config: Any = getattr(self.model, "config", None)
        return all(parent is not block for block in self.compiled) and not getattr(config, "is_encoder_decoder", False)

    def _copy(self, input: Tensor) -> Tensor:
        """One copy for all products of the same input, so that their gradients are summed here before they are everywhere."""
        if torch.compiler.is_compiling():
            return _Copied.apply(input, self.group)
        if self.copied is None or self.copied[0] is not input:
            self.copied = input, _Copied.apply(input, self.group)
        return self.copied[1]

    def _sum_after(self, module: Any) -> None:
        bias, product = module.bias, module.forward
        module.sums = True

        def forward(input: Tensor) -> Tensor:
            self.copied = None
            if self.sequences is None:
                self.draws.leave()
            held = module._parameters.get("bias")
            if bias is None or held is None:
                return self._sum(product(input))
            module._parameters["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(held)
            try:
                summed = self._sum(product(input))
            finally:
                module._parameters["bias"] = held
            return summed + held.to(summed.dtype)

        module.forward = forward

    def _sum(self, product: Tensor) -> Tensor:
        return self.sequences.leave(product) if self.sequences is not None else _Summed.apply(product, self.group)

    def divide_vocabulary(self, model: Any, head: nn.Linear, objective: Objective) -> Objective:
        """Embedding and head by vocabulary: logits are never whole, and only numbers of each token travel."""
        part = Slice(self.mesh, head.weight.shape, 0)
        first, last = part.range()
        vocabulary = head.weight.shape[0]
        self._take(head, "weight", 0)
        if head.bias is not None:
            self._take(head, "bias", 0)
        head.out_features = last - first
        head.register_forward_pre_hook(self._copied_input)
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
    """Dropout between a division by columns and the one by rows draws other numbers on each device, elsewhere the same. Where
    sequences are divided too, so does all of a block.

    What is drawn inside begins from a number that the common generator draws, so a recomputation draws it again.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.outside: tuple[Tensor, Tensor | None] | None = None
        self.model = model
        self.needed = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or _has_dropout(model)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if self.needed and module.training:
            self._begin(module)

    def leave(self, *ignored: Any) -> None:
        if self.needed:
            self._end()

    @torch.compiler.disable  # it reads a number that was drawn; where nothing is drawn, no graph is broken
    def _begin(self, module: nn.Module) -> None:
        if self.outside is None:
            seed = int(torch.randint(2**31, ()))
            self.outside = _states(next(module.parameters()).device)
            torch.manual_seed(seed * 1009 + self.rank)

    @torch.compiler.disable
    def _end(self) -> None:
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
        return summed(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    """Forward the sum of everyone's tensors; backward the same gradient everywhere (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(input, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    """Forward everyone's columns side by side; backward this device's columns of a gradient that is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, columns.shape[-1]
        parts = columns.new_empty(dist.get_world_size(group), *columns.shape)
        parts[dist.get_rank(group)] = columns
        gather_rows(parts, group)
        return torch.cat(parts.unbind(), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(-1, dist.get_rank(ctx.group) * ctx.width, ctx.width).contiguous(), None
