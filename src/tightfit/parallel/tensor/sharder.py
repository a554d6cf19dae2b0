"""Shard a model's modules for tensor parallelism, and insert the communication between devices.

`tensor_parallel` has a table with a style for each module to shard, and calls a `Sharder` for each
entry. A column-parallel module ("colwise") computes some of its output features on each device,
from an input that is the same on all devices. A row-parallel module ("rowwise") takes the matching
input features, and its outputs are all-reduced.

Example: an MLP of shapes 64 -> 256 -> 64 on tp=2. Each device has 128 of the 256 hidden features:
its first weight has shape (128, 64), its second (64, 128). Each device's output has shape (tokens,
64) and is a partial sum; the all-reduce adds the outputs of the two devices.

Source  Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit._torch.modules import own_parameters
from tightfit.distributed.collectives import all_gather, all_reduced
from tightfit.distributed.mesh import Mesh
from tightfit.distributed.sharding import ParameterSharding, rows_of, shard_parameter, unshard_parameter
from tightfit.errors import InputError
from tightfit.models.batches import IGNORED, Batch
from tightfit.models.blocks import is_conv1d
from tightfit.models.objective import Objective
from tightfit.models.replaced_forward import refuse_copies
from tightfit.parallel.tensor.sequence_parallel import SUMS_OUTPUT, SequenceParallel, transform_input
from tightfit.parallel.tensor.vocab_cross_entropy import in_range, vocab_parallel_cross_entropy

GATHER_OUTPUT = "colwise_gather_output"
SPLIT_INPUT = "rowwise_split_input"
PIECES = {"qkv": 3, "gate_up": 2}  # style -> number of matrices that a column-parallel weight fuses
# style -> the dimension that it shards of the stacked weights of experts
EXPERT_DIMS = {"packed_colwise": 1, "colwise": 1, "rowwise": 2}


class Sharder:
    """Replaces the weights of a model's modules by this device's shards, and makes the modules
    communicate. It also records how each weight is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        sequences: SequenceParallel | None = None,
        blocks: list[tuple[str, nn.Module]] | None = None,
    ) -> None:
        """Record which modules own each parameter of `model`. No parameter is sharded yet.

        mesh       the devices, with an axis "tp"
        sequences  the object that shards sequences; None without sequence parallelism
        blocks     (name, block) of each of the model's blocks if they are compiled, else None
        """
        self.model, self.mesh, self.sequences = model, mesh, sequences
        self.group, self.size, self.rank = mesh.group("tp"), mesh.size("tp"), mesh.rank("tp")
        self.cut: dict[nn.Parameter, tuple[nn.Parameter, ParameterSharding]] = {}
        self.sharded_parameters: set[nn.Parameter] = set()
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self.owners[parameter].append((module, key))
        self.rng_tracker = RNGTracker(model, self.rank)
        self.compiled = None if blocks is None else [block for _, block in blocks]
        self.regions: set[nn.Module] = set()
        # the latest input of a column-parallel module, and what `_CopyToRegion` returned for it
        self.copied: tuple[Tensor, Tensor] | None = None
        # each device has other positions, so dropout in a block has to differ between devices
        if sequences is not None:
            for _, block in sequences.blocks:
                block.register_forward_pre_hook(self.rng_tracker.enter)
                block.register_forward_hook(self.rng_tracker.leave)

    def shard_module(self, name: str, module: nn.Module, style: str) -> None:
        """Shard the parameters of one module, and insert the communication that its style needs.

        name   the module's name in the model
        style  "colwise": by output features. "rowwise": by input features. "colwise_gather_output":
               by output features, which are then all-gathered, so that every device gets the full
               output. "rowwise_split_input": by input features, of which each device takes its own
               from an input that every device has in full. "qkv", "gate_up": as "colwise", for a
               weight that fuses three or two matrices. "heads": an embedding that has a column for
               each head, sharded by columns

        Raises InputError if this style cannot shard the module, or if tp does not divide the number
        of features.
        """
        if style == "heads" and isinstance(module, nn.Embedding):
            self._shard_parameter(module, "weight", 1)
            module.embedding_dim = module.weight.shape[1]
            return
        weight = getattr(module, "weight", None)
        is_linear, is_transposed = isinstance(module, nn.Linear), is_conv1d(module)
        if style == "heads" or not isinstance(weight, nn.Parameter) or not (is_linear or is_transposed):
            raise InputError(
                f"plan: tp, table: {name}: {style}",
                f"{name} is a {type(module).__name__}, which this style cannot shard",
                "give this style to nn.Embedding modules only, or use colwise"
                if style == "heads"
                else "give this style to nn.Linear modules only",
            )
        columns, rows = (0, 1) if is_linear else (1, 0)
        pieces = PIECES.get(style, 1)
        sums = style in ("rowwise", SPLIT_INPUT)
        dim = rows if sums else columns
        if weight.shape[dim] % (self.size * pieces):
            raise InputError(
                f"plan: tp={self.size}",
                f"{name} has {weight.shape[dim]} features, which cannot be divided into {self.size * pieces} equal shards",
                "use a smaller tp",
            )
        gathers = style == GATHER_OUTPUT
        if gathers and len(self.owners[weight]) > 1:
            raise InputError(
                f"plan: tp, table: {name}: {style}",
                f"{name} shares its weight with another module",
                f"leave {name} out of the table, or give it the style whole",
            )
        if style in (GATHER_OUTPUT, SPLIT_INPUT) and self._is_sequence_parallel(module):
            raise InputError(
                "plan: sequence_parallel",
                f"the table of tp gives {name} the style {style}, which is for layers that get all positions",
                "use sequence_parallel: false",
            )
        self._shard_parameter(module, "weight", dim, pieces)
        if sums:
            if style == SPLIT_INPUT:
                module.register_forward_pre_hook(
                    lambda module, inputs: (_SplitToRegion.apply(inputs[0], self.group), *inputs[1:])
                )
            self._reduce_output(module)
        else:
            if module.bias is not None:
                self._shard_parameter(module, "bias", 0, pieces)
            if gathers:
                module.register_forward_pre_hook(self._copy_to_region_hook)
                module.register_forward_hook(lambda module, inputs, output: _GatherFromRegion.apply(output, self.group))
            else:
                self._copy_input(name, module)
        self._set_sizes(name, module, style, is_transposed)

    def shard_experts(self, name: str, experts: nn.Module, styles: dict[str, str]) -> None:
        """Shard all experts of a mixture, whose weights are stacked: each device has a part of the
        hidden features of every expert. The outputs are all-reduced.

        name     the name of the module `experts` in the model. Its forward gets the tokens, the
                 numbers of the experts of each token, and their weights
        styles   name of a parameter of `experts` -> how it is sharded. "packed_colwise" and
                 "colwise": (experts, output features, input features) by output features, which are
                 two matrices side by side or one. "rowwise": by input features

        Raises InputError with sequence parallelism, for other styles, or if tp does not divide the
        number of features.
        """
        if self._is_sequence_parallel(experts):
            raise InputError(
                "plan: sequence_parallel", f"{name} shards the experts of a mixture", "use sequence_parallel: false"
            )
        for key, style in styles.items():
            weight, pieces = getattr(experts, key), 2 if style == "packed_colwise" else 1
            if style not in EXPERT_DIMS or weight.dim() != 3:
                raise InputError(
                    f"plan: tp, table: {name}.{key}: {style}",
                    f"{name}.{key} has shape {tuple(weight.shape)}, and this style cannot shard it",
                    f"use one of {', '.join(EXPERT_DIMS)}, for weights of shape (experts, outputs, inputs)",
                )
            size = weight.shape[EXPERT_DIMS[style]]
            if size % (self.size * pieces):
                raise InputError(
                    f"plan: tp={self.size}",
                    f"{name}.{key} has {size} features, which cannot be divided into {self.size * pieces} equal shards",
                    "use a smaller tp",
                )
            self._shard_parameter(experts, key, EXPERT_DIMS[style], pieces)

        def copied(module: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            def copy(value: Any) -> Any:
                differentiable = isinstance(value, Tensor) and value.is_floating_point()
                return _CopyToRegion.apply(value, self.group) if differentiable else value

            return tuple(map(copy, inputs)), {key: copy(value) for key, value in named.items()}

        experts.register_forward_pre_hook(self.rng_tracker.enter)
        experts.register_forward_pre_hook(copied, with_kwargs=True)
        experts.register_forward_hook(self.rng_tracker.leave)
        experts.register_forward_hook(lambda module, inputs, output: _ReduceFromRegion.apply(output, self.group))

    def _set_sizes(self, name: str, module: Any, style: str, is_transposed: bool) -> None:
        """Change the attributes in which the sharded module and its parent store sizes, such as
        `out_features`, to the sizes of this device's shard.

        is_transposed  whether the weight has shape (in, out), as in Conv1D
        """
        if is_transposed:
            module.nf = module.weight.shape[1]
        else:
            module.out_features, module.in_features = module.weight.shape
        parent: Any = self.model.get_submodule(name.rpartition(".")[0])
        if style == "qkv" and hasattr(parent, "split_size"):  # GPT-2's
            parent.split_size //= self.size
        if style == "rowwise" and hasattr(parent, "relative_attention_num_buckets"):
            parent.n_heads //= self.size

    def _shard_parameter(self, module: nn.Module, name: str, dim: int, pieces: int = 1) -> None:
        """Replace a parameter by this device's shard, in all modules that own the parameter.

        name    the parameter's name in `module`
        dim     the dimension to shard
        pieces  how many matrices the parameter fuses along this dimension: 3 for "qkv"
        """
        whole = getattr(module, name)
        if whole in self.sharded_parameters:
            return  # a shared parameter that is sharded already
        if whole not in self.cut:
            part = ParameterSharding(self.mesh, whole.shape, dim, pieces)
            values = part.shard(unshard_parameter(whole, self.mesh))
            shrunk = rows_of(whole) is not None
            if shrunk:
                kept = torch.empty(values.shape, dtype=values.dtype, device="meta")
            else:  # a parameter of another pipeline stage has no memory
                kept = values if whole.untyped_storage().nbytes() < whole.nbytes else values.clone()
            mine = nn.Parameter(kept, requires_grad=whole.requires_grad)
            if shrunk:
                shard_parameter(mine, self.mesh, values)
            self.cut[whole] = mine, part
            self.sharded_parameters.add(mine)
        for owner, key in self.owners[whole]:
            own_parameters(owner)[key] = self.cut[whole][0]

    def _copy_input(self, name: str, module: nn.Module) -> None:
        """Insert the communication at the input of a column-parallel module: backward all-reduces
        the input's gradient (Megatron's f). With sequence parallelism, forward all-gathers the
        input instead.

        name  the module's name in the model
        """
        if self.sequences is not None:
            self.sequences.gather_input(self.model.get_submodule(name.rpartition(".")[0]), module)
            return
        module.register_forward_pre_hook(self.rng_tracker.enter)
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if self.compiled is not None and self._feeds_all(parent):
            if parent not in self.regions:
                self.regions.add(parent)
                transform_input(parent, lambda hidden: _CopyToRegion.apply(hidden, self.group))
            return
        module.register_forward_pre_hook(lambda module, inputs: (self._copy_to_region(inputs[0]), *inputs[1:]))

    def _copy_to_region_hook(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook that makes backward all-reduce the gradient of the module's first
        input (Megatron's f).
        """
        return _CopyToRegion.apply(inputs[0], self.group), *inputs[1:]

    def _is_sequence_parallel(self, module: nn.Module) -> bool:
        """Return whether the module is in a block whose hidden states are sharded along the
        sequence.
        """
        blocks = [] if self.sequences is None else [block for _, block in self.sequences.blocks]
        return any(module is inner for block in blocks for inner in block.modules())

    def _feeds_all(self, parent: nn.Module) -> bool:
        """Return whether all column-parallel modules in `parent` have the same input, the input of
        `parent` itself.

        This is assumed, unless `parent` is a block or the model has an encoder and a decoder, whose
        attention also has the encoder's output as an input.
        """
        assert self.compiled is not None
        config: Any = getattr(self.model, "config", None)
        return all(parent is not block for block in self.compiled) and not getattr(config, "is_encoder_decoder", False)

    def _copy_to_region(self, input: Tensor) -> Tensor:
        """Return a tensor that equals `input`, and whose gradient is all-reduced over tp in
        backward (Megatron's f).

        Successive calls with the same input, such as those for q, k and v, return the same tensor.
        So backward adds the gradients of these modules on the device, and one all-reduce is enough.
        """
        if torch.compiler.is_compiling():
            return _CopyToRegion.apply(input, self.group)
        if self.copied is None or self.copied[0] is not input:
            self.copied = input, _CopyToRegion.apply(input, self.group)
        return self.copied[1]

    def _reduce_output(self, module: Any) -> None:
        """Make the forward of a row-parallel module sum its output over the tp devices, and then
        add the bias once.
        """
        bias, product = module.bias, module.forward
        setattr(module, SUMS_OUTPUT, True)

        def forward(input: Tensor) -> Tensor:
            self.copied = None
            if self.sequences is None:
                self.rng_tracker.leave()
            held = own_parameters(module).get("bias")
            if bias is None or held is None:
                return self._reduce(product(input))
            own_parameters(module)["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(held)  # type: ignore[assignment]
            try:
                summed = self._reduce(product(input))
            finally:
                own_parameters(module)["bias"] = held
            return summed + held.to(summed.dtype)

        module.forward = forward
        refuse_copies(module)

    def _reduce(self, product: Tensor) -> Tensor:
        """Return the sum of `product` over the tp devices. With sequence parallelism, return this
        device's shard of the sum along the sequence.
        """
        return (
            self.sequences.reduce_scatter(product)
            if self.sequences is not None
            else _ReduceFromRegion.apply(product, self.group)
        )

    def shard_vocabulary(self, model: Any, head: nn.Linear, objective: Objective) -> Objective:
        """Shard the output head and, if it has as many tokens, the input embedding by vocabulary.
        Return the objective with a vocabulary-parallel cross entropy.

        The logits of all classes are never gathered; the devices exchange a few numbers for each
        token.

        model      a model with get_input_embeddings
        head       the output head, which computes the logits
        objective  the job's objective; its `logits` and `targets` must not be None
        """
        part = ParameterSharding(self.mesh, head.weight.shape, 0)
        first, last = part.range()
        vocabulary = head.weight.shape[0]
        self._shard_parameter(head, "weight", 0)
        if head.bias is not None:
            self._shard_parameter(head, "bias", 0)
        head.out_features = last - first
        head.register_forward_pre_hook(self._copy_to_region_hook)
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == vocabulary:
            self._shard_parameter(embedding, "weight", 0)
            for module in model.modules():  # an encoder and a decoder may share the weight
                if isinstance(module, nn.Embedding) and module.weight is embedding.weight:
                    self._look_up(module, first, last)
        assert objective.logits is not None
        assert objective.targets is not None
        logits, labels, group = objective.logits, objective.targets, self.group

        def targets(batch: Batch) -> Tensor:
            return in_range(labels(batch), vocabulary, "a label", IGNORED)

        def total(model: nn.Module, batch: Batch) -> Tensor:
            return vocab_parallel_cross_entropy(
                logits(model, batch).flatten(0, -2), targets(batch).flatten(), first, group
            )

        return replace(objective, total=total, targets=targets)

    def _look_up(self, embedding: nn.Embedding, first: int, last: int) -> None:
        """Make an embedding look up only the tokens of this device's shard, and all-reduce the
        results of the devices. Tokens of other shards get zeros before the all-reduce.

        first  the first token of this device's shard
        last   the end of the shard, exclusive
        """
        vocabulary, embedding.num_embeddings = embedding.num_embeddings, last - first
        padding, lookup = embedding.padding_idx, embedding.forward
        embedding.padding_idx = padding - first if padding is not None and first <= padding < last else None

        def forward(input: Tensor) -> Tensor:
            in_shard = (in_range(input, vocabulary, "a token id") >= first) & (input < last)
            found = lookup(torch.where(in_shard, input - first, 0))
            return _ReduceFromRegion.apply(found * in_shard.unsqueeze(-1).to(found.dtype), self.group)

        embedding.forward = forward  # type: ignore[method-assign]
        refuse_copies(embedding)

    def shardings(self) -> dict[str, ParameterSharding]:
        """Return parameter name -> how the parameter is sharded, for each sharded parameter of the
        model.
        """
        parts = dict(self.cut.values())
        return {name: parts[p] for name, p in self.model.named_parameters() if p in parts}


class RNGTracker:
    """Makes dropout draw different random numbers on each tp device where activations are sharded,
    as Megatron's RNG tracker does. Elsewhere all devices draw the same numbers.

    Activations are sharded between a column-parallel and the next row-parallel module, and with
    sequence parallelism in the whole block.

    At the beginning of such a region, all devices draw the same number from their generators, which
    have equal states. Each device then seeds its generator with this number and its rank. At the
    end of the region, the generator gets its earlier state back. A recomputation draws the same
    numbers again.

    model  the model. Without dropout, the tracker does nothing
    rank   this process's rank along tp
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.outside: tuple[Tensor, Tensor | None] | None = None
        self.model = model
        self.needed = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or _has_dropout(model)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Begin a region of sharded activations. This is a forward pre-hook of the region's first
        module. Does nothing inside a region, or if the module is not in training mode.
        """
        if self.needed and module.training:
            self._enter_sharded(module)

    def leave(self, *ignored: Any) -> None:
        """End a region of sharded activations: restore the state that the random generator had
        before it.
        """
        if self.needed:
            self._leave_sharded()

    # int() breaks the compiled graph, but models without dropout do not call this
    @torch.compiler.disable
    def _enter_sharded(self, module: nn.Module) -> None:
        if self.outside is None:
            seed = int(torch.randint(2**31, ()))
            self.outside = _rng_states(next(module.parameters()).device)
            torch.manual_seed(seed * 1009 + self.rank)

    @torch.compiler.disable
    def _leave_sharded(self) -> None:
        if self.outside is not None:
            _restore_rng(self.outside)
            self.outside = None


def _has_dropout(model: nn.Module) -> bool:
    """Return whether the model's config has a dropout probability above 0, in any float whose name
    contains "drop".
    """
    config: Any = getattr(model, "config", None)
    return any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(config or object).items()
    )


def _rng_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_rng(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def _gathered(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the columns (last dimension) of all devices, and return them side by side."""
    parts = columns.new_empty(dist.get_world_size(group), *columns.shape)
    parts[dist.get_rank(group)] = columns
    all_gather(parts, group)
    return torch.cat(parts.unbind(), -1)


class _CopyToRegion(torch.autograd.Function):
    """Forward: return the input. Backward: all-reduce (sum) the gradient over tp. This is
    Megatron's f.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduced(gradients[0], ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Forward: all-reduce (sum) the input over tp. Backward: return the gradient. This is
    Megatron's g.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(input, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _SplitToRegion(torch.autograd.Function):
    """Forward: return this device's columns (last dimension) of an input that is the same on all
    devices. Backward: all-gather the columns of the gradient over tp.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradients[0], ctx.group), None


class _GatherFromRegion(torch.autograd.Function):
    """Forward: all-gather the columns (last dimension) over tp. Backward: return this device's
    columns of the gradient, which is the same on all devices.
    """

    @staticmethod
    def forward(ctx: Any, columns: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, columns.shape[-1]
        return _gathered(columns, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(-1, dist.get_rank(ctx.group) * ctx.width, ctx.width).contiguous(), None
