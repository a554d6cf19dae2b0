"""What a command says when something failed that tightfit did not foresee: what, where, and how to see more."""

from __future__ import annotations

import traceback


def describe_failure(error: Exception) -> str:
    """The error, the place in the user's or tightfit's code nearest to it, and the way to the whole traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "<" not in frame.filename]
    where = f"\n  at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    text = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {text[0]}{where}\n  for the whole traceback: tightfit --traceback ..."
