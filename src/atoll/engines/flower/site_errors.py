"""Errors at a site: what the coordinator reads of one, and what only the site's own log says.

An error may name files, folders and classes of the site. Of a real site's errors, the coordinator therefore reads
the sentences that were written for it (`SiteError`); of all others, what kind of thing failed and who knows more.
"""

from __future__ import annotations

import traceback

from atoll.core.errors import RunError, UserError
from atoll.core.imports import describe_error


class SiteError(UserError):
    """Error whose sentence the coordinator may read: it names no file, no folder and no class of the site.

    Details belong into the error that it is raised from; only the site's own log shows that one.
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
    "atoll.core.extras": LIBRARY,  # before what needs the library
    "atoll.data.": IMAGES,
    "atoll.core.audit_log": FILES,
    "atoll.core.files": FILES,
    "atoll.core.tree": FILES,
}  # by the module that an error passed


def sentence_of(error: Exception, at_site: bool) -> str:
    """Return what the coordinator is told of an error.

    Args:
        error: The error.
        at_site: Whether it happened at a real site, and not where the coordinator's own images are.
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
    """Return all that is known of an error, for the site's own log; a traceback if nobody expected it."""
    if not isinstance(error, ValueError | RunError):
        return "".join(traceback.format_exception(error))
    cause = error.__cause__
    return str(error) if cause is None else f"{error} ({cause})"
