"""What can go wrong, each with the exit code the command line ends with; and what is only warned of.

An error says what was asked, what was found, and the smallest change that works.
"""

from __future__ import annotations

from typing import Any

_LONGEST = 1500  # characters of a part of a message


def _shown(text: str) -> str:
    """A text as a terminal may show it: without control characters, and the middle of a long one left out."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


class TightfitError(Exception):
    """A run that failed for a reason tightfit can name. Exit code 1."""

    exit_code = 1


class InputError(TightfitError, ValueError):
    """The job, plan, data or command is wrong. Exit code 2.

    asked: what the user wrote. found: what is wrong with it. fix: the smallest change that works.
    """

    exit_code = 2

    def __init__(self, asked: str, found: str, fix: str) -> None:
        self.asked, self.found, self.fix = (_shown(part) for part in (asked, found, fix))
        super().__init__(f"{self.asked}: {self.found}\n  fix: {self.fix}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.asked, self.found, self.fix)


class Untraceable(InputError):
    """A model that cannot be followed on tensors without values: it trains, but what it takes cannot be foreseen."""


class DoesNotFit(TightfitError):
    """The job does not fit the machine's memory with this plan. Exit code 3.

    content: what `tightfit explain --json` prints of it; None where no search came to it.
    """

    exit_code = 3

    def __init__(self, said: str, content: dict[str, Any] | None = None) -> None:
        self.content = content
        super().__init__(said)


class TightfitWarning(UserWarning):
    """What works as it was asked for, and may not be what was meant."""
