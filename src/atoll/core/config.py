"""Options: frozen dataclasses built from a recipe's tables, with a sentence for every mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from atoll.core.digests import TOML, DamagedError, open_text
from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import MAPPINGS, SEQUENCES, Schema, schema_of, schema_of_hint
from atoll.core.schema_check import WrongKindError, check

T = TypeVar("T")


class Options:
    """Base of options classes: values are checked against their annotations, however an instance is made.

    A subclass whose fields depend on each other checks this in its ``__post_init__``, after the one here. Lists are
    converted to tuples for tuple fields, and whole numbers to floats for float fields.
    """

    _section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        """Give a class its place in a recipe."""
        super().__init_subclass__()
        if section is not None:
            cls._section = section

    @classmethod
    def _place(cls) -> str:
        """The options' table in a recipe, for messages."""
        return cls._section

    def __post_init__(self) -> None:
        """Check all fields.

        Raises:
            UserError: A value has the wrong type or is out of range.
        """
        cls = type(self)
        hints, known, defaults = _hints(cls), schema_of(cls)["properties"], _valid_defaults(cls)
        for name, schema in known.items():
            value = getattr(self, name)
            # A default has been checked for all instances, and a dataclass has checked itself.
            if value is defaults.get(name, dataclasses.MISSING) or dataclasses.is_dataclass(value):
                continue
            value, place = _described(value), f"{self._place()}.{name}".lstrip(".")
            check(schema, value, place)
            object.__setattr__(self, name, _convert(hints[name], value, place))


def build(cls: type[T], table: Mapping[str, Any], where: str | None = None, file: Path | None = None) -> T:
    """Build a dataclass from a table of its fields, and nested dataclasses from nested tables.

    Args:
        cls: A dataclass whose fields are strings, numbers, booleans, literals, tuples, dicts, dataclasses or None;
            they may have the bounds of `atoll.core.schema`.
        table: Values by field name.
        where: Place of the table in the recipe, for messages; None for the section of a class of `Options`.
        file: The file that holds the table, which messages name, and no ``--set`` overrides; None for a recipe.

    Raises:
        UserError: A key is unknown (the message names the nearest known one), or a value has the wrong type or is
            out of range.
    """
    if where is None:
        where = cls._place() if issubclass(cls, Options) else ""
    try:
        check(schema_of(cls), table, where)
        return _made(cls, table, where)
    except UserError as error:
        if file is None:
            raise
        sentence = error.in_file if isinstance(error, WrongKindError) else error
        raise UserError(f"{file}: {sentence}") from None


def _made(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    hints = _hints(cls)
    places = {key: f"{where}.{key}" if where else key for key in table}
    values = {key: _convert(hints[key], value, places[key]) for key, value in table.items()}
    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as error:  # of a __post_init__ of the user's
        raise UserError(f"{where}: {error}" if where else str(error)) from error


def rebuild(options: T, table: Mapping[str, Any], where: str) -> T:
    """Build options again, with the values of a table over theirs, key by key; None leaves theirs."""
    cls = type(options)
    return build(cls, over(describe(options), reset(table, schema_of(cls))), where)


_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)


def _find_valid_defaults(cls: Any) -> dict[str, Any]:
    hints, known = _hints(cls), schema_of(cls)["properties"]
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING or not field.init or dataclasses.is_dataclass(field.default):
            continue
        value = _described(field.default)
        with contextlib.suppress(UserError):
            check(known[field.name], value, field.name)
            if repr(_convert(hints[field.name], value, field.name)) == repr(field.default):
                found[field.name] = field.default
    return found


# The defaults of a class's fields that are valid and that conversion does not change.
_valid_defaults: Callable[[Any], dict[str, Any]] = cache(_find_valid_defaults)


def describe(options: Any) -> dict[str, Any]:
    """Return the table from which `build` would make these options, without fields that are None."""
    fields = [field.name for field in dataclasses.fields(options) if field.init]
    values = {name: _described(getattr(options, name)) for name in fields}
    return {name: value for name, value in values.items() if value is not None}


