"""Lists of what Atoll includes: recipes, methods, components. Nothing here imports PyTorch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from atoll.recipe.table import WORDS, catalogue, presets, read_table


def presets_table() -> Table:
    """Table of the recipes: name, method, content."""
    rows = []
    for name, text in presets().items():
        table = read_table(name)
        method = table.get("method", {}).get("name", "")
        rows.append([name, method, _first_sentence(text) or table.get("title", "")])
    return _table("", ["name", "method", "content"], rows)


def _first_sentence(text: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment = itertools.takewhile(lambda line: line.startswith("# ") and line[2] != " ", text.splitlines())
    words = " ".join(line[2:] for line in comment)
    return re.split(r"(?<=[.)])\s+(?=[A-Z])", words)[0]


def components_table() -> Table:
    """Table of the components: name, kind, meaning."""
    found = catalogue()
    options = found["schema"]["properties"]["options"]["properties"]
    rows = [
        [name, word, options.get(name, {}).get("description", "")]
        for axis, word in WORDS.items()
        for name in found["components"][axis]
    ]
    table = _table("", ["name", "kind", "what it is"], rows)
    table.caption = (
        "a recipe has them under [method], their options under [options.NAME]; your own: atoll new method"
    )
    table.caption_justify = "left"
    return table


def methods_tables(listing: Mapping[str, Sequence[Mapping[str, object]]]) -> Iterator[Table]:
    """Tables of methods, one for each family."""
    for family, methods in listing.items():
        head = ["name", "method", "paper", "leaves the client in addition to weights", "client state"]
        keys = ("name", "title", "paper", "egress", "keeps")
        cells = ([method[key] for key in keys] for method in methods)
        rows = [["; ".join(cell) if isinstance(cell, list) else str(cell) for cell in row] for row in cells]
        yield _table(family, head, rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for heading in head:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
