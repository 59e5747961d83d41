"""The tables of the docs that are generated from code; ``python -m tests.docs_tables`` writes them into the pages.

A generated table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from atoll.evaluation.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def metrics() -> list[list[str]]:
    """Every measurement."""
    rows = [["key", "heading", "better", "meaning", "function"]]
    for metric in METRICS:
        rows.append(
            [
                f"`{metric.key}`",
                metric.title,
                metric.better or "neither",
                metric.meaning,
                f"`{metric.function}`",
            ]
        )
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {"metrics": metrics}


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
