"""Which runs belong together: those that differ by their seed alone are one row of a table, one line of a curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.config import flatten
from atoll.report.folders import Folder

# Differences between recipes that make no other experiment of a run.
SAME = ("seed", "engine.workers")
# Differences that a comparison of methods is about, or that are mere names.
EXPECTED = ("name", "title", "method.", "options.", *SAME)


@dataclass
class Group:
    """Runs of one recipe over seeds.

    Attributes:
        label: how the page calls it.
        runs: by seed.
    """

    label: str
    runs: list[Folder] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds."""
        return [run.seed for run in self.runs]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The final evaluations that there are."""
        return [run.results for run in self.runs if run.results]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe, of the first seed."""
        return self.runs[0].recipe


def group_runs(folders: Sequence[Folder]) -> list[Group]:
    """Groups in the order of their first runs, each with a label of its own."""
    groups: dict[str, Group] = {}
    for folder in folders:
        key = repr(sorted((k, v) for k, v in flatten(folder.recipe).items() if k not in SAME))
        groups.setdefault(key, Group(_method(folder))).runs.append(folder)
    found = list(groups.values())
    for group in found:
        group.runs.sort(key=lambda run: run.seed)
    for label in {group.label for group in found}:
        namesakes = [group for group in found if group.label == label]
        if len(namesakes) > 1:
            apart = differences([group.recipe for group in namesakes])
            telling = [key for key in apart if key not in ("name", "title")] or list(apart)
            for group in namesakes:
                values = flatten(group.recipe)
                said = (f"{key.removeprefix('options.')} = {show(values.get(key))}" for key in telling[:3])
                group.label = f"{label} · {', '.join(said)}"
    return found


def _method(folder: Folder) -> str:
    written = folder.results.get("method") or folder.recipe.get("method", {}).get("name")
    return str(written or folder.recipe.get("name") or folder.name)


def differences(recipes: Sequence[Mapping[str, Any]], beside: Iterable[str] = SAME) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all recipes, with the value in each.

    Args:
        recipes: to compare.
        beside: keys, or sections if they end in a dot, that are left out.
    """
    tables = [flatten(recipe) for recipe in recipes]
    left_out = tuple(beside)
    found = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        if key in left_out or key.startswith(tuple(name for name in left_out if name.endswith("."))):
            continue
        values = [table.get(key) for table in tables]
        if any(value != values[0] for value in values):
            found[key] = values
    return found


def untrained_rows(groups: Sequence[Group]) -> list[tuple[str, list[dict[str, Any]]]]:
    """What the untrained encoders are worth, each once: methods that begin with the same one share a row.

    Returns:
        Label and one result a seed.
    """
    rows: list[tuple[list[str], dict[int, dict[str, Any]], dict[str, Any]]] = []
    for group in groups:
        by_seed = {run.seed: run.untrained for run in group.runs if run.untrained}
        measured = {
            section: group.recipe.get(section) for section in ("data", "model", "views", "evaluation")
        } | {"start": group.recipe.get("train", {}).get("start")}
        if not by_seed:
            continue
        for labels, known, recipe in rows:
            shared = by_seed.keys() & known.keys()
            if recipe == measured and all(_scores(by_seed[seed]) == _scores(known[seed]) for seed in shared):
                labels.append(group.label)
                known |= by_seed
                break
        else:
            rows.append(([group.label], by_seed, measured))
    return [
        (
            _first_encoder(recipe) + ("" if len(rows) == 1 else f" of {', '.join(labels)}"),
            [known[seed] for seed in sorted(known)],
        )
        for labels, known, recipe in rows
    ]


def _first_encoder(recipe: Mapping[str, Any]) -> str:
    return "Start encoder" if recipe["start"] else "Untrained encoder"


def distinct_partitions(groups: Sequence[Group]) -> list[tuple[str, dict[str, Any]]]:
    """Each partition of the runs once, with words for whose it is."""
    users: dict[str, list[tuple[str, int]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for run in group.runs:
            if run.partition.get("clients"):
                key = repr(run.partition["clients"])
                found.setdefault(key, run.partition)
                users.setdefault(key, []).append((group.label, run.seed))
    return [(_whose(users[key]), partition) for key, partition in found.items()]


def _whose(runs: Sequence[tuple[str, int]]) -> str:
    labels = list(dict.fromkeys(label for label, _ in runs))
    seeds = ", ".join(map(str, sorted({seed for _, seed in runs})))
    return f"{labels[0] if len(labels) == 1 else f'{len(labels)} methods'}, seed {seeds}"


def _scores(results: Mapping[str, Any]) -> dict[str, Any]:
    # How training images lie at clients moves the clients' uniformity, not the encoder.
    return {key: value for key, value in results.items() if "client" not in key and key != "by_model"}


def show(value: Any) -> str:
    """A recipe's value in words."""
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "not set" if value is None else str(value)
