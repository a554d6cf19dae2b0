"""Kept processes in which trials run: they survive refusals, and are replaced after crashes and
hangs."""

from __future__ import annotations

import hashlib
import json
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.pool import Pool
from tests.zoo.trial import Found, Trial

LIMIT_S = 90.0  # for a trial
GRACE_S = 8.0  # for the other processes, once one has failed
SEVERITY = ("crash", "raised", "different", "late", "refused", "equal")


class Crew:
    """Processes for trials of any size, and the references that have been trained, in a folder."""

    def __init__(self, folder: Path, method: str = "forkserver", limit_s: float = LIMIT_S) -> None:
        self.folder, self.method, self.limit_s = folder, method, limit_s
        self.pools: dict[int, Pool] = {}
        self.restarts = 0

    def hold(self, trial: Trial) -> Found:
        """Run the trial in processes and return its outcome. If it is off, it runs again with the
        rounding error of plain PyTorch at hand."""
        found = self._attempt(trial, False)
        return self._attempt(trial, True) if found.outcome == "different" else found

    def _attempt(self, trial: Trial, wide: bool) -> Found:
        references = {one["precision"]: self._reference(one) for one in trial.references(wide)}
        return self._judge(trial.processes, "tests.zoo.trial:attempt", trial, references)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()

    def _reference(self, reference: dict[str, Any]) -> str:
        key = hashlib.sha256(json.dumps(reference, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{key}.pt"
        if not path.exists():
            found = self._judge(1, "tests.zoo.trial:keep_reference", str(path), reference)
            if not path.exists():
                raise AssertionError(f"no reference for {reference}: {found}")
        return str(path)

    def _judge(self, size: int, where: str, *arguments: Any) -> Found:
        pool = self.pools.get(size) or self.pools.setdefault(size, Pool(size, self.method))
        answers = self._answers(pool, where, arguments)
        found = [self._found(answer) for answer in answers]
        if any(answer is None for answer in answers) or any(one.outcome == "crash" for one in found):
            self.pools.pop(size).close()
            self.restarts += 1
        else:
            self._leave_groups(size)
        return min(
            found, key=lambda one: SEVERITY.index(one.outcome) if one.outcome in SEVERITY else len(SEVERITY) - 1.5
        )

    def _leave_groups(self, size: int) -> None:
        """Have a pool leave its groups, and end it where it cannot."""
        try:
            self.pools[size].part()
        except (AssertionError, OSError, EOFError):
            self.pools.pop(size).close()
            self.restarts += 1

    def _found(self, answer: Any) -> Found:
        if answer is None:
            return Found("hang", f"a process did not answer within {self.limit_s:g} s")
        kind, value = answer
        if kind == "result":
            return value if isinstance(value, Found) else Found("equal")
        return Found("crash" if kind == "gone" else "raised", f"{type(value).__name__}: {value}")

    def _answers(self, pool: Pool, where: str, arguments: tuple[Any, ...]) -> list[Any]:
        """What each process answers; None of one that does not in time."""
        pool.ask(where, *arguments)
        answers: dict[Connection, Any] = {}
        until = time.monotonic() + self.limit_s
        while len(answers) < len(pool.ends) and time.monotonic() < until:
            for end in wait([end for end in pool.ends if end not in answers], 0.5):
                try:
                    answers[end] = end.recv()  # type: ignore[union-attr, index]
                except (EOFError, OSError) as error:
                    answers[end] = ("gone", error)  # type: ignore[index]
                if self._found(answers[end]).outcome != "equal":  # type: ignore[index]
                    until = min(until, time.monotonic() + GRACE_S)
        return [answers.get(end) for end in pool.ends]
