"""The one exception that means: the user can fix this."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user's: what was wrong, where, and what to do, in one sentence.

    The command prints the sentence and leaves with exit code 2; library callers catch it as a `ValueError`.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A closing clause that names the nearest known name, or lists them all."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}"
