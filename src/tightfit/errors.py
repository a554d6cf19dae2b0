"""The package's errors, each with its exit code, and its warning.

An InputError says what was asked, what was found, and the smallest change that works.
"""

from __future__ import annotations

from typing import Any

_LONGEST = 1500  # characters of a part of a message


def _shown(text: str) -> str:
    """The text without control characters, and without the middle if it is long, for a terminal."""
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
    """A model that cannot be traced on fake tensors. It trains, but its memory and time cannot be
    predicted."""


class DoesNotFit(TightfitError):
    """The job does not fit the machine's memory with this plan. Exit code 3.

    content: what `tightfit explain --json` prints of it; None if the error does not come from a
    search.
    """

    exit_code = 3

    def __init__(self, said: str, content: dict[str, Any] | None = None) -> None:
        self.content = content
        super().__init__(said)


class TightfitWarning(UserWarning):
    """Something that works as it was asked for, but may not be what was meant."""
