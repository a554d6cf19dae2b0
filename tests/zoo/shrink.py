"""A failure made smaller: fewer plan fields, a plainer training, fewer processes, as long as it
fails alike."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from tests.zoo.trial import Found, Trial

TOGETHER = (
    {"pp", "schedule", "virtual_stages", "vertical_sync", "split"},
    {"zero", "dp_shard", "gradient_sync"},
    {"zero", "cp"},
    {"tp", "sequence_parallel"},
    {"parameter_server", "dp_replicate", "staleness"},
    {"dp_replicate", "compressed_gradients"},
    {"precision", "rounding", "master_weights", "loss_scale"},
    {"offload", "offload_to"},
)
AT_MOST = 24  # trials


@dataclass(frozen=True)
class Failure:
    """The draw `number` failed so; `smaller` fails alike."""

    number: int
    trial: Trial
    found: Found
    outcome: str
    smaller: Trial | None = None

    @property
    def smallest(self) -> Trial:
        return self.smaller or self.trial

    @property
    def key(self) -> tuple[str, ...]:
        """Alike are failures of one model that say the same but for numbers."""
        return (self.trial.model, self.outcome, re.sub(r"[\d.e+-]+", "#", self.found.said)[:80])

    def content(self) -> dict[str, Any]:
        smallest = self.smallest
        command = f"python -m tests.zoo --model {smallest.model} --plan '{json.dumps(smallest.plan)}'"
        if smallest.train:
            command += f" --train '{json.dumps(smallest.train)}'"
        return {
            "draw": self.number,
            "outcome": self.outcome,
            "said": self.found.said,
            "detail": self.found.detail,
            "trial": self.trial.content(),
            "smallest": smallest.content(),
            "reproduce": command,
        }


def shrink(crew: Any, failure: Failure) -> Failure:
    """The same failure with the smallest plan that was found."""
    smallest, tried = failure.trial, 0
    while tried < AT_MOST:
        for smaller in _smaller(smallest):
            tried += 1
            if tried > AT_MOST:
                break
            found: Found = crew.hold(smaller)
            if found.outcome == failure.outcome:
                smallest = smaller
                break
        else:
            break
    return replace(failure, smaller=smallest)


def _smaller(trial: Trial) -> list[Trial]:
    """Trials with less, the most promising first."""
    found = [replace(trial, train={})] if trial.train else []
    found += [replace(trial, train={k: v for k, v in trial.train.items() if k != name}) for name in trial.train]
    for name in trial.plan:
        groups = [group & set(trial.plan) for group in TOGETHER if name in group] or [{name}]
        found += [trial.without(*group) for group in (*groups, {name})]
    for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp"):
        if trial.plan.get(axis, 1) > 2:
            found.append(replace(trial, plan={**trial.plan, axis: 2}))
    different: list[Trial] = []
    for smaller in found:
        if smaller != trial and smaller not in different:
            different.append(smaller)
    return different
