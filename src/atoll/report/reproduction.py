"""The record of a reproduced table in Markdown and in the terminal: our numbers beside the published ones."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from atoll.report.numbers import UNMEASURED, markdown_table, mean_std
from atoll.report.terminal import terminal_table


def cells(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and its rows; each of our values is followed by the published one, if there are any."""
    columns = list(record["rows"][0]["values"])
    beside = ("paper",) if record["published"] else ()
    header = ["", *(heading for column in columns for heading in (column, *beside))]
    digits = {
        column: max(_digits(row["values"][column]["published"]) for row in record["rows"])
        for column in columns
    }
    rows = []
    for row in record["rows"]:
        shown = [row["label"]]
        for column, value in row["values"].items():
            theirs = (value["published"] or UNMEASURED,) if beside else ()
            shown += [mean_std(value["ours"], digits[column]), *theirs]
        rows.append(shown)
    return header, rows


def _digits(published: str) -> int:
    """Digits after the point; without a published value, as many as the papers have."""
    return len(published.partition(".")[2]) if published else 2


def remarks(record: dict[str, Any]) -> list[str]:
    """The lines below the table. The differences from the paper's setting come first."""
    changed = [f"{key} = {words}" for key, words in record["changed"].items()]
    warning = (
        "NOT the paper's setting, so this is no reproduction of its numbers:"
        if record["published"]
        else "NOT the table's own setting:"
    )
    return [
        *([warning, *changed] if changed else []),
        *(f"Failed: {why}" for why in record["failures"].values()),
        *record["notes"],
    ]


def markdown(record: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = markdown_table(*cells(record))
    notes = [f"- {note}" for note in remarks(record)]
    return "\n".join([f"# {record['title']}", "", *lines, "", *notes, f"- Atoll {record['version']}."]) + "\n"


def shown(record: dict[str, Any]) -> Group:
    """The table for a terminal."""
    return terminal_table(*cells(record), remarks(record), record["title"])
