"""One trial: a model, a plan and training settings, compared with plain PyTorch."""

from __future__ import annotations

import math
import traceback
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import tightfit
from tests.zoo import find
from tests.zoo.plain import (
    BATCH,
    Trained,
    Weights,
    has_values,
    make_job,
    plain,
    replay,
    train_plainly,
)
from tightfit.errors import TightfitError
from tightfit.methods import compile as compile_method
from tightfit.models import model_factory

Outcome = Literal["equal", "refused", "different", "raised", "late", "hang", "crash"]
FAILURES = ("different", "raised", "late", "hang", "crash")
FP32 = 1e-6
BY_SIGN = ("lion", "adafactor", "lamb", "lars", "muon")
"""What steps as far for a gradient of nothing but rounding as for any other: such weights are left out. A sum of momentum and
gradient may be nothing but rounding, too, which the gradients do not show: of the way of all weights, FLIPPED is allowed."""
FLIPPED = 2e-2
STATES = {"fp32": 0.0, "bf16": 2e-2, "8-bit": 1e-1, "4-bit": 5e-1}


@dataclass(frozen=True)
class Trial:
    model: str
    plan: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def whole_plan(self) -> tightfit.Plan:
        return tightfit.Plan(**self.plan)

    @property
    def processes(self) -> int:
        return self.whole_plan.devices

    def without(self, *names: str) -> Trial:
        return replace(self, plan={name: value for name, value in self.plan.items() if name not in names})

    def content(self) -> dict[str, Any]:
        return asdict(self)

    def references(self, wide: bool) -> list[dict[str, Any]]:
        """What plain PyTorch has to train to compare this with: in fp32, in the plan's precision, and where asked in fp64."""
        plan, entry = self.whole_plan, find(self.model)
        cut = {"micro_batch": None, "replicas": 1}
        if entry.together:
            cut = {"micro_batch": plan.micro_batch, "replicas": plan.data_parallel}
        precisions = ["fp32"]
        if plan.precision not in ("fp32", "tf32"):
            precisions.append("true" if plan.has_16_bit_weights else "mixed")
        if plan.precision.startswith("fp16"):
            precisions.append("half" if plan.has_16_bit_weights else "half-mixed")
        if wide:
            precisions.append("fp64")
        references = [{"name": self.model, "train": self.train, **cut, "precision": name} for name in precisions]
        for reference in references:
            if reference["precision"].startswith("half"):
                reference["loss_scale"] = 2.0**16 if plan.loss_scale == "dynamic" else plan.loss_scale
        return references


@dataclass(frozen=True)
class Found:
    outcome: Outcome
    said: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


