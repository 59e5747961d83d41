"""The results of several runs, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from atoll.core.config import describe
from atoll.core.run_folder import Run
from atoll.recipe.recipe import Recipe, load_recipe
from atoll.report.numbers import markdown_table, mean_std
from atoll.report.tables import setting_words

COLUMNS = {  # heading → (key of the results, factor, digits)
    "kNN %": ("knn/accuracy", 100, 2),
    "probe %": ("probe/accuracy", 100, 2),
    "classifier %": ("classifier/accuracy", 100, 2),
    "−uniformity": ("geometry/uniformity", -1, 3),
    "effective rank": ("geometry/effective_rank", 1, 1),
}


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
