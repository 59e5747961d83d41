"""The board's rows, the training runs that each row needs, and the existing records."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "board"
SELECT = "probe/accuracy"  # selects the best tuning run, on the validation images

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row; board.toml describes its keys."""

    name: str
    title: str
    method: str = ""
    base: str = ""
    settings: Sequence[str] = ()
    temperature: Sequence[str] = ()
    line: bool = False
    choice_of: str = ""
    tuning: Sequence[str] = ()
    short: Sequence[str] = ()
    long: Sequence[str] = ()

    def at(self, point: Sequence[str]) -> tuple[str, ...]:
        """Settings of the row with a learning rate and a temperature."""
        return (f"method.name={self.method}", *self.settings, *point)


@dataclass(frozen=True)
class Entry:
    """One training run.

    Attributes:
        name: Name of its record's file under the results, and of its run's folder.
        recipe: A preset.
        seed: Seed of the run.
        settings: ``key=value`` settings that override the preset's.
        point: The settings of the learning rate and the temperature.
    """

    name: str
    recipe: str
    seed: int
    settings: Sequence[str]
    point: Sequence[str]


def load_record(results: Path, name: str) -> Record | None:
    """Load an entry's record from a folder of records; None if it does not exist."""
    path = results / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


class Board:
    """The rows and the existing records.

    Args:
        results: Folder of the records.
        table: Content of board.toml; None to read the file.
    """

    def __init__(self, results: Path = RESULTS, table: Mapping[str, Any] | None = None) -> None:
        table = table or tomllib.loads((HERE / "board.toml").read_text("utf-8"))
        self.results = results
        self.tuning, self.protocols, self.objectives = (
            table["tuning"],
            table["protocols"],
            table["objectives"],
        )
        self.own, self.papers = table.get("own"), table.get("papers", ())
        self.ablation = table.get("ablation", ())
        self.rows = {row["name"]: Row(**row) for row in table["rows"]}

    def is_own(self, name: str) -> bool:
        """Whether a row is our own, or a change of it."""
        return name == self.own or any(name == changed for changed, _ in self.ablation)

    def record(self, name: str) -> Record | None:
        """Load an entry's record; None if it does not exist."""
        return load_record(self.results, name)

    def resolve(self, row: Row) -> Row | None:
        """Return a row with its method; None until all objectives from which it is chosen are tuned."""
        if row.method:
            return row
        scores = {}
        for name in self.objectives:
            if (chosen := self.choice(self.rows[name])) is None:
                return None
            scores[name] = self.score(chosen)
        best = self.rows[max(scores, key=lambda name: scores[name])]
        settings = (*best.settings, *row.settings)
        return replace(
            row, method=best.method, base=best.name, settings=settings, temperature=best.temperature
        )

    def tunings(self, row: Row) -> list[Entry]:
        """Tuning runs of a row that has a method."""
        if row.choice_of:
            other = self.resolve(self.rows[row.choice_of])
            return self.tunings(other) if other else []
        entries = []
        for rate, tau in product(
            self.tuning["rates"], self.tuning["temperatures"] if row.temperature else [None]
        ):
            name = f"tuning/{row.name}-lr{rate}" + ("" if tau is None else f"-t{tau}")
            point = (f"train.lr={rate}", *(f"{key}={tau}" for key in row.temperature))
            settings = (*row.at(point), *self.tuning["settings"], *row.tuning)
            entries.append(Entry(name, self.tuning["recipe"], self.tuning["seed"], settings, point))
        return entries

    def score(self, entry: Entry) -> float:
        """Score of a finished tuning run; a failed one is never chosen."""
        record = self.record(entry.name) or {}
        return float(record.get("evaluation", {}).get(SELECT, -math.inf))

    def choice(self, row: Row) -> Entry | None:
        """Best tuning run, the first of equals; None until all are finished."""
        entries = self.tunings(row)
        missing = any(self.record(entry.name) is None for entry in entries)
        return None if missing else max(entries, key=self.score)

    def entries(self, row: Row, protocol: str) -> Iterator[Entry]:
        """Training runs of a row in order, as far as known: the final runs need the results of all tuning runs."""
        if not row.method:
            for name in self.objectives:
                yield from self.tunings(self.rows[name])
        resolved = self.resolve(row)
        if resolved is None:
            return
        yield from self.tunings(resolved)
        chosen = self.choice(resolved)
        if chosen is None or self.score(chosen) == -math.inf:
            return
        for seed in self.protocols[protocol]["seeds"]:
            name, recipe = f"{protocol}/{row.name}-seed{seed}", self.protocols[protocol]["recipe"]
            settings = (*resolved.at(chosen.point), *getattr(row, protocol))
            yield Entry(name, recipe, seed, settings, chosen.point)

    def missing(
        self, protocol: str, passed: Sequence[str] = (), rows: Sequence[str] = (), seed: int | None = None
    ) -> Entry | None:
        """Find the first entry without a record, of all rows or only of some rows or one seed.

        Args:
            protocol: ``"short"`` or ``"long"``.
            passed: Names of entries to skip.
            rows: Names of the rows; all if empty.
            seed: Seed of the final run, whose tuning runs are included; None for all seeds.
        """
        for name in rows or self.rows:
            for entry in self.entries(self.rows[name], protocol):
                wanted = seed is None or entry.name.startswith("tuning/") or entry.seed == seed
                if wanted and entry.name not in passed and self.record(entry.name) is None:
                    return entry
        return None

    def finals(self, name: str, protocol: str) -> dict[int, Record]:
        """Final records of a row by seed, including failed runs."""
        found = {
            seed: self.record(f"{protocol}/{name}-seed{seed}") for seed in self.protocols[protocol]["seeds"]
        }
        return {seed: record for seed, record in found.items() if record}
