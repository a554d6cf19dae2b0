"""The shape of every record in records/, and records/schema.json, which is written from it.

    .venv/bin/python benchmarks/record_shapes.py      # writes records/schema.json

A field that has a default may be missing from older records. No record has other fields than these.
Bytes are `_bytes`, seconds are `_s`, ratios and errors are fractions of 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

RECORDS = Path(__file__).parent.parent / "records"
Plan = dict[str, Any]  # the plan fields that differ from the reference plan


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Code(Shape):
    """Versions of what ran."""

    tightfit: str
    torch: str
    transformers: str
    python: str
    system: str


class Measured(Shape):
    """What a record says of its origin: see provenance.py."""

    code: Code
    commit: str | None = None
    date: str | None = None
    machine: str
    processor: str | None = None


class Contender(Shape):
    """One program on the demo's job. step_s has a list of steps for each round."""

    name: str
    tokens_per_s: float
    step_s: list[list[float]]
    rss_bytes: int
    loss: float
    environment: dict[str, str] | None = None
    to_trainer_default: float | None
    to_plain_default: float | None
    to_best_tuned_other: float | None


class Limits(Shape):
    """What the machine's bf16 matrix products alone would allow."""

    products_tokens_per_s: float
    head_tokens_per_s: float
    head_flops_per_s: float
    square_flops_per_s: float


class SingleDevice(Measured):
    machine: dict[str, Any]  # type: ignore[assignment]
    limits: Limits
    contenders: list[Contender]


class Rung(Shape):
    """One rung of the ladder. rows are the bytes at the peak, by row of the ledger."""

    name: str
    train: dict[str, Any]
    plan: Plan
    published_bytes: int | None
    peak_bytes: int
    rows: dict[str, int]
    phase: str


class MemoryLadder(Shape):
    code: Code
    model: dict[str, Any]
    bytes: Literal["logical"]
    times_less: float
    rungs: list[Rung]


class Errors(Shape):
    median: float
    worst: float


class Pair(Shape):
    """One model under one plan. `estimate` applies every method's cost, `dry_run` runs the engine on fake tensors."""

    model: str
    optimizer: str
    plan: Plan
    estimate_bytes: float
    dry_run_bytes: float
    measured_bytes: float
    predicted_process_bytes: float | None = None
    process_bytes: float | None = None
    predicted_s: float
    measured_s: float
    step_s: list[float]
    pace: list[float]
    runs_s: list[float] | None = None


class Prediction(Measured):
    summary: dict[str, Errors]
    pairs: list[Pair]


class Published(Measured):
    class Row(Shape):
        id: str
        group: str
        half: Literal["a", "b", "c", "d", "e"]
        framework: str
        machine: str | None
        ran: bool | None
        error: str | None = None
        devices: int | None = None
        metric: Literal["reserved", "allocated", "device"] | None = None
        published_bytes: float | None = None
        predicted_bytes: float | None = None
        published_speed: float | None = None
        predicted_speed: float | None = None
        calibrated_speed: float | None = None
        unit: Literal["samples/s", "tokens/s"] | None = None
        parts: dict[str, float] | None = None
        predicted_fits: bool | None = None
        peak_of_limit: float | None = None
        precision: str | None = None
        tp: int | None = None
        pp: int | None = None
        cp: int | None = None
        zero: int | None = None
        recompute: str | None = None
        compile: str | None = None
        float8: str | None = None
        tokens_of_sequence: int | None = None
        micro_batch: int | None = None
        hidden_size: int | None = None
        head_size: int | None = None
        cpu_s: float

    summary: dict[str, dict[str, dict[str, Any]]]
    factors: dict[str, float]
    rows: list[Row]


class Intervals(Measured):
    class Of(Shape):
        low: float
        high: float
        runs: int

    class Coverage(Shape):
        runs: int
        inside: int
        share: float

    intervals: dict[str, dict[str, Of]]
    coverage: dict[str, Coverage]


class Choice(Measured):
    class Seen(Shape):
        plan: Plan
        process_bytes: int
        peak_bytes: int
        step_s: float
        pace: float | None = None
        runs_s: list[float] | None = None

    class Job(Shape):
        job: str
        limit_bytes: float
        predicted_bytes: float
        chosen: Choice.Seen
        best: Choice.Seen
        slower: float
        slower_than_any_below_the_limit: float
        within_limit: bool
        fitting: int
        rows: list[Choice.Seen]
        lives_within_enforced_limit: bool | None = None
        reference_dies_of_it: bool | None = None

    jobs: list[Job]


class Allocator(Measured):
    class Row(Shape):
        recompute: str
        allocator: str
        speed: float
        step_s: float
        process_bytes: float
        predicted_process_bytes: float
        tensor_bytes: float

    turns: int
    rows: list[Row]


