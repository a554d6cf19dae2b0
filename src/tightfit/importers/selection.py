"""Sets train.keep_best and train.early_stopping, which choose a checkpoint and the end of a training
by an evaluation metric."""

from __future__ import annotations

from typing import Any

from tightfit.importers.mapping import Draft

_PARTS = ("keep_best", "patience", "best_metric", "best_greater")


def combine_selection(draft: Draft) -> None:
    """Set train.keep_best from the part keep_best, and train.early_stopping from the part patience.
    Both compare the loss. Call this after train.evaluate_every is set.

    Another metric, in the part best_metric, is left to the user, because the job must define it.
    So is the number of steps between two evaluations, if the file does not give it.
    """
    parts = draft.parts
    wanted = {
        "train.keep_best": {} if parts.get("keep_best") else None,
        "train.early_stopping": {"patience": parts["patience"]} if parts.get("patience") else None,
    }
    chosen = [field for field, settings in wanted.items() if settings is not None]
    if not chosen:
        for part in _PARTS:
            draft.settle(part, "not needed", "no checkpoint is chosen by a metric")
        return
    metric = parts.get("best_metric", "loss")
    missing = _missing(draft, metric)
    if missing:
        for part in _PARTS:
            draft.settle(part, "no counterpart", f"{' and '.join(chosen)} need {missing}")
        draft.to_do.append(f"set {missing}, and then {' and '.join(chosen)}")
        return
    mode = {"mode": "max"} if parts.get("best_greater") else {}
    for field in chosen:
        draft.fields[field] = {"metric": metric, **mode, **(wanted[field] or {})}
    for part in ("best_metric", "best_greater"):
        draft.point(part, chosen[0])


def _missing(draft: Draft, metric: str) -> str:
    """Return the fields of the job that a choice by the metric needs and that the file does not
    give, in words; empty if there are none."""
    needed: dict[str, Any] = {
        f"evaluate.metrics (with {metric})": metric == "loss",
        "train.evaluate_every": draft.fields.get("train.evaluate_every"),
    }
    return " and ".join(field for field, given in needed.items() if not given)
