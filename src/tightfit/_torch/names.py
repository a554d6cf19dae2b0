"""A table of every private name of torch that tightfit uses: what it is for, and what would replace
it.

`tests/test_torch_names.py` checks that the table is complete, and that the installed torch has each
name. If a new version of torch removes a name, the test's message says what would replace it.

The names are grouped by the module or class that they belong to. Members of private classes are in
the table, too, even if their own names have no underscore.
"""

from __future__ import annotations

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A private name of torch that tightfit uses.

    owner    the module or class that the name belongs to
    name     the name in it
    purpose  what tightfit uses it for
    instead  what would replace it if torch removed it
    """

    owner: str
    name: str
    purpose: str
    instead: str


_FLEX = "flex_attention, which returns the log-sum-exps"
_OWN_HOOKS = "hooks of our own that gather and reduce"
_EAGER = "a dry run without fused kernels"
_BLOCK_HOOKS = "hooks on the outputs of blocks"
_WALK = "a walk of our own through lists, tuples and dicts"
_NO_AUTOCAST = "a nested torch.autocast(enabled=False)"
_NO_CHECK = "drop the check, and document it"
_NO_ENTRY = "leave it out of the tables of operations"
_NO_HOOKS = "refuse models with such hooks"
_LOOP = "a loop over the tensors"
_LIST = "a list of them in our code"
_META = "tensors on the meta device and a dispatch mode"

_TABLE = {
    # module or class: {name: (purpose, instead)}
    "torch._guards": {
        "active_fake_mode": ("finds out whether a prediction runs", "a flag that predictions set"),
        "detect_fake_mode": (
            "finds the fake mode of a compiled graph",
            "fake_mode of a tensor of the graph",
        ),
    },
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": ("explains a model that reads values", "its message"),
        "DynamicOutputShapeException": ("explains shapes that depend on values", "its message"),
        "FakeTensor": ("tells fake tensors from real ones", _META),
        "FakeTensorMode": ("runs models without memory and compute", _META),
        "is_fake": (
            "tells fake tensors from real ones, in subclasses too",
            "isinstance with FakeTensor",
        ),
        "unset_fake_temporarily": (
            "computes known values in a prediction",
            "leave the modes, enter them again",
        ),
    },
    "torch._subclasses.fake_tensor.FakeTensor": {
        "constant": ("values that are known in a prediction", "a table by tensor of our own"),
        "fake_device": ("the device of a fake tensor, quickly", "Tensor.device"),
    },
    "torch._ops": {
        "OpOverload": (
            "tells operations from other callables in a graph",
            "type(torch.ops.aten.add.Tensor)",
        ),
    },
    "torch._ops.OpOverload": {
        "_dispatch_cache": (
            "drops kernels that torch has looked up",
            "a process for each prediction",
        ),
        "_schema": (
            "which arguments an operation writes to",
            "a table of the operations that write to arguments",
        ),
    },
    "torch.library.Library": {
        "_destroy": ("removes autocast rules after a prediction", "a process for each prediction"),
    },
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": ("records the operations of a step", "its new place in torch"),
        "is_traceable_wrapper_subclass": (
            "finds DTensor and the like",
            "the attribute __tensor_flatten__",
        ),
        "is_traceable_wrapper_subclass_type": (
            "finds DTensor and the like",
            "the attribute __tensor_flatten__",
        ),
        "_disable_current_modes": (
            "real work inside a prediction",
            "leave the modes, enter them again",
        ),
        "_get_current_dispatch_mode_stack": (
            "finds the modes that record kernels",
            "a list that our modes keep",
        ),
    },
    "torch._C": {
        "_accelerator_setAllocatorSettings": ("expandable segments in this process", "PYTORCH_ALLOC_CONF"),
        "DispatchKey": ("names autocast on a CPU", _NO_AUTOCAST),
        "DispatchKeySet": ("names autocast on a CPU", _NO_AUTOCAST),
        "_ExcludeDispatchKeyGuard": ("skips the CPU's autocast rules", _NO_AUTOCAST),
        "_dispatch_get_all_op_names": ("finds CUDA's autocast rules", _LIST),
        "_dispatch_has_kernel_for_dispatch_key": ("finds CUDA's autocast rules", _LIST),
        "_DisableTorchDispatch": ("detaches tensors quickly under a dispatch mode", "a plain detach()"),
        "_storage_Use_Count": (
            "whether anything else uses a parameter's storage",
            "weak references to the views",
        ),
        "_swap_tensor_impl": (
            "puts what was received into a stage's input",
            "torch.utils.swap_tensors",
        ),
        "_current_graph_task_id": (
            "finds out whether a backward runs",
            "a flag set around backward",
        ),
        "_current_autograd_node": ("which segment of the forward a node is of", _BLOCK_HOOKS),
    },
    "torch._C._autograd": {
        "_top_saved_tensors_default_hooks": (
            "what surrounding hooks do with tensors that are saved for backward",
            "an argument that passes on the hooks",
        ),
    },
    "torch.utils._pytree": {
        "TreeSpec": ("the structure of a block's output", _WALK),
        "tree_flatten": ("the tensors in a block's output", _WALK),
        "tree_flatten_with_path": ("where a block's inputs lie", _WALK),
        "tree_leaves": ("the tensors in arguments", _WALK),
        "tree_map": ("casts the tensors in arguments", _WALK),
        "tree_map_only": ("empty outputs of generated kernels", _WALK),
        "tree_unflatten": ("rebuilds a block's output", _WALK),
    },
    "torch.ops.aten": {
        "_local_scalar_dense": (
            "answers Tensor.item() on fake tensors",
            "compare the operation's name",
        ),
        "_index_put_impl_": ("indexing by masks without values", "compare the operation's name"),
        "_unique2": ("torch.unique of tensors without values", "compare the operation's name"),
        "_grouped_mm": ("shapes and FLOPs of mixtures of experts", "compare the operation's name"),
        "_scaled_mm": ("worth saving under selective recompute", _NO_ENTRY),
        "_scaled_dot_product_flash_attention": (
            "ring attention, which needs the log-sum-exps",
            _FLEX,
        ),
        "_scaled_dot_product_flash_attention_backward": ("its backward", _FLEX),
        "_scaled_dot_product_flash_attention_for_cpu": ("the same on a CPU", _FLEX),
        "_scaled_dot_product_flash_attention_for_cpu_backward": ("its backward", _FLEX),
        "_softmax": ("a softmax of fp16 with an fp32 result, as on a GPU", "copy the input to fp32 first"),
        "_log_softmax": ("the same of log_softmax", "copy the input to fp32 first"),
        "_fused_rms_norm": ("traces a GPU's RMSNorm as one kernel", "let it be decomposed: it then saves more"),
        "_softmax_backward_data": (
            "a softmax's gradient in place, in blocked attention",
            "two operations: subtract, multiply",
        ),
        "_scaled_dot_product_efficient_attention": ("the same with a mask", _FLEX),
        "_scaled_dot_product_efficient_attention_backward": ("its backward", _FLEX),
        "_scaled_dot_product_cudnn_attention": (
            "worth saving under selective recompute",
            _NO_ENTRY,
        ),
        "_scaled_dot_product_attention_math_for_mps": (
            "worth saving under selective recompute",
            _NO_ENTRY,
        ),
        "_ctc_loss": ("what the CTC loss keeps for backward", "CTC losses are not predicted"),
        "_ctc_loss_backward": ("its backward", "CTC losses are not predicted"),
        "_cudnn_rnn": ("what recurrent layers run on a GPU, and what they keep", "torch's own rule on fake tensors"),
        "_cudnn_rnn_backward": ("its backward", "torch's own rule on fake tensors"),
    },
    "torch": {
        "_assert_async": ("checks class numbers on a GPU without waiting for it", "no check"),
        "_foreach_copy_": ("one launch for the weights of many layers", _LOOP),
        "_foreach_mul_": ("one launch to scale all gradients", _LOOP),
        "_foreach_norm": ("one launch for the norms of all gradients", _LOOP),
        "_scaled_mm": ("measures the rate of float8 products", "torch.nn.functional.scaled_mm"),
        "_fused_sdp_choice": ("which attention kernel ran", "torch.profiler"),
        "_scaled_dot_product_attention_math": (
            "traces attention for which a GPU has no fused kernel",
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        ),
    },
    "torch.UntypedStorage": {
        "_cdata": (
            "an identity that views of a storage share",
            "UntypedStorage.data_ptr() of real tensors",
        ),
        "resize_": (
            "sees the memory that fully_shard frees",
            "the sizes of storages after each operation",
        ),
    },
    "torch.Tensor": {
        "_version": ("finds writes in place", "a copy that is compared"),
        "_indices": ("memory of sparse gradients", "Tensor.indices() of a coalesced copy"),
        "_values": ("memory of sparse gradients", "Tensor.values() of a coalesced copy"),
        "_backward_hooks": ("refuses hooks that a shard would lose", _NO_CHECK),
        "_post_accumulate_grad_hooks": ("refuses hooks that a shard would lose", _NO_CHECK),
    },
    "torch.autograd": {
        "_get_sequence_nr": ("which segment of the forward a node is of", _BLOCK_HOOKS),
    },
    "torch.autograd.graph.Node": {
        "_sequence_nr": ("which segment of the forward a node is of", _BLOCK_HOOKS),
    },
    "torch.autograd.graph.MulBackward0": {  # the class of the node of a multiplication, which has no name in torch
        "_saved_other": ("finds factors of logits that may change", "no chunked loss for such models"),
    },
    "torch.nn.Module": {
        "_parameters": ("replaces parameters by shards and stubs", "setattr on the module"),
        "_buffers": ("rewinds, averages and casts buffers", "setattr on the module"),
        "_modules": ("replaces blocks of other stages by stubs", "setattr on the module"),
        "_apply": (
            "keeps gathered weights from being converted; converts fake tensors",
            "Module.to of a subclass",
        ),
        "_forward_hooks": ("runs a block's hooks on its stub", _NO_HOOKS),
        "_forward_hooks_with_kwargs": ("runs a block's hooks on its stub", _NO_HOOKS),
        "_forward_pre_hooks": ("runs a block's hooks on its stub", _NO_HOOKS),
        "_forward_pre_hooks_with_kwargs": ("runs a block's hooks on its stub", _NO_HOOKS),
        "_backward_hooks": ("layers with hooks stay as they are in float8", _NO_CHECK),
        "_backward_pre_hooks": ("layers with hooks stay as they are in float8", _NO_CHECK),
        "_call_impl": ("waits for weights before a call", "a forward pre-hook"),
        "_compiled_call_impl": (
            "waits for weights before a compiled call",
            "torch.compile of a wrapped forward",
        ),
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": (
            "finds running statistics, in subclasses too",
            "the public classes of BatchNorm",
        ),
        "_NormBase": (
            "finds running statistics, in subclasses too",
            "the public classes with statistics",
        ),
    },
    "torch.nn.modules.conv": {
        "_ConvNd": ("finds weights that autocast converts", "the public classes of convolutions"),
    },
    "torch.nn.modules.dropout": {
        "_DropoutNd": ("switches off dropout to verify a plan", "the public classes of dropout"),
    },
    "torch.nn.modules.loss": {
        "_Loss": ("tells torch's losses from other callables", "the public classes of losses"),
    },
    "torch._dynamo.exc": {
        "TorchRuntimeError": ("explains operations that fail while they are compiled", "the compiler's own error"),
        "TorchDynamoException": ("explains failures of torch.compile", "errors from its files"),
    },
    "torch._dynamo": {
        "convert_frame": ("a logger that says when torch stops compiling a function", "its new name"),
        "maybe_mark_dynamic": (
            "one compiled loss for chunks of any length",
            "torch.compile(dynamic=True)",
        ),
    },
    "torch._dynamo.config": {
        "skip_nnmodule_hook_guards": ("compiles blocks apart that differ in their hooks", "compile: model"),
    },
    "torch._dynamo.guards": {
        "profile_guard_manager": ("makes a search faster", "slower compilations"),
    },
    "torch._dynamo.backends.common": {
        "aot_autograd": ("predicts compiled regions", _EAGER),
    },
    "torch._functorch._aot_autograd.utils.make_boxed_func": {
        "_boxed_call": ("frees the arguments of compiled regions early", "make_boxed_func"),
    },
    "torch._functorch.partitioners": {
        "min_cut_rematerialization_partition": ("predicts compiled regions", _EAGER),
    },
    "torch._inductor.decomposition": {
        "select_decomp_table": ("predicts compiled regions", _EAGER),
    },
    "torch._inductor": {
        "config": ("predicts compiled regions", _EAGER),
        "lowering": ("predicts compiled regions", _EAGER),
    },
    "torch._prims.rng_prims": {
        "run_and_save_rng_state": ("predicts dropout in compiled regions", _EAGER),
        "run_with_rng_state": ("predicts dropout in compiled regions", _EAGER),
    },
    "torch.cuda": {
        "_sleep": ("times kernels without the time to launch them", "a large product before them"),
    },
    "torch.distributed._functional_collectives": {
        "all_reduce": ("an all-reduce in compiled code", "a custom operation"),
    },
    "torch.distributed.ProcessGroup": {
        "_get_backend": ("the time-out of a group", "the time-out from the plan"),
    },
    "torch._C._distributed_c10d.Backend.Options": {
        "_timeout": ("the time-out of a group", "the time-out from the plan"),
    },
    "torch.distributed.distributed_c10d": {
        "_set_pg_timeout": ("one time-out for all groups", "new_group(timeout=...)"),
    },
    "torch.testing._internal.distributed.fake_pg": {
        "FakeStore": ("one process predicts several", "torch.distributed.HashStore"),
    },
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": ("the tensor object that holds a shard", "DTensor.to_local()"),
        "_spec": ("makes a DTensor like another one", "DTensor.from_local"),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "TrainingState": ("whether a module runs", "forward hooks of our own"),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_training_state": ("whether a module runs", "forward hooks of our own"),
        "_fsdp_param_groups": ("finds the parameter groups, from torch 2.13", _OWN_HOOKS),
    },
    "torch.distributed.fsdp.FSDPModule": {
        "_get_fsdp_state": ("finds the parameter groups", _OWN_HOOKS),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": {
        "FSDPParamGroup": ("parameters that are gathered together", _OWN_HOOKS),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "fsdp_params": ("the parameters of a group", _OWN_HOOKS),
        "modules": ("names a group in errors", _OWN_HOOKS),
        "is_unsharded": ("which parameters got no gradient", _OWN_HOOKS),
        "reduce_grads": ("whether gradients are reduced", _OWN_HOOKS),
        "_all_gather_result": ("whether a gather is in flight", _OWN_HOOKS),
        "_all_gather_comm": (
            "checks that devices gather the same layer",
            "FSDPModule.set_custom_all_gather",
        ),
        "unshard": ("prefetches offloaded parameters", _OWN_HOOKS),
        "wait_for_unshard": ("prefetches offloaded parameters", _OWN_HOOKS),
        "post_backward": ("gives unused parameters a zero gradient", _OWN_HOOKS),
        "lazy_init": ("keeps reduced gradients in fp32", "fp32 shards"),
        "_orig_dtype": ("keeps reduced gradients in fp32", "fp32 shards"),
    },
    "torch.distributed.fsdp._fully_shard": {
        "_fsdp_param": ("lets fully_shard of torch 2.11 shard integers", "a group of their own"),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param": {
        "FSDPParam": ("what fully_shard keeps of a parameter", _OWN_HOOKS),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        "sharded_param": ("the model's parameter while it is sharded", _OWN_HOOKS),
        "_unsharded_param": ("whether a parameter was ever gathered", _OWN_HOOKS),
        "unsharded_param": ("gives unused parameters a zero gradient", _OWN_HOOKS),
        "unsharded_accumulated_grad": ("which parameters got no gradient", _OWN_HOOKS),
        "all_gather_outputs": ("buffers that offloading must not store", _OWN_HOOKS),
        "_sharded_param_data": ("holds shards in the store", "CPUOffloadPolicy"),
        "padded_sharded_param_size": ("holds shards in the store", "CPUOffloadPolicy"),
        "reset_sharded_param": (
            "loads the shards that the model was created with",
            "FSDPModule.to, which calls it",
        ),
    },
    "torch.nn.init": {
        "_no_grad_trunc_normal_": (
            "creates models on fake tensors",
            "a function of our own for trunc_normal_",
        ),
    },
    "torch.nn.Parameter": {
        "__deepcopy__": ("tracks copied parameters", "a walk through the model when it is made"),
    },
    "torch._higher_order_ops": {
        "wrap": ("a logger that is silenced", "its new name"),
    },
}

PRIVATE_NAMES = tuple(
    PrivateName(owner, name, purpose, instead)
    for owner, names in _TABLE.items()
    for name, (purpose, instead) in names.items()
)

__all__ = ["PRIVATE_NAMES", "PrivateName"]
