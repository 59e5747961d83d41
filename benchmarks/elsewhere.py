"""Rows of the board in other federations: the table of docs/methods/lagoon.md, "Elsewhere".

    python benchmarks/elsewhere.py run --data DIR   # the missing runs; SIGTERM stops after a round
    python benchmarks/elsewhere.py table            # docs/methods/lagoon.md

The federations are in ``elsewhere.toml``. DIR holds ``cifar10/``, ``pacs/`` and the ``images/`` of
examples/solar_cells, as ATOLL_DATA does. A record is one JSON file under ``results/elsewhere/``, in the form of the
board's.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.report.paired import paired, verdict
from board_rows import HERE, Board
from pages import filled, markdown, mean_std
from runs import Runs, command

RESULTS = HERE / "results" / "elsewhere"
PAGE = HERE.parent / "docs" / "methods" / "lagoon.md"
BEGIN, END = (
    "<!-- made by benchmarks/elsewhere.py: begin -->",
    "<!-- made by benchmarks/elsewhere.py: end -->",
)


class Elsewhere(Runs):
    """The runs and their records.

    Args:
        results: Folder of the records.
        table: Content of elsewhere.toml; None to read the file.
        board: The board, whose rows and rates they have; a row without its tuning runs has no runs here.
    """

    def __init__(
        self, results: Path = RESULTS, table: Mapping[str, Any] | None = None, board: Board | None = None
    ) -> None:
        self.table = table or tomllib.loads((HERE / "elsewhere.toml").read_text("utf-8"))
        self.board = board or Board()
        runs = {}
        for place in self.table["federations"]:
            for name in self.table["methods"]:
                row = self.board.rows[name]
                if chosen := self.board.choice(row):
                    rounds = place["rounds"] * (place["clients"] if name in self.table["turns"] else 1)
                    of_row = row.at(chosen.point)
                    settings = [*place["settings"], *of_row, f"train.rounds={rounds}"]
                    recipe = place["recipe"]
                    recipe = str(HERE.parent / recipe) if recipe.endswith(".toml") else recipe
                    runs[f"{place['name']}-{name}"] = {"recipe": recipe, "settings": settings}
        super().__init__(results, runs, self.table["seeds"])


def rows(study: Elsewhere) -> Iterator[list[str]]:
    """A row for each federation that has a record: all methods, and the last one less each of the others."""
    *others, own = study.table["methods"]
    for place in study.table["federations"]:
        found = {name: study.probed(f"{place['name']}-{name}") for name in (*others, own)}
        if any(found.values()):
            shown = [mean_std([*numbers.values()], 2) for numbers in found.values()]
            against = (paired(found[own], found[name]) for name in others)
            yield [place["title"], *shown, *(verdict(*one) for one in against)]


def made(study: Elsewhere) -> str:
    """The generated part of the page."""
    *others, own = (study.board.rows[name].title for name in study.table["methods"])
    header = ("federation", *others, own, *(f"{own} less {other}" for other in others))
    found = list(rows(study))
    return "\n".join(markdown(header, found)).rstrip() if found else "No run is finished yet."


def write(study: Elsewhere, page: Path = PAGE) -> None:
    """Update the page."""
    page.write_text(filled(page.read_text("utf-8"), made(study), BEGIN, END), "utf-8")


if __name__ == "__main__":
    sys.exit(command(__doc__, Path("runs/elsewhere"), Elsewhere, write))
