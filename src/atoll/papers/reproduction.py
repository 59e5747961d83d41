"""A selection of a table's rows to run: where, with which images, and how it differs from the paper's setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.run_names import run_name
from atoll.data.detection.load import why_no_objects
from atoll.data.options import DataOptions
from atoll.papers.images import image_changes
from atoll.papers.rows import Detection, Row, make_rows
from atoll.papers.scales import PAPER, about, titled
from atoll.papers.tables import DETECTION, PaperTable, figure_names, load_table, table_names
from atoll.recipe.engine_options import EngineOptions
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.recipe.recipe import Recipe, recipe_of
from atoll.report.numbers import UNMEASURED
from atoll.report.wording import source_words

NO_SETTING = ("engine.", "name", "title", "seed")  # recipe keys that are not part of a paper's setting


@dataclass(frozen=True)
class Reproduction:
    """A paper's table to run.

    Attributes:
        name: Name of the table, or its file.
        table: The content of the file.
        rows: The selected rows.
        seeds: Runs per row.
        out: Folder of the runs and their results.
        scale: Scale of the runs.
        trained_as: The row of the table that a row shares its training with, by row; the first that has it.
    """

    name: str
    table: PaperTable
    rows: tuple[Row, ...]
    seeds: int
    out: Path
    scale: str = PAPER
    trained_as: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Title of the result, which names the scale."""
        return titled(self.table, self.scale)

    def training_of(self, row: Row) -> str:
        """Name of the row whose training a row uses: its own, or that of the first with the same."""
        return self.trained_as.get(row.name, row.name)

    def folders(self, row: Row) -> list[Path]:
        """Folders of a row's runs. Rows with the same training share them, and so do tables beside each other."""
        first, name = row.recipe.seed, self.training_of(row)
        seeds = range(first, first + self.seeds)
        own = [self.out / run_name(name, seed) for seed in seeds]
        if any(Run(folder).exists() for folder in own):
            return own
        others = [self._elsewhere.get(repr(training(replace(row.recipe, seed=seed)))) for seed in seeds]
        found = [folder for folder in others if folder]
        return found if len(found) == len(own) else own

    @cached_property
    def _elsewhere(self) -> dict[str, Path]:
        """Finished runs of the other tables and figures in the same output root, by their training."""
        suffix = "" if self.scale == PAPER else f"-{self.scale}"
        names = [f"{name}{suffix}" for name in (*table_names(), *figure_names())]
        runs = [
            Run(path.parent)
            for name in names
            if self.out.name != name
            for path in sorted((self.out.parent / name).glob("*/recipe.toml"))
        ]
        found = {}
        for run in runs:
            with suppress(UserError):  # a run that cannot be read serves no other table
                if run.finished:
                    found[repr(training(recipe_of(run)))] = run.folder
        return found

    def trainings(self) -> list[Recipe]:
        """The distinct recipes to run here, named after their folders; each has the protocols of all its rows."""
        shared: dict[str, list[Row]] = {}
        for row in self.rows:
            if any(folder.parent != self.out for folder in self.folders(row)):
                continue  # another table has trained it
            shared.setdefault(self.training_of(row), []).append(row)
        recipes = []
        for name, rows in shared.items():
            recipe = rows[0].recipe
            protocols = dict.fromkeys(one for row in rows for one in row.recipe.evaluation.at_end)
            evaluation = replace(recipe.evaluation, at_end=tuple(protocols))
            recipes.append(replace(recipe, name=name, evaluation=evaluation))
        return recipes

    @property
    def published(self) -> bool:
        """Whether there are published values to compare with."""
        return any(value.get("value") for row in self.rows for value in row.published.values())

    @property
    def of_paper(self) -> bool:
        """Whether the setting is a paper's: a table with published values, or a figure."""
        return self.published or bool(self.table.figure)

    def changed(self) -> dict[str, str]:
        """Describe what differs from the setting: the images, and the scale's and ``--set``'s changes.

        Returns:
            Both values in words, by key.
        """
        papers = {data.path for data in images_of(replace(row, recipe=row.paper) for row in self.rows)}
        images = {
            key: words
            for data in images_of(self.rows)
            if self.of_paper and data.path in papers
            for key, words in image_changes(data).items()
        }
        source = "the paper's" if self.of_paper else "the table's"
        found: dict[str, tuple[list[Any], list[Any]]] = {}
        for row in self.rows:
            run, paper = (flatten(describe(one.completed())) for one in (row.recipe, row.paper))
            if row.detection:
                run |= flatten({DETECTION: describe(row.detection.options)})
                paper |= flatten({DETECTION: describe(row.detection.paper)})
            for key in sorted(run | paper):
                if run.get(key) != paper.get(key) and not key.startswith(NO_SETTING):
                    for values, value in zip(
                        found.setdefault(key, ([], [])), (run.get(key), paper.get(key)), strict=True
                    ):
                        values += [] if value in values else [value]
        return images | {
            key: f"{_words(run)}; in {source} setting {_words(paper)}" for key, (run, paper) in found.items()
        }

    def header(self) -> dict[str, Any]:
        """The parts of a result's record that are known before any run."""
        return {
            "table": self.name,
            "title": self.title,
            "scale": self.scale,
            "scale_about": about(self.table, self.scale),
            "published": self.published,
            "of_paper": self.of_paper,
            "changed": self.changed(),
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Collect the notes below the table; the note of a choice is included only if a row has the choice."""
        used = {name for row in self.rows for name in row.choices}
        return [
            *dict.fromkeys(
                note
                for name, note in self.table.notes.items()
                if note and (name in used or name not in self.table.choices)
            ),
            *(
                f"{column}: {UNMEASURED}, because {why}."
                for column, why in dict.fromkeys(
                    (column, one.missing) for row in self.rows for column, one in row.measures.items()
                )
                if why
            ),
        ]


def find_table(
    name: str,
    wanted: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: int = 1,
    out: Path | None = None,
    scale: str = PAPER,
) -> Reproduction:
    """Load a table by name or file, and make its rows.

    Args:
        name: Name of the table, or a TOML file.
        wanted: Rows, by name or by a pattern such as ``"cifar10-*"``; all if empty.
        settings: ``key=value`` settings, applied to the recipe of every row.
        seeds: Runs per row.
        out: Folder of the runs; None for ``runs/TABLE``, or ``runs/TABLE-SCALE``.
        scale: Name of the scale.

    Raises:
        UserError: The table, a row or the scale is unknown, or a recipe is invalid.
    """
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; it must be at least 1")
    table, folder = load_table(name)
    rows = make_rows(table, settings, folder, wanted, scale)
    every = make_rows(table, (), folder, (), scale) if wanted or settings else rows
    stem = Path(name).stem if scale == PAPER else f"{Path(name).stem}-{scale}"
    return Reproduction(name, table, tuple(rows), seeds, out or Path("runs") / stem, scale, _shared(every))


def _shared(rows: Iterable[Row]) -> dict[str, str]:
    """The first row with the same training as each row; they differ in what is measured only."""
    first: dict[str, str] = {}
    return {row.name: first.setdefault(repr(training(row.recipe)), row.name) for row in rows}


def training(recipe: Recipe) -> Recipe:
    """A recipe without what does not decide its training: names, the engine, the last evaluation's protocols."""
    evaluation = replace(recipe.evaluation, at_end=())
    return replace(recipe.completed(), name="", title="", engine=EngineOptions(), evaluation=evaluation)


def images_of(rows: Iterable[Row]) -> list[DataOptions]:
    """Images that rows need for training, for the evaluation, and for the prerequisites of their methods."""
    found: list[DataOptions] = []
    for row in rows:
        first = [other.data for other in prerequisite_recipes(row.recipe).values()]
        for data in [row.recipe.data, *first, *([row.measured_on] if row.measured_on else [])]:
            if data not in found:
                found.append(data)
    return found


def image_names(rows: Iterable[Row]) -> str:
    """Sources of the images that rows need, in words."""
    rows = list(rows)
    objects = [_object_words(row.detection) for row in rows if row.detection]
    return ", ".join(dict.fromkeys([*(source_words(describe(data)) for data in images_of(rows)), *objects]))


def missing_images(row: Row, why: Callable[[DataOptions], str]) -> dict[str, str]:
    """The images that a row needs and that are not on this machine, in words, and the reason.

    Args:
        row: The row.
        why: Reason why a source's images are missing, such as `atoll.data.sources.why_missing`.
    """
    found = {source_words(describe(data)): why(data) for data in images_of([row])}
    if row.detection:
        found[_object_words(row.detection)] = why_no_objects(row.detection.data)
    return {words: reason for words, reason in found.items() if reason}


def _object_words(detection: Detection) -> str:
    return f"{detection.data} (annotated objects)"


def _words(values: Sequence[Any]) -> str:
    return " or ".join(
        "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for value in values
    )
