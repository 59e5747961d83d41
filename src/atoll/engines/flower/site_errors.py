"""Errors at a site: the part that the coordinator sees, and the part that only the site's own log contains.

An error may name files, folders and classes of the site. From a real site, the coordinator therefore receives only
sentences that were written for it (`SiteError`); for all other errors, it receives the kind of failure and a
pointer to the site's log.
"""

from __future__ import annotations

import traceback

from atoll.core.errors import RunError, UserError
from atoll.core.imports import describe_error


class SiteError(UserError):
    """Error whose sentence the coordinator may read: it names no file, no folder and no class of the site.

    Details belong in the error from which it is raised; only the site's own log shows that error.
    """


IMAGES = (
    "the site's images do not fit the recipe, or some cannot be read; the site's own log says which and why (a "
    "recipe with data.on_corrupt = 'skip' leaves out images that cannot be decoded)"
)
FILES = (
    "the site cannot read or write one of its files; its own log says which and why, and it takes part again once "
    "its owner has repaired that"
)
LIBRARY = (
    "the site lacks a library that the recipe needs; its own log says which, and how its owner installs it"
)
OTHER = "the site cannot do what it is asked; its own log says why, so ask its owner"
KINDS = {
    "atoll.core.extras": LIBRARY,  # comes before the modules that need the library
    "atoll.data.": IMAGES,
    "atoll.core.audit_log": FILES,
    "atoll.core.files": FILES,
    "atoll.core.tree": FILES,
}  # by a module in the error's traceback


def sentence_of(error: Exception, at_site: bool) -> str:
    """Return the sentence about an error that is sent to the coordinator.

    Args:
        error: The error.
        at_site: Whether the error happened at a real site, not where the coordinator's own images are.
    """
    expected = isinstance(error, ValueError | RunError)  # includes UserError
    if not at_site:
        return str(error) if expected else describe_error(error)
    if isinstance(error, SiteError):
        return str(error)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for start, sentence in KINDS.items():
        if any(name.startswith(start) for name in modules):
            return sentence
    return OTHER if expected else f"{type(error).__name__} at the site, whose own log has the traceback"


def details_of(error: Exception) -> str:
    """Return all details of an error, for the site's own log; with a traceback if it is unexpected."""
    if not isinstance(error, ValueError | RunError):
        return "".join(traceback.format_exception(error))
    cause = error.__cause__
    return str(error) if cause is None else f"{error} ({cause})"
