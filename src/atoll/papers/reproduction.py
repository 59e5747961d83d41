"""A selection of a table's rows to run: where, with which images, and how it differs from the paper's setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.config import describe, flatten
from atoll.data.options import DataOptions
from atoll.papers.images import image_changes
from atoll.papers.rows import Row, make_rows
from atoll.papers.scales import PAPER, about, titled
from atoll.papers.tables import PaperTable, load_table
from atoll.recipe.prerequisites import prerequisite_recipes
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
    """

    name: str
    table: PaperTable
    rows: tuple[Row, ...]
    seeds: int
    out: Path
    scale: str = PAPER

    @property
    def title(self) -> str:
        """Title of the result, which names the scale."""
        return titled(self.table, self.scale)

    def folders(self, row: Row) -> list[Path]:
        """Folders of a row's runs."""
        first = row.recipe.seed
        return [self.out / f"{row.name}-seed{seed}" for seed in range(first, first + self.seeds)]

    @property
    def published(self) -> bool:
        """Whether there are published values to compare with."""
        return any(value.get("value") for row in self.rows for value in row.published.values())

    def changed(self) -> dict[str, str]:
        """Describe what differs from the setting: the images, and the scale's and ``--set``'s changes.

        Returns:
            Both values in words, by key.
        """
        images = (
            {key: words for data in images_of(self.rows) for key, words in image_changes(data).items()}
            if self.published
            else {}
        )
        source = "the paper's" if self.published else "the table's"
        found: dict[str, tuple[list[Any], list[Any]]] = {}
        for row in self.rows:
            run, paper = (flatten(describe(one.completed())) for one in (row.recipe, row.paper))
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
            "changed": self.changed(),
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Collect the notes below the table; the note of a choice is included only if a row has the choice."""
        used = {name for row in self.rows for name in row.choices}
        return [
            *(
                note
                for name, note in self.table.notes.items()
                if note and (name in used or name not in self.table.choices)
            ),
            *(
                f"{column}: {UNMEASURED}, because {why}."
                for column, why in {
                    (column, one.missing) for row in self.rows for column, one in row.measures.items()
                }
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
    table, folder = load_table(name)
    rows = make_rows(table, settings, folder, wanted, scale)
    stem = Path(name).stem if scale == PAPER else f"{Path(name).stem}-{scale}"
    return Reproduction(name, table, tuple(rows), seeds, out or Path("runs") / stem, scale)


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
    return ", ".join(dict.fromkeys(source_words(describe(data)) for data in images_of(rows)))


def _words(values: Sequence[Any]) -> str:
    return " or ".join("unset" if value is None else str(value) for value in values)
