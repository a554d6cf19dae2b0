"""Sets train.keep_best and train.early_stopping from the keys of another tool."""

from __future__ import annotations

from typing import Any

from tightfit.importers.mapping import Draft


def combine_selection(draft: Draft) -> None:
    """Set train.keep_best from the part keep_best, and train.early_stopping from the part patience.

    Both compare the metric of the parts best_metric (the loss if it is not given) and best_greater.
    """
    parts = draft.parts
    criterion = _criterion(parts)
    if parts.get("keep_best"):
        draft.fields["train.keep_best"] = criterion
    if parts.get("patience"):
        draft.fields["train.early_stopping"] = {**criterion, "patience": parts["patience"]}
    if not parts.get("keep_best") and not parts.get("patience"):
        for part in ("best_metric", "best_greater"):
            draft.settle(part, "not needed", "no checkpoint is chosen by a metric")
        return
    for part in ("best_metric", "best_greater"):
        draft.point(part, "train.keep_best" if parts.get("keep_best") else "train.early_stopping")
    if criterion["metric"] != "loss":
        draft.to_do.append(f"add the metric {criterion['metric']} to evaluate.metrics in the job")


def _criterion(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the metric and, for another metric than the loss, whether larger values are better.
    transformers takes larger values as better if it is not said, and the name is not a loss."""
    metric = parts.get("best_metric", "loss")
    greater = parts.get("best_greater", not metric.endswith("loss"))
    return (
        {"metric": metric}
        if metric == "loss" and not greater
        else {"metric": metric, "mode": "max" if greater else "min"}
    )
