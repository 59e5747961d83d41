"""Several recipes over several seeds, side by side."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from atoll.engines.federation import Federation
from atoll.engines.simulation import Watcher
from atoll.errors import RunError, UserError, did_you_mean
from atoll.launch import check_folder, launch
from atoll.layers import over, setting
from atoll.methods.catalogue import METHODS, MethodOptions
from atoll.options import describe
from atoll.prerequisites import prerequisite_recipes
from atoll.recipe import Recipe, load_recipe, make_recipe
from atoll.report.numbers import markdown_table, mean_std
from atoll.report.tables import setting_words
from atoll.runs import Run

DEMO = ("digits-align-uniform", "digits-simclr", "digits-ssd")

COLUMNS = {  # heading → (key of the results, factor, digits)
    "kNN %": ("knn/accuracy", 100, 2),
    "probe %": ("probe/accuracy", 100, 2),
    "classifier %": ("classifier/accuracy", 100, 2),
    "−uniformity": ("geometry/uniformity", -1, 3),
    "effective rank": ("geometry/effective_rank", 1, 1),
}


def of_methods(text: str) -> bool:
    """Whether a ``key=value`` setting belongs to a method and its parts, and not to the rest of a recipe."""
    return text.partition("=")[0].split(".")[0].strip() in ("method", "options")


def by_method(recipe: Recipe, methods: Sequence[str], settings: Sequence[str] = ()) -> list[Recipe]:
    """A recipe with each of these methods in its method's place.

    Args:
        recipe: whose own method and options are left out.
        methods: their names.
        settings: ``method.KEY=value`` for each of them, ``options.PART.KEY=value`` for those that have the part.

    Raises:
        UserError: an unknown method, or a setting that fits none.
    """
    asked: dict[str, Any] = {"method": {}, "options": {}}
    for text in settings:
        asked = over(asked, setting(text))
    wrong = next((key for key, value in asked.items() if not isinstance(value, dict)), None)
    if wrong:
        raise UserError(
            f"{wrong} = {asked[wrong]!r} is not a table; set single keys of it, {wrong}.KEY=value"
        )
    if "name" in asked["method"]:
        raise UserError("method.name is what --methods stands for; name the method there")
    made, known = [], set()
    for name in methods:
        plain = replace(recipe, name=f"{recipe.name}-{_word(name)}", method=MethodOptions(name), options={})
        table = {**describe(plain), "method": {"name": name, **asked["method"]}, "options": {}}
        parts = {part.name for part in make_recipe(table).composed.parts}
        known |= parts
        options = {part: values for part, values in asked["options"].items() if part in parts}
        made.append(make_recipe({**table, "options": options}))
    strange = next((part for part in asked["options"] if part not in known), None)
    if strange is not None:
        raise UserError(
            f"options.{strange} belongs to no part of these methods; {did_you_mean(strange, known)}"
        )
    return made


def _word(method: str) -> str:
    """A method's name as part of a folder's."""
    return method.replace(":", "-")


def counterparts(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The lines between which a federated method lies, for each objective with its options among the recipes.

    The upper one: one client holds all data and keeps its optimiser. The lower one: each client learns alone.
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
        options = {part: table for part, table in recipe.options.items() if part == objective.name}
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
    return [_valid(line) for line in lines]


def _valid(recipe: Recipe) -> Recipe:
    _ = recipe.composed
    return recipe


class Bar(Watcher, Protocol):
    """Shows a run's progress."""

    def stop(self) -> None:
        """Leave the terminal as it was."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: that finished, recipe by recipe.
        failures: why the others came to nothing, in a sentence, by the name of their folder.
    """

    runs: list[Run]
    failures: dict[str, str]