def keep_reference(path: str, reference: dict[str, Any]) -> None:
    """Train plainly and leave the result in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train_plainly(**reference)
    partial = Path(path).with_suffix(f".{torch.initial_seed()}.part")
    torch.save(vars(found), partial)
    partial.rename(path)


def attempt(trial: Trial, references: dict[str, str], backend: str | None = "aot_eager") -> Found:
    """Train as the trial says, in each of its processes, and compare with the references, which lie in files, by precision."""
    before = compile_method.BACKEND
    compile_method.BACKEND = backend or before
    losses: list[float] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job, plan = make_job(find(trial.model), trial.train), trial.whole_plan
            run = tightfit.build(job, plan)
            skipped = False
            for step in tightfit.train(run):
                losses.append(step.loss)
                skipped = skipped or step.skipped
            found = state_of(run)
        trained = {precision: Trained(**torch.load(path)) for precision, path in references.items()}
        said = compare(trial, losses, skipped, found, trained)
        if not said and is_replayed(trial, run):
            expected = replay(trial.model, trial.train, run.executor.log, plan.dp_replicate)
            said = compare_replayed(found, expected, trained["fp32"])
        return Found("different", said) if said else Found("equal")
    except TightfitError as error:
        return Found("late" if losses else "refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        if any(Trained(**torch.load(path)).error for path in references.values()):
            return Found("refused", f"plain PyTorch raises as well: {type(error).__name__}")
        return Found("raised", f"{type(error).__name__}: {str(error)[:400]}", traceback.format_exc())
    finally:
        compile_method.BACKEND = before
        if trial.plan.get("compile", "none") != "none":
            torch.compiler.reset()


def state_of(run: Any) -> Weights:
    """`tensors` of a model of which several devices may hold parts. All devices take part."""
    from torch.distributed.tensor import DTensor

    first = {id(parameter): name for name, parameter in run.model.named_parameters()}
    found = {}
    for name, value in run.model.state_dict(keep_vars=True).items():
        if has_values(value):
            cut = run.tp_shards.get(first.get(id(value), ""))
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = plain(cut.unshard(whole.detach()) if cut else whole)
    if run.executor is not None:  # each device of a pipeline has a stage
        right = {name: value for name, value in found.items() if name not in run.executor.stale_buffers}
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, right)
        names = model_factory(run.job.model)().state_dict()
        pieces = {name: value for one in everyones for name, value in one.items()}
        found = {name: pieces[name] for name, value in names.items() if has_values(value)}
    return found


# Comparison -----------------------------------------------------------------------------------------------------------


def compare(trial: Trial, losses: list[float], skipped: bool, found: Weights, trained: dict[str, Trained]) -> str:
    """What is wrong, in words; nothing where all agrees within what rounding explains."""
    plan, exact = trial.whole_plan, trained["fp32"]
    low = trained.get("true") or trained.get("mixed") or exact
    if exact.error:
        return ""  # plain PyTorch does not train it
    if not all(map(math.isfinite, losses)) and all(map(math.isfinite, exact.losses)):
        return f"losses {losses}, and {exact.losses} in plain PyTorch"
    if len(losses) != len(exact.losses):
        return f"{len(losses)} losses of {len(exact.losses)} steps"
    if found.keys() != exact.weights.keys():
        return f"other tensors: {sorted(found.keys() ^ exact.weights.keys())[:4]}"
    half = plan.precision not in ("fp32", "tf32")
    first, later = loss_bounds(trial, exact, low)
    apart = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, exact.losses, strict=True)]
    if trial.plan.get("parameter_server") == "async":
        return ""  # the order in which gradients arrived decides: the server replays it
    if is_free(trial):
        return (
            ""
            if max(apart) < 0.3 or find(trial.model).together
            else f"losses {losses}, and {exact.losses} in plain PyTorch"
        )
    if apart[0] > first:
        return f"first loss {losses[0]:.6f}, and {exact.losses[0]:.6f} in plain PyTorch"
    if is_loose(trial) or skipped:
        return ""
    if max(apart[1:], default=0.0) > later:
        return f"losses {losses}, and {exact.losses} in plain PyTorch"
    rounding = 4 * rounded(exact, trained.get("fp64"))
    bound = weights_bound(trial, exact, low) + rounding
    negligible = exact.negligible if trial.train.get("optimizer") in BY_SIGN else {}
    away = distance(found, exact.weights, negligible)
    if not away <= bound:
        name, worst = farthest(found, exact)
        return f"weights are {away:.3g} away of {bound:.3g} allowed; most {name}, {worst:.3g} of its way"
    if half or is_coarse(trial):
        alike = [one for one in (trained.get("half") or trained.get("half-mixed"), low) if one and not one.error]
        return untrained(found, exact, half, negligible, alike)
    return strayed(found, exact, rounding)


def is_replayed(trial: Trial, run: Any) -> bool:
    """Whether this process is an asynchronous server whose updates plain PyTorch can do again, number by number."""
    plan, entry = trial.whole_plan, find(trial.model)
    exact = plan.precision == "fp32" and not is_coarse(trial) and not entry.random and not entry.together
    return plan.parameter_server == "async" and exact and bool(getattr(run.executor, "log", None))


def compare_replayed(found: Weights, expected: Weights, exact: Trained) -> str:
    """Weights of an asynchronous server and of its replay; what rounding does is told by how far the weights went."""
    travelled = distance(exact.start, expected)
    away = distance(found, expected)
    return "" if away <= FP32 + 1e-3 * travelled else f"weights are {away:.3g} from those of the server's own log"


def is_free(trial: Trial) -> bool:
    """Whether even the first loss may differ: other random numbers are drawn, or some workers are ahead of others. Then losses are
    only held to be near."""
    keeps = {"recompute", "fused_optimizer", "update_in_backward", "states", "materialize", "allocator", "offload",
             "offload_to", "precision", "rounding", "master_weights", "loss_scale", "loader_workers"}  # fmt: skip
    another_draw = find(trial.model).random and not set(trial.plan) <= keeps
    return another_draw or trial.plan.get("parameter_server") == "async"


def is_loose(trial: Trial) -> bool:
    """Whether only the first loss is compared, and the later ones are finite: updates come late, or gradients lose most digits."""
    plan = trial.whole_plan
    return plan.schedule == "pipedream" or plan.compressed_gradients == "powersgd"


def is_coarse(trial: Trial) -> bool:
    plan = trial.whole_plan
    return plan.states != "fp32" or plan.compressed_gradients != "none" or trial.train.get("optimizer") in BY_SIGN


def loss_bounds(trial: Trial, exact: Trained, low: Trained) -> tuple[float, float]:
    """The largest relative difference of the first loss, and of later ones."""
    if trial.whole_plan.precision in ("fp32", "tf32"):
        return 3e-6, 2e-2 if is_coarse(trial) else 1e-5
    if low.error:
        return 2e-2, 1e-1
    off = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(low.losses, exact.losses, strict=True)]
    return 4 * off[0] + 5e-3, 4 * max(off) + 3e-2


def weights_bound(trial: Trial, exact: Trained, low: Trained) -> float:
    """As shares of the weights: rounding, what narrow states and gradients may change of the way, and four times what the
    precision changes in plain PyTorch."""
    plan, travelled = trial.whole_plan, distance(exact.start, exact.weights)
    bound = FP32 + STATES[plan.states] * travelled
    if plan.compressed_gradients == "bf16":
        bound += 5e-2 * travelled
    if trial.train.get("optimizer") in BY_SIGN:
        bound += (5e-2 if trial.train["optimizer"] == "muon" else FLIPPED) * travelled  # muon's products are in bf16
    if plan.precision not in ("fp32", "tf32"):
        bound += 1.0 if low.error else 4 * distance(low.weights, exact.weights) + 2e-3 + 0.1 * travelled
    return bound


def distance(found: Weights, expected: Weights, negligible: Weights | None = None) -> float:
    """Norm of the difference of all tensors over the norm of all expected ones."""
    away = size = 0.0
    for name, value in expected.items():
        difference = (found[name] - value).double()
        if negligible and name in negligible and negligible[name].shape == difference.shape:
            difference = difference.masked_fill(negligible[name], 0.0)
        away += float(difference.square().sum())
        size += float(value.double().square().sum())
    return math.sqrt(away / max(size, 1e-30))


def _way(found: Tensor, exact: Trained, name: str) -> tuple[float, float, float]:
    """(how far it is off, how far the reference went, how long it is)."""
    norm = lambda x: float(x.double().norm())  # noqa: E731
    return (
        norm(found - exact.weights[name]),
        norm(exact.weights[name] - exact.start[name]),
        norm(exact.weights[name]),
    )


def farthest(found: Weights, exact: Trained) -> tuple[str, float]:
    """The tensor that is most off, as a share of the way that it should have gone."""
    ways = {name: _way(value, exact, name) for name, value in found.items()}
    shares = {name: off / max(way, 1e-6 * max(size, 1e-3)) for name, (off, way, size) in ways.items()}
    name = max(shares, key=lambda one: shares[one])
    return name, shares[name]


def rounded(exact: Trained, wide: Trained | None) -> float:
    """How far plain PyTorch's fp32 is from its own fp64: what rounding does to this training."""
    return distance(wide.weights, exact.weights) if wide is not None and not wide.error else 0.0


