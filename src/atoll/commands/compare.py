"""``atoll compare``: several recipes over several seeds, side by side."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from atoll.commands.logs import check_logs
from atoll.commands.progress import Bar
from atoll.commands.resume import Recovery, cannot_continue, check_folder
from atoll.commands.run import prepare, run_recipe
from atoll.core.config import describe, over, read_settings
from atoll.core.errors import RunError, UserError, did_you_mean, warn
from atoll.core.files import disk_sentence
from atoll.core.memory import NO_MEMORY, is_out_of_memory
from atoll.core.run_folder import Run
from atoll.core.run_names import run_name
from atoll.data.options import PartitionOptions
from atoll.engines.simulation import Simulation
from atoll.methods.registry import METHODS, MethodOptions
from atoll.recipe.recipe import Recipe, load_recipe, make_recipe
from atoll.report import write_report
from atoll.report.comparison import comparison_cells, comparison_markdown
from atoll.report.formats import write_table


def load_recipes(
    names: Sequence[str],
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    lines: bool = False,
    sweeps: Sequence[str] = (),
) -> list[Recipe]:
    """Load the recipes of a comparison.

    Args:
        names: Presets or files.
        settings: ``key=value`` settings, applied to each recipe.
        methods: Names of methods that replace the method of each recipe.
        lines: Whether to add the recipes' `counterparts`.
        sweeps: ``key=value,value…`` settings; all combinations are recipes, named after their values.

    Raises:
        UserError: A recipe is invalid.
    """
    if sweeps:
        return _swept(names, settings, methods, lines, sweeps)
    of_each_method = [text for text in settings if methods and of_methods(text)]
    rest = [text for text in settings if text not in of_each_method]
    recipes = [load_recipe(name, rest) for name in names]
    if methods:
        recipes = [one for recipe in recipes for one in by_method(recipe, methods, of_each_method)]
    return recipes + (counterparts(recipes) if lines else [])


def _swept(
    names: Sequence[str], settings: Sequence[str], methods: Sequence[str], lines: bool, sweeps: Sequence[str]
) -> list[Recipe]:
    """The recipes of all combinations of the sweeps' values."""
    keys = [text.partition("=")[0].strip() for text in sweeps]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"--sweep names {repeated} twice; name it once, with all values")
    if twice := next((text for text in settings if text.partition("=")[0].strip() in keys), None):
        raise UserError(f"--set {twice} and --sweep name the same key; leave one of them out")
    swept: dict[str, Recipe] = {}  # a method without the option has one recipe for all values
    for chosen in product(*map(_values, sweeps)):
        words = (
            key.rpartition(".")[2] + re.sub(r"[^\w.+-]", "", value.replace(",", "-")) for key, value in chosen
        )
        suffix = "-".join(words)
        each = [*settings, *(f"{key}={value}" for key, value in chosen)]
        for recipe in load_recipes(names, each, methods, lines):
            named = replace(recipe, name=f"{recipe.name}-{suffix}")
            swept.setdefault(repr(_trained(recipe)), named)
    return list(swept.values())


def _trained(recipe: Recipe) -> Recipe:
    """A recipe without keys that change nothing: a single client holds all images, whatever the partition says."""
    whole = PartitionOptions(kind="centralised")
    recipe = recipe.completed()
    return replace(recipe, partition=whole) if recipe.partition.kind == whole.kind else recipe


def _values(sweep: str) -> list[tuple[str, str]]:
    """The key and each value of a ``key=value,value…`` sweep."""
    key, _, text = sweep.partition("=")
    values = [value.strip() for value in re.split(r",(?![^\[]*\])", text)]  # a list's commas separate nothing
    if not key.strip() or "" in values:
        raise UserError(f"--sweep {sweep!r} is no KEY=VALUE,VALUE…, such as partition.alpha=0.1,1,100")
    return [(key.strip(), value) for value in dict.fromkeys(values)]


def of_methods(text: str) -> bool:
    """Whether a ``key=value`` setting belongs to a method and its components, not to the rest of a recipe."""
    return text.partition("=")[0].split(".")[0].strip() in ("method", "options")


