"""``atoll federate``: federations of real sites, over Flower."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.flower.app_template import write_app
from atoll.recipe.recipe import Recipe


def init_app(
    folder: Path, recipe: Recipe, sites: int = 0, out: Path | None = None, images: Path | None = None
) -> str:
    """Write the Flower app of a recipe; see `write_app` for the arguments.

    Returns:
        The command that runs the app.
    """
    write_app(folder, recipe, sites, out, images)
    clients = "CLIENTS" if recipe.partition.kind == "natural" else recipe.partition.clients
    nodes = "" if sites else f' --federation-config "num-supernodes={clients}"'
    return f"flwr run {folder}{nodes} --stream"
