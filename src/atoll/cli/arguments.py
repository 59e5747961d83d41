"""Shared parts of all commands' parsers: the form of the help, examples, completion, common arguments."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich_argparse import RawDescriptionRichHelpFormatter

from atoll.core.errors import did_you_mean

Handler = Callable[[argparse.Namespace], int]
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # shtab's words for a path


def path_of(text: str) -> Path:
    """A path from an argument."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("a path cannot be empty")
    return Path(text)


class HelpFormatter(RawDescriptionRichHelpFormatter):
    """Help in colour on a terminal; brackets in texts are not markup."""

    text_markup = False
    help_markup = False


class OverviewFormatter(HelpFormatter):
    """Help without the list of commands, which the description shows by group."""

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Leave the commands out."""
        super().add_arguments([action for action in actions if action.nargs != argparse.PARSER])


class Parser(argparse.ArgumentParser):
    """A parser that completes paths and recipes to files, and accepts no abbreviations.

    With abbreviations, ``--seed 3``, meant as ``--set seed=3``, would run three ``--seeds``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument."""
        action = super().add_argument(*names, **options)
        if options.get("type") is path_of or options.get("metavar") == "RECIPE":
            vars(action)["complete"] = FILES
        return action

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Refuse what this command does not know itself, with its usage; argparse leaves that to ``atoll``."""
        found, unknown = super().parse_known_args(*args, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._instead_of(unknown[0])}")
        return found, unknown

    def _instead_of(self, argument: str) -> str:
        """Say how to set a recipe's value that was given as an option, or name the nearest option."""
        settable = "--set" in self._option_string_actions
        if settable and re.match(r"[\w.]+=", argument):
            return "; values of a recipe stand behind --set"
        option = argument.partition("=")[0]
        if settable and option.startswith("--") and (places := _places(option.removeprefix("--"))):
            ways = " or ".join(f"--set {place}=VALUE" for place in places)
            return f"; a value of the recipe is set by {ways}"
        near = difflib.get_close_matches(option, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message; raise the errors of a full disk, which argparse ignores from Python 3.12 on."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the nearest choice, instead of listing all of them as argparse does."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is unknown; {did_you_mean(str(value), map(str, action.choices))}"
            )


def _places(option: str) -> list[str]:
    """Places of a name in a recipe."""
    from atoll.core.schema_check import places_of  # only after a mistake
    from atoll.recipe.table import catalogue

    return places_of(option.replace("-", "_"), catalogue()["schema"]["properties"])


class Commands:
    """The commands of a parser.

    Attributes:
        helps: One line about each command, by name.
    """

    def __init__(self, parser: argparse.ArgumentParser, prefix: str = "") -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND", prog=parser.prog)
        self._prefix = prefix
        self.helps: dict[str, str] = {}

    def add(self, handler: Handler, name: str, help: str, *examples: str) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            handler: Function that runs the command and returns the exit code.
            name: Its name.
            help: One line about it.
            *examples: Arguments of examples.
        """
        sub = self._parser(name, help, examples)
        sub.set_defaults(command=f"{self._prefix}{name}", handler=handler)
        return sub

    def add_group(self, name: str, help: str) -> Commands:
        """Add a command that has subcommands."""
        return Commands(self._parser(name, help, ()), f"{self._prefix}{name} ")

    def _parser(self, name: str, help: str, examples: Iterable[str]) -> argparse.ArgumentParser:
        self.helps[name] = help
        shown = "\n".join(f"  $ atoll {self._prefix}{name} {example}" for example in examples)
        return self._commands.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"Examples:\n{shown}" if shown else None,
            formatter_class=HelpFormatter,
        )


def add_log(sub: argparse.ArgumentParser) -> None:
    """Add the argument for logs of other tools."""
    sub.add_argument(
        "--log",
        nargs="+",
        action="extend",
        default=[],
        choices=("tensorboard", "wandb", "mlflow"),
        help="write each round's numbers for these tools",
    )


def add_restart(sub: argparse.ArgumentParser) -> None:
    """Add the permission to delete runs that cannot be continued."""
    sub.add_argument(
        "--restart",
        action="store_true",
        help="restart runs that cannot be continued, such as those of a method that has changed",
    )


def add_other_environment(sub: argparse.ArgumentParser, condition: str = "") -> None:
    """Add the permission to continue runs of another environment."""
    sub.add_argument(
        "--other-environment",
        action="store_true",
        help=f"{condition}continue on another kind of CPU or with other libraries; the weights will differ",
    )


def add_recipe(sub: argparse.ArgumentParser) -> None:
    """Add the recipe."""
    sub.add_argument("recipe", metavar="RECIPE", help="a preset's name or a TOML file")


def add_run(sub: argparse.ArgumentParser) -> None:
    """Add the folder of a run."""
    sub.add_argument("run", type=path_of, metavar="RUN", help="the folder of a run")


def add_settings(
    sub: argparse.ArgumentParser,
    help: str = "replace values of the recipe: train.rounds=20 …; KEY= resets one to its default",
    metavar: str = "KEY=VALUE",
) -> None:
    """Add ``--set``, which replaces values of a recipe or options."""
    sub.add_argument("--set", nargs="+", action="extend", default=[], metavar=metavar, help=help)