def strayed(found: Weights, exact: Trained, rounding: float) -> str:
    """Each tensor by itself: small ones drown in the norm of all."""
    whole = math.sqrt(sum(float(value.double().square().sum()) for value in exact.weights.values()))
    for name, value in found.items():
        off, way, size = _way(value, exact, name)
        if off > 2e-3 * way + 2e-6 * size + 1e-6 + rounding * whole:
            return f"{name} is {off:.3g} away, and went {way:.3g}"
    return ""


def untrained(found: Weights, exact: Trained, half: bool, negligible: Weights, alike: list[Trained]) -> str:
    """A tensor that stayed where it began although it should have moved by more than rounding hides.

    alike  plain PyTorch in low precision: what stays there, too, is lost to the precision
    """
    for name, value in found.items():
        if name in negligible and bool(negligible[name].all()):
            continue
        if any(torch.equal(one.weights[name], one.start[name]) for one in alike):
            continue
        _, way, size = _way(value, exact, name)
        stayed = float((value - exact.start[name]).double().norm())
        if way > (2e-2 if half else 1e-3) * size + 1e-6 and stayed == 0.0:
            return f"{name} did not train, and went {way:.3g} of {size:.3g} in plain PyTorch"
    return ""


def share_of_batch(plan: tightfit.Plan) -> int:
    return math.ceil(BATCH / max(plan.data_parallel, 1))
