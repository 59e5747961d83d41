"""The ``atoll`` command: parse, call, print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from atoll.core.errors import RunError, UserError
from atoll.core.version import VERSION

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 done, 1 our fault, 2 the user's mistake, 130 interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        command: Command = options.command
        return command(options)
    except UserError as error:
        print(f"atoll: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"atoll: interrupted{_resumable(options)}", file=sys.stderr)  # noqa: T201
        return 130
    except RunError as error:
        print(f"atoll: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _resumable(options: argparse.Namespace) -> str:
    return (
        "; the same command with --resume goes on from the last complete round" if "resume" in options else ""
    )


def _run(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.commands.run import run_recipe
    from atoll.recipe.recipe import load_recipe
    from atoll.report import write_report
    from atoll.report.comparison import comparison_cells, comparison_table

    console = make_console()
    recipe = load_recipe(options.recipe, options.set)
    bar = Bar(console, recipe.composed.title or recipe.name)
    try:
        run = run_recipe(recipe, options.out, options.resume, bar)
    finally:
        bar.stop()
    report = write_report([run.folder], run.folder / "report.html")
    console.print(comparison_table(comparison_cells([run])))
    console.print(f"run:    {run.folder}\nreport: {report}", highlight=False)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.commands.compare import by_method, compare, counterparts, of_methods
    from atoll.core.files import write_whole
    from atoll.recipe.recipe import load_recipe
    from atoll.report import write_report
    from atoll.report.comparison import comparison_cells, comparison_markdown, comparison_table

    console = make_console()
    theirs = [text for text in options.set if options.methods and of_methods(text)]
    recipes = [
        load_recipe(name, [text for text in options.set if text not in theirs]) for name in options.recipes
    ]
    if options.methods:
        recipes = [one for recipe in recipes for one in by_method(recipe, options.methods, theirs)]
    if options.lines:
        recipes += counterparts(recipes)
    compared = compare(recipes, options.seeds, options.out, lambda title: Bar(console, title))
    if compared.runs:
        failures = compared.failures.values()
        report = write_report([run.folder for run in compared.runs], options.out / "report.html", failures)
        table, cells = options.out / "table.md", comparison_cells(compared.runs)
        write_whole(table, comparison_markdown(cells, failures).encode())
        console.print(comparison_table(cells))
        console.print(f"runs:   {options.out}\ntable:  {table}\nreport: {report}", highlight=False)
    for why in compared.failures.values():
        print(f"atoll: {why}", file=sys.stderr)  # noqa: T201
    return 1 if compared.failures else 0


def _demo(options: argparse.Namespace) -> int:
    from atoll.commands.compare import DEMO

    options.recipes, options.methods, options.lines, options.seeds = list(DEMO), [], False, 1
    return _compare(options)


def _reproduce(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.cli.tables import listing, plan_table
    from atoll.commands.reproduce import find_table, reproduce
    from atoll.report.reproduction import shown

    console = make_console()
    if options.table is None:
        console.print(listing())
        return 0
    job = find_table(options.table, options.rows, options.set, options.seeds, options.out)
    if options.dry_run:
        console.print(plan_table(job))
        return 0
    record = reproduce(job, lambda title: Bar(console, title))
    console.print(shown(record))
    console.print(f"table:  {job.out / 'table.md'}\nreport: {job.out / 'report.html'}", highlight=False)
    return 1 if record["failures"] else 0


def _data(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.tables import partition_table
    from atoll.data.partition.partition import partition_images
    from atoll.data.sources import load_data
    from atoll.recipe.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    splits = load_data(recipe.data, recipe.seed)
    partition = partition_images(splits.train, recipe.partition, recipe.seed)
    make_console().print(partition_table(splits, partition))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.evaluate import evaluate_run
    from atoll.core.run_folder import Run

    results = evaluate_run(Run(options.run).require(), options.protocol, options.set)
    table = Table(show_header=False, show_edge=False)
    for key, value in results.items():
        if not isinstance(value, list):
            table.add_row(key, f"{value:.4f}" if isinstance(value, float) else str(value))
    make_console().print(table)
    return 0


def _embed(options: argparse.Namespace) -> int:
    from atoll.commands.embed import embed_images, save_embeddings
    from atoll.commands.evaluate import find_encoder
    from atoll.models import load_encoder

    names, h = embed_images(load_encoder(find_encoder(options.encoder)), options.images)
    save_embeddings(options.output, names, h)
    print(f"{len(names)} images, {h.shape[1]} dimensions: {options.output}")  # noqa: T201
    return 0


def _export(options: argparse.Namespace) -> int:
    from atoll.commands.evaluate import find_encoder
    from atoll.commands.export import export
    from atoll.models import load_encoder

    path = find_encoder(options.run)
    output = options.output or path.with_name(f"encoder-export.{options.format}")
    export(load_encoder(path), output, options.format)
    print(output)  # noqa: T201
    return 0


def _report(options: argparse.Namespace) -> int:
    from atoll.core.run_folder import Run
    from atoll.report import write_report

    folders = [Run(run).require().folder for run in options.runs]
    page = options.output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if len(folders) > 1 and not options.output and page.exists():
        raise UserError(f"{page} is here already, maybe another run's own; name the page with -o FILE")
    print(write_report(folders, page))  # noqa: T201
    return 0


def _bench(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.bench import recommend
    from atoll.recipe.recipe import load_recipe

    make_console().print(recommend(load_recipe(options.recipe, options.set)))
    return 0


def _egress(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from atoll.cli.console import make_console
    from atoll.cli.tables import egress_tables
    from atoll.commands.egress import egress
    from atoll.recipe.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    found = egress(recipe, options.images)
    if options.json:
        print(json.dumps(asdict(found), indent=2))  # noqa: T201
        return 0
    console = make_console(160)  # a tensor's name stays on one line
    for block in egress_tables(found, recipe.composed):
        console.print(block)
    return 0


def _federate_init(options: argparse.Namespace) -> int:
    from atoll.engines.flower.app_template import write_app
    from atoll.recipe.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    write_app(options.folder, recipe, options.sites, options.out, options.images)
    partition = recipe.partition
    clients = "CLIENTS" if partition.kind == "natural" else partition.clients
    nodes = "" if options.sites else f' --federation-config "num-supernodes={clients}"'
    print(f"app: {options.folder}\nrun it: flwr run {options.folder}{nodes} --stream")  # noqa: T201
    return 0


def _methods(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.methods.registry import list_methods

    listing = list_methods()
    if options.json:
        print(json.dumps(listing, indent=2))  # noqa: T201
        return 0
    console = make_console()
    for family, methods in listing.items():
        table = Table(title=family, title_justify="left", show_edge=False, pad_edge=False)
        for heading in ("name", "method", "paper", "leaves the client beyond weights", "the client keeps"):
            table.add_column(heading, overflow="fold")
        for method in methods:
            cells = ["name", "title", "paper", "egress", "keeps"]
            table.add_row(*(_cell(method[cell]) for cell in cells))
        console.print(table, "")
    return 0


def _cell(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="atoll", description="Federated self-supervised representation learning."
    )
    parser.add_argument("--version", action="version", version=f"atoll {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Command, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=call)
        return sub

    def settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="train.rounds=20 …"
        )

    run = command("run", _run, "Run a recipe: a preset's name or a TOML file.")
    run.add_argument("recipe", metavar="RECIPE")
    run.add_argument("--out", type=Path, help="the run's folder (default: runs/NAME-seedN)")
    run.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    settings(run)

    demo = command("demo", _demo, "Train three methods on the same federated digits; takes minutes.")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"))
    settings(demo)

    compare = command("compare", _compare, "Run several recipes over several seeds; resumes by itself.")
    compare.add_argument("recipes", nargs="+", metavar="RECIPE")
    compare.add_argument("--seeds", type=int, default=1, help="seeds a recipe (default: 1)")
    compare.add_argument("--out", type=Path, default=Path("runs/compare"))
    compare.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="in each recipe's place")
    compare.add_argument(
        "--lines", action="store_true", help="add the centralised and the local-only counterparts"
    )
    settings(compare)

    reproduce = command(
        "reproduce", _reproduce, "Run a paper's table and print its numbers beside ours; resumes by itself."
    )
    reproduce.add_argument(
        "table", nargs="?", metavar="TABLE", help="a name or a TOML file; none: lists them"
    )
    reproduce.add_argument("--dry-run", action="store_true", help="show the runs and run none")
    reproduce.add_argument(
        "--rows", nargs="+", default=[], metavar="ROW", help="names or patterns: 'cifar10-*'"
    )
    reproduce.add_argument("--seeds", type=int, default=1, help="seeds a row (default: 1)")
    reproduce.add_argument("--out", type=Path, help="folder of the runs (default: runs/TABLE)")
    settings(reproduce)

    data = command("data", _data, "Look at a recipe's images and at which client holds which.")
    data.add_argument("recipe", metavar="RECIPE")
    settings(data)

    evaluate = command("evaluate", _evaluate, "Measure a finished run's encoder under a named protocol.")
    evaluate.add_argument("run", type=Path, metavar="RUN")
    evaluate.add_argument("--protocol", required=True, metavar="NAME")
    evaluate.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="data.KEY=VALUE", help="on other images"
    )

    embed = command("embed", _embed, "Write the representations of images.")
    embed.add_argument("encoder", type=Path, metavar="RUN_OR_ENCODER")
    embed.add_argument("images", type=Path, metavar="IMAGES", help="an image file or a folder of them")
    embed.add_argument("-o", "--output", type=Path, required=True, help=".npz, .csv or .parquet")

    export = command("export", _export, "Hand a run's encoder to other programs.")
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument("--format", required=True, metavar="NAME", help="safetensors, pt2 or onnx")
    export.add_argument("-o", "--output", type=Path)

    report = command("report", _report, "Write one page about one run or several.")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    report.add_argument(
        "-o", "--output", type=Path, help="the page (default: report.html in the run; of several runs, here)"
    )

    bench = command("bench", _bench, "Time a recipe's training step; recommends threads and memory layout.")
    bench.add_argument("recipe", metavar="RECIPE")
    settings(bench)

    egress = command("egress", _egress, "Read what leaves a client, to the tensor, before anything runs.")
    egress.add_argument("recipe", metavar="RECIPE")
    egress.add_argument(
        "--images", type=int, default=1000, help="training images at the site (default: 1000)"
    )
    egress.add_argument("--json", action="store_true")
    settings(egress)

    federate = commands.add_parser("federate", help="Federations of real sites, over Flower.")
    init = federate.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "init", help="Write the Flower app of a recipe.", description="Write the Flower app of a recipe."
    )
    init.set_defaults(command=_federate_init)
    init.add_argument("folder", type=Path, metavar="DIR")
    init.add_argument("--recipe", required=True, metavar="RECIPE")
    init.add_argument("--sites", type=int, default=0, help="real sites; 0: shares of the recipe's own images")
    init.add_argument("--out", type=Path, help="the run's folder (default: runs/NAME-seedN)")
    init.add_argument("--images", type=Path, help="the coordinator's own images to evaluate on, by class")
    settings(init)

    methods = command("methods", _methods, "List methods: paper, what leaves a client, what it keeps.")
    methods.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
