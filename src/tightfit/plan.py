"""Plan: how a job is fitted to a machine; and RULES, the one table of combinations that cannot work.

`Plan()` is the reference: fp32, one device, the whole batch at once, no method. It changes no mathematics
beyond what the job's `allow` names: `needed_permissions` says which those are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.values import Value, read_yaml

Precision = Literal["fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]


def _recompute(value: Any) -> Any:
    if isinstance(value, str) and (
        value in ("none", "full", "selective", "sqrt") or re.fullmatch(r"(every|selective)-[1-9]\d*", value)
    ):
        return value
    raise InputError(
        f"plan: recompute={value}",
        "unknown choice",
        "use one of: none, full, selective, selective-2 (or another number), sqrt, every-2 (or another number)",
    )


def _compile(value: Any) -> Any:
    """YAML's true and false read as the whole model and none."""
    return {True: "model", False: "none"}.get(value, value) if isinstance(value, bool) else value


def _chunk(value: Any) -> Any:
    return {True: 1024, False: None}[value] if isinstance(value, bool) else value


Offloaded = Literal["states", "gradients", "parameters", "activations"]


def _in_order(value: Any) -> Any:
    """One word or several, each once, in the order of the list; none for nothing."""
    words = [value] if isinstance(value, str) else value
    if words == ["none"] or words is None:
        return ()
    known = get_args(Offloaded)
    if isinstance(words, list | tuple) and all(word in known for word in words):
        return tuple(word for word in known if word in words)
    return value


