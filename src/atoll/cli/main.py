"""The ``atoll`` command: parses arguments, calls a command, prints its result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.cli.parser import make_parser
from atoll.cli.process import Stopped, is_out_of_memory, say, signals_as_interrupts, warnings_as_sentences
from atoll.core.errors import RunError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 for success, 1 for a failed run, 2 for a user's error, 130 for an interruption, 128 and its number for
        another signal.
    """
    options = make_parser().parse_args(arguments)
    with signals_as_interrupts(), warnings_as_sentences():
        try:
            _check_recipes(options)
            return COMMANDS[options.command](options)
        except UserError as error:
            say(str(error))
            return 2
        except KeyboardInterrupt as stop:
            say(f"{str(stop) or 'interrupted'}{_resumable(options)}")
            return stop.exit_code if isinstance(stop, Stopped) else 130
        except RunError as error:
            say(str(error))
            return 1
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
    return (
        "; repeat the command with --resume to continue from the last complete round"
        if "resume" in options
        else ""
    )


def _run(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.commands.resume import Recovery
    from atoll.commands.run import run_recipe
    from atoll.recipe.recipe import load_recipe
    from atoll.report import write_report
    from atoll.report.comparison import comparison_cells, comparison_table

    console = make_console()
    recipe = load_recipe(options.recipe, options.set)
    bar = Bar(console, recipe.composed.title or recipe.name)
    try:
        recovery = Recovery(options.restart, tuple(options.reset_client), options.other_environment)
        run = run_recipe(recipe, options.out, options.resume, bar, recovery=recovery)
    finally:
        bar.stop()
    report = write_report([run.folder], run.folder / "report.html")
    console.print(comparison_table(comparison_cells([run])))
    console.print(f"run:    {run.folder}\nreport: {report}", highlight=False)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.commands.compare import compare, load_recipes, write_comparison
    from atoll.report.comparison import comparison_cells, comparison_table

    console = make_console()
    recipes = load_recipes(options.recipes, options.set, options.methods, options.lines)
    compared = compare(recipes, options.seeds, options.out, lambda title: Bar(console, title))
    if compared.runs:
        table, report = write_comparison(compared, options.out)
        console.print(comparison_table(comparison_cells(compared.runs)))
        console.print(f"runs:   {options.out}\ntable:  {table}\nreport: {report}", highlight=False)
    for why in compared.failures.values():
        say(why)
    return 1 if compared.failures else 0


def _demo(options: argparse.Namespace) -> int:
    from atoll.commands.compare import DEMO

    options.recipes, options.methods, options.lines, options.seeds = list(DEMO), [], False, 1
    return _compare(options)


def _reproduce(options: argparse.Namespace) -> int:
    from atoll.cli.console import Bar, make_console
    from atoll.cli.tables import listing, plan_table
    from atoll.commands.reproduce import dry_run, reproduce, require_built
    from atoll.papers.reproduction import find_table
    from atoll.report.reproduction import shown

    console = make_console()
    if options.table is None or options.list:
        console.print(listing())
        return 0
    job = find_table(options.table, options.rows, options.set, options.seeds, options.out, options.scale)
    if options.dry_run:
        checks = dry_run(job)
        console.print(plan_table(job, checks))
        require_built(checks)
        return 0
    record = reproduce(job, lambda title: Bar(console, title))
    console.print(shown(record))
    places = {"table": "table.md", "figure": "figure.svg", "report": "report.html"}
    for what, name in places.items():
        if (job.out / name).is_file():
            console.print(f"{what + ':':<8}{job.out / name}", highlight=False)
    return 1 if record["failures"] else 0


def _data(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.cli.tables import partition_table
    from atoll.commands.data import draw_clients, load_partition
    from atoll.recipe.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    splits, partition = load_partition(recipe)
    console = make_console()
    console.print(partition_table(splits, partition))
    picture = options.output or Path(f"data-{recipe.name}.svg")
    draw_clients(recipe, splits, partition, picture)
    console.print(f"picture: {picture}", highlight=False)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console, results_table
    from atoll.commands.evaluate import evaluate_run
    from atoll.core.run_folder import Run

    results = evaluate_run(Run(options.run).require(), options.protocol, options.set)
    make_console().print(results_table(results))
    return 0


def _detect(options: argparse.Namespace) -> int:
    from atoll.cli.console import PartBar, detection_table, make_console
    from atoll.commands.detect import detect, parse_options, prepare_detection

    console = make_console()
    job = prepare_detection(
        options.encoder,
        options.data,
        parse_options(options.set),
        scratch=options.scratch,
        seeds=options.seeds,
        out=options.out,
    )
    bar = PartBar(console)
    try:
        records = detect(job, bar)
    finally:
        bar.stop()
    console.print(detection_table(records))
    console.print(f"results: {job.out}", highlight=False)
    return 0


def _check(options: argparse.Namespace) -> int:
    from atoll.commands.check import check_run
    from atoll.core.run_folder import Run

    found = check_run(Run(options.run))
    for sentence in found.damaged:
        say(sentence)
    unverified = ", ".join(str(path.relative_to(options.run)) for path in found.unverified)
    if unverified:
        print(f"without a digest, so not verified (Atoll 0.1 wrote them): {unverified}")  # noqa: T201
    print(f"{options.run}: {found.files} files read, {len(found.damaged)} damaged or missing")  # noqa: T201
    return 2 if found.damaged else 0


def _embed(options: argparse.Namespace) -> int:
    from atoll.commands.embed import embed_images, save_embeddings
    from atoll.commands.evaluate import find_encoder
    from atoll.models import load_encoder

    names, h = embed_images(load_encoder(find_encoder(options.encoder)), options.images)
    save_embeddings(options.output, names, h)
    print(f"{len(names)} images, {h.shape[1]} dimensions: {options.output}")  # noqa: T201
    return 0


def _export(options: argparse.Namespace) -> int:
    from atoll.commands.export import export_run

    print(export_run(options.run, options.format, options.output))  # noqa: T201
    return 0


def _report(options: argparse.Namespace) -> int:
    from atoll.commands.report import report_runs

    print(report_runs(options.runs, options.output))  # noqa: T201
    return 0


def _bench(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.bench import recommend
    from atoll.recipe.recipe import load_recipe

    if options.recipe == "gpu":
        from atoll.commands.bench_gpu import bench_gpu

        bench_gpu(options.out, options.device, options.scale, print)
        return 0
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
    from atoll.commands.federate import init_app
    from atoll.recipe.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    start = init_app(options.folder, recipe, options.sites, options.out, options.images)
    print(f"app: {options.folder}\nrun it: {start}")  # noqa: T201
    return 0


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


def _methods(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console, methods_tables
    from atoll.recipe.table import catalogue

    listing = catalogue()["methods"]
    if options.json:
        print(json.dumps(listing, indent=2))  # noqa: T201
        return 0
    console = make_console()
    for table in methods_tables(listing):
        console.print(table, "")
    return 0


def _schema(options: argparse.Namespace) -> int:
    from atoll.commands.schema import schema_text, write_schema

    if options.output is None:
        print(schema_text(), end="")  # noqa: T201
        return 0
    write_schema(options.output)
    print(options.output)  # noqa: T201
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "demo": _demo,
    "compare": _compare,
    "reproduce": _reproduce,
    "data": _data,
    "evaluate": _evaluate,
    "detect": _detect,
    "check": _check,
    "embed": _embed,
    "export": _export,
    "report": _report,
    "bench": _bench,
    "egress": _egress,
    "federate init": _federate_init,
    "methods": _methods,
    "schema": _schema,
    "theory": _theory,
}


if __name__ == "__main__":
    sys.exit(main())
