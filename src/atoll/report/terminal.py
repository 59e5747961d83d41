"""Format of the tables that commands print in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

BORDER = 3  # characters between two columns


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
        numbers: Whether all columns except the first contain numbers. They are never broken: a table that is too
            wide goes on below itself, with its first column again.
    """
    table: RenderableType = _Numbers(header, list(rows)) if numbers else _texts(header, rows)
    return Group(*([Text(title)] if title else []), table, *map(Text, notes))


def _texts(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for i, heading in enumerate(header):
        table.add_column(Text(heading), overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class _Numbers:
    """A table of numbers, whose first column has names, for the width at which it is printed."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._header = header
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        cells = [max((cell_len(row[i]) for row in self._rows), default=0) for i in range(len(self._header))]
        widths = [max(cell, cell_len(heading)) for cell, heading in zip(cells, self._header, strict=True)]
        if sum(widths) + BORDER * (len(widths) - 1) > options.max_width:
            # Headings may be broken between words, and names anywhere.
            words = (max(map(cell_len, heading.split()), default=0) for heading in self._header)
            widths = [max(cell, word) for cell, word in zip(cells, words, strict=True)]
            most = options.max_width - BORDER - max(widths[1:], default=0)
            widths[0] = max(1, min(widths[0], most))
        for block in _blocks(widths, options.max_width):
            table = Table(show_edge=False, pad_edge=False)
            for i in block:
                justify: JustifyMethod = "right" if i else "left"
                table.add_column(Text(self._header[i]), overflow="fold", width=widths[i], justify=justify)
            for row in self._rows:
                table.add_row(*(Text(row[i]) for i in block))
            yield table


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns that fit beside each other, with the first one in each block."""
    blocks, used = [[0]], widths[0]
    for i, width in list(enumerate(widths))[1:]:
        used += width + BORDER
        if used > room and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0] + width + BORDER
        blocks[-1].append(i)
    return blocks
