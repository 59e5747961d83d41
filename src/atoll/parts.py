"""Deprecated name of `atoll.components.base`; it will be removed in 0.3."""

from __future__ import annotations

from typing import Any

from atoll.components import base
from atoll.core.errors import OldCodeWarning, UserError, warn

_RENAMED = {"Part": "Component", "Local": "ClientContext"}

warn(
    "atoll.parts is now atoll.components.base, where Part is Component and Local is ClientContext; the old "
    "name will be removed in 0.3",
    OldCodeWarning,
)


def require_positive(component: base.Component, *options: str) -> None:
    """Check that some of a component's options are positive.

    Raises:
        UserError: An option is not above 0.
    """
    for option in options:
        value = getattr(component, option)
        if not value > 0:
            raise UserError(f"options.{component.name}.{option} is {value}; it must be above 0")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(base, _RENAMED.get(name, name))
