"""Predicts on fake tensors what torch.compile will save and allocate, without generating code.

In a dry run, the method `compile` passes `fake_backend` to torch.compile as its backend.

torch's own tracing, decompositions and partitioner run as they do in training, so the same tensors
are saved for backward. Only the code generator does not run. Its effect is known: it fuses
element-wise operations and reductions. So a tensor gets a buffer in memory only if it leaves the
graph, or if it is an input of an operation with a kernel of its own (a matrix product, a
convolution, attention).

Example: y = gelu(x @ w + b) * m. The product x @ w has a kernel of its own, so its result is a
buffer. The addition, gelu and the multiplication are fused into one generated kernel, which reads
three buffers (x @ w, b and m) and writes one, y. The sum and gelu's result never exist in memory.

Source  Ansel et al. 2024, "PyTorch 2", ASPLOS.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from tightfit._torch.compiler import (
    aot_backend,
    import_inductor_lowerings,
    inductor_decompositions,
    inductor_read_limits,
    rng_state_wrappers,
    takes_list,
)
from tightfit._torch.dispatch import OpOverload, current_dispatch_modes, without_dispatch_modes
from tightfit._torch.fake import FakeTensorMode, detect_fake_mode
from tightfit._torch.pytree import tree_map_only
from tightfit.models.tensors import tensors_in


@cache  # torch.compile compiles a function again if it is asked to with another backend
def fake_backend() -> Callable[..., Any]:
    """Return a backend for torch.compile. The functions that it compiles run on fake tensors: they
    allocate and free the same buffers as code of torch's default backend would, but compute
    nothing."""
    decompositions = inductor_decompositions()
    for name in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        pooling = getattr(torch.ops.aten, name).default
        if pooling in decompositions:
            decompositions[pooling] = _importing_lowerings(decompositions[pooling])
    return aot_backend(_fake_compiled, decompositions)


@cache
def can_generate_kernels() -> bool:
    """Return whether torch.compile can generate kernels for CUDA devices on this machine.

    It needs Triton, a GPU that Triton supports (compute capability 7.0, Volta, or newer), and a C
    compiler for the code that launches kernels. On a machine without a GPU the result is True:
    tightfit then only predicts runs of other machines.
    """
    if not torch.cuda.is_available():
        return True
    compilers = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return compilers and importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability() >= (7, 0)


def _importing_lowerings(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same as `decomposition`, but first imports the lowerings
    of torch's code generator.

    Some decompositions ask the lowerings which cases they support. In a dry run, nothing else
    imports the lowerings.
    """

    def ask(*args: Any, **kwargs: Any) -> Any:
        import_inductor_lowerings()
        return decomposition(*args, **kwargs)

    return ask


@dataclass
class _BufferPlan:
    """Which nodes of a graph have a buffer in memory, and when each buffer is used for the last
    time.

    kernels  node that becomes a generated kernel -> the nodes whose buffers this kernel reads
    inlined  nodes without a buffer. Each kernel that uses their values computes them itself
    last     node -> the nodes whose buffers it uses and no later node uses
    """

    kernels: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    inlined: set[fx.Node] = field(default_factory=set)
    last: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))


