"""Recipes as tables: read, merge with the base, and check keys and types before PyTorch is imported.

``catalogue.json`` in this folder describes every option, component and method that Atoll includes. It is generated
from the code by ``python -m atoll.recipe.generate``; recipes are checked against it by the same function that
options classes use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, time
from functools import cache
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from atoll.core.config import over, packaged, read, read_settings, read_text_table, reset
from atoll.core.errors import UserError
from atoll.core.schema import Schema
from atoll.core.schema_check import check, places_of
from atoll.core.text import short
from atoll.methods.names import check_known, check_tables, check_terms

MOST_LEVELS = 50  # of tables and lists in a recipe, so that recursive functions do not exhaust the stack
WORDS = {
    "objective": "objective",
    "terms": "term",
    "merge": "merge",
    "aggregation": "aggregation",
    "server": "server step",
}


@cache
def catalogue() -> dict[str, Any]:
    """Read the catalogue of everything that Atoll includes.

    ``schema``: the JSON schema of a recipe. ``components``: the names of components by axis. ``methods``: the
    methods by family, as ``atoll methods --json`` prints them.
    """
    found: dict[str, Any] = json.loads(
        (resources.files("atoll") / "recipe/catalogue.json").read_text("utf-8")
    )
    return found


def presets() -> dict[str, str]:
    """Read the texts of the recipes that Atoll includes, by name."""
    return packaged("recipes")


def read_table(recipe: str | Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read a preset by name or a TOML file, and override it with ``key=value`` settings.

    The run has the name of the preset or file, unless the file or its base has a ``name``.

    Raises:
        UserError: The recipe does not exist, the file is not valid TOML, a key is unknown, or a value has the wrong
            type or is out of range.
    """
    return complete_table({"name": Path(recipe).stem, **read(str(recipe), presets())}, settings)


def recipe_folders(recipe: str | Path) -> list[Path]:
    """Folders of a recipe's file and of the files that it is based on; none for a preset."""
    folders, name, folder, known = [], str(recipe), Path(), presets()
    while name and name not in known:
        path = folder / name
        folder = path.parent
        folders.append(folder)
        name = str(read_text_table(path).get("base", ""))
    return folders


def further_imports(table: Mapping[str, Any]) -> list[str]:
    """Name the slow imports of a recipe's run other than PyTorch and Atoll, without those of the user's code.

    Example:
        >>> from atoll.recipe.table import further_imports
        >>> further_imports({"data": {"source": "torchvision", "path": "CIFAR10"}})
        ['torchvision']
        >>> further_imports({"model": {"encoder": "resnet18"}})
        []
    """
    data, shift, model, train = (table.get(section, {}) for section in ("data", "shift", "model", "train"))
    encoder = str(model.get("encoder", ""))
    modules = {
        "torchvision": (
            data.get("source") == "torchvision"
            or shift.get("kinds")
            or encoder.startswith(("timm:", "hf:", "torchvision."))
            or model.get("lora_rank")  # by peft
        ),
        "torch._dynamo": train.get("compile") or train.get("checkpoint_gradients"),
    }
    return [name for name, needed in modules.items() if needed]


def complete_table(table: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """Merge a recipe's table over its ``base``, if any, and ``key=value`` settings over both.

    None resets a key or a section to its default. A path is read as text, a scalar of NumPy or PyTorch as a number.
    The folders of ``data.source = "clients"`` are the clients, unless ``partition.kind`` is given.

    Raises:
        UserError: A key is unknown, or a value has the wrong type or is out of range.
    """
    table = _plain(table)
    if "base" in table:
        table = over(read(str(table["base"]), presets()), {k: v for k, v in table.items() if k != "base"})
    changes = _plain(read_settings(settings))
    if "base" in changes:
        raise UserError(
            "base stands in a recipe's file alone; give the recipe that --set base names in its place"
        )
    schema = catalogue()["schema"]
    table = reset(over(table, changes), schema)
    _check_sections(table, schema["properties"])
    check(schema, table, "")
    if table.get("data", {}).get("source") == "clients":
        table = over({"partition": {"kind": "natural"}}, table)
    _check_method(table.get("method", {}), table.get("options", {}))
    return table


def _plain(value: Any, place: str = "", depth: int = 0) -> Any:
    """A value that Python code gives, in the types that a recipe's file has."""
    if depth > MOST_LEVELS:
        raise UserError(
            f"a recipe nests at most {MOST_LEVELS} levels deep, and this one is deeper; flatten it"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"a recipe has the key {key!r}; its keys are texts, such as 'train'")
        return {key: _plain(one, f"{place}.{key}" if place else key, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple | range) or len(getattr(value, "shape", ())) == 1:
        return [_plain(one, place, depth + 1) for one in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if isinstance(value, str | int | float | date | time | None):
        return value
    raise UserError(
        f"{place} is {short(value)}, and a recipe holds texts, numbers, lists and tables; name code of your own in "
        "a file as 'module:attribute', and give a network, images or a transform to simulate itself: encoder=…, "
        "data=…, transform=…"
    )


def _check_sections(table: Mapping[str, Any], known: Mapping[str, Schema]) -> None:
    """Refuse keys that belong to another section, and name that section."""
    for key, value in table.items():
        section, _, inner = key.partition(".")
        if section in known and inner:  # as --set writes it
            raise UserError(f"unknown key {key!r}; write {inner!r} in the table {section!r}")
        own = known.get(key, {}).get("properties", ())
        for inner in value if own and isinstance(value, Mapping) else ():
            if inner not in own and key != "options" and (places := places_of(inner, known)):
                raise UserError(
                    f"unknown key '{key}.{inner}'; did you mean {' or '.join(map(repr, places))}?"
                )


def _check_method(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check the method without importing its code; `atoll.methods.registry.make_method` checks the rest."""
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
