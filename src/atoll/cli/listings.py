"""Lists of what Atoll includes: recipes, methods, components. Nothing here imports PyTorch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table

from atoll.recipe.table import WORDS, catalogue, presets, read_table
from atoll.report.terminal import terminal_table


def presets_table() -> Group:
    """Table of the recipes: name, method, content."""
    rows = []
    for name, text in presets().items():
        table = read_table(name)
        method = table.get("method", {}).get("name", "")
        rows.append([name, method, _first_sentence(text) or table.get("title", "")])
    return terminal_table(["name", "method", "content"], rows, numbers=False)


def _first_sentence(text: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment = itertools.takewhile(lambda line: line.startswith("# ") and line[2] != " ", text.splitlines())
    words = " ".join(line[2:] for line in comment)
    return re.split(r"(?<=[.)])\s+(?=[A-Z])", words)[0]


def components_table() -> Group:
    """Table of the components: name, kind, meaning."""
    found = catalogue()
    options = found["schema"]["properties"]["options"]["properties"]
    rows = [
        [name, word, options.get(name, {}).get("description", "")]
        for axis, word in WORDS.items()
        for name in found["components"][axis]
    ]
    note = "a recipe names them under [method], with their options under [options.NAME]; your own: atoll new method"
    return terminal_table(["name", "kind", "what it is"], rows, [note], numbers=False)


def methods_tables(listing: Mapping[str, Sequence[Mapping[str, object]]]) -> Iterator[Table]:
    """Tables of methods, one for each family."""
    for family, methods in listing.items():
        table = Table(title=family, title_justify="left", show_edge=False, pad_edge=False)
        for heading in (
            "name",
            "method",
            "paper",
            "leaves the client in addition to weights",
            "client state",
        ):
            table.add_column(heading, overflow="fold")
        for method in methods:
            cells = (method[cell] for cell in ("name", "title", "paper", "egress", "keeps"))
            table.add_row(*("; ".join(cell) if isinstance(cell, list) else str(cell) for cell in cells))
        yield table
