"""Commands that train one run, or time its steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.cli.arguments import (
    Commands,
    add_log,
    add_other_environment,
    add_recipe,
    add_run,
    add_settings,
    path_of,
)
from atoll.cli.process import say
from atoll.core.errors import UserError


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    _add_run(commands)
    _add_resume(commands)
    _add_bench(commands)


def _engine(sub: argparse.ArgumentParser) -> None:
    """Add the choice of the engine."""
    sub.add_argument(
        "--engine",
        choices=("simulation", "flower-sim"),
        default="simulation",
        help="where clients train: in processes of this machine (default), or in Flower's simulation, on Ray",
    )
    sub.add_argument(
        "--ray",
        metavar="HOST:PORT",
        default="",
        help="with --engine flower-sim: address of the Ray cluster (default: only this machine)",
    )


def _recovery(sub: argparse.ArgumentParser, condition: str) -> None:
    """Add the options that a resumed run may need."""
    sub.add_argument(
        "--reset-client",
        type=int,
        nargs="+",
        action="extend",
        default=[],
        metavar="ID",
        help=f"{condition}clients whose damaged or lost state is discarded",
    )
    add_other_environment(sub, condition)


def _add_run(commands: Commands) -> None:
    run = commands.add(
        _run,
        "run",
        "Run a recipe: a preset's name or a TOML file.",
        "digits-ssd",
        "my.toml --set train.rounds=50 engine.workers=2",
        "my.toml --resume",
        "my.toml --engine flower-sim --ray 10.0.0.1:6379",
    )
    add_recipe(run)
    run.add_argument("--out", type=path_of, help="the run's folder (default: runs/NAME-seedN)")
    run.add_argument("--resume", action="store_true", help="continue the run in its folder")
    run.add_argument(
        "--restart", action="store_true", help="delete the run in its folder and start from the beginning"
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="time a few steps and print the run's estimated cost; write nothing",
    )
    _engine(run)
    _recovery(run, "with --resume: ")
    add_log(run)
    add_settings(run)
    run.set_defaults(check=_check_run)


def _check_run(options: argparse.Namespace) -> None:
    """Check combinations of options before PyTorch is imported."""
    if options.ray and options.engine != "flower-sim":
        raise UserError("--ray needs --engine flower-sim")
    if options.dry_run and (options.resume or options.restart):
        raise UserError("--dry-run is about a whole run, and changes none; leave out --resume and --restart")


def _run(options: argparse.Namespace) -> int:
    return _estimate(options) if options.dry_run else _train(options)


def _estimate(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.cost import estimate
    from atoll.engines.flower import require_simulation
    from atoll.recipe.recipe import load_recipe

    if options.engine == "flower-sim":
        require_simulation()
    console = make_console()
    for cost in estimate(load_recipe(options.recipe, options.set)):
        console.print("\n".join(cost.lines()), highlight=False)
    if options.engine == "flower-sim":
        say("Flower's simulation comes on top: the start of its processes, and every message between them")
    return 0


def _train(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.progress import Bar
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
        if options.engine == "flower-sim":
            from atoll.commands.flower_simulation import run_on_flower

            run = run_on_flower(
                recipe, options.out, options.resume, bar, recovery, options.log, options.ray, say
            )
        else:
            run = run_recipe(recipe, options.out, options.resume, bar, recovery=recovery, log=options.log)
    finally:
        bar.stop()
    report = write_report([run.folder], run.folder / "report.html")
    console.print(comparison_table(comparison_cells([run])))
    console.print(f"run:    {run.folder}\nreport: {report}", highlight=False)
    return 0


def _add_resume(commands: Commands) -> None:
    resume = commands.add(_resume, "resume", "Continue an interrupted run.", "runs/digits-ssd-seed0")
    add_run(resume)
    _engine(resume)
    _recovery(resume, "")
    add_log(resume)
    add_settings(resume, "change values that a resumed run may change: engine.workers=2 train.rounds=50 …")


def _resume(options: argparse.Namespace) -> int:
    from atoll.core.run_folder import Run
    from atoll.recipe.recipe import recipe_of

    run = Run(options.run).require()
    recipe_of(run)  # a damaged recipe is named
    options.recipe, options.out, options.resume, options.restart = run.recipe_path, run.folder, True, False
    try:
        return _train(options)
    except UserError as error:  # which may name an option that only ``atoll run`` has
        ways = {"--out": "--out OTHER", "--restart": f"--out {run.folder} --restart"}
        if not (named := [way for option, way in ways.items() if option in str(error)]):
            raise
        raise UserError(f"{error}; that is, atoll run {run.recipe_path} with {' or '.join(named)}") from error


def _add_bench(commands: Commands) -> None:
    bench = commands.add(
        _bench,
        "bench",
        "Time a recipe's training step; recommend threads, memory layout and compilation.",
        "digits-ssd",
        "gpu --out bench-gpu.json",
    )
    bench.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a preset's name or a TOML file; or the word gpu, to check and measure Atoll on a GPU",
    )
    bench.add_argument(
        "--out", type=path_of, help="for gpu: the JSON file to write (default: bench-gpu.json)"
    )
    bench.add_argument("--device", help="for gpu: the device (default: cuda)")
    bench.add_argument(
        "--scale",
        choices=("full", "test"),
        help="for gpu: full (default), or test (tiny sizes, to check the command on a CPU)",
    )
    bench.add_argument(
        "--parts", nargs="+", metavar="PART", help="for gpu: parts to measure, in this order (default: all)"
    )
    add_settings(bench)


def _bench(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.bench import recommend
    from atoll.recipe.recipe import load_recipe

    asked = {key: value for key in ("out", "device", "scale", "parts") if (value := getattr(options, key))}
    if options.recipe == "gpu":
        from atoll.commands.bench_gpu import bench_gpu

        if options.set:
            raise UserError("atoll bench gpu takes no --set; its parts are fixed")
        bench_gpu(**{"out": Path("bench-gpu.json"), **asked}, say=print)
        return 0
    if asked:
        raise UserError(
            "--out, --device, --scale and --parts belong to atoll bench gpu; set a recipe's engine.device"
        )
    make_console().print(recommend(load_recipe(options.recipe, options.set)))
    return 0
