"""Groups of runs, and the rows and columns of a table of results, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.config import flatten
from atoll.core.given import PREFIX
from atoll.evaluation.metrics import Metric, measured
from atoll.models import ENCODER_OPTIONS, is_external
from atoll.report.folders import Folder
from atoll.report.numbers import Spread, spread
from atoll.report.wording import show, without_folder

# Keys that may differ within a group of runs: seed, names, and what does not change results.
SAME = ("seed", "name", "title", "engine.devices", "engine.workers", "engine.streams", "engine.decoders")
# Keys that are expected to differ in a comparison of methods.
EXPECTED = ("method.", "options.", *SAME)
MAX_DIFFERENCES = 3  # in a label


@dataclass
class Group:
    """Runs of one recipe, one for each seed.

    Attributes:
        label: Name on the page and in the terminal.
        runs: The runs in the order of their seeds.
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
    def evaluated(self) -> tuple[int, ...]:
        """The seeds of the runs that have a final evaluation."""
        return tuple(run.seed for run in self.runs if run.results)

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the first seed."""
        return self.runs[0].recipe


@dataclass(frozen=True)
class Row:
    """An encoder in a table of results.

    Attributes:
        label: Name of the encoder.
        results: Results, one for each seed.
        line: Number of the line in the figures: the method's index, or a negative number for an untrained encoder.
        runs: Number of runs in the row, with or without results.
        seeds: The seeds of the results, if they are known.
    """

    label: str
    results: list[dict[str, Any]]
    line: int
    runs: int
    seeds: tuple[int, ...] = ()

    def spread(self, metric: Metric) -> Spread | None:
        """Spread of a metric over the seeds."""
        return spread(metric.values(self.results))


def group_runs(folders: Sequence[Folder]) -> list[Group]:
    """Group runs in the order of their first runs, each group with a unique label.

    Two runs belong to one group if their recipes only differ in the seed, the name, the title and the number of
    workers, and if they had the same images. A group has each seed once; a repeated run is not a further sample,
    so it starts another group.
    """
    groups: dict[str, list[Group]] = {}
    found: list[Group] = []
    # A run without results does not know its images yet; they are those of a run with the same recipe.
    known = {_key(folder): folder.images for folder in reversed(folders) if folder.images}
    for folder in folders:
        images = folder.images if folder.results else known.get(_key(folder))
        same = groups.setdefault(_key(folder, images), [])
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


def _key(folder: Folder, images: tuple[str, str] | None = None) -> str:
    """Text that is equal for the runs of a group; images may lie elsewhere, and others in the same place."""
    recipe = {k: v for k, v in flatten(folder.recipe).items() if k not in SAME}
    return repr(sorted({**recipe, **({"data.path": images} if images else {})}.items()))


def _method(group: Group) -> str:
    named = next((run.results["method"] for run in group.runs if "method" in run.results), None)
    recipe = group.recipe
    return str(named or recipe.get("method", {}).get("name") or recipe.get("name") or group.runs[0].name)


def _labels(names: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Extend equal names by the values that distinguish them."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for name, recipe in zip(names, recipes, strict=True):
        alike.setdefault(name, []).append(recipe)
    distinguishing = {
        name: list(differences(equals)) or list(differences(equals, except_=("seed",)))
        for name, equals in alike.items()
    }
    labels = []
    for name, recipe in zip(names, recipes, strict=True):
        different = distinguishing[name]
        values = flatten(recipe)
        if is_external(str(values.get("model.encoder"))):  # it ignores the options of Atoll's encoders
            different = [key for key in different if key.removeprefix("model.") not in ENCODER_OPTIONS]
        facts = [
            f"{key.removeprefix('options.')} = {show(values.get(key))}" for key in different[:MAX_DIFFERENCES]
        ]
        labels.append(f"{name} · {', '.join(facts)}" if facts else name)
    return labels


def differences(recipes: Sequence[Mapping[str, Any]], except_: Iterable[str] = SAME) -> dict[str, list[Any]]:
    """Find the keys whose values differ between recipes, with the value in each.

    Args:
        recipes: The recipes to compare.
        except_: Keys, or sections if they end in a dot, that are ignored.
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
    """An initial encoder: its settings and images, the methods that start from it, and its results by seed."""

    recipe: dict[str, Any]
    images: tuple[str, str] | None
    methods: list[str]
    by_seed: dict[int, dict[str, Any]]

    def is_same(self, other: _Start) -> bool:
        shared = other.by_seed.keys() & self.by_seed.keys()
        return (
            self.recipe == other.recipe
            and (self.images == other.images or not self.images or not other.images)
            and all(_scores(other.by_seed[seed]) == _scores(self.by_seed[seed]) for seed in shared)
        )


