"""The two exceptions that hold a sentence for the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user's: what was wrong, where, and what to do, in one sentence.

    The command prints the sentence and leaves with exit code 2; library callers catch it as a `ValueError`.
    """


class RunError(RuntimeError):
    """A run that came to nothing on its way: what happened, and how to go on, in one sentence.

    The command prints the sentence and leaves with exit code 1. Any other error is a fault in our code, or in the
    user's own part, and shows its traceback.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A closing clause that names the nearest known name, or lists them all.

    Example:
        >>> from atoll.core.errors import did_you_mean
        >>> did_you_mean("simclar", ["simclr", "byol"])
        "did you mean 'simclr'?"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}"
