"""Differences between runs that are paired by seed, and the pages of Markdown that show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from scipy import stats


def paired(row: Mapping[int, float], base: Mapping[int, float]) -> tuple[int, float, float | None]:
    """Number of common seeds, mean difference, and half of its 95 % confidence interval (Student's t)."""
    differences = [row[seed] - base[seed] for seed in sorted(row.keys() & base.keys())]
    n = len(differences)
    if n < 2:
        return n, differences[0] if differences else math.nan, None
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return n, statistics.fmean(differences), half


def verdict(n: int, mean: float, half: float | None) -> str:
    """Format a paired difference."""
    if half is None:
        return f"{signed(mean)}, cannot tell (one seed)" if n else "–"
    interval = f"{signed(mean)} [{signed(mean - half)}, {signed(mean + half)}]"
    return f"{interval}, cannot tell" if abs(mean) <= half else interval


def signed(number: float) -> str:
    """Format a number with its sign and a typographic minus."""
    return f"{number:+.2f}".replace("-", "−")


def mean_std(numbers: Sequence[float], digits: int) -> str:
    """Format mean ± standard deviation (n − 1)."""
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines of Markdown, with an empty line at the end."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return [*(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows)), ""]


def filled(text: str, made: str, begin: str, end: str) -> str:
    """Replace the generated text between a page's markers."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
