"""Training runs that a table lists, and their records: one JSON file a run, in the form of the board's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import board
from board_rows import SELECT, Entry, Record, load_record


class Runs:
    """Runs by name, each with a recipe and settings, for several seeds.

    Args:
        results: Folder of the records.
        runs: ``recipe`` and ``settings`` of each run, by its name; ``{seed}`` in a setting is the seed.
        seeds: The seeds.
    """

    def __init__(self, results: Path, runs: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> None:
        self.results = results
        self.runs = runs
        self.seeds = seeds

    def entries(self) -> Iterator[Entry]:
        """The training runs, seed by seed."""
        for seed in self.seeds:
            for name, one in self.runs.items():
                settings = [setting.replace("{seed}", str(seed)) for setting in one["settings"]]
                yield Entry(f"{name}-seed{seed}", one["recipe"], seed, settings, ())

    def record(self, name: str) -> Record | None:
        """Load a run's record; None if it does not exist."""
        return load_record(self.results, name)

    def records(self, run: str) -> dict[int, Record]:
        """The records of a run, by seed."""
        found = {seed: self.record(f"{run}-seed{seed}") for seed in self.seeds}
        return {seed: record for seed, record in found.items() if record}

    def probed(self, run: str) -> dict[int, float]:
        """A run's probe accuracy in %, by seed; a run that failed has none."""
        found = self.records(run).items()
        return {seed: 100 * one["evaluation"][SELECT] for seed, one in found if SELECT in one["evaluation"]}

    def missing(self, start: str = "") -> Entry | None:
        """The first run without a record, of those whose name starts so."""
        missing = (entry for entry in self.entries() if self.record(entry.name) is None)
        return next((entry for entry in missing if entry.name.startswith(start)), None)

    def make_one(self, entry: Entry, work: Path, callback: board.StopAfterRound) -> None:
        """Make one run and save its record."""
        board.run_and_save(self.results, entry, work, ["engine.threads=1"], callback)

    def make(self, work: Path, start: str = "") -> None:
        """Make the missing runs; SIGTERM stops after a round."""
        callback = board.StopAfterRound()
        while not callback.stop and (entry := self.missing(start)):
            try:
                self.make_one(entry, work, callback)
            except board.StopAsked:
                break


R = TypeVar("R", bound=Runs)


def command(description: str | None, work: Path, runs: Callable[[], R], write: Callable[[R], None]) -> int:
    """Run the command ``run`` or ``table``; ``--data`` sets ATOLL_DATA.

    Args:
        description: Help of the command.
        work: Default folder of the runs' folders.
        runs: Creates the runs.
        write: Updates the page of the runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="table", choices=("run", "table"))
    parser.add_argument("--only", default="", metavar="START", help="only runs whose name starts so")
    parser.add_argument("--data", type=Path, help="the folder of the images; default: ATOLL_DATA")
    parser.add_argument("--work", type=Path, default=work, help="for the runs' folders")
    args = parser.parse_args()
    if args.data:
        os.environ["ATOLL_DATA"] = str(args.data.absolute())
    if args.command == "table":
        write(runs())
    else:
        runs().make(args.work, args.only)
    return 0
