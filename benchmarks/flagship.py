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
from board_rows import HERE, SELECT
from pages import filled, markdown, mean_std
from runs import Runs, arguments

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

    def points(self, name: str) -> dict[int, float]:
        """A try's probe accuracy in %, by seed; a run that failed has none."""
        found = self.records(name).items()
        return {seed: 100 * one["evaluation"][SELECT] for seed, one in found if SELECT in one["evaluation"]}


def rows(log: Log) -> Iterator[list[str]]:
    """One row for each try that has a record."""
    for one in log.table["tries"]:
        if not log.records(one["name"]):
            continue
        own = log.points(one["name"])
        base = log.points(one["base"]) if "base" in one else {}
        n, mean, half = paired(own, base)
        difference = f"{with_interval(mean, half)} to `{one['base']}`" if n else "–"
        shown = mean_std(list(own.values()), 2) if own else "failed"
        decision = one.get("decision", "open")
        yield [f"`{one['name']}`", one["says"], shown, difference, str(len(own)), decision]


def made(log: Log) -> str:
    """The generated part of the page."""
    return "\n".join(markdown(HEADER, list(rows(log)))).rstrip()


def main() -> int:
    """Run the command."""
    args = arguments(__doc__, Path("runs/flagship"))
    log = Log()
    if args.command == "table":
        PAGE.write_text(filled(PAGE.read_text("utf-8"), made(log), BEGIN, END), "utf-8")
    else:
        log.make(args.work, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
