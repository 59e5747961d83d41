"""The ``atoll`` command: parses arguments, calls a command, prints its result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from atoll.cli.parser import make_parser
from atoll.cli.process import (
    Stopped,
    accept_any_text,
    drop_output,
    is_out_of_memory,
    say,
    signals_as_interrupts,
    warnings_as_sentences,
)
from atoll.core.errors import RunError, UserError
from atoll.core.files import is_full_disk


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 for success, 1 for a failed run, 2 for a user's error, 130 for an interruption, 128 and its number for
        another signal.
    """
    accept_any_text()
    options = make_parser().parse_args(arguments)
    with signals_as_interrupts(), warnings_as_sentences():
        try:
            _check_recipes(options)
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
        except BrokenPipeError:  # whoever read the output has ended, as `head` does
            drop_output()
            return 141  # as a command that SIGPIPE ends
        except OSError as error:
            if not is_full_disk(error):
                raise
            drop_output()
            say("the disk is full; free some space, then run the command again (of a run, with --resume)")
            return 2
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            say("the memory does not suffice; choose smaller sizes, batches or images in the recipe")
            return 2


def _check_recipes(options: argparse.Namespace) -> None:
    """Check a recipe's keys and values before a command imports PyTorch, which takes seconds."""
    from atoll.recipe.table import read_table

    names = [options.recipe] if "recipe" in options and options.recipe != "gpu" else []
    if (
        "recipes" in options and not options.methods
    ):  # with --methods, settings may belong to the replacing method
        names = options.recipes
    for name in names:
        read_table(name, options.set)


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
