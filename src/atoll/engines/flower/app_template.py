"""Template of a Flower app: a folder with a ``pyproject.toml``, the recipe, and the user's code that this names.

The ServerApp and the ClientApp are part of Atoll (`atoll.engines.flower`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from atoll.core.config import describe
from atoll.core.errors import UserError, warn
from atoll.core.files import write_whole
from atoll.core.imports import python_files
from atoll.core.run_names import default_folder
from atoll.engines.flower import require_flower
from atoll.engines.flower.app_options import FlowerOptions
from atoll.recipe.recipe import Recipe

APP, RECIPE = "pyproject.toml", "recipe.toml"


def write_app(
    folder: Path,
    recipe: Recipe,
    sites: int = 0,
    out: Path | None = None,
    images: Path | None = None,
    keys: Path | None = None,
    log: Sequence[str] = (),
) -> str:
    """Write a Flower app for a recipe.

    Args:
        folder: The app's folder; it must not contain another app.
        recipe: The recipe to run.
        sites: Number of real sites; 0 if the nodes train shares of the recipe's images, as in a simulation.
        out: The run's folder at the coordinator; None for the default of ``atoll run``. It must not be in the app's
            folder, which is packed and sent to every site.
        images: Folder of the coordinator's images for evaluation, with a subfolder per class; None for none.
        keys: File that binds the sites' names to their keys; None for none.
        log: Tools that follow the run at the coordinator.

    Returns:
        The command that runs the app.

    Raises:
        UserError: Flower is not installed, the folder already contains an app, or ``keys`` binds fewer sites.
    """
    require_flower()
    own = python_files(recipe.own_code)
    code = {name: file for name, file in own.items() if (folder / name).resolve() != file.resolve()}
    for name in (APP, RECIPE, *code):
        if (folder / name).exists():
            raise UserError(f"{folder} already contains a {name}; choose another folder, or remove it")
    if out is not None and out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--out {out} is in the app's folder, which is sent to every site; choose another")
    if sites < 0:
        raise UserError(f"--sites is {sites}; it must be the number of sites, or 0")
    _check_coordinators_files(sites, images, keys)
    # A recipe that names code is completed where it runs, so that this command imports none.
    title = "" if recipe.own_code else recipe.composed.title
    text = tomli_w.dumps(describe(recipe)) if recipe.own_code else recipe.to_toml()
    options = FlowerOptions(
        recipe=RECIPE,
        out=str((out or default_folder(recipe.name, recipe.seed)).resolve()),
        sites=sites,
        images="" if images is None else str(images.resolve()),
        keys="" if keys is None else str(keys.resolve()),
        log=" ".join(log),
    )
    app = {
        "project": {
            "name": re.sub(r"[^a-z0-9-]+", "-", recipe.name.lower()).strip("-") or "atoll-run",
            "version": "1.0.0",
            "description": recipe.title or title or "A federated run of Atoll",
            "license": "Apache-2.0",
            # Empty, so that Flower installs nothing: Atoll is already installed where Flower runs it.
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
                    "config": options.config(),
                }
            }
        },
    }
    for name, file in code.items():
        write_whole(folder / name, file.read_bytes())
    write_whole(folder / RECIPE, text.encode())
    write_whole(folder / APP, tomli_w.dumps(app).encode())
    known = {"natural": "CLIENTS", "centralised": 1}
    clients = known.get(recipe.partition.kind, recipe.partition.clients)
    # Without its name, the run would go to the SuperLink of real sites, once that is Flower's default.
    nodes = "" if sites else f' local --federation-config "num-supernodes={clients}"'
    return f"flwr run {shlex.quote(str(folder))}{nodes} --stream"


def _check_coordinators_files(sites: int, images: Path | None, keys: Path | None) -> None:
    """Check the files that the coordinator reads when the run starts, which may be on another machine."""
    from atoll.engines.flower.known_sites import KnownSites  # it needs a library that comes with Flower

    if keys is not None and keys.exists():
        known = KnownSites.read(keys)
        allowed = len(known.keys) - len(known.revoked)
        if allowed < sites:
            raise UserError(
                f"{keys} allows {allowed} of {sites} sites (--sites); list the key of each site there"
            )
    for option, path in (("--keys", keys), ("--images", images)):
        if path is not None and not path.exists():
            warn(f"{option} {path} does not exist here; the coordinator needs it when the run starts")
