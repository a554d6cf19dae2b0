"""Plan: how a job is fitted to a machine. `Plan()` is the reference: fp32, one device, the whole batch at once, no method.

What cannot work together says `rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from tightfit.errors import InputError
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
    float8              the scales of products of linear layers in 8 bits: none (no such products), tensorwise (one scale
                        for each tensor) or rowwise (one for each row)
    micro_batch         samples per forward; None is the whole batch at once
    recompute           which blocks are computed again in backward instead of kept
    attention           sdpa (torch's fused kernel) or blocked (plain products, faster on processors)
    chunked_loss        tokens whose logits live at once; None keeps all logits, true chooses: 1,024, or by device
    states              width in which optimizer states are stored
    fused_optimizer     torch's fused kernel in place of its default one
    update_in_backward  each weight is updated as soon as its gradient is there, and the gradient freed
    compile             torch.compile of nothing, each block, or the model with its loss
    compile_mode        how: torch's default; max-autotune-no-cudagraphs tries several kernels for each product, and takes
                        the fastest; reduce-overhead replays the whole model as a CUDA graph, without a launch for each kernel
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
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    micro_batch: int | None = Field(None, gt=0)
    recompute: Annotated[str, BeforeValidator(_recompute)] = "none"
    attention: Literal["sdpa", "blocked"] = "sdpa"
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


PRECISIONS: tuple[str, ...] = get_args(Precision)
