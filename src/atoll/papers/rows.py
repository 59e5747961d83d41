"""Rows of a table: the runs, the measurements and the published values of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from atoll.core.config import build, describe, over, read
from atoll.core.errors import UserError, did_you_mean
from atoll.data.options import DataOptions
from atoll.evaluation import PROTOCOLS
from atoll.evaluation.detection.options import DetectionOptions
from atoll.papers.published import find_published
from atoll.papers.scales import PAPER, apply_scale, check_scale, detection_changes, titled
from atoll.papers.tables import CLASSIFIER, DETECTION, Measure, PaperTable
from atoll.recipe.recipe import Recipe, make_recipe, presets
from atoll.recipe.table import recipe_folders


@dataclass(frozen=True)
class Detection:
    """Fine-tuning of a row's encoder to detect objects.

    Attributes:
        data: Folder of the annotated images.
        options: The options.
        paper: The options at the paper's scale.
    """

    data: str
    options: DetectionOptions
    paper: DetectionOptions


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: Name of the row and of its runs.
        choices: The choice on each axis.
        label: Label for readers.
        recipe: The recipe to run.
        paper: The recipe at the paper's scale, and without changes by ``--set``.
        measures: The measure of each column.
        published: The paper's value of each column: a line of ``published.csv``, or empty.
        measured_on: The images on which the encoder is evaluated, if not the recipe's.
        detection: The fine-tuning to detect objects, if the row measures that.
    """

    name: str
    choices: tuple[str, ...]
    label: str
    recipe: Recipe
    paper: Recipe
    measures: dict[str, Measure]
    published: dict[str, dict[str, str]]
    measured_on: DataOptions | None
    detection: Detection | None


def make_rows(
    table: PaperTable,
    settings: Sequence[str] = (),
    folder: Path = Path(),
    wanted: Sequence[str] = (),
    scale: str = PAPER,
) -> list[Row]:
    """Make the rows of a table.

    Args:
        table: The table.
        settings: ``key=value`` settings, applied to the recipe of every row.
        folder: Folder of the table's file; modules that the table names are searched for there and in the folder of
            its recipe.
        wanted: Rows, by name or by a pattern such as ``"cifar10-*"``; all if empty.
        scale: Name of the scale.

    Raises:
        UserError: A row or the scale is unknown, a recipe is invalid, or a published value is missing.
    """
    check_scale(table, scale)
    base = _apply(read(table.recipe, presets(), folder=folder), table.changes)
    folders = [folder]
    if table.recipe not in presets():
        folders += recipe_folders(folder / table.recipe)
    made_of = {"-".join(names): names for group in table.rows for names in product(*group)}
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in made_of):
            raise UserError(f"the table has no row {pattern!r}; {did_you_mean(pattern, made_of)}")
    return [
        _row(table, base, names, settings, scale, folders)
        for name, names in made_of.items()
        if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)
    ]


def _row(
    table: PaperTable,
    base: Mapping[str, Any],
    names: tuple[str, ...],
    settings: Sequence[str],
    scale: str,
    folders: Sequence[Path],
) -> Row:
    choices = [table.choices[name] for name in names]
    name, label = "-".join(names), ", ".join(choice.title for choice in choices)
    keys, measures, elsewhere = dict(table.published), dict(table.measures), dict(table.measured_on)
    detecting = dict(table.detection)
    for choice in choices:
        base = _apply(base, choice.changes)
        keys |= choice.published
        measures |= choice.measures
        elsewhere |= choice.measured_on
        detecting |= choice.detection
    measures = {column: measures[column] for column in table.columns}
    protocols = [one.protocol for one in measures.values() if one.protocol in PROTOCOLS]
    if elsewhere and any(one.protocol == CLASSIFIER for one in measures.values()):
        raise UserError(
            f"row {name} of the table: a classifier cannot be evaluated on the classes of other images"
        )
    at_end = ["geometry"] if detecting else ["knn"] if elsewhere else list(dict.fromkeys(protocols))
    base = over(base, {"name": name, "title": f"{table.title}: {label}", "evaluation": {"at_end": at_end}})
    try:
        paper = make_recipe(base, folders=folders)
        if scale != PAPER:
            base = {**apply_scale(paper, table, names, scale), "title": f"{titled(table, scale)}: {label}"}
        recipe = make_recipe(base, settings, folders) if settings or scale != PAPER else paper
        data = build(DataOptions, {**describe(recipe.data), **elsewhere}) if elsewhere else None
        detection = _detection(detecting, detection_changes(table, names, scale)) if detecting else None
    except UserError as error:
        raise UserError(f"row {name} of the table: {error}") from None
    published = {
        column: find_published({**keys, **one.published}, column) if keys and not table.figure else {}
        for column, one in measures.items()
    }
    return Row(name, names, label, recipe, paper, measures, published, data, detection)


def _detection(table: Mapping[str, Any], changes: Mapping[str, Any]) -> Detection:
    options = {key: value for key, value in table.items() if key != "data"}
    paper = build(DetectionOptions, options, DETECTION)
    return Detection(
        str(table.get("data", "")), build(DetectionOptions, {**options, **changes}, DETECTION), paper
    )


def _apply(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to a recipe; a new method drops the former one's options."""
    if "name" in changes.get("method", {}):
        base = {section: value for section, value in base.items() if section not in ("method", "options")}
    return over(base, changes)
