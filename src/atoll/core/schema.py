"""Valid values of options, stated once: annotations become a JSON schema, which `atoll.core.schema_check` reads.

    lr: Annotated[float, Above(0)] = 0.1

The annotations and the docstring of an options class determine its JSON schema (draft 2020-12), the messages about
invalid values, the option tables in the docs, and an editor's completion of recipes. Numbers must be finite unless
they are `Infinite`. Keywords that begin with ``x-`` are Atoll's own; other readers of the schema skip them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

Schema = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """A bound in an annotation.

    Attributes:
        limit: The bound.
        why: Explanation that an error adds if the bound is not obvious.
    """

    keyword: ClassVar[str]
    limit: Any
    why: str = ""

    def keywords(self) -> Schema:
        """The rule in a schema."""
        return {self.keyword: self.limit, **({"x-why": self.why} if self.why else {})}


class Above(Rule):
    """A number above the limit."""

    keyword = "exclusiveMinimum"


class AtLeast(Rule):
    """A number that is at least the limit."""

    keyword = "minimum"


class Below(Rule):
    """A number below the limit."""

    keyword = "exclusiveMaximum"


class AtMost(Rule):
    """A number that is at most the limit."""

    keyword = "maximum"


class MinLength(Rule):
    """A list with at least this number of values."""

    keyword = "minItems"


class OneOf(Rule):
    """One of these words, if they are known only at run time; otherwise use `typing.Literal`."""

    keyword = "enum"

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(tuple(words))


class OneOfOr(Rule):
    """One of these words, or a text with a colon, such as ``module:attribute``; errors name both forms."""

    keyword = "anyOf"

    def __init__(self, words: Iterable[str], forms: str) -> None:
        marked = {"type": "string", "pattern": ":", "description": forms}
        super().__init__((marked, {"enum": tuple(words)}))


class Rising(Rule):
    """A pair of numbers, low <= high."""

    keyword = "x-rising"

    def __init__(self) -> None:
        super().__init__(True)


class Infinite(Rule):
    """A number that may be infinite."""

    keyword = "x-infinite"

    def __init__(self) -> None:
        super().__init__(True)


Positive = Annotated[float, Above(0)]
Count = Annotated[int, Above(0)]
ImageSize = Annotated[int, Above(0), AtMost(8192)]  # pixels of a side
Whole = Annotated[int, AtLeast(0)]
Width = Annotated[int, Above(0), AtMost(65_536)]  # of a layer
Share = Annotated[float, Above(0), AtMost(1)]
Momentum = Annotated[float, AtLeast(0), AtMost(1)]  # of a moving average

MAPPINGS, SEQUENCES = (dict, Mapping), (list, Sequence)
_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def _schema_of(cls: type[Any]) -> Schema:
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = descriptions(cls)
    properties: Schema = {}
    required = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        found = schema_of_hint(hints[field.name])
        if field.name in meanings:
            found = {**found, "description": meanings[field.name]}
        if (value := default_of(field)) is dataclasses.MISSING:
            required.append(field.name)
        elif not dataclasses.is_dataclass(value):
            found = {**found, "default": list(value) if isinstance(value, tuple) else value}
        properties[field.name] = found
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


# The schema of a dataclass's table; it is shared, so it must not be changed.
schema_of: Callable[[Any], Schema] = cache(_schema_of)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def schema_of_hint(hint: Any) -> Schema:
    """The schema of values of a type; ``{}`` if JSON has no such type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rules = (rule.keywords() for rule in inner[1:] if isinstance(rule, Rule))
        return {key: value for found in (schema_of_hint(inner[0]), *rules) for key, value in found.items()}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of_hint(one) for one in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in MAPPINGS:
        return {"type": "object", "additionalProperties": schema_of_hint(inner[1])}
    if origin in SEQUENCES:
        return {"type": "array", "items": schema_of_hint(inner[0])}
    if origin is tuple and inner[-1] is not Ellipsis:
        items = [schema_of_hint(one) for one in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is tuple:
        return {"type": "array", "items": schema_of_hint(inner[0])}
    if dataclasses.is_dataclass(hint):
        return schema_of(typing.cast(type[Any], hint))
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def descriptions(cls: type) -> dict[str, str]:
    """The descriptions in the ``Attributes:`` of a class and its bases, by field, as Markdown."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nAttributes:\n")
        section = re.split(r"\n\n?(?=\S)", section)[0]  # up to the next section
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*|\n(?=\n     ))*)", section, re.MULTILINE):
            found[name] = _sentence(" ".join(text.replace("``", "`").split()))
    return found


def _sentence(text: str) -> str:
    word = text.partition(" ")[0].strip(".,;:'")
    symbol = not word.isascii() or "_" in word or (len(word) == 1 and word != "a")  # as in "τ of the target"
    return text if symbol else text[:1].upper() + text[1:]