def by_method(recipe: Recipe, methods: Sequence[str], settings: Sequence[str] = ()) -> list[Recipe]:
    """Replace the method of a recipe by each of several methods.

    Args:
        recipe: The recipe, whose method and options are dropped.
        methods: Names of the methods.
        settings: ``method.KEY=value`` for all methods, ``options.COMPONENT.KEY=value`` for those that have it.

    Raises:
        UserError: A method is unknown, or a setting fits no method.
    """
    given: dict[str, Any] = over({"method": {}, "options": {}}, read_settings(settings))
    wrong = next((key for key, value in given.items() if not isinstance(value, dict)), None)
    if wrong:
        raise UserError(
            f"{wrong} = {given[wrong]!r} is not a table; set single keys of it, {wrong}.KEY=value"
        )
    if "name" in given["method"]:
        raise UserError("--methods names the method; leave out method.name")
    made, known = [], set()
    for name in methods:
        plain = replace(recipe, name=f"{recipe.name}-{_word(name)}", method=MethodOptions(name), options={})
        table = {**describe(plain), "method": {"name": name, **given["method"]}, "options": {}}
        components = {component.name for component in make_recipe(table).composed.components}
        known |= components
        options = {
            component: values for component, values in given["options"].items() if component in components
        }
        made.append(make_recipe({**table, "options": options}))
    unknown = next((component for component in given["options"] if component not in known), None)
    if unknown is not None:
        raise UserError(
            f"options.{unknown} belongs to no component of these methods; {did_you_mean(unknown, known)}"
        )
    return made


def _word(method: str) -> str:
    """A method's name as part of a folder's."""
    return method.replace(":", "-")


