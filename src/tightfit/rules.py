"""The rules of a plan: which combinations cannot work, and which changes of the mathematics a job
must allow.

RULES is the table of all rules, each with its remedy. `check` uses it to refuse a plan before
anything is built, search uses it to discard plans, and the docs print it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tightfit.errors import InputError
from tightfit.job import Job, ModelSpec
from tightfit.plan import Plan


@dataclass(frozen=True)
class Rule:
    """A condition that a plan must meet.

    text   the condition and its reason, as the error prints them
    holds  a function (plan, job, kind of device: cpu or cuda) that returns whether the plan meets
           the condition
    fix    the smallest change with which the condition holds, as text, in which {plan.x}, {job.x}
           and {train.x} are replaced by values
    """

    text: str
    holds: Callable[[Plan, Job, str], bool]
    fix: str

    def remedy(self, plan: Plan, job: Job) -> str:
        """Return `fix` with the values of this plan and this job filled in."""
        return self.fix.format(plan=plan, job=job, train=job.train)


_NARROW = ("adamw", "sgd", "lion", "lamb", "lars")
BY_MATRIX = ("adafactor", "muon")  # their update needs full rows and columns, or the full matrix


def _has_lora(job: Job) -> bool:
    return isinstance(job.model, ModelSpec) and job.model.lora is not None


def _quantizes(job: Job) -> bool:
    return isinstance(job.model, ModelSpec) and job.model.lora is not None and job.model.lora.quantize is not None


def _gathers(plan: Plan, device: str) -> bool:
    """Return whether each block's parameters are in device memory only while the block computes:
    gathered by ZeRO-3, or copied from host memory. `device` is "cpu" or "cuda"."""
    return plan.zero == 3 or (device == "cuda" and "parameters" in plan.offload)


RULES = (
    Rule(
        "tf32 exists only on CUDA devices (Ampere and later)",
        lambda plan, job, device: plan.precision != "tf32" or device == "cuda",
        "use precision: fp32 or bf16-mixed",
    ),
    Rule(
        "a micro-batch cannot be larger than the batch",
        lambda plan, job, device: plan.micro_batch is None or plan.micro_batch <= job.train.batch,
        "use a micro_batch of at most {train.batch}",
    ),
    Rule(
        "kahan and stochastic rounding apply only to weights stored in bf16",
        lambda plan, job, device: plan.rounding == "nearest" or plan.precision == "bf16-true",
        "use precision: bf16-true, or rounding: nearest",
    ),
    Rule(
        "loss_scale has no effect without fp16",
        lambda plan, job, device: plan.loss_scale == "dynamic" or plan.precision.startswith("fp16"),
        "use precision: fp16-mixed or fp16-true, or leave out loss_scale",
    ),
    Rule(
        "master_weights keeps fp32 weights beside 16-bit ones; the other precisions have fp32 weights only",
        lambda plan, job, device: not plan.master_weights or plan.has_16_bit_weights,
        "use precision: bf16-true or fp16-true, or master_weights: false",
    ),
    Rule(
        "master weights are rounded to the nearest 16-bit number, and lose no update",
        lambda plan, job, device: not plan.master_weights or plan.rounding == "nearest",
        "use rounding: nearest, or master_weights: false",
    ),
    Rule(
        "torch's fused SGD does not update bf16 weights on a CPU",
        lambda plan, job, device: (
            device != "cpu"
            or not plan.fused_optimizer
            or job.train.optimizer != "sgd"
            or (plan.precision, plan.rounding, plan.states) != ("bf16-true", "nearest", "fp32")
            or plan.master_weights
        ),
        "use fused_optimizer: false, rounding: kahan, or master_weights: true",
    ),
    Rule(
        "float8 products need a CUDA device of compute capability 8.9 or later, or MI300",
        lambda plan, job, device: plan.float8 == "none" or device == "cuda",
        "use float8: none",
    ),
    Rule(
        "float8 products take factors from bf16 and return bf16",
        lambda plan, job, device: plan.float8 == "none" or plan.precision in ("bf16-mixed", "bf16-true"),
        "use precision: bf16-mixed or bf16-true, or float8: none",
    ),
    Rule(
        "tensor parallelism and float8 replace plain linear layers, and model.lora puts adapters around them",
        lambda plan, job, device: (plan.tp == 1 and plan.float8 == "none") or not _has_lora(job),
        "use tp: 1 and float8: none; zero: 3 and pp also divide a model with adapters",
    ),
    Rule(
        "model.lora.quantize makes 4-bit layers of full weights in host memory, before the model moves to its device",
        lambda plan, job, device: plan.materialize == "host" or not _quantizes(job),
        "use materialize: host",
    ),
    Rule(
        "zero-bubble delays the gradients of weights, and float8 layers compute them at once",
        lambda plan, job, device: plan.float8 == "none" or plan.schedule != "zero-bubble",
        "use schedule: 1f1b, or float8: none",
    ),
    Rule(
        "an update in backward applies each gradient once, so the whole batch must be one micro-batch",
        lambda plan, job, device: (
            not plan.update_in_backward or plan.micro_batch_of(job.train.batch) == plan.share_of(job.train.batch)
        ),
        "use micro_batch: {train.batch}, or update_in_backward: false",
    ),
    Rule(
        "an update in backward frees a gradient before it is all-reduced over the devices",
        lambda plan, job, device: not plan.update_in_backward or plan.devices == 1,
        "use update_in_backward: false; zero: 2 or 3 shard the gradients instead",
    ),
    Rule(
        "zero shards over the dp_shard x cp devices: zero: 1, 2 and 3 need at least two of them, and dp_shard: 2 or more needs zero",
        lambda plan, job, device: (plan.zero > 0) == (plan.shards > 1),
        "use dp_shard: 2 (or more) with zero: 1, 2 or 3; dp_shard: 1 with zero: 0",
    ),
    Rule(
        "gradient_sync: step keeps full gradients until the last micro-batch, as zero: 0 and 1 always do",
        lambda plan, job, device: plan.gradient_sync == "micro-batch" or plan.zero >= 2,
        "leave out gradient_sync, or use zero: 2 or 3",
    ),
    Rule(
        "gradient_sync: step keeps full gradients on the device, and offload moves shards of them out of it",
        lambda plan, job, device: plan.gradient_sync == "micro-batch" or "gradients" not in plan.offload,
        "use gradient_sync: micro-batch, or leave gradients out of offload",
    ),
    Rule(
        "PowerSGD adds to each gradient what it did not send before, and in fp16 the scales of both would differ",
        lambda plan, job, device: plan.compressed_gradients != "powersgd" or not plan.precision.startswith("fp16"),
        "use precision: bf16-mixed or fp32, or compressed_gradients: bf16 or none",
    ),
    Rule(
        "each device needs a sample in every step",
        lambda plan, job, device: plan.data_parallel <= job.train.batch,
        "use at most {train.batch} devices for data parallelism, or a larger train.batch",
    ),
    Rule(
        "for Adafactor and Muon a sharded parameter is gathered in the dtype that it is stored in",
        lambda plan, job, device: (
            not (
                (plan.zero or plan.tp > 1)
                and job.train.optimizer in BY_MATRIX
                and (plan.rounding != "nearest" or (plan.precision == "fp16-true" and not plan.master_weights))
            )
        ),
        "use rounding: nearest and not fp16-true with {train.optimizer_name}, or master_weights: true, or zero: 0",
    ),
    Rule(
        "context parallelism replaces attention by ring attention, and attention: blocked is another kernel",
        lambda plan, job, device: plan.cp == 1 or plan.attention == "sdpa",
        "use attention: sdpa",
    ),
    Rule(
        "with data.packing=separate, a sequence holds several samples, and ring attention would let them attend to each other",
        lambda plan, job, device: plan.cp == 1 or getattr(job.data, "packing", None) != "separate",
        "use cp: 1, or data.packing: padded",
    ),
    Rule(
        "compile: model makes one compiled region, and ring attention's communication cannot be part of it",
        lambda plan, job, device: plan.cp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "a loss of the job's own cannot be computed on parts of a sequence",
        lambda plan, job, device: plan.cp == 1 or job.loss is None,
        "use cp: 1, or remove loss from the job, so that the default loss of its task is used",
    ),
    Rule(
        "metrics of the job's own get whole sequences, and context parallelism shards them",
        lambda plan, job, device: plan.cp == 1 or not job.has_metrics,
        "use cp: 1, or leave out evaluate.metrics",
    ),
    Rule(
        "metrics of the job's own get the model's outputs, and chunked_loss never computes all logits",
        lambda plan, job, device: plan.chunked_loss is None or not job.has_metrics,
        "leave out chunked_loss, or leave out evaluate.metrics",
    ),
    Rule(
        "pipedream and an asynchronous server evaluate weights of later steps, so keep_best and early_stopping cannot name a step",
        lambda plan, job, device: (
            (plan.schedule != "pipedream" and plan.parameter_server != "async")
            or (job.train.keep_best is None and job.train.early_stopping is None)
        ),
        "use schedule: 1f1b and parameter_server: sync, or leave out train.keep_best and train.early_stopping",
    ),
    Rule(
        "sequence_parallel shards what tensor parallelism leaves replicated, so it needs tensor parallelism",
        lambda plan, job, device: not plan.sequence_parallel or plan.tp > 1,
        "use tp: 2 (or more), or sequence_parallel: false",
    ),
    Rule(
        "tensor parallelism's collectives cannot be part of one compiled region",
        lambda plan, job, device: plan.tp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "only the gradients that replicas all-reduce can be compressed",
        lambda plan, job, device: plan.compressed_gradients == "none" or (plan.replicas > 1 and plan.zero == 0),
        "use dp_replicate: 2 (or more) with zero: 0, or compressed_gradients: none",
    ),
    Rule(
        "recompute: attention runs queries x keys again, and context parallelism's ring attention gets the keys from other devices",
        lambda plan, job, device: plan.cp == 1 or plan.recompute != "attention",
        "use recompute: selective or full, or cp: 1",
    ),
    Rule(
        "recompute: sqrt recomputes several blocks as one segment, but zero: 3, and a GPU with offloaded parameters, have only "
        "one block's parameters at a time",
        lambda plan, job, device: not (_gathers(plan, device) and plan.recompute == "sqrt"),
        "use recompute: full or every-2, or zero: 2 and no parameters in offload",
    ),
    Rule(
        "parameters that are gathered and resharded, or offloaded, cannot be compiled into one region",
        lambda plan, job, device: not (_gathers(plan, device) and plan.compile == "model"),
        "use compile: block, or zero: 2 and no parameters in offload",
    ),
    Rule(
        "compile_mode has no effect without compile",
        lambda plan, job, device: plan.compile_mode == "default" or plan.compile != "none",
        "use compile: block or model, or compile_mode: default",
    ),
    Rule(
        "CUDA graphs and kernel autotuning need a CUDA device",
        lambda plan, job, device: plan.compile_mode == "default" or device == "cuda",
        "use compile_mode: default",
    ),
    Rule(
        "a CUDA graph writes gradients to fixed addresses, so compile_mode=reduce-overhead needs compile=model, one device, "
        "one micro-batch for each step, no offload and no update_in_backward",
        lambda plan, job, device: (
            plan.compile_mode != "reduce-overhead"
            or (
                plan.compile == "model"
                and plan.devices == 1
                and not plan.offload
                and not plan.update_in_backward
                and plan.micro_batch_of(job.train.batch) == plan.share_of(job.train.batch)
            )
        ),
        "use compile: model and one micro-batch on one device, without offload and update_in_backward, or compile_mode: default",
    ),
    Rule(
        "a parameter server's workers are replicas of the full model, and it does not compress gradients",
        lambda plan, job, device: (
            plan.parameter_server == "none"
            or (plan.dp_replicate > 1 and plan.devices == plan.dp_replicate + 1 and plan.compressed_gradients == "none")
        ),
        "use dp_replicate: 2 (or more) with zero: 0, tp: 1, pp: 1 and compressed_gradients: none",
    ),
    Rule(
        "an asynchronous server applies each gradient when it arrives, so it can neither clip the norm of all gradients nor skip "
        "an fp16 step that overflows",
        lambda plan, job, device: (
            plan.parameter_server != "async" or (job.train.clip is None and not plan.precision.startswith("fp16"))
        ),
        "leave out train.clip and fp16, or use parameter_server: sync",
    ),
    Rule(
        "staleness is a setting of the asynchronous parameter server",
        lambda plan, job, device: plan.staleness is None or plan.parameter_server == "async",
        "use parameter_server: async, or leave out staleness",
    ),
    Rule(
        "the lean allocator is a setting of glibc, which allocates only CPU memory",
        lambda plan, job, device: plan.allocator != "lean" or device == "cpu",
        "use allocator: tuned",
    ),
    Rule(
        "a CPU cannot offload to host memory, which is its device memory",
        lambda plan, job, device: not plan.offload or plan.offload_to == "disk" or device == "cuda",
        "use offload_to: disk",
    ),
    Rule(
        "offload_to and offload_folder have no effect without offload",
        lambda plan, job, device: bool(plan.offload) or (plan.offload_to == "host" and plan.offload_folder is None),
        "use offload: [states] (or gradients, parameters, activations), or leave out offload_to and offload_folder",
    ),
    Rule(
        "on a GPU, offloading parameters requires offloading gradients",
        lambda plan, job, device: device != "cuda" or "parameters" not in plan.offload or "gradients" in plan.offload,
        "add gradients to offload",
    ),
    Rule(
        "on several devices, parameters and gradients can be offloaded only together, as the shards of zero: 3",
        lambda plan, job, device: (
            plan.devices == 1
            or not {"parameters", "gradients"} & set(plan.offload)
            or (plan.zero == 3 and {"parameters", "gradients"} <= set(plan.offload))
        ),
        "use zero: 3 with both parameters and gradients in offload, or neither of them",
    ),
    Rule(
        "an update in backward frees each gradient at once, so there is none to offload",
        lambda plan, job, device: not (plan.update_in_backward and "gradients" in plan.offload),
        "leave gradients out of offload, or use update_in_backward: false",
    ),
    Rule(
        "Adafactor and Muon update full parameters, with optimizer states on the device",
        lambda plan, job, device: (
            not ("states" in plan.offload and job.train.optimizer == "muon")
            and not (plan.uploads_for_update(device) and job.train.optimizer in (BY_MATRIX if plan.zero else ("muon",)))
        ),
        "leave states, and on a GPU gradients and parameters, out of offload with {train.optimizer_name}",
    ),
    Rule(
        "schedule, virtual_stages and split have no effect without a pipeline",
        lambda plan, job, device: (
            plan.pp > 1 or (plan.schedule == "1f1b" and plan.virtual_stages == 1 and plan.split is None)
        ),
        "use pp: 2 (or more), or leave out schedule, virtual_stages and split",
    ),
    Rule(
        "schedule: interleaved needs several virtual stages on each device, and several virtual stages need it",
        lambda plan, job, device: (plan.schedule == "interleaved") == (plan.virtual_stages > 1),
        "use schedule: interleaved with virtual_stages: 2 (or more)",
    ),
    Rule(
        "split gives the number of blocks of each stage of the model, each at least 1",
        lambda plan, job, device: plan.split is None or (len(plan.split) == plan.stages and min(plan.split) > 0),
        "give {plan.stages} numbers of 1 or more, or leave out split",
    ),
    Rule(
        "a pipeline cuts the model into stages, so it cannot be one compiled region",
        lambda plan, job, device: plan.pp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "recompute: sqrt recomputes several blocks as one segment, which a pipeline may cut",
        lambda plan, job, device: plan.pp == 1 or plan.recompute != "sqrt",
        "use recompute: full or every-2",
    ),
    Rule(
        "zero-bubble computes the weights' gradients later, but zero: 2 and 3 reduce them during backward, and compiled blocks "
        "compute them there",
        lambda plan, job, device: plan.schedule != "zero-bubble" or (plan.zero < 2 and plan.compile == "none"),
        "use schedule: 1f1b, or zero: 1 and compile: none",
    ),
    Rule(
        "with pipedream each device updates its weights on its own, so the norm of all gradients is not known",
        lambda plan, job, device: plan.schedule != "pipedream" or job.train.clip is None,
        "leave out train.clip, or use schedule: 1f1b",
    ),
    Rule(
        "pipedream keeps several versions of the full weights, so zero cannot shard them, and it cannot skip a step that "
        "overflows in fp16",
        lambda plan, job, device: (
            plan.schedule != "pipedream" or (plan.zero == 0 and not plan.precision.startswith("fp16"))
        ),
        "use zero: 0 and bf16-mixed, or schedule: 1f1b",
    ),
    Rule(
        "vertical_sync selects among pipedream's versions of the weights",
        lambda plan, job, device: not plan.vertical_sync or plan.schedule == "pipedream",
        "use schedule: pipedream, or vertical_sync: false",
    ),
    Rule(
        "clipping needs the norm of all gradients before the first update, which an update in backward does not know",
        lambda plan, job, device: not plan.update_in_backward or job.train.clip is None,
        "leave out train.clip, or use update_in_backward: false",
    ),
    Rule(
        "a step that overflows in fp16 must be skipped as a whole, but an update in backward has already begun",
        lambda plan, job, device: not plan.update_in_backward or not plan.precision.startswith("fp16"),
        "use precision: bf16-mixed, or update_in_backward: false",
    ),
    Rule(
        "bf16, 8-bit and 4-bit optimizer states need an optimizer whose arithmetic on the states is elementwise",
        lambda plan, job, device: plan.states == "fp32" or job.train.optimizer in _NARROW,
        "use states: fp32 with {train.optimizer_name}, or one of the optimizers " + ", ".join(_NARROW),
    ),
    Rule(
        "an optimizer of the user's own keeps its states as it creates them and updates all parameters in one step, and the host "
        "decides whether an fp16 step is skipped",
        lambda plan, job, device: (
            not job.train.uses_function("optimizer")
            or (
                plan.states == "fp32"
                and plan.rounding == "nearest"
                and not plan.update_in_backward
                and "states" not in plan.offload
                and not plan.uploads_for_update(device)
                and plan.precision != "fp16-true"
                and not plan.master_weights
                and not (plan.precision.startswith("fp16") and device == "cuda")
            )
        ),
        "use states: fp32, rounding: nearest, master_weights: false, update_in_backward: false, no states in offload and "
        "bf16-mixed or fp32, or one of tightfit's optimizers",
    ),
    Rule(
        "torch has fused kernels only for AdamW and SGD",
        lambda plan, job, device: not plan.fused_optimizer or job.train.optimizer in ("adamw", "sgd"),
        "use fused_optimizer: false with {train.optimizer_name}",
    ),
    Rule(
        "pinned memory and non-blocking copies need a CUDA device",
        lambda plan, job, device: not (plan.pin_memory or plan.non_blocking) or device == "cuda",
        "use pin_memory: false and non_blocking: false",
    ),
    Rule(
        "chunked_loss replaces only the default loss of language models, and the job has a loss of its own",
        lambda plan, job, device: plan.chunked_loss is None or job.loss is None,
        "leave out chunked_loss, or remove loss from the job, so that the default loss of its task is used",
    ),
)


def needed_permissions(plan: Plan) -> set[str]:
    """Return the words that the job's `allow` must contain so that this plan may be used, such as
    {"bf16"}. Each word permits a change of the numerics, except "offload", which permits the use of
    host memory or disk."""
    needed = set()
    for word in ("tf32", "bf16", "fp16"):
        if plan.precision.startswith(word):
            needed.add(word)
    if plan.float8 != "none":
        needed.add("float8")
    if plan.states != "fp32":
        needed.add(f"{plan.states}-states")
    if plan.rounding == "stochastic":
        needed.add("stochastic-rounding")
    if plan.compressed_gradients != "none":
        needed.add("compressed-gradients")
    if plan.offload:
        needed.add("offload")
    if plan.schedule == "pipedream":
        needed.add("asynchronous")
    if plan.parameter_server == "async":
        needed.add("asynchronous")
    return needed


def check(plan: Plan, job: Job, device: str) -> None:
    """Raise InputError if a plan cannot be used for a job: if the job's `allow` does not permit a
    change of the numerics that the plan makes, or if the plan breaks one of the RULES.

    device  the kind of device: cpu or cuda
    """
    refused = sorted(needed_permissions(plan) - job.allowed)
    if refused:
        said = ["bf16"] if job.allow is None else job.allow
        allow = ", ".join(sorted({*said, *refused}))
        raise InputError(
            f"plan: {plan}",
            f"changes numerics in a way the job does not allow: {', '.join(refused)}",
            f"set allow: [{allow}] in the job, or use a plan without {', '.join(refused)}",
        )
    for rule in RULES:
        if not rule.holds(plan, job, device):
            raise InputError(f"plan: {plan}", rule.text, rule.remedy(plan, job))
