"""Libraries that an extra of Atoll installs: imported where they are used; a missing one is named in a sentence."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

from atoll.core.errors import UserError


def missing(library: str, extra: str, what: str) -> str | None:
    """Describe a library that is not installed, without importing it.

    Args:
        library: Name of the library's package.
        extra: The extra of Atoll that installs it.
        what: The feature that needs the library.

    Returns:
        The sentence; None if the library is installed.

    Example:
        >>> from atoll.core.extras import missing
        >>> missing("no_such_library", "dp", "the accountant")
        "the accountant needs no_such_library; install Atoll's extra 'dp': pip install '.[dp]' in a clone of Atoll"
        >>> missing("torch", "dp", "the accountant") is None
        True
    """
    spec = importlib.util.find_spec(library)
    return _sentence(library, extra, what) if spec is None or _is_folder(spec) else None


def require(module: str, extra: str, what: str, error: type[UserError] = UserError) -> Any:
    """Import a module of a library that an extra installs.

    Args:
        module: Name of the module.
        extra: The extra of Atoll that installs its library.
        what: The feature that needs the module.
        error: Class of the error.

    Returns:
        The module.

    Raises:
        UserError: The library is not installed.
    """
    sentence = _sentence(module.partition(".")[0], extra, what)
    try:
        found = importlib.import_module(module)
    except ImportError as failure:
        raise error(sentence) from failure
    if _is_folder(found.__spec__):
        raise error(sentence)
    return found


def _is_folder(spec: ModuleSpec | None) -> bool:
    """Whether Python found only a folder of that name, such as ``wandb``, W&B's folder next to a script."""
    return spec is not None and spec.origin is None


def _sentence(library: str, extra: str, what: str) -> str:
    return f"{what} needs {library}; install Atoll's extra {extra!r}: pip install '.[{extra}]' in a clone of Atoll"
