"""Import of what a recipe names as ``module:attribute``: the only place where a user's code is imported."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from atoll.core.errors import UserError


def import_attribute(name: str, what: str) -> Any:
    """Import the attribute of a user's module that ``module:attribute`` names.

    Args:
        name: The name, ``module:attribute``.
        what: The role of the attribute in a recipe, for messages.

    Raises:
        UserError: The module does not exist or cannot be imported, or it has no such attribute.

    Example:
        >>> from atoll.core.imports import import_attribute
        >>> import_attribute("math:pi", "number")
        3.141592653589793
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} {name!r}: no module {error.name!r} in this folder or the environment"
        ) from None
    except UserError as error:
        raise UserError(f"{what} {name!r}: {error}") from None
    except Exception as error:  # importing the user's module may raise any exception
        raise UserError(
            f"{what} {name!r}: module {module!r} cannot be imported: {_where(error)}; fix it, then run again"
        ) from error
    if not hasattr(imported, attribute):
        raise UserError(f"{what} {name!r}: module {module!r} has no {attribute!r}")
    return getattr(imported, attribute)


def _where(error: Exception) -> str:
    """Describe an error in a user's file: its type, its message and its line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frames[-1].filename}, line {frames[-1].lineno})"
