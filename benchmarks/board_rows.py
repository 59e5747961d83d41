"""The board's rows, the training runs that each needs, and the records of those that there are."""

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
SELECT = "probe/accuracy"  # a tuning run is chosen by it, measured on the validation images

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row; board.toml says what its keys mean."""

    name: str
    title: str
    method: str = ""
    base: str = ""
    settings: Sequence[str] = ()
    temperature: Sequence[str] = ()
    line: bool = False
    choice_of: str = ""
    short: Sequence[str] = ()
    long: Sequence[str] = ()


@dataclass(frozen=True)
class Entry:
    """One training run.

    Attributes:
        name: of its record's file under the results, and of its run's folder.
        recipe: a preset.
        seed: of the run.
        settings: ``key=value``, laid over the preset.
        point: the rate and the temperature among them.
    """

    name: str
    recipe: str
    seed: int
    settings: Sequence[str]
    point: Sequence[str]


class Board:
    """The rows and the records that there are.

    Args:
        results: the records' folder.
        table: instead of board.toml.
    """

    def __init__(self, results: Path = RESULTS, table: Mapping[str, Any] | None = None) -> None:
        table = table or tomllib.loads((HERE / "board.toml").read_text("utf-8"))
        self.results = results
        self.tuning, self.protocols, self.objectives = (
            table["tuning"],
            table["protocols"],
            table["objectives"],
        )
        self.rows = {row["name"]: Row(**row) for row in table["rows"]}

    def record(self, name: str) -> Record | None:
        """An entry's record, if it has one."""
        path = self.results / f"{name}.json"
        return json.loads(path.read_text("utf-8")) if path.is_file() else None

    def resolve(self, row: Row) -> Row | None:
        """The row with its method; None while the objectives that it chooses from are not all tuned."""
        if row.method:
            return row
        chosen = {name: self.choice(self.rows[name]) for name in self.objectives}
        if None in chosen.values():
            return None
        best = self.rows[max(self.objectives, key=lambda name: self.score(chosen[name]))]
        settings = (*best.settings, *row.settings)
        return replace(
            row, method=best.method, base=best.name, settings=settings, temperature=best.temperature
        )

    def tunings(self, row: Row) -> list[Entry]:
        """The tuning runs of a row that has its method."""
        if row.choice_of:
            other = self.resolve(self.rows[row.choice_of])
            return self.tunings(other) if other else []
        entries = []
        for rate, tau in product(
            self.tuning["rates"], self.tuning["temperatures"] if row.temperature else [None]
        ):
            name = f"tuning/{row.name}-lr{rate}" + ("" if tau is None else f"-t{tau}")
            point = (f"train.lr={rate}", *(f"{key}={tau}" for key in row.temperature))
            settings = (f"method.name={row.method}", *row.settings, *point, *self.tuning["settings"])
            entries.append(Entry(name, self.tuning["recipe"], self.tuning["seed"], settings, point))
        return entries

    def score(self, entry: Entry) -> float:
        """What a finished tuning run is chosen by; one that came to nothing is never chosen."""
        record = self.record(entry.name) or {}
        return record.get("evaluation", {}).get(SELECT, -math.inf)

    def choice(self, row: Row) -> Entry | None:
        """The best tuning run, the first of equals; None while one is missing."""
        entries = self.tunings(row)
        missing = any(self.record(entry.name) is None for entry in entries)
        return None if missing else max(entries, key=self.score)

    def entries(self, row: Row, protocol: str) -> Iterator[Entry]:
        """A row's training runs in order, as far as the records tell: the seeds need all of its tuning runs."""
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
            settings = (f"method.name={resolved.method}", *resolved.settings, *chosen.point)
            yield Entry(name, recipe, seed, (*settings, *getattr(row, protocol)), chosen.point)

    def missing(
        self, protocol: str, passed: Sequence[str] = (), rows: Sequence[str] = (), seed: int | None = None
    ) -> Entry | None:
        """The first entry without a record; of some rows, or of one seed and its tuning runs, where they are given.

        Args:
            protocol: short or long.
            passed: names of entries to pass over.
            rows: names; none: all.
            seed: of the final run.
        """
        for name in rows or self.rows:
            for entry in self.entries(self.rows[name], protocol):
                wanted = seed is None or entry.name.startswith("tuning/") or entry.seed == seed
                if wanted and entry.name not in passed and self.record(entry.name) is None:
                    return entry
        return None

    def finals(self, name: str, protocol: str) -> dict[int, Record]:
        """A row's final records by seed, those that came to nothing included."""
        found = {
            seed: self.record(f"{protocol}/{name}-seed{seed}") for seed in self.protocols[protocol]["seeds"]
        }
        return {seed: record for seed, record in found.items() if record}
