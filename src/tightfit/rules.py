"""RULES, the one table of combinations that cannot work; and what a plan changes in the mathematics, which a job must allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.plan import Plan


@dataclass(frozen=True)
class Rule:
    """A combination that cannot work: what must hold, why, and the smallest change that makes it hold."""

    text: str
    holds: Callable[[Plan, Job, str], bool]
    fix: str

    def remedy(self, plan: Plan, job: Job) -> str:
        return self.fix.format(plan=plan, job=job, train=job.train)


_NARROW = ("adamw", "sgd", "lion", "lamb", "lars")
BY_MATRIX = ("adafactor", "muon")  # look at rows and columns, or at a whole matrix


def _brings(plan: Plan, device: str) -> bool:
    """Whether weights or gradients are brought to a device to update them."""
    return device == "cuda" and bool({"parameters", "gradients"} & set(plan.offload))


def _gathers(plan: Plan, device: str) -> bool:
    """Whether parameters are on a device only while their block is at work."""
    return plan.zero == 3 or (device == "cuda" and "parameters" in plan.offload)


RULES = (
    Rule(
        "tf32 is arithmetic of CUDA devices (Ampere and later)",
        lambda plan, job, device: plan.precision != "tf32" or device == "cuda",
        "use precision: fp32 or bf16-mixed",
    ),
    Rule(
        "a micro-batch is at most the batch",
        lambda plan, job, device: plan.micro_batch is None or plan.micro_batch <= job.train.batch,
        "use a micro_batch of at most {train.batch}",
    ),
    Rule(
        "kahan and stochastic rounding are for weights held in bf16",
        lambda plan, job, device: plan.rounding == "nearest" or plan.precision == "bf16-true",
        "use precision: bf16-true, or rounding: nearest",
    ),
    Rule(
        "torch's fused SGD on a processor does not update weights in bf16",
        lambda plan, job, device: (
            device != "cpu"
            or not plan.fused_optimizer
            or job.train.optimizer != "sgd"
            or (plan.precision, plan.rounding, plan.states) != ("bf16-true", "nearest", "fp32")
        ),
        "use fused_optimizer: false, or rounding: kahan",
    ),
    Rule(
        "float8 products are of CUDA devices (compute capability 8.9 and later, MI300)",
        lambda plan, job, device: plan.float8 == "none" or device == "cuda",
        "use float8: none",
    ),
    Rule(
        "float8 products take factors from bf16 and return bf16",
        lambda plan, job, device: plan.float8 == "none" or plan.precision in ("bf16-mixed", "bf16-true"),
        "use precision: bf16-mixed or bf16-true, or float8: none",
    ),
    Rule(
        "float8 scales whole layers, and tensor parallelism cuts them",
        lambda plan, job, device: plan.float8 == "none" or plan.tp == 1,
        "use tp: 1, or float8: none",
    ),
    Rule(
        "zero-bubble leaves weights' gradients for later, and float8 layers make them at once",
        lambda plan, job, device: plan.float8 == "none" or plan.schedule != "zero-bubble",
        "use schedule: 1f1b, or float8: none",
    ),
    Rule(
        "an update in backward sees each gradient once, so the whole batch is one micro-batch",
        lambda plan, job, device: (
            not plan.update_in_backward or plan.micro_batch_of(job.train.batch) == plan.share_of(job.train.batch)
        ),
        "use micro_batch: {train.batch}, or update_in_backward: false",
    ),
    Rule(
        "an update in backward uses up a gradient before other devices' are added to it",
        lambda plan, job, device: not plan.update_in_backward or plan.devices == 1,
        "use update_in_backward: false; zero: 2 or 3 divide the gradients instead",
    ),
    Rule(
        "zero says what the dp_shard devices (and cp's) divide: one does not go without the other",
        lambda plan, job, device: (plan.zero > 0) == (plan.shards > 1),
        "use dp_shard: 2 (or more) with zero: 1, 2 or 3; dp_shard: 1 with zero: 0",
    ),
    Rule(
        "each device needs a sample of every step",
        lambda plan, job, device: plan.data_parallel <= job.train.batch,
        "use at most {train.batch} devices for data parallelism, or a larger train.batch",
    ),
    Rule(
        "a divided parameter is brought together for Adafactor and Muon in the type it is kept in",
        lambda plan, job, device: (
            not (
                (plan.zero or plan.tp > 1)
                and job.train.optimizer in BY_MATRIX
                and (plan.rounding != "nearest" or plan.precision == "fp16-true")
            )
        ),
        "use rounding: nearest and not fp16-true with {train.optimizer}, or zero: 0",
    ),
    Rule(
        "a sequence that is divided goes through attention in a ring, which is one kernel of its own",
        lambda plan, job, device: plan.cp == 1 or plan.attention == "sdpa",
        "use attention: sdpa",
    ),
    Rule(
        "what travels around a ring is no part of one compiled region",
        lambda plan, job, device: plan.cp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "a loss of the job's own cannot be divided along a sequence",
        lambda plan, job, device: plan.cp == 1 or job.loss is None,
        "use cp: 1, or leave the job's loss to its task",
    ),
    Rule(
        "sequence_parallel divides what tensor parallelism leaves whole",
        lambda plan, job, device: not plan.sequence_parallel or plan.tp > 1,
        "use tp: 2 (or more), or sequence_parallel: false",
    ),
    Rule(
        "a model cut among devices runs with its collectives, which one compiled region does not hold",
        lambda plan, job, device: plan.tp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "compressed gradients are what replicas send each other",
        lambda plan, job, device: plan.compressed_gradients == "none" or (plan.replicas > 1 and plan.zero == 0),
        "use dp_replicate: 2 (or more) with zero: 0, or compressed_gradients: none",
    ),
    Rule(
        "a segment of several blocks is recomputed as one, and zero: 3 gathers parameters block by block, as a GPU does with "
        "offloaded ones",
        lambda plan, job, device: not (_gathers(plan, device) and plan.recompute == "sqrt"),
        "use recompute: full or every-2, or zero: 2 and no parameters in offload",
    ),
    Rule(
        "parameters that come and go cannot be compiled into one region",
        lambda plan, job, device: not (_gathers(plan, device) and plan.compile == "model"),
        "use compile: block, or zero: 2 and no parameters in offload",
    ),
    Rule(
        "a compile_mode is how regions are compiled",
        lambda plan, job, device: plan.compile_mode == "default" or plan.compile != "none",
        "use compile: block or model, or compile_mode: default",
    ),
    Rule(
        "CUDA graphs, and kernels that are tried for the fastest, are of CUDA devices",
        lambda plan, job, device: plan.compile_mode == "default" or device == "cuda",
        "use compile_mode: default",
    ),
    Rule(
        "a CUDA graph of a step holds the whole model on one device, and its gradients until the update: another micro-batch would "
        "overwrite them, an update in backward would free them, and offloaded tensors change their addresses",
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
        "use compile: model on one device with the whole batch as one micro-batch, without offload and update_in_backward, "
        "or compile_mode: default",
    ),
    Rule(
        "a parameter server has workers that are whole replicas",
        lambda plan, job, device: (
            plan.parameter_server == "none"
            or (plan.dp_replicate > 1 and plan.devices == plan.dp_replicate + 1 and plan.compressed_gradients == "none")
        ),
        "use dp_replicate: 2 (or more) with zero: 0, tp: 1, pp: 1 and compressed_gradients: none",
    ),
    Rule(
        "a gradient that is applied when it arrives is not clipped with others, nor skipped with them in fp16",
        lambda plan, job, device: (
            plan.parameter_server != "async" or (job.train.clip is None and not plan.precision.startswith("fp16"))
        ),
        "leave out train.clip and fp16, or use parameter_server: sync",
    ),
    Rule(
        "staleness is what an asynchronous server bounds",
        lambda plan, job, device: plan.staleness is None or plan.parameter_server == "async",
        "use parameter_server: async, or leave out staleness",
    ),
    Rule(
        "a lean allocator is glibc's, of a processor's memory",
        lambda plan, job, device: plan.allocator != "lean" or device == "cpu",
        "use allocator: tuned",
    ),
    Rule(
        "beside a processor there is no other memory: its host memory is the device's",
        lambda plan, job, device: not plan.offload or plan.offload_to == "disk" or device == "cuda",
        "use offload_to: disk",
    ),
    Rule(
        "what is offloaded, and where to, go together",
        lambda plan, job, device: bool(plan.offload) or (plan.offload_to == "host" and plan.offload_folder is None),
        "use offload: [states] (or gradients, parameters, activations), or leave out offload_to and offload_folder",
    ),
    Rule(
        "parameters that come to a GPU when they are needed leave their gradients where they came from",
        lambda plan, job, device: device != "cuda" or "parameters" not in plan.offload or "gradients" in plan.offload,
        "add gradients to offload",
    ),
    Rule(
        "of parameters and gradients that devices share, each offloads its own part, of both",
        lambda plan, job, device: (
            plan.devices == 1
            or not {"parameters", "gradients"} & set(plan.offload)
            or (plan.zero == 3 and {"parameters", "gradients"} <= set(plan.offload))
        ),
        "use zero: 3 with both parameters and gradients in offload, or neither of them",
    ),
    Rule(
        "an update in backward uses a gradient up at once, so there is none to offload",
        lambda plan, job, device: not (plan.update_in_backward and "gradients" in plan.offload),
        "leave gradients out of offload, or use update_in_backward: false",
    ),
    Rule(
        "whole parameters are brought together for Adafactor and Muon with states where they are",
        lambda plan, job, device: (
            not ("states" in plan.offload and job.train.optimizer == "muon")
            and not (_brings(plan, device) and job.train.optimizer in (BY_MATRIX if plan.zero else ("muon",)))
        ),
        "leave states, and on a GPU gradients and parameters, out of offload with {train.optimizer}",
    ),
    Rule(
        "a schedule, virtual stages and a split are a pipeline's",
        lambda plan, job, device: (
            plan.pp > 1 or (plan.schedule == "1f1b" and plan.virtual_stages == 1 and plan.split is None)
        ),
        "use pp: 2 (or more), or leave out schedule, virtual_stages and split",
    ),
    Rule(
        "interleaved is the schedule of several virtual stages on each device: one does not go without the other",
        lambda plan, job, device: (plan.schedule == "interleaved") == (plan.virtual_stages > 1),
        "use schedule: interleaved with virtual_stages: 2 (or more)",
    ),
    Rule(
        "a split says how many blocks each piece of the model has, one at least",
        lambda plan, job, device: plan.split is None or (len(plan.split) == plan.stages and min(plan.split) > 0),
        "give {plan.stages} numbers of 1 or more, or leave out split",
    ),
    Rule(
        "a pipeline cuts the model, which one compiled region does not allow",
        lambda plan, job, device: plan.pp == 1 or plan.compile != "model",
        "use compile: block",
    ),
    Rule(
        "a segment of several blocks is recomputed as one, and a pipeline may cut it",
        lambda plan, job, device: plan.pp == 1 or plan.recompute != "sqrt",
        "use recompute: full or every-2",
    ),
    Rule(
        "zero-bubble leaves weights' gradients for later, and zero: 2 and 3 send them at once; compiled blocks make them at once",
        lambda plan, job, device: plan.schedule != "zero-bubble" or (plan.zero < 2 and plan.compile == "none"),
        "use schedule: 1f1b, or zero: 1 and compile: none",
    ),
    Rule(
        "pipedream updates each device's weights by itself, without a norm of all gradients",
        lambda plan, job, device: plan.schedule != "pipedream" or job.train.clip is None,
        "leave out train.clip, or use schedule: 1f1b",
    ),
    Rule(
        "pipedream keeps whole weights of several versions, and has no step to skip",
        lambda plan, job, device: (
            plan.schedule != "pipedream" or (plan.zero == 0 and not plan.precision.startswith("fp16"))
        ),
        "use zero: 0 and bf16-mixed, or schedule: 1f1b",
    ),
    Rule(
        "vertical sync is about pipedream's versions of the weights",
        lambda plan, job, device: not plan.vertical_sync or plan.schedule == "pipedream",
        "use schedule: pipedream, or vertical_sync: false",
    ),
    Rule(
        "clipping needs the norm of all gradients before the first update, which an update in backward does not have",
        lambda plan, job, device: not plan.update_in_backward or job.train.clip is None,
        "leave out train.clip, or use update_in_backward: false",
    ),
    Rule(
        "a step that overflows in fp16 must be skipped whole, and an update in backward is already under way",
        lambda plan, job, device: not plan.update_in_backward or not plan.precision.startswith("fp16"),
        "use precision: bf16-mixed, or update_in_backward: false",
    ),
    Rule(
        "narrow states are for optimizers whose states are element by element",
        lambda plan, job, device: plan.states == "fp32" or job.train.optimizer in _NARROW,
        "use states: fp32 with {train.optimizer}, or one of the optimizers " + ", ".join(_NARROW),
    ),
    Rule(
        "torch has a fused kernel for AdamW and SGD only",
        lambda plan, job, device: not plan.fused_optimizer or job.train.optimizer in ("adamw", "sgd"),
        "use fused_optimizer: false with {train.optimizer}",
    ),
    Rule(
        "pinned memory and copies that do not block need a CUDA device",
        lambda plan, job, device: not (plan.pin_memory or plan.non_blocking) or device == "cuda",
        "use pin_memory: false and non_blocking: false",
    ),
    Rule(
        "chunked loss is for language models, whose logits are a linear layer of the hidden states",
        lambda plan, job, device: plan.chunked_loss is None or job.loss is None,
        "leave out chunked_loss, or leave the job's loss to its task",
    ),
)


def needed_permissions(plan: Plan) -> set[str]:
    """What the plan changes in the numerics, in the words of the job's `allow`."""
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
    """Refuse a plan that the job does not allow or that cannot work on `device` (cpu, cuda). Raises InputError."""
    refused = sorted(needed_permissions(plan) - job.allowed)
    if refused:
        said = ["bf16"] if job.allow is None else job.allow
        allow = ", ".join(sorted({*said, *refused}))
        raise InputError(
            f"plan: {plan}",
            f"changes numerics in a way the job does not allow: {', '.join(refused)}",
            f"add it to the job (allow: [{allow}]), or leave it out of the plan",
        )
    for rule in RULES:
        if not rule.holds(plan, job, device):
            raise InputError(f"plan: {plan}", rule.text, rule.remedy(plan, job))