def untrained_rows(groups: Sequence[Group]) -> list[Row]:
    """Rows of the initial encoders; methods that start from the same one share a row."""
    starts: list[_Start] = []
    for group in groups:
        by_seed = {run.seed: run.untrained for run in group.runs if run.untrained}
        recipe = {name: group.recipe.get(name) for name in ("data", "model", "views", "evaluation")}
        recipe["train"] = {"start": group.recipe.get("train", {}).get("start")}
        found = _Start(recipe, group.runs[0].images, [group.label], by_seed)
        start = next((start for start in starts if start.is_same(found)), None)
        if start is None:
            starts.append(found)
        else:
            start.methods.append(group.label)
            start.by_seed |= by_seed
    names = [_start_name(_origin(start.recipe), len(starts) > 1) for start in starts]
    labels = _labels(names, [start.recipe for start in starts])
    return [
        Row(
            label if labels.count(label) == 1 else f"{label} of {', '.join(start.methods)}",
            [start.by_seed[seed] for seed in sorted(start.by_seed)],
            -1 - k,
            len(start.by_seed),
            tuple(sorted(start.by_seed)),
        )
        for k, (start, label) in enumerate(zip(starts, labels, strict=True))
    ]


def _origin(recipe: Mapping[str, Any]) -> str | None:
    """Where a first encoder's weights come from, if they are not random."""
    model = recipe["model"] or {}
    named = f"torchvision:{model['encoder']}" if model.get("init") == "torchvision" else None
    _, _, name = model.get("encoder", "").partition(PREFIX)  # perhaps a trained module
    return recipe["train"]["start"] or model.get("weights") or named or name.partition("#")[0]


def _start_name(path: str | None, several: bool) -> str:
    if not path:
        return "Untrained encoder"
    return f"Start encoder ({without_folder(path)})" if several else "Start encoder"


def _scores(results: Mapping[str, Any]) -> dict[str, Any]:
    # The partition of the training images changes the clients' uniformity, not the encoder.
    return {key: value for key, value in results.items() if "client" not in key and key != "by_model"}


def result_rows(groups: Sequence[Group]) -> list[Row]:
    """Rows of all tables of results: the initial encoders, then the methods."""
    rows = [
        Row(group.label, group.results, i, len(group.runs), group.evaluated) for i, group in enumerate(groups)
    ]
    return [*untrained_rows(groups), *rows]


def result_columns(rows: Sequence[Row], place: str = "results") -> list[Metric]:
    """Columns of a table of results: all metrics that any of its rows has."""
    return measured((result for row in rows for result in row.results), place)


def have_other_seeds(rows: Sequence[Row]) -> bool:
    """Whether methods with results have results of other seeds, not only of fewer or more."""
    seeds = [set(row.seeds) for row in rows if row.line >= 0 and row.seeds]
    return any(not (one <= other or other <= one) for one in seeds for other in seeds)


def stopped_early(groups: Sequence[Group]) -> str:
    """Which runs early stopping ended, and when; empty if it ended none."""
    ended = [
        f"{group.label}, seed {run.seed}, after round {run.rounds} of {run.planned}"
        for group in groups
        for run in group.runs
        if run.stopped_early
    ]
    return f"stopped early: {'; '.join(ended)}" if ended else ""


def seed_words(seeds: Sequence[int]) -> str:
    """Format seeds.

    Example:
        >>> from atoll.report.groups import seed_words
        >>> seed_words([0]), seed_words([0, 2])
        ('seed 0', 'seeds 0, 2')
    """
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
