"""Conversions that the tables of several tools share.

A conversion takes a value from another tool's file. It returns the value of tightfit's field, or
`Lacks` (the reason why no field is set). For a value that the other tool would not accept either,
it raises ValueError, whose message names the accepted values. docs/import.md prints the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightfit.importers.mapping import Lacks

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")  # names of embedding layers
NO_EMBEDDINGS = "tightfit adds adapters to linear layers, not to embeddings"


def number(value: Any) -> float:
    """Return the value as a number. It may also be a text such as "1e-5", because YAML 1.1 reads
    1e-5 as text. Any other value is an error (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number") from None


def whole(value: Any) -> int:
    """Return the value as a whole number. It may also be written like 5e8. Any other value is an
    error (ValueError)."""
    try:
        found = number(value)
    except ValueError:
        raise ValueError("a whole number") from None
    if found != int(found):
        raise ValueError("a whole number")
    return int(found)


def flag(value: Any) -> bool:
    """Return the value as true or false. "yes" and 1 count as true; "no", 0, "none" and "" count as
    false. Any other value is an error (ValueError)."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": False, "": False}
    found = words.get(str(value).lower())
    if found is None:
        raise ValueError("true or false")
    return found


def text(value: Any) -> str:
    """Return the value unchanged. It must be a text that is not empty; any other value is an error
    (ValueError)."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def positive(value: Any) -> float | Lacks:
    """Return the value as a number. 0 or less switches the feature off in the other tool: then
    tightfit's field is left out (Lacks, with the reason)."""
    found = number(value)
    return found if found > 0 else Lacks("it is off", is_lost=False)


def count(value: Any) -> int | Lacks:
    """Return the value as a whole number. 0 or less switches the feature off in the other tool:
    then tightfit's field is left out (Lacks, with the reason)."""
    found = whole(value)
    return found if found > 0 else Lacks("it is off", is_lost=False)


def seed(value: Any) -> int | Lacks:
    """Return the seed, a whole number. A negative seed makes the tool draw a random one: then the
    field is left out (Lacks, with the reason), and tightfit uses its default, 0."""
    found = whole(value)
    return found if found >= 0 else Lacks("the tool draws a seed; tightfit's is 0 if left out", is_lost=False)


def chosen(words: Mapping[Any, Any], otherwise: str = "") -> Callable[[Any], Any]:
    """Return a conversion that looks a word up in `words` and returns the entry. Upper case counts
    as lower case.

    words      word in lower case (or a bool or a number) -> the result of the conversion
    otherwise  if not empty, the conversion returns Lacks(otherwise) for all other words; if empty,
               it raises ValueError for them
    """

    def convert(value: Any) -> Any:
        word = value if isinstance(value, bool | int) else str(value).lower()
        if word in words:
            return words[word]
        if otherwise:
            return Lacks(otherwise)
        raise ValueError("one of: " + ", ".join(str(known) for known in words))

    convert.__doc__ = ", ".join(
        f"{word} is {made.reason if isinstance(made, Lacks) else made}"
        for word, made in words.items()
        if isinstance(word, str)
    )
    return convert


def recompute_all(value: Any) -> str:
    """Return "full" (recompute every block) for true, and "none" for false."""
    return "full" if flag(value) else "none"


def compiled(value: Any) -> str:
    """Return "block" (compile each block) for true, and "none" for false."""
    return "block" if flag(value) else "none"


@dataclass(frozen=True)
class OptimizerChoice:
    """The tightfit settings that correspond to an optimizer's name in another tool.

    name      tightfit's name of the optimizer
    states    the value of plan.states; empty if the optimizer's name does not decide it
    is_fused  the value of plan.fused_optimizer; None if the optimizer's name does not decide it
    note      a remark about the translation, which is shown to the user
    """

    name: str
    states: str = ""
    is_fused: bool | None = None
    note: str = ""


_PAGED = "paged states move to host memory only when a GPU is full; plan.offload: [states] does so always"
_SCALED = (
    "transformers' Trainer takes the rate as it is (scale_parameter=False); tightfit's Adafactor, as torch's, multiplies it "
    "by the RMS of each weight, so its steps are smaller: raise train.learning_rate"
)
OPTIMIZERS: Mapping[str, OptimizerChoice] = {
    "adamw": OptimizerChoice("adamw"),
    "adamw_torch": OptimizerChoice("adamw", is_fused=False),
    "adamw_torch_fused": OptimizerChoice("adamw", is_fused=True),
    "adamw_hf": OptimizerChoice("adamw"),
    "adamw_apex_fused": OptimizerChoice("adamw", is_fused=True),
    "fusedadam": OptimizerChoice("adamw", is_fused=True),
    "paged_adamw": OptimizerChoice("adamw", note=_PAGED),
    "paged_adamw_32bit": OptimizerChoice("adamw", note=_PAGED),
    "pagedadamw": OptimizerChoice("adamw", note=_PAGED),
    "adamw_bnb_8bit": OptimizerChoice("adamw", states="8-bit"),
    "adamw_8bit": OptimizerChoice("adamw", states="8-bit"),
    "adamw8bit": OptimizerChoice("adamw", states="8-bit"),
    "adamw_torch_8bit": OptimizerChoice("adamw", states="8-bit"),
    "ao_adamw_8bit": OptimizerChoice("adamw", states="8-bit"),
    "paged_adamw_8bit": OptimizerChoice("adamw", states="8-bit", note=_PAGED),
    "pagedadamw8bit": OptimizerChoice("adamw", states="8-bit", note=_PAGED),
    "adamw_torch_4bit": OptimizerChoice("adamw", states="4-bit"),
    "adamw4bit": OptimizerChoice("adamw", states="4-bit"),
    "ao_adamw_4bit": OptimizerChoice("adamw", states="4-bit"),
    "adafactor": OptimizerChoice("adafactor", note=_SCALED),
    "sgd": OptimizerChoice("sgd"),
    "lion": OptimizerChoice("lion"),
    "lion_32bit": OptimizerChoice("lion"),
    "lion_pytorch": OptimizerChoice("lion"),
    "lion_8bit": OptimizerChoice("lion", states="8-bit"),
    "paged_lion_32bit": OptimizerChoice("lion", note=_PAGED),
    "paged_lion_8bit": OptimizerChoice("lion", states="8-bit", note=_PAGED),
    "lamb": OptimizerChoice("lamb"),
    "fusedlamb": OptimizerChoice("lamb"),
    "lars": OptimizerChoice("lars"),
    "muon": OptimizerChoice("muon"),
}


def optimizer(value: Any) -> OptimizerChoice | Lacks:
    """Return the tightfit optimizer, as an OptimizerChoice, for the name of another tool's
    optimizer. The name may include the type of the states: "adamw_bnb_8bit" becomes adamw with
    plan.states: 8-bit. For an optimizer that tightfit does not have, there is no counterpart
    (Lacks, with the reason)."""
    module, _, word = text(value).rpartition(".")
    choice = OPTIMIZERS.get(word.lower())
    if choice is not None and choice.note == _SCALED and module.startswith("torch"):
        return replace(choice, note="")
    return choice or Lacks(f"tightfit has no optimizer {value}")


@dataclass(frozen=True)
class ScheduleChoice:
    """The tightfit settings that correspond to the name of a learning-rate schedule in another
    tool.

    name      tightfit's name of the schedule
    warms_up  whether the other tool's schedule has a warm-up
    note      a remark about the translation, which is shown to the user
    """

    name: str
    warms_up: bool = True
    note: str = ""


SCHEDULES: Mapping[str, ScheduleChoice] = {
    "linear": ScheduleChoice("linear"),
    "cosine": ScheduleChoice("cosine"),
    "constant": ScheduleChoice("constant", warms_up=False),
    "constant_with_warmup": ScheduleChoice("constant"),
    "cosine_with_min_lr": ScheduleChoice("cosine"),
    "warmup_stable_decay": ScheduleChoice(
        "warmup-stable-decay", note="transformers decays along a cosine by default, tightfit linearly"
    ),
    "warmuplr": ScheduleChoice("constant"),
    "warmupdecaylr": ScheduleChoice("linear"),
    "warmupcosinelr": ScheduleChoice("cosine"),
    "get_cosine_schedule_with_warmup": ScheduleChoice("cosine"),
    "get_linear_schedule_with_warmup": ScheduleChoice("linear"),
    "get_constant_schedule": ScheduleChoice("constant", warms_up=False),
    "get_constant_schedule_with_warmup": ScheduleChoice("constant"),
    "cosineannealinglr": ScheduleChoice("cosine"),
}


def schedule(value: Any) -> ScheduleChoice | Lacks:
    """Return the tightfit schedule, as a ScheduleChoice, for the name of another tool's
    learning-rate schedule: "constant_with_warmup" becomes constant with train.warmup. For a
    schedule that tightfit does not have, there is no counterpart (Lacks, with the reason)."""
    return SCHEDULES.get(text(value).rpartition(".")[2].lower()) or Lacks(f"tightfit has no schedule {value}")


def warmup(value: Any) -> int | float:
    """Return the length of the warm-up. A number between 0 and 1 is a fraction of all steps; any
    other number is a whole number of steps."""
    found = number(value)
    return found if 0 < found < 1 else whole(value)


def sync_each_batch(value: Any) -> str:
    """Return "micro-batch" for true, and "step" for false: when the gradients of several micro-batches
    are reduced."""
    return "micro-batch" if flag(value) else "step"


def wide(value: Any) -> str:
    """Return "bf16", "fp16" or "fp32" for the name of the weights' dtype: "torch.bfloat16" becomes
    "bf16". Any other dtype is an error (ValueError)."""
    types = {
        "bf16": "bf16",
        "bfloat16": "bf16",
        "torch.bfloat16": "bf16",
        "fp16": "fp16",
        "float16": "fp16",
        "half": "fp16",
        "torch.float16": "fp16",
        "fp32": "fp32",
        "float32": "fp32",
        "torch.float32": "fp32",
    }
    found = types.get(str(value).lower())
    if found is None:
        raise ValueError("bfloat16, float16 or float32")
    return found


def report_to(value: Any) -> list[str] | Lacks:
    """Return a list of those trackers of the value that tightfit has, too: "tensorboard", "wandb"
    and "mlflow". "all" gives these three, and "none" gives an empty list. If the value names only
    other trackers, there is no counterpart (Lacks, with the reason)."""
    words = [value] if isinstance(value, str) else list(value)
    known = [word for word in ("tensorboard", "wandb", "mlflow") if word in words or words == ["all"]]
    if words in (["none"], []):
        return []
    return known or Lacks(f"tightfit does not report to {', '.join(map(str, words))}")


FSDP_STRATEGIES: Mapping[Any, tuple[int, bool]] = {  # (zero, whether hybrid: replicas that shard)
    "full_shard": (3, False),
    "shard_grad_op": (2, False),
    "no_shard": (0, False),
    "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True),
    1: (3, False),
    2: (2, False),
    3: (0, False),
    4: (3, True),
    5: (2, True),
}


def fsdp_strategy(value: Any) -> tuple[int, bool]:
    """Return (ZeRO stage, whether the model is also replicated over nodes) for the name or number
    of an FSDP strategy.

    "FULL_SHARD" is stage 3, "SHARD_GRAD_OP" is stage 2 and "NO_SHARD" is stage 0. The "HYBRID_"
    strategies shard within a node and replicate the model over nodes. Raises ValueError for another
    name or number.
    """
    word = int(value) if str(value).isdigit() else str(value).lower()
    if word not in FSDP_STRATEGIES:
        raise ValueError("one of: " + ", ".join(str(one).upper() for one in FSDP_STRATEGIES))
    return FSDP_STRATEGIES[word]


def reshard(value: Any) -> tuple[int, bool]:
    """Return (ZeRO stage, whether the model is also replicated over nodes). For true (free the
    gathered parameters after forward) the stage is 3, and for false (keep them until backward) it
    is 2. Names of FSDP strategies are accepted, too: the stage is 3 for "FULL_SHARD" and 2 for
    "SHARD_GRAD_OP", and the "HYBRID_" strategies replicate the model over nodes."""
    try:
        return (3 if flag(value) else 2), False
    except ValueError:
        return fsdp_strategy(value)


def offload_all(value: Any) -> tuple[str, ...]:
    """Return ("states", "gradients", "parameters") for true: these are offloaded to the CPU. Return
    () for false."""
    return ("states", "gradients", "parameters") if flag(value) else ()


def existing(value: Any, folder: Path) -> Any:
    """Return a path as an absolute path if it exists in `folder` or in the current folder. Return
    any other value, such as a hub id, unchanged. For a list, return the list of these results.

    folder  the folder of the imported file
    """
    if isinstance(value, list):
        return [existing(one, folder) for one in value]
    if not isinstance(value, str) or "{" in value or "\n" in value:  # the text of a template is no path
        return value
    for start in (folder, Path.cwd()):
        if (start / value).exists():
            return str((start / value).resolve())
    return value


SPLIT = "true: the batch is that of all data ranks together, and each takes its share"


def shuffled(value: Any) -> Lacks:
    """Return that no field is needed for true, and that there is no counterpart for false."""
    return Lacks("tightfit draws samples in random order", is_lost=not flag(value))


def switched_on(value: Any) -> bool | Lacks:
    """Return true if the feature is on. If it is off, tightfit's field is left out (Lacks, with the
    reason)."""
    return True if flag(value) else Lacks("it is off", is_lost=False)


def four_bits(value: Any) -> str | Lacks:
    """Return "nf4" for true: the frozen linear layers are stored in 4 bits. For false, the field is
    left out (Lacks, with the reason)."""
    return "nf4" if flag(value) else Lacks("it is off", is_lost=False)


def module_names(value: Any) -> list[str]:
    """Return a list of names of modules, unchanged; a text with commas is split at them."""
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("names of modules")
    return names


def lora_targets(value: Any) -> str | list[str] | Lacks:
    """Return "all-linear", or a list of names of layers, unchanged. For any other text, a regular
    expression of peft, there is no counterpart (Lacks, with the reason)."""
    if isinstance(value, list):
        if not value or not all(isinstance(one, str) and one for one in value):
            raise ValueError("names of layers")
        if value == ["all-linear"]:
            return "all-linear"
        return [one for one in value if one not in EMBEDDINGS] or Lacks(NO_EMBEDDINGS)
    word = text(value)
    if word == "all-linear" or word in EMBEDDINGS:
        return word if word == "all-linear" else Lacks(NO_EMBEDDINGS)
    if not word.isidentifier():
        return Lacks("a regular expression of peft; name layers, or patterns with *, in model.lora.targets")
    return [word]
