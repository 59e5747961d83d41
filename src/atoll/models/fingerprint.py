"""Fingerprints of the code of a user's network."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from atoll.core.fingerprint import fingerprint


def code_of(model: nn.Module, source: Any) -> str:
    """Compute a fingerprint of the code of a network.

    Args:
        model: The network; the classes of all its parts count.
        source: The network, or the factory that made it, which counts, too.

    Returns:
        The fingerprint; if the code has none, the source text of the network's class and of the factory.
    """
    factory = [] if isinstance(source, nn.Module) else [source]
    return _code([*_kinds(model), *factory], type(model), source)


def first_code_of(model: nn.Module) -> str:
    """A network's fingerprint when this process first asked for it, because running may change global values."""
    return _first_code(_kinds(model))


def _kinds(model: nn.Module) -> tuple[type[nn.Module], ...]:
    return tuple(dict.fromkeys(type(part) for part in model.modules()))


@cache
def _first_code(kinds: tuple[type[nn.Module], ...]) -> str:
    return _code([*kinds], kinds[0])


def _code(parts: list[Any], *shown: Any) -> str:
    try:
        return fingerprint(parts, versions=False)
    except Exception:  # the user's objects may raise any exception, or contain each other endlessly
        return "".join(map(_text_of, shown))


def _text_of(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # built in, or entered where Python keeps no source
        return ""