def counterparts(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Make the upper and the lower baseline for each objective, with its options, in the recipes.

    Upper: one client has all data and retains its optimiser. Lower: each client trains alone.
    """
    lines, seen = [], []
    for recipe in recipes:
        objective = recipe.composed.objective
        setting = (objective, replace(recipe, name="", title="", method=MethodOptions(), options={}))
        if setting in seen:
            continue
        seen.append(setting)
        plain = next((n for n, m in METHODS.items() if m.objective == objective and not m.terms), None)
        method = MethodOptions(
            plain or recipe.method.name, objective.name, terms=(), aggregation="fedavg", server="direct"
        )
        name = f"{recipe.name.removesuffix(f'-{_word(recipe.method.name)}')}-{_word(method.name)}"
        options = {
            component: table for component, table in recipe.options.items() if component == objective.name
        }
        line = replace(recipe, options=options)
        lines += [
            replace(
                line,
                name=f"{name}-centralised",
                method=replace(method, merge="replace"),
                partition=replace(recipe.partition, kind="centralised"),
                train=replace(recipe.train, participation=1.0, keep_optimizer=True),
            ),
            replace(line, name=f"{name}-alone", method=replace(method, merge="local_only")),
        ]
    for line in lines:
        _ = line.composed  # refuse a baseline that cannot be composed
    return lines


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        runs: The finished runs, recipe by recipe.
        failures: A sentence with the reason for each run that failed, by the name of its folder.
    """

    runs: list[Run]
    failures: dict[str, str]


def compare(
    recipes: Sequence[Recipe],
    seeds: int,
    out: Path,
    callback: Callable[[str], Bar] | None = None,
    log: Sequence[str] = (),
    restart: bool = False,
    other_environment: bool = False,
) -> Comparison:
    """Run every recipe with each of its seeds. Finished runs are not run again.

    A run that fails (its updates are refused, its worker dies, memory runs out) does not stop the others. A fault
    in the code prints its traceback.

    Args:
        recipes: The recipes to run.
        seeds: Seeds per recipe, starting at the recipe's seed.
        out: Folder that contains the runs' folders.
        callback: Makes a progress bar for a title.
        log: Tools that follow each run (`atoll.commands.logs`).
        restart: Whether to delete runs that cannot be continued, and to start them again.
        other_environment: Whether to continue runs in another environment.

    Returns:
        The finished runs and the failures.

    Raises:
        UserError: ``seeds`` is below 1, two recipes have the same name, a recipe is invalid, a tool's library is
            missing, or ``out`` cannot be written; raised before the first run.
    """
    if seeds < 1:
        raise UserError(f"a comparison needs at least 1 seed per recipe, not {seeds}")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder with --out")
    check_logs(log)
    names = [recipe.name for recipe in recipes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"two recipes are called {twice!r} and would share a folder; give each a different name"
        )
    if len({recipe.seed for recipe in recipes}) > 1:
        first = ", ".join(f"{recipe.name} from {recipe.seed}" for recipe in recipes)
        warn(
            f"the recipes' seeds begin differently ({first}), and differences are paired by seed; set the same "
            "seed in each recipe, such as with --set seed=0"
        )
    anew = _check(recipes, seeds, out, restart, other_environment)
    _make_folder(out)
    runs: list[Run] = []
    failures: dict[str, str] = {}
    seeded = [one for recipe in recipes for one in _seeded(recipe, seeds, out)]
    labels = [recipe.label for recipe in recipes]
    with Simulation().keep() as engine:
        for number, (one, run) in enumerate(seeded, start=1):
            title = one.label if labels.count(one.label) == 1 else f"{one.label} ({one.name})"
            title += f", seed {one.seed}" if seeds > 1 else ""
            counted = f"{number}/{len(seeded)} {title}" if len(seeded) > 1 else title
            bar = callback(counted) if callback else None
            try:
                again = Recovery(restart=run.name in anew, other_environment=other_environment)
                resume = run.exists() and not again.restart
                runs.append(
                    run_recipe(
                        one, run.folder, resume=resume, callback=bar, engine=engine, recovery=again, log=log
                    )
                )
            except (RunError, UserError) as error:
                failures[run.name] = f"{title}: {error}"
            except Exception as error:
                if is_out_of_memory(error):
                    failures[run.name] = f"{title}: {NO_MEMORY}"
                    continue
                traceback.print_exc()
                failures[run.name] = f"{title}: {type(error).__name__}: {error}"
            finally:
                if bar:
                    bar.stop()
    return Comparison(runs, failures)


def _seeded(recipe: Recipe, seeds: int, out: Path) -> list[tuple[Recipe, Run]]:
    """A recipe with each of its seeds, and the run of each."""
    return [
        (replace(recipe, seed=seed), Run(out / run_name(recipe.name, seed)))
        for seed in range(recipe.seed, recipe.seed + seeds)
    ]


def _check(
    recipes: Sequence[Recipe], seeds: int, out: Path, restart: bool, other_environment: bool
) -> set[str]:
    """Find errors before the first run that would otherwise stop the comparison after hours.

    Returns:
        Names of the runs to start again.
    """
    anew: set[str] = set()
    for recipe in recipes:
        try:
            anew |= check_folders(recipe, seeds, out, restart, other_environment)
            runs = _seeded(recipe, seeds, out)
            if not all(run.finished and run.name not in anew for _, run in runs):
                prepared = prepare(*runs[0], Simulation(), runs[0][1].name in anew)
                for one in (*prepared.prerequisites.values(), prepared):
                    one.federation.initial_weights()
        except UserError as error:
            raise UserError(f"{recipe.name}: {error}" if len(recipes) > 1 else str(error)) from None
    return anew


def check_folders(recipe: Recipe, seeds: int, out: Path, restart: bool, other_environment: bool) -> set[str]:
    """Check that the runs of a recipe can start or continue in their folders.

    Returns:
        With ``restart``, the names of those that cannot, and start again.

    Raises:
        UserError: Without it, one of them cannot.
    """
    runs = _seeded(recipe, seeds, out)
    anew = {run.name for one, run in runs if restart and cannot_continue(run, one, other_environment)}
    for one, run in runs:
        if run.name not in anew:
            check_folder(run, one, run.exists(), other_environment)
    return anew


def _make_folder(out: Path) -> None:
    """Make the folder of the runs, and try to write there: otherwise each run would say that it cannot."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(disk_sentence(out, error)) from None


def other_runs(compared: Comparison, out: Path) -> list[str]:
    """Names of the folders in ``out`` that hold other runs, such as of an earlier comparison."""
    names = {*(run.name for run in compared.runs), *compared.failures}
    return sorted(
        recipe.parent.name for recipe in out.glob("*/recipe.toml") if recipe.parent.name not in names
    )


def write_comparison(compared: Comparison, out: Path) -> tuple[Path, Path]:
    """Write the table and the page of a comparison's finished runs.

    Returns:
        ``table.md``, with ``table.csv`` and ``table.tex`` beside it, and ``report.html`` in ``out``.
    """
    failures = compared.failures.values()
    cells = comparison_cells(compared.runs)
    table = write_table(out / "table.md", *cells[:2], comparison_markdown(cells, failures))
    return table, write_report([run.folder for run in compared.runs], out / "report.html", failures)
