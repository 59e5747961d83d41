"""Checks of the names with which a recipe composes a method.

This module does not import the components, so a recipe can be checked before PyTorch is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from atoll.core.errors import UserError, did_you_mean


def check_known(name: str, known: Collection[str], what: str) -> None:
    """Check that a name in a recipe is known, or is a user's ``module:attribute``.

    Raises:
        UserError: The name is neither.
    """
    if ":" not in name and name not in known:
        module = name.partition(".")[0]  # of my_method, my_method.py, my_method.METHOD
        own = f"; for your {module}.py, write {module}:ATTRIBUTE" if Path(f"{module}.py").is_file() else ""
        raise UserError(f"unknown {what} {name!r}; {did_you_mean(name, known)}{own}")


def check_terms(names: Sequence[str]) -> None:
    """Check that each term is named once.

    Raises:
        UserError: A term is named twice.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"method.terms names {twice!r} twice; give it a larger options.{twice}.weight instead"
        )


def check_tables(tables: Iterable[str], used: Collection[str]) -> None:
    """Check that each table of options belongs to a component of the method.

    Raises:
        UserError: A table belongs to none of its components.
    """
    unused = sorted(set(tables) - set(used))
    if unused:
        raise UserError(
            f"options.{unused[0]} belongs to no component of this method; to leave out what a base sets, add "
            f"--set options.{unused[0]}= (atoll compare RECIPE --methods NAME does so by itself); "
            f"{did_you_mean(unused[0], used)}"
        )
