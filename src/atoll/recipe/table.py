"""A recipe as a table: read, laid over its base, and checked for spelling and types before PyTorch is imported.

``catalogue.json`` beside this file describes every option, component and method that comes with Atoll. It is
derived from the code by ``python -m atoll.recipe.generate``, and the check that reads it is the one that options
classes use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from atoll.core.config import over, packaged, read, setting
from atoll.core.schema import check
from atoll.methods.names import check_known, check_tables, check_terms

WORDS = {
    "objective": "objective",
    "terms": "term",
    "merge": "merge",
    "aggregation": "aggregation",
    "server": "server step",
}


@cache
def catalogue() -> dict[str, Any]:
    """What comes with Atoll.

    ``schema``: the JSON schema of a recipe. ``components``: the components' names by axis. ``methods``: the
    methods by family, as ``atoll methods --json`` prints them.
    """
    found: dict[str, Any] = json.loads(
        (resources.files("atoll") / "recipe/catalogue.json").read_text("utf-8")
    )
    return found


def presets() -> dict[str, str]:
    """The recipes that come with Atoll: their texts by name."""
    return packaged("recipes")


def read_table(recipe: str | Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A preset by name or a TOML file, with ``key=value`` settings laid over it.

    The run is called after it, unless the file or its base has a ``name``.

    Raises:
        UserError: No such recipe, a file that is not TOML, an unknown key, a value of the wrong type or out of
            range.
    """
    return complete_table({"name": Path(recipe).stem, **read(str(recipe), presets())}, settings)


def complete_table(table: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's table over the ``base`` that it may name, and ``key=value`` settings over both.

    Raises:
        UserError: An unknown key, a value of the wrong type or out of range.
    """
    if "base" in table:
        table = over(read(str(table["base"]), presets()), {k: v for k, v in table.items() if k != "base"})
    for text in settings:
        table = over(table, setting(text))
    check(catalogue()["schema"], table, "")
    _check_method(table.get("method", {}), table.get("options", {}))
    return dict(table)


def _check_method(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """What can be said of a method without its code; `atoll.methods.registry.make_method` says the rest."""
    methods = {method["name"]: method for family in catalogue()["methods"].values() for method in family}
    default = catalogue()["schema"]["properties"]["method"]["properties"]["name"]["default"]
    name = chosen.get("name", default)
    check_known(name, methods, "method")
    if ":" in name:
        return
    axes = {axis: chosen.get(axis, methods[name][axis]) for axis in WORDS}
    check_terms(axes["terms"])
    used = [one for names in axes.values() for one in ([names] if isinstance(names, str) else names)]
    for axis, what in WORDS.items():
        for one in [axes[axis]] if isinstance(axes[axis], str) else axes[axis]:
            check_known(one, catalogue()["components"][axis], what)
    if not any(":" in one for one in used):
        check_tables(options, used)
