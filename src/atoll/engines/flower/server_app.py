"""Deprecated: `atoll.commands.flower_server_app` under its old name, which Flower apps of 0.1 hold."""

from __future__ import annotations

import importlib
import warnings


def __getattr__(name: str) -> object:
    """Import on first use, because the new module lies above this folder."""
    if name.startswith("__"):
        raise AttributeError(name)
    warnings.warn(
        "atoll.engines.flower.server_app is now atoll.commands.flower_server_app; write the app anew with "
        "`atoll federate init`, or name the new module in its pyproject.toml",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module("atoll.commands.flower_server_app"), name)