_FUSED_TAGS = (torch.Tag.pointwise, torch.Tag.reduction) if hasattr(torch.Tag, "reduction") else (torch.Tag.pointwise,)
_FUSED_NAMES = frozenset(
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


_COSTLY = {  # on a CPU, computing these takes longer than reading and writing their elements
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
_COSTLY_KIND = {name: kind for kind, names in _COSTLY.items() for name in names}


def _use_seeds(graph: fx.Graph) -> None:
    """Replace the wrappers that torch's partitioner puts around random operations, so that backward
    draws the same numbers as forward.

    The wrappers save the state of the random number generator. Generated code saves a small seed
    instead, and fuses the random operation with the operations that use the numbers. So this
    function puts a seed and the plain random operation into the graph.
    """
    run_and_save_rng_state, run_with_rng_state = rng_state_wrappers()
    for node in list(graph.nodes):
        if node.target is run_and_save_rng_state:
            operation, *arguments = node.args
            for part in list(node.users):
                if part.args[1] == 0:  # the generator's state; 1 is the random tensor
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
    """Replace `node` in its graph by a call of `operation`. The operation runs once on fake
    tensors, to find the shape and dtype of its output.

    arguments, keywords  positional and keyword arguments of the call, which may be nodes of the
                         graph
    """
    graph = node.graph
    known = [one.meta["val"] for one in graph.nodes if one.op == "placeholder" and "val" in one.meta]
    args, kwargs = fx.map_arg((arguments, keywords), lambda source: source.meta["val"])
    with without_dispatch_modes(), detect_fake_mode(known) or FakeTensorMode():
        made = operation(*args, **kwargs)
    with graph.inserting_before(node):
        call = graph.call_function(operation, arguments, keywords)
    call.meta["val"] = made
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _is_fused(node: fx.Node) -> bool:
    """Return whether a generated kernel may compute a node together with others. No kernel is
    generated for complex numbers."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target is not None and getattr(target, "__name__", "") == "getitem"
    if any(tensor.is_complex() for one in (node, *node.all_input_nodes) for tensor in tensors_in(one.meta.get("val"))):
        return False
    return any(tag in target.tags for tag in _FUSED_TAGS) or str(target).rsplit(".", 1)[0] in _FUSED_NAMES


def _costly_nodes(nodes: list[fx.Node]) -> dict[fx.Node, tuple[str, int]]:
    """Return the nodes whose arithmetic takes longer on a CPU than their memory access: node ->
    (kind of arithmetic, such as "compiled exp"; number of elements that it reads or computes)."""
    found = {}
    for node in nodes:
        kind = _kind_of(node)
        made = tensors_in(node.meta.get("val"))
        if kind is not None and made:
            looked_at = math.prod(cast(Any, node.args[1])) if kind == "compiled pooling" else 1
            found[node] = kind, looked_at * made[0].numel()
    return found


def _draws_numbers(node: fx.Node, inlined: set[fx.Node]) -> bool:
    """Return whether the generated kernel of `node` draws random numbers."""
    stack = [node]
    while stack:
        one = stack.pop()
        if _kind_of(one) == "compiled random":
            return True
        stack += [source for source in one.all_input_nodes if source in inlined]
    return False


def _kind_of(node: fx.Node) -> str | None:
    return _COSTLY_KIND.get(str(node.target).rsplit(".", 1)[0])


def _needs_full_read(node: fx.Node) -> bool:
    """Return whether a node computes the largest magnitude of a whole tensor or of each column, as
    scaling to float8 does.

    The scaled values can be computed only after the whole tensor was read, so such a node is a
    kernel of its own. The largest magnitude of each row, in contrast, is computed within the fused
    kernel.
    """
    if str(node.target) not in ("aten.max.default", "aten.amax.default"):
        return False
    source: Any = node.args[0]
    dims = cast(list[int], node.args[1]) if len(node.args) > 1 else []
    along_rows = bool(dims) and all(source.meta["val"].stride(dim) == 1 for dim in dims)
    return str(source.target) == "aten.abs.default" and not along_rows


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload):
        return target.is_view or str(target) in (
            "aten.view.default",
            "aten.reshape.default",
            "aten._unsafe_view.default",
        )
    return getattr(target, "__name__", "") == "getitem"


def _plan_buffers(nodes: list[fx.Node]) -> _BufferPlan:
    """Decide for each node of a graph whether its value has a buffer in memory, and find the node
    that uses this buffer last. nodes: the graph's nodes, in the order in which they run."""
    calls = [node for node in nodes if node.op == "call_function"]
    fused = {node for node in calls if _is_fused(node) and not _is_view(node)}
    views = {node for node in calls if _is_view(node)}
    inlined = fused - _stored_nodes(nodes, fused, views)
    _store_what_reads_much(nodes, inlined, views)
    plan = _BufferPlan(inlined=inlined)
    reads: dict[fx.Node, list[fx.Node]] = {}  # by node that runs: the buffers that it reads
    for node in calls:
        if node in fused and node not in inlined:
            reads[node] = plan.kernels[node] = _buffers_read(node, inlined, views)
        elif node not in fused and node not in views:
            reads[node] = [_view_base(source, views) for source in node.all_input_nodes]
    last_use = {source: node for node, sources in reads.items() for source in sources}
    returned = {_view_base(source, views) for source in nodes[-1].all_input_nodes}
    for source, node in last_use.items():
        if source not in returned:
            plan.last[node].append(source)
    return plan


def _with_early_outputs(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a graph in the order in which they run: an output whose kernel is the last to read larger
    buffers comes directly after the last of its inputs, because the compiler fuses this kernel with an earlier one
    that reads them, too.

    Example: at the end of the graph of a forward are the statistics of all layer norms, as backward needs them.
    The kernel of each layer norm computes its own.
    """
    plan, position = _plan_buffers(nodes), {node: number for number, node in enumerate(nodes)}
    early: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # node -> the outputs that come directly after it
    for node, read_last in plan.last.items():
        sources = plan.kernels.get(node, ())
        freed = sum(_meta_bytes(source) for source in read_last if source.op == "call_function")
        if sources and set(node.users) == {nodes[-1]} and freed > _meta_bytes(node):
            early[max(sources, key=position.__getitem__)].append(node)
    moved = {node for outputs in early.values() for node in outputs}  # none is an input of another: all are outputs
    return [one for node in nodes if node not in moved for one in (node, *early.get(node, ()))]


def _with_late_products(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a graph in the order in which they run: a matrix product that is only added to another
    matrix comes directly before the sum, because the compiler replaces both by one kernel, addmm.

    Example: the gradient of tied embeddings is a product at the beginning of the backward plus a scatter at its end. The
    product's inputs, one of them the gradient of the logits, are kept until then.

    Source: torch/_inductor/fx_passes/post_grad.py, is_valid_addmm_fusion.
    """
    late: dict[fx.Node, list[fx.Node]] = {}  # sum -> the product, and the views between the two
    for node in nodes:
        if node.target is torch.ops.aten.add.Tensor and not node.kwargs:
            for source, other in (node.args, node.args[::-1]):
                chain = _product_chain(source) if isinstance(source, fx.Node) and isinstance(other, fx.Node) else []
                if chain and _is_addmm(chain[0], cast(fx.Node, other), node):
                    late[node] = chain
                    break
    moved = {one for chain in late.values() for one in chain}
    return [one for node in nodes if node not in moved for one in (*late.get(node, ()), node)]


def _product_chain(node: fx.Node) -> list[fx.Node]:
    """Return the matrix product that `node` is, followed by the views between it and `node` if these cancel each
    other. Return an empty list if there is none, or if anything else uses the product."""
    chain = [node]
    while _is_view(chain[0]):
        chain.insert(0, chain[0].all_input_nodes[0])
    if chain[0].target is not torch.ops.aten.mm.default or any(len(one.users) > 1 for one in chain):
        return []
    product, result = chain[0].meta["val"], node.meta["val"]
    return chain if (product.shape, product.stride()) == (result.shape, result.stride()) else []


def _is_addmm(product: fx.Node, other: fx.Node, total: fx.Node) -> bool:
    """Return whether the compiler computes `total`, the sum of a matrix product and of `other`, with one kernel."""
    values = [node.meta["val"] for node in (*product.all_input_nodes, other, product, total)]
    return len({value.dtype for value in values}) == 1 and total.meta["val"].shape == product.meta["val"].shape


def _meta_bytes(node: fx.Node) -> int:
    return sum(map(_bytes, tensors_in(node.meta.get("val"))))


def _stored_nodes(nodes: list[fx.Node], fused: set[fx.Node], views: set[fx.Node]) -> set[fx.Node]:
    """Return those nodes of `fused` whose values must be written to memory:

    - nodes whose value an operation that is not fused reads, or that the graph returns,
    - nodes that need a kernel of their own (see `_needs_full_read`).

    nodes  all nodes of the graph, in order
    fused  nodes that generated kernels can compute
    views  nodes that return a view of their input
    """
    stored = {node for node in fused if _needs_full_read(node)}
    for node in nodes:
        is_kernel = node.op == "call_function" and node not in fused and node not in views
        if is_kernel or node is nodes[-1]:
            stored |= {_view_base(source, views) for source in node.all_input_nodes}
    return stored


def _store_what_reads_much(nodes: list[fx.Node], inlined: set[fx.Node], views: set[fx.Node]) -> None:
    """Remove those nodes from `inlined` that torch's code generator stores because computing them
    again in each kernel that uses them would read too many buffers.

    A value that is used several times is stored if it needs more than 4 buffers
    (`realize_reads_threshold`), any other value if it needs more than 8, or more than 12 on a CPU
    since PyTorch 2.13 (`realize_acc_reads_threshold`). Otherwise the residual stream of a deep
    model, which is a sum of all blocks' outputs, would be computed from all of them in each block.

    Source: torch/_inductor/ir.py, StorageBox.
    """
    for node in nodes:
        if node in inlined:
            reads = len(_buffers_read(node, inlined, views))
            limits = inductor_read_limits(tensors_in(node.meta["val"])[0].device.type)
            if reads > limits[len(node.users) == 1]:
                inlined.remove(node)


def _view_base(node: fx.Node, views: set[fx.Node]) -> fx.Node:
    """Return the node whose buffer `node` refers to: for a view, the node that it is a view of,
    through any number of views; for any other node, the node itself."""
    while node in views:
        node = node.all_input_nodes[0]
    return node


def _buffers_read(node: fx.Node, inlined: set[fx.Node], views: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes whose buffers the generated kernel of `node` reads. Inputs that are views or
    that the kernel computes itself (`inlined`) are replaced by their own inputs."""
    nodes: dict[fx.Node, None] = {}
    visited: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in visited:
            continue
        visited.add(source)
        if source in inlined or source in views:
            stack += source.all_input_nodes
        else:
            nodes[source] = None
    return list(nodes)


def _fake_compiled(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs the graph of `module` on fake tensors and allocates the buffers
    that generated code would allocate. `example`, the example inputs that torch.compile passes to
    every backend, is not used."""
    _use_seeds(module.graph)
    nodes = _with_early_outputs(_with_late_products(list(module.graph.nodes)))
    plan = _plan_buffers(nodes)
    views = {node for node in nodes if node.op == "call_function" and _is_view(node)}
    holders: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # buffer -> its views
    for node in nodes:
        if node in views:
            holders[_view_base(node, views)].append(node)
    targets = [node for node in nodes if node.op == "placeholder"]
    computed = _costly_nodes(nodes)  # counted once each, inlined nodes too
    # buffers that may be overwritten: the graph's own, and those that forward saved for backward
    own = {node for node in nodes if not node.name.startswith(("primals", "tangents"))}
    compared = {node for node in plan.kernels if not _draws_numbers(node, plan.inlined)}

    def run(arguments: list[Any]) -> Any:
        values: dict[fx.Node, Any] = dict(zip(targets, arguments, strict=True))
        arguments.clear()
        for node in nodes:
            if node in computed:
                kind, count = computed[node]
                see_kernel(4 * count, torch.float32, kind)  # arithmetic is in fp32
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.get)
            elif node in plan.kernels:
                inputs = {one: values[one] for one in plan.kernels[node] if isinstance(values[one], Tensor)}
                moved = sum(map(_bytes, inputs.values()))
                # a mask of this graph is in a register, because one kernel writes and reads it
                _see_masks([value for one, value in inputs.items() if one.op == "placeholder"], "compiled mask read")
                del inputs
                _reuse(node, plan, values, holders, own)
                values[node] = _run_generated(node, moved)
                if node in compared:  # the cost of drawing numbers includes that of the mask
                    _see_masks(tensors_in(values[node]), "compiled mask")
                _release(node, plan, values, holders)
            elif node.op == "call_function" and node not in plan.inlined and _can_run(node, values):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
                with _compiled_operation():
                    values[node] = cast(Any, node.target)(*args, **kwargs)
                del args, kwargs  # a view would keep its base
                _release(node, plan, values, holders)
        raise AssertionError("a graph without output")

    return takes_list(run)


_in_graph = ContextVar("_in_graph", default=False)


@contextmanager
def _compiled_operation() -> Iterator[None]:
    token = _in_graph.set(True)
    try:
        yield
    finally:
        _in_graph.reset(token)


def in_compiled_graph() -> bool:
    """Return whether the operation that runs now is one of a graph that `fake_backend` runs."""
    return _in_graph.get()


def _can_run(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Return whether all inputs of a node have been computed. A view of an inlined node cannot run,
    because an inlined node has no value in memory."""
    return all(source in values for source in node.all_input_nodes)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _reuse(
    node: fx.Node,
    plan: _BufferPlan,
    values: dict[fx.Node, Any],
    holders: dict[fx.Node, list[fx.Node]],
    own: set[fx.Node],
) -> None:
    """Free the input buffers of `node` that its kernel would overwrite with an output: those that
    no later node uses and that have the same size as an output.

    values   node -> its value. Freed buffers and their views are removed from it
    holders  node with a buffer -> the views of this buffer
    own      nodes whose buffers may be overwritten
    """
    if node not in plan.last:
        return
    written = [value.untyped_storage().nbytes() for value in tensors_in(node.meta["val"])]
    for source in plan.last[node]:
        value = values.get(source)
        if source in own and isinstance(value, Tensor) and _bytes(value) in written:
            written.remove(_bytes(value))
            for gone in (source, *holders.get(source, ())):
                values.pop(gone, None)


def _release(
    node: fx.Node, plan: _BufferPlan, values: dict[fx.Node, Any], holders: dict[fx.Node, list[fx.Node]]
) -> None:
    for source in plan.last.get(node, ()):
        values.pop(source, None)
        for view in holders.get(source, ()):
            values.pop(view, None)


def _run_generated(node: fx.Node, moved: int) -> Any:
    """Allocate and return the outputs of the generated kernel of `node`, and report the kernel's
    memory traffic.

    moved  bytes that the kernel reads
    """
    made = node.meta["val"]
    outputs = _empty(made) if isinstance(made, Tensor) else tree_map_only(Tensor, _empty, made)
    written = tensors_in(outputs)
    see_kernel(moved + sum(map(_bytes, written)), written[0].dtype)
    return outputs


def _see_masks(tensors: list[Tensor], kind: str) -> None:
    """Report the elements of those `tensors` that are masks, which a generated kernel reads or writes.
    On a CPU, it converts them one by one."""
    count = sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.bool)
    if count:
        see_kernel(4 * count, torch.float32, kind)


def see_kernel(bytes_accessed: int, dtype: torch.dtype, kind: str = "compiled") -> None:
    """Report a generated kernel to the active torch dispatch modes that have a method `see_kernel`.
    They record kernels, but would not notice this one, because it dispatches no operation.

    bytes_accessed  bytes that the kernel reads and writes. For costly arithmetic: the elements that
                    it computes, times 4 bytes (fp32)
    dtype           the dtype of the kernel's output
    kind            "compiled" for memory traffic; for costly arithmetic its kind, such as "compiled
                    exp"
    """
    for mode in current_dispatch_modes():
        if hasattr(mode, "see_kernel"):
            mode.see_kernel(bytes_accessed, dtype, kind)


def _empty(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
