"""Comparison of a recipe's values with a schema of `atoll.core.schema`, and messages about invalid ones."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import Schema

_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {  # in Python, in words, and how to write one
    "integer": ((int,), "a whole number", ""),
    "number": ((int, float), "a number", " as TOML writes it, such as 0.1"),
    "string": ((str,), "a text", "; put it in quotes"),
    "boolean": ((bool,), "true or false", ""),
    "null": ((type(None),), "unset", ""),
}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "exclusiveMinimum": ("above", lambda value, bound: value > bound),
    "minimum": ("at least", lambda value, bound: value >= bound),
    "exclusiveMaximum": ("below", lambda value, bound: value < bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
}


class WrongKindError(UserError):
    """Error in a value's kind, which says how to write it in a file and, at its end, in a shell.

    Attributes:
        in_file: The sentence for a file that no ``--set`` overrides.
    """

    def __init__(self, in_file: str, in_shell: str = "") -> None:
        super().__init__(in_file + in_shell)
        self.in_file = in_file


def check(schema: Schema, value: Any, place: str, whole: Sequence[Any] | None = None) -> None:
    """Compare a value with a schema.

    Args:
        schema: A schema from `schema_of`.
        value: A value of a recipe.
        place: The value's dotted place in the recipe; empty for the recipe itself.
        whole: The list at this place, if the value is one of its items.

    Raises:
        UserError: A key is unknown (the message names the nearest known one), or a value has the wrong type or is
            out of range.
    """
    if "anyOf" in schema:
        _check_any(schema["anyOf"], value, place, whole)
    elif "enum" in schema:
        _check_choice(schema["enum"], value, place, whole)
    elif schema.get("type") == "object":
        _check_table(schema, value, place)
    elif schema.get("type") == "array":
        _check_list(schema, value, place)
    elif "type" in schema:
        _check_scalar(schema, value, place, whole)


def _check_any(choices: Sequence[Schema], value: Any, place: str, whole: Sequence[Any] | None) -> None:
    if value is None and {"type": "null"} in choices:
        return
    *others, last = [one for one in choices if one != {"type": "null"}]
    for choice in others:
        if "pattern" in choice and not (isinstance(value, str) and re.search(choice["pattern"], value)):
            continue
        with contextlib.suppress(UserError):
            check(choice, value, place, whole)
            return
    lists = [one for one in others if one.get("type") == "array" and isinstance(value, list | tuple)]
    # A whole number that no choice took is out of the range of one.
    lists += [one for one in others if one.get("type") == "integer" and type(value) is int]
    if forms := [one["description"] for one in others if "pattern" in one]:
        _check_choice(last["enum"], value, place, whole, f" (others are {forms[0]})")
    elif lists or not others or "enum" not in last:
        check((lists or [last])[0], value, place, whole)
    elif not _among(value, last["enum"]):
        raise UserError(f"{place} = {value!r} is not {' or '.join(map(_noun, (*others, last)))}")


def _noun(schema: Schema) -> str:
    """Describe a value of a schema in words."""
    if "enum" in schema:
        return " or ".join(f'"{word}"' for word in schema["enum"])
    return "a list" if schema.get("type") == "array" else _KINDS.get(schema.get("type", ""), ((), "", ""))[1]


def _among(value: Any, known: Sequence[Any]) -> bool:
    """Whether a value is one of the known ones; true and false are not 1 and 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def _check_choice(
    known: Sequence[Any], value: Any, place: str, whole: Sequence[Any] | None, others: str = ""
) -> None:
    if not _among(value, known):
        verb = "is" if whole is None else "names"
        raise UserError(f"{place} {verb} {value!r}; {did_you_mean(str(value), map(str, known))}{others}")


def _check_table(schema: Schema, value: Any, place: str) -> None:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    if not isinstance(value, Mapping):
        example = f"; set keys of it, such as {place}.{next(iter(known))}" if known else ""
        raise UserError(f"{place} = {value!r} is not a table{example}")
    for key, one in value.items():
        inner = f"{place}.{key}" if place else str(key)
        if key not in known and others is False:
            raise UserError(f"unknown key {inner!r}; {_nearest_key(known, str(key), place)}")
        check(known.get(key, others), one, inner)
    for key in schema.get("required", ()):
        if key not in value:
            raise UserError(f"{f'{place}.{key}' if place else key} is missing; give it a value")


