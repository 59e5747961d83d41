"""``atoll new``: writes a commented recipe, the file of a method or the folder of a site, to begin with."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.schema import Schema
from atoll.recipe.table import WORDS, catalogue, read_table

WIDTH = 100
SITE_FILES = ("README.md", "policy.toml", "start.sh", "atoll-site.service")


def write_new(what: str, path: Path, base: str = "digits-ssd") -> Path:
    """Write a file to begin with; an existing file is not replaced.

    Args:
        what: ``"recipe"`` or ``"method"``.
        path: The file.
        base: The recipe whose values a new recipe has.

    Raises:
        UserError: The file exists, its name does not fit, or the base does not exist.
    """
    suffix = {"recipe": ".toml", "method": ".py"}[what]
    if path.suffix != suffix:
        raise UserError(f"a {what} is a {suffix} file; call it {path.with_suffix(suffix)}")
    if path.exists():
        raise UserError(f"{path} exists; choose another name, or delete it")
    if what == "method" and not path.stem.isidentifier():
        raise UserError(f"{path.stem!r} is no name of a Python module; use letters, digits and _")
    if what == "recipe":
        text = recipe_text(base)
    else:
        text = (resources.files("atoll.commands") / "new_method.txt").read_text("utf-8")
        text = text.replace("MODULE", path.stem)
    write_whole(path, text.encode())
    return path


def write_site(folder: Path) -> Path:
    """Write the folder of a site: its policy, the script and the service that start its node, and what to do.

    Args:
        folder: The folder, which is new or empty; its name is the site's.

    Raises:
        UserError: The folder holds files, or its name or path does not fit.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; choose another name")
    if not re.fullmatch(r"\w[\w.-]{0,99}", folder.name):
        raise UserError(
            f"{folder.name!r} cannot be a site's name: use up to 100 letters, digits, '-', '_' and '.', "
            "and begin with a letter or a digit"
        )
    environment = str(Path(sys.executable).parent)
    if found := set('"$`\\\n') & set(f"{folder}{environment}"):
        raise UserError(f"{min(found)!r} in a path does not fit a script; choose a folder without it")
    words = {
        "UNIT_FOLDER": str(folder).replace("%", "%%"),
        "ENVIRONMENT": environment,
        "SITE": folder.name,
    }
    for name in SITE_FILES:
        text = (resources.files("atoll.commands") / "new_site" / name).read_text("utf-8")
        write_whole(folder / name, re.sub("|".join(words), lambda word: words[word[0]], text).encode())
    (folder / "start.sh").chmod(0o755)
    (folder / "state").mkdir(mode=0o700)
    return folder


def recipe_text(base: str) -> str:
    """A recipe with every option and its meaning; those with the default value are commented out.

    Example:
        >>> from atoll.commands.new import recipe_text
        >>> print(recipe_text("digits-ssd")[:44])
        # A recipe that begins with digits-ssd's val
    """
    table = read_table(base)
    schema = catalogue()["schema"]["properties"]
    top = {key: found for key, found in schema.items() if "properties" not in found and key != "base"}
    head = f"A recipe that begins with {base}'s values. A line that is commented out shows the default."
    lines = [
        *_comment(head),
        "",
        *_keys(top, {key: table[key] for key in top if key in table and key != "name"}),
    ]
    for name, section in schema.items():
        if name == "options" or "properties" not in section:
            continue
        lines += ["", f"[{name}]", *_keys(section["properties"], table.get(name, {}))]
    for name in _components(table):
        given = table.get("options", {}).get(name, {})
        known = schema["options"]["properties"].get(name, {}).get("properties")
        if known:
            lines += ["", f"[options.{name}]", *_keys(known, given)]
        elif given:  # a component of one's own, whose options no catalogue describes
            lines += ["", f"[options.{name}]", *(f"{key} = {_toml(value)}" for key, value in given.items())]
    return "\n".join(lines) + "\n"


def _components(table: Mapping[str, Any]) -> list[str]:
    """Names of the components of a recipe's method."""
    chosen = table.get("method", {})
    methods = {one["name"]: one for family in catalogue()["methods"].values() for one in family}
    default = catalogue()["schema"]["properties"]["method"]["properties"]["name"]["default"]
    method = methods.get(chosen.get("name", default), {})
    axes = (chosen.get(axis) or method.get(axis) or [] for axis in WORDS)
    names = [one for axis in axes for one in ([axis] if isinstance(axis, str) else axis)]
    return [*names, *(name for name in table.get("options", {}) if name not in names)]


def _keys(schema: Schema, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines of a section: what each key means, and its value."""
    for key, found in schema.items():
        if "properties" in found:
            yield from _keys(found["properties"], values.get(key, {}), f"{prefix}{key}.")
            continue
        yield from _comment(found.get("description", ""))
        default = found.get("default")
        value = values.get(key, default)
        text = "" if value is None else _toml(value)
        sign = "" if key in values and value is not None else "# "
        yield f"{sign}{prefix}{key} = {text}".rstrip()


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}" if value else "{}"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False)]