def _described(value: Any) -> Any:
    """A value with tables in place of dataclasses, and lists in place of tuples."""
    if dataclasses.is_dataclass(value):
        return describe(value)
    if isinstance(value, list | tuple):
        return [_described(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _described(one) for key, one in value.items()}
    return value


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested tables to one table with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return found


def _convert(hint: Any, value: Any, place: str) -> Any:
    """Convert a checked value to the type of its field."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert(next((one for one in inner if _fits(one, value)), inner[0]), value, place)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _made(typing.cast(type, hint), value, place)
    if origin in MAPPINGS:
        return {str(key): _convert(inner[1], one, f"{place}.{key}") for key, one in value.items()}
    if origin in SEQUENCES:
        return [_convert(inner[0], one, place) for one in value]
    if hint is tuple and isinstance(value, list):
        return tuple(value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_convert(kind, one, place) for kind, one in zip(kinds, value, strict=True))
    if not _is_of_type(hint, value):  # the schemas know TOML's types only
        raise UserError(
            f"{place} = {value!r} is no {hint.__name__}, which a recipe cannot hold; let the option be a text, a "
            "number, true or false, or a list or table of these"
        )
    return float(value) if hint is float else value


def _fits(hint: Any, value: Any) -> bool:
    try:
        check(schema_of_hint(hint), value, "")
    except UserError:
        return False
    return _is_of_type(hint, value)


def _is_of_type(hint: Any, value: Any) -> bool:
    """Whether a value has the type of a hint, if the hint is a class; a whole number is a float, too."""
    if hint is Any or not isinstance(hint, type) or dataclasses.is_dataclass(hint):
        return True
    return isinstance(value, (int, float) if hint is float else hint)


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
    """Read a known text or a file as a table; it overrides the base that it names.

    Args:
        name: Name of a known text, or a file.
        known: Known texts by name.
        what: Description of such a table, for messages.
        kind: Word for a known text, for messages.
        folder: Folder in which a file is searched for.

    Raises:
        UserError: There is neither a known text nor a file of this name, it is not valid TOML, or it is its own
            base.
    """
    return _read(name, known, what, kind, folder, ())


def _read(
    name: str, known: Mapping[str, str], what: str, kind: str, folder: Path, above: tuple[str, ...]
) -> dict[str, Any]:
    path = folder / name  # a file's base is searched for in the file's folder
    based = f", the base of {above[-1]}" if above else ""
    if name in known:
        text, place, folder = known[name], f"{kind} {name}", Path()
    elif path.suffix == ".toml" or path.is_file():
        path = path.resolve() if ".." in path.parts else path  # to detect a cycle over several folders
        try:
            text, place, folder = _text(path), str(path), path.parent
        except FileNotFoundError:
            raise UserError(f"there is no {what} {path}{based}") from None
        except UnicodeDecodeError:
            raise UserError(f"the {what} {path} is not UTF-8, as TOML is; save it in this encoding") from None
        except (OSError, DamagedError) as error:
            raise UserError(f"cannot read the {what} {path}: {error}") from None
    else:
        if (inside := path / f"{what}.toml").is_file():
            raise UserError(f"{name} is a folder; give the {what} in it: {inside}")
        raise UserError(
            f"no {what} {name!r}{based}: neither a {kind} nor a .toml file; {did_you_mean(name, known)}"
        )
    if place in above:
        raise UserError(f"{place} is its own base ({' → '.join([*above, place])}); end the circle")
    table = parse_toml(text, place)
    base = table.pop("base", None)
    if base is None:
        return table
    return over(_read(str(base), known, what, kind, folder, (*above, place)), table)


def parse_toml(data: str | bytes, place: str) -> dict[str, Any]:
    """Parse TOML from another source.

    Args:
        data: The text, or the bytes of a file.
        place: Source of the data, for the message.

    Raises:
        UserError: The data are not valid TOML.
    """
    try:
        return tomllib.loads(data if isinstance(data, str) else data.decode())
    except (ValueError, RecursionError) as error:
        why = "it nests too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{place} is not valid TOML: {why}") from None


def read_text_table(path: Path) -> dict[str, Any]:
    """A TOML file as a table, without its base; the file has been read before (`read`)."""
    return tomllib.loads(_text(path))


def _text(path: Path) -> str:
    data = path.read_bytes()
    if re.match(rb"# digest [0-9a-f]{8}\n", data):  # the recipe of a run
        try:
            data, _ = open_text(data, TOML)
        except DamagedError:
            raise DamagedError(
                "it differs from what Atoll wrote; if you changed it on purpose, delete its first line"
            ) from None
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Override a table with another, key by key and table by table.

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


def reset(table: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Leave out the known keys whose value is None, which have their defaults then."""
    known = schema.get("properties", {})
    any_key = isinstance(schema.get("additionalProperties"), Mapping)
    kept = {key: value for key, value in table.items() if value is not None or not (key in known or any_key)}
    return {
        key: reset(value, known.get(key, {})) if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the table that ``key=value`` settings describe; later settings override earlier ones.

    Values are TOML; a value that is not valid TOML is a text. An empty value is None, which TOML cannot express.

    Raises:
        UserError: A setting does not have this form.

    Example:
        >>> from atoll.core.config import read_settings
        >>> read_settings(["train.rounds=50", "train.optimizer=adam", "data.limit="])
        {'train': {'rounds': 50, 'optimizer': 'adam'}, 'data': {'limit': None}}
    """
    table: dict[str, Any] = {}
    for text in settings:
        table = over(table, _setting(text))
    return table


def _setting(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text!r} is not of the form key=value, such as train.rounds=20")
    try:
        parsed: dict[str, Any] = tomllib.loads(f"value = {value}") if value.strip() else {"value": None}
    except ValueError:
        parsed = {"value": value.strip()}
    except RecursionError:
        raise UserError(f"--set {key.strip()}: the value nests too deeply") from None
    if len(parsed) > 1:
        raise UserError(f"--set {key.strip()}: another key follows in the same text; give it one of its own")
    table: Any = parsed["value"]
    for name in reversed(key.strip().split(".")):
        table = {name: table}
    return dict(table)