def places_of(key: str, known: Mapping[str, Schema]) -> list[str]:
    """Dotted places of the values with a key: in a table with the known keys, and in the tables within it."""
    within = [f"{table}.{key}" for table, schema in known.items() if key in schema.get("properties", {})]
    return [key, *within] if key in known and "properties" not in known[key] else within


def _nearest_key(known: Mapping[str, Schema], key: str, place: str) -> str:
    """Suggest a key of the table itself, or one of that name in a table within it."""
    before = f"{place}." if place else ""
    if within := places_of(key, known):
        return f"did you mean {' or '.join(repr(before + one) for one in within)}?"
    return did_you_mean(key, known, before)


def _check_list(schema: Schema, value: Any, place: str) -> None:
    if not isinstance(value, list | tuple):
        written = _as_list(schema, value)
        raise WrongKindError(
            f"{place} = {value!r} is not a list; write {place} = {written}",
            f" in a file, --set '{place}={written}' in a shell",
        )
    items = schema.get("prefixItems")
    if items and len(value) != len(items):
        raise UserError(f"{place} needs {len(items)} values, and {value!r} has {len(value)}")
    if len(value) < schema.get("minItems", 0):
        raise UserError(f"{place} is {list(value)}; it must be {words(schema)}")
    try:
        for item, one in zip(items or [schema["items"]] * len(value), value, strict=True):
            check(item, one, place, value)
        if schema.get("x-rising") and not value[0] <= value[1]:
            raise UserError
    except UserError:
        if "x-rising" not in schema:
            raise
        raise UserError(f"{place} is {list(value)}; it must be {words(schema)}") from None


def _check_scalar(schema: Schema, value: Any, place: str, whole: Sequence[Any] | None) -> None:
    kind = schema["type"]
    python, noun, how = _KINDS[kind]
    if not isinstance(value, python) or (isinstance(value, bool) and kind != "boolean"):
        shell = " (in a shell: --set 'KEY=\"VALUE\"')" if kind == "string" else ""
        raise WrongKindError(f"{place} = {value!r} is not {noun}{how}", shell)
    if isinstance(value, int) and not -(2**63) < value < 2**63:
        raise UserError(f"{place} has too many digits; choose a number below 2**63")
    holds = all(test(value, schema[key]) for key, (_, test) in _BOUNDS.items() if key in schema)
    finite = not isinstance(value, float) or math.isfinite(value)
    if not holds or not (finite or (schema.get("x-infinite") and value == math.inf)):
        shown, each = (value, "it") if whole is None else (list(whole), "each")
        must = words(schema) if finite else f"a finite number {words(schema)}".rstrip()
        raise UserError(f"{place} is {shown}; {each} must be {must}")


def words(schema: Schema) -> str:
    """A schema's bounds in words: ``"above 0 and at most 1"``; empty if it has none."""
    if "x-rising" in schema:
        low, high = schema["prefixItems"]
        least = f"{low['exclusiveMinimum']} < " if "exclusiveMinimum" in low else ""
        return f"two numbers, {least}low <= high" + (f" <= {high['maximum']}" if "maximum" in high else "")
    if schema.get("type") == "array" and "prefixItems" not in schema and "minItems" in schema:
        return f"a list of at least {schema['minItems']}"
    if "minimum" in schema and "maximum" in schema:
        said = f"between {schema['minimum']} and {schema['maximum']}"
    else:
        said = " and ".join(f"{word} {schema[key]}" for key, (word, _) in _BOUNDS.items() if key in schema)
    return f"{said} ({schema['x-why']})" if "x-why" in schema else said


def _as_list(schema: Schema, value: Any) -> str:
    """How to write a value as the intended list."""
    parts = [word.strip() for word in str(value).strip("[] ").split(",")]
    item = schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]
    texts = item.get("type") == "string" or "enum" in item or "anyOf" in item
    items = ", ".join(f'"{word}"' for word in parts) if texts else ", ".join(parts)
    return f"[{items}]"