def compare(
    recipes: Sequence[Recipe], seeds: int, out: Path, watcher: Callable[[str], Bar] | None = None
) -> Comparison:
    """Run every recipe with each of its seeds; what is finished already is not run again.

    A run that comes to nothing (its updates are refused, its worker dies, memory runs out) takes none of the others
    with it; a fault in the code prints its traceback.

    Args:
        recipes: to run.
        seeds: how many seeds a recipe, from the recipe's own on.
        out: a folder for the runs' folders.
        watcher: makes a progress bar for a title.

    Returns:
        What was run.

    Raises:
        UserError: no seeds, two recipes of one name, or a mistake in one of them, before any is run.
    """
    if seeds < 1:
        raise UserError(f"a comparison needs at least 1 seed a recipe, not {seeds}")
    names = [recipe.name for recipe in recipes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two recipes are called {twice!r}, and would share a folder; give each its own name")
    _check(recipes, seeds, out)
    runs, failures = [], {}
    for recipe in recipes:
        for seed in range(recipe.seed, recipe.seed + seeds):
            seeded = replace(recipe, seed=seed)
            run = Run(out / f"{recipe.name}-seed{seed}")
            title = f"{recipe.label}" + (f", seed {seed}" if seeds > 1 else "")
            bar = watcher(title) if watcher else None
            try:
                runs.append(launch(seeded, run.folder, resume=run.exists(), watcher=bar))
            except (RunError, UserError) as error:
                failures[run.name] = f"{title}: {error}"
            except Exception as error:
                traceback.print_exc()
                failures[run.name] = f"{title}: {type(error).__name__}: {error}"
            finally:
                if bar:
                    bar.stop()
    return Comparison(runs, failures)


def _check(recipes: Sequence[Recipe], seeds: int, out: Path) -> None:
    """Find now the mistakes that would end the comparison after hours."""
    for recipe in recipes:
        try:
            runs = [
                (replace(recipe, seed=seed), Run(out / f"{recipe.name}-seed{seed}"))
                for seed in range(recipe.seed, recipe.seed + seeds)
            ]
            for seeded, run in runs:
                check_folder(run, seeded, resume=run.exists())
            if not all(run.finished for _, run in runs):
                for one in (*prerequisite_recipes(recipe).values(), recipe):
                    Federation(one.plan()).initial_weights()
        except UserError as error:
            raise UserError(f"{recipe.name}: {error}" if len(recipes) > 1 else str(error)) from None


Cells = tuple[list[str], list[list[str]], list[str]]  # a table's header, its rows, and what made the numbers


@dataclass
class _Row:
    """One row of a comparison: a label, the first recipe's name, and the results by seed."""

    label: str
    recipe: str
    results: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def by_seed(self) -> list[dict[str, Any]]:
        return list(self.results.values())


def _named(rows: dict[str, _Row]) -> list[tuple[str, _Row]]:
    """Rows with their labels; where two have the same one, the recipe's name tells them apart."""
    labels = [row.label for row in rows.values()]
    return [
        (row.label if labels.count(row.label) == 1 else f"{row.label} ({row.recipe})", row)
        for row in rows.values()
    ]


def _beginning(recipe: Recipe) -> str:
    """What the encoder before the first round is called."""
    return (
        f"start encoder ({recipe.train.start})"
        if recipe.train.start
        else f"untrained encoder ({recipe.model.encoder})"
    )


def comparison_cells(runs: Sequence[Run]) -> Cells:
    """The runs' results, recipes side by side, the untrained encoder first; mean ± std over seeds.

    A recipe that has fewer runs than another says how many.
    """
    beginnings: dict[str, _Row] = {}  # by seed: all methods of a setting begin with the same weights
    groups: dict[str, _Row] = {}
    protocols, seeds, versions = set(), set(), set()
    for run in runs:
        recipe, results = load_recipe(run.recipe_path), run.read_json("evaluation.json")
        first = next((line for line in run.metrics() if line["round"] == 0), {}).get("evaluation", {})
        begun = repr((recipe.model, recipe.data, recipe.views.size, recipe.train.start))
        row = beginnings.setdefault(begun, _Row(_beginning(recipe), recipe.name))
        row.results[recipe.seed] = first
        engine = replace(recipe.engine, workers=1)
        same = repr(replace(recipe, seed=0, name="", title="", engine=engine))
        row = groups.setdefault(same, _Row(recipe.label, recipe.name))
        row.results[recipe.seed] = results
        protocols.add(_protocol(recipe, results))
        seeds.add(recipe.seed)
        versions.add(results["version"])
    named = {
        name if len(beginnings) > 1 else name.partition(" (")[0]: row.by_seed
        for name, row in _named(beginnings)
    }
    most = max((len(row.results) for row in groups.values()), default=0)
    for name, row in _named(groups):
        few = f" ({len(row.results)} of {most} runs)" if len(row.results) < most else ""
        named[name + few] = row.by_seed
    measured = {key for row in groups.values() for results in row.by_seed for key in results}
    columns = {heading: column for heading, column in COLUMNS.items() if column[0] in measured}
    rows = [[name, *(_cell(group, *column) for column in columns.values())] for name, group in named.items()]
    made = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}; Atoll {', '.join(sorted(versions))}"
    return ["method", *columns], rows, [*sorted(protocols), made]


def comparison_table(cells: Cells) -> Table:
    """The same for a terminal."""
    (first, *headings), rows, notes = cells
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    table.caption = "\n".join(notes)
    table.caption_justify = "left"
    return table


def comparison_markdown(cells: Cells, failures: Iterable[str] = ()) -> str:
    """The same as Markdown, with sentences about the runs that came to nothing."""
    header, rows, notes = cells
    below = [*notes, *(f"Failed: {why}" for why in failures)]
    return "\n".join([*markdown_table(header, rows), "", *(f"- {said}" for said in below)]) + "\n"


def _cell(results: Sequence[dict[str, Any]], key: str, factor: float, digits: int) -> str:
    return mean_std([factor * result[key] for result in results if key in result], digits)


def _protocol(recipe: Recipe, results: dict[str, Any]) -> str:
    said = [f"{recipe.title or setting_words(describe(recipe))}; {results['split']} split"]
    if "knn/k" in results:
        said.append(f"kNN k={results['knn/k']}, T={results['knn/temperature']}, cosine")
    if "probe/name" in results:
        said.append(
            f"probe {results['probe/name']}: {results['probe/optimizer']} lr {results['probe/lr']}, "
            f"{results['probe/epochs']} epochs, batch {results['probe/batch_size']}"
        )
    if "note" in results:
        said.append(results["note"])
    return "; ".join(said)
