"""Tables laid over tables: a TOML file over its base, single settings over a file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from atoll.errors import UserError, did_you_mean


def packaged(folder: str) -> dict[str, str]:
    """The TOML files in a folder of this package: their texts by name."""
    entries = sorted((resources.files("atoll") / folder).iterdir(), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".toml"): entry.read_text("utf-8")
        for entry in entries
        if entry.name.endswith(".toml")
    }


def read(
    name: str, known: Mapping[str, str], what: str = "recipe", kind: str = "preset", folder: Path = Path()
) -> dict[str, Any]:
    """A known text or a file as a table, laid over the base that it names.

    Args:
        name: of a known text, or a file.
        known: texts by name.
        what: such a table is, for messages.
        kind: what a known one is called.
        folder: where a file is looked for.

    Raises:
        UserError: neither a known name nor a file; not TOML; its own base.
    """
    return _read(name, known, what, kind, folder, ())


def _read(
    name: str, known: Mapping[str, str], what: str, kind: str, folder: Path, above: tuple[str, ...]
) -> dict[str, Any]:
    path = folder / name  # a file's base is looked for beside it
    if name in known:
        text, place, folder = known[name], f"{kind} {name}", Path()
    elif path.suffix == ".toml" or path.is_file():
        try:
            text, place, folder = path.read_text("utf-8-sig"), str(path), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the {what} {path}: {error}") from None
    else:
        raise UserError(f"no {what} {name!r}: neither a {kind} nor a .toml file; {did_you_mean(name, known)}")
    if place in above:
        raise UserError(f"{place} is its own base ({' → '.join([*above, place])}); end the circle")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{place} is not valid TOML: {error}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    return over(_read(str(base), known, what, kind, folder, (*above, place)), table)


def over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table laid over another, key by key and table by table."""
    merged = dict(base)
    for key, value in table.items():
        old = merged.get(key)
        merged[key] = over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def setting(text: str) -> dict[str, Any]:
    """The table that a ``key=value`` stands for; the value is TOML, and what is not valid TOML is a text.

    Raises:
        UserError: it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r} is not of the form key=value, such as train.rounds=20")
    try:
        table: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table = value.strip()
    for name in reversed(key.strip().split(".")):
        table = {name: table}
    return dict(table)
