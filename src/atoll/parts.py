"""Deprecated: `atoll.components.base` under its old name; it will be removed in 0.3."""

from __future__ import annotations

import warnings
from typing import Any

from atoll.components import base

_RENAMED = {"Part": "Component", "Local": "ClientContext"}

warnings.warn(
    "atoll.parts is now atoll.components.base, where Part is Component and Local is ClientContext; the old "
    "name will be removed in 0.3",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(base, _RENAMED.get(name, name))
