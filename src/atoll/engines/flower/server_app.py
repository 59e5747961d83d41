"""Deprecated name of `atoll.commands.flower_server_app`, which Flower apps written for 0.1 contain."""

from __future__ import annotations

import importlib

from atoll.core.errors import warn


def __getattr__(name: str) -> object:
    """Import on first use, because the new module is in a layer above this one."""
    if name.startswith("__"):
        raise AttributeError(name)
    warn(
        "atoll.engines.flower.server_app is now atoll.commands.flower_server_app; write the app again with "
        "`atoll federate init`, or name the new module in its pyproject.toml",
        DeprecationWarning,
    )
    return getattr(importlib.import_module("atoll.commands.flower_server_app"), name)
