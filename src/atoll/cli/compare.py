"""Commands that train several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.cli.arguments import Commands, add_log, add_other_environment, add_restart, add_settings, path_of
from atoll.cli.process import say
from atoll.core.errors import UserError
from atoll.core.text import few

DEMO = ("digits-align-uniform", "digits-simclr", "digits-ssd")


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    _add_demo(commands)
    _add_compare(commands)
    _add_reproduce(commands)


def _add_demo(commands: Commands) -> None:
    demo = commands.add(
        _compare, "demo", "Train three methods on the same federated digits; takes about a minute."
    )
    demo.add_argument(
        "--out", type=path_of, default=Path("runs/demo"), help="folder of the runs (default: runs/demo)"
    )
    add_restart(demo)
    add_other_environment(demo)
    add_settings(demo)
    defaults = {"methods": [], "lines": False, "seeds": 1, "sweep": [], "log": []}
    demo.set_defaults(recipes=DEMO, **defaults)


def _add_compare(commands: Commands) -> None:
    compare = commands.add(
        _compare,
        "compare",
        "Run several recipes with several seeds; resumes automatically.",
        "digits-ssd digits-simclr --seeds 3",
        "digits --methods ssd l_dawa fedema --lines",
        "digits-ssd --sweep partition.alpha=0.1,1,100 train.epochs=1,5",
    )
    compare.add_argument("recipes", nargs="+", metavar="RECIPE", help="presets' names or TOML files")
    compare.add_argument("--seeds", type=int, default=1, help="seeds per recipe (default: 1)")
    compare.add_argument(
        "--out",
        type=path_of,
        default=Path("runs/compare"),
        help="folder of the runs (default: runs/compare)",
    )
    compare.add_argument(
        "--methods", nargs="+", default=[], metavar="NAME", help="run each recipe with each of these methods"
    )
    compare.add_argument(
        "--lines",
        action="store_true",
        help="add the baselines: each recipe centralised, and with local training only",
    )
    compare.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,…",
        help="every combination of these values: partition.alpha=0.1,1,100 …",
    )
    add_restart(compare)
    add_other_environment(compare)
    add_log(compare)
    add_settings(compare)


def _compare(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.compare import compare, load_recipes, other_runs, write_comparison
    from atoll.commands.progress import Bar
    from atoll.report.comparison import comparison_cells, comparison_table

    console = make_console()
    recipes = load_recipes(options.recipes, options.set, options.methods, options.lines, options.sweep)
    compared = compare(
        recipes,
        options.seeds,
        options.out,
        lambda title: Bar(console, title),
        options.log,
        options.restart,
        options.other_environment,
    )
    if compared.runs:
        table, report = write_comparison(compared, options.out)
        console.print(comparison_table(comparison_cells(compared.runs)))
        console.print(f"runs:   {options.out}\ntable:  {table}\nreport: {report}", highlight=False)
        if others := other_runs(compared, options.out):
            say(
                f"the report leaves out what else is in {options.out} ({few(others)}); "
                f"atoll report {options.out}/*/ -o all.html compares all of it"
            )
    for why in compared.failures.values():
        say(why)
    return 1 if compared.failures else 0


def _add_reproduce(commands: Commands) -> None:
    reproduce = commands.add(
        _reproduce,
        "reproduce",
        "Run a paper's table or figure and compare the results with the paper's; resumes automatically.",
        "--list",
        "ssd-3 --dry-run",
        "ssd-3 --scale cpu --seeds 3",
    )
    reproduce.add_argument(
        "table",
        nargs="?",
        metavar="TABLE",
        help="a table or figure, by name or TOML file (default: list them)",
    )
    reproduce.add_argument("--list", action="store_true", help="list the papers' tables and figures")
    reproduce.add_argument(
        "--dry-run", action="store_true", help="build the rows and show the runs without running them"
    )
    reproduce.add_argument(
        "--rows",
        nargs="+",
        default=[],
        metavar="ROW",
        help="rows to run, by name or pattern: 'cifar10-*' (default: all)",
    )
    reproduce.add_argument(
        "--scale",
        default="paper",
        metavar="NAME",
        help="paper (default); or, NOT the paper's setting: cpu (minutes per run on two cores), test (seconds)",
    )
    reproduce.add_argument("--seeds", type=int, default=1, help="seeds per row (default: 1)")
    reproduce.add_argument(
        "--out", type=path_of, help="folder of the runs (default: runs/TABLE, or runs/TABLE-SCALE)"
    )
    add_restart(reproduce)
    add_other_environment(reproduce)
    add_settings(reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.tables import listing, plan_table
    from atoll.commands.progress import Bar
    from atoll.commands.reproduce import dry_run, reproduce, require_built
    from atoll.papers.reproduction import find_table
    from atoll.report.reproduction import shown

    console = make_console()
    asked = (
        options.rows,
        options.set,
        options.dry_run,
        options.out,
        options.seeds > 1,
        options.scale != "paper",
    )
    if options.table is None and not options.list and any(asked):
        raise UserError("atoll reproduce needs a TABLE, before --set and --rows; --list shows the tables")
    if options.table is None or options.list:
        console.print(listing())
        return 0
    job = find_table(options.table, options.rows, options.set, options.seeds, options.out, options.scale)
    if options.dry_run:
        checks = dry_run(job, options.other_environment, options.restart)
        console.print(plan_table(job, checks))
        require_built(checks)
        return 0
    record = reproduce(job, lambda title: Bar(console, title), options.other_environment, options.restart)
    console.print(shown(record))
    places = {"table": "table.md", "figure": "figure.svg", "report": "report.html"}
    for what, name in places.items():
        if (job.out / name).is_file():
            console.print(f"{what + ':':<8}{job.out / name}", highlight=False)
    return 1 if record["failures"] else 0
