"""Recipes that a user does not trust yet: shown and counted, without importing the code that they name."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.cli.process import say

if TYPE_CHECKING:  # so that parsing arguments does not import PyTorch
    from atoll.recipe.recipe import Recipe


def add_run_code(parser: argparse.ArgumentParser) -> None:
    """Add the option that imports a recipe's code."""
    parser.add_argument(
        "--run-code", action="store_true", help="import the code that the recipe names; read it first"
    )


@contextlib.contextmanager
def unknown_recipe(options: argparse.Namespace) -> Iterator[Recipe]:
    """Load the recipe of a command; without ``--run-code``, list the code that it names without importing it."""
    from atoll.core.imports import code_words, nothing_imported
    from atoll.recipe.recipe import load_recipe

    if options.run_code:
        yield load_recipe(options.recipe, options.set)
        return
    with nothing_imported():
        recipe = load_recipe(options.recipe, options.set, own_code=False)
        if recipe.own_code:
            say(
                f"this recipe names code that is not Atoll's: {code_words(recipe.own_code)}; it was not imported, "
                "so what it does and what it sends is unknown; read it before you run the recipe or add --run-code"
            )
        yield recipe
