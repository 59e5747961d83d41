"""The exceptions and the warnings whose message is a sentence for the user."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

_NOT_THE_USERS = ("atoll", "contextlib", "functools", "importlib", "torch")  # modules that call Atoll's code


class UserError(ValueError):
    """Error in the user's input; the message says in one sentence what is wrong, where, and what to do.

    The command prints the sentence and exits with code 2; library callers catch it as a `ValueError`.

    Example:
        >>> import atoll
        >>> try:
        ...     atoll.load_recipe("digits-sdd")
        ... except atoll.UserError as error:
        ...     print("did you mean 'digits-ssd'?" in str(error))
        True
    """


class RunError(RuntimeError):
    """Failure during a run; the message says in one sentence what happened and how to continue.

    The command prints the sentence and exits with code 1. Any other exception is a defect in Atoll or in a user's
    component, and is shown with its traceback.

    Example:
        >>> import atoll
        >>> issubclass(atoll.RunError, RuntimeError)
        True
    """


class OldCodeWarning(DeprecationWarning):
    """Warning of user code, such as a component, that a later version will refuse; the command shows it."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Show a warning at the innermost line of the user's code that leads here.

    Python counts frames instead, and their number depends on the path through Atoll.
    """
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


MOST_LISTED = 60  # names in an error message


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """Final clause of an error message that suggests the nearest known name, or lists the known names.

    If there are more than 60 names, it lists ten; names that contain the unknown name come first.

    Args:
        name: The unknown name.
        known: The known names.
        before: Prefix that all known names share; it does not count towards their similarity.

    Example:
        >>> from atoll.core.errors import did_you_mean
        >>> did_you_mean("simclar", ["simclr", "byol"])
        "did you mean 'simclr'?"
    """
    known = sorted(known)
    same = [one for one in known if one.lower() == name.lower()]
    if near := same or difflib.get_close_matches(name, known, n=1):
        return f"did you mean {before + near[0]!r}?"
    if len(known) <= MOST_LISTED:
        return f"known: {', '.join(before + one for one in known)}"
    like = [one for one in known if name.lower() in one.lower()] or known
    listed = ", ".join(before + one for one in like[:10])
    return f"known: {listed} and {len(known) - len(like[:10])} others"
