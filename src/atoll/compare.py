"""Several recipes over several seeds, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from atoll.engines.simulation import Watcher
from atoll.launch import launch
from atoll.recipe import Recipe, load_recipe
from atoll.runs import Run

DEMO = ("digits-align-uniform", "digits-simclr", "digits-ssd")

COLUMNS = {  # heading → (key of the results, factor, digits)
    "kNN %": ("knn/accuracy", 100, 2),
    "probe %": ("probe/accuracy", 100, 2),
    "classifier %": ("classifier/accuracy", 100, 2),
    "−uniformity": ("geometry/uniformity", -1, 3),
    "effective rank": ("geometry/effective_rank", 1, 1),
}


class _Bar(Watcher, Protocol):
    def stop(self) -> None: ...


def compare(
    recipes: Sequence[Recipe], seeds: int, out: Path, watcher: Callable[[str], _Bar] | None = None
) -> list[Run]:
    """Run every recipe with each of its seeds; what is finished already is not run again.

    Args:
        recipes: to run.
        seeds: how many seeds a recipe, from the recipe's own on.
        out: a folder for the runs' folders.
        watcher: makes a progress bar for a title.

    Returns:
        The finished runs, recipe by recipe.
    """
    runs = []
    for recipe in recipes:
        for seed in range(recipe.seed, recipe.seed + seeds):
            seeded = replace(recipe, seed=seed)
            run = Run(out / f"{recipe.name}-seed{seed}")
            title = f"{recipe.composed.title or recipe.name}" + (f", seed {seed}" if seeds > 1 else "")
            bar = watcher(title) if watcher else None
            try:
                runs.append(launch(seeded, run.folder, resume=run.exists(), watcher=bar))
            finally:
                if bar:
                    bar.stop()
    return runs


def comparison_table(runs: Sequence[Run]) -> Table:
    """The runs' results, recipes side by side, the untrained encoder first; mean ± std over seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    protocols = set()
    for run in runs:
        recipe = load_recipe(run.recipe_path)
        first = run.metrics()[0].get("evaluation", {})
        label = "untrained encoder"
        if len({_spread_key(load_recipe(other.recipe_path)) for other in runs}) > 1:
            label += f" ({recipe.model.encoder})"
        groups.setdefault(label, []).append(first)
        results = run.read_json("evaluation.json")
        groups.setdefault(recipe.composed.title or recipe.name, []).append(results)
        protocols.add(_protocol(recipe, results))
    measured = {key for group in groups.values() for results in group for key in results}
    columns = {heading: column for heading, column in COLUMNS.items() if column[0] in measured}
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("method")
    for heading in columns:
        table.add_column(heading, justify="right")
    order = sorted(groups, key=lambda name: not name.startswith("untrained"))
    for name in order:
        table.add_row(name, *(_spread(groups[name], *column) for column in columns.values()))
    table.caption = "\n".join(sorted(protocols))
    table.caption_justify = "left"
    return table


def _spread_key(recipe: Recipe) -> tuple[Any, ...]:
    return (recipe.model, recipe.data, recipe.views.size)


def _spread(results: Sequence[dict[str, Any]], key: str, factor: float, digits: int) -> str:
    values = [factor * result[key] for result in results if key in result]
    if not values:
        return "–"
    if len(set(values)) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _protocol(recipe: Recipe, results: dict[str, Any]) -> str:
    said = [f"{recipe.title or recipe.name}; {results['split']} split"]
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
