"""Atoll: federated self-supervised representation learning for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Plan", "Recipe", "Run", "load_encoder", "load_recipe", "simulate"]

if TYPE_CHECKING:
    from atoll.engines.federation import Plan
    from atoll.launch import launch as simulate
    from atoll.models import load_encoder
    from atoll.recipe import Recipe, load_recipe
    from atoll.runs import Run

_HOMES = {
    "Plan": ("atoll.engines.federation", "Plan"),
    "Recipe": ("atoll.recipe", "Recipe"),
    "Run": ("atoll.runs", "Run"),
    "load_encoder": ("atoll.models", "load_encoder"),
    "load_recipe": ("atoll.recipe", "load_recipe"),
    "simulate": ("atoll.launch", "launch"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``atoll --version`` need not wait for PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
