"""tightfit: train models that barely fit, as fast as the hardware allows, and know both before you
start.

Importing tightfit is cheap, because torch and transformers are imported only when a name that needs
them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightfit.cost.ledger import Ledger
    from tightfit.engine.build import build
    from tightfit.engine.callbacks import Callback
    from tightfit.engine.checkpoint.resume import resume
    from tightfit.engine.checkpoint.save import save
    from tightfit.engine.custom_loop import Prepared, prepare
    from tightfit.engine.evaluation import evaluate, evaluate_metrics
    from tightfit.engine.loop import train
    from tightfit.engine.step import Step
    from tightfit.errors import DoesNotFit, InputError, TightfitError
    from tightfit.interop.trainer import TrainerAdvice, for_trainer
    from tightfit.job import DataSpec, Evaluation, Job, Limits, ModelSpec, ParameterGroup, Train
    from tightfit.machine import Machine
    from tightfit.measure.verify import verify
    from tightfit.models.objective import Objective
    from tightfit.plan import Plan
    from tightfit.planner.defaults import complete
    from tightfit.planner.dry_run import dry_run
    from tightfit.planner.estimate import Estimate
    from tightfit.planner.estimator import estimate
    from tightfit.planner.loop_dry_run import LoopPeak, explain_loop, measure_loop
    from tightfit.planner.search import search
    from tightfit.planner.tracing.profiler import profile
    from tightfit.record import Record
    from tightfit.report.explain import explain
    from tightfit.runtime.run import Run

_MODULES = {
    "Callback": "engine.callbacks",
    "DataSpec": "job",
    "DoesNotFit": "errors",
    "Estimate": "planner.estimate",
    "Evaluation": "job",
    "InputError": "errors",
    "Job": "job",
    "Ledger": "cost.ledger",
    "Limits": "job",
    "LoopPeak": "planner.loop_dry_run",
    "Machine": "machine",
    "ModelSpec": "job",
    "Objective": "models.objective",
    "ParameterGroup": "job",
    "Plan": "plan",
    "Prepared": "engine.custom_loop",
    "Record": "record",
    "Run": "runtime.run",
    "Step": "engine.step",
    "TightfitError": "errors",
    "Train": "job",
    "TrainerAdvice": "interop.trainer",
    "build": "engine.build",
    "complete": "planner.defaults",
    "dry_run": "planner.dry_run",
    "estimate": "planner.estimator",
    "evaluate": "engine.evaluation",
    "evaluate_metrics": "engine.evaluation",
    "explain": "report.explain",
    "explain_loop": "planner.loop_dry_run",
    "for_trainer": "interop.trainer",
    "measure_loop": "planner.loop_dry_run",
    "prepare": "engine.custom_loop",
    "profile": "planner.tracing.profiler",
    "resume": "engine.checkpoint.resume",
    "save": "engine.checkpoint.save",
    "search": "planner.search",
    "train": "engine.loop",
    "verify": "measure.verify",
}

__all__ = [
    "Callback",
    "DataSpec",
    "DoesNotFit",
    "Estimate",
    "Evaluation",
    "InputError",
    "Job",
    "Ledger",
    "Limits",
    "LoopPeak",
    "Machine",
    "ModelSpec",
    "Objective",
    "ParameterGroup",
    "Plan",
    "Prepared",
    "Record",
    "Run",
    "Step",
    "TightfitError",
    "Train",
    "TrainerAdvice",
    "build",
    "complete",
    "dry_run",
    "estimate",
    "evaluate",
    "evaluate_metrics",
    "explain",
    "explain_loop",
    "for_trainer",
    "measure_loop",
    "prepare",
    "profile",
    "resume",
    "save",
    "search",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"tightfit has no {name!r}; its names are {', '.join(sorted(_MODULES))}")
    return getattr(importlib.import_module(f"tightfit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
