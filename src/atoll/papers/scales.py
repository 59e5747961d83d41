"""Scales: a table's rows in less time, by changes of their recipes that every result then lists."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from atoll.core.config import build, describe, over
from atoll.core.errors import UserError, did_you_mean
from atoll.papers.tables import PaperTable, Scale
from atoll.recipe.recipe import Recipe

PAPER = "paper"  # the scale that changes nothing


@cache
def shared_scales() -> dict[str, Scale]:
    """The scales of all tables, from ``papers/scales.toml``."""
    tables = tomllib.loads((resources.files("atoll.papers") / "scales.toml").read_text("utf-8"))
    return {name: build(Scale, table, f"scale.{name}") for name, table in tables.items()}


def scale_names(table: PaperTable) -> list[str]:
    """Names of a table's scales."""
    return list(dict.fromkeys([PAPER, *shared_scales(), *table.scale]))


def check_scale(table: PaperTable, name: str) -> None:
    """Check that a table has a scale.

    Raises:
        UserError: It has none of this name.
    """
    known = scale_names(table)
    if name not in known:
        raise UserError(f"the table has no scale {name!r}; {did_you_mean(name, known)}")


def about(table: PaperTable, name: str) -> str:
    """What a scale is for, in words; empty if no file says it."""
    own = table.scale.get(name, Scale()).about
    return own or shared_scales().get(name, Scale()).about


def titled(table: PaperTable, scale: str) -> str:
    """Title of a table at a scale."""
    return table.title if scale == PAPER else f"{table.title}, at scale {scale!r}"


def apply_scale(recipe: Recipe, table: PaperTable, choices: Sequence[str], name: str) -> dict[str, Any]:
    """Apply a scale to a row's recipe: the shared one, then the table's, then the choices'.

    Args:
        recipe: The row's recipe at the paper's scale.
        table: The table.
        choices: The row's choices.
        name: The scale.

    Returns:
        The changed recipe, as a table.
    """
    changes: dict[str, Any] = {}
    at_most: dict[str, Any] = {}
    for layer in _layers(table, choices, name):
        changes, at_most = over(changes, layer.changes), over(at_most, layer.at_most)
    components = {one.name for one in recipe.composed.components}
    whole = over(describe(recipe.completed()), _of_components(changes, components))
    return _capped(whole, _of_components(at_most, components))


def detection_changes(table: PaperTable, choices: Sequence[str], name: str) -> dict[str, Any]:
    """A scale's changes of the options of detection."""
    changes: dict[str, Any] = {}
    for layer in _layers(table, choices, name):
        changes |= layer.detection
    return changes


def _layers(table: PaperTable, choices: Sequence[str], name: str) -> list[Scale]:
    """The shared scale, then the table's, then the choices'."""
    scales = (shared_scales(), table.scale, *(table.choices[one].scale for one in choices))
    return [one.get(name, Scale()) for one in scales]


def _of_components(changes: Mapping[str, Any], components: set[str]) -> dict[str, Any]:
    """Leave out the options of components that a method does not have."""
    options = {name: value for name, value in changes.get("options", {}).items() if name in components}
    return {**changes, "options": options}


def _capped(table: Mapping[str, Any], at_most: Mapping[str, Any]) -> dict[str, Any]:
    """Lower numbers to their maxima; what a recipe leaves open (a limit, say) becomes the maximum."""
    capped = dict(table)
    for key, most in at_most.items():
        value = capped.get(key)
        if isinstance(most, Mapping):
            capped[key] = _capped(value or {}, most)
        elif isinstance(most, int | float) and isinstance(value, int | float | None):
            capped[key] = most if value is None else min(value, most)
        else:
            raise UserError(f"a scale's at_most lowers numbers, and {key} is {value!r}; set it in changes")
    return capped
