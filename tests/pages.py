"""The pages in docs/, as tests read them: their text, tables and code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")
}


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """A page's tables: the last line of text before each, its header, its rows."""
    before, lines = "", iter(text.splitlines())
    for line in lines:
        if not line.startswith("|"):
            before = before if not line or line.startswith("<!-- ") else line
            continue
        header, rows = cells(line), []
        next(lines)  # the rule
        for row in lines:
            if not row.startswith("|"):
                break
            rows.append(cells(row))
        yield before, header, rows


def all_tables(first: str) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """All pages' tables whose header begins so: page, line before, header, rows."""
    for page, text in PAGES.items():
        for before, header, rows in tables(text):
            if header[0] == first:
                yield page, before, header, rows


def fences(kind: str) -> list[Any]:
    """All pages' code blocks of a kind, each with the page and its place in it."""
    return [
        pytest.param(block, id=f"{page}-{i}")
        for page, text in sorted(PAGES.items())
        for i, block in enumerate(re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    ]
