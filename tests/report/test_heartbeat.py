"""While a command plans or prepares data, it reports what it does."""

from __future__ import annotations

import logging
import threading

from tightfit.report.heartbeat import never_silent


def test_long_activities_are_reported_repeatedly() -> None:
    said: list[str] = []
    spoken = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        spoken.set()

    logger = logging.getLogger("tightfit")
    level = logger.level
    with never_silent(say, "planning", every_s=0.01):
        assert spoken.wait(60)
        logging.getLogger("tightfit.data.tokens").info("tokenizing %s", "a.txt")
        spoken.clear()
        assert spoken.wait(60)
        spoken.clear()
        assert spoken.wait(60)
    assert said[0].startswith("working  planning (")
    assert said[-1].startswith("working  tokenizing a.txt (")
    count = len(said)
    assert (logger.level, logger.handlers) == (level, [])
    assert count == len(said)
