"""Options: frozen dataclasses built from a recipe's tables, with a sentence for every mistake."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from atoll.core.errors import UserError, did_you_mean

T = TypeVar("T")


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from a table of its fields; nested dataclasses from nested tables.

    Args:
        cls: a dataclass whose fields are strings, numbers, booleans, literals, tuples, dicts, dataclasses or None.
        table: values by field name.
        where: the table's place in the recipe, for messages.

    Raises:
        UserError: an unknown key (the nearest known one is named) or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        place = f"{where}.{key}" if where else key
        if key not in known:
            raise UserError(f"unknown recipe key {place!r}; {did_you_mean(key, known)}")
        values[key] = _convert(known[key], value, place)
    return cls(**values)


def describe(options: Any) -> dict[str, Any]:
    """The table that `build` would make these options from; fields that are None are left out."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = describe(value)
        elif isinstance(value, tuple):
            table[field.name] = list(value)
        elif value is not None:
            table[field.name] = value
    return table


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return found


def _convert(hint: Any, value: Any, place: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        choices = [one for one in typing.get_args(hint) if one is not type(None)]
        for choice in choices[:-1]:
            try:
                return _convert(choice, value, place)
            except UserError:
                continue
        return _convert(choices[-1], value, place)
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            known = [str(one) for one in typing.get_args(hint)]
            raise UserError(f"{place} is {value!r}; {did_you_mean(str(value), known)}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, place)  # type: ignore[arg-type]
    if typing.get_origin(hint) is dict and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        return {str(key): _convert(inner, one, f"{place}.{key}") for key, one in value.items()}
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner, *rest = typing.get_args(hint)
        if rest and rest != [Ellipsis] and len(value) != 1 + len(rest):
            raise UserError(f"{place} needs {1 + len(rest)} values, and {value!r} has {len(value)}")
        return tuple(_convert(inner, one, place) for one in value)
    if typing.get_origin(hint) is tuple:
        raise UserError(f"{place} = {value!r} is not a list; {_as_list(hint, value, place)}")
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{place} = {value!r} is not {_WORDS.get(hint, 'what this key takes')}")


def _as_list(hint: Any, value: Any, place: str) -> str:
    """How to write a value as the list that it was meant to be, in a file and in a shell, which eats quotes."""
    words = [word.strip() for word in str(value).strip("[] ").split(",")]
    items = ", ".join(f'"{word}"' for word in words) if str in typing.get_args(hint) else ", ".join(words)
    return f"write {place} = [{items}] in a recipe, --set '{place}=[{items}]' in a shell"


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


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
    """A table laid over another, key by key and table by table.

    Example:
        >>> from atoll.core.config import over
        >>> over({"train": {"rounds": 20, "lr": 0.1}}, {"train": {"rounds": 50}})
        {'train': {'rounds': 50, 'lr': 0.1}}
    """
    merged = dict(base)
    for key, value in table.items():
        old = merged.get(key)
        merged[key] = over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def setting(text: str) -> dict[str, Any]:
    """The table that a ``key=value`` stands for; the value is TOML, and what is not valid TOML is a text.

    Raises:
        UserError: it is not of that form.

    Example:
        >>> from atoll.core.config import setting
        >>> setting("train.rounds=50")
        {'train': {'rounds': 50}}
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
