"""Numbers and tables of the pages of Markdown that the benchmarks write."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

NUMBER = re.compile(r"\W*\d|–?$|failed$")  # **1.2**, −0.3, +0.1 …, or no number


def mean_std(numbers: Sequence[float], digits: int) -> str:
    """Format mean ± standard deviation (n − 1)."""
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines of Markdown, columns of numbers to the right, with an empty line at the end."""
    columns = zip(*rows, strict=True) if rows else [[""]] * len(header)
    ruler = ["---:" if all(map(NUMBER.match, column)) else "---" for column in columns]
    return [*(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows)), ""]


def filled(text: str, made: str, begin: str, end: str) -> str:
    """Replace the generated text between a page's markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    before, _, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not ended:
        raise ValueError(f"the page needs the line {begin!r}, and below it the line {end!r}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"
