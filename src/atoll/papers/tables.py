"""The form of the papers' tables and figures, and the files that hold them.

A table is a TOML file in ``tables``, a figure one in ``figures``. Its ``rows`` are products of axes, each a list of
names of ``choices``. A choice names its changes of the recipe and the keys of its published values:

    title = "…"                      # the content of the table
    recipe = "ssd-paper"             # the paper's setting, a preset or a file next to this one
    columns = ["LP acc %"]           # names of measures
    rows = [[["silo", "device"], ["fedx", "ssd"]]]     # four rows
    [published]                      # keys that find the published values of all rows
    [changes]                        # of the recipe, for all rows
    [measures."LP acc %"]            # the key in a run's evaluation
    [choices.ssd]                    # title, published, changes, measures, measured_on, detection, scale
    [detection]                      # data and options with which the encoder is fine-tuned to detect objects
    [scale.cpu]                      # about, changes, at_most, detection: see `Scale`
    [notes]                          # sentences below the table
    [figure]                         # a figure only: how it is drawn

``base`` names another table or figure that this one overrides.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from atoll.core.config import build, packaged, read
from atoll.core.errors import UserError, did_you_mean
from atoll.evaluation import PROTOCOLS
from atoll.evaluation.metrics import METRICS

CLASSIFIER = "classifier"  # measured in addition to the protocols if a method trains one
DETECTION = "detection"  # the first part of a measure of detection, such as "detection/bbox/AP"


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
        known = (*PROTOCOLS, CLASSIFIER, DETECTION)
        if self.of and self.protocol not in known:
            raise UserError(
                f"no protocol {self.protocol!r} to measure {self.of!r}; {did_you_mean(self.protocol, known)}"
            )
        keys = {metric.key for metric in METRICS}
        if self.of and self.protocol not in (CLASSIFIER, DETECTION) and self.of not in keys:
            raise UserError(f"no evaluation has the key {self.of!r}; {did_you_mean(self.of, keys)}")

    @property
    def protocol(self) -> str:
        """Protocol that measures it."""
        return self.of.partition("/")[0]


@dataclass(frozen=True)
class Scale:
    """Changes that shorten the runs of a table; what they change is listed as "NOT the paper's setting".

    Options of components that a row's method does not have are left out.

    Attributes:
        about: What the scale is for, in words.
        changes: Changes of the recipe.
        at_most: Maxima of the recipe's numbers; a smaller number stays, so untrained rows remain untrained.
        detection: Changes of the options of detection.
    """

    about: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    at_most: dict[str, Any] = field(default_factory=dict)
    detection: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One value on an axis of a table.

    Attributes:
        title: Its part of the row's label.
        published: Keys of its published values.
        changes: Changes of the recipe. A new method name drops the former method and its options.
        measures: Columns with another measurement.
        measured_on: Other images, as a ``[data]`` table, on which the finished encoder is evaluated.
        detection: Options of detection, and its images as ``data``.
        scale: Its own changes at a scale, after the table's.
    """

    title: str
    published: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    detection: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Scale] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    """The content of a table's or a figure's file; this module's docstring describes its form."""

    title: str
    recipe: str
    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], ...], ...]
    published: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    detection: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    scale: dict[str, Scale] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    figure: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError("rows is empty; give at least one row")
        for column in self.columns:
            _known(column, self.measures, "columns names the measure")
        for name in (name for group in self.rows for axis in group for name in axis):
            _known(name, self.choices, "rows names the choice")


def table_names() -> list[str]:
    """Names of the tables that Atoll contains."""
    return list(packaged("tables"))


def figure_names() -> list[str]:
    """Names of the figures that Atoll contains."""
    return list(packaged("figures"))


@cache
def listed() -> dict[str, dict[str, str]]:
    """All tables and figures of the papers, from ``papers/inventory.toml``: for some a ``title`` and ``why``.

    ``why`` is the reason why there is no file for it.
    """
    text = (resources.files("atoll.papers") / "inventory.toml").read_text("utf-8")
    return {name: dict(about) for name, about in tomllib.loads(text).items()}


def load_table(name: str) -> tuple[PaperTable, Path]:
    """Load a table or a figure by name or from a TOML file; also return the folder of its recipe.

    Raises:
        UserError: The table does not exist or is invalid.
    """
    if why := listed().get(name, {}).get("why"):
        raise UserError(f"{name} is not covered: {why}")
    known = packaged("tables") | packaged("figures")
    table = build(PaperTable, read(name, known, "table", "paper's table or figure"), "table")
    return table, Path() if name in known else Path(name).parent


def _known(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise UserError(f"the table's {what} {name!r}; {did_you_mean(name, known)}")
