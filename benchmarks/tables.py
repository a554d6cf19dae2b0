"""Writes every table of results from the records.

    .venv/bin/python -m benchmarks.tables

It writes docs/benchmarks.md and records/README.md, and the README's results between their markers.
A test holds these files to what this module writes. To change a figure, measure it again.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "records"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"

ZEN5 = "2 cores, AMD EPYC (Zen 5, with bf16 instructions)"
ZEN3 = "2 cores, AMD EPYC (Zen 3, without bf16 instructions)"
ANY = "any: it predicts, or runs on tensors without values"
PEERS = {
    "same": "The compiled peers had exactly tightfit's allocator settings, except where a name says so.",
    "other": "The compiled peers had other allocator settings than tightfit: see the record.",
    "older": "The record is older than the benchmark's present settings. Its tuned peers had glibc keep freed"
    " memory, as tightfit does, but without `tcache_count=0` and `mxfast=0`. Its lean peers had"
    " glibc's defaults. The benchmark now gives peers exactly tightfit's settings.",
}
IN_SHORT = {
    "same": "the same as tightfit's",
    "other": "not tightfit's",
    "older": "tightfit's but for `tcache_count=0` and `mxfast=0`, which the record's peers lacked",
}


@dataclass(frozen=True)
class Source:
    """A record: the command that writes it, what it holds, and the machine that it was measured on,
    as it was noted then. A record that names its processor itself needs no note."""

    name: str
    command: str
    what: str
    noted: str

    @property
    def machine(self) -> str:
        record = read(self.name)
        if not record.get("processor"):
            return self.noted
        name = record["machine"] if isinstance(record["machine"], str) else record["machine"]["name"]
        model, _, cores = name.rpartition(" x")
        return f"{cores} cores, {model} ({record['processor']})"

    @property
    def path(self) -> str:
        return f"records/{self.name}.json"

    @property
    def there(self) -> bool:
        return (ROOT / self.path).exists()

    def cite(self) -> str:
        return f"`{self.command}` writes `{self.path}`. Machine: {self.machine}."


def _script(name: str, more: str = "", record: str = "") -> str:
    """The command that writes a record with one of the scripts of benchmarks/."""
    return f"python benchmarks/{name}.py {more}--out records/{record or name}.json"


SOURCES = {
    one.name: one
    for one in (
        Source(
            "single_device",
            _script("single_device"),
            "the demo's job: tightfit, plain PyTorch loops and transformers' Trainer, in turns",
            ZEN5,
        ),
        Source(
            "lean",
            _script("single_device", "--only lean ", "lean"),
            "the same job with little memory: lean plans and lean peers, in turns",
            ZEN5,
        ),
        Source(
            "families",
            _script("single_device", "--family all --rounds 3 --steps 12 ", "families"),
            "7 families of models: tightfit beside compiled plain loops, in turns",
            ZEN5,
        ),
        Source(
            "families_single",
            _script("single_device", "--family all --rounds 2 --steps 6 ", "families_single"),
            "the same families on a CPU without bf16 instructions, beside a compiled plain loop in fp32",
            "CPU without bf16 instructions",
        ),
        Source(
            "memory_ladder",
            _script("memory_ladder"),
            "ViT-L/16: peak memory with one method more at each rung",
            ANY,
        ),
        Source(
            "prediction",
            _script("prediction"),
            "107 (model, plan) pairs: predicted against measured memory and time",
            ZEN5,
        ),
        Source(
            "prediction_single",
            _script("prediction", "--single ", "prediction_single"),
            "70 (model, plan) pairs in fp32: predicted against measured memory and time",
            ZEN3,
        ),
        Source(
            "prediction_others",
            _script("prediction", "--others ", "prediction_others"),
            "60 (model, plan) pairs of other families of models: predicted against measured memory and time",
            ZEN5,
        ),
        Source(
            "prediction_others_single",
            _script("prediction", "--others --single ", "prediction_others_single"),
            "27 models of other families in fp32 on another processor: predicted against measured memory and time",
            "CPU without bf16 instructions",
        ),
        Source(
            "operations",
            _script("operations"),
            "single operations of torch on a CPU: predicted against measured time",
            ZEN5,
        ),
        Source(
            "published",
            _script("published"),
            "training runs that others published, on GPUs: predicted against published",
            ANY,
        ),
        Source(
            "intervals",
            "python -m benchmarks.intervals",
            "the intervals of predictions, and how many measurements are inside them",
            ANY,
        ),
        Source(
            "choice",
            _script("choice"),
            "10 jobs with memory limits: the chosen plan against all plans of a list, all run",
            ZEN5,
        ),
        Source(
            "choice_process",
            _script("choice", record="choice_process"),
            "the same in fp32, with an earlier rule for what glibc's heap holds",
            ZEN3,
        ),
        Source(
            "allocator",
            _script("allocator"),
            "what each setting of glibc's allocator does to speed and process memory",
            ZEN3,
        ),
        Source(
            "explain",
            _script("explain"),
            "30 questions to `explain`: the answer, and the time to answer",
            ANY,
        ),
        Source("search", _script("search"), "how long a search takes with nothing in the cache", ZEN3),
        Source(
            "loop_overhead",
            _script("loop_overhead"),
            "what `tightfit.train` adds to each step of a plain loop, on a net of 676 weights",
            ZEN5,
        ),
        Source(
            "distributed",
            _script("distributed"),
            "2 and 4 gloo processes: tightfit beside PyTorch's own parallelism and DeepSpeed",
            ZEN3,
        ),
        Source(
            "large_batch",
            _script("large_batch"),
            "16 times the batch: LAMB and LARS beside AdamW at the base batch",
            "2 cores, AMD EPYC; the losses do not depend on its speed",
        ),
        Source(
            "machine",
            "tightfit machine --calibrate --json > records/machine.json",
            "a calibration: the rates of one machine, measured",
            "2 cores, AMD EPYC (with bf16 instructions)",
        ),
        Source(
            "gpu",
            "python benchmarks/gpu.py --out results --record records/gpu.json",
            "one GPU: tests, every method, predictions, and speed beside others'",
            "the GPU that it names",
        ),
        Source(
            "refusals",
            _script("refusals"),
            "what search refuses as too large, against lists of all plans",
            ANY,
        ),
    )
}


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


# --- text ------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def wrapped(text: str) -> str:
    """The text with its prose at 100 characters a line. Headings and tables stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        one if one.lstrip("\n").startswith(("#", "|")) else textwrap.fill(one, 100, break_on_hyphens=False)
        for one in paragraphs
    )


def gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f} GB"


def mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def speed_of(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def fields(plan: dict[str, Any]) -> str:
    """A plan's fields on one line, in words."""
    return ", ".join(f"{name}: {value}" for name, value in plan.items()) or "reference plan"


def median_and_worst(errors: Iterable[float]) -> tuple[str, str]:
    found = [abs(error) for error in errors]
    return percent(statistics.median(found)), percent(max(found))


# --- sections of docs/benchmarks.md ----------------------------------------------------------------


def contenders(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in record["contenders"]}


def peers_settings(record: dict[str, Any]) -> str:
    """The allocator settings of the compiled peers beside those of tightfit's plans: "same",
    "other", or "older" where a record is older than its note of them."""
    rows = record["contenders"]
    if any(row.get("environment") is None for row in rows):
        return "older"
    ours = [row["environment"] for row in rows if row["name"] in ("tightfit, best plan", "tightfit, lean plan")]
    tuned = [row["environment"] for row in rows if "compiled" in row["name"] or "as above" in row["name"]]
    return "same" if all(one == ours[0] for one in (*ours, *tuned)) else "other"


def _contender_table(record: dict[str, Any]) -> str:
    limit = record["limits"]
    return table(
        ["contender", "tokens/s", "x Trainer's defaults", "x best tuned peer", "process", "loss", "of its products"],
        [
            [
                row["name"],
                f"{row['tokens_per_s']:,.0f}",
                times(row["to_trainer_default"]),
                times(row["to_best_tuned_other"]),
                gb(row["rss_bytes"]),
                f"{row['loss']:.3f}",
                percent(row["tokens_per_s"] / limit["products_tokens_per_s"], 0),
            ]
            for row in record["contenders"]
        ],
    )  # fmt: skip


def single_device() -> str:
    record, lean = read("single_device"), read("lean")
    limit, best = record["limits"], contenders(record)["tightfit, best plan"]
    return f"""## One device: the demo's job

The demo's 13.8M-parameter Llama, 16 x 256 tokens a step, gradients clipped to 1. Every contender
trains the same tokens in a process of its own, and they take turns. tokens/s is that of the median
step. Ratios are medians over rounds of the ratio within a round. "process" is the largest resident
set (RSS).

{SOURCES["single_device"].cite()}
{PEERS[peers_settings(record)]}

{_contender_table(record)}
"of its products" compares with {limit["products_tokens_per_s"]:,.0f} tokens/s. That would be the speed
if a step were nothing but its own bf16 matrix products, each timed alone at its own shape, those of
attention included. At the rate of the output layer's product the step would reach
{limit["head_tokens_per_s"]:,.0f} tokens/s; the best plan reaches
{times(best["tokens_per_s"] / limit["head_tokens_per_s"])} times that.

The Trainer shuffles its samples in its own way, so its loss is of other samples.

### Lean plans

Lean contenders hold bf16 weights and train 8 micro-batches of 2 sequences.

{SOURCES["lean"].cite()}
{PEERS[peers_settings(lean)]}

{_contender_table(lean)}"""


def _families_table(rows: list[dict[str, Any]]) -> str:
    contenders = list(rows[0]["contenders"])

    def row_of(row: dict[str, Any]) -> list[str]:
        figures = [row["contenders"][name] for name in contenders]
        turns = ", ".join(f"{ratio:.2f}" for ratio in row["faster_by_round"])
        return [
            row["family"],
            *(f"{1000 * each['step_s']:,.0f} ms" for each in figures),
            f"{1000 * row['predicted_s']:,.0f} ms",
            f"{row['faster']:.2f} ({turns})",
            f"{gb(row['contenders']['tightfit']['rss_bytes'])} ({times(row['rss_to_plain'])})",
            ", ".join(f"{each['loss']:.3f}" for each in figures),
            fields(row["plan"]),
        ]

    columns = [
        "model", *(name.replace(" loop", "").replace("bf16 autocast", "autocast") for name in contenders), "predicted",
        "x best plain loop (rounds)", "process (to plain)", "losses", "plan",
    ]  # fmt: skip
    return table(columns, [row_of(row) for row in rows])


def families() -> str:
    return f"""## One device: seven families of models

Each plain loop compiles the whole model and uses fused AdamW and tightfit's allocator settings: one with
bf16 autocast, one with bf16 weights. tightfit trains with the plan that `search` returns for the same job,
which allows bf16 weights with nearest rounding. Times are medians of steps. The ratio is to the faster
plain loop of the same round. Process memory is the largest resident set, beside that of the plain loop in
the same precision. Losses are means over the last four steps, in the order of the columns. Models with
dropout draw other masks in each contender, so their losses differ. `--family NAME` measures some families
again and keeps the other rows: llama-49m and gpt2-124m were.

{SOURCES["families"].cite()}

{_families_table(read("families")["families"])}
### Without bf16 instructions

A CPU without bf16 instructions multiplies matrices several times slower in bf16 than in fp32. So here the plain
loop computes in fp32. So does the plan that `search` returns.

{SOURCES["families_single"].cite()}

{_families_table(read("families_single")["families"])}"""


def memory_ladder() -> str:
    record = read("memory_ladder")
    rows = [[row["name"], gb(row["peak_bytes"]), gb(row["published_bytes"]), row["phase"]] for row in record["rungs"]]
    return f"""## Peak memory, method by method

ViT-L/16 at 224 x 224 with 10 classes. Each rung adds one change to those above it. tightfit's own
engine runs the step on tensors without values, so the figures are of live tensors. The published
figures are what the allocator of a GPU had reserved, which is more. The last rung takes
{record["times_less"]:.1f} times less than the first.

{SOURCES["memory_ladder"].cite()}
Published: S. Raschka, github.com/rasbt/pytorch-memory-optim at f6eddcd.

{table(["rung", "peak of live tensors", "published, reserved", "peak is in"], rows)}"""


ERRORS = {
    "memory, estimated": ("estimate_bytes", "measured_bytes"),
    "memory, dry run": ("dry_run_bytes", "measured_bytes"),
    "memory of the process": ("predicted_process_bytes", "process_bytes"),
    "step time": ("predicted_s", "measured_s"),
}


def errors(pairs: list[dict[str, Any]], what: str) -> list[float]:
    """Signed relative errors of the pairs that have this figure."""
    predicted, measured = ERRORS[what]
    return [pair[predicted] / pair[measured] - 1 for pair in pairs if pair.get(measured)]


def _error_table(pairs: list[dict[str, Any]]) -> str:
    rows = []
    for what in ERRORS:
        found = errors(pairs, what)
        rows.append([what, len(found), *median_and_worst(found)])
    return table(["predicted against measured", "pairs", "median error", "worst"], rows)


def _errors_by_model(pairs: list[dict[str, Any]]) -> str:
    rows = []
    for model in dict.fromkeys(pair["model"] for pair in pairs):
        those = [pair for pair in pairs if pair["model"] == model]
        found = [
            "{} / {}".format(*median_and_worst(errors(those, what))) if errors(those, what) else "-"
            for what in ("memory, estimated", "memory of the process", "step time")
        ]
        rows.append([model, len(those), *found])
    return table(["model", "pairs", "memory: median / worst", "process", "step time"], rows)


def _worst_times(pairs: list[dict[str, Any]], count: int = 5) -> str:
    def error(pair: dict[str, Any]) -> float:
        return pair["predicted_s"] / pair["measured_s"] - 1

    worst = sorted(pairs, key=lambda pair: -abs(error(pair)))[:count]
    return table(
        ["largest errors of time", "plan", "error"],
        [[pair["model"], fields(pair["plan"]), signed(error(pair))] for pair in worst],
    )


def _operations() -> str:
    """The section on single operations. Empty as long as there is no record."""
    if not SOURCES["operations"].there:
        return ""
    record = read("operations")
    found, rows = record["summary"], record["rows"]

    def factor(row: dict[str, Any]) -> float:
        return row["predicted_s"] / row["measured_s"]

    worst = sorted(rows, key=lambda row: -abs(math.log(factor(row))))[:8]
    text = table(
        ["largest errors", "type", "predicted", "measured"],
        [
            [
                row["operation"],
                row["dtype"],
                f"{row['predicted_s'] * 1e3:.1f} ms",
                f"{row['measured_s'] * 1e3:.1f} ms",
            ]
            for row in worst
        ],
    )
    return f"""A prediction adds up operations. Of {found["operations"]} of torch, in fp32 and bf16, with their backward and on
tensors larger than the caches, the median is off by {found["median_factor"]:.2f} times, and {found["within_two"]:.0%} by at most
2 times.

{SOURCES["operations"].cite()}

{text}"""


def prediction() -> str:
    bf16, fp32 = read("prediction"), read("prediction_single")
    others = read("prediction_others")["pairs"]
    elsewhere = read("prediction_others_single")["pairs"]
    pace = [one for pair in bf16["pairs"] for one in pair["pace"]]
    again = sum("runs_s" in pair for pair in bf16["pairs"])
    return f"""## Predicted against measured

{len(bf16["pairs"])} pairs of a model and a plan: small Llama, GPT-2, BERT, ViT and T5 models and a
network with BatchNorm, under all methods of one device. Each pair runs in a process of its own.
Memory is the peak of live tensors. Times are predicted after `tightfit machine --calibrate`. Nothing
is fitted to the pairs.

{SOURCES["prediction"].cite()}

{_error_table(bf16["pairs"])}
{_errors_by_model(bf16["pairs"])}
{_worst_times(bf16["pairs"])}
The machine was shared with others. A fixed piece of work (a control) was timed beside each step, and
times are given at the pace of the calibration. The pace moved between {min(pace):.2f} and
{max(pace):.2f} times that of the calibration, and the control follows it only in part. A pair that is
off by more than 20 % runs twice more, and the median of its three runs counts: {again or "no"} pairs
here. Figures of memory do not depend on the pace.

### Other families

{len(others)} pairs of {len({pair["model"] for pair in others})} models of other families (`benchmarks/other_models.py`):
architectures of transformers, and networks of layers that language models do not have. A first comparison showed
kinds of operations that the calibration did not measure, and they were added after it: sorts, sums by an index, Fourier
transforms, sampled grids. Convolutions of mobile networks took half again as long as similar ones. Since then, each
convolution of a model is timed before the first prediction (`planner/model_convolutions.py`), as here. A comparison of
single operations (below) then showed many that a CPU computes several times slower than others of their kind. They are
calibrated by name now.

{SOURCES["prediction_others"].cite()}

{_error_table(others)}
{_errors_by_model(others)}
{_worst_times(others)}
### Other families on another processor

The same models on a processor that was compared last. It has no bf16 instructions, so they train in fp32.

{SOURCES["prediction_others_single"].cite()}

{_error_table(elsewhere)}
{_worst_times(elsewhere)}
### Single operations

{_operations()}
### In fp32

{len(fp32["pairs"])} pairs in fp32, on a processor without bf16 instructions. Process memory was
predicted for those whose states are narrow or whose update runs in backward, with glibc's defaults.

{SOURCES["prediction_single"].cite()}

{_error_table(fp32["pairs"])}
{_worst_times(fp32["pairs"])}"""


def _published_row(row: dict[str, Any]) -> list[str]:
    def error(kind: str, of: str) -> str:
        return signed(row[kind] / row[of] - 1) if row.get(kind) and row.get(of) else "-"

    return [
        row["id"],
        row["framework"],
        row["machine"] or "not stated",
        gb(row.get("published_bytes")).removesuffix(" GB"),
        error("predicted_bytes", "published_bytes"),
        speed_of(row["published_speed"]) if row.get("published_speed") else "-",
        error("predicted_speed", "published_speed"),
        error("calibrated_speed", "published_speed"),
    ]


def _published_summary(group: str, one: dict[str, Any]) -> list[str]:
    def errors_of(name: str) -> str:
        if name not in one:
            return "-"
        found = one[name]
        return f"{found['rows']}: {percent(found['median'])}, {percent(found['worst'])} ({signed(found['bias'])})"

    def right(name: str) -> str:
        return f"{one[name]['right']} of {one[name]['rows']}" if name in one else "-"

    return [
        group,
        str(one["rows"]),
        *map(errors_of, ("memory", "speed", "speed, calibrated")),
        right("ran, predicted to fit"),
        right("out of memory, predicted not to fit"),
    ]


def published() -> str:
    record = read("published")
    columns = ["group", "runs", "memory", "speed", "speed, one factor", "ran", "out of memory"]
    halves = "\n\n".join(
        f"{'Half' if half in ('a', 'b') else 'Part'} {half}:\n\n"
        + table(columns, [_published_summary(group, one) for group, one in groups.items()]).rstrip()
        for half, groups in record["summary"].items()
    )
    latest = (
        "Part d was added after that, from twelve more sources. Its first comparison showed errors of tightfit. They were "
        "corrected from other sources, not from these runs. Part e has more runs of a source that was there already; "
        "nothing was changed because of them. nanotron of July 2024 spent much of their time elsewhere than in kernels and "
        "messages: with dp 16 and tp 4, a micro-batch of 2 samples took 150 ms, and one of 4 samples 179 ms. "
        if "e" in record["summary"]
        else ""
    )
    shown = [row for row in record["rows"] if row["half"] == "a" and "error" not in row]
    of_row = ["run", "framework", "machine", "GB", "predicted", "speed", "predicted", "one factor"]
    return f"""## Runs that others published, on GPUs

Facts of {len(record["rows"])} runs stand with their sources in `benchmarks/published/`, whose README says which
runs of the sources are left out, and why. tightfit predicts each run from its model, plan and machine. What
is known of a framework's loop (gradients zeroed before backward, an optimizer that went over parameters one
by one) is taken into account. Nothing is fitted to a run.

Runs of a group alternate between two halves. Whoever improves a prediction looks at half a; half b says
whether the improvement holds for other runs. Part c was added later, from other sources. Facts of its
frameworks' loops were looked up after a first comparison; tightfit's predictions were not changed for it.
{latest}Each cell says how many runs are compared, the median and the worst error, and in parentheses the signed
median. Speed is compared as predicted from the devices'
published figures, and after one factor for each pair of machine and framework. It is the median of its runs,
without those of part e. Pairs of fewer than three runs are left out. The last two columns say how many of the runs that ran are
predicted to fit, and how many of those that ran out of memory are predicted not to.

{SOURCES["published"].cite()}

{halves}

The runs of half a. Speeds are in tokens/s, or in samples/s for images and classifiers, of all devices together.

{table(of_row, map(_published_row, shown))}"""


def intervals() -> str:
    record = read("intervals")
    rows = [
        [quantity, name, f"{one['low']:.2f} to {one['high']:.2f}", str(one["runs"])]
        for quantity, of in record["intervals"].items()
        for name, one in of.items()
    ]
    inside = [
        [name, str(one["runs"]), f"{one['share']:.0%}".replace("%", " %")] for name, one in record["coverage"].items()
    ]
    return f"""## Intervals

Each predicted step time and peak has an interval that holds 9 of 10 measurements of the runs of its class, where each
source of runs counts the same ([explain](explain.md#intervals)). The ends below are multiples of the prediction.

{SOURCES["intervals"].cite()}

{table(["", "class of runs", "measured / predicted", "runs"], rows)}

The next table leaves out one source after the other, and counts how many of its measurements are inside the intervals of
all other sources. A source is a group of published runs, or a model of tightfit's own runs.

{table(["", "runs", "inside"], inside)}"""


def _choice_table(record: dict[str, Any]) -> str:
    rows = []
    for job in record["jobs"]:
        used = job["chosen"]["process_bytes"]
        enforced = job.get("lives_within_enforced_limit")
        rows.append(
            [
                job["job"],
                f"{job['limit_bytes'] / 1e6:,.0f} MB",
                percent(used / job["limit_bytes"], 0),
                signed(job["predicted_bytes"] / used - 1),
                job["fitting"],
                "the fastest" if job["slower"] <= 0 else f"{percent(job['slower'])} slower",
                "-" if enforced is None else ("yes" if enforced and job["reference_dies_of_it"] else "no"),
            ]
        )
    columns = ["job", "limit", "used", "predicted", "plans that fit", "chosen plan", "enforced: held"]
    return table(columns, rows)


def choice() -> str:
    now, before = read("choice"), read("choice_process")
    plans = len(now["jobs"][0]["rows"])
    beyond = [job for job in now["jobs"] if job["slower_than_any_below_the_limit"] > 0]
    said = "".join(
        f" On \"{job['job']}\", a plan that stayed below the limit without leaving that margin was"
        f" {percent(job['slower_than_any_below_the_limit'], 0)} faster."
        for job in beyond
    )  # fmt: skip
    return f"""## The plan that search chooses

{len(now["jobs"])} jobs whose memory limit the reference plan does not meet. For each, {plans} plans ran, each in
a process of its own. A plan fits if its process leaves 3 % of the limit free, which is the margin that search
keeps.{said} "enforced" are jobs on which the limit was enforced (`RLIMIT_DATA`): "yes" means that the chosen plan
trained and the reference plan ran out of memory.

{SOURCES["choice"].cite()}

{_choice_table(now)}
What glibc's heap holds beyond the tensors was read off processes of the same jobs, so these jobs are no
test of that rule on others.

### In fp32, with an earlier rule

{SOURCES["choice_process"].cite()}

{_choice_table(before)}"""


def allocator() -> str:
    record = read("allocator")
    rows = [
        [row["recompute"], row["allocator"], times(row["speed"]), gb(row["process_bytes"]),
         signed(row["predicted_process_bytes"] / row["process_bytes"] - 1), gb(row["tensor_bytes"])]
        for row in record["rows"]
    ]  # fmt: skip
    columns = ["recompute", "allocator", "speed", "process", "predicted", "live tensors"]
    return f"""## The allocator on a CPU

The demo's job in fp32 through `tightfit train`. `default` leaves glibc alone. `tuned` has it keep freed
memory and hold no caches of small blocks. `lean` returns freed memory at once. Speed is the ratio to
`default` in the same turn; figures are medians of {record["turns"]} turns.

{SOURCES["allocator"].cite()}

{table(columns, rows)}"""


def explain() -> str:
    answers = read("explain")["answers"]

    def verdict(one: dict[str, Any]) -> list[str]:
        if one.get("error"):
            return ["no answer", "-", "-", one["error"].partition("\n")[0]]
        peak = f"{gb(one['peak_bytes'])} of {gb(one['available_bytes'])}"
        if one["fits"]:
            mfu = "" if one["mfu"] is None else f", {percent(one['mfu'], 0)} MFU"
            return ["fits", peak, f"{one['step_s']:.3g} s{mfu}", fields(one["plan"])]
        return ["does not fit", peak, "-", f"would fit with {one['remedy']}" if one["remedy"] else "nothing helps"]

    rows = [
        [one["question"], f"{one['batch']} x {one['length'] or 'images'}", f"{one['seconds']:.1f} s", *verdict(one)]
        for one in answers
    ]
    columns = ["question", "a step", "time to answer", "answer", "peak of a device", "step", "plan or remedy"]
    return f"""## What explain answers, and how long it takes

Each question was answered in a process of its own with an empty cache, after the imports of torch, its
compiler and the model's code. A question names a preset, a machine, and what the job allows beside bf16.
Where no plan fits, the peak is that of the leanest plan. Step times of other machines than this one are
predicted from published rates.

{SOURCES["explain"].cite()}

{table(columns, rows)}"""


def search() -> str:
    rows = [
        [one["search"], *(f"{one[key]:.1f} s" for key in ("seconds", "again_s", "imports_s")), fields(one["plan"])]
        for one in read("search")["searches"]
    ]
    return f"""## How long a search takes

Each search ran in a process of its own with an empty cache. It then ran again in another process, with the traces and
dry runs of the first. Imports (torch, its compiler, the model's code) come before the search. On a machine with several
cores, copies of the process trace ahead ([decision 9](decisions/0009-limits-of-a-search.md)).

{SOURCES["search"].cite()}

{table(["search", "time", "again", "imports", "plan found"], rows)}"""


def distributed() -> str:
    record = read("distributed")
    compared = [
        [row["kind"], row["processes"], row["beside"], times(row["speed_ratio"]), len(row["speed_ratios"]),
         times(row["peak_ratio"]), times(row["deepspeed_speed_ratio"])]
        for row in record["compared"]
    ]  # fmt: skip
    states = [
        [row["stage"], row["processes"], mb(row["bytes"]), mb(row["formula"]), signed(row["bytes"] / row["formula"] - 1)]
        for row in record["states"]
    ]  # fmt: skip
    bubbles = [
        [row["schedule"], row["micro_batches"], percent(row["waited"], 0), percent(row["theory"], 0)]
        for row in record["bubbles"]
    ]
    return f"""## Several devices, beside PyTorch's own

A 7.2M-parameter Llama on gloo processes of one thread each. tightfit and its peer are both there and
take turns of two steps. Ratios are tightfit's over its peer's, medians over turns: a speed above 1 is
faster, a peak below 1 is smaller. DeepSpeed runs the same ZeRO stage.

{SOURCES["distributed"].cite()}

{table(["kind", "processes", "beside", "speed", "turns", "peak bytes", "speed beside DeepSpeed"], compared)}
### Model states under ZeRO

Bytes of parameters, gradients and AdamW's states that a device holds, beside the formulas: 8 + 8/N, 4 + 12/N
and 16/N bytes a parameter for stages 1, 2 and 3 on N devices.

{table(["stage", "devices", "measured", "formula", "difference"], states)}
### The bubble of a pipeline

The share of a step that the first of two devices waits, beside theory.

{table(["schedule", "micro-batches", "measured", "theory"], bubbles)}"""


def large_batch() -> str:
    record = read("large_batch")
    rows = [
        [name, one["batch"], f"{one['learning_rate']:g}", f"{one['held_out_loss']:.4f}", f"{one['above_base']:+.4f}",
         f"{one['standard_error']:.4f}"]
        for name, one in record["results"].items()
    ]  # fmt: skip
    columns = ["optimizer", "batch", "learning rate", "held-out loss", "above the base batch", "standard error"]
    return f"""## Large batches

Handwritten digits (scikit-learn's), a small convolutional network, {record["samples"]:,} samples for every
contender. Each chooses its learning rate from a grid of the same size. Losses are means over
{len(record["seeds"])} seeds.

{SOURCES["large_batch"].cite()}

{table(columns, rows)}"""


def loop_overhead() -> str:
    record = read("loop_overhead")
    rows = [
        [
            name,
            *(
                f"{1e3 * statistics.median(found[name][key] for found in record['rounds']):.3f} ms"
                for key in ("cpu_s", "step_s")
            ),
        ]
        for name in record["rounds"][0]
    ]
    overheads = [1e3 * (found["tightfit.train"]["cpu_s"] - found["plain loop"]["cpu_s"]) for found in record["rounds"]]
    difference = record["loss_difference"]
    losses = f"differ by {difference:.0e}" if difference else "are equal"
    return f"""## The overhead of the loop

A net of 676 weights trains in two loops, with the same weights, samples, clipping, learning rates and fused
AdamW, and one thread. `tightfit.train` needs {1e3 * record["overhead_s"]:.3f} ms more of processor time in each
step, the median of {len(overheads)} rounds ({min(overheads):.3f} to {max(overheads):.3f} ms). The losses {losses}.

{SOURCES["loop_overhead"].cite()}

{table(["loop", "processor time of a step", "time of a step"], rows)}"""


def gpu() -> str:
    from benchmarks.gpu import readme
    from benchmarks.gpu_sizes import GPU

    rivals = read("gpu")["parts"]["rivals"]["result"]["models"]
    waits = []
    for name, one in rivals.items():
        sizes, longest = GPU["rivals"]["models"][name], one["kernels"][0]
        step_s = sizes["batch"] * sizes["length"] / one["tokens_per_s"]["tightfit"]
        waits.append(f"{percent(1 - longest['us_per_step'] / longest['share'] / 1e6 / step_s, 0)} ({name})")
    return f"""## One GPU

{SOURCES["gpu"].cite()}

The parts ran at different times on machines of this kind. In the rivals' turns, tightfit's loop read
each loss as soon as its step was queued, so that the GPU had no kernel to run for
{" and ".join(waits)} of a step. The peers' loops read no loss. The benchmark has been changed since, and
not run again.

{readme(read("gpu"))}
"""


SECTIONS = {
    "single_device": single_device,
    "families": families,
    "memory_ladder": memory_ladder,
    "prediction": prediction,
    "published": published,
    "intervals": intervals,
    "choice": choice,
    "distributed": distributed,
    "allocator": allocator,
    "explain": explain,
    "search": search,
    "loop_overhead": loop_overhead,
    "large_batch": large_batch,
    "gpu": gpu,
}


def page() -> str:
    """The text of docs/benchmarks.md."""
    head = """# Benchmarks

Written by `python -m benchmarks.tables` from `records/`. Each section names the command that measures it,
the record, and the machine. A figure holds for that model and that machine. GB is 10^9 bytes.
"""
    sections = [write() for name, write in SECTIONS.items() if SOURCES[name].there]
    return wrapped("\n".join([head, *sections]).strip()) + "\n"


# --- the README's six results, and the index of the records ----------------------------------------


def readme_table() -> str:
    """Six results, each with the machine, the command and the record."""
    single = read("single_device")
    best = contenders(single)["tightfit, best plan"]
    rungs = read("memory_ladder")["rungs"]
    pairs = read("prediction")["pairs"]
    memory, time = (median_and_worst(errors(pairs, what)) for what in ("memory, estimated", "step time"))
    others = read("prediction_others")["pairs"]
    of_others = [median_and_worst(errors(others, what)) for what in ("memory, estimated", "step time")]
    new = read("prediction_others_single")["pairs"]
    of_new = [median_and_worst(errors(new, what)) for what in ("memory, estimated", "step time")]
    summary = read("published")["summary"]
    unseen, newest = summary["b"]["all"], summary["d"]["all"]
    memories, speeds = unseen["memory"], unseen["speed, calibrated"]
    jobs = read("choice")["jobs"]
    fastest = sum(job["slower"] <= 0 for job in jobs)
    within = sum(job["within_limit"] for job in jobs)
    gpu = read("gpu")["parts"]
    llama, rivals = gpu["llama"]["result"], gpu["rivals"]["result"]["models"]
    over = [f"{times(rivals[name]['tightfit_over']['plain'])} times" for name in ("gpt2", "bert-base")]
    rows = [
        (
            "speed",
            f"The demo's 13.8M-parameter Llama trains at {best['tokens_per_s']:,.0f} tokens/s. That is"
            f" {times(best['to_best_tuned_other'])} times the fastest plain loop or Trainer with bf16,"
            f" torch.compile and fused AdamW, and {times(best['to_trainer_default'])} times the Trainer with"
            f" its defaults. The tuned peers' allocator settings are {IN_SHORT[peers_settings(single)]}.",
            "single_device",
        ),
        (
            "one GPU",
            f"GPT-2 124M trains {over[0]}, BERT-base {over[1]} as fast as a plain loop with bf16, torch.compile and"
            f" fused AdamW. {llama['model'].capitalize()} with AdamW reaches"
            f" {percent(llama['mfu_of_published_peak'])} MFU; its allocated peak,"
            f" {gb(llama['allocated_bytes'])}, was predicted as {gb(llama['predicted']['allocated_bytes'])}.",
            "gpu",
        ),
        (
            "memory",
            f"A training step of ViT-L/16 falls from {gb(rungs[0]['peak_bytes'])} (fp32, batch 64) to"
            f" {gb(rungs[-1]['peak_bytes'])} (batch 16, SGD) at its peak in {len(rungs)} rungs.",
            "memory_ladder",
        ),
        (
            "prediction",
            f"Median and worst error. {len(pairs)} pairs of a small model and a plan: peak memory {memory[0]}, {memory[1]}; step"
            f" time after calibration {time[0]}, {time[1]}. {len({pair['model'] for pair in others})} models of other families"
            f" (`--others`, [record](records/prediction_others.json)): memory {of_others[0][0]}, {of_others[0][1]}; time"
            f" {of_others[1][0]}, {of_others[1][1]}. These in fp32 on an Intel Xeon without bf16 instructions (`--others"
            f" --single`, [record](records/prediction_others_single.json)): {of_new[0][0]}, {of_new[0][1]}; {of_new[1][0]},"
            f" {of_new[1][1]}.",
            "prediction",
        ),
        (
            "many GPUs",
            f"Runs that others published, of a half that was kept aside in development. Memory of {memories['rows']} runs:"
            f" median error {percent(memories['median'])}, worst {percent(memories['worst'])}. Speed of"
            f" {speeds['rows']} runs on up to {max(row.get('devices', 1) for row in read('published')['rows']):,} GPUs,"
            f" scaled by one factor for each pair of machine and framework: median {percent(speeds['median'])}, worst"
            f" {percent(speeds['worst'])}. Other frameworks and fine-tunings, compared last: memory of {newest['memory']['rows']} runs"
            f" {percent(newest['memory']['median'])}, speed of {newest['speed, calibrated']['rows']} runs"
            f" {percent(newest['speed, calibrated']['median'])}.",
            "published",
        ),
        (
            "choice",
            f"{len(jobs)} jobs with a memory limit, {len(jobs[0]['rows'])} plans each, all run. The chosen plan"
            f" stayed within the limit on {within} and was the fastest that fits on {fastest}.",
            "choice",
        ),
    ]
    machines = {
        "memory_ladder": "any: tensors without values",
        "published": "the GPUs of the runs",
        "gpu": gpu["machine"]["result"]["machine"]["name"],
    }  # where not the one below
    return table(
        ["what", "result", "machine", "command, record"],
        [
            [
                what,
                result,
                machines.get(name, SOURCES[name].machine),
                f"`benchmarks/{name}.py`, [record]({SOURCES[name].path})",
            ]
            for what, result, name in rows
        ],
    )


def index() -> str:
    """The text of records/README.md."""
    rows = []
    for one in SOURCES.values():
        if one.there:
            record = read(one.name)
            code = record.get("code", {})
            versions = [f"torch {code['torch']}", f"Python {code['python']}"] if "torch" in code else []
            measured = [record.get("date"), record.get("commit") and f"commit {record['commit']}"]
            versions = ", ".join([*versions, *filter(None, measured)]) or "-"
            rows.append([f"[`{one.name}.json`]({one.name}.json)", one.what, f"`{one.command}`", one.machine, versions])
    text = f"""# Records

Written by `python -m benchmarks.tables`. Every figure of the docs comes from one of these files, and
each file comes from one command. A newer record has the date, the commit and the processor of its
measurement. For the others, `git log -- records/NAME.json` says when they were committed, and with
which code. `schema.json` is the JSON schema of all records. `python benchmarks/record_shapes.py` writes
it, and a test holds every record to it. [Benchmarks](../docs/benchmarks.md) shows the records as tables.

{table(["record", "what it holds", "command", "machine", "versions"], rows)}"""
    return wrapped(text.strip()) + "\n"


def with_results(readme: str) -> str:
    """The README's text with its table of results replaced by the current one."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + readme_table() + END + rest.split(END)[1]


def written() -> dict[Path, str]:
    """Every file that this module writes, with its text."""
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "benchmarks.md": page(),
        RECORDS / "README.md": index(),
        readme: with_results(readme.read_text()),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
