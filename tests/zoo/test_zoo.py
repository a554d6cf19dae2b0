"""A fixed part of the zoo: every model with a plan on one process, and drawn trials on several.
`scripts/test --zoo` draws more."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.pool import together
from tests.zoo import zoo
from tests.zoo.draw import draw
from tests.zoo.entry import Entry
from tests.zoo.plain import train_plainly
from tests.zoo.shrink import Failure, shrink
from tests.zoo.table import COLUMNS, NOT_RUN, PAGE, cells
from tests.zoo.trial import Found, Trial, attempt, compare, keep_reference

ALONE = [name for name, plan in COLUMNS.items() if Trial("net", plan).processes == 1]
ENTRIES = list(zoo().values())
QUICK = 5  # each so manieth of transformers' models is in the quick suite, and every module of our own


def in_quick_suite(number: int, entry: Entry) -> bool:
    return entry.kind == "custom" or number % QUICK == 0


@cache
def page() -> dict[tuple[str, str], str]:
    """What the documentation says of each model and method."""
    return cells(PAGE.read_text(encoding="utf-8"))


def hold(trial: Trial, folder: Path) -> Found:
    """As a crew does, with the processes that other tests keep as well."""
    found = Found("equal")
    for wide in (False, True):
        references = {}
        for reference in trial.references(wide):
            references[reference["precision"]] = path = str(folder / f"{reference['precision']}.pt")
            keep_reference(path, reference)
        if trial.processes == 1:
            found = attempt(trial, references)
        else:
            found = min(
                together(trial.processes, "tests.zoo.trial:attempt", trial, references),
                key=lambda one: not one.failed,
            )
        if found.outcome != "different":
            break
    return found


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("entry", "column"),
    [
        pytest.param(
            entry,
            ALONE[number % len(ALONE)],
            id=entry.name,
            marks=[] if in_quick_suite(number, entry) else pytest.mark.slow,
        )
        for number, entry in enumerate(ENTRIES)
    ],
)
def test_one_process_trains_like_plain_pytorch(entry: Entry, column: str, tmp_path: Path) -> None:
    """Each model runs with one method of the table in the documentation, which states the outcome."""
    found = hold(Trial(entry.name, COLUMNS[column]), tmp_path)
    assert not found.failed, found.said + found.detail
    if entry.kind != "custom":
        said = page()[entry.name, column]
        assert said in (NOT_RUN, "=") if found.outcome == "equal" else said == NOT_RUN or said.isdigit(), found.said


def test_the_page_lists_all_models() -> None:
    names = [entry.name for entry in ENTRIES if entry.kind != "custom"]
    assert set(page()) == {(name, column) for name in names for column in COLUMNS}


SEVERAL = [trial for trial in (draw(21, number) for number in range(200)) if trial.processes == 2]


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(trial, marks=[] if number < 8 else pytest.mark.slow, id=f"{trial.model}-{trial.plan}")
        for number, trial in enumerate(SEVERAL)
    ],
)
def test_several_processes_train_like_plain_pytorch(trial: Trial, tmp_path: Path) -> None:
    found = hold(trial, tmp_path)
    assert not found.failed, found.said + found.detail


FOUND = [
    (Trial("paligemma", {"recompute": "full"}), "equal"),  # its blocks fill a cache, a second time when they run again
    (Trial("vision-encoder-decoder", {"recompute": "sqrt"}), "equal"),
    # most of its parameters are norms in fp32, but its batch is cast to bf16
    (Trial("mobilenet_v2", {"recompute": "sqrt", "precision": "bf16-true"}), "equal"),
    (Trial("patchtst", {"recompute": "sqrt"}), "refused"),  # gives its blocks what they take by name
    (Trial("bigbird_pegasus", {"chunked_loss": 5}), "equal"),  # adds a buffer to the logits
    (Trial("esm", {"chunked_loss": 5}), "refused"),  # adds a parameter to them
    (Trial("nllb-moe", {"chunked_loss": 5}), "equal"),  # does not say what its decoder reads
    (Trial("blenderbot"), "equal"),
    (Trial("deepseek_v2", {"attention": "blocked"}), "equal"),  # values of another width than keys
    (Trial("deepseek_v3", {"cp": 2}), "equal"),
    (Trial("roberta", {"cp": 2}), "refused"),  # numbers positions by what is padding
    (Trial("mobilebert", {"cp": 2}), "refused"),  # embeds a token with its neighbours
    (Trial("falcon", {"cp": 2}), "refused"),  # calls torch's attention itself
    (Trial("ibert", {"recompute": "full"}), "equal"),  # puts new tensors in the place of its buffers
    (Trial("ibert", {"zero": 3, "dp_shard": 2}), "equal"),  # writes buffers that are no BatchNorm's
    (Trial("squeezebert", {"zero": 3, "dp_shard": 2}), "equal"),  # calls the forward of its blocks, without their hooks
    (
        Trial("segformer-dense", {"pp": 2, "micro_batch": 2}),
        "equal",
    ),  # collects hidden states by hooks of its first forward
    (Trial("running-mean", {"dp_replicate": 2, "micro_batch": 2}), "equal"),
    (Trial("patchtst", {"pp": 2, "precision": "bf16-true"}), "equal"),  # its loss is in bf16, on the last device only
    (Trial("cvt", {"pp": 2, "dp_replicate": 2, "schedule": "pipedream"}), "equal"),  # averages statistics under way
    (Trial("several-losses", {"parameter_server": "async", "dp_replicate": 2}), "equal"),  # by the server's own log
    (Trial("several-losses", {"fused_optimizer": True, "precision": "bf16-true"}, {"optimizer": "sgd"}), "refused"),
    # its router converts its weights in forward
    (Trial("nllb-moe", {"zero": 3, "dp_shard": 2, "precision": "bf16-mixed"}), "equal"),
    # gradients vanish in fp16 under so small a scale, in plain PyTorch, too
    (Trial("efficientnet", {"precision": "fp16-mixed", "loss_scale": 128.0}, {"optimizer": "lion"}), "equal"),
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("trial", "outcome"), [pytest.param(*one, id=f"{one[0].model}-{one[0].plan}-several") for one in FOUND]
)
def test_earlier_failures_do_not_return(trial: Trial, outcome: str, tmp_path: Path) -> None:
    """Each of these trials once gave other results or raised an error in torch."""
    found = hold(trial, tmp_path)
    assert found.outcome == outcome, found.said + found.detail


# The net itself -------------------------------------------------------------------------------------------------------


def test_the_zoo_is_large() -> None:
    assert sum(entry.kind != "custom" for entry in ENTRIES) >= 60
    assert sum(entry.kind == "custom" for entry in ENTRIES) >= 30


def test_draws_depend_only_on_the_seed() -> None:
    assert [draw(3, number) for number in range(20)] == [draw(3, number) for number in range(20)]
    assert draw(3, 0) != draw(4, 0)
    sizes = [draw(5, number).processes for number in range(300)]
    assert sum(size > 1 for size in sizes) > 0.3 * len(sizes)
    assert set(sizes) == {1, 2, 3, 4}


def test_a_difference_is_detected() -> None:
    """A difference is detected in the losses, in all weights together, and in one small tensor."""
    plain, trial = train_plainly("net", {}, None, 1, "fp32"), Trial("net")
    good = {name: value.clone() for name, value in plain.weights.items()}
    assert not compare(trial, plain.losses, False, good, {"fp32": plain})
    assert "first loss" in compare(trial, [plain.losses[0] * 1.001, plain.losses[1]], False, good, {"fp32": plain})
    assert "losses" in compare(trial, [plain.losses[0], plain.losses[1] * 1.001], False, good, {"fp32": plain})
    for name in good:
        untouched = {**good, name: plain.start[name]}
        assert name in compare(trial, plain.losses, False, untouched, {"fp32": plain})


def test_failures_are_shrunk() -> None:
    """Only the fields remain without which the trial would not fail."""

    class Crew:
        def hold(self, trial: Trial) -> Found:
            fails = trial.plan.get("pp", 1) > 1 and trial.plan.get("recompute") == "full"
            return Found("different" if fails else "equal")

    plan = {"pp": 4, "schedule": "gpipe", "micro_batch": 2, "recompute": "full", "precision": "bf16-mixed"}
    trial = Trial("net", plan, {"optimizer": "sgd", "clip": 1.0})
    failure = shrink(Crew(), Failure(0, trial, Crew().hold(trial), "different"))
    assert failure.smallest == Trial("net", {"pp": 2, "recompute": "full"})
