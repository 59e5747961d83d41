"""The log of our own method's development: what was tried, on validation images, and what followed.

    python benchmarks/flagship.py run --data DIR   # the missing runs of flagship.toml; SIGTERM stops after a round
    python benchmarks/flagship.py table            # docs/flagship-log.md

A record is one JSON file under ``results/flagship/``, in the form of the board's.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.report.paired import paired, with_interval
from board_rows import HERE
from pages import filled, markdown, mean_std
from runs import Runs, command

RESULTS = HERE / "results" / "flagship"
PAGE = HERE.parent / "docs" / "flagship-log.md"
BEGIN, END = "<!-- made by benchmarks/flagship.py: begin -->", "<!-- made by benchmarks/flagship.py: end -->"
HEADER = ("try", "hypothesis", "probe", "less its base", "seeds", "decision")


class Log(Runs):
    """The tries and their records.

    Args:
        results: Folder of the records.
        table: Content of flagship.toml; None to read the file.
    """

    def __init__(self, results: Path = RESULTS, table: Mapping[str, Any] | None = None) -> None:
        self.table = table or tomllib.loads((HERE / "flagship.toml").read_text("utf-8"))
        runs = {
            one["name"]: {
                "recipe": self.table["recipe"],
                "settings": [*self.table["settings"], *one["settings"]],
            }
            for one in self.table["tries"]
        }
        super().__init__(results, runs, self.table["seeds"])


def rows(log: Log) -> Iterator[list[str]]:
    """One row for each try that has a record."""
    for one in log.table["tries"]:
        if not log.records(one["name"]):
            continue
        own = log.probed(one["name"])
        base = log.probed(one["base"]) if "base" in one else {}
        n, mean, half = paired(own, base)
        difference = f"{with_interval(mean, half)} to `{one['base']}`" if n else "–"
        shown = mean_std(list(own.values()), 2) if own else "failed"
        decision = one.get("decision", "open")
        yield [f"`{one['name']}`", one["says"], shown, difference, str(len(own)), decision]


def made(log: Log) -> str:
    """The generated part of the page."""
    return "\n".join(markdown(HEADER, list(rows(log)))).rstrip()


def write(log: Log, page: Path = PAGE) -> None:
    """Update the page."""
    page.write_text(filled(page.read_text("utf-8"), made(log), BEGIN, END), "utf-8")


if __name__ == "__main__":
    sys.exit(command(__doc__, Path("runs/flagship"), Log, write))
