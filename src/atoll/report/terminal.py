"""Format of the tables that commands print in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text


def terminal_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str] = (),
    title: str = "",
    numbers: bool = True,
) -> Group:
    """Make a table with its title above and its notes below.

    Args:
        header: Headings of the columns.
        rows: Rows of cells, printed without interpreting markup.
        notes: Notes, one per line.
        title: The title; empty for none.
        numbers: Whether all columns except the first contain numbers.
    """
    table = Table(show_edge=False, pad_edge=False)
    for i, heading in enumerate(header):
        justify: JustifyMethod = "right" if numbers and i else "left"
        table.add_column(Text(heading), overflow="fold", no_wrap=i == 0 and not numbers, justify=justify)
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(*([Text(title)] if title else []), table, *map(Text, notes))
