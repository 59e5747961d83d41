"""The ``atoll`` command: parses arguments, calls a command, prints its result."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from atoll.cli.parser import LIGHT, make_parser
from atoll.cli.process import (
    Stopped,
    accept_any_text,
    drop_output,
    say,
    signals_as_interrupts,
    start_forking,
    warnings_as_sentences,
)
from atoll.core import processes
from atoll.core.errors import RunError, UserError
from atoll.core.files import is_full_disk
from atoll.core.memory import NO_MEMORY, is_out_of_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 for success, 1 for a failed run, 2 for a user's error, 130 for an interruption, 128 and its number for
        another signal.
    """
    accept_any_text()
    options = argparse.Namespace(command="")  # until they are parsed
    with signals_as_interrupts(), warnings_as_sentences():
        try:
            options = _parse(arguments)
            if "check" in options:
                options.check(options)
            recipes = _check_recipes(options)
            if arguments is None:  # called as a command; a program that calls it has its own objects
                processes.in_command = True
                _import(options, recipes)
            status = int(options.handler(options))
            sys.stdout.flush()
            return status
        except UserError as error:
            say(str(error))
            return 2
        except KeyboardInterrupt as stop:
            say(f"{str(stop) or 'interrupted'}{_resumable(options)}")
            return stop.exit_code if isinstance(stop, Stopped) else 130
        except RunError as error:
            say(str(error))
            return 1
        except BrokenPipeError:  # the reader of the output has ended, such as `head`
            drop_output()
            return 141  # like a command that SIGPIPE ends
        except OSError as error:
            if not is_full_disk(error):
                raise
            drop_output()
            say("the disk is full; free some space, then run the command again (of a run, with --resume)")
            return 2
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            say(NO_MEMORY)
            return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, or print a help and flush it, so that nothing is written when the interpreter ends."""
    try:
        return make_parser().parse_args(arguments)
    finally:
        sys.stdout.flush()


def _check_recipes(options: argparse.Namespace) -> Sequence[str]:
    """Check the recipes' keys and values before a command imports PyTorch, which takes seconds.

    Returns:
        Their names.
    """
    from atoll.recipe.table import read_table

    names: Sequence[str] = options.recipes if "recipes" in options else ()
    if "recipe" in options and options.recipe != "gpu":
        names = [options.recipe]
    for name in names:
        # With --methods, settings may belong to the replacing method.
        read_table(name, () if getattr(options, "methods", ()) else options.set)
    return names


def _import(options: argparse.Namespace, recipes: Sequence[str]) -> None:
    """Import the modules of a computing command, in this process and in the workers' fork server."""
    if options.command in LIGHT:
        return
    simulates = getattr(options, "engine", "simulation") == "simulation"
    estimates = getattr(options, "dry_run", False)
    if options.command in ("run", "compare", "demo") and simulates and not estimates:
        for recipe in recipes:
            start_forking(recipe, options.set)
    importlib.import_module("atoll.engines.preload")


def _resumable(options: argparse.Namespace) -> str:
    if getattr(options, "dry_run", False):
        return ""
    if options.command == "run":
        instead = "in place of --restart " if options.restart else ""
        return f"; repeat the command with --resume {instead}to continue from the last complete round"
    resumes = ("resume", "demo", "compare", "reproduce", "detect", "theory")
    return "; repeat the command to continue" if options.command in resumes else ""


if __name__ == "__main__":
    sys.exit(main())
