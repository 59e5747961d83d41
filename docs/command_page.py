"""Build step of the documentation: the page of all commands, from the help of the ``atoll`` command itself."""

from __future__ import annotations

import argparse

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from atoll.cli.parser import GROUPS, make_parser

TOP = """# Commands

`atoll COMMAND --help` prints the same. Keys of a recipe, which `--set` replaces, are described with the
[recipes](recipes.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``commands.md``."""
    files.append(File.generated(config, "commands.md", content=page()))
    return files


def page() -> str:
    """Every command's help, by group."""
    commands = subcommands(make_parser())
    parts = [TOP]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            inner = subcommands(commands[name])
            described = {f"{name} {part}": parser for part, parser in inner.items()} or {name: commands[name]}
            for command, parser in described.items():
                parts.append(
                    f"### atoll {command}\n\n{parser.description}\n\n```text\n{help_of(parser)}```\n"
                )
    return "\n".join(parts)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name; none if it has no commands."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: inner for action in actions for name, inner in action.choices.items()}


def help_of(parser: argparse.ArgumentParser) -> str:
    """The help's text of fixed width, without the description."""
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=84)
    parser.description = None
    return parser.format_help()
