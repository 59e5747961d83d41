"""Prerequisites: runs that a method needs first, such as FedCA's alignment model; their recipes and results."""

from __future__ import annotations

from typing import Any

from atoll.components.base import Prerequisite, Trained
from atoll.core.checkpoints import checkpoint_files, load_checkpoint
from atoll.core.config import build, describe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.images import Pixels
from atoll.recipe.recipe import Recipe, load_recipe

FOLDER = "prerequisites"  # in the run's folder
INHERITED = ("seed", "views", "model", "train", "engine")


def prerequisite_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Derive the recipes of all runs that a recipe's method needs first, by name.

    Raises:
        UserError: One of them is not a valid recipe, or its networks differ from this run's.
    """
    return {name: _derive(recipe, name, wanted) for name, wanted in recipe.composed.prerequisites().items()}


def outcome(run: Run, images: Pixels) -> Trained:
    """Read the networks of a finished run, and attach the images on which they were trained."""
    again = f"delete {run.folder}, and the run trains it again"
    checkpoints = checkpoint_files(run.checkpoints)
    if not checkpoints:
        raise UserError(f"{run.folder} has no checkpoints; {again}")
    try:
        newest = load_checkpoint(checkpoints[max(checkpoints)], max(checkpoints))
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    (weights, *others) = newest["state"]["models"].values()
    if others:
        raise UserError(f"{run.folder} ends with several models, but one is needed; choose another recipe")
    return Trained(weights, images)


def _derive(recipe: Recipe, name: str, wanted: Prerequisite) -> Recipe:
    try:
        made = load_recipe(wanted.recipe) if wanted.recipe else build(Recipe, _table(recipe, name, wanted))
        _ = made.composed
    except UserError as error:
        raise UserError(f"the {name} run that this method needs first: {error}") from None
    for what, required, found in (
        ("[model] section", recipe.model, made.model),
        ("data.channels", recipe.data.channels, made.data.channels),
        ("image size", recipe.image_shape, made.image_shape),
        ("projector", recipe.composed.embeds, made.composed.embeds),
    ):
        if required != found:
            raise UserError(
                f"the {name} run that this method needs first must have this run's networks, and its {what} "
                f"differs; fix the recipe {wanted.recipe or made.name!r}"
            )
    if made.train.bn_buffers != "average" or made.composed.merge.personalises:
        raise UserError(
            f"the {name} run that this method needs first must end with one complete model, including BatchNorm's "
            f"statistics; set train.bn_buffers = 'average' and method.merge = 'replace' in the recipe "
            f"{wanted.recipe or made.name!r}"
        )
    return made


def _table(recipe: Recipe, name: str, wanted: Prerequisite) -> dict[str, Any]:
    whole = describe(recipe)
    table = {section: whole[section] for section in INHERITED}
    table["data"] = {key: whole["data"][key] for key in ("image_size", "channels")}
    for section, values in wanted.settings.items():
        table[section] = {**table.get(section, {}), **values}
    return {**table, "name": f"{recipe.name}-{name}"}
