"""Plan: how a job is fitted to a machine. A plan changes the mathematics only where the job's
`allow` permits it.

`Plan()` is the reference: fp32, one device, the whole batch at once, no method. `rules.py` lists
the combinations that cannot work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from tightfit.errors import InputError
from tightfit.values import Value, read_yaml

if TYPE_CHECKING:
    from tightfit.job import Job

Precision = Literal["fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]


def _recompute(value: Any) -> Any:
    if isinstance(value, str) and (
        value in ("none", "full", "selective", "attention", "sqrt")
        or re.fullmatch(r"(every|selective|first)-[1-9]\d*", value)
    ):
        return value
    raise InputError(
        f"plan: recompute={value}",
        "unknown choice",
        "use one of: none, full, selective, attention, sqrt, or with any number: selective-2, every-2, first-2",
    )


def _compile(value: Any) -> Any:
    """Return the plan's field `compile` as a word: "model" for True, "none" for False, and any
    other value unchanged."""
    return {True: "model", False: "none"}.get(value, value) if isinstance(value, bool) else value


def _chunk(value: Any) -> Any:
    return {True: 1024, False: None}[value] if isinstance(value, bool) else value


Offloaded = Literal["states", "gradients", "parameters", "activations"]


def _in_order(value: Any) -> Any:
    """Return the words of the plan's field `offload` as a tuple, without duplicates and in the
    order of `Offloaded`.

    value  one word or a list of words. "none" and None give (); a value with an unknown word is
           returned unchanged, and pydantic refuses it
    """
    words = [value] if isinstance(value, str) else value
    if words == ["none"] or words is None:
        return ()
    known = get_args(Offloaded)
    if isinstance(words, list | tuple) and all(word in known for word in words):
        return tuple(word for word in known if word in words)
    return value


class Plan(Value):
    """How the job is fitted to the machine. Each default is that of the reference plan: a method is
    on only if one of its fields differs from its default.

    Example: 64 GPUs with dp_replicate = 2, dp_shard = 4, tp = 4, pp = 2 and zero = 3 train
    2 x 4 = 8 shares of each batch. Each share goes through 2 pipeline stages of 4 tp ranks, and
    parameters, gradients and optimizer states are sharded over the 4 dp_shard ranks.

    precision           dtype of the arithmetic; -mixed keeps fp32 weights, -true uses the same
                        dtype for weights, gradients and arithmetic
    loss_scale          fp16 only: dynamic, or a fixed number
    rounding            bf16-true: how a weight update is rounded. nearest loses small updates,
                        kahan adds the rounding error to the next update, stochastic rounds at
                        random so that the mean is exact
    master_weights      bf16-true, fp16-true: whether the optimizer keeps the weights in fp32, too,
                        as one more state. It updates these master weights with fp32 gradients, in
                        which micro-batches add up, and rounds them into the 16-bit weights
    float8              how linear layers multiply in 8 bits: none (they do not), tensorwise (one
                        scale per tensor) or rowwise (one scale per row)
    micro_batch         samples per forward on one device; None takes all of the device's samples at
                        once
    recompute           which activations are recomputed in backward instead of saved: none; full
                        (those of every block); every-2 (those of every second block; also every-3,
                        ...); first-12 (those of the first 12 blocks, or of any other number; in a
                        pipeline, of each stage); selective (of each block only the results of cheap
                        operations); selective-2 (these, and those of every second product with
                        weights); attention (only the attention scores and their softmax, or the
                        result of a fused attention kernel); sqrt (several blocks recomputed
                        together)
    attention           sdpa (torch's fused kernel) or blocked (plain matrix products, faster on
                        CPUs)
    dropout             how dropout draws its masks: torch, or 16-bit (from 16 random bits per element,
                        which is faster on CPUs)
    memory_format       how images lie in memory between convolutions: contiguous (one channel after
                        another) or channels_last (the channels of a pixel side by side)
    chunked_loss        how many tokens' logits are in memory at once. None keeps the logits of all
                        tokens; true is 1,024
    states              how optimizer states are stored: fp32, bf16, 8-bit or 4-bit
    fused_optimizer     whether to use torch's fused kernel instead of its default one
    update_in_backward  whether each weight is updated as soon as its gradient is complete. The
                        gradient is then freed
    compile             what torch.compile compiles: none, block (each block by itself) or model
                        (the model with its loss)
    compile_mode        default; max-autotune-no-cudagraphs tries several kernels for each matrix
                        product and takes the fastest; reduce-overhead replays the model as one CUDA
                        graph, which avoids a launch for each kernel
    materialize         where the model is created: host (in fp32, then cast and moved to the
                        device) or device (directly in the dtype in which its weights are stored)
    allocator           default; tuned: freed memory is cached and reused, huge pages, expandable
                        segments; lean, on a CPU: freed memory returns to the system at once
    dp_replicate        number of replicas of the model, whose gradients are all-reduced (data
                        parallelism)
    dp_shard            number of ranks in a replica. They share the replica's samples, and shard
                        the model's states as `zero` says
    cp                  number of ranks over which each sequence is sharded (context parallelism).
                        Each of them has a full copy of the model's states; with `zero`, the cp and
                        dp_shard ranks shard these states together
    zero                what is sharded over the dp_shard x cp ranks: 0 nothing, 1 optimizer states,
                        2 gradients too, 3 parameters too
    gradient_sync       zero: 2 and 3 with several micro-batches: when gradients are reduce-scattered.
                        micro-batch: after the backward of each, so that only shards of gradients
                        stay; step: once, in the last micro-batch, while full gradients add up in
                        those before it. zero: 0 and 1 always reduce once per step
    tp                  number of ranks over which attention, MLP and vocabulary are sharded, by
                        columns and rows of their weights (tensor parallelism)
    sequence_parallel   whether the tp ranks also shard the norms and dropout between these layers,
                        along the sequence
    pp                  number of pipeline ranks, each with some of the blocks
    schedule            the order of the micro-batches' forwards and backwards. pipedream starts the
                        next step's first forward before a step's last backward has ended, so this
                        forward uses older weights
    virtual_stages      interleaved: number of the model's stages on each pipeline rank
    split               number of blocks in each stage, first to last, such as [6, 6, 6, 4]. None: a
                        search balances the stages by their predicted time, embedding and output
                        head included, and writes this split into the plan. A run that is built
                        from a plan without a split has as many blocks in each stage as possible
    vertical_sync       pipedream: whether a micro-batch uses the same weight version on all ranks
    parameter_server    none; sync or async: the dp_replicate workers send their gradients to one
                        additional process, the server, which updates the weights
    staleness           async: how many steps a worker may be ahead of the slowest; None for any
                        number
    compressed_gradients  how replicas send gradients: none (uncompressed), bf16, or powersgd (as
                        the low-rank product PQ^T)
    powersgd_rank       powersgd: number of columns of P and of Q
    offload             what is stored outside device memory: states, gradients, parameters,
                        activations
    offload_to          host (page-locked memory beside a GPU) or disk (memory-mapped files)
    offload_folder      disk: folder of the memory-mapped files; None is the system's folder for
                        temporary files
    loader_workers      number of processes that prepare data; 0 prepares it in the training process
    prefetch            number of micro-batches that each worker prepares ahead
    pin_memory          whether host buffers are page-locked
    non_blocking        whether copies to the device overlap with its computation
    """

    precision: Precision = "fp32"
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] = "dynamic"
    rounding: Literal["nearest", "kahan", "stochastic"] = "nearest"
    master_weights: bool = False
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    micro_batch: int | None = Field(None, gt=0)
    recompute: Annotated[str, BeforeValidator(_recompute)] = "none"
    attention: Literal["sdpa", "blocked"] = "sdpa"
    dropout: Literal["torch", "16-bit"] = "torch"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    chunked_loss: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_chunk)] = None
    states: Literal["fp32", "bf16", "8-bit", "4-bit"] = "fp32"
    fused_optimizer: bool = False
    update_in_backward: bool = False
    compile: Annotated[Literal["none", "block", "model"], BeforeValidator(_compile)] = "none"
    compile_mode: Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead"] = "default"
    materialize: Literal["host", "device"] = "host"
    allocator: Literal["default", "tuned", "lean"] = "default"
    dp_replicate: int = Field(1, gt=0)
    dp_shard: int = Field(1, gt=0)
    cp: int = Field(1, gt=0)
    zero: Literal[0, 1, 2, 3] = 0
    gradient_sync: Literal["micro-batch", "step"] = "micro-batch"
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
        """Return all fields as JSON types, also those that are None, because a plan that is written
        to a file fixes every field."""
        return self.model_dump(mode="json")

    def differences(self) -> dict[str, Any]:
        """Return a dict with the fields that differ from the reference plan `Plan()`: name ->
        value."""
        reference = Plan()
        return {name: value for name, value in self if value != getattr(reference, name)}

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.differences().items())
        return f"Plan({said or 'reference'})"

    __str__ = __repr__

    @property
    def computes_in_16_bits(self) -> bool:
        """Whether products run in 16 bits (bf16 or fp16), with weights of fp32 or of 16 bits."""
        return self.precision.startswith(("bf16", "fp16"))

    @property
    def has_16_bit_weights(self) -> bool:
        """Whether weights are stored in 16 bits and used in them, beside fp32 master weights or not."""
        return self.precision.endswith("-true")

    def uploads_for_update(self, device: str) -> bool:
        """Return whether offloaded weights or gradients are copied to the device for the update.
        Return False for a CPU, which updates them in place, in host memory or in the mapped files.

        device  the kind of device: "cpu" or "cuda"
        """
        return device == "cuda" and bool({"parameters", "gradients"} & set(self.offload))

    @property
    def recomputes_blocks(self) -> bool:
        """Whether backward runs the forward of some blocks again."""
        return self.recompute not in ("none", "attention")

    @property
    def loses_small_updates(self) -> bool:
        """True if an update of a 16-bit weight may be lost in rounding, because neither the
        rounding nor master weights keep what is cut off."""
        return self.has_16_bit_weights and self.rounding == "nearest" and not self.master_weights

    @property
    def data_parallel(self) -> int:
        """The data-parallel degree: the number of parts into which the samples of a step are
        divided. Each part goes to one group of tp x cp x pp ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def replicas(self) -> int:
        """The number of copies of the model's states (parameters, gradients and optimizer states)
        on all devices together."""
        return self.dp_replicate * (1 if self.zero else self.cp)

    @property
    def shards(self) -> int:
        """The number of ranks over which the states that `zero` selects are sharded."""
        return self.dp_shard * (self.cp if self.zero else 1)

    @property
    def shards_each_micro_batch(self) -> bool:
        """True if gradients are reduce-scattered in each micro-batch of a step, and not only in the
        last one."""
        return self.zero >= 2 and self.gradient_sync == "micro-batch"

    @property
    def devices(self) -> int:
        """Number of processes of the plan, parameter servers included. Each process has one
        device."""
        return self.data_parallel * self.cp * self.tp * self.pp + self.servers

    @property
    def servers(self) -> int:
        """Number of parameter servers, which are processes in addition to the workers: 0 or 1."""
        return 0 if self.parameter_server == "none" else 1

    @property
    def stages(self) -> int:
        """Number of pipeline stages into which the model is split."""
        return self.pp * self.virtual_stages

    def share_of(self, batch: int) -> int:
        """Return the largest number of samples that one data-parallel rank gets in a step of
        `batch` samples. Example: batch = 30 on 4 data-parallel ranks gives 8."""
        return math.ceil(batch / self.data_parallel)

    def micro_batch_of(self, batch: int) -> int:
        """Return the number of samples in one forward on one device.

        batch  number of samples of a step on all devices together

        Example: batch = 30 on 4 data-parallel ranks is at most 8 samples on each rank.
        micro_batch = 3 gives 3, micro_batch = 16 or None gives 8.
        """
        share = self.share_of(batch)
        return min(self.micro_batch or share, share)


