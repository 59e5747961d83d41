"""Atoll: federated self-supervised representation learning for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.core.version import VERSION

__version__ = VERSION
__all__ = [
    "Callback",
    "Recipe",
    "Run",
    "RunError",
    "Runs",
    "UserError",
    "load_encoder",
    "load_recipe",
    "simulate",
]

_MODULES = {
    "Callback": ("atoll.engines.callbacks", "Callback"),
    "Recipe": ("atoll.recipe.recipe", "Recipe"),
    "Run": ("atoll.commands.handle", "Run"),
    "RunError": ("atoll.core.errors", "RunError"),
    "Runs": ("atoll.commands.runs", "Runs"),
    "UserError": ("atoll.core.errors", "UserError"),
    "load_encoder": ("atoll.models", "load_encoder"),
    "load_recipe": ("atoll.recipe.recipe", "load_recipe"),
    "simulate": ("atoll.commands.run", "simulate"),
}

if TYPE_CHECKING:
    from atoll.commands.handle import Run
    from atoll.commands.run import simulate
    from atoll.commands.runs import Runs
    from atoll.core.errors import RunError, UserError
    from atoll.engines.callbacks import Callback
    from atoll.models import load_encoder
    from atoll.recipe.recipe import Recipe, load_recipe
else:  # type checkers would take every name for one of Atoll's

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, so that ``atoll --version`` does not import PyTorch."""
        if name not in _MODULES:
            raise AttributeError(f"module 'atoll' has no attribute {name!r}")
        import importlib

        from atoll.core.collector import paused

        module, attribute = _MODULES[name]
        with paused():
            return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """List the public names, before their first use too."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
