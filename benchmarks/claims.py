"""The claims in docs/claims.md: what the papers say, what our records say, and whether they agree.

    python benchmarks/claims.py run --data DIR   # the missing runs of claims.toml; SIGTERM stops after a round
    python benchmarks/claims.py table            # docs/claims.md

DIR holds ``cifar10/``, as ATOLL_DATA does. A record is one JSON file under ``results/claims/``, in the form of the
board's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.papers.published import find_published
from atoll.report.paired import paired, signed, with_interval
from board_rows import HERE, Board
from pages import filled, markdown
from runs import Runs, command

RESULTS = HERE / "results" / "claims"
PAGE = HERE.parent / "docs" / "claims.md"
BEGIN, END = "<!-- made by benchmarks/claims.py: begin -->", "<!-- made by benchmarks/claims.py: end -->"
HEADER = ("paper", "claim", "published", "ours", "scale", "verdict", "what would tell")


class Claims(Runs):
    """The claims and the records that test them.

    Args:
        results: Folder of this file's records.
        table: Content of claims.toml; None to read the file.
    """

    def __init__(self, results: Path = RESULTS, table: Mapping[str, Any] | None = None) -> None:
        self.table = table or tomllib.loads((HERE / "claims.toml").read_text("utf-8"))
        super().__init__(results, self.table["runs"], self.table["seeds"])
        self.board = Board()
        self.ten_rounds = json.loads((HERE / "results" / "cifar10-table.json").read_text("utf-8"))

    def evaluations(self, source: str) -> dict[int, Mapping[str, float]]:
        """Evaluations by seed of a source, such as ``"board:short/ssd"``; runs that failed have none."""
        kind, _, name = source.partition(":")
        if kind == "results":
            return {int(seed): one for seed, one in self.ten_rounds[name].items()}
        if kind == "board":
            protocol, _, row = name.partition("/")
            found = self.board.finals(row, protocol)
        elif kind == "claims" and name in self.runs:
            found = self.records(name)
        else:
            raise ValueError(f"claims.toml names the source {source!r}, which does not exist")
        return {seed: record["evaluation"] for seed, record in found.items() if record["evaluation"]}

    def points(self, source: str, measure: Sequence[str]) -> dict[int, float]:
        """A source's result in points, by seed: the first of the measures, where its evaluation has one."""
        found = {
            seed: [one[key] for key in measure if key in one]
            for seed, one in self.evaluations(source).items()
        }
        return {seed: 100 * values[0] for seed, values in found.items() if values}


def total(parts: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Sum of results by seed, over the seeds that all of them have."""
    listed = list(parts)
    seeds = set.intersection(*(set(one) for one in listed))
    return {seed: sum(one[seed] for one in listed) for seed in seeds}


def published(claim: Mapping[str, Any]) -> float:
    """The paper's difference, in points."""
    keys = dict(claim["published"]["keys"])
    metric = keys.pop("metric")

    def value(one: Mapping[str, str]) -> float:
        return float(find_published({**keys, **one}, metric)["value"])

    difference = sum(map(value, claim["published"]["plus"])) - sum(map(value, claim["published"]["minus"]))
    return difference * float(claim["published"].get("points", 1))


def judge(n: int, mean: float, half: float | None) -> str:
    """What a paired difference says about a claim that it is positive."""
    if half is None:
        return "cannot tell (one seed)" if n else "not run"
    if abs(mean) <= half:
        return "cannot tell"
    return "supports" if mean > 0 else "contradicts"


def rows(claims: Claims) -> Iterator[list[str]]:
    """Rows of the table: one for each claim and scale that has a record, and one for a claim without any."""
    for claim in claims.table["claims"]:
        head = [claim["paper"], claim["says"], signed(published(claim))]
        shown = False
        for one in claim["ours"]:
            plus, minus = (
                total(claims.points(source, claim["measure"]) for source in one[side])
                for side in ("plus", "minus")
            )
            n, mean, half = paired(plus, minus)
            if n:
                scale = f"{one['scale']}, {n} seed{'s' * (n > 1)}"
                yield [*head, with_interval(mean, half), scale, judge(n, mean, half), claim["tell"]]
                shown = True
        if not shown:
            yield [*head, "–", "–", "not run", claim["tell"]]


def means(claims: Claims) -> Iterator[list[str]]:
    """Rows of the table of this file's own runs."""
    for name in claims.runs:
        found = claims.evaluations(f"claims:{name}")
        if found:
            cells = []
            for key in ("classifier/accuracy", "probe/accuracy", "knn/accuracy"):
                numbers = [100 * one[key] for one in found.values() if key in one]
                cells.append(f"{statistics.fmean(numbers):.2f}" if numbers else "–")
            yield [f"`{name}`", *cells, str(len(found))]


def difference(claims: Claims, one: Mapping[str, str], measure: str) -> str:
    """A run's paired difference to its base in one measure, with the number of seeds."""
    n, mean, half = paired(*(claims.points(f"claims:{one[side]}", [measure]) for side in ("run", "base")))
    return f"{with_interval(mean, half)} ({n})" if n else "–"


def compared(claims: Claims) -> Iterator[str]:
    """The further tables: a run's difference to its base, where both have a record."""
    for table in claims.table.get("comparisons", ()):
        found = [
            [one["what"], *(difference(claims, one, measure) for measure in table["measures"])]
            for one in table["rows"]
        ]
        header = ("change", *(measure.removesuffix("/accuracy") for measure in table["measures"]))
        yield from [f"### {table['title']}", "", "Points, with the interval and the number of seeds.", ""]
        yield from markdown(header, found)


def made(claims: Claims) -> str:
    """The generated part of the page."""
    parts = [*markdown(HEADER, list(rows(claims))), *compared(claims)]
    if own := list(means(claims)):
        parts += ["### The runs made for this page", "", "Means over the seeds, in %.", ""]
        parts += markdown(("run", "classifier", "probe", "kNN", "seeds"), own)
    return "\n".join(parts).rstrip()


def write(claims: Claims, page: Path = PAGE) -> None:
    """Update the page."""
    page.write_text(filled(page.read_text("utf-8"), made(claims), BEGIN, END), "utf-8")


if __name__ == "__main__":
    sys.exit(command(__doc__, Path("runs/claims"), Claims, write))
