"""Papers' tables: the runs, the measurements and the published values of each row.

A table is a TOML file. Its ``rows`` are products of axes, each a list of names of ``choices``. A choice names its
changes of the recipe and the keys of its published values:

    title = "…"                      # the content of the table
    recipe = "ssd-paper"             # the paper's setting, a preset or a file next to this one
    columns = ["LP acc %"]           # names of measures
    rows = [[["silo", "device"], ["fedx", "ssd"]]]     # four rows
    [published]                      # keys that find the published values of all rows
    [changes]                        # of the recipe, for all rows
    [measures."LP acc %"]            # the key in a run's evaluation
    [choices.ssd]                    # title, published, changes, measures, measured_on
    [notes]                          # sentences below the table

``base`` names another table that this one overrides.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from atoll.core.config import build, describe, over, packaged, read
from atoll.core.errors import UserError, did_you_mean
from atoll.data.options import DataOptions
from atoll.evaluation import PROTOCOLS
from atoll.recipe.recipe import Recipe, make_recipe, presets

CLASSIFIER = "classifier"  # measured in addition to the protocols if a method trains one
NOT_COVERED = {  # the papers' other tables, and the reasons why Atoll does not cover them
    "dec-ssl-1-left": "ImageNet-100's encoders in a Mask R-CNN on COCO, for which Atoll has no protocol",
    "dec-ssl-1-right": "segmentation of Amazon's packages, whose images are not public",
}


@dataclass(frozen=True)
class Measure:
    """A column of a table.

    Attributes:
        of: The key in a run's evaluation, such as ``"probe-ssd/accuracy"``.
        times: Factor from the evaluation's unit to the published one.
        missing: Reason why Atoll does not measure it; then ``of`` is empty.
        published: Keys of the published values that differ from the row's; ``metric``, if not the column's name.
    """

    of: str = ""
    times: float = 1.0
    missing: str = ""
    published: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.of) == bool(self.missing):
            raise UserError(
                "a measure needs a key, or the reason why Atoll does not measure it: set one of 'of' and 'missing'"
            )
        known = (*PROTOCOLS, CLASSIFIER)
        if self.of and self.protocol not in known:
            raise UserError(
                f"no protocol {self.protocol!r} to measure {self.of!r}; {did_you_mean(self.protocol, known)}"
            )

    @property
    def protocol(self) -> str:
        """Protocol that measures it."""
        return self.of.partition("/")[0]


@dataclass(frozen=True)
class Choice:
    """One value on an axis of a table.

    Attributes:
        title: Its part of the row's label.
        published: Keys of its published values.
        changes: Changes of the recipe. A new method name drops the former method and its options.
        measures: Columns with another measurement.
        measured_on: Other images, as a ``[data]`` table, on which the finished encoder is evaluated.
    """

    title: str
    published: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    """The content of a table's file; this module's docstring describes its form."""

    title: str
    recipe: str
    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], ...], ...]
    published: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column in self.columns:
            _known(column, self.measures, "columns names the measure")
        for name in (name for group in self.rows for axis in group for name in axis):
            _known(name, self.choices, "rows names the choice")


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: Name of the row and of its runs.
        choices: The choice on each axis.
        label: Label for readers.
        recipe: The recipe to run.
        paper: The recipe without changes by ``--set``.
        measures: The measure of each column.
        published: The paper's value of each column: a line of ``published.csv``, or empty.
        measured_on: The images on which the encoder is evaluated, if not the recipe's.
    """

    name: str
    choices: tuple[str, ...]
    label: str
    recipe: Recipe
    paper: Recipe
    measures: dict[str, Measure]
    published: dict[str, dict[str, str]]
    measured_on: DataOptions | None


def table_names() -> list[str]:
    """Names of the tables that Atoll contains."""
    return list(packaged("tables"))


def load_table(name: str) -> tuple[PaperTable, Path]:
    """Load a table by name or from a TOML file; also return the folder of its recipe.

    Raises:
        UserError: The table does not exist or is invalid.
    """
    if name in NOT_COVERED:
        raise UserError(f"the table {name!r} is not covered: {NOT_COVERED[name]}")
    known = packaged("tables")
    table = build(PaperTable, read(name, known, "table", "paper's table"), "table")
    return table, Path() if name in known else Path(name).parent


def make_rows(
    table: PaperTable,
    settings: Sequence[str] = (),
    folder: Path = Path(),
    wanted: Sequence[str] = (),
) -> list[Row]:
    """Make the rows of a table.

    Args:
        table: The table.
        settings: ``key=value`` settings, applied to the recipe of every row.
        folder: Folder of the table's recipe.
        wanted: Rows, by name or by a pattern such as ``"cifar10-*"``; all if empty.

    Raises:
        UserError: A row is unknown, a recipe is invalid, or a published value is missing.
    """
    base = _apply(read(table.recipe, presets(), folder=folder), table.changes)
    made_of = {"-".join(names): names for group in table.rows for names in product(*group)}
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in made_of):
            raise UserError(f"the table has no row {pattern!r}; {did_you_mean(pattern, made_of)}")
    return [
        _row(table, base, names, settings)
        for name, names in made_of.items()
        if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)
    ]


def _row(table: PaperTable, base: Mapping[str, Any], names: tuple[str, ...], settings: Sequence[str]) -> Row:
    choices = [table.choices[name] for name in names]
    name, label = "-".join(names), ", ".join(choice.title for choice in choices)
    keys, measures, elsewhere = dict(table.published), dict(table.measures), dict(table.measured_on)
    for choice in choices:
        base = _apply(base, choice.changes)
        keys |= choice.published
        measures |= choice.measures
        elsewhere |= choice.measured_on
    measures = {column: measures[column] for column in table.columns}
    protocols = [one.protocol for one in measures.values() if one.protocol in PROTOCOLS]
    if elsewhere and any(one.protocol == CLASSIFIER for one in measures.values()):
        raise UserError(
            f"row {name} of the table: a classifier cannot be evaluated on the classes of other images"
        )
    evaluation = {"at_end": ["knn"] if elsewhere else list(dict.fromkeys(protocols))}
    base = over(base, {"name": name, "title": f"{table.title}: {label}", "evaluation": evaluation})
    try:
        paper = make_recipe(base)
        recipe = make_recipe(base, settings) if settings else paper
        data = build(DataOptions, {**describe(recipe.data), **elsewhere}) if elsewhere else None
    except UserError as error:
        raise UserError(f"row {name} of the table: {error}") from None
    published = {
        column: find_published({**keys, **one.published}, column) if keys else {}
        for column, one in measures.items()
    }
    return Row(name, names, label, recipe, paper, measures, published, data)


def _apply(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to a recipe; a new method drops the former one's options."""
    if "name" in changes.get("method", {}):
        base = {section: value for section, value in base.items() if section not in ("method", "options")}
    return over(base, changes)


@cache
def _published() -> list[dict[str, str]]:
    text = (resources.files("atoll") / "tables" / "published.csv").read_text("utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def find_published(keys: Mapping[str, str], metric: str) -> dict[str, str]:
    """Find the line of ``published.csv`` with these keys; its ``value`` has the paper's digits.

    Raises:
        UserError: There is no such line, or more than one.
    """
    wanted = {"metric": metric, **keys}
    found = [row for row in _published() if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        query = ", ".join(f"{key} = {value!r}" for key, value in wanted.items())
        raise UserError(
            f"{len(found) or 'no'} published values have {query}; the keys must select exactly one"
        )
    return found[0]


def _known(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise UserError(f"the table's {what} {name!r}; {did_you_mean(name, known)}")
