"""The package's errors, each with its exit code, and the package's warning.

An InputError says what the user wrote, what is wrong with it, and the smallest change that works.
"""

from __future__ import annotations

from typing import Any

_LONGEST = 1500  # characters of a part of a message


def _shown(text: str) -> str:
    """Return `text` in a form that a terminal may print: control characters are escaped, and the
    middle of a text longer than _LONGEST characters is replaced by "..."."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


class TightfitError(Exception):
    """A run failed for a reason that tightfit knows. Exit code 1."""

    exit_code = 1


class InputError(TightfitError, ValueError):
    """The job, plan, data or command is wrong. Exit code 2.

    asked  what the user wrote
    found  what is wrong with it
    fix    the smallest change that works
    """

    exit_code = 2

    def __init__(self, asked: str, found: str, fix: str) -> None:
        self.asked, self.found, self.fix = (_shown(part) for part in (asked, found, fix))
        super().__init__(f"{self.asked}: {self.found}\n  fix: {self.fix}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.asked, self.found, self.fix)


class Untraceable(InputError):
    """The model cannot be traced on fake tensors. It can be trained, but its memory and time cannot
    be predicted."""


class DoesNotFit(TightfitError):
    """The job does not fit the machine's memory with this plan. Exit code 3.

    message  the error message
    content  the JSON content that `tightfit explain --json` prints; None if the error does not come
             from a search
    """

    exit_code = 3

    def __init__(self, message: str, content: dict[str, Any] | None = None) -> None:
        self.content = content
        super().__init__(message)


class TightfitWarning(UserWarning):
    """The input is valid and is used as written, but the user may have meant something else."""
