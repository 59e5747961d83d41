"""Groups of runs, and the rows and columns of a table of results, the same on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.config import flatten
from atoll.evaluation.metrics import Metric, measured
from atoll.report.folders import Folder
from atoll.report.numbers import Spread, spread
from atoll.report.wording import show

# Keys that make no other experiment of a run: its seed, its names, and the number of workers, which changes no bit.
SAME = ("seed", "name", "title", "engine.workers")
# Differences that a comparison of methods is about.
EXPECTED = ("method.", "options.", *SAME)
MAX_DIFFERENCES = 3  # that a label names


@dataclass
class Group:
    """Runs of one recipe, one for each seed.

    Attributes:
        label: Its name on the page and in the terminal.
        runs: By seed.
    """

    label: str
    runs: list[Folder] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds."""
        return [run.seed for run in self.runs]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The final evaluations of the runs that have one."""
        return [run.results for run in self.runs if run.results]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe, of the first seed."""
        return self.runs[0].recipe


@dataclass(frozen=True)
class Row:
    """An encoder in a table of results.

    Attributes:
        label: Its name.
        results: One for each seed.
        line: Its mark in the figures: the method's place, or, below zero, an untrained encoder's.
        runs: How many runs the row has, with or without results.
    """

    label: str
    results: list[dict[str, Any]]
    line: int
    runs: int

    def spread(self, metric: Metric) -> Spread | None:
        """A metric over the seeds."""
        return spread(metric.values(self.results))


def group_runs(folders: Sequence[Folder]) -> list[Group]:
    """Groups in the order of their first runs, each with its own label.

    Two runs are of one group if their recipes are equal but for the seed, the name, the title and the number of
    workers. A group has each seed once, because a repeated run is not a further sample: it starts another group.
    """
    groups: dict[str, list[Group]] = {}
    found: list[Group] = []
    for folder in folders:
        key = repr(sorted((k, v) for k, v in flatten(folder.recipe).items() if k not in SAME))
        same = groups.setdefault(key, [])
        group = next((group for group in same if folder.seed not in group.seeds), None)
        if group is None:
            group = Group("")
            same.append(group)
            found.append(group)
        group.runs.append(folder)
    for group in found:
        group.runs.sort(key=lambda run: run.seed)
    labels = _labels([_method(group) for group in found], [group.recipe for group in found])
    for group, label in zip(found, labels, strict=True):
        group.label = label if labels.count(label) == 1 else f"{label} · folder = {group.runs[0].name}"
    return found


def _method(group: Group) -> str:
    named = next((run.results["method"] for run in group.runs if "method" in run.results), None)
    recipe = group.recipe
    return str(named or recipe.get("method", {}).get("name") or recipe.get("name") or group.runs[0].name)


def _labels(names: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names, each with the values that distinguish it from equal names, if there are any."""
    labels = []
    for name, recipe in zip(names, recipes, strict=True):
        equals = [other for named, other in zip(names, recipes, strict=True) if named == name]
        if len(equals) == 1:
            labels.append(name)
            continue
        different = list(differences(equals)) or list(differences(equals, except_=("seed",)))
        values = flatten(recipe)
        said = [
            f"{key.removeprefix('options.')} = {show(values.get(key))}" for key in different[:MAX_DIFFERENCES]
        ]
        labels.append(f"{name} · {', '.join(said)}" if said else name)
    return labels


def differences(recipes: Sequence[Mapping[str, Any]], except_: Iterable[str] = SAME) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all recipes, with the value in each.

    Args:
        recipes: To compare.
        except_: Keys, or sections if they end in a dot, that are left out.
    """
    tables = [flatten(recipe) for recipe in recipes]
    left_out = tuple(except_)
    found = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        if key in left_out or key.startswith(tuple(name for name in left_out if name.endswith("."))):
            continue
        values = [table.get(key) for table in tables]
        if any(value != values[0] for value in values):
            found[key] = values
    return found


@dataclass
class _Start:
    """An encoder before the first round: its settings, the methods that start from it, its results by seed."""

    recipe: dict[str, Any]
    methods: list[str]
    by_seed: dict[int, dict[str, Any]]

    def is_same(self, recipe: dict[str, Any], by_seed: Mapping[int, dict[str, Any]]) -> bool:
        shared = by_seed.keys() & self.by_seed.keys()
        return self.recipe == recipe and all(
            _scores(by_seed[seed]) == _scores(self.by_seed[seed]) for seed in shared
        )


def untrained_rows(groups: Sequence[Group]) -> list[Row]:
    """The encoders before the first round: methods that start from the same one share a row."""
    starts: list[_Start] = []
    for group in groups:
        by_seed = {run.seed: run.untrained for run in group.runs if run.untrained}
        recipe = {name: group.recipe.get(name) for name in ("data", "model", "views", "evaluation")}
        recipe["train"] = {"start": group.recipe.get("train", {}).get("start")}
        start = next((start for start in starts if start.is_same(recipe, by_seed)), None)
        if start is None:
            starts.append(_Start(recipe, [group.label], by_seed))
        else:
            start.methods.append(group.label)
            start.by_seed |= by_seed
    names = [_start_name(start.recipe["train"]["start"], len(starts) > 1) for start in starts]
    labels = _labels(names, [start.recipe for start in starts])
    return [
        Row(
            label if labels.count(label) == 1 else f"{label} of {', '.join(start.methods)}",
            [start.by_seed[seed] for seed in sorted(start.by_seed)],
            -1 - k,
            len(start.by_seed),
        )
        for k, (start, label) in enumerate(zip(starts, labels, strict=True))
    ]


def _start_name(path: str | None, several: bool) -> str:
    if not path:
        return "Untrained encoder"
    return f"Start encoder ({path})" if several else "Start encoder"


def _scores(results: Mapping[str, Any]) -> dict[str, Any]:
    # The partition of the training images changes the clients' uniformity, not the encoder.
    return {key: value for key, value in results.items() if "client" not in key and key != "by_model"}


def result_rows(groups: Sequence[Group]) -> list[Row]:
    """The rows of every table of results: the encoders before the first round, then the methods."""
    rows = [Row(group.label, group.results, i, len(group.runs)) for i, group in enumerate(groups)]
    return [*untrained_rows(groups), *rows]


def result_columns(rows: Sequence[Row], place: str = "results") -> list[Metric]:
    """The columns of a table of results: what any of its rows has."""
    return measured((result for row in rows for result in row.results), place)