class Plan(Value):
    """How the job is fitted. Every field's default is the reference; a method is absent until its field leaves it.

    precision           what the arithmetic runs in; -mixed keeps fp32 weights, -true has one type for everything
    loss_scale          fp16 only: dynamic, or a fixed number
    rounding            bf16-true: how a weight update is rounded: nearest loses small ones, kahan carries what was
                        lost, stochastic keeps it in expectation
    micro_batch         samples per forward; None is the whole batch at once
    recompute           which blocks are computed again in backward instead of kept
    attention           sdpa (torch's fused kernel) or blocked (plain products, faster on processors)
    chunked_loss        tokens whose logits live at once; None keeps all logits
    states              width in which optimizer states are stored
    fused_optimizer     torch's fused kernel in place of its default one
    update_in_backward  each weight is updated as soon as its gradient is there, and the gradient freed
    compile             torch.compile of nothing, each block, or the model with its loss
    materialize         where the model is created: host (then moved and cast) or device (there, in its precision)
    allocator           default; tuned: freed memory is kept and reused, huge pages, expandable segments; lean, on a
                        processor: freed memory goes back to the system at once
    dp_replicate        groups of devices that each hold the whole model; their gradients are summed (data parallelism)
    dp_shard            devices of such a group that divide the samples, and by `zero` the model's states
    cp                  devices that divide each sample's sequence (context parallelism); they share the model as replicas, or
                        with `zero` divide its states with the dp_shard devices
    zero                what the dp_shard x cp devices divide: 1 optimizer states, 2 gradients too, 3 parameters too
    tp                  devices that divide attention, MLP and vocabulary by columns and rows
    sequence_parallel   whether the tp devices also divide what lies between those, norms and dropout, by positions
    pp                  devices in a row, each with some of the blocks (pipeline)
    schedule            in which order those run forwards and backwards of micro-batches; pipedream does not wait for a step's
                        last backward before the next step's first forward, so weights are updated late
    virtual_stages      interleaved: how many pieces of the model each pp device has
    split               blocks of each piece of the model, first to last; None makes them as equal as can be
    vertical_sync       pipedream: a micro-batch uses the same version of the weights on all devices
    parameter_server    none; sync or async: the dp_replicate workers send gradients to one more process, which updates
    staleness           async: how many steps a worker may be ahead of the slowest; None for any
    compressed_gradients  what replicas send each other: none, bf16, or powersgd (products of rank `powersgd_rank`)
    offload             what lies outside the device's memory: states, gradients, parameters, activations
    offload_to          host (page-locked memory beside a GPU) or disk (mapped files in `offload_folder`, left out the
                        system's folder for temporary files)
    loader_workers      processes that prepare data; 0 prepares it in the training process
    prefetch            batches prepared ahead by each worker
    pin_memory          page-locked host buffers
    non_blocking        copies to the device that overlap its work
    """

    precision: Precision = "fp32"
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] = "dynamic"
    rounding: Literal["nearest", "kahan", "stochastic"] = "nearest"
    micro_batch: int | None = Field(None, gt=0)
    recompute: Annotated[str, BeforeValidator(_recompute)] = "none"
    attention: Literal["sdpa", "blocked"] = "sdpa"
    chunked_loss: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_chunk)] = None
    states: Literal["fp32", "bf16", "8-bit", "4-bit"] = "fp32"
    fused_optimizer: bool = False
    update_in_backward: bool = False
    compile: Annotated[Literal["none", "block", "model"], BeforeValidator(_compile)] = "none"
    materialize: Literal["host", "device"] = "host"
    allocator: Literal["default", "tuned", "lean"] = "default"
    dp_replicate: int = Field(1, gt=0)
    dp_shard: int = Field(1, gt=0)
    cp: int = Field(1, gt=0)
    zero: Literal[0, 1, 2, 3] = 0
    tp: int = Field(1, gt=0)
    sequence_parallel: bool = False
    pp: int = Field(1, gt=0)
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"] = "1f1b"
    virtual_stages: int = Field(1, gt=0)
    split: tuple[int, ...] | None = None
    vertical_sync: bool = False
    parameter_server: Literal["none", "sync", "async"] = "none"
    staleness: int | None = Field(None, ge=0)
    compressed_gradients: Literal["none", "bf16", "powersgd"] = "none"
    powersgd_rank: int = Field(4, gt=0)
    offload: Annotated[tuple[Offloaded, ...], BeforeValidator(_in_order)] = ()
    offload_to: Literal["host", "disk"] = "host"
    offload_folder: str | None = None
    loader_workers: int = Field(0, ge=0)
    prefetch: int = Field(2, gt=0)
    pin_memory: bool = False
    non_blocking: bool = False

    def content(self) -> dict[str, Any]:
        """Every field, also those that are None: a plan that is written down pins them all."""
        return self.model_dump(mode="json")

    def differences(self) -> dict[str, Any]:
        """The fields that differ from the reference plan."""
        reference = Plan()
        return {name: value for name, value in self if value != getattr(reference, name)}

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.differences().items())
        return f"Plan({said or 'reference'})"

    __str__ = __repr__

    @property
    def is_half(self) -> bool:
        return self.precision.startswith(("bf16", "fp16"))

    @property
    def is_true(self) -> bool:
        """Weights, gradients and arithmetic all in 16 bits."""
        return self.precision.endswith("-true")

    @property
    def data_parallel(self) -> int:
        """How many devices, or groups of them, divide a step's samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def replicas(self) -> int:
        """How many times all devices together hold the model's states."""
        return self.dp_replicate * (1 if self.zero else self.cp)

    @property
    def shards(self) -> int:
        """How many devices divide what `zero` says."""
        return self.dp_shard * (self.cp if self.zero else 1)

    @property
    def devices(self) -> int:
        return self.data_parallel * self.cp * self.tp * self.pp + self.servers

    @property
    def servers(self) -> int:
        """Processes beside the workers."""
        return 0 if self.parameter_server == "none" else 1

    @property
    def stages(self) -> int:
        """Pieces that a pipeline cuts the model into."""
        return self.pp * self.virtual_stages

    def share_of(self, batch: int) -> int:
        """The most samples of a step that one device is given."""
        return math.ceil(batch / self.data_parallel)

    def micro_batch_of(self, batch: int) -> int:
        """Samples of one forward on one device, in a step of `batch` samples on all of them."""
        share = self.share_of(batch)
        return min(self.micro_batch or share, share)


def read_pins(source: str | Path | Mapping[str, Any] | Literal["reference"] | None) -> dict[str, Any]:
    """The fields that a plan file, a mapping or the word `reference` pins. A plan may be partial. Raises InputError."""
    if source is None:
        return {}
    if source == "reference":
        return Plan().model_dump()
    where = "plan" if isinstance(source, Mapping) else str(source)
    content = dict(source) if isinstance(source, Mapping) else read_yaml(source)
    if set(content) == {"plan"}:
        content = content["plan"]
        if content == "reference":
            return Plan().model_dump()
    plan = Plan.parse(content, where)
    return {name: getattr(plan, name) for name in content}


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


PRECISIONS: tuple[str, ...] = get_args(Precision)
