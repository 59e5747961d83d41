"""Commands that write files to start from, and list the recipes, methods and components of Atoll."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from atoll.cli.arguments import Commands, path_of
from atoll.core.errors import UserError


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    _add_new(commands)
    _add_presets(commands)
    _add_methods(commands)
    _add_components(commands)
    _add_schema(commands)
    _add_completion(commands)


def _add_new(commands: Commands) -> None:
    new = commands.add(
        _new,
        "new",
        "Write a commented recipe, method, or site's folder to start from.",
        "recipe my.toml --from digits-ssd",
        "method my_method.py",
        "site /srv/east",
    )
    new.add_argument("what", choices=("recipe", "method", "site"), help="what to write")
    new.add_argument(
        "path",
        type=path_of,
        metavar="PATH",
        help="the file to write; for a site, a folder with the site's name",
    )
    new.add_argument(
        "--from",
        dest="base",
        metavar="RECIPE",
        help="for a recipe: the recipe whose values it takes (default: digits-ssd)",
    )


def _new(options: argparse.Namespace) -> int:
    from atoll.commands.new import write_new, write_site

    if options.base and options.what != "recipe":
        raise UserError(
            f"--from names the recipe that a new recipe begins with; a new {options.what} has none"
        )
    if options.what == "site":
        folder = write_site(options.path)
        print(f"{folder}\nwhat to do: {folder / 'README.md'}")  # noqa: T201
        return 0
    path = write_new(options.what, options.path, options.base or "digits-ssd")
    how = (
        shlex.quote(str(path))
        if options.what == "recipe"
        else f"digits-ssd --set method.name={path.stem}:METHOD"
    )
    # A module is searched for in the working folder.
    there = (
        f"cd {shlex.quote(str(path.parent))} && "
        if options.what == "method" and path.parent != Path()
        else ""
    )
    print(f"{path}\nrun it: {there}atoll run {how}")  # noqa: T201
    return 0


def _add_presets(commands: Commands) -> None:
    commands.add(_presets, "presets", "List the recipes that Atoll includes.")


def _presets(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.listings import presets_table

    make_console().print(presets_table())
    return 0


def _add_methods(commands: Commands) -> None:
    methods = commands.add(_methods, "methods", "List methods: paper, what leaves a client, client state.")
    methods.add_argument("--json", action="store_true", help="print JSON")


def _methods(options: argparse.Namespace) -> int:
    from atoll.recipe.table import catalogue

    listing = catalogue()["methods"]
    if options.json:
        print(json.dumps(listing, indent=2))  # noqa: T201
        return 0
    from atoll.cli.console import make_console
    from atoll.cli.listings import methods_tables

    console = make_console()
    for table in methods_tables(listing):
        console.print(table, "")
    return 0


def _add_components(commands: Commands) -> None:
    commands.add(_components, "components", "List the components that methods are composed of.")


def _components(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.listings import components_table

    make_console().print(components_table())
    return 0


def _add_schema(commands: Commands) -> None:
    schema = commands.add(_schema, "schema", "Write the JSON schema of recipes, for editors.")
    schema.add_argument(
        "-o", "--output", type=path_of, metavar="FILE", help="file to write (default: print it)"
    )


def _schema(options: argparse.Namespace) -> int:
    from atoll.commands.schema import schema_text, write_schema

    if options.output is None:
        print(schema_text(), end="")  # noqa: T201
        return 0
    write_schema(options.output)
    print(options.output)  # noqa: T201
    return 0


def _add_completion(commands: Commands) -> None:
    script = commands.add(
        _completion,
        "completion",
        "Print a script that completes commands in a shell.",
        "bash > ~/.atoll-completion",
    )
    script.add_argument("shell", choices=("bash", "tcsh", "zsh"), help="the shell")


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(options.parser, options.shell))  # noqa: T201
    return 0
