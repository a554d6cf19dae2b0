"""The compiler on fake tensors: what torch.compile will keep and allocate, without generating code.

torch's own tracing, decompositions and partitioner run as they do in a training, so what is saved for backward is what
will be. What the code generator does then is followed by its rule: operations that are computed element by element,
and reductions, are fused; only what leaves the graph, or enters an operation with a kernel of its own (a product, a
convolution, attention), is ever a buffer.

Source  Ansel et al. 2024, "PyTorch 2", ASPLOS.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only


def stand_in() -> Callable[..., Any]:
    """A backend for torch.compile that runs graphs as buffers come and go, and computes nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    decompositions = dict(select_decomp_table())
    for name in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        pooling = getattr(torch.ops.aten, name).default
        if pooling in decompositions:
            decompositions[pooling] = _asking_the_generator(decompositions[pooling])
    return aot_autograd(
        fw_compiler=_planned,
        bw_compiler=_planned,
        decompositions=decompositions,
        partition_fn=min_cut_rematerialization_partition,
    )


@cache
def generates_kernels() -> bool:
    """Whether torch.compile can make kernels for CUDA devices here: that takes Triton, which knows devices since Volta, and a C
    compiler for what starts its kernels. Of a machine that is predicted from one without a GPU, it is taken so."""
    if not torch.cuda.is_available():
        return True
    compilers = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return compilers and importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability() >= (7, 0)


def _asking_the_generator(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that asks the code generator, of which nothing else needs to be imported, what it can do."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return decomposition(*args, **kwargs)

    return ask


@dataclass
class _Plan:
    """Which nodes have buffers, and after which node each is used for the last time."""

    kernels: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # generated: node -> buffers that it reads
    inlined: set[fx.Node] = field(default_factory=set)  # computed within the kernels that use them
    last: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))


_FUSED_TAGS = (torch.Tag.pointwise, torch.Tag.reduction) if hasattr(torch.Tag, "reduction") else (torch.Tag.pointwise,)
_ALSO_FUSED = frozenset(
    {
        "aten.embedding", "aten.cat", "aten.constant_pad_nd", "aten.full", "aten.full_like", "aten.clone", "aten.sum",
        "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.var", "aten.var_mean", "aten.any", "aten.all", "aten.argmax",
        "aten.gather", "aten.index", "aten.select_scatter", "aten.slice_scatter", "aten.iota", "prims.iota",
        "aten.arange", "aten.scalar_tensor", "aten.empty", "aten.lift_fresh_copy", "aten.copy", "aten._to_copy",
        "prims.convert_element_type", "aten.where", "aten.rand", "aten.rand_like", "prims.inductor_random",
        "aten.flip", "aten.repeat", "aten.max_pool2d_with_indices", "aten._low_memory_max_pool2d_with_offsets",
        "aten.avg_pool2d", "aten.prod", "aten.new_zeros", "aten.zeros", "aten.ones", "aten.zeros_like",
        "aten.bernoulli", "aten._softmax", "aten._log_softmax", "aten.empty_like", "prims.broadcast_in_dim",
        "aten.cumsum", "aten.scatter", "aten.slice_backward", "aten.as_strided_scatter", "aten.new_empty", "aten.upsample_nearest2d",
    }
)  # fmt: skip


_COMPUTED = {  # what takes longer, on a processor, than reading and writing it does
    "compiled random": (
        "aten.rand", "aten.rand_like", "aten.bernoulli", "aten.randn", "aten.randn_like", "prims.inductor_random",
    ),
    "compiled exp": ("aten.exp", "aten.sigmoid", "aten.log", "aten.expm1", "aten.log1p"),
    "compiled tanh": ("aten.tanh",),
    "compiled erf": ("aten.erf", "aten.erfc"),
    "compiled pooling": (
        "prims._low_memory_max_pool_with_offsets", "prims._low_memory_max_pool2d_with_offsets", "aten.max_pool2d_with_indices",
    ),
}  # fmt: skip
_COMPUTED_AS = {name: kind for kind, names in _COMPUTED.items() for name in names}


