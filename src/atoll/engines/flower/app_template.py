"""The small folder that makes a recipe a Flower app: a ``pyproject.toml`` and the recipe, and no code.

Flower's ServerApp and ClientApp live in this package (`atoll.engines.flower`).
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w

from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.run_folder import default_folder
from atoll.engines.flower import require_flower
from atoll.recipe.recipe import Recipe

APP, RECIPE = "pyproject.toml", "recipe.toml"


def write_app(
    folder: Path, recipe: Recipe, sites: int = 0, out: Path | None = None, images: Path | None = None
) -> list[Path]:
    """Write a Flower app for a recipe.

    Args:
        folder: of the app; must not hold another.
        recipe: what to run.
        sites: real sites that take part; 0: nodes train shares of the recipe's own images, as in a simulation.
        out: the run's folder at the coordinator's; None: as for ``atoll run``. Not in the app's
            folder, which is packed and sent to every site.
        images: the coordinator's own images to evaluate on, a folder for each class; None: there are none.

    Returns:
        The files.

    Raises:
        UserError: Flower is not installed, or the folder already holds an app.
    """
    require_flower()
    for name in (APP, RECIPE):
        if (folder / name).exists():
            raise UserError(f"{folder} already holds a {name}; choose another folder, or remove it")
    if out is not None and out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--out {out} lies in the app's folder, which is sent to every site; choose another")
    if sites < 0:
        raise UserError(f"--sites is {sites}; it must be the number of sites, or 0")
    app = {
        "project": {
            "name": re.sub(r"[^a-z0-9-]+", "-", recipe.name.lower()).strip("-") or "atoll-run",
            "version": "1.0.0",
            "description": recipe.title or recipe.composed.title or "A federated run of Atoll",
            "license": "Apache-2.0",
            # Empty, so that Flower installs nothing by itself: Atoll is there where Flower runs it.
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "atoll",
                    "components": {
                        "serverapp": "atoll.commands.flower_server_app:app",
                        "clientapp": "atoll.engines.flower.client_app:app",
                    },
                    "config": {
                        "recipe": RECIPE,
                        "set": "",
                        "out": str((out or default_folder(recipe.name, recipe.seed)).resolve()),
                        "sites": sites,
                        "images": "" if images is None else str(images.resolve()),
                        "images-source": "folder",
                        "wait": 600.0,
                        "deadline": 3600.0,
                    },
                }
            }
        },
    }
    write_whole(folder / RECIPE, recipe.to_toml().encode())
    write_whole(folder / APP, tomli_w.dumps(app).encode())
    return [folder / APP, folder / RECIPE]
