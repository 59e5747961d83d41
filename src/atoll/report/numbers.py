"""Numbers as tables print them: mean and standard deviation over seeds, signs, bytes, Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNMEASURED = "–"


@dataclass(frozen=True)
class Spread:
    """Values over seeds.

    Attributes:
        count: How many.
        mean: Of them.
        std: Their standard deviation (n − 1 in the denominator); None for a single value.
        width: From the lowest to the highest.
    """

    count: int
    mean: float
    std: float | None
    width: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the two are within their standard deviations of each other."""
        return abs(self.mean - other.mean) <= (self.std or 0.0) + (other.std or 0.0)

    def words(self, digits: int) -> tuple[str, str]:
        """The mean, and " ± standard deviation"; the second is empty if all values print alike."""
        alike = self.std is None or self.width < 10.0**-digits / 2
        return number(self.mean, digits), "" if alike else f" ± {number(self.std or 0.0, digits)}"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation; None of nothing."""
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), std, max(values) - min(values))


def mean_std(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation; only the mean if there is one value or all values print alike."""
    found = spread(values)
    return UNMEASURED if found is None else "".join(found.words(digits))


def best(column: Sequence[Spread | None]) -> list[bool]:
    """Which values are the highest, or within the standard deviations of the highest."""
    found = [value for value in column if value is not None]
    if len(found) < 2:
        return [False] * len(column)
    top = max(found, key=lambda value: value.mean)
    return [value is not None and (value.mean == top.mean or value.overlaps(top)) for value in column]


def number(value: float, digits: int) -> str:
    """A number with a true minus sign."""
    return f"{value:.{digits}f}".replace("-", "−")


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
