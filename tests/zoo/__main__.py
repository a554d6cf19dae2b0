"""Draw trials and compare them with plain PyTorch: python -m tests.zoo --draws 500 --seed 1. See
`scripts/test --zoo`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.zoo.draw import draw
from tests.zoo.shrink import Failure, shrink
from tests.zoo.trial import FAILURES, Found, Trial

CHUNK = 100


class Draws:
    """Trials dealt out to lanes, each with processes of its own, and what came of them."""

    def __init__(
        self, trials: list[Trial], folder: Path, failures: Path | None, shrinking: bool, limit_s: float
    ) -> None:
        self.trials, self.folder, self.failures, self.shrinking = trials, folder, failures, shrinking
        self.limit_s = limit_s
        self.next, self.counts, self.several = 0, Counter[str](), 0
        self.known: dict[tuple[str, ...], Failure] = {}
        self.lock, self.began = threading.Lock(), time.monotonic()

    def run(self, lanes: int) -> int:
        threads = [threading.Thread(target=self._lane, daemon=True) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(15)
                print(self.summary(), flush=True)
        return sum(self.counts[name] for name in FAILURES)

    def summary(self) -> str:
        said = ", ".join(f"{self.counts[name]} {name}" for name in ("equal", "refused", *FAILURES, "unsteady"))
        done = sum(self.counts.values())
        return f"{done} draws in {time.monotonic() - self.began:.0f} s, {self.several} on several processes: {said}"

    def _lane(self) -> None:
        from tests.zoo.crew import Crew

        crew = Crew(self.folder, limit_s=self.limit_s)
        try:
            while True:
                with self.lock:
                    if self.next == len(self.trials):
                        return
                    number, self.next = self.next, self.next + 1
                self._take(crew, number, self.trials[number])
        finally:
            crew.close()

    def _take(self, crew: Any, number: int, trial: Trial) -> None:
        found: Found = crew.hold(trial)
        outcome: str = found.outcome
        if found.failed:  # what earlier trials left in the processes shall not decide
            crew.close()
            again: Found = crew.hold(trial)
            outcome = again.outcome if again.failed else "unsteady"
            found = again if again.failed else found
        with self.lock:
            self.counts[outcome] += 1
            self.several += trial.processes > 1
        if found.failed:
            self._note(crew, number, trial, found, outcome)
        elif len(self.trials) == 1:
            print(outcome, found.said)

    def _note(self, crew: Any, number: int, trial: Trial, found: Found, outcome: str) -> None:
        failure = Failure(number, trial, found, outcome)
        with self.lock:
            seen = failure.key in self.known
            self.known.setdefault(failure.key, failure)
        if self.shrinking and not seen and outcome != "unsteady":
            failure = shrink(crew, failure)
        print(f"FAILED {outcome}{' (seen)' if seen else ''}: {failure.smallest} {found.said[:300]}", flush=True)
        if self.failures is not None:
            with self.lock, self.failures.open("a") as file:
                file.write(json.dumps(failure.content()) + "\n")


def _in_order(trials: list[Trial]) -> list[Trial]:
    """Trials of as many processes in a row, as far as that goes: groups of processes are kept from one to the next."""
    chunks = [trials[start : start + CHUNK] for start in range(0, len(trials), CHUNK)]
    return [trial for chunk in chunks for trial in sorted(chunk, key=lambda trial: trial.processes)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--plan", type=json.loads, help="this plan (JSON), of --model")
    parser.add_argument("--train", type=json.loads, default={})
    parser.add_argument("--lanes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--failures", type=Path, help="a file that failures are added to, a JSON line each")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--limit", type=float, default=90.0, metavar="S", help="seconds that a trial may take")
    asked = parser.parse_args(arguments)
    if asked.plan is not None:
        trials = [Trial(asked.model, asked.plan, asked.train)]
    else:
        numbers = range(asked.first, asked.first + asked.draws)
        trials = _in_order([draw(asked.seed, number) for number in numbers])
        if asked.model:
            trials = [trial for trial in trials if trial.model == asked.model]
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        draws = Draws(trials, Path(folder), asked.failures, not asked.no_shrink, asked.limit)
        failed = draws.run(min(asked.lanes, len(trials)))
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from multiprocessing import get_context

    get_context("forkserver").set_forkserver_preload(["tests.zoo.preload"])
    sys.exit(main(sys.argv[1:]))