class Families(Measured):
    class Family(Shape):
        """One model: step times of the plain loops and of tightfit. faster is the median over rounds of
        the best plain loop's step divided by tightfit's; rss_to_plain compares with the plain loop in
        the plan's precision."""

        class Contender(Shape):
            step_s: float
            steps_s: list[list[float]]
            rss_bytes: int
            loss: float

        family: str
        plan: Plan
        predicted_s: float
        best_plain: str
        faster: float
        faster_by_round: list[float]
        rss_to_plain: float
        contenders: dict[str, Families.Family.Contender]

    families: list[Family]


class Explain(Measured):
    class Answer(Shape):
        """The answer to one question: the chosen plan, or the leanest one and a remedy that fits.
        error is the message if there was no answer."""

        question: str
        batch: int
        length: int
        imports_s: float
        seconds: float
        error: str | None = None
        fits: bool | None = None
        plan: Plan | None = None
        step_s: float | None = None
        peak_bytes: int | None = None
        available_bytes: int | None = None
        mfu: float | None = None
        remedy: str | None = None

    answers: list[Answer]


class Search(Measured):
    class One(Shape):
        search: str
        seconds: float
        again_s: float
        cpu_s: float | None = None
        imports_s: float
        fits: bool = True
        plan: Plan
        step_s: float
        peak_bytes: int | None = None

    searches: list[One]


class LoopOverhead(Measured):
    """The same small net in two loops. `rounds` maps, for each round, the loop's name to its figures."""

    class Loop(Shape):
        cpu_s: float
        step_s: float
        loss: float

    steps: int
    rounds: list[dict[str, Loop]]
    overhead_s: float
    loss_difference: float


class Distributed(Measured):
    class Compared(Shape):
        """tightfit beside another program. Ratios of speed above 1 and of peaks below 1 are in
        tightfit's favour."""

        kind: str
        processes: int
        beside: str
        speed_ratio: float
        speed_ratios: list[float]
        deepspeed_speed_ratio: float | None
        deepspeed_speed_ratios: list[float]
        peak_ratio: float
        tokens_per_s: float
        peak_bytes: int
        sent_bytes: dict[str, float]
        plain_sent_bytes: dict[str, float]
        parameter_bytes: int
        losses: float

    class States(Shape):
        stage: int
        processes: int
        bytes: int
        formula: float

    class Bubble(Shape):
        schedule: str
        micro_batches: int
        waited: float
        theory: float

    compared: list[Compared]
    states: list[States]
    bubbles: list[Bubble]


class LargeBatch(Shape):
    class Result(Shape):
        batch: int
        learning_rate: float
        held_out_loss: float
        of_seeds: list[float]
        grid: dict[str, float]
        above_base: float
        standard_error: float

    code: Code
    samples: int
    seeds: list[int]
    results: dict[str, Result]


class Gpu(Shape):
    class Part(BaseModel):
        """What one part found; each part has its own fields."""

        model_config = ConfigDict(extra="allow")
        status: str

    device: Literal["cpu", "cuda"]
    python: str
    seconds: float
    from_wheels: list[str]
    parts: dict[str, Part]


class Operations(Measured):
    class Summary(Shape):
        operations: int
        median_factor: float
        within_two: float
        worst_factor: float

    class Row(Shape):
        operation: str
        dtype: str
        predicted_s: float
        measured_s: float

    summary: Summary
    rows: list[Row]


class Refusals(Shape):
    class Row(BaseModel):
        """One draw, with what search said of it; wrong says what a plan of the list disproves, or
        nothing."""

        model_config = ConfigDict(extra="allow")
        said: str
        wrong: str

    code: Code
    seed: int
    first: int
    draws: int
    of: int
    wrong: int
    rows: list[Row]


SHAPES: dict[str, type[Shape]] = {
    "allocator": Allocator,
    "choice": Choice,
    "choice_process": Choice,
    "distributed": Distributed,
    "explain": Explain,
    "families": Families,
    "families_single": Families,
    "gpu": Gpu,
    "intervals": Intervals,
    "large_batch": LargeBatch,
    "lean": SingleDevice,
    "loop_overhead": LoopOverhead,
    "memory_ladder": MemoryLadder,
    "operations": Operations,
    "prediction": Prediction,
    "prediction_single": Prediction,
    "prediction_others": Prediction,
    "prediction_others_single": Prediction,
    "published": Published,
    "refusals": Refusals,
    "search": Search,
    "single_device": SingleDevice,
}
"""The shape of each record, by the name of its file. machine.json is a `tightfit.Machine`."""


def schema() -> dict[str, Any]:
    """A JSON schema with a definition for each record: {"$ref": "schema.json#/$defs/Prediction"}."""
    definitions: dict[str, Any] = {}
    for shape in dict.fromkeys(SHAPES.values()):
        one = shape.model_json_schema(ref_template=f"#/$defs/{shape.__name__}/$defs/{{model}}")
        definitions[shape.__name__] = one
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tightfit's records",
        "properties": {name: {"$ref": f"#/$defs/{shape.__name__}"} for name, shape in SHAPES.items()},
        "$defs": definitions,
    }


if __name__ == "__main__":
    (RECORDS / "schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