def plan_of(given: Plan | Mapping[str, Any] | None, job: Job | None = None) -> Plan:
    """Return the plan that a caller of the library means.

    given  a plan, or a mapping of plan fields such as {"micro_batch": 4}; None: the reference plan
           `Plan()` with the fields that the job's `plan` sets
    job    the job; None: there is none, so None means the reference plan

    Raises InputError if a field is unknown or has a wrong value, or if `given` is of another type.
    """
    if given is None:
        return Plan() if job is None else Plan().replace(**read_pins(job.plan))
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        return Plan.parse(dict(given), "plan")
    raise InputError(
        "plan",
        f"is of type {type(given).__name__}",
        'give a plan such as tightfit.Plan(micro_batch=4), or its fields: {"micro_batch": 4}; of an estimate that '
        "tightfit.search returned, give its plan: estimate.plan",
    )


def read_pins(source: str | Path | Mapping[str, Any] | Literal["reference"] | None) -> dict[str, Any]:
    """Return the plan fields that the user has fixed (pinned), as a dict: name -> value.

    source  a plan file, a mapping of plan fields, the word reference (all fields of Plan()) or None
            (no fields). A file or mapping may leave out fields, which search then chooses

    Raises InputError for a file or mapping that is not a plan.
    """
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


def checked_pins(pins: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `pins`, plan fields by name, as a dict with unchanged values; {} for None. Raises
    InputError if a field is unknown or has a wrong value, or if `pins` is not a mapping."""
    if pins is not None and not isinstance(pins, Mapping):
        raise InputError(
            "pins",
            f"is of type {type(pins).__name__}, and must be a mapping of plan fields",
            'write it like {"micro_batch": 4}',
        )
    Plan.parse(dict(pins or {}), "plan")
    return dict(pins or {})


PRECISIONS: tuple[str, ...] = get_args(Precision)