def _with_seeds(graph: fx.Graph) -> None:
    """Replace torch's wrappers around operations that draw the same random numbers in forward and again in backward.

    torch's partitioner makes them save the generator's state. The code generator saves a seed instead, and fuses the drawing
    with what uses the numbers.
    """
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    for node in list(graph.nodes):
        if node.target is run_and_save_rng_state:
            operation, *arguments = node.args
            for part in list(node.users):
                if part.args[1] == 0:  # the state; what is drawn is the other part
                    _replace(part, _seed, (), {})
                else:
                    _replace(part, operation, tuple(arguments), node.kwargs)
            graph.erase_node(node)
        elif node.target is run_with_rng_state:
            _, operation, *arguments = node.args
            _replace(node, operation, tuple(arguments), node.kwargs)


def _seed() -> Tensor:
    return torch.empty(1, dtype=torch.int64)


def _replace(
    node: fx.Node, operation: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Put a call of `operation` in the place of `node`, with what it makes as its value."""
    graph = node.graph
    known = [one.meta["val"] for one in graph.nodes if one.op == "placeholder" and "val" in one.meta]
    args, kwargs = fx.map_arg((arguments, keywords), lambda source: source.meta["val"])
    with _disable_current_modes(), detect_fake_mode(known) or FakeTensorMode():
        made = operation(*args, **kwargs)
    with graph.inserting_before(node):
        call = graph.call_function(operation, arguments, keywords)
    call.meta["val"] = made
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not None and getattr(target, "__name__", "") == "getitem"
    return any(tag in target.tags for tag in _FUSED_TAGS) or str(target).rsplit(".", 1)[0] in _ALSO_FUSED


def _computed(nodes: list[fx.Node]) -> dict[fx.Node, tuple[str, int]]:
    """Of the nodes that compute something of each element: which kind of thing it is, and of how many elements."""
    found = {}
    for node in nodes:
        kind = _COMPUTED_AS.get(str(node.target).rsplit(".", 1)[0])
        made = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        if kind is not None and made:
            looked_at = math.prod(cast(Any, node.args[1])) if kind == "compiled pooling" else 1
            found[node] = kind, looked_at * made[0].numel()
    return found


def _is_read_before(node: fx.Node) -> bool:
    """Whether a node is the largest magnitude of a tensor, or of its columns, by which float8 scales it: a kernel of its own, for
    what is computed with it begins when all of the tensor has been read. That of a row is computed on the way."""
    if str(node.target) not in ("aten.max.default", "aten.amax.default"):
        return False
    source: Any = node.args[0]
    dims = cast(list[int], node.args[1]) if len(node.args) > 1 else []
    along_rows = bool(dims) and all(source.meta["val"].stride(dim) == 1 for dim in dims)
    return str(source.target) == "aten.abs.default" and not along_rows


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.is_view or str(target) in (
            "aten.view.default",
            "aten.reshape.default",
            "aten._unsafe_view.default",
        )
    return getattr(target, "__name__", "") == "getitem"


def _plan(graph: fx.Graph) -> _Plan:
    """Decide for each node whether it is a buffer, and how long."""
    nodes = list(graph.nodes)
    output = nodes[-1]
    calls = [node for node in nodes if node.op == "call_function"]
    fused = {node for node in calls if _is_fused(node) and not _is_view(node)}
    views = {node for node in calls if _is_view(node)}
    wanted: set[fx.Node] = set()  # fused nodes whose value has to be in memory
    for node in nodes:
        if node is output or (node.op == "call_function" and node not in fused and node not in views):
            wanted |= {_base(source, views) for source in node.all_input_nodes}
    wanted |= {node for node in fused if _is_read_before(node)}
    plan = _Plan()
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node in fused and node not in wanted:
            plan.inlined.add(node)
            continue
        if node in fused:
            plan.kernels[node] = _memory(node, fused - wanted, views)
            reads[node] = plan.kernels[node]
        elif node in calls and node not in views:
            reads[node] = [_base(source, views) for source in node.all_input_nodes]
    kept = {_base(source, views) for source in output.all_input_nodes}
    final: dict[fx.Node, fx.Node] = {}
    for node in reads:
        for source in reads[node]:
            final[source] = node
    for source, node in final.items():
        if source not in kept:
            plan.last[node].append(source)
    return plan


def _base(node: fx.Node, views: set[fx.Node]) -> fx.Node:
    """The node whose buffer a view looks at."""
    while node in views:
        node = node.all_input_nodes[0]
    return node


def _memory(node: fx.Node, inlined: set[fx.Node], views: set[fx.Node]) -> list[fx.Node]:
    """The buffers that the generated kernel of `node` reads, through all that is computed on the way."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in inlined or source in views:
            stack += source.all_input_nodes
        else:
            found[source] = None
    return list(found)


def _planned(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
    _with_seeds(module.graph)
    graph, plan = module.graph, _plan(module.graph)
    nodes = list(graph.nodes)
    views = {node for node in nodes if node.op == "call_function" and _is_view(node)}
    holders: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # buffer -> its views
    for node in nodes:
        if node in views:
            holders[_base(node, views)].append(node)
    targets = [node for node in nodes if node.op == "placeholder"]
    computed = _computed(nodes)  # where they are inlined, too: once
    # its own buffers, and what forward saved for a backward: those may be written over
    own = {node for node in nodes if not node.name.startswith(("primals", "tangents"))}

    def run(arguments: list[Any]) -> Any:
        values: dict[fx.Node, Any] = dict(zip(targets, arguments, strict=True))
        arguments.clear()
        for node in nodes:
            if node in computed:
                kind, count = computed[node]
                see_kernel(4 * count, torch.float32, kind)  # in which type they are computed
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.get)
            elif node in plan.kernels:
                inputs = [values[source] for source in plan.kernels[node] if isinstance(values[source], Tensor)]
                moved = sum(map(_bytes, inputs))
                del inputs
                _reuse(node, plan, values, holders, own)
                values[node] = _generated(node, moved)
                _release(node, plan, values, holders)
            elif node.op == "call_function" and node not in plan.inlined and _can_run(node, values):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
                values[node] = node.target(*args, **kwargs)
                _release(node, plan, values, holders)
        raise AssertionError("a graph without output")

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _can_run(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether everything that it takes is in memory: a view of what is inlined is so, too."""
    return all(source in values for source in node.all_input_nodes)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _reuse(
    node: fx.Node, plan: _Plan, values: dict[fx.Node, Any], holders: dict[fx.Node, list[fx.Node]], own: set[fx.Node]
) -> None:
    """A generated kernel writes over an input of the same size that nobody needs afterwards."""
    if node not in plan.last:
        return
    written = [value.untyped_storage().nbytes() for value in tree_leaves(node.meta["val"]) if isinstance(value, Tensor)]
    for source in plan.last[node]:
        value = values.get(source)
        if source in own and isinstance(value, Tensor) and _bytes(value) in written:
            written.remove(_bytes(value))
            for gone in (source, *holders.get(source, ())):
                values.pop(gone, None)


def _release(node: fx.Node, plan: _Plan, values: dict[fx.Node, Any], holders: dict[fx.Node, list[fx.Node]]) -> None:
    for source in plan.last.get(node, ()):
        values.pop(source, None)
        for view in holders.get(source, ()):
            values.pop(view, None)


def _generated(node: fx.Node, moved: int) -> Any:
    """The buffers of a generated kernel that has read `moved` bytes: empty, in the node's shape and strides."""
    made = node.meta["val"]
    outputs = _empty(made) if isinstance(made, Tensor) else tree_map_only(Tensor, _empty, made)
    written = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
    see_kernel(moved + sum(map(_bytes, written)), written[0].dtype)
    return outputs


def see_kernel(moved: int, dtype: torch.dtype, kind: str = "compiled") -> None:
    """Tell dispatch modes that want to know of a generated kernel, which dispatches nothing: the bytes that it reads and writes,
    or that what it computes would take. Those have a `see_kernel`."""
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "see_kernel"):
            mode.see_kernel(moved, dtype, kind)


def _empty(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
