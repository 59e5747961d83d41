"""A reproduced table in Markdown and in the terminal, with the published values."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from atoll.report.formats import markdown_table
from atoll.report.html import Html, bullets, join, table, tag
from atoll.report.numbers import UNMEASURED, mean_std
from atoll.report.terminal import terminal_table
from atoll.report.wording import without_folders


def cells(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Make the table's header and its rows; if there are published values, each follows the measured one.

    A value of fewer seeds than others have, because a run failed, is shown with their number.
    """
    columns = list(record["rows"][0]["values"])
    paper = ("paper",) if record["published"] else ()
    header = ["row", *(heading for column in columns for heading in (column, *paper))]
    digits = {
        column: max(_digits(row["values"][column]["published"]) for row in record["rows"])
        for column in columns
    }
    counts = [len(value["ours"]) for row in record["rows"] for value in row["values"].values()]
    seeds = max(counts, default=0)
    rows = []
    for row in record["rows"]:
        shown = [row["label"]]
        for column, value in row["values"].items():
            published = (value["published"] or UNMEASURED,) if paper else ()
            fewer = 0 < len(value["ours"]) < seeds
            count = f" ({len(value['ours'])} of {seeds} seeds)" if fewer else ""
            shown += [mean_std(value["ours"], digits[column]) + count, *published]
        rows.append(shown)
    return header, rows


def _digits(published: str) -> int:
    """Number of digits after the point; 2, as in the papers, without a published value."""
    return len(published.partition(".")[2]) if published else 2


def warning(record: dict[str, Any]) -> str:
    """Sentence above the differences from the paper's setting; empty if there are none."""
    if not record["changed"]:
        return ""
    named = record["scale_about"] and f" (scale {record['scale']}: {record['scale_about']})"
    if record["of_paper"]:
        return f"NOT the paper's setting{named}, so this does not reproduce its results:"
    return f"NOT the table's setting{named}:"


def remarks(record: dict[str, Any]) -> list[str]:
    """Lines below the table; the differences from the paper's setting are the first ones."""
    lines = [warning(record), *(f"{key} = {words}" for key, words in record["changed"].items())]
    return [
        *filter(None, lines),
        *(f"Failed: {why}" for why in record["failures"].values()),
        *record["notes"],
    ]


def markdown(record: dict[str, Any]) -> str:
    """Format the table as Markdown."""
    lines = markdown_table(*cells(record))
    notes = [f"- {note}" for note in remarks(record)]
    figure = record.get("figure")
    says = [f"The paper: {figure['says']}", ""] if figure else []
    says += ["![our figure](figure.svg)", ""] if figure and figure["svg"] else []
    notes = [*(f"- {remark}" for remark in (figure_remarks(figure) if figure else ())), *notes]
    title = [f"# {record['title']}", "", *says]
    return "\n".join([*title, *lines, "", *notes, f"- Atoll {record['version']}."]) + "\n"


def shown(record: dict[str, Any]) -> Group:
    """Format the table for a terminal."""
    return terminal_table(*cells(record), remarks(record), record["title"])


def section(record: dict[str, Any]) -> Html:
    """Format the table and its remarks for the report's page; the warning stands above the table."""
    header, rows = cells(record)
    alarm = warning(record)
    above = [tag("p", tag("strong", alarm.rstrip(":") + "."), class_="note")] if alarm else []
    below = bullets([without_folders(line) for line in remarks(record)[1 if alarm else 0 :]])
    parts = [*above, *_figure(record), table(record["title"], header, rows), below]
    return tag("section", join(parts), aria_label="Comparison")


def _figure(record: dict[str, Any]) -> list[Html]:
    """Format a figure: the paper's statement, what its panels remark, and the drawing."""
    if "figure" not in record:
        return []
    figure = record["figure"]
    drawing = [Html(tag("div", Html(figure["svg"]), class_="scroll plot"))] if figure["svg"] else []
    says = tag("p", tag("strong", "The paper: "), figure["says"])
    ours = tag("p", tag("strong", "Ours:"))
    return [says, ours, *drawing, bullets(figure_remarks(figure))]


def figure_remarks(figure: dict[str, Any]) -> list[str]:
    """Sentences of a figure's panels, each with the panel's title, and which panels are not drawn."""
    said = [
        f"{panel['title']}: {remark}" if panel["title"] else remark
        for panel in figure["panels"]
        for remark in panel.get("remarks", ())
    ]
    if empty := ", ".join(dict.fromkeys(figure["empty"])):
        said.append(f"Panels that are not drawn, because the rows have no result for them: {empty}.")
    return said
