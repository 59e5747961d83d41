"""What a table of results says: columns, mean and standard deviation, and the constants behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A measure as tables and curves print it.

    Attributes:
        key: of the results.
        heading: of the column.
        factor: from the results' unit to the printed one.
        digits: after the point.
        ranks: whether the highest value is marked: more is better without an "if".
    """

    key: str
    heading: str
    factor: float = 1.0
    digits: int = 1
    ranks: bool = False

    def values(self, results: Iterable[Mapping[str, Any]]) -> list[float]:
        """The printed values of all results that have a finite one."""
        found = (result.get(self.key) for result in results)
        return [
            self.factor * value
            for value in found
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ]


GEOMETRY = (
    Column("geometry/uniformity", "−uniformity", -1.0, 3),
    Column("geometry/effective_rank", "effective rank", 1.0, 1),
)
ALIGNMENT = Column("geometry/alignment", "alignment", 1.0, 3)
CLIENTS = (
    Column("geometry/clients_uniformity", "−uniformity, training images", -1.0, 3),
    Column("geometry/clients_uniformity_intra", "within clients", -1.0, 3),
    Column("geometry/clients_uniformity_inter", "between clients", -1.0, 3),
)
MEASURES = (
    "accuracy",
    "last_accuracy",
    "epoch",
    "singular_values",
    "uniformity",
    "effective_rank",
    "alignment",
)


def columns(results: Iterable[Mapping[str, Any]]) -> list[Column]:
    """The columns of the main table: every accuracy that was measured, then the geometry."""
    protocols = {
        key.removesuffix("/accuracy") for result in results for key in result if key.endswith("/accuracy")
    }
    protocols |= {"knn", "probe"} if protocols else set()
    order = sorted(protocols, key=lambda name: (name != "knn", name != "probe", name))
    accuracies = (
        Column(f"{name}/accuracy", f"{'kNN' if name == 'knn' else name} %", 100.0, 2, ranks=True)
        for name in order
    )
    return [*accuracies, *GEOMETRY]


@dataclass(frozen=True)
class Spread:
    """Values over seeds.

    Attributes:
        count: how many.
        mean: of them.
        std: their standard deviation (n − 1 in the denominator); None for a single value.
    """

    count: int
    mean: float
    std: float | None

    def overlaps(self, other: Spread) -> bool:
        """Whether the two are within their standard deviations of each other."""
        return abs(self.mean - other.mean) <= (self.std or 0.0) + (other.std or 0.0)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation; None of nothing."""
    if not values:
        return None
    return Spread(
        len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    )


UNMEASURED = "–"


def mean_std(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation; the mean alone of a single value, or of values that all print alike."""
    found = spread(values)
    if found is None:
        return UNMEASURED
    mean = number(found.mean, digits)
    alike = max(values) - min(values) < 10.0**-digits / 2
    return mean if alike or found.std is None else f"{mean} ± {number(found.std, digits)}"


def best(row: Sequence[Spread | None]) -> list[bool]:
    """Which are the highest, or cannot be told from it over their seeds."""
    found = [value for value in row if value is not None]
    if len(found) < 2:
        return [False] * len(row)
    top = max(found, key=lambda value: value.mean)
    return [value is not None and (value.mean == top.mean or value.overlaps(top)) for value in row]


def number(value: float, digits: int) -> str:
    """A number with a true minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


def constants(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The constants of every protocol of an evaluation, by protocol."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in results.items():
        protocol, slash, name = key.partition("/")
        if slash and name not in MEASURES and not name.startswith("clients_uniformity"):
            found.setdefault(protocol, {})[name] = value
    return found


def megabytes(count: float) -> str:
    """Bytes as people read them (a megabyte is a million)."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 2), ("kB", 1e3, 1)):
        if count >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count:,.0f} bytes"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines in Markdown: the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (header, rule, *rows)
    ]
