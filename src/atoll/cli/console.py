"""Terminal output: the console, and tables of results. Nothing here imports PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from atoll.core.text import clean


class _Console(Console):
    """A console that cleans texts, and that raises the error of a closed output.

    Rich's own passes on control characters, and would end the program with code 1.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render without the control characters of texts; they have no width in rich's tables."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_cleaned(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _cleaned(text: str) -> str:
    return "\n".join(clean(line, "") for line in text.split("\n"))


def make_console(width: int = 120) -> Console:
    """Create a console on the standard output that does not interpret markup in texts.

    Args:
        width: Width of the output if it is not a terminal.
    """
    return _Console(file=sys.stdout, width=None if sys.stdout.isatty() else width, markup=False, emoji=False)


def results_table(results: Mapping[str, Any]) -> Table:
    """Table of an evaluation: the measurements, printed as in the report, and the constants behind them."""
    from atoll.evaluation.metrics import METRICS, measured
    from atoll.report.numbers import mean_std

    metrics = {metric.key: metric for metric in (*METRICS, *measured([results]))}
    table = Table(show_header=False, show_edge=False)
    for key, value in results.items():
        metric = metrics.get(key)
        if metric and (printed := metric.values([results])):
            table.add_row(metric.title, mean_std(printed, metric.digits))
        elif not isinstance(value, list) and value != "":  # of constants, those that apply
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def detection_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Table of detection's average precision, one line for each seed."""
    from atoll.report.detection import HEADINGS, precision_cells

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("start", "seed", *HEADINGS):
        table.add_column(heading)
    for record in records:
        table.add_row(record["start"], str(record["seed"]), *precision_cells([record]))
    return table
