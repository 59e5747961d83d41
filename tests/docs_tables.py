"""The tables of the docs that are generated from code; ``python -m tests.docs_tables`` writes them into the pages.

A generated table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.evaluation.client_tests import PREFIX
from atoll.evaluation.metrics import METRICS
from atoll.evaluation.protocols import FINE_TUNES
from atoll.methods.method import Method
from atoll.methods.registry import METHODS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
T_975 = 4.303  # Student's t at 97.5 % for three seeds
Runs = Mapping[str, Mapping[str, float]]  # measurements by seed
DOCS = Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def metrics() -> list[list[str]]:
    """Every measurement; one row for those that differ in the protocol's name alone."""
    rows = [["key", "heading", "better", "meaning", "function"]]
    for metric in METRICS:
        row = [
            f"`{metric.key}`",
            metric.title,
            metric.better or "neither",
            metric.meaning,
            f"`{metric.function}`",
        ]
        for said, word in _names(metric.key).items():
            row[:4] = [cell.replace(said, word) for cell in row[:4]]
        if row not in rows:
            rows.append(row)
    return rows


def _names(key: str) -> dict[str, str]:
    """What stands for a protocol in the texts of its measurements, and the word for any protocol."""
    protocol = key.removeprefix(PREFIX).split("/")[0]
    if key.startswith(PREFIX):
        return {protocol: "PROTOCOL", "kNN": "PROTOCOL"}
    kind, _, name = protocol.partition("-")
    if kind == "finetune":
        return {f"with {FINE_TUNES[protocol].labelled}": "by that protocol", name: "NAME"}
    return {name: "NAME"} if name else {}


def differences() -> list[list[str]]:
    """Each method of the CIFAR-10 table against the plain method of its objective, paired by seed."""
    runs = json.loads((RESULTS / "cifar10-table.json").read_text())
    plain = {method.objective: method.title for method in METHODS.values() if _plain(method)}
    rows = [["method", "base", "kNN, points", "probe, points", "the probe says"]]
    for method in METHODS.values():
        base = plain.get(method.objective, "")
        if method.title not in runs or base not in runs or method.title == base:
            continue
        knn, probe = (
            _paired(runs[method.title], runs[base], key) for key in ("knn/accuracy", "probe/accuracy")
        )
        says = "cannot tell" if abs(probe[0]) <= T_975 * probe[1] else "better" if probe[0] > 0 else "worse"
        rows.append(
            [method.title, base, *(f"{signed(mean)} ± {error:.2f}" for mean, error in (knn, probe)), says]
        )
    return rows


def _plain(method: Method) -> bool:
    """Whether nothing but the objective, and FedAvg of all weights, makes a method."""
    parts = (method.merge.name, method.aggregation.name, method.server.name)
    return not method.terms and parts == ("replace", "fedavg", "direct")


def _paired(row: Runs, base: Runs, key: str) -> tuple[float, float]:
    """Mean difference over the common seeds in points, and its standard error."""
    seeds = sorted(row.keys() & base.keys())
    points = [100 * (row[seed][key] - base[seed][key]) for seed in seeds]
    return statistics.fmean(points), statistics.stdev(points) / math.sqrt(len(points))


def signed(number: float) -> str:
    """A number with its sign and a typographic minus."""
    return f"{number:+.2f}".replace("-", "−")


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "metrics": metrics,
    "differences": differences,
}


def generated(text: str) -> str:
    """A page with its generated tables as the code has them now."""

    def table(match: re.Match[str]) -> str:
        header, *rows = TABLES[match[2]]()
        lines = [f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows)]
        return f"{match[1]}\n{''.join(lines)}\n{match[3]}"

    return MARKED.sub(table, text)


if __name__ == "__main__":
    for page in DOCS.rglob("*.md"):
        page.write_text(generated(page.read_text()))
