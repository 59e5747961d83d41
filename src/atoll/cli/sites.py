"""Commands for federations of real sites."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from atoll.cli.arguments import Commands, add_log, add_settings, path_of
from atoll.cli.unknown import add_run_code, unknown_recipe
from atoll.core.errors import UserError
from atoll.core.imports import python_files

if TYPE_CHECKING:
    from atoll.recipe.recipe import Recipe


SITE_IMAGES = 1000  # images at a site that a dry run assumes


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    federate = commands.add_group("federate", "Federations of real sites, over Flower.")
    init = federate.add(_init, "init", "Write the Flower app of a recipe.", "app --recipe my.toml --sites 4")
    init.add_argument("folder", type=path_of, metavar="DIR", help="folder of the app to write")
    init.add_argument("--recipe", required=True, metavar="RECIPE", help="a preset's name or a TOML file")
    init.add_argument(
        "--sites",
        type=int,
        default=0,
        help="number of real sites; 0 (default): nodes train shares of the recipe's images",
    )
    init.add_argument("--out", type=path_of, help="the run's folder (default: runs/NAME-seedN)")
    init.add_argument(
        "--images",
        type=path_of,
        help="folder of the coordinator's images for evaluation, a subfolder for each class",
    )
    init.add_argument(
        "--keys", type=path_of, help="the file sites.toml, which binds the sites' names to their keys"
    )
    init.add_argument(
        "--dry-run",
        action="store_true",
        help="time a few steps and print the run's estimated cost; write nothing",
    )
    init.add_argument(
        "--site-images",
        type=int,
        metavar="N",
        help=f"number of images at a site, for --dry-run (default: {SITE_IMAGES})",
    )
    add_run_code(init)
    add_log(init)
    add_settings(init)
    verify = "Verify the audit log of a coordinator or a site."
    audit = federate.add(_audit, "audit", verify, "runs/my-run-seed0")
    audit.add_argument(
        "log", type=path_of, metavar="LOG", help="an audit log, or the folder of a run that has one"
    )
    audit.add_argument(
        "--contains", nargs="+", default=[], metavar="HASH", help="hashes of lines that the log must contain"
    )


def _init(options: argparse.Namespace) -> int:
    from atoll.engines.flower.app_template import write_app

    if options.site_images is not None and not options.dry_run:
        raise UserError("--site-images is for --dry-run: a real site says itself how many images it has")
    with unknown_recipe(options) as recipe:
        if options.dry_run:
            return _estimate(recipe, options)
        start = write_app(
            options.folder, recipe, options.sites, options.out, options.images, options.keys, options.log
        )
    sent = "".join(f"code: {options.folder / name}\n" for name in python_files(recipe.own_code))
    print(f"app: {options.folder}\n{sent}run it: {start}")  # noqa: T201
    return 0


def _estimate(recipe: Recipe, options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.cost import estimate_at_sites

    if recipe.own_code and not options.run_code:
        return 2
    console = make_console()
    images = SITE_IMAGES if options.site_images is None else options.site_images
    for cost in estimate_at_sites(recipe, options.sites, images):
        console.print("\n".join(cost.site_lines(images)), highlight=False)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from atoll.commands.federate import verify_log

    print(verify_log(options.log, options.contains))  # noqa: T201
    return 0
