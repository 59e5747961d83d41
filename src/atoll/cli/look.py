"""Commands that show what a recipe will do, before it trains."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atoll.cli.arguments import Commands, add_recipe, add_settings, path_of
from atoll.cli.unknown import add_run_code, unknown_recipe


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    _add_data(commands)
    _add_egress(commands)
    _add_theory(commands)


def _add_data(commands: Commands) -> None:
    data = commands.add(
        _data, "data", "Show and draw a recipe's images, their partition and their shifts.", "digits-ssd"
    )
    add_recipe(data)
    data.add_argument(
        "-o", "--output", type=path_of, metavar="SVG", help="file of the picture (default: data-NAME.svg)"
    )
    add_run_code(data)
    add_settings(data)


def _data(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.tables import partition_table
    from atoll.commands.data import draw_clients, load_partition

    with unknown_recipe(options) as recipe:
        splits, partition = load_partition(recipe)
        console = make_console()
        console.print(partition_table(splits, partition))
        picture = options.output or Path(f"data-{recipe.name}.svg")
        draw_clients(recipe, splits, partition, picture)
    console.print(f"picture: {picture}", highlight=False)
    return 0


def _add_egress(commands: Commands) -> None:
    egress = commands.add(
        _egress,
        "egress",
        "List every tensor that leaves a client, before any training.",
        "digits-ssd --images 5000",
    )
    add_recipe(egress)
    egress.add_argument(
        "--images", type=int, default=1000, help="number of training images at the site (default: 1000)"
    )
    egress.add_argument("--json", action="store_true", help="print JSON")
    add_run_code(egress)
    add_settings(egress)


def _egress(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from atoll.cli.console import make_console
    from atoll.cli.tables import egress_tables
    from atoll.commands.egress import egress

    with unknown_recipe(options) as recipe:
        if recipe.own_code and not options.run_code:
            return 2
        found = egress(recipe, options.images)
    if options.json:
        print(json.dumps(asdict(found), indent=2))  # noqa: T201
        return 0
    console = make_console(160)  # a tensor's name stays on one line
    for block in egress_tables(found, recipe.composed, console.width):
        console.print(block)
    return 0


def _add_theory(commands: Commands) -> None:
    theory = commands.add(
        _theory,
        "theory",
        "Check Dec-SSL's theorem and proposition on random data; resumes automatically.",
        "--dims 100 300 --seeds 20",
    )
    theory.add_argument(
        "--dims", type=int, nargs="+", default=[100, 300], metavar="D", help="dimensions (default: 100 300)"
    )
    theory.add_argument("--seeds", type=int, default=20, help="seeds per dimension (default: 20)")
    theory.add_argument(
        "--samples",
        type=float,
        default=1.0,
        help="samples of each frequent class, in multiples of the dimension d (default: 1)",
    )
    theory.add_argument(
        "--out", type=path_of, default=Path("theory"), help="folder of theory.json and theory.svg"
    )


def _theory(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.tables import theory_table
    from atoll.commands.theory import TheorySettings, run_theory

    console = make_console()
    settings = TheorySettings(samples=options.samples)
    record = run_theory(options.dims, options.seeds, options.out, settings, console.print)
    console.print(theory_table(record["summary"]))
    out = options.out
    console.print(f"measurements: {out / 'theory.json'}\npicture:      {out / 'theory.svg'}", highlight=False)
    return 0
