"""Formatting of numbers in tables: mean and standard deviation over seeds, signs, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNMEASURED = "–"
HUGE = 1e12


@dataclass(frozen=True)
class Spread:
    """Statistics of values over seeds.

    Attributes:
        count: Number of values.
        mean: Mean of the values.
        std: Standard deviation (n − 1 in the denominator); None for a single value.
        width: Difference between the highest and the lowest value.
    """

    count: int
    mean: float
    std: float | None
    width: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the difference of the means is at most the sum of the standard deviations."""
        return abs(self.mean - other.mean) <= (self.std or 0.0) + (other.std or 0.0)

    def words(self, digits: int) -> tuple[str, str]:
        """Format the mean, and " ± standard deviation", which is empty if all values are equal when rounded."""
        equal = self.std is None or self.width < 10.0**-digits / 2
        return number(self.mean, digits), "" if equal else f" ± {number(self.std or 0.0, digits)}"


def spread(values: Sequence[float]) -> Spread | None:
    """Compute the statistics of values; None if there are no values."""
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), std, max(values) - min(values))


def mean_std(values: Sequence[float], digits: int) -> str:
    """Format mean ± standard deviation; only the mean if there is one value, or all are equal when rounded."""
    found = spread(values)
    return UNMEASURED if found is None else "".join(found.words(digits))


def best(column: Sequence[Spread | None]) -> list[bool]:
    """Mark the values that are the highest, or within the standard deviations of the highest."""
    found = [value for value in column if value is not None]
    if len(found) < 2:
        return [False] * len(column)
    top = max(found, key=lambda value: value.mean)
    return [value is not None and (value.mean == top.mean or value.overlaps(top)) for value in column]


def number(value: float, digits: int) -> str:
    """Format a number with a typographic minus sign; what rounds to zero has no sign, and a huge number a power."""
    written = f"{value:.3e}" if abs(value) >= HUGE else f"{value:z.{digits}f}"
    return written.replace("-", "−")
